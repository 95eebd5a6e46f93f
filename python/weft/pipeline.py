"""weft.pipeline: a list of modules over stages. Each rank has some of them, and micro-batches go through all ranks and back."""

import contextlib
import functools
import itertools
import zlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch

from . import _weft
from ._agreed import agreed
from ._apart import set_holders, set_of_stage
from ._collectives import Work, all_reduce, broadcast
from ._columns import collective_state, only_rank_0, wants_whole
from ._compression import State, plain_states, scale_of, settled_not_finite, stable_name, state_of, states_of_all
from ._memory import memory_of
from ._stage_walk import Batch, Passed, Walk
from ._weft import Error, UsageError
from ._world import init, rank, session, size
from .nn import Embedding, MoE

__all__ = ["Pipeline", "gather_state_dict"]

Tied = Iterable[Tuple[str, str]]
Trained = Dict[int, Tuple[str, torch.nn.Parameter]]  # by identity, in the order of their first use; names are those of the whole list
Stage = Tuple[int, str, int, bool, List[int], int]  # stages, schedule, chunks, double_warmup, layers, compressed_stages
Listed = Tuple[List[torch.nn.Module], Trained, Stage]  # what a rank has before it keeps its own


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
      backward_rank    gradients between stages travel as factors of so many columns; 0: as they are
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

    Initial values are rank 0's. What passes between stages has one shape and type, told by the first stage when it has computed one sample.
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

        backward = (backward_rank, backward_messages, lazy_error, seed)
        given = {**options, "scheme": scheme, "seed": seed}

        def listed() -> Listed:
            self.not_finite = settled_not_finite(not_finite, scaler)
            every = list(modules)
            _tie(every, tied)
            compressed = -1 if compressed_stages is None else compressed_stages
            return every, _trained(every), (stages, schedule, chunks, double_warmup, list(layers or ()), compressed)

        def compared(mine: Listed) -> List[Tuple[str, str]]:
            also = {"not_finite": self.not_finite, "a scaler": "there" if scaler is not None else "missing"}
            return _lines(backward, micro_batches, {**given, **also}, mine)

        whole, trained, stage = agreed(listed, compared, "all ranks make the same pipeline, of the same modules")
        wide = any(p.dtype == torch.float64 for _, p in trained.values())
        place = {id(p): i for i, (_, p) in enumerate(trained.values())}
        users = [list(dict.fromkeys(place[id(p)] for p in module.parameters() if id(p) in place)) for module in whole]
        named = [(name, list(p.shape)) for name, p in trained.values()]
        given["dtype"] = "float64" if wide else "float32"
        self._core = _weft.Stages(session(), (named, users, stage, backward, micro_batches), given)
        _from_rank_0(whole)
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
        self._walk = Walk(self._core, mine, loss, self._wire, in_halves=schedule == "zb-h1")
        self._passed: Dict[Tuple[Any, ...], Passed] = {}  # by what inputs are
        self._hosts: List[Optional[torch.Tensor]] = []  # of each parameter: its gradient's image in this step
        self.compression = StageCompression(self._core)

    # ---- training ----

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a batch. Sets p.grad to the gradient of the mean over all pipelines' samples, and returns that mean, the
        same on all ranks. Ranks of one pipeline give the same batch; an empty one is one that has no sample."""
        parts = self._cut(inputs, targets)
        with _ends_the_job():
            counts = [int(self._count(part)) if len(part) else 0 for part in parts[1]]
            self._learn_scale()
            batch = Batch(*parts, counts, self._passes(inputs), learns=True, loss_scale=self._scale)
            for p in self._parameters_here:
                p.grad = None
            self._hosts = [None] * len(self._parameters_here)
            tokens = [batch.passed.tokens(len(part)) for part in batch.inputs]
            loss = self._walk.run(batch, functools.partial(self._core.begin, tokens, sum(counts)), self._hand_over)
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
        parts = self._cut(inputs, targets)
        sums = torch.zeros(2, dtype=torch.float64)  # losses, samples
        with _ends_the_job(), self._evaluating():
            passed = self._passes(inputs)
            for x, y in zip(*parts):
                if len(x):
                    count = int(self._count(y))
                    begin = functools.partial(self._core.begin_forward, passed.tokens(len(x)))
                    sums[0] += self._walk.run(Batch([x], [y], [count], passed, learns=False), begin, lambda _: None)
                    sums[1] += count if self.stage == self.stages - 1 else 0
                    self._core.let_go()
            all_reduce(sums)
        return sums[0] / sums[1]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def _cut(self, inputs: torch.Tensor, targets: torch.Tensor) -> Tuple[List[torch.Tensor], List[Any]]:
        for what, given in (("inputs", inputs), ("targets", targets)):
            if not isinstance(given, torch.Tensor) or given.dim() < 1:
                raise UsageError(f"{what} of a pipeline are a tensor, cut along its first dimension, not {type(given).__name__}")
        if len(inputs) != len(targets):
            raise UsageError(f"a batch has as many inputs as targets, not {len(inputs)} and {len(targets)}")
        if self._wire != torch.float64 and any(p.dtype == torch.float64 for p in self._parameters_here):
            raise UsageError("modules became float64 after the pipeline was made of them: make them float64 before")
        for path, module, attribute, p in self._places:
            if module._parameters.get(attribute) is not p:
                raise UsageError(
                    f"parameter '{path}.{attribute}' was replaced after the pipeline was made of it (load_state_dict(assign=True), say), and neither "
                    "the pipeline nor its optimizer would train the other one: copy into it"
                )
        session()  # says so in a forked child, and after shutdown()
        return list(inputs.tensor_split(self.micro_batches)), list(targets.tensor_split(self.micro_batches))

    def _passes(self, inputs: torch.Tensor) -> Passed:
        """What passes between stages for such inputs: the first stage computes a sample, and tells the others."""
        key = (tuple(inputs.shape[1:]), inputs.dtype, torch.is_autocast_enabled(inputs.device.type))
        if self.stages == 1 or not len(inputs):
            self._install(1 if self.stages == 1 else None)
            return Passed((1,), self._wire)
        if key not in self._passed:
            mine = self._sample_of(inputs).told() if self.stage == 0 else [0] * 12
            self._passed[key] = Passed.heard(self._core.tell(mine))
        self._install(self._passed[key].width)
        return self._passed[key]

    @torch.no_grad()
    def _sample_of(self, inputs: torch.Tensor) -> Passed:
        first, count, *_ = self._core.chunks[0]
        x = inputs[:1]
        with self._evaluating():
            for number in range(first, first + count):
                x = self._walk.modules[number](x)
        return Passed.of(x, self._wire)

    def _install(self, width: Optional[int]) -> None:
        if self._core.is_installed:
            if width is not None and self.stages > 1 and width != self._width:
                raise UsageError(f"what passes between stages has a width of {width}, and had {self._width} in the first step")
            return
        if width is None:
            raise UsageError("the first batch of a pipeline has samples: what passes between stages is learned from it")
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
            p.grad = torch.full_like(p, float("nan")) if self.not_finite == "nan" else None
        if self.not_finite == "error":
            raise Error(f"{result.text} (not_finite='skip' or 'nan' goes on without this step, and so does a scaler)")

    # ---- state ----

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Of this rank's modules, or of all: each rank takes its own."""
        elsewhere = {str(number) for number in range(len(self._owners))} - set(self._modules)
        mine = {name: value for name, value in state_dict.items() if name.split(".", 1)[0] not in elsewhere}
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
        sum of residuals is kept; errors between stages go on where stages, their modules and pipelines are the same, else they are dropped and
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


