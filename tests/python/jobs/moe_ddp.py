"""Layers of experts inside of torch's DistributedDataParallel, trained with a GradScaler and clipping: equal to one process, and a step in
which an expert's gradient overflows on one rank is left out on all. Under torchrun.

The scale is a power of two, so only the order of additions differs: 1e-12 a step."""

import math

import torch
import torch.distributed as dist
from dense_moe import EXPERTS, HIDDEN, WIDTH, state_of, tokens_of, whole_job
from torch.nn.parallel import DistributedDataParallel

import weft

STEPS, OVERFLOWS, LR, CLIP = 5, 2, 0.05, 3.0
dist.init_process_group("gloo")
weft.init()
rank, size = weft.rank(), weft.size()


class Expert(torch.nn.Module):
    """As the layer's own; the gradient of its last bias, and of nothing else, may overflow."""

    overflows = False

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(a, b, dtype=torch.float64) for a, b in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))

    def forward(self, x):
        inner = torch.nn.functional.gelu(self.up(x), approximate="tanh")
        bias = self.down.bias * 1
        if self.overflows:
            bias.register_hook(lambda gradient: gradient * float("inf"))
        return inner @ self.down.weight.t() + bias


class Model(torch.nn.Module):
    def __init__(self, ep):
        super().__init__()
        kind = {"balance_loss": 0.3, "z_loss": 0.2, "dtype": torch.float64}
        self.moe = weft.nn.MoE(WIDTH, HIDDEN, EXPERTS, choices=2, shared=1, ep=ep, expert=lambda _: Expert(), **kind)

    def forward(self, x):
        return self.moe(x)


def expected(skipped):
    state = state_of(9, shared=True)
    for step in range(STEPS):
        if step in skipped:
            continue
        inputs = [tokens_of(r, size, seed=step) for r in range(size)]
        _, _, gradients, _, _ = whole_job(state, size, 2, 1.25, inputs=inputs)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        scale = min(1.0, CLIP / (norm + 1e-6))
        state = {name: value - LR * scale * gradients[name] for name, value in state.items()}
    return state


def trained(ep, find_unused, overflows):
    model = Model(ep)
    model.moe.load_state_dict(state_of(9, shared=True))
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    experts = {f"moe.experts.{name}" for name, _ in model.moe.experts.named_parameters()}
    assert ddp.parameters_to_ignore >= experts, ddp.parameters_to_ignore
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    left_out, where = [], 0 if ep == 1 else size - 1  # (on a rank whose experts get rows)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = tokens_of(rank, size, seed=step)
        for expert in model.moe.experts.values():
            expert.overflows = overflows and step == OVERFLOWS and rank == where
        out = ddp(x)
        scaler.scale((out * y).sum() + weft.nn.moe_loss(ddp)).backward()
        scaler.unscale_(optimizer)
        weft.clip_grad_norm_(ddp.parameters(), CLIP)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            left_out.append(step)
    assert left_out == ([OVERFLOWS] if overflows else []), left_out
    return model.moe.state_dict()


def distance(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in b)


whole, without = expected(()), expected((OVERFLOWS,))
assert distance(whole, without) > 1e-3, "control: a step that was left out is seen"
for ep in (1, size):
    for find_unused in (False, True):
        assert distance(trained(ep, find_unused, False), whole) < 1e-12 * STEPS
    assert distance(trained(ep, False, True), without) < 1e-12 * STEPS
weft.barrier()
dist.destroy_process_group()
