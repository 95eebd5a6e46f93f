"""Sharded tables in modules that weft.shard_embeddings() has not seen: DDP around them gives nobody rank 0's columns, and what is
trained is that of one process. Under torchrun.

Values are whole numbers and gradients are powers of two: sums are exact.
"""

import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import weft

ROWS, COLUMNS, LR = 6, 4, 0.5
dist.init_process_group("gloo")
weft.init()
rank, size = weft.rank(), weft.size()
warnings.simplefilter("ignore")
VALUES = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


class Encoder(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.scale = torch.nn.Parameter(torch.full((COLUMNS,), 1.0 + rank))

    def forward(self, ids):
        return self.table(ids) + self.scale


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids).sum()


def plain():
    return torch.nn.Embedding.from_pretrained(VALUES.clone(), freeze=False)


def part_was_given():
    encoder = Encoder(plain())
    model = Around(encoder)
    weft.shard_embeddings(encoder)
    return encoder, model


def wrapped_later():
    encoder = Encoder(plain())
    weft.shard_embeddings(encoder)
    return encoder, Around(Around(encoder))


def never_given():
    encoder = Encoder(weft.nn.Embedding.from_pretrained(VALUES.clone(), freeze=False))
    return encoder, Around(encoder)


def used_twice():
    """The second name of a table that two modules have."""
    encoder = Encoder(weft.nn.Embedding.from_pretrained(VALUES.clone(), freeze=False))
    model = Around(encoder)
    model.again = torch.nn.Module()
    model.again.weight = encoder.table.weight
    return encoder, model


for make in (part_was_given, wrapped_later, never_given, used_twice):
    encoder, model = make()
    ddp = DistributedDataParallel(model)
    assert torch.equal(encoder.table.state_dict()["weight"], VALUES), (make.__name__, encoder.table.state_dict()["weight"])
    assert encoder.scale.eq(1.0).all(), "control: other parameters are rank 0's"
    optimizer = weft.optim.hybrid(torch.optim.SGD(model.parameters(), lr=LR))
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.tensor([1, 2 + rank])).backward()
        optimizer.step()
    expected = VALUES.clone()
    expected[1] -= 2 * LR
    expected[2 : 2 + size] -= 2 * LR / size
    assert torch.equal(encoder.table.state_dict()["weight"], expected), make.__name__

try:
    DistributedDataParallel(weft.nn.Embedding(ROWS, COLUMNS))
except weft.UsageError as error:
    assert "weft.optim.hybrid()" in str(error), error
else:
    raise AssertionError("a table alone was wrapped")
weft.barrier()
dist.destroy_process_group()
