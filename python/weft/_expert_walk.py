"""One call of a layer of experts: what is computed between the moves of its block, forward and backward (weft.nn.MoE)."""

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch

from . import _weft
from ._collectives import all_reduce
from ._memory import memory_of
from ._weft import UsageError
from ._world import size

if TYPE_CHECKING:
    from ._experts import MoE

_engine = torch.autograd.Variable._execution_engine


@dataclasses.dataclass(frozen=True, eq=False)
class Handle:
    """One call of a layer: who went where. What backward, combine and the losses need; nobody changes it."""

    core: _weft.ExpertLayer
    number: int
    row_of_copy: torch.Tensor  # of each token's each choice; -1: dropped
    token_of_row: torch.Tensor  # -1: an empty place
    counts: torch.Tensor  # [slices, experts]
    dropped: int

    @staticmethod
    def begin(core: _weft.ExpertLayer, tokens: int) -> "Handle":
        nothing = torch.empty(0, dtype=torch.int64)
        return Handle(core, core.begin(tokens), nothing, nothing, nothing, 0)

    def routed(self, chosen: torch.Tensor, experts: int, slices: int) -> "Handle":
        copies, rows, counts, dropped = self.core.route(self.number, memory_of(chosen.to("cpu")))
        out = Handle(self.core, self.number, _integers(copies), _integers(rows), _integers(counts).view(slices, experts), dropped)
        weakref.finalize(out, self.core.forget, self.number).atexit = False
        return out


def _integers(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.int64) if raw else torch.empty(0, dtype=torch.int64)


