"""traced.py FOLDER: a step of training and a collective, with a trace."""

import sys
import time

import torch
from models import batch, mlp

import weft

weft.init(trace=sys.argv[1])
model = weft.DataParallel(mlp(3), scheme="dense")
time.sleep(0.2 * weft.rank())  # somebody has something to wait for
model(batch(0, weft.rank(), dtype=torch.float32)[0]).sum().backward()
weft.all_reduce(torch.ones(10))