@contextlib.contextmanager
def _ends_the_job() -> Iterator[None]:
    """What fails inside, with messages under way, fails on all ranks: nobody waits for this one."""
    try:
        yield
    except BaseException as error:
        session().abandon(f"rank {rank()}: a step of the pipeline ended with {type(error).__name__}: {error}")
        raise


def _tie(modules: List[torch.nn.Module], tied: Tied) -> None:
    for first, second in tied:
        kept, replaced = _parameter(modules, first), _parameter(modules, second)
        if kept.shape != replaced.shape:
            raise UsageError(f"'{first}' is {tuple(kept.shape)} and '{second}' {tuple(replaced.shape)}: parameters of one shape are tied")
        for owner in torch.nn.ModuleList(modules).modules():
            for attribute in [name for name, p in owner._parameters.items() if p is replaced]:
                setattr(owner, attribute, kept)


def _parameter(modules: List[torch.nn.Module], name: str) -> torch.nn.Parameter:
    number, _, rest = name.partition(".")
    path, _, attribute = rest.rpartition(".")
    try:
        found = modules[int(number)].get_submodule(path)._parameters[attribute]
        assert found is not None
    except (ValueError, IndexError, AttributeError, KeyError, AssertionError):
        raise UsageError(f"tied: there is no parameter '{name}' in the list of modules") from None
    return found


def _trained(modules: List[torch.nn.Module]) -> Trained:
    out: Trained = {}
    for number, module in enumerate(modules):
        for path, each in module.named_modules(prefix=str(number)):
            if isinstance(each, (Embedding, MoE)):
                raise UsageError(f"module {number} has a weft.nn.{type(each).__name__}, a layer over all ranks: a stage has none")
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state:
                raise UsageError(f"module '{path}', a {type(each).__name__}, has an extra state: the state of a stage is tensors only")
        for name, p in module.named_parameters():
            if p.requires_grad:
                out.setdefault(id(p), (stable_name(f"{number}.{name}"), p))
    return out


def _lines(backward: Tuple[Any, ...], micro_batches: int, options: Dict[str, Any], listed: Listed) -> List[Tuple[str, str]]:
    """What all ranks must have alike, in words."""
    modules, trained, stage = listed
    names = ("stages", "schedule", "chunks", "double_warmup", "layers", "compressed_stages")
    names_back = ("backward_rank", "backward_messages", "lazy_error", "seed")
    said = [*zip(names, stage), *zip(names_back, backward), ("micro_batches", micro_batches), ("the number of modules", len(modules))]
    said += sorted(options.items())
    out = [(name, str(value)) for name, value in said]
    for name, p in trained.values():
        out.append((f"parameter '{name}'", f"{tuple(p.shape)} of {str(p.dtype).removeprefix('torch.')}"))
    users = [(name, [i for i, module in enumerate(modules) if any(q is p for q in module.parameters())]) for name, p in trained.values()]
    out.append(("who has which parameter", f"{zlib.crc32(repr(users).encode()):08x}"))
    return out


def _from_rank_0(modules: List[torch.nn.Module]) -> None:
    tensors = {id(t): t for module in modules for t in itertools.chain(module.parameters(), module.buffers())}
    works = [broadcast(tensor.data, async_op=True) for tensor in tensors.values()]
    for work in works:
        assert isinstance(work, Work)
        work.wait()
