"""The communication hook for torch's own DistributedDataParallel.

    state = weft.DDPState(ddp, scheme="spardl", density=0.01)
    ddp.register_comm_hook(state, weft.ddp_hook)

DDP's buckets change after the first iteration; state belongs to parameters, so nothing of it is lost, and the first iteration
is like the others. Gradients of a bucket go out when DDP hands it over. Its future completes when the sums of all buckets are
there: the hook of the last bucket waits for them, on the thread that runs backward, where Ctrl-C and errors are seen (DDP
itself waits in C++, which sees neither, and at that moment has nothing else to do).
"""

# No postponed annotations here: torch compares those of the hook with its own types.
from typing import Any, List, Tuple

import torch
import torch.distributed as dist

from ._compression import Compression, stable_names
from ._weft import UsageError


class DDPState(Compression):
    """State of the hook: options and methods are those of Compression. `module` is the DDP module or what it wraps."""

    def __init__(self, module: torch.nn.Module, find_unused: bool = False, **options: Any) -> None:
        # (DDP itself looks after parameters that are unused.)
        ignored = getattr(module, "parameters_to_ignore", ())
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        super().__init__(stable_names(module, ignored), find_unused=find_unused, **options)
        if self.not_finite == "skip":
            raise UsageError("DDP needs gradients for every step: not_finite is 'error' or 'nan' here, not 'skip'")
        self._waiting: List[Tuple[Any, torch.Tensor, List[Tuple[int, torch.Tensor]]]] = []

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        pieces = [(self.index_of(p), g) for p, g in zip(bucket.parameters(), bucket.gradients())]
        for index, gradient in pieces:
            self.gradient_ready(index, gradient)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._waiting.append((future, bucket.buffer(), pieces))
        if bucket.is_last():
            self._complete()
        return future

    def _complete(self) -> None:
        waiting, self._waiting = self._waiting, []
        result = self.backward_ended()
        self.check(result)
        for future, buffer, pieces in waiting:
            if not result.committed:
                buffer.fill_(float("nan"))
            for index, gradient in pieces if result.committed else ():
                gradient.copy_(self.views[index])
            future.set_result(buffer)


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """`ddp.register_comm_hook(state, weft.ddp_hook)`: sums and averages by weft what DDP hands over."""
    return state.take(bucket)
