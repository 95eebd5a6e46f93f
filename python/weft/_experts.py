"""weft.nn.MoE: a layer of experts that are dealt to the ranks. Tokens travel to their experts and back.

The exchange is the core's (a table of moves, as for everything that trains): who goes where, capacity, slices, all-to-alls that go
before gradients. Here stands what computes between its moves: the gate, the experts of a slice when its rows have come, the merge. It
is one autograd function, so backward walks the same moves the other way: gradients of all slices go out first, and experts compute
theirs slice by slice as they come.

Gradients of experts are summed over the ranks that hold the same ones while backward goes on, and are in p.grad when it has ended,
divided by the number of ranks: as the averages of DataParallel and DDP.
"""

import threading
import zlib
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from . import _weft
from ._apart import watch_ddp
from ._collectives import all_gather, broadcast
from ._expert_walk import Exchange, Handle, Losses, rows_at
from ._local_experts import FeedForward, LocalExperts
from ._weft import Error, UsageError
from ._world import init, rank, session, size

_SMALL = 1e-20  # against a division by zero, as in the core's models
_made = 0


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


class MoE(torch.nn.Module):
    """A layer of `experts`, of which a gate chooses `choices` for each token. Every rank makes the same one, and calls it equally
    often, with its own tokens [..., width]: none of them where it has none.

        layer = weft.nn.MoE(512, 2048, experts=16, choices=2)
        y = layer(x)
        loss = loss_of(y) + weft.nn.moe_loss(model)            # balance and z losses, of all ranks' tokens

    Affects results, equal on all ranks:
      choices          1 or more; with several, a token's weights are made to sum to one
      capacity_factor  an expert has ceil(choices * capacity_factor * tokens / experts) places for a rank's tokens; who comes later,
                       second choices behind all first ones, gets nothing from it. 0: nobody is dropped
      shared           experts that every token goes through beside its choices: one feed-forward of so many times `hidden`
      activation       of the feed-forwards (gelu by tanh)
      expert           makes an expert instead: called with its number, gives a module of [rows, width] to [rows, width]
      jitter           in training, what the gate sees is multiplied by 1 - jitter .. 1 + jitter
      balance_loss, z_loss   weights of the losses in `loss`
    Affects speed only (and sums by rounding):
      slices           in which rows travel: experts compute on one while others are on their way
      ep               ranks that the experts are dealt to, neighbours; it divides the number of ranks, which hold them size / ep times,
                       and of experts. As many as possible where it is not said

    Initial values are rank 0's. Parameters of experts are this rank's own: DataParallel and DDP leave them alone, any optimizer of torch
    updates them, weft.clip_grad_norm_ counts each once. The layer sums their gradients over the ranks that hold the same ones, and divides
    by the number of ranks; where one is not finite on any rank they are NaN on all, so that all ranks' GradScalers leave the same steps
    out. state_dict() has the whole layer by name at any ep, load_state_dict() takes it: collectives, both.
    """

    def __init__(
        self,
        width: int,
        hidden: Optional[int] = None,
        experts: int = 8,
        choices: int = 1,
        capacity_factor: float = 1.25,
        shared: int = 0,
        activation: Callable[[torch.Tensor], torch.Tensor] = _gelu,
        expert: Optional[Callable[[int], torch.nn.Module]] = None,
        jitter: float = 0.0,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        slices: int = 2,
        ep: Optional[int] = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        name: Optional[str] = None,
    ) -> None:
        super().__init__()
        global _made
        init()
        self.width, self.num_experts, self.choices = width, experts, choices
        self.capacity_factor, self.jitter, self.slices = float(capacity_factor), float(jitter), slices
        self.balance_loss, self.z_loss = float(balance_loss), float(z_loss)
        self.name = name or f"moe{_made}"
        _made += 1
        # First what all ranks have in common, so that what is refused is refused by all of them.
        options = (experts, choices, slices, ep or 0, width, hidden or 0, shared)
        numbers = (self.capacity_factor, self.jitter, self.balance_loss, self.z_loss, self.name, str(dtype))
        _require_alike(self.name, options, zlib.crc32(repr(numbers).encode()))
        self.ep = _group_of(self.name, experts, ep)
        self._check(hidden, expert, shared)
        kind = {"device": device, "dtype": dtype}
        self.gate = torch.nn.Linear(width, experts, bias=False, **kind)
        self.shared: Optional[torch.nn.Module] = None
        if shared:
            self.shared = FeedForward(width, shared * (hidden or width), activation, **kind)
        made = expert or (lambda _: FeedForward(width, hidden or 0, activation, **kind))
        self.experts = LocalExperts(self.name, made, experts, self.ep)
        for tensor in [*self.gate.parameters(), *(self.shared.parameters() if self.shared is not None else ())]:
            broadcast(tensor.data)
        self._cores: Dict[torch.dtype, _weft.ExpertLayer] = {}
        self._turn = threading.RLock()  # autograd has a thread a device
        self._last: Optional[Tuple[Handle, torch.Tensor]] = None
        self._loss: Optional[torch.Tensor] = None
        watch_ddp()

    def _check(self, hidden: Optional[int], expert: Any, shared: int) -> None:
        def refuse(what: str) -> None:
            raise UsageError(f"layer '{self.name}': {what}")

        if self.width < 1:
            refuse(f"tokens have a width, not {self.width}")
        if expert is None and (hidden is None or hidden < 1):
            refuse("say the width of the experts' hidden layer, or expert=, which makes one")
        if not 1 <= self.choices <= self.num_experts:
            refuse(f"a token has 1 to {self.num_experts} choices, as many as there are experts, not {self.choices}")
        if not 0 <= self.capacity_factor <= 1e6:
            refuse(f"a capacity factor is positive, or 0 where nobody is dropped, not {self.capacity_factor}")
        if self.slices < 1:
            refuse(f"tokens travel in at least one slice, not {self.slices}")
        if shared < 0 or not 0 <= self.jitter < 1:
            refuse("shared experts are a number from 0 on, jitter one from 0 to 1")
        if not (0 <= self.balance_loss < float("inf") and 0 <= self.z_loss < float("inf")):
            refuse("weights of losses are positive, or 0")

    # ---- forward ----

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 1 or x.shape[-1] != self.width:
            raise UsageError(f"layer '{self.name}': tokens are {tuple(x.shape)}, and the layer is of width {self.width}")
        tokens = x.reshape(-1, self.width)
        with self._turn:
            core = self._core(tokens.dtype)
            call = Handle.begin(core, tokens.shape[0])
            weights, chosen, router = self._gate(tokens)
            handle = call.routed(chosen, self.num_experts, self.slices)
            core.give_router(handle.number, router.detach().double().tolist())
            rows = rows_at(tokens, handle.token_of_row)
            dense = list(self.shared.parameters()) if self.shared is not None else []
            given = (self, handle, torch.is_grad_enabled(), rows, tokens, len(dense), *dense, *self.experts.trained())
            combined, shared = Exchange.apply(*given)  # type: ignore[no-untyped-call]
            copies = rows_at(combined, handle.row_of_copy).view(*weights.shape, self.width)
            out = (copies * weights.to(copies.dtype).unsqueeze(2)).sum(1)
            if self.shared is not None:
                out = out + shared
            if out.requires_grad:
                out.register_hook(lambda _: self._enter_backward(handle))  # type: ignore[no-untyped-call]
            self._last, self._loss = (handle, router), None
        return out.view(x.shape)

    def _core(self, dtype: torch.dtype) -> _weft.ExpertLayer:
        """Rows travel as float64 where tokens are that, else as float32."""
        wire = torch.float64 if dtype == torch.float64 else torch.float32
        if wire not in self._cores:
            gate = (self.num_experts, self.choices, self.capacity_factor)
            layer = (self.name, self.width, *gate, self.slices, self.ep, self.shared is not None)
            self._cores[wire] = _weft.ExpertLayer(session(), layer, (self.balance_loss, self.z_loss), str(wire).removeprefix("torch."))
        session()  # says so in a forked child, and after shutdown()
        return self._cores[wire]

    def _gate(self, tokens: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights and experts of each token's choices, and what the losses need. In float32 at least."""
        dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
        with torch.autocast(tokens.device.type, enabled=False):
            seen = tokens.to(dtype)
            if self.training and self.jitter > 0:
                seen = seen * torch.empty_like(seen).uniform_(1 - self.jitter, 1 + self.jitter)
            logits = torch.nn.functional.linear(seen, self.gate.weight.to(dtype))
            if not bool(logits.detach().isfinite().all()):
                text = f"rank {rank()}: the gate of layer '{self.name}' gives numbers that are not finite, so its tokens have no experts"
                session().abandon(text)
                raise Error(text)
            probabilities = logits.softmax(-1)
            # Of equal ones the first comes first.
            chosen = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.choices].contiguous()
            weights = probabilities.gather(1, chosen)
            if self.choices > 1:
                weights = weights / weights.sum(1, keepdim=True).clamp_min(_SMALL)
            counts = torch.bincount(chosen.reshape(-1), minlength=self.num_experts).to(dtype)
            number = torch.tensor([float(tokens.shape[0])], dtype=dtype, device=tokens.device)
            router = torch.cat([probabilities.sum(0), logits.logsumexp(-1).square().sum().view(1), counts, number])
        return weights, chosen, router

    # ---- losses ----

    @property
    def loss(self) -> torch.Tensor:
        """The balance and z losses of the last call, with their weights: of all ranks' tokens, the same on all ranks.

        balance: experts * the sum over them of (share of all choices) * (mean probability); z: the mean of (logsumexp of the logits)^2.
        """
        if self._last is None:
            raise UsageError(f"layer '{self.name}' has losses when it was called")
        if self._loss is None:
            handle, router = self._last
            self._loss = Losses.apply(router, handle)  # type: ignore[no-untyped-call]
        return self._loss

    @property
    def load(self) -> torch.Tensor:
        """Choices of each expert by all ranks' tokens in the last call, dropped ones too."""
        if self._last is None:
            raise UsageError(f"layer '{self.name}' has a load when it was called")
        handle, _ = self._last
        return torch.tensor(handle.core.chosen(handle.number), dtype=torch.float64)

    @property
    def dropped(self) -> int:
        """Of this rank's tokens in the last call: choices that found no place."""
        return 0 if self._last is None else self._last[0].dropped

    # ---- backward ----

    def _enter_backward(self, handle: "Handle") -> None:
        """Gradients of other parameters give way from here on: the combine's gradients are about to go out."""
        with self._turn:
            if not handle.core.was_backward(handle.number):
                handle.core.begin_backward(handle.number)

    def extra_repr(self) -> str:
        mine = ", ".join(self.experts.numbers())
        drop = f"capacity_factor={self.capacity_factor:g}" if self.capacity_factor else "dropless"
        return f"{self.width}, experts={self.num_experts}, choices={self.choices}, {drop}, ep={self.ep}, experts {mine} of rank {rank()}"


