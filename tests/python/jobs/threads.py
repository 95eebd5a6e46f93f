"""Autograd has a thread a device: hooks of one backward come from several of them at the same time.

Two threads stand in for two devices, and a list for autograd's engine, which calls what was queued when all threads are through.
The averages are those of whole numbers, so they are compared with ==.
"""

import sys
import threading
import time

import torch

import weft
from weft import _data_parallel

STEPS, PARAMETERS = 10, 60
weft.init()
rank, size = weft.rank(), weft.size()
sys.setswitchinterval(1e-6)  # threads change places as often as they can


class Engine:
    def __init__(self):
        self.queued = []

    def queue_callback(self, callback):
        time.sleep(0.01)  # without the interpreter's lock, as anything may be that a hook calls
        self.queued.append(callback)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(50) for _ in range(PARAMETERS)])
        self.hooks = []  # of each parameter, for the threads to call
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook = self.hooks.append


def gradient(step, r, index):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * r + index)
    return torch.randint(-1000, 1000, (50,), generator=generator).float()


def backward(module, step, threads):
    together = threading.Barrier(threads)
    errors = []

    def device(which):
        try:
            together.wait()
            for index in range(which, PARAMETERS, threads):
                module.weights[index].grad = gradient(step, rank, index)
                module.hooks[index](module.weights[index])
        except BaseException as error:
            errors.append(error)

    devices = [threading.Thread(target=device, args=(which,)) for which in range(threads)]
    for each in devices:
        each.start()
    for each in devices:
        each.join()
    if errors:
        raise errors[0]


_data_parallel._engine = engine = Engine()
for scheme in ("dense", "spardl"):
    module = Module()
    model = weft.DataParallel(module, scheme=scheme, density=1.0, bucket_mib=0.001, divisor=1.0)
    for step in range(STEPS):
        model.zero_grad()
        time.sleep(0.1 * rank if step == 0 else 0)  # the first gradient of all waits for the other ranks
        backward(module, step, threads=1 if step == 1 else 2)
        assert len(engine.queued) == 1, f"backward ends {len(engine.queued)} times"
        engine.queued.pop()()
        for index, weight in enumerate(module.weights):
            expected = sum(gradient(step, r, index) for r in range(size))
            assert torch.equal(weight.grad, expected), (scheme, step, index)
        assert model.compression.step == step + 1
    assert not torch.equal(expected, size * gradient(step, rank, index)), "control: ranks differ"
