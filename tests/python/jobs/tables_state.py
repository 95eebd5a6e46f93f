"""tables_state.py FILE save | load: a job of any size goes on from what another one has saved, and so does a plain model."""

import sys
import warnings

import torch
from models import distance
from two_tables import IDS, Model, batch_of, dense, one_process, whole

import weft

STEPS, HALF, TOLERANCE = 12, 6, 1e-12
path, what = sys.argv[1:]
weft.init()
rank, size = weft.rank(), weft.size()
warnings.simplefilter("ignore")


def made(seed):
    model = Model(seed + rank)
    weft.shard_embeddings(model)
    wrapped = weft.DataParallel(model, scheme="dense")
    return model, wrapped, weft.optim.hybrid(dense("adam", model.parameters()))


def train(model, wrapped, optimizer, first, last):
    loader = [batch_of(step, rank, size) for step in range(first, last)]
    for batch in weft.lookahead(loader, ids=IDS, model=model):
        optimizer.zero_grad()
        (wrapped(batch) * size / batch["count"]).backward()
        optimizer.step()


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


if what == "save":
    model, wrapped, optimizer = made(5)
    train(model, wrapped, optimizer, 0, HALF)
    weft.save({"model": model, "optimizer": optimizer}, path)
    state = model.state_dict()
    assert state["inp.weight"].shape == (61, 7), "all ranks have the whole table"
    saved = torch.load(path)
    assert same(saved["model"], state) and same(saved["optimizer"], optimizer.state_dict())
    plain = Model(77)
    plain.load_state_dict(saved["model"])
    assert distance(whole(plain), whole(one_process("adam", HALF, gamma=1.0)[0])) < TOLERANCE
else:
    expected = whole(one_process("adam", STEPS, gamma=1.0)[0])
    saved = torch.load(path)
    for loads in (True, False):
        model, wrapped, optimizer = made(99)
        model.load_state_dict(saved["model"])
        assert same(model.state_dict(), saved["model"]), "the same at any number of ranks"
        if loads:
            optimizer.load_state_dict(saved["optimizer"])
            assert same(optimizer.state_dict()["weft_tables"], saved["optimizer"]["weft_tables"])
        train(model, wrapped, optimizer, HALF, STEPS)
        error = distance(whole(model), expected)
        assert error < TOLERANCE if loads else error > 1e-3, (loads, error)  # control: without the moments
    for wrong, word in [({}, "weft_tables"), ({"weft_tables": {"inp": {}}}, "of table 'inp'")]:
        try:
            optimizer.load_state_dict(wrong)
        except weft.UsageError as error:
            assert word in str(error), error
        else:
            raise AssertionError("a state without moments was taken")
weft.barrier()
