"""A forked child: weft says one sentence to whoever calls it, a DataLoader's workers do not notice it, nobody hangs."""

import os
import sys

import torch

import weft

weft.init()
model = weft.DataParallel(torch.nn.Linear(4, 4), scheme="dense")
model(torch.ones(1, 4)).sum().backward()

loader = torch.utils.data.DataLoader(torch.arange(8.0).reshape(4, 2), num_workers=2)
assert sum(x.sum().item() for x in loader) == 28

for call in (weft.rank, weft.init, weft.barrier, lambda: weft.DataParallel(torch.nn.Linear(2, 2)), model.synchronize):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            call()
        except weft.UsageError as error:
            ok = "forked" in str(error) and "\n" not in str(error)
            sys.exit(0 if ok else 4)  # sys.exit: the end of the program in the child, with what runs at exit
        sys.exit(5)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, (call, status)
assert weft.rank() == 0 and weft.barrier() is None  # and here it goes on
