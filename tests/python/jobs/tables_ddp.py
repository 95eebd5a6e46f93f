"""Sharded tables inside of torch's DistributedDataParallel, with a GradScaler and clipping: equal to one process, steps that
overflow left out on all ranks. Under torchrun.

The scale is a power of two, so only the order of additions differs: 1e-12, as in tables.py.
"""

import warnings

import torch
import torch.distributed as dist
from models import distance
from torch.nn.parallel import DistributedDataParallel
from two_tables import IDS, Model, batch_of, dense, one_process, whole

import weft

STEPS, TABLE_OVERFLOWS, DENSE_OVERFLOWS = 12, 4, 7
dist.init_process_group("gloo")
weft.init()
rank, size = weft.rank(), weft.size()
warnings.simplefilter("ignore")


class Overflowing(Model):
    """In some steps, on the last rank only, a gradient is infinite: of a table's rows, or of the dense vector."""

    step = -1

    def forward(self, batch):
        loss = super().forward(batch)
        if self.step == TABLE_OVERFLOWS:  # a lookup more on all ranks: without lookahead all take part in it
            loss = loss + (self.inp(batch["a"]) * (float("inf") if rank == size - 1 else 0.0)).sum()
        if rank == size - 1 and self.step == DENSE_OVERFLOWS:
            loss = loss + (self.w * float("inf")).sum()
        return loss


def ours(ahead, scales=False, clip=0.0):
    model = Overflowing(5 + rank)
    weft.shard_embeddings(model)
    mine = model.inp.weight.detach().clone()
    ddp = DistributedDataParallel(model)
    assert ddp.parameters_to_ignore >= {"inp.weight", "out.weight"}
    assert torch.equal(model.inp.weight, mine), "DDP gives nobody rank 0's columns"
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scales)
    optimizer = weft.optim.hybrid(dense("adam", model.parameters()), clips=clip > 0, scaler=scaler if scales else None)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = [batch_of(step, rank, size) for step in range(STEPS)]
    found = []
    for step, batch in enumerate(weft.lookahead(loader, ids=IDS, model=model) if ahead else loader):
        model.step = step if scales else -1
        optimizer.zero_grad()
        loss = ddp(batch) * size / batch["count"]
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            weft.clip_grad_norm_(ddp.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            found.append(step)
        scheduler.step()
    assert found == ([TABLE_OVERFLOWS, DENSE_OVERFLOWS] if scales else []), found
    return whole(model)


SKIPPED = (TABLE_OVERFLOWS, DENSE_OVERFLOWS)
for ahead in (True, False):
    for clip in (0.0, 0.15):
        expected = whole(one_process("adam", STEPS, clip=clip)[0])
        error = distance(ours(ahead, clip=clip), expected)
        assert error < 1e-12, (ahead, clip, error)
        skipped = whole(one_process("adam", STEPS, clip=clip, skipped=SKIPPED)[0])
        error = distance(ours(ahead, scales=True, clip=clip), skipped)
        assert error < 1e-12, ("scaled", ahead, clip, error)
        assert distance(skipped, expected) > 1e-3, "control: a step that was not left out is seen"
weft.barrier()
dist.destroy_process_group()
