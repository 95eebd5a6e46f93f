"""weft.pipeline: a list of modules over stages. Each rank has some of them, and micro-batches go through all ranks and back."""

import collections
import contextlib
import ctypes
import functools
import zlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

import torch

from . import _weft
from ._agreed import Lines, agreed
from ._apart import set_holders, set_of_stage
from ._collectives import all_reduce, broadcast
from ._columns import collective_state, only_rank_0, wants_whole
from ._compression import State, plain_states, scale_of, settled_not_finite, state_of, states_of_all, used
from ._memory import memory_of
from ._stage_list import Listed, Tied, from_rank_0, lines_of, tie, trained_of
from ._stage_walk import Batch, Passed, Walk, text_of
from ._weft import Error, UsageError
from ._world import init, rank, session, size

__all__ = ["Pipeline", "gather_state_dict"]

_CASTING = ("cpu", "cuda")  # devices that autocast is asked of


class Pipeline(torch.nn.Module):
    """A model that is a list of modules, each of which takes what the one before it gives: one tensor [samples, ...]. Every rank makes the
    same list, keeps the modules of its stage, and trains them.

        pipe = weft.pipeline.Pipeline([embedding, *blocks, head], stages=2, loss=loss_of, micro_batches=8)
        optimizer = torch.optim.AdamW(pipe.parameters())       # of this rank's stage
        for inputs, targets in loader:                         # of this pipeline: loader of part pipe.data_rank of pipe.data_size
            loss = pipe.step(inputs, targets)                  # sets p.grad
            optimizer.step()

    size / stages pipelines train on data of their own; the ranks of one pipeline (stages * data_size in all: rank = stage * data_size +
    data_rank) call everything with the same batch.

    Affects results, equal on all ranks:
      loss             of what the last module gives and the targets of a micro-batch: the mean over its samples
      count            of the targets of a micro-batch: over how many its loss is a mean (samples): lambda t: int((t != -100).sum())
      micro_batches    in which a batch goes through the stages; it is cut along its first dimension, as evenly as possible
      tied             pairs of parameters by name, ("0.weight", "5.weight"): the second becomes the first. Modules that share a parameter
                       already are found. Where stages share one each has a copy, and the gradient is the sum of all
      layers           how many modules each stage (each chunk, where it is interleaved) has; evenly where it is not said
      schedule         gpipe, 1f1b, zb-h1 (weights of torch.nn.Linear have their gradients behind those of activations), interleaved (with
                       chunks=2 or more; micro_batches is a multiple of stages): sums differ by rounding
      backward_rank    gradients between stages travel as factors of so many columns; 0: not
      backward_bits    they travel as whole numbers of so many bits, 4 or 8, and a scale a token, instead; 0: not
      backward_messages   which of them: "epilogue", those that no forward could hide, or "all"
      lazy_error       what such a message leaves behind joins the next one
      scheme, ...      of the sums over the ranks with the same stage: options of weft.Compression ("dense")
      compressed_stages   of so many stages, the first ones; others are summed dense. None: of all
      not_finite       a gradient with NaN or infinity on any rank: "error" raises on all ranks, "skip" leaves all gradients None, "nan"
                       makes them NaN. The state is as before the step. "error" unless there is a scaler
      scaler           a torch.amp.GradScaler: step() multiplies the loss by its scale, and what it returns is the loss without it.
                       Gradients come in the scale's units, for scaler.step(optimizer); scaler.update(). What compression keeps is in
                       units of the loss itself. not_finite is then "nan": all ranks' scalers learn of an overflow on any of them
    Affects speed only: double_warmup (1f1b, zb-h1: twice as many forwards first).

    Initial values are rank 0's. What passes between stages has one shape and type, told by the first stage when it has computed a micro-batch.
    Modules do not change in place what they take. p.grad is of the last step: zero_grad() is not needed, and parameters that nobody used
    have zeros. state_dict() has the modules of this rank, by their names in the whole list; load_state_dict() takes it, or that of a whole
    list (gather_state_dict, weft.save). weft.clip_grad_norm_ counts every parameter of every stage once.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        stages: int,
        loss: Callable[..., torch.Tensor],
        micro_batches: int,
        schedule: str = "1f1b",
        chunks: int = 1,
        layers: Optional[Sequence[int]] = None,
        count: Optional[Callable[[Any], int]] = None,
        tied: Tied = (),
        backward_rank: int = 0,
        backward_bits: int = 0,
        backward_messages: str = "epilogue",
        lazy_error: bool = True,
        scheme: str = "dense",
        compressed_stages: Optional[int] = None,
        not_finite: Optional[str] = None,
        scaler: Any = None,
        double_warmup: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        init()

        scaler = used(scaler)
        backward = (backward_rank, backward_bits, backward_messages, lazy_error, seed)
        given = {**options, "scheme": scheme, "seed": seed}

        def listed() -> Listed:
            self.not_finite = settled_not_finite(not_finite, scaler)
            every = list(modules)
            tie(every, tied)
            compressed = -1 if compressed_stages is None else compressed_stages
            return every, trained_of(every), (stages, schedule, chunks, double_warmup, list(layers or ()), compressed)

        def compared(mine: Listed) -> List[Tuple[str, str]]:
            also = {"not_finite": self.not_finite, "a scaler": "there" if scaler is not None else "missing"}
            return lines_of(backward, micro_batches, {**given, **also}, mine)

        whole, trained, stage = agreed(listed, compared, "all ranks make the same pipeline, of the same modules")
        wide = any(p.dtype == torch.float64 for _, p in trained.values())
        place = {id(p): i for i, (_, p) in enumerate(trained.values())}
        users = [list(dict.fromkeys(place[id(p)] for p in module.parameters() if id(p) in place)) for module in whole]
        named = [(name, list(p.shape)) for name, p in trained.values()]
        given["dtype"] = "float64" if wide else "float32"
        self._core = _weft.Stages(session(), (named, users, stage, backward, micro_batches), given)
        from_rank_0(whole)
        self.stages, self.micro_batches = stages, micro_batches
        self.stage, self.data_rank, self.data_size = self._core.stage, self._core.data_rank, self._core.data_size
        self.skipped_steps = 0
        self.skipped_text = ""  # why the last one was skipped
        self._count = count or len
        self._scaler = scaler
        self._scale = 1.0  # of the loss, in this step
        self._wire = torch.float64 if wide else torch.float32
        self._owners = [self._core.owner_of(number) for number in range(len(whole))]
        named_state = torch.nn.ModuleList(whole).state_dict()
        self._whole = {name: (v.shape, v.dtype) for name, v in named_state.items() if isinstance(v, torch.Tensor)}
        mine = {i: whole[i] for first, length, *_ in self._core.chunks for i in range(first, first + length)}
        for number, module in mine.items():
            self.add_module(str(number), module)
        everything = [p for _, p in trained.values()]
        self._parameters_here = [everything[i] for i, _ in self._core.parameters]
        for p, (_, holders) in zip(self._parameters_here, self._core.parameters):
            set_holders(p, holders)
            if stages > 1:
                set_of_stage(p)
        self._places = [  # of parameters that are trained: module, attribute
            (name, each, attribute, p)
            for name, each in self.named_modules()
            for attribute, p in each._parameters.items()
            if p is not None and p.requires_grad
        ]
        self._walk = Walk(self._core, mine, loss, self._wire, in_halves=schedule == "zb-h1" and stages > 1)
        if self._walk.halves.left_whole and self.data_rank == 0:
            session().log_line(
                f"stage {self.stage}: {self._walk.halves.left_whole} layers torch.nn.Linear are in compiled modules, whose backward is never in halves: "
                "zb-h1 computes all of their gradients in the first one"
            )
        self._passed: Dict[Tuple[Any, ...], Passed] = {}  # by what inputs are
        self._width = 0  # of all of them, where there are stages
        self._hosts: List[Optional[torch.Tensor]] = []  # of each parameter: its gradient's image in this step
        self.compression = StageCompression(self._core)

    # ---- training ----

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a batch. Sets p.grad to the gradient of the mean over all pipelines' samples, and returns that mean, the
        same on all ranks. Ranks of one pipeline give the same batch; an empty one is one that has no sample. A call that is wrong on one
        rank is refused on all, and nothing has happened; what a module or the loss raises ends the job on all."""
        batch = self._agreed_batch(inputs, targets, learns=True)
        with self._ends_the_job():
            self._learn_what_passes(batch)
            for p in self._parameters_here:
                p.grad = None
            self._hosts = [None] * len(self._parameters_here)
            tokens = [batch.passed.tokens(len(part)) for part in batch.inputs]
            loss = self._walk.run(batch, functools.partial(self._core.begin, tokens, sum(batch.counts)), self._hand_over)
            result = self._core.finish(loss)
            if result.committed:
                self._take_gradients()
        mean = self._core.loss
        if not result.committed:
            self._leave_out(result)
        return torch.tensor(float("nan") if mean is None else mean, dtype=torch.float64)

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss over all pipelines' samples, of which nothing is learned: modules are in eval() meanwhile. All ranks call it."""
        batch = self._agreed_batch(inputs, targets, learns=False)
        sums = torch.zeros(2, dtype=torch.float64)  # losses, samples
        with self._ends_the_job(), self._evaluating():
            self._learn_what_passes(batch)
            for m, x in enumerate(batch.inputs):
                if len(x):
                    begin = functools.partial(self._core.begin_forward, batch.passed.tokens(len(x)))
                    sums[0] += self._walk.run(batch.only(m), begin, lambda _: None)
                    sums[1] += batch.counts[m] if self.stage == self.stages - 1 else 0
                    self._core.let_go()
            all_reduce(sums)
        return sums[0] / sums[1]

    @contextlib.contextmanager
    def _ends_the_job(self, unless: Union[Type[BaseException], Tuple[()]] = ()) -> Iterator[None]:
        """What fails inside, with messages under way, fails on all ranks: nobody waits for this one."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, unless):
                self._core.abandon(f"rank {rank()}: a step of the pipeline ended with {type(error).__name__}: {error}")
            raise

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _agreed_batch(self, inputs: torch.Tensor, targets: torch.Tensor, learns: bool) -> Batch:
        """All ranks have what they need, or all raise, and nothing has happened."""
        session()  # says so in a forked child, and after shutdown()
        torch.clear_autocast_cache()  # of parameters as they were before the last update, or without gradients (of an evaluation)
        with self._ends_the_job(unless=Exception):
            return agreed(lambda: self._batch_of(inputs, targets, learns), self._lines_of, agree=self._agree)

    def _agree(self, lines: Lines) -> None:
        with self._ends_the_job(unless=UsageError):
            self._core.agree(lines[:1], lines[1:])

    def _batch_of(self, inputs: torch.Tensor, targets: torch.Tensor, learns: bool) -> Batch:
        self._check_modules()
        self._check_batch(inputs, targets)
        if learns:
            if torch.is_inference_mode_enabled():
                raise UsageError("inside of torch.inference_mode() a pipeline does not train: there are no gradients")
            self._learn_scale()
        x, y = ([*each.tensor_split(self.micro_batches)] for each in (inputs, targets))
        counts = [_whole(self._count(part)) if len(part) else 0 for part in y]
        checksums = tuple(map(_checksum, (inputs, targets))) if self.stages > 1 else ()
        return Batch(x, y, counts, Passed((1,), self._wire), learns, self._scale if learns else 1.0, checksums)

    def _lines_of(self, batch: Batch) -> List[Tuple[str, str]]:
        """What is called, of all ranks; and what those of a pipeline have alike."""
        out = [("what is called", "step()" if batch.learns else "evaluate()"), ("the number of samples", str(batch.samples))]
        if batch.samples:
            x = batch.inputs[0][0]
            cast = ", ".join(f"{str(dtype).removeprefix('torch.')} on {device}" for device, dtype in _autocast())
            out += [("a sample of inputs", text_of(x)), ("autocast", cast or "off")]
            if self.stages > 1:
                out += [("a checksum of the inputs", batch.checksums[0]), ("a checksum of the targets", batch.checksums[1])]
        return out

    def _check_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for what, given in (("inputs", inputs), ("targets", targets)):
            if not isinstance(given, torch.Tensor) or given.dim() < 1:
                raise UsageError(f"{what} of a pipeline are a tensor, cut along its first dimension, not {type(given).__name__}")
            if given.grad_fn is not None and torch.is_grad_enabled():
                raise UsageError(f"{what} of a pipeline are computed from what wants gradients, and get none: detach() them")
        if len(inputs) != len(targets):
            raise UsageError(f"a batch has as many inputs as targets, not {len(inputs)} and {len(targets)}")
        if not len(inputs) and self.stages > 1 and not self._core.is_installed:
            raise UsageError("the first batch of a pipeline has samples: what passes between stages is learned from it")

    def _check_modules(self) -> None:
        """They train what the pipeline was made of, and nothing else."""
        if self._wire != torch.float64 and any(p.dtype == torch.float64 for p in self._parameters_here):
            raise UsageError("modules became float64 after the pipeline was made of them: make them float64 before")
        for path, module, attribute, p in self._places:
            if module._parameters.get(attribute) is not p:
                raise UsageError(
                    f"parameter '{path}.{attribute}' was replaced after the pipeline was made of it (load_state_dict(assign=True), say), and neither "
                    "the pipeline nor its optimizer would train the other one: copy into it"
                )
        for number, module in self._walk.modules.items():
            if self._modules.get(str(number)) is not module:
                raise UsageError(f"module {number} was replaced after the pipeline was made of it, and the pipeline would not compute the other one")
        for p, (_, holders) in zip(self._parameters_here, self._core.parameters):
            if holders > self.data_size and not p.requires_grad:
                name = next(name for name, each in self.named_parameters() if each is p)
                raise UsageError(
                    f"parameter '{name}' is shared by stages, and was frozen after the pipeline was made: the copies of other stages would go on. Freeze it before"
                )
        known = {id(p) for p in self._parameters_here}
        for name, p in self.named_parameters():
            if p.requires_grad and id(p) not in known:
                raise UsageError(
                    f"parameter '{name}' wants a gradient, and did not when the pipeline was made (requires_grad): its ranks would not sum it"
                )

    def _learn_what_passes(self, batch: Batch) -> None:
        """What passes between stages for such inputs: the first stage computes a micro-batch, and tells the others."""
        if self.stages == 1 or not batch.samples:
            self._install(1 if self.stages == 1 else None)
            return
        x = batch.inputs[0]
        key = (batch.learns, tuple(x.shape[1:]), x.dtype, _autocast())
        if key not in self._passed:
            mine = self._walk.compute_ahead(batch).told() if self.stage == 0 else [0] * 12
            self._passed[key] = Passed.heard(self._core.tell(mine))
        batch.passed = self._passed[key]
        self._install(batch.passed.width)

    def _install(self, width: Optional[int]) -> None:
        if self._core.is_installed:
            if width is not None and self.stages > 1 and width != self._width:
                raise UsageError(f"what passes between stages has a width of {width}, and had {self._width} in the first step")
            return
        assert width is not None
        self._width = width
        self._core.install(width)
        self.compression._installed()

    # ---- gradients ----

    def _learn_scale(self) -> None:
        if self._scaler is None:
            return
        if hasattr(self._scaler, "scale"):  # (torch's makes its state where it first multiplies)
            self._scaler.scale(torch.ones((), device=self._parameters_here[0].device))
        self._scale = scale_of(self._scaler)

    def _hand_over(self, index: int) -> None:
        gradient = self._parameters_here[index].grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            gradient = gradient.coalesce().to_dense()  # duplicates are added once, here
            self._parameters_here[index].grad = gradient
        host = gradient.detach().to("cpu", self._wire).contiguous()
        if self._scale != 1:
            host.mul_(1 / self._scale)
        self._hosts[index] = host
        self._core.gradient_ready(index, memory_of(host), host)

    def _take_gradients(self) -> None:
        for index, p in enumerate(self._parameters_here):
            if not p.requires_grad:  # frozen since
                continue
            host = self._hosts[index]
            if host is None:
                host = torch.empty(p.shape, dtype=self._wire)
            self._core.result_of(index, memory_of(host))
            if self._scale != 1:
                # A sum of several may be too large where each was not. All ranks have committed: no scaler may call it an overflow.
                most = torch.finfo(p.dtype).max
                host.mul_(self._scale).clamp_(-most, most)
            if p.grad is None:
                p.grad = torch.empty_like(p)
            if p.grad.data_ptr() != host.data_ptr():
                p.grad.copy_(host)
        self._hosts = []

    def _leave_out(self, result: _weft.StepResult) -> None:
        self._hosts = []
        self.skipped_steps += 1
        self.skipped_text = result.text
        for p in self._parameters_here:
            p.grad = torch.full_like(p, float("nan")) if self.not_finite == "nan" and p.requires_grad else None
        if self.not_finite == "error":
            raise Error(f"{result.text} (not_finite='skip' or 'nan' goes on without this step, and so does a scaler)")

    # ---- state ----

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Of this rank's modules, or of all: each rank takes its own."""
        elsewhere = {str(number) for number in range(len(self._owners))} - set(self._modules)
        mine: Any = collections.OrderedDict((name, value) for name, value in state_dict.items() if name.split(".", 1)[0] not in elsewhere)
        if hasattr(state_dict, "_metadata"):  # versions of modules
            mine._metadata = state_dict._metadata
        return super().load_state_dict(mine, strict, assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        # Comes before the modules inside, also where a module around this one is loaded.
        if local_metadata.get("assign_to_params_buffers", False):
            raise UsageError("assign=True would replace parameters that the pipeline trains: load_state_dict() copies into them")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def whole_state_dict(self) -> Dict[str, torch.Tensor]:
        """Tensors of the whole list, copies on the CPU, from the ranks that have each module. A collective; inside of weft.save only rank 0
        has them."""
        mine, out = self.state_dict(), {}
        with collective_state():
            for name, (shape, dtype) in self._whole.items():
                root = self._owners[int(name.split(".", 1)[0])]
                whole = torch.empty(shape, dtype=dtype)
                if root == rank():
                    whole.copy_(mine[name])
                broadcast(whole, root=root)
                if wants_whole():
                    out[name] = whole
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:  # deepcopy's and pickle's way
        raise UsageError(
            "a pipeline is not copied, and not pickled: it is a part of a job. Its modules are (torch.nn.ModuleDict(pipe.named_children())), and so is "
            "its state_dict()"
        )

    def forward(self, *_: Any) -> torch.Tensor:
        raise UsageError("a pipeline has no forward of its own: step() trains it, evaluate() gives its loss")

    def extra_repr(self) -> str:
        return f"stage {self.stage} of {self.stages}, pipeline {self.data_rank} of {self.data_size}, {self.micro_batches} micro-batches"


class StageCompression:
    """State and figures of what a pipeline sends: `pipe.compression`."""

    def __init__(self, core: _weft.Stages) -> None:
        self._core = core
        self._given: Optional[List[State]] = None  # before the first step

    def _installed(self) -> None:
        if self._given is not None:
            self._core.load(self._given)
        self._given = None

    @property
    def step(self) -> int:
        """Steps that were committed."""
        return self._core.step if self._core.is_installed else 0

    @property
    def sent_bytes(self) -> Dict[str, int]:
        """Payload of this rank in the last step: between stages, and of gradients."""
        between, gradients = self._core.sent_bytes if self._core.is_installed else (0, 0)
        return {"stages": between, "gradients": gradients}

    def set_density(self, density: float) -> None:
        """From the next step on, for a warm-up; on all ranks alike, after the first step."""
        if not self._core.is_installed:
            raise UsageError("the density of a pipeline's first step is the option density")
        self._core.set_density(float(density))

    def state_dict(self) -> State:
        """What this rank keeps between steps, as weft.Compression.state_dict(): residuals, and errors of messages between stages."""
        if not self._core.is_installed:
            given = self._given or [{"rank": rank(), "size": size(), "rows": []}]
            if len(given) > 1 or (given[0].get("rank"), given[0].get("size")) != (rank(), size()):
                raise UsageError("states of other ranks were loaded, and become this rank's in the first step: save behind it")
            return state_of(given[0])
        return state_of(self._core.save())

    def whole_state_dict(self) -> List[State]:
        """Those of all ranks, on rank 0; the others' is empty. A collective: what weft.save writes, and load_state_dict() takes."""
        return states_of_all(self.state_dict)

    def load_state_dict(self, state: Union[State, Sequence[State]]) -> None:
        """Goes on from a state_dict() of this rank, or from those of all ranks of a job of any layout (in any order; weft.save writes them): the
        mean of residuals over data-parallel ranks is kept; errors between stages go on where stages, their modules and pipelines are the same, else they are dropped and
        the log says so."""
        self._given = plain_states(state)
        if self._core.is_installed:
            self._installed()


def gather_state_dict(pipe: Pipeline, on_all_ranks: bool = True) -> Dict[str, torch.Tensor]:
    """The state_dict() of the whole list of modules, by name; `on_all_ranks=False`: rank 0's, and the others' is empty. All ranks call it."""
    if on_all_ranks:
        return pipe.whole_state_dict()
    with only_rank_0():
        return pipe.whole_state_dict()


def _whole(count: Any) -> int:
    out = int(count)
    if out < 0 or out != count:
        raise UsageError(f"the loss of a micro-batch is a mean over {count} (count): over a whole number, of samples or of tokens")
    return out


def _checksum(tensor: torch.Tensor) -> str:
    """Of up to 4,096 of its values."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, -(-len(flat) // 4096))].to("cpu").resolve_conj().resolve_neg().contiguous()
    return f"{zlib.crc32(ctypes.string_at(some.data_ptr(), some.nbytes)):08x}"


def _autocast() -> Tuple[Tuple[str, torch.dtype], ...]:
    """Where it is on, and to which type."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in _CASTING if torch.is_autocast_enabled(device))
