"""What the Python examples train: a small network that learns which of ten random lines a point is closest to."""

import torch


def model():
    return torch.nn.Sequential(
        torch.nn.Linear(32, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )


def batch(step, rank, rows=64):
    """Each rank has its own points, the same in every run."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    x = torch.randn(rows, 32, generator=generator)
    lines = torch.randn(32, 10, generator=torch.Generator().manual_seed(0))
    return x, (x @ lines).argmax(dim=1)
