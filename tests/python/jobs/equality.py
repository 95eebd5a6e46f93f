"""Dense training on all ranks equals one process on the concatenated batch, in float64 to 1e-12.

Why 1e-12: a sum of P gradients in another order differs by P roundings of 2^-53, about 4e-16, and twenty steps of SGD pass
that on with factors near one. The argument is the device of models and batches (default cpu).
"""

import sys

import torch
from models import Awkward, batch, distance

import weft

STEPS = 20
MICRO = 3
TOLERANCE = 1e-12


def uses_some(step, rank, micro):
    """In every step some ranks do, others do not (from two ranks on); never in the micro-batch whose backward sends."""
    return (step + rank) % 2 == 0 and micro + 1 < MICRO


def reference(size):
    """One process: the mean over all rows of all ranks."""
    model = Awkward(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            for micro in range(MICRO):
                x, y = batch(MICRO * step + micro, rank)
                loss = (model(x, uses_some(step, rank, micro)) - y).square().mean()
                (loss / (size * MICRO)).backward()
        optimizer.step()
    return model


def ours(rank, size, wrap, compiled=False):
    model = Awkward(7 if rank == 0 else 100 + rank)  # only rank 0's values count
    inner = torch.compile(model, backend="eager") if compiled else model
    wrapped = wrap(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            x, y = batch(MICRO * step + micro, rank)
            use = uses_some(step, rank, micro)
            if micro + 1 < MICRO and isinstance(wrapped, weft.DataParallel):
                with wrapped.no_sync():
                    ((wrapped(x, use) - y).square().mean() / MICRO).backward()
            else:
                ((wrapped(x, use) - y).square().mean() / MICRO).backward()
        assert model.nobody.weight.grad is None, "unused on all ranks: no gradient, as in DDP"
        assert model.frozen.weight.grad is None
        assert size == 1 or not isinstance(wrapped, weft.DataParallel) or model.some.weight.grad is not None
        optimizer.step()
    return model


def main():
    torch.set_default_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    weft.init()
    rank, size = weft.rank(), weft.size()
    expected = reference(size)

    def gap(wrap, **options):
        return distance(ours(rank, size, wrap, **options).parameters(), expected.parameters())

    def dense(module):
        return weft.DataParallel(module, scheme="dense", bucket_mib=0.001)

    error = gap(dense)
    assert error < TOLERANCE, error
    if size == 2:  # torch's compiler takes seconds to load, and learns nothing from other sizes
        compiled = gap(dense, compiled=True)
        assert compiled < TOLERANCE, compiled
    # Control: without the exchange, and with another divisor, the same comparison fails.
    alone = gap(lambda module: module)
    assert size == 1 or alone > 1e-3, alone
    doubled = gap(lambda module: weft.DataParallel(module, scheme="dense", divisor=2.0 * size))
    assert doubled > 1e-3, doubled
    buffer = ours(rank, size, dense).shift
    assert buffer.eq(7).all(), "rank 0's buffers at the start"
    print(f"rank {rank} of {size}: {error:.1e} ({alone:.1e} without)")


sys.exit(main())
