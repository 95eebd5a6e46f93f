"""torch.amp.GradScaler: its scale grows, an overflow halves it, and training goes on as if there were no scale.

The scale is a power of two, so training with it, a step skipped where one rank overflows, gives the bits of training without it
on the same batches without that one: for everything that is kept between steps. scaled.py data_parallel | ddp
"""

import sys

import torch
import torch.distributed as dist
from models import batch, mlp

import weft

STEPS, OVERFLOWS = 14, 8
if sys.argv[1] == "ddp":
    dist.init_process_group("gloo")
weft.init()
rank, size = weft.rank(), weft.size()


def wrapped(**options):
    options = {"density": 0.05, "bucket_mib": 0.01, **options}
    if sys.argv[1] == "data_parallel":
        model = weft.DataParallel(mlp(3), **options)
        return model, model.compression
    model = torch.nn.parallel.DistributedDataParallel(mlp(3), bucket_cap_mb=0.01)
    state = weft.DDPState(model, **options)
    model.register_comm_hook(state, weft.ddp_hook)
    return model, state


def loss_of(model, step):
    x, y = batch(step, rank, rows=16, dtype=torch.float32)
    return (model(x) - y).square().mean()


def plain(options):
    model, compression = wrapped(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step != OVERFLOWS:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return list(model.parameters()), compression.state_dict()


def scaled(options, told=True):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model, compression = wrapped(**options, **({"scaler": scaler} if told else {"not_finite": "nan"}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, step))
        overflow = step == OVERFLOWS and rank == size - 1
        before = compression.step
        (loss * float("inf") if overflow else loss).backward()
        assert compression.step == before + (step != OVERFLOWS)
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert scales[OVERFLOWS + 1] == scales[OVERFLOWS] / 2 and max(scales) >= 4 * min(scales), scales
    return list(model.parameters()), compression.state_dict()


def same(a, b):
    (mine, kept), (theirs, expected) = a, b
    rows = zip(kept["rows"], expected["rows"])
    return all(map(torch.equal, mine, theirs)) and all(
        (x["values"] is None and y["values"] is None) or torch.equal(x["values"], y["values"]) for x, y in rows
    )


for options in (
    {"scheme": "spardl"},
    {"scheme": "spardl", "momentum_correction": 0.5, "clip_local": 0.3},
    {"scheme": "oktopk"},
    {"scheme": "powersgd", "powersgd_rank": 2},
    {"scheme": "dense"},
):
    expected = plain(options)
    assert same(scaled(options), expected), options
    # Control: weft does not know of the scale, and its state is worth another amount after each change.
    if options["scheme"] != "dense":
        assert not same(scaled(options, told=False), expected), options

scaler = torch.amp.GradScaler("cpu")
for wrong, word in [({"scaler": scaler, "not_finite": "skip"}, "'nan'"), ({"scaler": 1024.0}, "float")]:
    try:
        wrapped(**wrong)
    except weft.UsageError as error:
        assert word in str(error) and "\n" not in str(error), error
    else:
        raise AssertionError(f"{wrong} passed")
weft.barrier()
