"""Collectives on tensors (CPU, or CUDA through pinned memory) and NumPy arrays.

All ranks call them in the same order with the same types and lengths; ranks that disagree get a TransportError that says in
what. With async_op=True they return a Work at once: the arguments must not be touched before its wait() has returned.
"""

from typing import Any, Callable, Optional, Sequence

from . import _weft
from ._memory import Staged
from ._weft import UsageError
from ._world import session


class Work:
    """An operation under way."""

    def __init__(self, work: _weft.Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Optional[Callable[[], None]] = finish

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._work.done()

    def wait(self) -> None:
        """Until the result is there, without Python's lock; Ctrl-C ends the wait. Raises the operation's error."""
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None


def _returned(work: Work, async_op: bool) -> Optional[Work]:
    if async_op:
        return work
    work.wait()
    return None


def all_reduce(tensor: Any, op: str = "sum", async_op: bool = False) -> Optional[Work]:
    """tensor = the sum ("sum", "min", "max") of all ranks' tensors, in place, the same bits on every rank."""
    staged = Staged(tensor)
    return _returned(Work(session().all_reduce(staged.memory, op, staged.host), staged.put_back), async_op)


def broadcast(tensor: Any, root: int = 0, async_op: bool = False) -> Optional[Work]:
    """tensor = the root's, on every rank."""
    staged = Staged(tensor)
    return _returned(Work(session().broadcast(staged.memory, root, staged.host), staged.put_back), async_op)


def all_gather(output: Any, tensor: Any, async_op: bool = False) -> Optional[Work]:
    """output, `size` times as long, = the tensors of all ranks one after the other."""
    mine = session()
    _same_blocks("all_gather", output, tensor, mine.size)
    staged = Staged(output, read=False)
    _block(staged.host, mine.rank, mine.size)[:] = tensor.reshape(-1)
    return _returned(Work(mine.all_gather(staged.memory, staged.host), staged.put_back), async_op)


def reduce_scatter(output: Any, tensor: Any, op: str = "sum", async_op: bool = False) -> Optional[Work]:
    """output = this rank's part of the sum of all ranks' tensors, which are `size` times as long and stay as they are."""
    mine = session()
    _same_blocks("reduce_scatter", tensor, output, mine.size)
    scratch = Staged(_copy(tensor))

    def finish() -> None:
        output[...] = _block(scratch.host, mine.rank, mine.size).reshape(output.shape)

    return _returned(Work(mine.reduce_scatter(scratch.memory, op, scratch.host), finish), async_op)


def all_to_all(
    output: Any,
    tensor: Any,
    output_splits: Optional[Sequence[int]] = None,
    input_splits: Optional[Sequence[int]] = None,
    async_op: bool = False,
) -> Optional[Work]:
    """Part r of `tensor` goes to rank r, part r of `output` comes from rank r.

    Splits are numbers of rows (of the first dimension) for each rank; without them the parts are equal.
    """
    mine = session()
    send, recv = Staged(tensor), Staged(output, read=False)
    work = mine.all_to_all(
        send.memory,
        _counts("input", tensor, send.memory[1], input_splits, mine.size),
        recv.memory,
        _counts("output", output, recv.memory[1], output_splits, mine.size),
        (send.host, recv.host),
    )
    return _returned(Work(work, recv.put_back), async_op)


def barrier(async_op: bool = False) -> Optional[Work]:
    """Ends when all ranks have called it."""
    return _returned(Work(session().barrier(), lambda: None), async_op)


def _copy(x: Any) -> Any:
    return x.detach().clone() if hasattr(x, "detach") else x.copy()


def _block(x: Any, rank: int, size: int) -> Any:
    flat = x.reshape(-1)
    length = len(flat) // size
    return flat[rank * length : (rank + 1) * length]


def _elements(x: Any) -> int:
    return int(x.numel() if hasattr(x, "numel") else x.size)


def _same_blocks(name: str, whole: Any, part: Any, size: int) -> None:
    if whole.dtype != part.dtype:
        raise UsageError(f"{name}: {whole.dtype} and {part.dtype} are different types")
    if _elements(whole) != size * _elements(part):
        raise UsageError(
            f"{name}: {_elements(whole)} elements are not {size} times (once for each rank) {_elements(part)}"
        )


def _counts(which: str, x: Any, count: int, splits: Optional[Sequence[int]], size: int) -> Sequence[int]:
    """Elements (bytes where they are sent as bytes) for each rank."""
    rows = x.shape[0] if len(x.shape) else 1
    if splits is None:
        if rows % size != 0:
            raise UsageError(f"all_to_all: {rows} rows of the {which} do not divide by {size} ranks: give its splits")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise UsageError(
            f"all_to_all: the splits of the {which}, {list(splits)}, are not {size} numbers with the sum {rows}"
        )
    row = count // rows if rows else 0
    return [split * row for split in splits]
