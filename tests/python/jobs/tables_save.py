"""tables_save.py FOLDER: where rank 0 cannot write, all ranks are told why, at once."""

import os
import sys
import time

import torch
from two_tables import Model

import weft

folder = sys.argv[1]
weft.init()
model = Model(5)
weft.shard_embeddings(model)
good, bad = os.path.join(folder, "good.pt"), os.path.join(folder, "nowhere", "bad.pt")
weft.save(model, good)
assert torch.load(good).keys() == model.state_dict().keys(), "control: it is there when save() returns"
start = time.monotonic()
try:
    weft.save(model, bad)
except RuntimeError as error:  # torch's own on rank 0, weft.Error elsewhere
    assert "nowhere" in str(error) and time.monotonic() - start < 5, error
    assert weft.rank() == 0 or "rank 0 could not write" in str(error), error
else:
    raise AssertionError("nothing was said")
weft.barrier()  # the job goes on
