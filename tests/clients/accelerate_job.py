"""accelerate prepares the model (DDP), the optimizer and the loader; weft's hook is registered on what it prepared."""

import accelerate
import torch
from checks import learned_together

import weft

torch.manual_seed(0)
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
loader = torch.utils.data.DataLoader(torch.randn(512, 16), batch_size=8)
model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5), loader)
state = weft.DDPState(model, scheme="spardl", density=0.05, dense_below=10)
model.register_comm_hook(state, weft.ddp_hook)
losses = []
for _ in range(6):
    for x in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - x.roll(1, 1)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
assert (weft.rank(), weft.size()) == (accelerator.process_index, 2) and state.step == len(losses) // 2
learned_together(model.parameters(), losses)
print(f"accelerate {accelerate.__version__}: rank {weft.rank()}, loss {losses[0]:.3f} to {losses[-1]:.3f}")
accelerator.end_training()
