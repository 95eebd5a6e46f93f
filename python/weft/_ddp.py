"""The communication hook for torch's own DistributedDataParallel.

    state = weft.DDPState(ddp, scheme="spardl", density=0.01)
    ddp.register_comm_hook(state, weft.ddp_hook)

DDP's buckets change after the first iteration; state belongs to parameters, so nothing of it is lost, and the first iteration
is like the others. Gradients of a bucket go out when DDP hands it over. Its future completes when the sums of all buckets are
there: the hook of the last bucket waits for them, on the thread that runs backward, where Ctrl-C and errors are seen (DDP
itself waits in C++, which sees neither, and at that moment has nothing else to do).
"""

# No postponed annotations here: torch compares those of the hook with its own types.
import weakref
from typing import Any, List, Optional, Tuple

import torch
import torch.distributed as dist

from ._compression import Compression, stable_names
from ._weft import UsageError
from ._world import init


class DDPState(Compression):
    """State of the hook: options and methods are those of Compression. `module` is the DDP module, whose process group weft joins
    where it is not initialised yet, or what it wraps.

    DDP throws away what comes back for a parameter that no rank used, so such parameters stay out of the step, and what
    compression has left behind of them waits. find_unused is DDP's own find_unused_parameters, unless it is not known here.
    """

    def __init__(self, module: torch.nn.Module, find_unused: Optional[bool] = None, **options: Any) -> None:
        ignored = getattr(module, "parameters_to_ignore", ())
        may_be_unused = True
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            init(process_group=module.process_group)
            may_be_unused = module.find_unused_parameters or module.static_graph
            module = module.module
            if may_be_unused and find_unused is False:
                raise UsageError("find_unused=False beside DDP's find_unused_parameters=True: residuals of unused parameters would be lost")
        if find_unused is None:
            find_unused = may_be_unused
        options = {"find_unused": find_unused, "unused_stay_out": find_unused, **options}
        super().__init__(stable_names(module, ignored), **options)
        if self.not_finite == "skip":
            raise UsageError("DDP needs gradients for every step: not_finite is 'error' or 'nan' here, not 'skip'")
        self._reached = [not find_unused] * len(self.parameters)  # by a backward since the last step
        if find_unused:
            for index, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(_note(weakref.ref(self), index))  # type: ignore[no-untyped-call]
        self._waiting: List[Tuple[Any, torch.Tensor, List[Tuple[int, torch.Tensor]]]] = []

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        pieces = [(self.index_of(p), g) for p, g in zip(bucket.parameters(), bucket.gradients())]
        for index, gradient in pieces:
            if self._reached[index]:
                self.gradient_ready(index, gradient)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._waiting.append((future, bucket.buffer(), pieces))
        if bucket.is_last():
            self._complete()
        return future

    def _complete(self) -> None:
        waiting, self._waiting = self._waiting, []
        result = self.backward_ended()
        self._reached = [not self.find_unused] * len(self._reached)
        self.check(result)
        for future, buffer, pieces in waiting:
            if not result.committed:
                buffer.fill_(float("nan"))
            for index, gradient in pieces if result.committed else ():
                if self.used(index):
                    gradient.copy_(self.views[index])
                else:
                    gradient.zero_()
            future.set_result(buffer)


def _note(owner: "weakref.ref[DDPState]", index: int) -> Any:
    def reached(_: torch.Tensor) -> None:
        mine = owner()
        if mine is not None:
            mine._reached[index] = True

    return reached


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """`ddp.register_comm_hook(state, weft.ddp_hook)`: sums and averages by weft what DDP hands over."""
    return state.take(bucket)
