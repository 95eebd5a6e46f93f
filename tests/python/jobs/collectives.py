"""Every collective against what can be computed on one rank; without torch where "numpy" is asked for."""

import sys

import numpy as np

import weft

weft.init()
rank, size = weft.rank(), weft.size()

if sys.argv[1] == "torch":
    import torch

    def made(values, dtype="float32"):
        return torch.tensor(np.asarray(values), dtype=getattr(torch, dtype))

    def plain(x):
        return x.to(torch.float64).numpy() if x.dtype == torch.bfloat16 else x.numpy()

else:
    assert "torch" not in sys.modules

    def made(values, dtype="float32"):
        return np.array(values, dtype=dtype)

    def plain(x):
        return x


def equal(x, expected):
    assert np.array_equal(plain(x), np.asarray(expected)), (rank, x, expected)


total = size * (size - 1) // 2
for dtype in ["float32", "float64", "int32", "int64"] + (["bfloat16"] if sys.argv[1] == "torch" else []):
    x = made([rank, 2 * rank, 5], dtype)
    weft.all_reduce(x)
    equal(x, [total, 2 * total, 5 * size])

x = made([[rank, -rank]])
weft.all_reduce(x, op="max")
equal(x, [[size - 1, 0]])

root = size - 1
for dtype in ["float32", "uint8"]:  # uint8 travels as bytes
    x = made([rank, rank + 1, rank + 2], dtype)
    weft.broadcast(x, root=root)
    equal(x, [root, root + 1, root + 2])

out = made(np.zeros(2 * size))
weft.all_gather(out, made([rank, 10 + rank]))
equal(out, [v for r in range(size) for v in (r, 10 + r)])

source = made(np.arange(2 * size) + rank)
part = made([0, 0])
weft.reduce_scatter(part, source)
equal(part, [size * (2 * rank) + total, size * (2 * rank + 1) + total])
equal(source, np.arange(2 * size) + rank)

out = made(np.zeros((size, 2)))
weft.all_to_all(out, made([[rank, r] for r in range(size)]))
equal(out, [[r, rank] for r in range(size)])

# Rank s sends s + 1 rows to everybody.
out = made(np.zeros((sum(r + 1 for r in range(size)), 3)))
rows = made(np.full((size * (rank + 1), 3), rank))
weft.all_to_all(out, rows, output_splits=[r + 1 for r in range(size)], input_splits=[rank + 1] * size)
equal(out, [[r] * 3 for r in range(size) for _ in range(r + 1)])

works = [weft.all_reduce(made(np.ones(50_000)), async_op=True) for _ in range(8)]  # nobody else keeps the memory
kept = made(np.ones(1000))
last = weft.all_reduce(kept, async_op=True)
del works
last.wait()
assert last.done()
equal(kept, np.full(1000, size))
weft.barrier()

for call in [
    lambda: weft.all_reduce([1, 2]),
    lambda: weft.all_reduce(made([1]), op="product"),
    lambda: weft.all_gather(made([1]), made([1, 2])),
    lambda: weft.all_to_all(made([1]), made([1]), input_splits=[2] * size),
    lambda: weft.broadcast(made([1]), root=size),
]:
    try:
        call()
    except weft.UsageError as error:
        assert "\n" not in str(error)
    else:
        raise AssertionError("a call that cannot be right was taken")
weft.barrier()  # and the job goes on
unwaited = [weft.all_reduce(made(np.ones(500_000)), async_op=True) for _ in range(4)]
weft.shutdown()  # waits for them: no rank leaves while another needs it
for work in unwaited:
    work.wait()
weft.shutdown()
try:
    weft.rank()
except weft.UsageError as error:
    assert "weft.init()" in str(error)
else:
    raise AssertionError("rank() after shutdown()")
