"""A layer of experts as one process has it, by plain loops over tokens, float64: what weft.nn.MoE is compared with."""

import math

import torch

WIDTH, HIDDEN, EXPERTS = 6, 5, 8
LONELY = 3  # an expert that no token chooses


def tokens_of(rank, size, seed=0, most=9):
    """Some ranks have none. The first value of each token is 1."""
    count = [7, 0, most, 5, 4, 1, 2, 3][rank % 8] if size > 1 else 11
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    x[:, 0] = 1
    return x, torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def state_of(seed, shared=False):
    """Of the layer, by name; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out = {"gate.weight": draw(EXPERTS, WIDTH)}
    out["gate.weight"][LONELY, 0] = -50
    for prefix, hidden in [*((f"experts.{e}", HIDDEN) for e in range(EXPERTS)), *([("shared", HIDDEN)] if shared else [])]:
        out[f"{prefix}.up.weight"], out[f"{prefix}.up.bias"] = draw(hidden, WIDTH), draw(hidden)
        out[f"{prefix}.down.weight"], out[f"{prefix}.down.bias"] = draw(WIDTH, hidden), draw(WIDTH)
    return out


def feed_forward(p, prefix, x):
    inner = torch.nn.functional.gelu(x @ p[f"{prefix}.up.weight"].t() + p[f"{prefix}.up.bias"], approximate="tanh")
    return inner @ p[f"{prefix}.down.weight"].t() + p[f"{prefix}.down.bias"]


def layer_of(p, x, choices, factor, noise=None):
    """Of one rank's tokens: results, probabilities, logits, choices of each expert (dropped ones too) and how many were dropped."""
    logits = (x if noise is None else x * noise) @ p["gate.weight"].t()
    probabilities = logits.softmax(-1)
    capacity = math.ceil(choices * factor * len(x) / EXPERTS) if factor else len(x) * choices
    taken = [0] * EXPERTS
    rows = [torch.zeros(WIDTH, dtype=torch.float64) for _ in x]
    dropped = 0
    chosen = [sorted(range(EXPERTS), key=lambda e, t=t: (-float(probabilities.detach()[t, e]), e))[:choices] for t in range(len(x))]
    for k in range(choices):
        for t in range(len(x)):
            e = chosen[t][k]
            taken[e] += 1
            if taken[e] > capacity:
                dropped += 1
                continue
            weight = probabilities[t, e]
            if choices > 1:
                weight = weight / sum(probabilities[t, other] for other in chosen[t])
            rows[t] = rows[t] + weight * feed_forward(p, f"experts.{e}", x[t])
    out = torch.stack(rows) if rows else x.new_zeros((0, WIDTH))
    if "shared.up.weight" in p:
        out = out + feed_forward(p, "shared", x)
    return out, probabilities, logits, torch.tensor(taken, dtype=torch.float64), dropped


def losses_of(parts, choices):
    """Balance and z losses of these ranks' tokens together."""
    tokens = sum(len(each[1]) for each in parts)
    taken = sum(each[3] for each in parts)
    share = taken / (choices * tokens)
    mean = sum(each[1].sum(0) for each in parts) / tokens
    z = sum(each[2].logsumexp(-1).square().sum() for each in parts) / tokens
    return EXPERTS * (share * mean).sum(), z


def whole_job(state, size, choices, factor, weights=(0.3, 0.2), seed=0, noise=None, own_fractions=False, inputs=None):
    """Losses, results, gradients of parameters (as averages over the ranks give them) and of each rank's tokens.

    own_fractions: the losses of a router that each rank makes of its own tokens, which is wrong."""
    p = {name: value.clone().requires_grad_() for name, value in state.items()}
    xs, ys = zip(*(inputs or [tokens_of(r, size, seed) for r in range(size)]))
    xs = [x.clone().requires_grad_() for x in xs]
    parts = [layer_of(p, x, choices, factor, None if noise is None else noise[r]) for r, x in enumerate(xs)]
    router = [losses_of(parts, choices)] if not own_fractions else [losses_of([each], choices) for each in parts if len(each[1])]
    aux = sum(weights[0] * balance + weights[1] * z for balance, z in router) / len(router)
    total = sum((part[0] * y).sum() for part, y in zip(parts, ys)) + size * aux
    total.backward()
    gradients = {name: (value.grad if value.grad is not None else torch.zeros_like(value)) / size for name, value in p.items()}
    return torch.as_tensor(aux).item(), [part[0].detach() for part in parts], gradients, [x.grad for x in xs], [part[4] for part in parts]
