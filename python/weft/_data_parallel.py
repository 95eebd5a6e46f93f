"""DataParallel: a module whose gradients are averaged over the ranks while backward still runs."""

import contextlib
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any, Iterable, Iterator, List, Tuple

import torch

from ._apart import names_apart
from ._collectives import Work, broadcast
from ._compression import Compression, stable_names
from ._weft import UsageError
from ._world import init

_engine = torch.autograd.Variable._execution_engine  # what torch's own DistributedDataParallel asks, too


class DataParallel(torch.nn.Module):
    """Wraps a module; every rank wraps the same one, and trains it on its own part of the batch.

        model = weft.DataParallel(model, scheme="spardl", density=0.01)
        loss(model(x), y).backward()      # gradients go out as they are computed; averages are in p.grad when it returns
        optimizer.step()

    At the start all ranks get rank 0's parameters and buffers (sync_buffers() gives them the buffers again). Options are those
    of Compression, which is `self.compression`: its state_dict() belongs into a checkpoint beside the model's and the
    optimizer's; `state_dict()` is the module's, with the prefix "module." as torch's DistributedDataParallel has it. Sharded
    tables (weft.nn.Embedding) are left alone: weft.optim.hybrid() updates them. So are experts (weft.nn.MoE), whose gradients their
    layer sums.

    p.grad of a contiguous parameter on the CPU is a view of a bucket (as with DDP's gradient_as_bucket_view): what is kept of it
    changes with the next step, clone() it. zero_grad() may set it to None or to zero. A tensor of your own in p.grad, before forward
    or as a view of something, stays there and gets the average; so do gradients of other devices, types and memory formats.

    Recomputed activations (torch.utils.checkpoint, both kinds) work: a step ends with the outermost backward, which is known by the
    tensors that forward returns, also inside of lists, tuples, mappings and dataclasses.

    Compiled modules work, wrapped or inside: gradients are taken where autograd accumulates them. Compiled autograd
    (torch._dynamo.config.compiled_autograd) does not: it traces backward, and there is no moment at which to send.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__()
        init()
        self.module = module
        self.skipped_steps = 0
        self.skipped_text = ""  # why the last one was skipped
        self.compression = Compression(stable_names(module), **options)
        self._sync = True
        self._outermost = -1  # autograd's number of the backward whose end is awaited; -1: of none
        self._sent: List[bool] = [False] * len(self.compression.parameters)
        self._foreign: List[bool] = [False] * len(self._sent)  # p.grad was somebody else's tensor before backward
        _from_rank_0(_shared_tensors(module.named_parameters(), module) + _shared_tensors(module.named_buffers(), module))
        mine = weakref.ref(self)
        for index, parameter in enumerate(self.compression.parameters):
            parameter.register_post_accumulate_grad_hook(_hook(mine, index))  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.module(*inputs, **named)
        if torch._C._current_graph_task_id() == -1:
            if self.compression.in_backward:
                raise UsageError(
                    "the last backward did not end, so some of its gradients are on their way and others never came: "
                    "this job cannot go on (start it again from a checkpoint)"
                )
            self._outermost = -1
            for index, (p, view) in enumerate(zip(self.compression.parameters, self.compression.views)):
                gradient = p.grad
                self._foreign[index] = gradient is not None and gradient is not view
        outputs = self.module(*inputs, **named)
        for tensor in _tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._output_reached)  # type: ignore[no-untyped-call]
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only adds to p.grad; the first backward outside sends what has gathered."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def synchronize(self) -> None:
        """Takes part in a step for which backward reached no parameter of this rank: the others wait for it.

        Nobody else needs it: every backward that reaches a parameter ends with it.
        """
        if self._sync:
            self._end_of_backward()

    def sync_buffers(self) -> None:
        """All ranks get rank 0's buffers, for example the running means of batch norms, before they are saved."""
        _from_rank_0(_shared_tensors(self.module.named_buffers(), self.module))

    # ---- what autograd calls ----

    def _output_reached(self, _: torch.Tensor) -> None:
        """The first gradient of a backward; those that run inside of it come later, and end earlier."""
        number = torch._C._current_graph_task_id()
        with self.compression.turn:
            if self._outermost != number:  # also where one before it failed, and never ended
                self._outermost = number
                _engine.queue_callback(self._outermost_ended)

    def _outermost_ended(self) -> None:
        self._outermost = -1
        if self.compression.in_backward:  # not where only torch.autograd.grad() passed through
            self._end_of_backward()

    def _gradient_ready(self, index: int) -> None:
        with self.compression.turn:
            if not self._sync:
                self._make_view(index)
                return
            if not self.compression.in_backward and self._outermost == -1:
                _engine.queue_callback(self._end_of_backward)
            self._send(index)

    def _make_view(self, index: int) -> None:
        """p.grad becomes the view of its bucket: what adds to it later, and the average, need no copy."""
        parameter, view = self.compression.parameters[index], self.compression.views[index]
        gradient = parameter.grad
        if gradient is None or gradient is view or self._foreign[index]:
            return
        if gradient.requires_grad or gradient._is_view() or not self.compression.is_direct(parameter):
            return
        self.compression.gather(index, gradient)
        parameter.grad = view

    def _send(self, index: int) -> None:
        self._make_view(index)
        gradient = self.compression.parameters[index].grad
        if gradient is not None:
            self._sent[index] = True
            self.compression.gradient_ready(index, gradient)

    def _end_of_backward(self) -> None:
        # What an earlier backward left in p.grad (no_sync, or no zero_grad) counts, as it does with other ranks' parameters.
        for index, sent in enumerate(self._sent):
            if not sent:
                self._send(index)
        result = self.compression.backward_ended()
        self._sent = [False] * len(self._sent)
        self.compression.check(result)
        if result.committed:
            self._write_averages()
        else:
            self.skipped_steps += 1
            self.skipped_text = result.text
            for parameter in self.compression.parameters:
                if self.compression.not_finite == "skip":
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad = torch.full_like(parameter, float("nan"))

    def _write_averages(self) -> None:
        """Into what p.grad is where it is no view."""
        for index, (parameter, view) in enumerate(zip(self.compression.parameters, self.compression.views)):
            gradient = parameter.grad
            if gradient is view or not self.compression.used(index):
                continue
            if gradient is not None and gradient.layout == torch.strided:
                gradient.detach().copy_(view)
            elif self.compression.is_direct(parameter):
                parameter.grad = view
            else:
                parameter.grad = torch.empty_like(parameter).copy_(view)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors_in(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _hook(owner: "weakref.ref[DataParallel]", index: int) -> Any:
    def gradient_ready(_: torch.Tensor) -> None:
        mine = owner()
        if mine is not None:
            mine._gradient_ready(index)

    return gradient_ready


def _shared_tensors(named: Iterable[Tuple[str, torch.Tensor]], module: torch.nn.Module) -> List[torch.Tensor]:
    """Those that all ranks have."""
    apart = set(names_apart(module))
    return [tensor for name, tensor in named if name not in apart]


def _from_rank_0(tensors: List[torch.Tensor]) -> None:
    works = [broadcast(tensor, root=0, async_op=True) for tensor in tensors]
    for work in works:
        assert isinstance(work, Work)
        work.wait()
