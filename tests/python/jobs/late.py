"""Rank 0 waits in a barrier for the others, which do: nothing ("sleep"), raise ("raise") or are killed ("kill").

Without torch, so that seconds are weft's.
"""

import os
import signal
import sys
import time

import weft

weft.init()
print(f"rank {weft.rank()} is in", flush=True)
if weft.rank() == 0 and weft.size() > 1 or sys.argv[1] == "alone":
    start = time.monotonic()
    try:
        if weft.size() > 1:
            weft.barrier()
        time.sleep(60)
    except weft.Error as error:
        print(f"after {time.monotonic() - start:.3f} s: {type(error).__name__} {error}", flush=True)
        sys.exit(3)
time.sleep(0.5)
if sys.argv[1] == "raise":
    raise ArithmeticError("out of numbers")
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
