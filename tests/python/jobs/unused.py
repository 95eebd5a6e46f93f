"""DDP with find_unused_parameters: what compression left behind of a parameter that no rank uses in a step waits for the next one.

Whole numbers, so that sums are exact: over all steps, gradients in = averages that DDP delivered, times the ranks, + residuals.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import weft

dist.init_process_group("gloo")
weft.init()
rank, size = weft.rank(), weft.size()


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always = torch.nn.Parameter(torch.zeros(40, 50))
        self.sometimes = torch.nn.Parameter(torch.zeros(40, 50))
        self.once = torch.nn.Parameter(torch.zeros(40, 50))  # by one rank

    def forward(self, gradients):
        """Whose gradient of p is gradients[p]."""
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


def gradients_of(step, r):
    generator = torch.Generator().manual_seed(100 * step + r)
    out = {"always": torch.randint(-50, 50, (40, 50), generator=generator).float()}
    if step % 3 == 0:  # so large that its residual is what the next steps would select
        out["sometimes"] = torch.randint(-5000, 5000, (40, 50), generator=generator).float()
    if step == 0 and r == 0:
        out["once"] = torch.randint(-5000, 5000, (40, 50), generator=generator).float()
    return out


def residuals(state):
    rows = [row for row in state.state_dict()["rows"] if row["kind"] == "residual"]
    return {row["name"]: torch.zeros(2000) if row["values"] is None else row["values"] for row in rows}


def missing_mass(**options):
    """The largest difference, over all elements."""
    module = Branches()
    ddp = DistributedDataParallel(module, find_unused_parameters=True)
    state = weft.DDPState(ddp, **{"scheme": "spardl", "density": 0.02, "bucket_mib": 1, "divisor": 1.0, **options})
    ddp.register_comm_hook(state, weft.ddp_hook)
    balance = {name: torch.zeros(2000, dtype=torch.float64) for name, _ in module.named_parameters()}
    for step in range(7):
        ddp.zero_grad()
        mine, before = gradients_of(step, rank), residuals(state)
        ddp(mine).backward()
        used = set().union(*(gradients_of(step, r) for r in range(size)))
        for name, parameter in module.named_parameters():
            assert (parameter.grad is not None) == (name in used), (step, name)
            if "unused_stay_out" not in options and name not in used:
                assert torch.equal(residuals(state)[name], before[name]), "out of the step, bit by bit"
            if name in mine:
                balance[name] += mine[name].double().flatten()
            if parameter.grad is not None and rank == 0:  # the sum, as the divisor is one
                balance[name] -= parameter.grad.double().flatten()
    worst = 0
    for name, left in residuals(state).items():
        balance[name] -= left.double()
        weft.all_reduce(balance[name])
        worst = max(worst, balance[name].abs().max().item())
        assert left.abs().max() > 0 or name == "once", "control: something was left behind"
    return worst


assert missing_mass() == 0
assert missing_mass(codec="coo") == 0
assert missing_mass(unused_stay_out=False) > 0, "control: what DDP throws away is missing"
try:
    weft.DDPState(DistributedDataParallel(Branches(), find_unused_parameters=True), find_unused=False)
except weft.UsageError as error:
    assert "find_unused_parameters" in str(error)
else:
    raise AssertionError("a loss of mass that was asked for")
weft.barrier()
dist.destroy_process_group()
