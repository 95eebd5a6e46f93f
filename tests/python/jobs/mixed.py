"""A model of float64, float32 and bfloat16 parameters: every average is that of exact arithmetic, rounded to its own type."""

import sys
from fractions import Fraction

import torch

import weft

# Of three ranks, and of each type such that adding in float32 loses what counts.
GRADIENTS = {
    "wide": (torch.float64, [(1 + 1e-12, 1.0), (1 - 3e-12, 2.0**-40), (1 + 5e-12, 1e-17)]),
    "single": (torch.float32, [(1.0, 0.1), (2.0**-24, -3e7), (2.0**-24, 3e7)]),
    "narrow": (torch.bfloat16, [(1.0, 256.0), (2.0**-30, 1.0), (-1.0, 1.0)]),
}


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, (dtype, _) in GRADIENTS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(2, dtype=dtype)))

    def forward(self, factors):
        return sum((p * factors[name]).sum().double() for name, p in self.named_parameters())


def of(name, rank):
    dtype, ranks = GRADIENTS[name]
    return torch.tensor(ranks[rank], dtype=dtype)


def average(name, size):
    """In exact arithmetic; a division and a rounding to the type are left."""
    sums = [sum(Fraction(of(name, r)[i].item()) for r in range(size)) / size for i in range(2)]
    return torch.tensor([float(s) for s in sums], dtype=torch.float64)


def main():
    weft.init()
    rank, size = weft.rank(), weft.size()
    model = weft.DataParallel(Mixed(), scheme="dense")
    for again in range(2):  # into tensors that are not there, and into those that are
        model.zero_grad(set_to_none=again == 0)
        model({name: of(name, rank) for name in GRADIENTS}).backward()
        for name, p in model.module.named_parameters():
            exact = average(name, size)
            assert p.grad.dtype == p.dtype, name
            if name == "wide":  # a rounding for each addition and for the division
                assert ((p.grad - exact).abs() <= size * 2**-53 * exact.abs()).all(), (p.grad, exact)
            else:
                assert torch.equal(p.grad, exact.to(p.dtype)), (name, p.grad, exact.to(p.dtype))
    # Control: added in float32 not one of them is right.
    for name, (dtype, _) in GRADIENTS.items():
        added = torch.zeros(2)
        for r in range(size):
            added += of(name, r).float()
        assert not torch.equal((added / size).to(dtype), average(name, size).to(dtype)), name


sys.exit(main())
