"""torch.amp.GradScaler beside a pipeline: its scale grows, an overflow on one rank halves it on all, and training goes on as if there were no
scale. What stages.py calls.

The scale is a power of two, so training with it gives the bits of training without it, on the same batches without the one that overflowed.
"""

import torch
from stage_models import TIED, batch_of, counted, loss_of, modules
from stage_state import same_rows, whole_text

import weft

STEPS, OVERFLOWS = 9, 5


def made(**options):
    given = {"modules": modules(dtype=torch.float32), "stages": 2, "loss": loss_of, "micro_batches": 4, "count": counted, "tied": TIED}
    return weft.pipeline.Pipeline(**{**given, **options})


def batch(pipe, step):
    return batch_of(pipe.data_rank, step % 4, samples=16)


def plain(options):
    pipe = made(**options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.5)
    losses = []
    for step in range(STEPS):
        if step != OVERFLOWS:
            losses.append(pipe.step(*batch(pipe, step)).item())
            optimizer.step()
    return losses, whole_text(pipe), pipe.compression.state_dict()


def scaled(options, told=True):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    by_hand = 1.0

    def broken(given, targets):
        overflow = step == OVERFLOWS and weft.rank() == weft.size() - 1 and torch.is_grad_enabled()
        return loss_of(given, targets) * by_hand * (float("inf") if overflow else 1.0)

    pipe = made(loss=broken, **options, **({"scaler": scaler} if told else {"not_finite": "nan"}))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.5)
    losses, scales = [], []
    for step in range(STEPS):
        if not told:
            by_hand = float(scaler.scale(torch.ones(())))
        before = pipe.compression.state_dict()
        loss = pipe.step(*batch(pipe, step)).item()
        scales.append(scaler.get_scale())
        if step == OVERFLOWS:
            assert all(bool(p.grad.isnan().all()) for p in pipe.parameters()), "on every rank"
            assert same_rows(before, pipe.compression.state_dict()) and pipe.skipped_steps == 1
        else:
            losses.append(loss / by_hand)
        scaler.step(optimizer)
        scaler.update()
    assert scales == [1024, 1024, 2048, 2048, 4096, 4096, 2048, 2048, 4096], scales
    return losses, whole_text(pipe), pipe.compression.state_dict()


def same(a, b):
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in b[1]) and same_rows(a[2], b[2])


class Shift(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.by


def too_large_together():
    """The gradient of what the first and the last stage share is too large, those of its users are not: all scalers go on, or none would be
    right."""
    scale = 2.0**126
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    stages = weft.size()
    tied = [("0.by", f"{stages - 1}.by")]
    pipe = weft.pipeline.Pipeline([Shift() for _ in range(stages)], stages, lambda out, _: 3 * out.mean(), 1, tied=tied, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    pipe.step(torch.ones(4, 1), torch.zeros(4))
    (p,) = pipe.parameters()
    most = torch.finfo(torch.float32).max
    shared = pipe.stage in (0, stages - 1)
    assert p.grad.item() == (most if shared else 3 * scale), p.grad
    assert torch.tensor(6.0) * scale == float("inf"), "control: the sum of both is"
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == scale and p.item() == (-most / scale if shared else -3), (scaler.get_scale(), p)


def scaling():
    for options in (
        {},
        {"backward_rank": 1, "backward_messages": "all"},
        {"backward_rank": 1, "scheme": "spardl", "density": 0.1, "dense_below": 0},
    ):
        expected = plain(options)
        assert same(scaled(options), expected), options
        if options:
            assert not same(scaled(options, told=False), expected), "control: errors and residuals of another scale are worth another amount"
    too_large_together()
    for wrong, says in (
        ({"scaler": torch.amp.GradScaler("cpu"), "not_finite": "skip"}, "'nan'"),
        ({"scaler": 1024.0}, "not float"),
        ({"scaler": torch.amp.GradScaler("cpu") if weft.rank() else None}, "a scaler is missing on rank 0 and there on rank 1"),
    ):
        try:
            made(**wrong)
        except weft.UsageError as error:
            assert says in str(error), error
        else:
            raise AssertionError(says)
