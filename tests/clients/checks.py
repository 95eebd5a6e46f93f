"""What every client's job holds to."""

import torch

import weft


def learned_together(parameters, losses, factor=0.8):
    """The loss fell, and ranks that saw different data have the same model, bit by bit."""
    assert sum(losses[-3:]) < factor * sum(losses[:3]), losses
    mine = torch.cat([p.detach().flatten() for p in parameters])
    every = torch.empty(weft.size() * mine.numel())
    weft.all_gather(every, mine)
    assert all(torch.equal(mine, other) for other in every.chunk(weft.size()))
