"""weft.pipeline on several ranks equals one process that computes the whole list on all samples: losses, gradients, parameters behind three
steps, on every layout, schedule and number of micro-batches. float64: 1e-12 relative, because only the order of additions differs."""

import sys
import weakref

import stage_bad
import stage_scaled
import stage_state
import torch
from stage_models import TIED, WIDTH, WORDS, batch_of, counted, loss_of, loss_of_all, modules, steps_of_one_process, whole
from torch.utils.flop_counter import FlopCounterMode

import weft

torch.set_num_threads(1)
weft.init()
rank, size = weft.rank(), weft.size()
STEPS = 2


def distance(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))


def made(stages, micro_batches, tied=True, **options):
    # Values are rank 0's whatever the others have drawn.
    given = {"modules": modules(seed=rank), "loss": loss_of, "count": counted, "tied": TIED if tied else (), **options}
    return weft.pipeline.Pipeline(stages=stages, micro_batches=micro_batches, **given)


def reference(pipelines, tied=True, steps=STEPS):
    model = whole(tied)
    batches = [[batch_of(d, step) for d in range(pipelines)] for step in range(steps)]
    losses, gradients = steps_of_one_process(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    return losses, gradients, model.state_dict()


def grid():
    for stages in (1, 2, 4):
        if stages > size:
            continue
        for m in (1, 2, 3, 4, 8) if stages > 1 else (2,):
            yield stages, m, {}
        if stages == 1:
            for schedule in ("gpipe", "zb-h1", "interleaved"):
                yield stages, 2, {"schedule": schedule}
        if stages > 1:
            yield stages, 3, {"schedule": "gpipe"}
            yield stages, 8, {"double_warmup": True}
            for m in (1, 3, 8):
                yield stages, m, {"schedule": "zb-h1", "double_warmup": m == 8}
            yield stages, stages, {"schedule": "interleaved", "chunks": 2}
            yield stages, 2 * stages, {"schedule": "interleaved", "chunks": 8 // stages}
        if stages == 2:
            yield stages, 4, {"layers": [1, 7]}
            yield stages, 4, {"layers": [7, 1]}  # the last stage has nothing but the tied table


def equality():
    expected = {(d, tied): reference(d, tied) for d in (1, 2, 4) for tied in (True, False)}
    for stages, m, options in grid():
        for tied in (True, False) if m == 3 else (True,):
            pipe = made(stages, m, tied, **options)
            losses, gradients, state = expected[size // stages, tied]
            case = (stages, m, options, tied)
            assert (pipe.data_size, pipe.stage * pipe.data_size + pipe.data_rank) == (size // stages, rank), case
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for step in range(STEPS):
                loss = pipe.step(*batch_of(pipe.data_rank, step))
                assert abs(loss.item() - losses[step]) < 1e-12 * abs(losses[step]), (case, loss, losses[step])
                optimizer.step()
            for name, p in pipe.named_parameters():
                known = gradients[name] if name in gradients else gradients["0.weight"]  # a copy of the table
                error = distance(p.grad, known)
                assert error < 1e-12, (case, name, error)
                if name in ("0.weight", "7.weight") and tied and stages > 1:
                    alone = expected[size // stages, False][1][name]
                    assert distance(p.grad, alone) > 1e-2, "control: without the other stage's share it would be far"
                    assert distance(p.grad / 2, known) > 1e-2, "and divided by twice the ranks"
            for name, value in pipe.state_dict().items():
                assert distance(value, state[name]) < 1e-12, (case, name)
    if size == 4:
        of_means = [loss_of_all(whole(), [batch_of(d, 0)]).item() for d in range(2)]
        assert abs(sum(of_means) / 2 - expected[2, True][0][0]) > 1e-4, "control: a mean of the pipelines' means is another"


def order():
    """Who goes forward and back when, by the paper's formulas, and of how many micro-batches activations are there at most."""
    m = 6
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        pipe = made(size, m, schedule=schedule)
        behind = size - 1 - pipe.stage
        seen, alive, most = [], [], []

        def forward(module, given, out):
            seen.append("F")
            alive.append(weakref.ref(out))
            most.append(sum(each() is not None for each in alive))
            out.register_hook(lambda _: seen.append("B"))

        number = next(iter(pipe.state_dict())).split(".")[0]
        pipe.get_submodule(number).register_forward_hook(forward)
        watch_weights(pipe, int(number), seen)
        pipe.step(*batch_of(pipe.data_rank, 0, samples=2 * m))
        warm_up = m if schedule == "gpipe" else behind
        expected = "F" * warm_up + "FB" * (m - warm_up) + "B" * warm_up
        if schedule == "zb-h1":  # behind each B, from the stage's number on, one of those before; the others at the end
            backs = ["BW" if i >= pipe.stage else "B" for i in range(m)]
            expected = "F" * warm_up + "".join(f"F{each}" for each in backs[: m - warm_up]) + "".join(backs[m - warm_up :]) + "W" * pipe.stage
        assert "".join(seen) == expected, (schedule, pipe.stage, seen)
        assert max(most) == (m if schedule == "gpipe" else behind + 1), (schedule, pipe.stage, most)


def watch_weights(pipe, number, seen):
    run = pipe._walk.halves.run

    def second_half(module, micro_batch):
        if module == number:
            seen.append("W")
        run(module, micro_batch)

    pipe._walk.halves.run = second_half


def halves():
    """zb-h1 computes what 1f1b computes, once, in another order. Gradients that somebody watches do not wait."""
    batch = batch_of(rank % (size // 2), 0, samples=8)

    def stepped(schedule, dtype=torch.float64, prepare=lambda pipe: None):
        pipe = made(2, 4, modules=modules(dtype=dtype), schedule=schedule)
        prepare(pipe)
        pipe.step(*batch)
        with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            pipe.step(*batch)
        return {name: p.grad for name, p in pipe.named_parameters()}, counter.get_total_flops()

    for dtype in (torch.float64, torch.float32):  # (the latter beside autocast)
        (expected, flops), (found, same_flops) = (stepped(schedule, dtype) for schedule in ("1f1b", "zb-h1"))
        assert same_flops == flops > 0, (same_flops, flops)
        assert all(distance(found[name], expected[name]) < (1e-12 if dtype == torch.float64 else 2**-8) for name in expected)

    def lose(pipe):
        pipe._walk.halves.run = lambda *_: None

    lost, fewer = stepped("zb-h1", prepare=lose)
    linear = [name for name in lost if name.endswith("mix.weight")]
    assert linear and fewer < flops and not any(bool(lost[name].any()) for name in linear), "control: they are in the second half"
    calls = []

    def watch(pipe):
        for name, p in pipe.named_parameters():
            if name in linear:
                p.register_post_accumulate_grad_hook(lambda _: calls.append(1))
        lose(pipe)

    watched, _ = stepped("zb-h1", prepare=watch)
    (expected, _) = stepped("1f1b")
    assert len(calls) == 2 * 4 * len(linear) and all(distance(watched[name], expected[name]) < 1e-12 for name in linear)

    class Asks(torch.nn.Module):
        """Uses, in its forward, a gradient of what it is made of: that is no backward of the walk."""

        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(torch.tanh(self.inner(input=y)).sum(), y)
            return x + torch.tanh(self.inner(x)) + gradient

    def asking(schedule):
        torch.manual_seed(6)
        listed = [torch.nn.Embedding(WORDS, WIDTH), Asks(), Asks(), torch.nn.Linear(WIDTH, WORDS)]
        pipe = weft.pipeline.Pipeline([each.double() for each in listed], 2, loss_of, 4, count=counted, schedule=schedule)
        pipe.step(*batch)
        return [p.grad for p in pipe.parameters()]

    assert all(distance(a, b) < 1e-12 for a, b in zip(asking("zb-h1"), asking("1f1b")))

    def beside_a_table(schedule):
        torch.manual_seed(5)
        table, head, last = torch.nn.Embedding(WORDS, WIDTH, sparse=True), torch.nn.Linear(WIDTH, WORDS), torch.nn.Linear(WORDS, WORDS)
        listed, tied = [each.double() for each in (table, head, last)], [("0.weight", "1.weight")]
        pipe = weft.pipeline.Pipeline(listed, 2, loss_of, 4, layers=[2, 1], tied=tied, count=counted, schedule=schedule)
        pipe.step(*batch)
        return [p.grad for p in pipe.parameters()]

    assert all(distance(a, b) < 1e-12 for a, b in zip(beside_a_table("zb-h1"), beside_a_table("1f1b")))


def clipping():
    for stages in (2, size):
        _, gradients, _ = reference(size // stages, steps=1)
        norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        pipe = made(stages, 4)
        pipe.step(*batch_of(pipe.data_rank, 0))
        found = float(weft.clip_grad_norm_(pipe.parameters(), 0.25 * norm))
        assert abs(found - norm) < 1e-12 * norm, (found, norm)
        for name, p in pipe.named_parameters():
            assert distance(p.grad, 0.25 * gradients.get(name, gradients["0.weight"])) < 1e-5  # (torch's 1e-6 beside the norm)
        mine = sum(float(p.grad.square().sum()) for p in pipe.parameters()) ** 0.5
        assert abs(mine - 0.25 * norm) > 1e-3 * norm, "control: torch's own counts what is here"


def evaluation():
    """The mean over all samples, also beside messages that left something behind, which it does not change."""
    for options in ({}, {"schedule": "interleaved", "chunks": 2}):
        pipe = made(2, 4, **options)
        model = whole()
        model.load_state_dict(weft.pipeline.gather_state_dict(pipe))
        batches = [batch_of(d, 9) for d in range(size // 2)]
        found = pipe.evaluate(*batches[pipe.data_rank])
        assert abs(found.item() - loss_of_all(model, batches).item()) < 1e-12, (options, found)
        assert pipe.training and all(p.grad is None for p in pipe.parameters())


def not_finite():
    """A gradient that is not finite, on one rank: all ranks leave the step out, with their state as it was."""

    def broken(given, targets):
        return loss_of(given, targets) * (float("nan") if rank == size - 1 and step == 1 else 1.0)

    for scaler, means in ((torch.amp.GradScaler("cpu"), "nan"), (torch.amp.GradScaler("cpu", enabled=False), "error"), (None, "error")):
        assert made(2, 2, not_finite=None, scaler=scaler).not_finite == means
    narrow = {"backward_rank": 1, "scheme": "spardl", "density": 0.1, "dense_below": 0}
    for mode, options in (("error", {}), ("skip", {}), ("nan", {}), ("skip", narrow)):
        listed = modules(seed=rank, dtype=torch.float32 if options else torch.float64)
        pipe = made(2, 2, modules=listed, loss=broken, not_finite=mode, **options)
        for step in range(3):
            before = pipe.compression.state_dict()
            try:
                pipe.step(*batch_of(pipe.data_rank, step))
            except weft.Error as error:
                assert mode == "error" and step == 1 and "was not committed" in str(error), error
            if step == 1:
                gradients = [p.grad for p in pipe.parameters()]
                assert all(bool(g.isnan().all()) for g in gradients) if mode == "nan" else gradients == [None] * len(gradients), mode
                assert pipe.skipped_steps == 1 and pipe.skipped_text
            kept = stage_state.same_rows(before, pipe.compression.state_dict())
            assert kept if step == 1 else not (options and kept), (mode, options, step)
        assert all(bool(p.grad.isfinite().all()) for p in pipe.parameters()) and pipe.compression.step == 2


def shapes():
    """Batches of other lengths from step to step, smaller than their micro-batches, empty where another pipeline has samples, empty on all."""
    pipe = made(2, 4)
    model = whole()
    model.load_state_dict(weft.pipeline.gather_state_dict(pipe))
    for step, (length, samples) in enumerate(((5, 9), (3, 4), (5, 2), (7, 1))):
        batches = [batch_of(d, step, samples, length=length) for d in range(size // 2)]
        if step == 2:
            batches[-1] = tuple(each[: 0 if size > 2 else 2] for each in batches[-1])
        losses, gradients = steps_of_one_process(model, torch.optim.SGD(model.parameters(), lr=0.0), [batches])
        loss = pipe.step(*batches[pipe.data_rank])
        assert abs(loss.item() - losses[0]) < 1e-12 * abs(losses[0]), (step, loss, losses)
        assert all(distance(p.grad, gradients.get(name, gradients["0.weight"])) < 1e-12 for name, p in pipe.named_parameters()), step
    ids = torch.empty(0, 5, dtype=torch.int64)
    assert pipe.step(ids, ids).isnan() and all(bool(p.grad.eq(0).all()) for p in pipe.parameters())
    fresh = made(2, 1, modules=modules(dtype=torch.float32)).double()
    assert "became float64" in stage_bad.said(weft.UsageError, lambda: fresh.step(ids, ids))


def shared():
    """One module in two places: of two stages, of one, of two chunks of one."""
    for places, options in (((1, 6), {}), ((1, 2), {}), ((1, 4), {"schedule": "interleaved", "chunks": 2})):
        listed = modules()
        listed[places[1]] = listed[places[0]]
        batches = [batch_of(d, 0) for d in range(size // 2)]
        loss_of_all(listed, batches).backward()
        expected = {id(p): p.grad for module in listed for p in module.parameters()}
        pipe = weft.pipeline.Pipeline(listed, 2, loss_of, 4, count=counted, **options)
        pipe.step(*batches[pipe.data_rank])
        assert all(distance(p.grad, expected[id(p)]) < 1e-12 for p in pipe.parameters()), places
        norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
        assert abs(float(weft.clip_grad_norm_(pipe, 1.0)) - norm) < 1e-12 * norm, places
    listed = modules()
    listed[3].also = listed[7].weight
    weft.pipeline.Pipeline(listed, 2, loss_of, 4, tied=TIED)
    assert listed[3].also is listed[0].weight and listed[7].weight is listed[0].weight, "all that share what was replaced"


def kinds():
    """Frozen modules, modules without parameters, gradients that are sparse, inputs of floats, buffers, a parameter that nobody uses."""
    torch.manual_seed(3)
    table = torch.nn.Embedding(11, 8, sparse=True, dtype=torch.float64)
    first, last = torch.nn.Linear(8, 8, dtype=torch.float64), torch.nn.Linear(8, 2, dtype=torch.float64)
    last.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    frozen = torch.nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)
    norm = torch.nn.BatchNorm1d(8, dtype=torch.float64, momentum=1.0)
    listed = [table, torch.nn.Flatten(), torch.nn.Linear(8, 8, dtype=torch.float64), torch.nn.Tanh(), frozen, first, norm, last]
    ids, y = torch.randint(11, (12, 1)), torch.randn(12, 2, dtype=torch.float64)
    mse = torch.nn.MSELoss()
    x = ids
    for module in listed:
        if module is norm:  # of micro-batches
            x = torch.cat([norm(part) for part in x.tensor_split(2)])
        else:
            x = module(x)
    mse(x, y).backward()
    expected = {f"{i}.{name}": p.grad for i, module in enumerate(listed) for name, p in module.named_parameters()}
    for p in torch.nn.ModuleList(listed).parameters():
        p.grad = None
    pipe = weft.pipeline.Pipeline(listed, stages=2, loss=mse, micro_batches=2, layers=[4, 4])
    pipe.step(ids, y)  # (the same on all pipelines)
    for name, p in pipe.named_parameters():
        if name == "7.unused":
            assert bool(p.grad.eq(0).all())
        elif expected[name] is None:
            assert p.grad is None, name
        else:
            assert distance(p.grad, expected[name].to_dense()) < 1e-11, name
    everything = weft.pipeline.gather_state_dict(pipe)
    assert "6.running_mean" in everything and everything["6.num_batches_tracked"] == 4  # the reference has counted, too


def half():
    """What passes as bfloat16 travels as float32, and arrives as it was."""
    torch.manual_seed(4)
    listed = [torch.nn.Linear(6, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)]
    listed = [module.to(torch.bfloat16) for module in listed]
    x, y = torch.randn(8, 6).to(torch.bfloat16), torch.randint(3, (8,))
    out = listed[2](listed[1](listed[0](x)))
    torch.nn.functional.cross_entropy(out.float(), y).backward()
    expected = {f"{i}.{name}": p.grad for i, module in enumerate(listed) for name, p in module.named_parameters()}
    for module in listed:
        module.zero_grad()
    pipe = weft.pipeline.Pipeline(listed, 2, lambda given, t: torch.nn.functional.cross_entropy(given.float(), t), micro_batches=1)
    pipe.step(x, y)
    for name, p in pipe.named_parameters():
        assert p.grad.dtype == torch.bfloat16 and distance(p.grad.float(), expected[name].float()) < 2e-2, name
    plain = made(2, 2, modules=modules(dtype=torch.float32), tied=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = plain.step(*batch_of(plain.data_rank, 0))
    wide = plain.evaluate(*batch_of(plain.data_rank, 0))
    # Half a bfloat16's last digit, 2^-9, at each of some twenty roundings.
    assert 0 < abs(loss - wide) < 20 * 2**-9 * wide and all(p.grad.dtype == torch.float32 for p in plain.parameters()), (loss, wide)


equality()
order()
halves()
clipping()
evaluation()
not_finite()
shapes()
shared()
kinds()
half()
stage_bad.one_rank_fails()
stage_bad.replaced()
stage_bad.frozen()
stage_state.compressed()
stage_scaled.scaling()
if size == 4:
    stage_state.relaid()
    stage_state.resumed(f"{sys.argv[1]}.whole")
    stage_state.save(sys.argv[1])
    stage_bad.refusals()
    stage_bad.broken_module()
else:
    stage_state.load(sys.argv[1])
    stage_bad.flat_activations()
