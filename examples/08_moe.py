"""A layer of experts that no rank holds whole: tokens travel to the experts that their gate chooses, and back.

    torchrun --nproc-per-node 4 examples/08_moe.py
    weft launch -n 4 -- python examples/08_moe.py
    python examples/08_moe.py                                      # alone: one rank
"""

import torch

import weft

WIDTH, KINDS, TOKENS = 32, 8, 256


class Model(torch.nn.Module):
    """Each kind of token is turned by a matrix of its own: more than one small network learns at once."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.moe = weft.nn.MoE(WIDTH, 2 * WIDTH, experts=KINDS, choices=2, balance_loss=0.01)

    def forward(self, x):
        x = x + torch.tanh(self.embed(x))
        return self.moe(x)


torch.manual_seed(7)
MATRICES = torch.randn(KINDS, WIDTH, WIDTH) / WIDTH**0.5
CENTRES = 2 * torch.randn(KINDS, WIDTH)


def batches(rank, steps):
    """Each rank has its own tokens."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        kind = torch.randint(KINDS, (TOKENS,), generator=generator)
        x = CENTRES[kind] + torch.randn(TOKENS, WIDTH, generator=generator)
        yield x, torch.einsum("tij,tj->ti", MATRICES[kind], x)


torch.set_num_threads(1)
weft.init()
model = Model()  # every rank holds some of the experts
net = weft.DataParallel(model, scheme="dense")  # or DistributedDataParallel(model): both leave experts alone
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for step, (x, y) in enumerate(batches(weft.rank(), 60)):
    optimizer.zero_grad()
    loss = (net(x) - y).square().mean()
    (loss + weft.nn.moe_loss(model)).backward()  # experts' gradients are in p.grad, summed over those who hold the same ones
    weft.clip_grad_norm_(net.parameters(), 1.0)  # counts every expert once
    optimizer.step()
    mean = loss.detach().clone()
    weft.all_reduce(mean)
    load = model.moe.load
    if weft.rank() == 0 and step % 10 == 9:
        busiest = float(load.max() / load.mean())
        print(f"step {step + 1}: loss {float(mean) / weft.size():.4f}; the busiest expert has {busiest:.2f} of the mean load")

state = model.state_dict()  # all experts, by name, on any number of ranks
if weft.rank() == 0:
    here = ", ".join(model.moe.experts.numbers())
    print(f"rank 0 of {weft.size()} holds experts {here}; the state has {sum(name.endswith('up.weight') for name in state)} of them")