def moe_loss(model: torch.nn.Module) -> torch.Tensor:
    """The losses of all weft.nn.MoE layers of the model, of their last calls; zero where it has none."""
    losses = [module.loss for module in model.modules() if isinstance(module, MoE)]
    return torch.stack([each.to(losses[0]) for each in losses]).sum() if losses else torch.zeros(())


def _group_of(name: str, experts: int, ep: Optional[int]) -> int:
    if experts < 1:
        raise UsageError(f"layer '{name}': there is at least one expert, not {experts}")
    if ep is None:
        return max(d for d in range(1, size() + 1) if size() % d == 0 and experts % d == 0)
    if ep < 1 or size() % ep != 0:
        raise UsageError(f"layer '{name}': {size()} ranks do not make groups of {ep} that share its experts")
    if experts % ep != 0:
        raise UsageError(f"layer '{name}': {experts} experts cannot be dealt to {ep} ranks, as many to each")
    return ep


_OPTIONS = ("experts", "choices", "slices", "ep", "width", "hidden", "shared")


def _require_alike(name: str, options: Tuple[int, ...], rest: int) -> None:
    """On all ranks. A collective."""
    mine = torch.tensor([*options, rest])
    of_rank = torch.zeros(size() * mine.numel(), dtype=torch.int64)
    all_gather(of_rank, mine)
    for other, theirs in enumerate(of_rank.view(size(), -1).tolist()):
        for option, here, there in zip(_OPTIONS, options, theirs):
            if here != there:
                raise UsageError(f"layer '{name}': {option} is {here} on rank {rank()} and {there} on rank {other}")
        if theirs[-1] != rest:
            what = "capacity factor, jitter, loss, name or type"
            raise UsageError(f"layer '{name}' has another {what} on rank {other} than on rank {rank()}")
