"""A model that no rank holds whole: a list of modules over stages, and micro-batches that go through them and back.

    torchrun --nproc-per-node 4 examples/07_pipeline.py
    weft launch -n 4 -- python examples/07_pipeline.py
    python examples/07_pipeline.py                                 # alone: one rank, one stage
"""

import torch
from data import batch

import weft

TOKENS, WIDTH = 8, 32


class Tokens(torch.nn.Module):
    """A point of 32 numbers as 8 tokens of 4, each in its place."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(32 // TOKENS, WIDTH)
        self.place = torch.nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))

    def forward(self, x):
        return self.embed(x.unflatten(1, (TOKENS, -1))) + self.place


class Block(torch.nn.Module):
    """Attention and a feed-forward, as in a GPT."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.feed = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(self.norm2(x))


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = torch.nn.Linear(TOKENS * WIDTH, 10)

    def forward(self, x):
        return self.classes(x.flatten(1))


torch.set_num_threads(1)
weft.init()

# Every rank makes the whole list, and keeps the modules of its stage. What goes back between stages travels as two thin factors where it
# is waited for; what that leaves behind joins the next message.
pipe = weft.pipeline.Pipeline(
    [Tokens(), *[Block() for _ in range(4)], Head()],
    stages=2 if weft.size() % 2 == 0 else 1,
    loss=torch.nn.functional.cross_entropy,
    micro_batches=4,
    backward_rank=4 if weft.size() % 2 == 0 else 0,
)
print(f"rank {weft.rank()}: stage {pipe.stage} of {pipe.stages}, pipeline {pipe.data_rank} of {pipe.data_size}")
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)  # of this stage

for step in range(60):
    x, y = batch(step, pipe.data_rank, rows=64)  # the same on all ranks of a pipeline
    loss = pipe.step(x, y)  # forward and backward of all micro-batches; p.grad holds the means
    weft.clip_grad_norm_(pipe.parameters(), 1.0)  # of all stages
    optimizer.step()
    if weft.rank() == weft.size() - 1 and (step % 20 == 0 or step == 59):
        sent = pipe.compression.sent_bytes
        print(f"step {step:2}: loss {loss:.3f}, {sent['gradients']} bytes of gradients and {sent['stages']} to other stages (last rank)")

held_out = pipe.evaluate(*batch(1000, pipe.data_rank))
state = weft.pipeline.gather_state_dict(pipe)  # all modules, by name, on any number of stages
if weft.rank() == 0:
    print(f"held out: {held_out:.3f}; the state has {len({name.split('.')[0] for name in state})} modules")
