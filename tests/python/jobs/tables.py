"""Training with sharded tables on all ranks equals one process of torch on the concatenated batch, in float64 to 1e-12.

Why 1e-12: gradients of a row are added in another order, a few roundings of 2^-53 in values near one, and twelve steps of these
optimizers pass that on with factors near one (Adam divides by sqrt(v) + 1e-8 with v from gradients near 0.01).
"""

import warnings

import torch
from models import distance
from two_tables import COLUMNS, IDS, LR, PADDING, ROWS_IN, Model, batch_of, dense, one_process, scheduler_of, tokens, whole

import weft

STEPS, TOLERANCE = 12, 1e-12
weft.init()
rank, size = weft.rank(), weft.size()


def optimizer_of(name, model):
    if name != "sparseadam":
        return dense(name, model.parameters()), []
    return torch.optim.SparseAdam([model.inp.weight, model.out.weight], lr=LR), [torch.optim.SGD([model.w], lr=LR)]


def ours(name, ahead, clip=0.0, micro=1, evaluates=False, gamma=0.95, **options):
    model = Model(5 if rank == 0 else 50 + rank)  # only rank 0's values count
    done = weft.shard_embeddings(model)
    assert [each.sharded for each in done.values()] == [True, True] and list(done) == ["inp", "out"], done
    wrapped = weft.DataParallel(model, scheme="dense")
    inner, others = optimizer_of(name, model)
    optimizer = weft.optim.hybrid(inner, clips=clip > 0, **options)
    optimizers = [optimizer, *others]
    schedulers = [scheduler_of(each, STEPS, gamma) for each in optimizers]
    loader = [batch_of(step, rank, size) for step in range(STEPS * micro)]
    losses, norms = [], []
    for number, batch in enumerate(weft.lookahead(loader, ids=IDS, accumulate=micro, model=model) if ahead else loader):
        step, m = divmod(number, micro)
        if m == 0:
            loss = torch.zeros(1, dtype=torch.float64)
            for each in optimizers:
                each.zero_grad()
        total = sum(tokens(step * micro + i)[0].numel() for i in range(micro))
        part = wrapped(batch) / total
        if m + 1 < micro:
            with wrapped.no_sync():
                (part * size).backward()
        else:
            (part * size).backward()
        loss += part.detach()
        if m + 1 < micro:
            continue
        weft.all_reduce(loss)
        losses.append(loss.item())
        if clip:
            norms.append(weft.clip_grad_norm_(model, clip).item())
        for each in optimizers:
            each.step()
        for each in schedulers:
            each.step()
        if evaluates and step % 4 == 1:
            compare_lookups(model)
    return model, losses, norms


def compare_lookups(model):
    """Between steps every rank reads what it likes, and gets the bits of plain indexing."""
    model.eval()
    ids = torch.tensor([[5, 0, 5], [PADDING, ROWS_IN - 1, rank]])
    ids = ids[:0] if rank == 1 else ids
    found = model.inp(ids)
    assert found.shape == (*ids.shape, COLUMNS) and not found.requires_grad
    table = model.state_dict()["inp.weight"]
    assert torch.equal(found, table[ids])
    model.train()


def check_bytes(layer, ids_of, padding, ahead):
    """docs/algorithms.md: ids 4 U (size - 1), rows w (S - U) 8, gradients (columns - w) (U without padding) 8."""
    width = layer.columns(rank)[1]
    lists = [[set(ids_of(batch_of(step, r, size)).tolist()) for r in range(size)] for step in range(STEPS)]
    mine, every = [each[rank] for each in lists], [sum(map(len, each)) for each in lists]
    sent = layer.sent_bytes
    assert sent["ids"] == sum(4 * len(each) * (size - 1) for each in mine)
    assert sent["rows"] == ahead * sum(8 * width * (all_ - len(each)) for each, all_ in zip(mine, every)), (sent, ahead)
    assert sent["prior rows"] + sent["delayed rows"] == sum(8 * (COLUMNS - width) * len(each - {padding}) for each in mine)
    assert (sent["prior rows"] > 0) == (ahead and size > 1 and width < COLUMNS), "all rows have slack where nothing is known ahead"


def gap(result, expected):
    assert len(result[1]) == len(expected[1])
    worst = max(abs(a - b) / abs(b) for a, b in zip(result[1], expected[1]))
    return max(worst, distance(whole(result[0]), whole(expected[0])))


for name in ("sgd", "adagrad", "sparseadam", "adam", "adamw"):
    expected = one_process(name, STEPS)
    for ahead in (True, False):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trained = ours(name, ahead)
        error = gap(trained, expected)
        check_bytes(trained[0].inp, lambda batch: torch.cat([batch["a"], batch["b"] % ROWS_IN]), PADDING, ahead)
        check_bytes(trained[0].out, lambda batch: batch["b"], -1, ahead)
        assert error < TOLERANCE, (name, ahead, error)
        told = [str(each.message) for each in said if "weft.lookahead" in str(each.message)]
        assert len(told) == (0 if ahead else 1), told
warnings.simplefilter("ignore")

for ahead in (True, False):
    error = gap(ours("adam", ahead, evaluates=True), one_process("adam", STEPS))
    assert error < TOLERANCE, ("evaluation in between", ahead, error)
    error = gap(ours("adam", ahead, micro=3), one_process("adam", STEPS, micro=3))
    assert error < TOLERANCE, ("accumulation", ahead, error)
    error = gap(ours("adam", ahead, gamma=None), one_process("adam", STEPS, gamma=None))
    assert error < TOLERANCE, ("betas that change", ahead, error)
    clipped = one_process("adamw", STEPS, clip=0.15)
    mine = ours("adamw", ahead, clip=0.15)
    assert gap(mine, clipped) < TOLERANCE, ("clipping", ahead, gap(mine, clipped))
    assert max(abs(a - b) for a, b in zip(mine[2], clipped[2])) < TOLERANCE and min(mine[2]) > 0.15

# Controls: what differs by more than roundings is seen.
adam = one_process("adam", STEPS)
assert gap(ours("sgd", True), one_process("sgd", STEPS, clip=0.15)) > 1e-3, "no clipping"
assert gap(ours("sgd", True, divisor=2.0 * size), one_process("sgd", STEPS)) > 1e-3, "another divisor"
assert gap(ours("adam", True), one_process("adam", STEPS, lazy=False)) > 1e-3, "moments of all rows"
assert gap(ours("adam", True, gamma=None), one_process("adam", STEPS, gamma=None, betas=False)) > 1e-3, "betas that stay"
assert gap(ours("adam", False), one_process("adam", STEPS - 1)[:1] + (adam[1],)) > 1e-3, "a step less"
print(f"rank {rank} of {size}: {error:.1e}")
weft.barrier()
