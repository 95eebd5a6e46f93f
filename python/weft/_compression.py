"""The exchange of gradients, and its state: what DataParallel and the DDP hook share.

Residuals and everything else that lives between steps belong to parameters by name; it is in state_dict(). Gradients are
averaged over the ranks once, in the core. They are gathered in buckets, whose memory is made here: every parameter has a view of
its place, where the core reads its gradient and writes its average. Where any parameter is float64, all are summed and averaged as
float64, by "dense" only; else float32, bfloat16 and float16 as float32.
"""

import ctypes
import io
import math
import threading
import zlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch

from . import _weft
from ._agreed import agreed
from ._apart import is_apart
from ._collectives import all_gather, all_to_all
from ._weft import Error, StepResult, UsageError
from ._world import init, rank, session, size

State = Dict[str, Any]
_FORMAT = 2
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}  # of rows
NOT_FINITE = ("error", "skip", "nan")
_TRAINED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Compression:
    """Options and state of the exchange of some parameters' gradients.

    Options that affect results, equal on all ranks:
      scheme       a sparse all-reduce ("spardl", "oktopk", "topka", "topkdsa", "gtopk"), "dense", "dense-bf16" or "powersgd"
      density      entries that are sent over elements, in (0, 1]; of sparse schemes
      codec        "packed", "packed-bf16" or "coo": how entries are written
      residual     "gres", "pres", "lres" or "drop": who keeps what is dropped on the way; gres and drop lose nothing
      bucket_mib   MiB of gradients that travel together
      dense_below  parameters of fewer elements are never compressed
      momentum_correction, clip_local   of sparse schemes: docs/recipe.md; the optimizer then has no momentum of its own
      powersgd_rank, powersgd_wire, seed   of powersgd: columns of the factors; "float32" or "bf16": what their sums travel as;
                   and of the first ones
      not_finite   a gradient with NaN or infinity on any rank: "error" raises on all ranks, "skip" leaves all gradients None,
                   "nan" makes them NaN as without compression. The state is as before the step. "error" unless there is a scaler
      scaler       the torch.amp.GradScaler by which the loss is multiplied (or what else has its get_scale()): the state is
                   kept in units of the loss itself, so a scale that changes does not change what residuals are worth. Gradients
                   come back in the scale's units. not_finite is then "nan", from which the scaler learns of an overflow
      find_unused  parameters without a gradient on all ranks keep none; False saves a short message a step
    Others (quotas, teams, gather, blocks, min_compression, threads) are those of docs/algorithms.md. A knob of a scheme has the name
    that it has on `weft train`'s command line, with underscores.
    """

    def __init__(
        self,
        parameters: Iterable[Tuple[str, torch.nn.Parameter]],
        scheme: str = "spardl",
        density: float = 0.01,
        codec: str = "packed",
        bucket_mib: float = 4.0,
        not_finite: Optional[str] = None,
        scaler: Any = None,
        find_unused: bool = True,
        **others: Any,
    ) -> None:
        init()
        scaler = used(scaler)
        not_finite = settled_not_finite(not_finite, scaler)
        if not bucket_mib > 0:
            raise UsageError(f"bucket_mib must be positive, not {bucket_mib}")
        named = [(name, p) for name, p in parameters if p.requires_grad]
        if not named:
            raise UsageError("there is no parameter that is trained")
        check_types(named)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.not_finite = not_finite
        self.find_unused = find_unused
        self._scaler = scaler
        self._scale = 1.0  # of the loss, in this step
        # Autograd has a thread a device, and the core takes one call at a time. Whoever looks before it calls holds it for both.
        self.turn = threading.RLock()
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        # A gradient is never made narrower than its parameter; a float32 is exact as a float64.
        wide = any(p.dtype == torch.float64 for p in self.parameters)
        self._dtype = torch.float64 if wide else torch.float32
        options = dict(
            others,
            scheme=scheme,
            density=float(density),
            codec=codec,
            bucket_mib=float(bucket_mib),
            find_unused=find_unused,
            dtype="float64" if wide else "float32",
            compared=zlib.crc32(f"{not_finite} {scaler is not None}".encode()),
        )
        rows = [p.shape[0] if p.dim() > 1 else 0 for p in self.parameters]
        self._core = _weft.DataParallel(session(), [(n, p.numel(), r) for (n, p), r in zip(named, rows)], options)
        pinned = any(p.device.type == "cuda" for p in self.parameters)
        lengths = self._core.bucket_elements
        self._buckets = [torch.zeros(n, dtype=self._dtype, device="cpu", pin_memory=pinned) for n in lengths]
        for index, bucket in enumerate(self._buckets):
            self._core.give_memory(index, bucket.data_ptr(), bucket.numel(), bucket)
        # Of each parameter: its place in a bucket, as a tensor of its own (autograd's views cannot be detached in place).
        self.views = [
            torch.empty(0, dtype=self._dtype, device="cpu").set_(self._buckets[b].untyped_storage(), first, p.shape)  # type: ignore[call-overload]
            for p, (b, first) in zip(self.parameters, self._core.places)
        ]

    @property
    def _live(self) -> _weft.DataParallel:
        session()  # says so in a forked child, and after shutdown()
        return self._core

    # ---- the step ----

    def index_of(self, parameter: torch.Tensor) -> int:
        index = self._index.get(id(parameter))
        if index is None:
            raise UsageError(f"a gradient of a parameter of shape {tuple(parameter.shape)} that is not known here")
        return index

    def gather(self, index: int, gradient: torch.Tensor) -> None:
        """Copies a gradient into its view, unless it is that."""
        view = self.views[index]
        if gradient is view:
            return
        if gradient.layout != torch.strided:
            gradient = gradient.coalesce().to_dense()  # duplicates are added once, here
        view.copy_(gradient.detach())

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        """Takes a gradient. Its view is the core's from here on, until backward_ended() has returned."""
        with self.turn:
            self._learn_scale()
            self.gather(index, gradient)
            if self._scale != 1:
                self.views[index].mul_(1 / self._scale)
            self._live.gradient_ready(index)

    def backward_ended(self) -> StepResult:
        """Parameters that got no gradient count as zeros. When this returns all ranks have committed the step, and the averages are
        in the views, or none has."""
        with self.turn:
            self._learn_scale()
            result = self._live.backward_ended()
            if result.committed and self._scale != 1:
                for bucket in self._buckets:
                    bucket.mul_(self._scale)
            return result

    def _learn_scale(self) -> None:
        """Once a step: asking a GPU for it takes a while."""
        if self._scaler is None or self.in_backward:
            return
        self._scale = scale_of(self._scaler)

    @property
    def in_backward(self) -> bool:
        """Some gradient was taken, and backward has not ended."""
        return self._core.in_backward

    def check(self, result: StepResult) -> None:
        """Raises Error, on all ranks, for a step with a gradient that is not finite, where that is to be an error."""
        if not result.committed and self.not_finite == "error":
            raise Error(f"{result.text} (not_finite='skip' or 'nan' goes on without this step, and so does a scaler)")

    def used(self, index: int) -> bool:
        """Some rank had a gradient for it in the last step."""
        return not self.find_unused or self._core.used(index)

    def is_direct(self, tensor: torch.Tensor) -> bool:
        """A tensor of its kind can be a view of a bucket."""
        return (
            tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and tensor.dtype == self._dtype
            and tensor.is_contiguous()
        )

    # ---- state and figures ----

    @property
    def step(self) -> int:
        """Steps that were committed."""
        return self._core.step

    @property
    def num_buckets(self) -> int:
        return self._core.num_buckets

    @property
    def sent_bytes(self) -> int:
        """Payload of the gradients that this rank sent in the last step."""
        return self._core.sent_bytes

    def set_density(self, density: float) -> None:
        """From the next step on, for a warm-up; on all ranks alike."""
        self._live.set_density(float(density))

    def state_dict(self) -> State:
        """What this rank keeps between steps, as tensors and plain values. Each rank saves its own.

        Its "rows" are vectors by owner, kind ("residual", "scale", ...) and name of the parameter or bucket; "values" is a
        tensor, or None for zeros.
        """
        return state_of(self._live.save())

    def whole_state_dict(self) -> List[State]:
        """Those of all ranks, on rank 0; the others' is empty. A collective: what weft.save writes, and load_state_dict() takes."""
        return states_of_all(self.state_dict)

    def load_state_dict(self, state: Union[State, Sequence[State]]) -> None:
        """Goes on from a state_dict() of this rank, or from those of all ranks of a job of any size (in any order; weft.save writes them).

        On as many ranks as it was saved, every bit comes back; on another number the mean of the residuals over the ranks is kept, which is
        what averages still owe.
        """
        self._live.load(plain_states(state))


