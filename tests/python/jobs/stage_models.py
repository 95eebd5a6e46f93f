"""Models that are lists of modules, their data, and what one process makes of them: plain autograd over the whole list and all samples."""

import torch

WORDS, WIDTH, LENGTH = 11, 8, 5


class Block(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=dtype)
        self.mix = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x):
        # Tokens see those before them, so that samples are not rows of tokens.
        return x + torch.tanh(self.mix(self.norm(x.cumsum(1))))


def modules(seed=0, blocks=6, dtype=torch.float64):
    torch.manual_seed(seed)
    head = torch.nn.Linear(WIDTH, WORDS, bias=False, dtype=dtype)
    return [torch.nn.Embedding(WORDS, WIDTH, dtype=dtype), *[Block(dtype) for _ in range(blocks)], head]


TIED = [("0.weight", "7.weight")]


def loss_of(given, targets):
    return torch.nn.functional.cross_entropy(given.flatten(0, 1), targets.flatten(), ignore_index=-100)


def counted(targets):
    return int((targets != -100).sum())


def batch_of(pipeline, step, samples=7, length=LENGTH):
    """Each pipeline has its own, and some tokens that do not count."""
    generator = torch.Generator().manual_seed(100 * step + pipeline)
    ids = torch.randint(WORDS, (samples + pipeline, length), generator=generator)
    targets = torch.randint(WORDS, ids.shape, generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    targets[1:][-1:] = -100  # a sample of which nothing counts, behind others
    return ids, targets


def whole(tied=True, **more):
    out = modules(**more)
    if tied:
        out[-1].weight = out[0].weight
    return torch.nn.ModuleList(out)


def loss_of_all(model, batches):
    """The mean over what counts in all of them."""
    total, number = 0.0, 0
    for ids, targets in batches:
        x = ids
        for module in model:
            x = module(x)
        total = total + torch.nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        number += counted(targets)
    return total / number


def steps_of_one_process(model, optimizer, batches_of_step):
    """Losses, and the gradients of the last step by name."""
    losses = []
    for batches in batches_of_step:
        optimizer.zero_grad()
        loss = loss_of_all(model, batches)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients
