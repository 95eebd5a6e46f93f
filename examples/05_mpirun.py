"""Collectives between processes that mpirun started; without torch, on NumPy arrays.

    mpirun -n 4 python examples/05_mpirun.py
    WEFT_TRANSPORT=tcp MASTER_ADDR=127.0.0.1 mpirun -n 4 python examples/05_mpirun.py    # MPI starts, tcp carries

weft joins MPI's own ranks and asks MPI to carry the bytes; it can share the process with mpi4py (MPI_THREAD_SERIALIZED or
better).
"""

import numpy as np

import weft

weft.init()
rank, size = weft.rank(), weft.size()

total = np.full(1000, float(rank))
weft.all_reduce(total)

# Rows to everybody: part r of `rows` goes to rank r.
rows = np.array([[rank, r] for r in range(size)], dtype=np.float32)
arrived = np.empty_like(rows)
weft.all_to_all(arrived, rows)

# Two operations at once; ranks may wait for them in any order.
a, b = np.ones(1_000_000, np.float32), np.full(10, rank, np.int64)
works = [weft.all_reduce(a, async_op=True), weft.all_reduce(b, op="max", async_op=True)]
for work in reversed(works):
    work.wait()

print(f"rank {rank} of {size} over {weft.transport()}: sum {total[0]:g}, rows from {arrived[:, 0].astype(int).tolist()}, "
      f"{a[0]:g} ones, largest rank {b[0]}")
