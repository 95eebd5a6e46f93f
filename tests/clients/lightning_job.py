"""Lightning starts its ranks itself, with WORLD_SIZE and no RANK: the hook's state takes its place from the module's group."""

import lightning
import torch
from checks import learned_together

import weft


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
        self.losses = []

    def on_train_start(self):
        ddp = self.trainer.strategy.model
        self.state = weft.DDPState(ddp, scheme="spardl", density=0.05, dense_below=10)
        ddp.register_comm_hook(self.state, weft.ddp_hook)

    def training_step(self, batch, _):
        loss = (self.net(batch) - batch.roll(1, 1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self):
        assert (weft.rank(), weft.size()) == (self.global_rank, 2) and self.state.step == len(self.losses) > 60
        assert 0 < self.state.sent_bytes < 4 * sum(p.numel() for p in self.parameters())
        learned_together(self.parameters(), self.losses)
        print(f"lightning {lightning.__version__}: rank {weft.rank()}, loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.randn(512, 16), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, **quiet).fit(Net(), loader)
