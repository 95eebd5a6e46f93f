"""Ctrl-C in a lookup: the operation goes on and serves the other ranks; what it writes stays until it has ended.

Its result has 64 MiB, which malloc gives back at once where nobody keeps them: the write would end the process.
"""

import signal
import time

import torch

import weft

ROWS, COLUMNS, IDS = 8, 1024, 16384
weft.init()
rank = weft.rank()
values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
layer = weft.nn.Embedding.from_pretrained(values)
ids = torch.arange(IDS) % ROWS


def interrupt(*_):
    raise KeyboardInterrupt


weft.barrier()
if rank == 0:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        layer(ids)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the others have not called it yet")
else:
    time.sleep(1.5)
    assert torch.equal(layer(ids), values[ids]), "rank 0 sends its columns all the same"
time.sleep(0.5)
weft.barrier()
assert torch.equal(layer(ids), values[ids]), "control: the job goes on"
weft.barrier()
