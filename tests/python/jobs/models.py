"""What the jobs train: a small model with everything that is awkward, and data that all ranks can compute."""

import torch


class Awkward(torch.nn.Module):
    """A shared weight, a frozen one, one that nobody uses, one that only some ranks use, a buffer."""

    def __init__(self, seed, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(12, 16, dtype=dtype)
        self.shared = torch.nn.Linear(16, 16, dtype=dtype)
        self.frozen = torch.nn.Linear(16, 16, dtype=dtype).requires_grad_(False)
        self.nobody = torch.nn.Linear(3, 3, dtype=dtype)
        self.some = torch.nn.Linear(16, 4, bias=False, dtype=dtype)
        self.last = torch.nn.Linear(16, 4, dtype=dtype)
        self.register_buffer("shift", torch.full((4,), float(seed), dtype=dtype))

    def forward(self, x, use_some=True):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.frozen(self.shared(torch.tanh(self.shared(x)))))
        y = self.last(x) + self.shift
        return y + self.some(x) if use_some else y


def batch(step, rank, rows=4, dtype=torch.float64):
    """This rank's rows of a step, and what they should become."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    x = torch.randn(rows, 12, generator=generator, dtype=torch.float64, device="cpu").to(torch.get_default_device())
    return x.to(dtype), torch.sin(x[:, :4] + x[:, 4:8]).to(dtype)


def mlp(seed, width=64, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(12, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 4)).to(dtype)


def distance(a, b):
    """Largest difference over the largest magnitude."""
    return max(((x - y).abs().max() / y.abs().max().clamp_min(1e-300)).item() for x, y in zip(a, b))