def rows_at(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows by their numbers; -1: zeros."""
    nothing = rows.new_zeros((1, rows.shape[1]))
    places = torch.where(numbers >= 0, numbers, rows.shape[0]).to(rows.device)
    return torch.cat([rows, nothing]).index_select(0, places)


class _Walk:
    """What a call computes between its moves, forward and backward."""

    def __init__(self, layer: "MoE", handle: Handle, learns: bool, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self.layer, self.handle, self.core, self.learns = layer, handle, handle.core, learns
        self.like = rows.new_empty(0)  # device and type of what experts compute
        self.wire = torch.float64 if rows.dtype == torch.float64 else torch.float32
        self.alone = layer.ep == 1
        self.bounds = [0, *handle.counts.sum(1).cumsum(0).tolist()]
        self.passed: List[Tuple[torch.Tensor, torch.Tensor]] = []  # of each slice: what its experts got and gave
        self.passed_shared: Optional[Tuple[torch.Tensor, torch.Tensor]] = None
        self.tokens: Optional[torch.Tensor] = tokens  # that shared experts take
        self.went_back = False

    def _image(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows that travel."""
        return rows.detach().to("cpu", self.wire).contiguous()

    def _give(self, what: str, piece: int, rows: torch.Tensor) -> None:
        if self.alone:
            return
        image = self._image(rows)
        self.core.give(self.handle.number, what, piece, memory_of(image), image)

    def _arrived(self, what: str, piece: int) -> Tuple[torch.Tensor, torch.Tensor]:
        region, counts = self.core.arrived(self.handle.number, what, piece)
        rows = torch.empty((0, self.layer.width), dtype=self.wire)
        if memoryview(region).nbytes > 0:
            rows = torch.frombuffer(region, dtype=self.wire).view(-1, self.layer.width)
        return rows, _integers(counts)

    def forward(self, rows: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        self._give("dispatch", 0, rows)
        shared = rows.new_empty(0)
        combined: List[torch.Tensor] = []
        at, piece = self.core.go_on(self.handle.number)
        while at != "end":
            if at == "shared":
                shared = self._pass_shared()
            elif at == "slice":
                self._pass_slice(rows, piece)
            elif self.alone:
                combined = [given.detach() for _, given in self.passed]
            else:
                combined = [self._arrived("combine", s)[0].to(self.like) for s in range(self.layer.slices)]
            at, piece = self.core.go_on(self.handle.number)
        if not self.learns:
            self.passed, self.passed_shared = [], None
        return torch.cat(combined).to(self.like), shared

    def _pass_shared(self) -> torch.Tensor:
        assert self.layer.shared is not None and self.tokens is not None
        with torch.set_grad_enabled(self.learns):
            got = self.tokens.detach().requires_grad_(self.learns)
            given = self.layer.shared(got)
        self.passed_shared, self.tokens = (got, given), None
        return given.detach().to(self.like)  # type: ignore[no-any-return]

    def _pass_slice(self, own: torch.Tensor, piece: int) -> None:
        if self.alone:
            rows, counts = own[self.bounds[piece] : self.bounds[piece + 1]], self.handle.counts[piece]
        else:
            rows, counts = self._arrived("dispatch", piece)
        with torch.set_grad_enabled(self.learns):
            got = rows.detach().to(self.like).requires_grad_(self.learns)
            given = self.layer.experts(got, counts)
        self.passed.append((got, given))
        self._give("combine", piece, given)

    def backward(
        self, combined: torch.Tensor, shared: torch.Tensor, dense: List[torch.Tensor], experts: List[torch.Tensor]
    ) -> "_Gradients":
        if self.went_back:
            raise UsageError(f"layer '{self.layer.name}': backward passes once through a call of the layer, and this one has had it")
        self.went_back = True
        out = _Gradients(dense, experts)
        number = self.handle.number
        for s in range(self.layer.slices):
            self._give("combine_back", s, combined[self.bounds[s] : self.bounds[s + 1]])
        if not self.core.was_backward(number):
            self.core.begin_backward(number)
        of_rows: List[torch.Tensor] = [combined] * self.layer.slices
        at, piece = self.core.go_on(number)
        while at != "end":
            if at == "slice":
                got, given = self.passed[piece]
                if self.alone:
                    gradient = combined[self.bounds[piece] : self.bounds[piece + 1]]
                else:
                    gradient = self._arrived("combine_back", piece)[0]
                of_rows[piece] = out.add(got, given, gradient, experts, out.experts)
                self.passed[piece] = (got.detach(), got.detach())  # its graph is let go
                self._give("dispatch_back", piece, of_rows[piece])
            elif at == "shared":
                assert self.passed_shared is not None
                got, given = self.passed_shared
                out.tokens = out.add(got, given, shared, dense, out.dense)
                self.passed_shared = None
            elif at == "gate" and not self.alone:
                of_rows = [self._arrived("dispatch_back", s)[0] for s in range(self.layer.slices)]
            at, piece = self.core.go_on(number)
        out.rows = torch.cat([each.to(self.like) for each in of_rows])
        return out


class _Gradients:
    """Of a call: of what it got, and of parameters, over all slices. Zeros where nothing came."""

    def __init__(self, dense: List[torch.Tensor], experts: List[torch.Tensor]) -> None:
        self.rows: Optional[torch.Tensor] = None
        self.tokens: Optional[torch.Tensor] = None
        self.dense = [torch.zeros_like(p) for p in dense]
        self.experts = [torch.zeros_like(p) for p in experts]

    @staticmethod
    def add(
        got: torch.Tensor, given: torch.Tensor, gradient: torch.Tensor, parameters: List[torch.Tensor], into: List[torch.Tensor]
    ) -> torch.Tensor:
        """Gives the gradient of what was got."""
        if not given.requires_grad:
            return torch.zeros_like(got)
        wanted = [got, *(p for p in parameters if p.requires_grad)]
        found = torch.autograd.grad(given, wanted, gradient.to(given), allow_unused=True)
        places = iter(found[1:])
        for p, sum_of in zip(parameters, into):
            each = next(places) if p.requires_grad else None
            if each is not None:
                sum_of.add_(each)
        return found[0] if found[0] is not None else torch.zeros_like(got)


class Exchange(torch.autograd.Function):
    """Dispatch, experts and combine of a call: rows of all slices out, the same rows back."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: "MoE",
        handle: Handle,
        learns: bool,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_dense: int,
        *parameters: torch.Tensor,
    ) -> Any:
        ctx.walk = _Walk(layer, handle, learns, rows, tokens)
        ctx.parameters = (list(parameters[:num_dense]), list(parameters[num_dense:]))
        return ctx.walk.forward(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, combined: torch.Tensor, shared: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        walk: _Walk = ctx.walk
        dense, experts = ctx.parameters
        with walk.layer._turn:
            gradients = walk.backward(combined, shared, dense, experts)
        _Sums.add(walk, experts, gradients.experts)
        of_dense = [g if p.requires_grad else None for p, g in zip(dense, gradients.dense)]
        return None, None, None, gradients.rows, gradients.tokens, None, *of_dense, *[None] * len(experts)


class Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, router: torch.Tensor, handle: Handle) -> torch.Tensor:
        loss, gradient = handle.core.losses(handle.number)
        ctx.gradient = torch.tensor(gradient, dtype=router.dtype, device=router.device)
        return router.new_tensor(loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:
        return gradient * ctx.gradient, None


class _Sums:
    """Gradients of experts on their way between the ranks that hold the same ones; in p.grad when backward has ended."""

    _pending: "List[_Sums]" = []
    _task = -1  # autograd's number of the backward whose end is awaited

    def __init__(self, parameters: List[torch.Tensor], flat: torch.Tensor, work: Optional[_weft.Work]) -> None:
        self.parameters, self.flat, self.work = parameters, flat, work

    @classmethod
    def add(cls, walk: _Walk, parameters: List[torch.Tensor], gradients: List[torch.Tensor]) -> None:
        wide = any(g.dtype == torch.float64 for g in gradients)
        dtype = torch.float64 if wide else torch.float32
        flat = torch.cat([g.reshape(-1).to("cpu", dtype) for g in gradients]) if gradients else torch.empty(0)
        work = walk.core.reduce(walk.handle.number, memory_of(flat), flat) if walk.core.replicas > 1 else None
        cls._pending.append(cls(parameters, flat, work))
        task = torch._C._current_graph_task_id()
        if cls._task != task:
            cls._task = task
            _engine.queue_callback(cls._take_all)

    @classmethod
    def _take_all(cls) -> None:
        pending, cls._pending, cls._task = cls._pending, [], -1
        finite = True
        for each in pending:
            if each.work is not None:
                each.work.wait()
            each.flat.div_(size())
            finite = finite and bool(each.flat.isfinite().all())
        bad = torch.tensor([0.0 if finite else 1.0])
        all_reduce(bad, "max")
        for each in pending:
            if bool(bad):
                each.flat.fill_(float("nan"))
            at = 0
            for p in each.parameters:
                part = each.flat[at : at + p.numel()].view(p.shape).to(p)
                at += p.numel()
                if p.grad is None:
                    p.grad = part.clone()
                else:
                    p.grad.detach().add_(part)
