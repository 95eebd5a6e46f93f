"""A sparse scheme learns, loses no mass, skips a bad step as a whole, and goes on from its saved state bit by bit.

sparse.py FOLDER save | load: the second, on another number of ranks, goes on from what the first left.
"""

import os
import sys

import torch
from models import batch, mlp

import weft

weft.init()
rank, size = weft.rank(), weft.size()
folder, phase = sys.argv[1:]


def wrapped(seed=3, **options):
    return weft.DataParallel(mlp(seed), **{"scheme": "spardl", "density": 0.05, "bucket_mib": 0.01, **options})


def train(model, steps, optimizer=None):
    losses = []
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step, rank, rows=16, dtype=torch.float32)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        weft.all_reduce(loss.detach())
        losses.append(loss.item() / size)
    return losses


def residuals(state):
    return {row["name"]: row["values"] for row in state["rows"] if row["kind"] == "residual"}


def residual_sum(model):
    """Over ranks, of every parameter, in float64."""
    mine = residuals(model.compression.state_dict())
    sums = {}
    for name, p in model.module.named_parameters():
        part = mine[name]
        sums[name] = torch.zeros(p.numel(), dtype=torch.float64) if part is None else part.double()
        weft.all_reduce(sums[name])
    return sums


def learns():
    model = wrapped()
    losses = train(model, range(80))
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10]), (losses[:10], losses[-10:])
    frozen = wrapped()
    still = train(frozen, range(20), torch.optim.SGD(frozen.parameters(), lr=0.0))  # control
    assert not sum(still[-10:]) < 0.75 * sum(still[:10])


def conserves():
    """Whole numbers, so that sums are exact: in + old residuals = out + new residuals, over all ranks."""
    model = wrapped()
    sent_less = False
    for step in range(5):
        before = residual_sum(model)
        generator = torch.Generator().manual_seed(10 * step + rank)
        model.zero_grad()
        # The gradient of sum(p * g) is g.
        named = dict(model.module.named_parameters())
        gradients = {n: torch.randint(-50, 50, p.shape, generator=generator).float() for n, p in named.items()}
        sum((p * gradients[n]).sum() for n, p in named.items()).backward()
        after = residual_sum(model)
        for name, p in named.items():
            went_in = gradients[name].double().flatten()
            weft.all_reduce(went_in)
            came_out = p.grad.double().flatten() * size
            assert torch.equal(went_in + before[name], came_out.round() + after[name]), name
            assert (came_out - came_out.round()).abs().max() < 1e-3  # whole numbers over `size`, in float32
            sent_less |= not torch.equal(went_in + before[name], came_out.round())
    assert sent_less, "control: without the residuals the sums do not agree"
    assert model.compression.sent_bytes > 0


def skips():
    def step(model, poison):
        model.zero_grad()
        x, y = batch(0, rank, dtype=torch.float32)
        if poison and rank == size - 1:
            x = x * float("inf")
        (model(x) - y).square().mean().backward()

    for policy in ("error", "skip", "nan"):
        model = wrapped(not_finite=policy)
        step(model, False)
        before, count = residuals(model.compression.state_dict()), model.compression.step
        try:
            step(model, True)
            assert policy != "error"
        except weft.Error as error:
            assert policy == "error" and f"on rank {size - 1}" in str(error), error
        assert model.compression.step == count
        after = residuals(model.compression.state_dict())
        assert all(a is None and b is None or torch.equal(a, b) for a, b in zip(before.values(), after.values()))
        if policy == "skip":
            assert all(p.grad is None for p in model.parameters()) and model.skipped_steps == 1
        if policy == "nan":
            assert all(p.grad.isnan().all() for p in model.parameters())
        step(model, False)  # and training goes on
        assert model.compression.step == count + 1


def resumes():
    """Saved in the middle and loaded, each rank's own or all in one file: the same bits. Control: without the state they differ."""

    recipe = {"momentum_correction": 0.5}  # so that there are velocities, too

    def halves(reload, together=False):
        first = wrapped(**recipe)
        train(first, range(6))
        path = os.path.join(folder, f"state-{'all' if together else rank}-of-{size}.pt")
        if together:
            weft.save({"model": first.module, "weft": first.compression}, path)
        else:
            torch.save({"model": first.module.state_dict(), "weft": first.compression.state_dict()}, path)
        weft.barrier()
        saved = torch.load(path, weights_only=True)
        second = wrapped(seed=8, **recipe)
        second.module.load_state_dict(saved["model"])
        if reload:
            second.compression.load_state_dict(saved["weft"])
            assert second.compression.step == 6
        train(second, range(6, 10))
        return list(second.module.parameters())

    whole = wrapped(**recipe)
    train(whole, range(10))
    rows = whole.compression.state_dict()["rows"]
    assert any(row["kind"] == "velocity" and row["values"] is not None for row in rows)
    assert all(torch.equal(a, b) for a, b in zip(whole.module.parameters(), halves(True)))
    assert all(torch.equal(a, b) for a, b in zip(whole.module.parameters(), halves(True, together=True)))
    assert not all(torch.equal(a, b) for a, b in zip(whole.module.parameters(), halves(False)))
    for wrong in [{}, {"weft_format": 1}, {"weft_format": 2}, {"weft_format": 2, "rows": [{}]}, []]:
        try:
            whole.compression.load_state_dict(wrong)
        except weft.UsageError as error:
            assert "\n" not in str(error)
        else:
            raise AssertionError(f"{wrong} was taken for a state")


def powersgd():
    sent = {}
    for wire in ("float32", "bf16"):
        model = wrapped(scheme="powersgd", powersgd_rank=2, powersgd_wire=wire)
        losses = train(model, range(30))
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
        sent[wire] = model.compression.sent_bytes
    assert 0 < 2 * sent["bf16"] <= sent["float32"], sent


def save():
    model = wrapped()
    train(model, range(6))
    torch.save(model.compression.state_dict(), os.path.join(folder, f"all-{rank}.pt"))
    if rank == 0:
        torch.save({"size": size}, os.path.join(folder, "size.pt"))


def load():
    old = torch.load(os.path.join(folder, "size.pt"))["size"]
    assert old != size
    states = [torch.load(os.path.join(folder, f"all-{r}.pt")) for r in range(old)]
    model = wrapped()
    try:
        model.compression.load_state_dict(states[0])  # control: one rank's share is not all
    except weft.UsageError:
        pass
    else:
        raise AssertionError("the state of one of several ranks was taken for all")
    model.compression.load_state_dict(states)
    assert model.compression.step == 6
    for name, total in residual_sum(model).items():
        before = sum((residuals(s)[name].double() for s in states if residuals(s)[name] is not None), torch.zeros_like(total))
        expected = before * size / old  # as much of an average over `size` as it was of one over `old`
        # In float32: two roundings for each rank's, where it is multiplied and where it is merged.
        assert (total - expected).abs().max() <= 2**-23 * old * max(expected.abs().max(), 1e-30), name
        assert (total - before).abs().max() >= 0.1 * before.abs().max(), "control: sums as they were"
    # States of before divisors were told: of these ranks alone they are their number.
    older = [{**s, "rows": [{key: value for key, value in row.items() if key != "divisor"} for row in s["rows"]]} for s in states]
    assert older != states
    again = wrapped()
    again.compression.load_state_dict(older)
    wanted, found = residual_sum(model), residual_sum(again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    losses = train(model, range(6, 12))
    assert all(loss == loss for loss in losses)


if phase == "save":
    learns(), conserves(), skips(), resumes(), powersgd(), save()
else:
    load()
