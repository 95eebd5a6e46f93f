"""A model with two tables and a dense vector, its batches, and its training on one process by torch alone.

With ids a and b of a token and z = inp[a] * w - out[b] + 0.3 inp[b mod rows] its loss is the sum over columns of log cosh z: table
"inp" is read twice in a forward. A step's loss is the sum over the tokens of all ranks, divided by their number. Tokens are dealt
unevenly; in every third step the last rank has none. Row 3 of inp is padding.
"""

import torch

ROWS_IN, ROWS_OUT, COLUMNS, PADDING = 61, 45, 7, 3
LR = 0.05


class Model(torch.nn.Module):
    def __init__(self, seed, dtype=torch.float64, sparse=False):
        super().__init__()
        torch.manual_seed(seed)
        self.inp = torch.nn.Embedding(ROWS_IN, COLUMNS, padding_idx=PADDING, sparse=sparse, dtype=dtype)
        self.out = torch.nn.Embedding(ROWS_OUT, COLUMNS, sparse=sparse, dtype=dtype)
        self.w = torch.nn.Parameter(torch.randn(COLUMNS, dtype=dtype))

    def forward(self, batch):
        a, b = batch["a"], batch["b"]
        z = self.inp(a) * self.w - self.out(b) + 0.3 * self.inp(b % ROWS_IN)
        return z.cosh().log().sum()


IDS = {"inp": lambda batch: [batch["a"], batch["b"] % ROWS_IN], "out": "b"}


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    count = 20 + int(torch.randint(8, (1,), generator=generator))
    a = (torch.rand(count, generator=generator) ** 3 * ROWS_IN).long()  # small ids more often
    b = (torch.rand(count, generator=generator) ** 3 * ROWS_OUT).long()
    a[0] = PADDING
    return a, b


def batch_of(step, rank, size):
    """This rank's tokens, and how many all ranks have."""
    a, b = tokens(step)
    others = size - 1 if size > 1 and step % 3 == 2 else size
    owner = torch.randint(others, (a.numel(),), generator=torch.Generator().manual_seed(7000 + step))
    mine = owner == rank
    return {"a": a[mine], "b": b[mine], "count": a.numel()}


def dense(name, parameters):
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options = {"lr_decay": 0.01} if name == "adagrad" else {}
    return kinds.get(name, torch.optim.SGD)(parameters, lr=LR, **options)


def rows(name, parameters):
    """The rule for tables, by torch's own optimizers of sparse gradients."""
    if name in ("sgd", "adagrad"):
        return dense(name, parameters)
    return torch.optim.SparseAdam(parameters, lr=LR)


def scheduler_of(optimizer, steps, gamma=0.95, betas=True):
    """`gamma` None: one that moves betas, too, unless it is told not to."""
    if gamma is None:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps + 1, cycle_momentum=betas)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)


def one_process(name, steps, clip=0.0, micro=1, skipped=(), lazy=True, gamma=0.95, betas=True):
    """Model, losses and norms; `lazy` False: torch's Adam of dense gradients."""
    model = Model(5, sparse=lazy)
    tables = [model.inp.weight, model.out.weight]
    optimizers = [dense(name, [model.w]), rows(name, tables) if lazy else dense(name, tables)]
    schedulers = [scheduler_of(each, steps, gamma, betas) for each in optimizers]
    losses, norms = [], []
    for step in range(steps):
        for each in optimizers:
            each.zero_grad()
        total = sum(tokens(step * micro + m)[0].numel() for m in range(micro))
        loss = 0.0
        for m in range(micro):
            a, b = tokens(step * micro + m)
            part = model({"a": a, "b": b}) / total
            part.backward()
            loss += part.item()
        losses.append(loss)
        gradients = [model.w.grad, *(t.grad.coalesce().values() if lazy else t.grad for t in tables)]
        norm = sum(g.double().square().sum() for g in gradients).sqrt().item()
        norms.append(norm)
        if clip:
            for p in model.parameters():
                p.grad = p.grad * min(1.0, clip / (norm + 1e-6))
        if step not in skipped:
            if name == "adamw" and lazy:
                with torch.no_grad():
                    for t in tables:
                        t[t.grad.coalesce().indices()[0]] *= 1 - optimizers[1].param_groups[0]["lr"] * 0.01
            for each in optimizers:
                each.step()
        for each in schedulers:
            each.step()
    return model, losses, norms


def whole(model):
    """Weights as one process has them."""
    state = model.state_dict()
    return [state[name] for name in ("inp.weight", "out.weight", "w")]
