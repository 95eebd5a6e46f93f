"""Activation checkpointing runs backward inside of backward: the step ends with the outer one, and only then.

Dense training of a model whose layers are recomputed (both kinds of torch.utils.checkpoint) equals one process on the concatenated
batch, and every step sends each gradient once.
"""

import sys

import torch
from models import batch, distance, mlp
from torch.utils.checkpoint import checkpoint

import weft

STEPS = 5
TOLERANCE = 1e-12


class Recomputed(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers = mlp(3, dtype=torch.float64)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.layers[0](x)  # (a reentrant segment needs an input with a gradient)
        for part in (self.layers[1:3], self.layers[3:]):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return {"y": x}


def train(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in rows(step):
            ((model(x)["y"] - y).square().mean() / len(rows(step))).backward()
        optimizer.step()


def fail(_):
    raise ZeroDivisionError


def main():
    weft.init()
    rank, size = weft.rank(), weft.size()
    for reentrant in (False, True):
        expected = Recomputed(reentrant)
        train(expected, lambda step: [batch(step, r) for r in range(size)])
        mine = Recomputed(reentrant)
        wrapped = weft.DataParallel(mine, scheme="dense", bucket_mib=0.001)
        train(wrapped, lambda step: [batch(step, rank)])
        error = distance(mine.parameters(), expected.parameters())
        assert error < TOLERANCE, (reentrant, error)
        assert wrapped.compression.step == STEPS, (reentrant, wrapped.compression.step)
    # What only asks for gradients of inputs is no step; the next backward is one.
    plain = weft.DataParallel(Recomputed(False), scheme="dense")
    x = batch(0, rank)[0].requires_grad_()
    torch.autograd.grad(plain(x)["y"].sum(), x)
    assert plain.compression.step == 0
    plain(x)["y"].sum().backward()
    assert plain.compression.step == 1
    # A backward that fails before it reaches a parameter sends nothing; the one after it does, also without a forward between.
    kept, failing = plain(x)["y"], plain(x)["y"]
    failing.register_hook(fail)
    try:
        failing.sum().backward()
    except ZeroDivisionError:
        assert plain.compression.step == 1
    else:
        raise AssertionError("nothing failed")
    plain.zero_grad()
    ((rank + 1) * kept.sum()).backward()
    assert plain.compression.step == 2
    gradient = plain.module.layers[0].weight.grad
    mean = gradient.clone()
    weft.all_reduce(mean)
    assert torch.allclose(mean / size, gradient, rtol=1e-12, atol=0), "every rank has the average"
    # Control: another rank's data alone ends elsewhere.
    alone = Recomputed(True)
    train(alone, lambda step: [batch(step, rank)])
    assert distance(alone.parameters(), expected.parameters()) > 1e-6


sys.exit(main())
