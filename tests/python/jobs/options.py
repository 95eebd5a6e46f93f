"""options.py NAME VALUE VALUE ...: a value for each rank, in Python. Where they differ, all ranks get an error by the end of the first step."""

import ast
import sys

import torch

import weft

weft.init()
values = [ast.literal_eval(text) for text in sys.argv[2:]]
if sys.argv[1] == "scaler":
    values = [torch.amp.GradScaler("cpu") if value else None for value in values]
differ = len(set(map(repr, values))) > 1
said = ""
try:
    model = weft.DataParallel(torch.nn.Linear(4, 4), **{sys.argv[1]: values[weft.rank()], "scheme": "dense"})
    model(torch.ones(1, 4)).sum().backward()
except weft.TransportError as error:
    said = str(error)
    assert "has another plan" in said and "\n" not in said, said
assert bool(said) == differ, (values, said)
