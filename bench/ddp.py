#!/usr/bin/env python3
"""One rank of a training job in Python with stock PyTorch: what bench/against_ddp compares weft with.

The model is weft_torch/models/gpt.cc over again: the same tensors by the same names, the same operations, the same first
weights' distribution. Run it under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT:

    tools/netlab run --hosts 4 --rate 1gbit -- .venv/bin/python bench/ddp.py --system ddp --out /tmp/ddp

    --system none        no exchange of gradients: the same computation, all ranks at the same time
    --system ddp         DistributedDataParallel over Gloo
    --system powersgd    the same with torch's PowerSGD hook, in one bucket (with several it aborts over Gloo: its callbacks
                         issue all-reduces in an order that differs between ranks)
    --system weft        weft.DataParallel around the same module

Each rank writes OUT/rank.N.json: seconds of each measured step, and what it ran. A step is forward, backward and AdamW.
Tokens are drawn from a Zipf distribution: the time of these systems does not depend on them, but for weft's selection.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DEVIATION = 0.02
ONE_BUCKET_MIB = 4096
ADAMW = ("foreach", "fused")


class World:
    """This process's place in the job, joined through what the system exchanges gradients with."""

    def __init__(self, system: str, trace: str = "") -> None:
        self.rank = int(os.environ["RANK"])
        self.library: Any = torch.distributed
        if system == "weft":
            import weft

            self.library = weft
            weft.init(trace=trace)
        else:
            torch.distributed.init_process_group("gloo")

    def barrier(self) -> None:
        self.library.barrier()

    def from_rank_0(self, value: int) -> int:
        shared = torch.tensor([float(value)])
        self.library.broadcast(shared, 0)
        return int(shared.item())

    def leave(self) -> None:
        if self.library is torch.distributed:
            self.library.destroy_process_group()
        else:
            self.library.shutdown()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.count = heads
        self.norm = nn.LayerNorm(width)
        self.heads = nn.Linear(width, 3 * width)  # rows head by head: query, key, value
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, width = x.shape
        qkv = self.heads(self.norm(x)).view(sequences, length, self.count, 3, width // self.count)
        q, k, v = (qkv.select(3, i).transpose(1, 2) for i in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(out.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention = Attention(width, heads)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(x), self.dropout, self.training)
        return x + F.dropout(self.mlp(x), self.dropout, self.training)


class Gpt(nn.Module):
    """forward(tokens, targets) is the mean of the cross entropy."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.dropout = options.dropout
        width = options.width
        self.embedding = nn.ModuleDict({"token": nn.Embedding(options.vocabulary, width),
                                        "position": nn.Embedding(options.context, width)})
        self.layer = nn.ModuleList(Layer(width, options.heads, options.dropout) for _ in range(options.layers))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(width)})
        residual = DEVIATION / math.sqrt(2 * options.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=residual if "projection" in name or "down" in name else DEVIATION)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        table = self.embedding["token"].weight
        x = F.embedding(tokens, table) + self.embedding["position"].weight[: tokens.size(1)]
        x = F.dropout(x, self.dropout, self.training)
        for layer in self.layer:
            x = layer(x)
        logits = F.linear(self.head["norm"](x).flatten(0, 1), table)
        return F.cross_entropy(logits, targets.flatten())


class Encoder(nn.Module):
    """A language model as torch's own modules make it: nothing of it is tied, and dropout, norms and heads are torch's."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.embedding = nn.Embedding(options.vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, options.heads, 4 * width, options.dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, options.layers)
        self.decoder = nn.Linear(width, options.vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        logits = self.decoder(self.encoder(self.embedding(tokens), mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS = {"gpt": Gpt, "encoder": Encoder}


def faster_adamw(model: nn.Module) -> str:
    """Which AdamW is the faster one on this machine, tried on a copy with zero gradients."""
    seconds: dict[str, float] = {}
    for kind in ADAMW:
        try:
            copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
            optimizer = torch.optim.AdamW(copies, **{kind: True})
            for p in copies:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            times = []
            for _ in range(3):
                start = time.perf_counter()
                optimizer.step()
                times.append(time.perf_counter() - start)
            seconds[kind] = min(times)
        except (RuntimeError, TypeError, ValueError):
            continue  # this torch has it not on the CPU
    return min(seconds, key=lambda kind: seconds[kind])


def wrap(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    if options.system == "none":
        return model
    if options.system == "weft":
        import weft

        more = {"density": options.density} if options.scheme not in ("dense", "dense-bf16") else {}
        if options.bucket_mib:
            more["bucket_mib"] = options.bucket_mib
        return weft.DataParallel(model, scheme=options.scheme, **more)
    mib = options.bucket_mib or (ONE_BUCKET_MIB if options.system == "powersgd" else None)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=mib, gradient_as_bucket_view=options.views)
    if options.system == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=options.factor_rank,
                                            start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def batches(options: argparse.Namespace, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 + rank)
    odds = 1.0 / torch.arange(1, options.vocabulary + 1, dtype=torch.float64)
    while True:
        shape = options.sequences, options.length + 1
        drawn = torch.multinomial(odds, shape[0] * shape[1], replacement=True, generator=generator).view(shape)
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def measure(model: nn.Module, options: argparse.Namespace, world: World) -> dict[str, Any]:
    kind = ADAMW[world.from_rank_0(ADAMW.index(faster_adamw(model)))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{kind: True})
    seconds, losses = [], []
    source = batches(options, world.rank)
    world.barrier()
    for step in range(options.warm_up + options.steps):
        tokens, targets = next(source)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=not options.views)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        if step >= options.warm_up:
            seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    world.barrier()  # nobody's end makes the others' last steps quicker
    return {"seconds": seconds, "first_loss": losses[0], "last_loss": losses[-1], "adamw": kind,
            "parameters": sum(p.numel() for p in model.parameters())}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--system", choices=("none", "ddp", "powersgd", "weft"), default="ddp")
    out.add_argument("--model", choices=tuple(MODELS), default="gpt", help="encoder: of torch's own modules, nothing tied")
    out.add_argument("--bucket-mib", type=float, default=0,
                     help="of a bucket; 0: ddp (25, the first 1) and weft as they come, powersgd one bucket")
    out.add_argument("--views", action="store_true", help="ddp: gradients are views of buckets and keep their memory")
    out.add_argument("--factor-rank", type=int, default=1, help="powersgd: columns of its factors")
    out.add_argument("--scheme", default="spardl", help="weft")
    out.add_argument("--density", type=float, default=0.01, help="weft")
    for name, value in (("vocabulary", 24000), ("context", 128), ("width", 384), ("layers", 6), ("heads", 6)):
        out.add_argument(f"--{name}", type=int, default=value)
    out.add_argument("--dropout", type=float, default=0.1)
    out.add_argument("--sequences", type=int, default=1, help="of a rank in a step")
    out.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    out.add_argument("--warm-up", type=int, default=3, help="steps that are not measured")
    out.add_argument("--steps", type=int, default=15, help="measured ones")
    out.add_argument("--out", type=Path, required=True)
    out.add_argument("--trace", default="", help="folder of the traces of --system weft")
    return out


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    world = World(options.system, options.trace)
    result = measure(wrap(MODELS[options.model](options), options), options, world)
    result |= {"rank": world.rank, "torch": torch.__version__, "system": options.system}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"rank.{world.rank}.json").write_text(json.dumps(result) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
