"""Ranks that clip to different norms, or not at all on one of them: a sentence on all ranks, and no row is updated."""

import warnings

import torch

import weft

weft.init()
rank = weft.rank()
warnings.simplefilter("ignore")


def step(norm):
    """How far row 1, whose gradient has the norm 4, was moved by a step."""
    layer = weft.nn.Embedding.from_pretrained(torch.zeros(3, 4), freeze=False)
    optimizer = weft.optim.hybrid(torch.optim.SGD(layer.parameters(), lr=1.0), clips=True)
    (layer(torch.tensor([1])) * 2).sum().backward()
    said = ""
    try:
        if norm:
            weft.clip_grad_norm_(layer, norm)
        optimizer.step()
    except weft.UsageError as error:
        said = str(error)
    return said, layer.state_dict()["weight"][1].norm().item()


said, moved = step(1.0)
assert not said and abs(moved - 1.0) < 1e-5, (said, moved)  # control: 1e-6 beside the norm, and float32
for norms, words in [((1.0, 0.25), "of 1 on rank 0 and of 0.25 on rank 1"), ((0.0, 0.5), "of 0 on rank 0 and of 0.5 on rank 1")]:
    said, moved = step(norms[rank])
    assert words in said and "all ranks clip to the same one" in said and "\n" not in said, said
    assert moved == 0, moved
weft.barrier()
