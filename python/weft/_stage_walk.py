"""What a rank of a pipeline computes between the moves of its table: modules forward and backward, micro-batch by micro-batch.

Autograd works inside of a module only: what a module gives is cut off its graph, and the next one takes a leaf. The order is the core's, and so
is whether a backward is in halves.
"""

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from . import _weft
from ._halves import Halves
from ._memory import memory_of
from ._weft import UsageError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_SIZES = 10  # of a sample, that can be told
Stop = Tuple[str, int, int, List[int]]


@dataclasses.dataclass(frozen=True)
class Passed:
    """Of what passes between stages: the sizes of a sample's, and the type that modules give and take."""

    sizes: Tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(given: torch.Tensor, wire: torch.dtype) -> "Passed":
        if given.dim() < 2 or given.dim() - 1 > _MOST_SIZES or given.dtype not in _DTYPES:
            raise UsageError(f"what passes between stages is [samples, ..., width] of floats, not {text_of(given)}")
        if given.dtype == torch.float64 and wire != torch.float64:
            raise UsageError("what passes between stages is float64, and no parameter that is trained is: it would be rounded to float32")
        return Passed(tuple(given.shape[1:]), given.dtype)

    def told(self) -> List[int]:
        return [_DTYPES.index(self.dtype), len(self.sizes), *self.sizes, *[0] * (_MOST_SIZES - len(self.sizes))]

    @staticmethod
    def heard(values: List[int]) -> "Passed":
        return Passed(tuple(values[2 : 2 + values[1]]), _DTYPES[values[0]])

    @property
    def width(self) -> int:
        return self.sizes[-1]

    def tokens(self, samples: int) -> int:
        """Rows of the width, of so many samples."""
        out = samples
        for each in self.sizes[:-1]:
            out *= each
        return out


def _cut_off(given: torch.Tensor, learns: bool) -> torch.Tensor:
    return given.detach().requires_grad_(learns and given.requires_grad)


