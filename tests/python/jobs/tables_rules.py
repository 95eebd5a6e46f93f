"""Ranks whose optimizers have other options: a sentence on all ranks, in the first step before a row has changed."""

import warnings

import torch

import weft

weft.init()
rank = weft.rank()
warnings.simplefilter("ignore")


def said(call):
    try:
        call()
    except weft.UsageError as error:
        return str(error)
    raise AssertionError("nothing was said")


def make(**options):
    layer = weft.nn.Embedding.from_pretrained(torch.zeros(9, 4), freeze=False)
    layer.name = "words"
    return layer, weft.optim.hybrid(torch.optim.Adam(layer.parameters(), **options))


def train(layer, optimizer, steps, change=lambda step: None):
    ids = [torch.tensor([step, 3 + rank]) for step in range(steps)]
    for step, batch in enumerate(weft.lookahead(ids, ids={layer: lambda batch: batch})):
        optimizer.zero_grad()
        layer(batch).sum().backward()
        change(step)
        optimizer.step()


# where the optimizer takes the tables over
text = said(lambda: make(betas=(0.5 + 0.25 * rank, 0.9)))
assert "the rule of table 'words' is adam with lr 0.001" in text and "betas 0.5 and 0.9" in text and "betas 0.75 and 0.9" in text, text
weft.barrier()

# in the first step
layer, optimizer = make(lr=0.5)


def at_once(step):
    optimizer.param_groups[0]["lr"] = 0.5 + rank


text = said(lambda: train(layer, optimizer, 3, at_once))
assert "with lr 0.5," in text and "on rank 0 and adam with lr 1.5," in text and text.endswith("in every step"), text
assert not layer.weight.any(), "no row has changed"
weft.barrier()

# later: when the gradients of the step behind come
layer, optimizer = make(lr=0.5)
seen = []


def later(step):
    seen.append(step)
    if step == 2 and rank == 1:
        optimizer.param_groups[0]["lr"] = 0.25


text = said(lambda: train(layer, optimizer, 6, later))
assert "lr 0.5," in text and "lr 0.25," in text and seen == [0, 1, 2, 3], (text, seen)
weft.barrier()

# Control: options that change alike on all ranks are nobody's trouble.
layer, optimizer = make(lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
train(layer, optimizer, 4, lambda step: scheduler.step() if step else None)
layer.state_dict()
weft.barrier()
