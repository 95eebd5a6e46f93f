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

text = said(weft.UsageError, lambda: weft.nn.Embedding(50, 4 + rank, name="words"))
assert text.startswith("table 'words' is 50 x 4 of float32 on rank 0 and 50 x 5 of float32 on rank 1: all ranks make the same"), text
text = said(weft.UsageError, lambda: weft.nn.Embedding(50, 4, name=f"words{rank}"))
assert text.startswith("rank 0 has table 'words0' where rank 1 has table 'words1': "), text
again = weft.nn.Embedding(50, 4, name="words")  # control, and the job goes on
assert again(ids).shape == (len(ids), 4)
weft.barrier()
