"""Embedding tables that no rank holds whole: their columns are dealt to the ranks, and the rows that a batch reads travel.

    torchrun --nproc-per-node 4 examples/06_embedding.py
    weft launch -n 4 -- python examples/06_embedding.py
    python examples/06_embedding.py                                # alone: one rank
"""

import os
import tempfile

import torch

import weft

WORDS, WIDTH, TOKENS = 20_000, 64, 512


class Next(torch.nn.Module):
    """Which of ten classes the next word is in, from the last two words: here it follows from the last one."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.head = torch.nn.Linear(2 * WIDTH, 10)

    def forward(self, words):
        return self.head(self.embed(words).flatten(1))


def batches(rank, steps):
    """Each rank has its own tokens; frequent words have small numbers."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        words = (WORDS ** torch.rand(TOKENS, 2, generator=generator)).long() - 1
        yield {"words": words, "next": words[:, 1] % 10}


torch.set_num_threads(1)
weft.init()
model = Next()
for name, done in weft.shard_embeddings(model).items():  # before the optimizer is made
    if weft.rank() == 0:
        print(f"{name}: {done.why}")
net = weft.DataParallel(model, scheme="dense")  # or torch's DDP: it leaves the table alone, too
optimizer = weft.optim.hybrid(torch.optim.Adam(model.parameters(), lr=0.01))

# The next batch's words are known while this one is trained on: their rows come as soon as they are updated.
for step, batch in enumerate(weft.lookahead(batches(weft.rank(), 60), ids={"embed": "words"})):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(batch["words"]), batch["next"])
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 59:
        mean = loss.detach()
        weft.all_reduce(mean)
        if weft.rank() == 0:
            print(f"step {step:2}: loss {mean.item() / weft.size():.3f}")

# All ranks call it, rank 0 writes; a plain model loads the file.
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.pt")
    weft.save(model, path)
    if weft.rank() == 0:
        Next().load_state_dict(torch.load(path))
sent = sum(model.embed.sent_bytes.values())
print(f"rank {weft.rank()}: {sent / 60:.0f} bytes a step for a table of {4 * WORDS * WIDTH}")
