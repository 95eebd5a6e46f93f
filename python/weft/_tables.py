"""Tables that are cut by columns over the ranks, and the step that trains them.

The step itself is the core's (a table of moves, as for everything that trains). Here stands what pushes it: layers that read rows,
backward that leaves gradients, the optimizer that hands them over. A step is of one of two kinds:

  announced    weft.lookahead said its ids, and those of the step behind: rows come ahead, a lookup is local
  else         every lookup asks all ranks for its rows; the ids of the step are those that got a gradient

In both the gradients of all lookups of a row are added up here, over everything that runs before optimizer.step().
"""

import math
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple

import torch

from . import _weft
from ._memory import memory_of
from ._weft import StepResult, UsageError
from ._world import rank, session

if TYPE_CHECKING:
    from .nn import Embedding


class Batch:
    """What the lookups of one step read, of each table: ids, sorted, each once."""

    def __init__(self, ids: Sequence[torch.Tensor], reads: bool = True) -> None:
        self.ids = list(ids)
        self.reads = reads  # False: they were read one by one, only their gradients go
        self.following: Optional[Batch] = None  # None: nothing is known of the step behind


def plain_ids(ids: Any) -> torch.Tensor:
    """As the core takes them: a contiguous vector of int64 on the CPU."""
    if not isinstance(ids, torch.Tensor):
        raise UsageError(f"ids of a table are a tensor, not {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"ids of a table are int64 or int32, not {str(ids.dtype).removeprefix('torch.')}")
    return ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()


class Tables:
    """The tables of one optimizer; or one table that nobody trains yet."""

    def __init__(
        self,
        layers: Sequence["Embedding"],
        rules: Callable[[], List[_weft.RowRule]],
        groups: Sequence[int],
        *,
        bound: bool = True,
        waits: bool = False,
        skips: bool = False,
        divisor: float = 0.0,
    ) -> None:
        shapes = [(x.name, x.num_embeddings, x.embedding_dim, x.padding_row, x.dtype_name) for x in layers]
        specs = [(*shape, rule, group) for shape, rule, group in zip(shapes, rules(), groups)]
        self._core = _weft.Tables(session(), specs, divisor=divisor, waits=waits, skips=skips)
        self._layers = [weakref.ref(layer) for layer in layers]
        self.names = [layer.name for layer in layers]
        self._types = [layer.weight.dtype for layer in layers]
        self._widths = [layer.embedding_dim for layer in layers]
        self.bound = bound
        self.waits = waits
        self._rules = rules  # the optimizer's, table by table, as its groups are now
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.batch: Optional[Batch] = None  # that is trained on next, where it was announced
        self._begun: Optional[Batch] = None  # whose step has begun
        self._known: Optional[Batch] = None  # whose ids the core has gathered ahead
        self._gradients: List[Optional[torch.Tensor]] = [None] * len(layers)  # of the step that has begun, by row of its list
        self._reads: List[List[Tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in layers]  # ids and gradients, else
        self._verdict: Optional[StepResult] = None
        self._warned = False
        self._turn = threading.RLock()  # autograd has a thread a device

    def __deepcopy__(self, memo: Any) -> "Tables":
        raise UsageError("a model with sharded tables is not copied: make another one and load_state_dict(model.state_dict()) on all ranks")

    def __reduce__(self) -> Any:
        raise UsageError("a model with sharded tables is not pickled: weft.save(model, path) saves its state_dict")

    @property
    def core(self) -> _weft.Tables:
        session()  # says so in a forked child, and after shutdown()
        return self._core

    def __len__(self) -> int:
        return len(self._layers)

    def layers(self) -> List["Embedding"]:
        return [layer for layer in (each() for each in self._layers) if layer is not None]

    def values(self, table: int) -> torch.Tensor:
        """This rank's columns of all rows: the core's own memory."""
        layer = self._layers[table]()
        assert layer is not None
        return self._view(self._core.values(table), table, layer.num_embeddings)

    def _view(self, region: Any, table: int, rows: int) -> torch.Tensor:
        count = memoryview(region).nbytes // self._types[table].itemsize
        if count == 0:
            return torch.empty((rows, 0), dtype=self._types[table], device="cpu")
        return torch.frombuffer(region, dtype=self._types[table]).view(rows, -1)

    # ---- forward ----

    def look_up(self, table: int, ids: torch.Tensor, training: bool, learns: bool) -> Tuple[torch.Tensor, Optional[Batch]]:
        """Rows of the ids, and the announced step that they belong to."""
        with self._turn:
            if training and self.batch is not None:
                return self._from_step(table, ids, self.batch), self.batch
            if learns and training and not self._warned and self.bound:
                self._warned = True
                warnings.warn(
                    f"table '{self.names[table]}' learns of its ids in forward, so every lookup waits for all ranks and no row is "
                    'sent ahead: for batch in weft.lookahead(loader, ids={"' + self.names[table] + '": ...})',
                    stacklevel=4,
                )
            out = torch.empty((ids.numel(), self._widths[table]), dtype=self._types[table], device="cpu")
            self.core.look_up(table, memory_of(ids), memory_of(out), out)
            return out, None

    def _from_step(self, table: int, ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        announced = batch.ids[table]
        places = torch.searchsorted(announced, ids)
        if ids.numel() > 0:
            found = torch.zeros_like(ids, dtype=torch.bool)
            inside = places < announced.numel()
            found[inside] = announced[places[inside]] == ids[inside]
            if not bool(found.all()):
                raise UsageError(
                    f"rank {rank()}: id {int(ids[~found][0])} of table '{self.names[table]}' is not among those that weft.lookahead "
                    "announced for this step: its ids= must name all that the layer is called with (for anything but training "
                    "call model.eval() first)"
                )
        self._begin(batch)
        self._core.read(table)
        rows = self._view(self._core.rows(table), table, announced.numel())
        out = rows[places]
        if table + 1 == len(self._layers):
            self._end_forward(batch)
        return out

    def _begin(self, batch: Batch) -> None:
        if self._begun is batch:
            return
        core = self.core
        if core.in_step or self._begun is not None:
            raise UsageError(UNFINISHED)
        if core.under_way and self._known is not batch:
            core.settle()
        if not core.under_way:
            core.announce([memory_of(ids) for ids in batch.ids], batch.reads)
        core.begin()
        self._begun, self._known = batch, None
        self._gradients = [None] * len(self._layers)

    def _end_forward(self, batch: Batch) -> None:
        """The ids of the step behind go out."""
        if self._known is not None or self.waits:
            self._core.end_forward()
            return
        following = batch.following or Batch([_NONE] * len(self._layers))
        self._known = following
        self._core.announce([memory_of(ids) for ids in following.ids])
        self._core.end_forward()

    # ---- backward ----

    def take(self, table: int, ids: torch.Tensor, batch: Optional[Batch], gradient: torch.Tensor) -> None:
        """The gradient of rows that were looked up, one for each of the ids."""
        with self._turn:
            if not self.bound:
                raise UsageError(
                    f"table '{self.names[table]}' has no optimizer that updates it: optimizer = weft.optim.hybrid(optimizer) "
                    "before the first backward"
                )
            image = gradient.detach().reshape(ids.numel(), self._widths[table]).to("cpu", self._types[table])
            if batch is None:
                self._reads[table].append((ids, image))
                return
            if batch is not self._begun or self._verdict is not None:
                raise UsageError(
                    f"a gradient of table '{self.names[table]}' came after the optimizer's step of its batch: backward of all that "
                    "a step reads comes before"
                )
            places = torch.searchsorted(batch.ids[table], ids)
            if self._gradients[table] is None:
                self._gradients[table] = torch.zeros((batch.ids[table].numel(), self._widths[table]), dtype=self._types[table])
            self._gradients[table].index_add_(0, places, image)  # type: ignore[union-attr]

    def has_gradient(self, table: int) -> bool:
        """Backward has left some, and no optimizer's step has taken them."""
        return self._gradients[table] is not None or len(self._reads[table]) > 0

    def drop(self, table: int) -> None:
        """What backward has left of it so far does not count."""
        with self._turn:
            self._gradients[table] = None
            self._reads[table] = []

    # ---- the step ----

    @property
    def unfinished(self) -> bool:
        """A step has begun, and its optimizer's step has not come."""
        return self._begun is not None

    def step(self, veto: str = "") -> bool:
        """Hands the gradients over. Whether the step counts: where updates wait it is over then, on all ranks or on none; else it
        is under way."""
        with self._turn:
            if not self.waits:
                announced = self.batch is not None
                self._exchange()
                if not announced:
                    self._core.settle()
                return True
            verdict = self._verdict
            if verdict is None:
                verdict = self._judge(0.0, 0.0, veto)
            self._verdict = None
            self._core.update()
            return verdict.committed

    def clip(self, max_norm: float, squares: float, veto: str) -> Tuple[float, float]:
        """The norm of all gradients, those whose squares are given among them (NaN: some are not finite, here or elsewhere), and by
        what they are to be multiplied."""
        with self._turn:
            if not self.waits:
                raise UsageError(
                    "clipping needs the norm of all gradients before any row is updated: weft.optim.hybrid(optimizer, clips=True)"
                )
            if self._verdict is not None:
                raise UsageError("weft.clip_grad_norm_ is called once before an optimizer's step")
            self._verdict = self._judge(max_norm, squares, veto)
            return self._core.gradient_norm if self._verdict.committed else math.nan, self._core.update_scale

    def _judge(self, max_norm: float, squares: float, veto: str) -> StepResult:
        self._exchange()
        return self._core.judge(max_norm, squares, veto)

    def _exchange(self) -> None:
        rules = self._rules()  # first: what it refuses leaves the step as it was
        gradients = self._announced_gradients() if self.batch is not None else self._read_gradients()
        assert self._begun is not None
        self._end_forward(self._begun)
        scale = self.loss_scale()
        if scale != 1:
            for gradient in gradients:
                gradient.mul_(1 / scale)
        self._core.end_backward([(memory_of(g), rule) for g, rule in zip(gradients, rules)], gradients)
        self._begun = self.batch = None

    def _announced_gradients(self) -> List[torch.Tensor]:
        assert self.batch is not None
        if any(self._reads):
            raise UsageError("lookups from before weft.lookahead are still without an optimizer's step: zero_grad() drops their gradients")
        self._begin(self.batch)
        out = []
        for gradient, ids, width, dtype in zip(self._gradients, self.batch.ids, self._widths, self._types):
            out.append(torch.zeros((ids.numel(), width), dtype=dtype) if gradient is None else gradient)
        self._gradients = [None] * len(self._layers)
        return out

    def _read_gradients(self) -> List[torch.Tensor]:
        reads, self._reads = self._reads, [[] for _ in self._layers]
        lists, out = [], []
        for each, width, dtype in zip(reads, self._widths, self._types):
            ids = torch.cat([ids for ids, _ in each]) if each else _NONE
            unique, places = torch.unique(ids, return_inverse=True)
            gradient = torch.zeros((unique.numel(), width), dtype=dtype)
            if each:
                gradient.index_add_(0, places, torch.cat([g for _, g in each]))
            lists.append(unique)
            out.append(gradient)
        self._known = None
        self._begin(Batch(lists, reads=False))
        return out

    # ---- outside of steps ----

    def rest(self) -> None:
        """Until nothing changes the tables any more."""
        with self._turn:
            self.core.rest()


UNFINISHED = (
    "the optimizer's step for the last batch has not come, and sharded tables wait for it: call optimizer.step() after each batch, or "
    "say weft.lookahead(..., accumulate=n) where n batches make a step"
)
_NONE = torch.empty(0, dtype=torch.int64)


def table_of(parameter: torch.Tensor) -> Optional["Embedding"]:
    """The layer whose sharded table this is; None for any other parameter."""
    mark = getattr(parameter, "_weft_table", None)
    return None if mark is None else mark()


def is_table(parameter: Optional[torch.Tensor]) -> bool:
    return hasattr(parameter, "_weft_table")
