"""A job that goes on chooses the algorithms that it chose before, whatever its link is measured to be now.

figures.py FOLDER save | load: the second one's link looks like another, on which other algorithms add in another order.
"""

import os
import sys

folder, phase = sys.argv[1:]
SLOW_TO_START = "hop_seconds=0.1,seconds_per_byte=1e-12,fold_seconds_per_byte=0"
SLOW_TO_CARRY = "hop_seconds=1e-07,seconds_per_byte=1e-06,fold_seconds_per_byte=0"
# Rank 0's count: what the others have there is not even read.
if os.environ["RANK"] == "0":
    os.environ["WEFT_FIGURES"] = SLOW_TO_START if phase == "save" else SLOW_TO_CARRY
else:
    os.environ["WEFT_FIGURES"] = "hop_seconds=never"

import torch  # noqa: E402
from models import batch, mlp  # noqa: E402

import weft  # noqa: E402

weft.init()
rank = weft.rank()
FIRST, LAST = 4, 8


def wrapped():
    return weft.DataParallel(mlp(3), scheme="dense", bucket_mib=0.01)


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step, rank, rows=16, dtype=torch.float32)
        (model(x) - y).square().mean().backward()
        optimizer.step()


def values(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def save():
    model = wrapped()
    train(model, range(FIRST))
    state = {"model": model.state_dict(), "compression": model.compression.state_dict()}
    torch.save(state, os.path.join(folder, f"at.{rank}.pt"))
    train(model, range(FIRST, LAST))
    torch.save(values(model), os.path.join(folder, f"end.{rank}.pt"))


def resumed(with_figures):
    state = torch.load(os.path.join(folder, f"at.{rank}.pt"))
    compression = state["compression"]
    figures = [row for row in compression["rows"] if row["kind"] == "figures"]
    assert len(figures) == 1 and figures[0]["values"].tolist() == [0.1, 1e-12, 0, 1, 0, 0], figures
    if not with_figures:
        compression["rows"] = [row for row in compression["rows"] if row["kind"] != "figures"]
    model = wrapped()
    model.load_state_dict(state["model"])
    model.compression.load_state_dict(compression)
    train(model, range(FIRST, LAST))
    again = model.compression.state_dict()["rows"]
    return values(model), next(row["values"].tolist() for row in again if row["kind"] == "figures")


def load():
    end = torch.load(os.path.join(folder, f"end.{rank}.pt"))
    # control: by the figures of this job other algorithms are chosen, and bits differ
    ended, figures = resumed(with_figures=False)
    assert not torch.equal(ended, end)
    assert torch.allclose(ended, end, rtol=1e-3, atol=1e-4)
    assert figures == [1e-07, 1e-06, 0, 1, 0, 0]
    ended, figures = resumed(with_figures=True)
    assert torch.equal(ended, end), (ended - end).abs().max()
    assert figures == [0.1, 1e-12, 0, 1, 0, 0]


save() if phase == "save" else load()
