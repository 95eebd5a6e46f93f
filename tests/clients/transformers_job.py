"""The Trainer of transformers wraps the model in DDP itself: a callback registers weft's hook before the first step."""

import os
import tempfile

import torch
import transformers
from checks import learned_together

import weft


class Hook(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if not hasattr(self, "state"):
            ddp = trainer.model_wrapped
            self.state = weft.DDPState(ddp, scheme="spardl", density=0.05, dense_below=100)
            ddp.register_comm_hook(self.state, weft.ddp_hook)


class Trainer(transformers.Trainer):
    def compute_loss(self, *inputs, **named):
        out = super().compute_loss(*inputs, **named)
        losses.append((out[0] if isinstance(out, tuple) else out).item())
        return out


losses = []
torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
texts = [{"input_ids": row, "labels": row} for row in (torch.arange(16).repeat(256, 1) + torch.arange(256)[:, None]) % 64]
with tempfile.TemporaryDirectory() as folder:
    arguments = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=60, per_device_train_batch_size=8, learning_rate=0.5, logging_steps=1000,
        save_strategy="no", report_to=[], disable_tqdm=True, gradient_accumulation_steps=2, optim="sgd", max_grad_norm=1.0,
    )
    hook = Hook()
    trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[hook])
    trainer.train()
assert (weft.rank(), weft.size()) == (int(os.environ["RANK"]), 2) and hook.state.step == 60
learned_together(model.parameters(), losses)
print(f"transformers {transformers.__version__}: rank {weft.rank()}, loss {losses[0]:.3f} to {losses[-1]:.3f}")
