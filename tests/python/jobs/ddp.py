"""Stock DistributedDataParallel with weft's hook, under torchrun: equal to one process, many buckets, sparse schemes."""

import torch
import torch.distributed as dist
from models import batch, distance, mlp
from torch.nn.parallel import DistributedDataParallel

import weft

dist.init_process_group("gloo")
weft.init()
rank, size = weft.rank(), weft.size()
assert (rank, size) == (dist.get_rank(), dist.get_world_size()) and weft.transport() == "tcp"

STEPS = 8


def trained(hook, dtype=torch.float64, steps=STEPS, view=False, **options):
    """Parameters, the hook's state, the sizes of DDP's buckets by iteration, first and last loss."""
    model = mlp(5 + rank, dtype=dtype)  # DDP gives everybody rank 0's
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    state = weft.DDPState(ddp, **options)
    seen = []

    def watched(state: weft.DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append((bucket.index(), bucket.buffer().numel()))
        return hook(state, bucket)

    ddp.register_comm_hook(state, watched)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step, rank, rows=16, dtype=dtype)
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return list(model.parameters()), state, seen, losses


def alone():
    model = mlp(5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for r in range(size):
            x, y = batch(step, r, rows=16)
            ((model(x) - y).square().mean() / size).backward()
        optimizer.step()
    return list(model.parameters())


def keep_local(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


expected = alone()
for view in (False, True):
    parameters, state, seen, _ = trained(weft.ddp_hook, scheme="dense", view=view, bucket_mib=0.005)
    assert distance(parameters, expected) < 1e-12, distance(parameters, expected)
    assert state.step == STEPS and state.num_buckets > 1
    assert max(index for index, _ in seen) >= 2, "several of DDP's buckets"
# DDP cut its buckets anew after the first iteration, or this shows nothing about it.
buckets = 1 + max(index for index, _ in seen)
first = seen[: [i for i, (index, _) in enumerate(seen) if index == 0][1]]
assert first != seen[-buckets:], (first, seen[-buckets:])
# Control: a hook that exchanges nothing.
assert distance(trained(keep_local, scheme="dense")[0], expected) > 1e-3

parameters, state, _, losses = trained(weft.ddp_hook, torch.float32, steps=80, density=0.05)
assert sum(losses[-10:]) < 0.75 * sum(losses[:10]), losses
mine = torch.cat([p.detach().flatten() for p in parameters])
others = torch.empty(size * mine.numel())
weft.all_gather(others, mine)
assert all(torch.equal(mine, part) for part in others.chunk(size)), "the same bits on all ranks"
assert state.sent_bytes > 0 and any(row["kind"] == "residual" and row["values"] is not None for row in state.state_dict()["rows"])

# Gradients that are not finite: an error on all ranks that names the rank.
model = DistributedDataParallel(mlp(5))
model.register_comm_hook(weft.DDPState(model), weft.ddp_hook)
try:
    (model(batch(0, rank, dtype=torch.float32)[0]) * (float("nan") if rank == 1 else 1.0)).sum().backward()
except RuntimeError as error:
    assert "on rank 1 holds NaN" in str(error), error
else:
    raise AssertionError("a NaN passed")
weft.barrier()
dist.destroy_process_group()
