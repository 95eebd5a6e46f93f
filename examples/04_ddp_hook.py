"""torch's own DistributedDataParallel, with its gradients summed by weft: two lines in a program that uses DDP.

    torchrun --nproc-per-node 4 examples/04_ddp_hook.py
"""

import torch
import torch.distributed as dist
from data import batch, model
from torch.nn.parallel import DistributedDataParallel

import weft

torch.set_num_threads(1)
dist.init_process_group("gloo")

ddp = DistributedDataParallel(model())
state = weft.DDPState(ddp, scheme="spardl", density=0.05)  # joins weft's ranks: the same processes, other connections
ddp.register_comm_hook(state, weft.ddp_hook)

optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
for step in range(100):
    state.set_density(0.25 if step < 20 else 0.05)
    optimizer.zero_grad()
    x, y = batch(step, dist.get_rank())
    loss = torch.nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and (step % 20 == 0 or step == 99):
        print(f"step {step:2}: loss {loss.item():.3f}, {state.sent_bytes} bytes of gradients sent by each rank")

# Unlike DDP's own hooks, this one's state is complete and can be saved: residuals belong to parameters by name.
print(f"rank {weft.rank()}: {len(state.state_dict()['rows'])} rows of state")
dist.destroy_process_group()
