"""Initial values are drawn some rows at a time: no rank has the whole table in memory."""

import resource

import torch

import weft

ROWS, COLUMNS = 1 << 20, 64  # 256 MiB
MIB = 1 << 20


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


weft.init()
torch.empty(1 << 16, COLUMNS).normal_()
before = peak()
layer = weft.nn.Embedding(ROWS, COLUMNS)
grown = (peak() - before) / MIB
own = layer.weight.numel() * 4 / MIB
assert own == 256 / weft.size(), own
assert grown < own + 80, (grown, own)
whole = torch.empty(ROWS, COLUMNS).normal_()  # control: that would be seen
assert (peak() - before) / MIB > own + 200, (peak() - before) / MIB
del whole
weft.barrier()
