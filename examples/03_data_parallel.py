"""Data-parallel training in Python: one line around the module.

    torchrun --nproc-per-node 4 examples/03_data_parallel.py
    weft launch -n 4 -- python examples/03_data_parallel.py
    python examples/03_data_parallel.py                            # alone: one rank
"""

import torch
from data import batch, model

import weft

torch.set_num_threads(1)
weft.init()  # this process's place comes from its launcher

# Every rank gets rank 0's parameters. Of each gradient the largest 5 % are sent; what is left behind is added to the next.
net = weft.DataParallel(model(), scheme="spardl", density=0.05)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

for step in range(100):
    # The usual recipe for small densities: begin with more. All ranks say the same.
    net.compression.set_density(0.25 if step < 20 else 0.05)
    optimizer.zero_grad()
    x, y = batch(step, weft.rank())
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()  # gradients go out while it runs; when it returns, p.grad holds the averages
    optimizer.step()
    if step % 20 == 0 or step == 99:
        mean = loss.detach()
        weft.all_reduce(mean)
        if weft.rank() == 0:
            sent = net.compression.sent_bytes
            print(f"step {step:2}: loss {mean.item() / weft.size():.3f}, {sent} bytes of gradients sent by each rank")

# A checkpoint has the model, the optimizer, and what compression keeps, which is each rank's own.
state = {"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "weft": net.compression.state_dict()}
net.compression.load_state_dict(state["weft"])