def text_of(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive modules of this rank."""

    index: int
    first: int
    last: int
    arrives: bool  # what the first takes comes from another stage
    leaves: bool  # what the last gives goes to another stage


@dataclasses.dataclass
class Batch:
    """One step's, or one evaluation's."""

    inputs: List[torch.Tensor]  # of each micro-batch
    targets: List[Any]
    counts: List[int]  # over which the loss of each is a mean
    passed: Passed
    learns: bool
    loss_scale: float = 1.0  # of gradients inside of modules; between stages they are of the loss itself
    checksums: Tuple[str, ...] = ()  # of all inputs, and of all targets, where ranks compare them
    # Of modules that have computed the first micro-batch before the walk: what each took, and gave.
    ahead: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(map(len, self.inputs))

    def only(self, m: int) -> "Batch":
        """Of that micro-batch alone."""
        mine = self.inputs[m : m + 1], self.targets[m : m + 1], self.counts[m : m + 1]
        return Batch(*mine, self.passed, self.learns, self.loss_scale, ahead=self.ahead if m == 0 else {})


class Walk:
    def __init__(
        self, core: _weft.Stages, modules: Dict[int, torch.nn.Module], loss: Callable[..., torch.Tensor], wire: torch.dtype, in_halves: bool
    ) -> None:
        self.core, self.modules, self.loss, self.wire = core, modules, loss, wire
        self.halves = Halves(modules.values() if in_halves else ())
        chunks = [Chunk(i, first, first + count - 1, *ends) for i, (first, count, *ends) in enumerate(core.chunks)]
        self.first_of = {chunk.first: chunk for chunk in chunks}
        self.last_of = {chunk.last: chunk for chunk in chunks}
        self.device = torch.device("cpu")
        self.batch: Optional[Batch] = None
        self._clear()

    def _clear(self) -> None:
        self.taken: Dict[Tuple[int, int], torch.Tensor] = {}  # by module and micro-batch: what it took,
        self.given: Dict[Tuple[int, int], torch.Tensor] = {}  # and what it gave, with its graph
        self.loss_sum = 0.0

    def run(self, batch: Batch, begin: Callable[[], Stop], hand_over: Callable[[int], None]) -> float:
        """To the end of the table. Gives the sum of this rank's losses; `hand_over` takes parameters whose gradients are complete."""
        self.batch = batch
        self.device = next((p.device for module in self.modules.values() for p in module.parameters()), self.device)
        self._clear()
        pieces = {"forward": self._forward, "backward": self._backward, "weights": self.halves.run}
        try:
            with self.halves.in_place():
                work, number, m, ready = begin()
                while work != "end":
                    if batch.inputs[m].shape[0] > 0:
                        pieces[work](number, m)
                    for parameter in ready:
                        hand_over(parameter)
                    work, number, m, ready = self.core.go_on()
            return self.loss_sum
        finally:
            self.batch = None
            self._clear()

    def compute_ahead(self, batch: Batch) -> Passed:
        """What the first stage passes on: told by its first micro-batch, computed as the walk would have, which goes on from there."""
        chunk, given = self.first_of[0], batch.inputs[0]
        with self.halves.in_place():
            for number in range(chunk.first, chunk.last + 1):
                taken = given if number == chunk.first else _cut_off(given, batch.learns)
                given = self._compute(batch, number, taken)
                batch.ahead[number] = (taken, given)
        return Passed.of(given, self.wire)

    def _compute(self, batch: Batch, number: int, taken: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(batch.learns):
            given = self.modules[number](taken)
        if not isinstance(given, torch.Tensor):
            raise UsageError(f"module {number} of the pipeline gives {type(given).__name__}, and passes one tensor on")
        return given

    def _forward(self, number: int, m: int) -> None:
        batch = self._batch
        taken = self._taken(number, m)
        if m == 0 and number in batch.ahead:
            taken, given = batch.ahead.pop(number)
        else:
            given = self._compute(batch, number, taken)
        leaves = self.last_of.get(number)
        if leaves is not None and leaves.leaves:
            self._send(leaves, m, given)
        elif leaves is not None:
            given = self._loss_of(given, m)
        if batch.learns:
            self.taken[number, m] = taken
        if batch.learns or leaves is None:
            self.given[number, m] = given

    def _taken(self, number: int, m: int) -> torch.Tensor:
        batch = self._batch
        chunk = self.first_of.get(number)
        if chunk is None:
            return _cut_off(self.given[number - 1, m] if batch.learns else self.given.pop((number - 1, m)), batch.learns)
        if chunk.arrives:
            return self._arrived(chunk, m, back=False).requires_grad_(batch.learns)
        return batch.inputs[m]

    def _loss_of(self, given: torch.Tensor, m: int) -> torch.Tensor:
        batch = self._batch
        with torch.set_grad_enabled(batch.learns):
            loss = self.loss(given, batch.targets[m])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError("the loss of a micro-batch is one number, the mean over its samples")
        if batch.counts[m] > 0:
            if batch.learns and not loss.requires_grad:
                raise UsageError("the loss of a micro-batch has no gradient: it, or what the last module gives, is cut off its graph")
            self.loss_sum += float(loss.detach()) * batch.counts[m]
        return loss

    def _backward(self, number: int, m: int) -> None:
        batch = self._batch
        given = self.given.pop((number, m))
        chunk = self.last_of.get(number)
        gradient: Optional[torch.Tensor]
        if chunk is None:
            gradient = self.taken.pop((number + 1, m)).grad
        elif chunk.leaves:
            gradient = self._arrived(chunk, m, back=True)
        else:  # (of a mean over nothing there is none)
            scale = self.core.scale * batch.loss_scale
            gradient = torch.full_like(given, scale * batch.counts[m]) if batch.counts[m] > 0 else None
        if gradient is not None and given.requires_grad:
            with self.halves.backward_of(number, m):
                torch.autograd.backward(given, gradient)
        chunk = self.first_of.get(number)
        if chunk is None:
            return
        taken = self.taken.pop((number, m))
        if chunk.arrives:
            self._give(chunk, m, taken.grad if taken.grad is not None else torch.zeros_like(taken), back=True)

    @property
    def _batch(self) -> Batch:
        assert self.batch is not None
        return self.batch

    def _send(self, chunk: Chunk, m: int, given: torch.Tensor) -> None:
        passed = self._batch.passed
        wanted = (self._batch.inputs[m].shape[0], *passed.sizes)
        if tuple(given.shape) != wanted or given.dtype != passed.dtype:
            dtype = str(passed.dtype).removeprefix("torch.")
            raise UsageError(
                f"module {chunk.last} gives {text_of(given)} to the next stage, where {wanted} of {dtype} passes: what passes between stages has "
                "one shape and one type, those that the first stage gives"
            )
        self._give(chunk, m, given, back=False)

    def _give(self, chunk: Chunk, m: int, values: torch.Tensor, back: bool) -> None:
        image = values.detach().to("cpu", self.wire).contiguous()
        if back and self._batch.loss_scale != 1:
            image = image * (1 / self._batch.loss_scale)
        self.core.give(chunk.index, back, m, memory_of(image), image)

    def _arrived(self, chunk: Chunk, m: int, back: bool) -> torch.Tensor:
        """A tensor of its own, in the type and on the device of this stage."""
        passed, samples = self._batch.passed, self._batch.inputs[m].shape[0]
        region = self.core.arrived(chunk.index, back, m, passed.tokens(samples) * passed.width)
        values = torch.frombuffer(region, dtype=self.wire).view(samples, *passed.sizes)
        if back and self._batch.loss_scale != 1:
            values = values * self._batch.loss_scale
        return values.to(self.device, passed.dtype).detach()
