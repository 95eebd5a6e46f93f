"""Ranks that disagree about a table, and a rank that reads a row which is not there: sentences, and nothing hangs."""

import torch

import weft

weft.init()
rank = weft.rank()


def said(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was said")


layer = weft.nn.Embedding(50, 4, name="words")
if rank == 1:
    text = said(weft.UsageError, lambda: layer(torch.tensor([4, 50])))
    assert text == "rank 1: the batch has id 50 of table 'words', which has rows 0 to 49", text
    ids = torch.tensor([4])
else:
    ids = torch.tensor([4, 49])
assert layer(ids).shape == (len(ids), 4), "nothing was sent: the job goes on"
whole = layer.state_dict()["weight"]
assert torch.equal(layer(ids), whole[ids])

text = said(weft.Error, lambda: weft.nn.Embedding(50, 4 + rank, name="words"))
assert "another plan of" in text, text