def check_types(named: Iterable[Tuple[str, torch.Tensor]]) -> None:
    for name, p in named:
        if p.dtype not in _TRAINED:
            known = ", ".join(str(t).removeprefix("torch.") for t in _TRAINED)
            raise UsageError(f"the gradient of '{name}' is {str(p.dtype).removeprefix('torch.')}; what can be averaged is {known}")


def settled_not_finite(given: Optional[str], scaler: Any) -> str:
    """What a gradient that is not finite means; None: as it is usual beside that scaler, or none."""
    out = given if given is not None else "error" if scaler is None else "nan"
    if out not in NOT_FINITE:
        raise UsageError(f"not_finite is one of {', '.join(NOT_FINITE)}, not '{out}'")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise UsageError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}")
    if scaler is not None and out == "skip":
        raise UsageError("a scaler learns of an overflow from gradients that are NaN: not_finite is 'nan' or 'error' beside one")
    return out


def used(scaler: Any) -> Any:
    """None of one that is switched off (GradScaler(enabled=False)): it steps whatever gradients are."""
    is_enabled = getattr(scaler, "is_enabled", None)
    return None if callable(is_enabled) and not is_enabled() else scaler


def scale_of(scaler: Any) -> float:
    scale = float(scaler.get_scale())
    if not 0 < scale < math.inf:
        raise Error(f"the loss scale is {scale}: no gradient can be told from it")
    return scale


def _tensor_of(raw: bytes, dtype: torch.dtype) -> Optional[torch.Tensor]:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else None


def _raw(tensor: Optional[torch.Tensor], dtype: torch.dtype) -> bytes:
    if tensor is None:
        return b""
    image = tensor.detach().to("cpu", dtype).resolve_neg().contiguous()
    return ctypes.string_at(image.data_ptr(), image.nbytes)


def state_of(saved: State) -> State:
    """What the core has saved, with tensors."""
    rows = [{**row, "values": _tensor_of(row["values"], _DTYPES[row["dtype"]])} for row in saved["rows"]]
    return {"weft_format": _FORMAT, **saved, "rows": rows}


def states_of_all(mine: Callable[[], State]) -> List[State]:
    """What it gives on each rank, in the order of ranks, on rank 0; nothing on the others. Where it fails on one all raise. A collective."""
    raw = torch.frombuffer(bytearray(agreed(lambda: _written(mine()), lambda _: [], "")), dtype=torch.uint8)
    counts = torch.zeros(size(), dtype=torch.int64)
    all_gather(counts, torch.tensor([raw.numel()]))
    arriving = counts.tolist() if rank() == 0 else [0] * size()
    everything = torch.empty(sum(arriving), dtype=torch.uint8)
    all_to_all(everything, raw, arriving, [raw.numel(), *[0] * (size() - 1)])
    return [torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True) for part in torch.split(everything, arriving) if rank() == 0]


def _written(state: State) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def plain_states(given: Union[State, Sequence[State]]) -> List[State]:
    """Of one rank or of several, as the core takes them."""
    return [_plain(each) for each in ([given] if isinstance(given, dict) else list(given))]


def _plain(state: Any) -> State:
    if isinstance(state, dict) and state.get("weft_format") == 1:
        raise UsageError("a compression state of weft_format 1 is read by the weft that wrote it: go on without it, or there")
    if not isinstance(state, dict) or state.get("weft_format") != _FORMAT:
        raise UsageError(f"this is no compression state of weft: it has no weft_format {_FORMAT}")
    out = {key: value for key, value in state.items() if key != "weft_format"}
    try:
        out["rows"] = [{**row, "values": _raw(row["values"], _DTYPES[row["dtype"]])} for row in out["rows"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"this is no compression state of weft: {error!r}") from None
    return out


def stable_names(module: torch.nn.Module, ignored: Iterable[str] = ()) -> List[Tuple[str, torch.nn.Parameter]]:
    """The module's parameters, shared ones once, by names that do not change when it is compiled or wrapped; without sharded tables and
    experts."""
    skip = set(ignored)
    return [(stable_name(name), p) for name, p in module.named_parameters() if name not in skip and not is_apart(p)]


def stable_name(name: str) -> str:
    return name.replace("_orig_mod.", "")
