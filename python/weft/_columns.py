"""Whole tables from their columns and back: what is done once, at the start and at a checkpoint."""

import contextlib
import zlib
from typing import Any, Callable, Iterable, Iterator, Optional, Tuple

import torch

from ._apart import is_of_stage
from ._collectives import all_gather, all_to_all, broadcast
from ._weft import Error, TimeoutError, TransportError, UsageError
from ._world import rank, size

_CHUNK = 1 << 20  # elements of a table that are whole at once
Rows = Callable[[int, int], torch.Tensor]  # of a whole table, from one row to before another; asked for in order, each once
_FIX = (
    "state_dict() of a model or an optimizer with sharded tables or experts is a collective: call it on all ranks, or weft.save(model, path), "
    "which only rank 0 writes"
)
_LOAD_FIX = (
    "load_state_dict() of a model or an optimizer with sharded tables or experts is a collective: call it on all ranks, with the same whole state"
)
_only_rank_0 = False


@contextlib.contextmanager
def only_rank_0() -> Iterator[None]:
    """Inside, whole tables are put together on rank 0; the others get empty ones."""
    global _only_rank_0
    before, _only_rank_0 = _only_rank_0, True
    try:
        yield
    finally:
        _only_rank_0 = before


def wants_whole() -> bool:
    """Whether this rank is to put whole tensors together."""
    return rank() == 0 or not _only_rank_0


@contextlib.contextmanager
def collective_state(fix: str = _FIX) -> Iterator[None]:
    """What fails inside because other ranks do something else says so."""
    try:
        yield
    except (TimeoutError, TransportError) as error:
        if fix not in str(error):
            error.args = (f"{error} ({fix})",)
        raise


def require_same(what: str, given: Iterable[torch.Tensor]) -> None:
    """Before each rank takes its columns of them: all ranks do, and of the same tensors. A collective."""
    if size() == 1:
        return
    sum_of_rank = torch.zeros(size(), dtype=torch.int64)
    mine = 0
    for each in given:
        mine = zlib.crc32(each.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data, mine)
    with collective_state(_LOAD_FIX):
        all_gather(sum_of_rank, torch.tensor([mine]))
    other = [r for r in range(size()) if int(sum_of_rank[r]) != mine]
    if other:
        raise UsageError(f"{what} is another one on rank {other[0]} than on rank {rank()} ({_LOAD_FIX})")


def gather(mine: torch.Tensor, columns: Callable[[int], Tuple[int, int]]) -> torch.Tensor:
    """All columns, of this rank's and those that the others hold. A collective."""
    rows = mine.shape[0]
    wanted = wants_whole()
    first, count = columns(size() - 1)
    whole = torch.empty((rows, first + count if wanted else 0), dtype=mine.dtype)
    for root in range(size()):
        first, count = columns(root)
        part = mine.contiguous() if root == rank() else torch.empty((rows, count), dtype=mine.dtype)
        if size() > 1:
            broadcast(part, root=root)
        if wanted:
            whole[:, first : first + count] = part
    return whole


def scatter(rows: Rows, mine: torch.Tensor, columns: Callable[[int], Tuple[int, int]]) -> None:
    """Into `mine` this rank's columns of rank 0's rows; those of the others are asked for as well, and dropped. A collective."""
    widths = [columns(r) for r in range(size())]
    step = _chunk_rows(sum(count for _, count in widths))
    begin = 0
    while begin < mine.shape[0]:
        end = begin + step if begin + step + _BLOCK <= mine.shape[0] else mine.shape[0]
        whole = rows(begin, end)
        if size() == 1:
            mine[begin:end] = whole
        else:
            send = torch.empty(0, dtype=mine.dtype)
            if rank() == 0:
                send = torch.cat([whole[:, first : first + count].reshape(-1) for first, count in widths]).to(mine.dtype)
            arrived = torch.empty((end - begin) * mine.shape[1], dtype=mine.dtype)
            to = [(end - begin) * count if rank() == 0 else 0 for _, count in widths]
            all_to_all(arrived, send, [arrived.numel(), *[0] * (size() - 1)], to)
            mine[begin:end] = arrived.view(end - begin, mine.shape[1])
        begin = end


_BLOCK = 16


def _chunk_rows(columns: int) -> int:
    """torch draws normal numbers in blocks of 16, and its last 16 once more: pieces that begin at such a block, the last one not
    shorter than it, are drawn one after the other with the bits of the whole."""
    return max(_BLOCK, _CHUNK // max(1, columns) // _BLOCK * _BLOCK)


def drawn(columns: int, dtype: torch.dtype, zero_row: Optional[int]) -> Rows:
    """Rows as torch.empty(rows, columns).normal_() has them, a piece at a time."""

    def rows(begin: int, end: int) -> torch.Tensor:
        out = torch.empty((end - begin, columns), dtype=dtype, device="cpu").normal_()
        if zero_row is not None and begin <= zero_row < end:
            out[zero_row - begin] = 0
        return out

    return rows


def save(model: Any, path: Any) -> None:
    """Writes model.state_dict() to `path`, as torch.save does; all ranks call it, rank 0 writes. For anything that has a
    state_dict(), and for a dict of such: weft.save({"model": model, "optimizer": optimizer}, path). Of a pipeline all stages
    are written, of compression the states of all ranks, a list; what has one stage's state only, an optimizer of a pipeline, is
    refused.
    """
    for value in model.values() if isinstance(model, dict) else [model]:
        _refuse_one_stage(value)
    with only_rank_0():
        state = {key: _whole_state(value) for key, value in model.items()} if isinstance(model, dict) else _whole_state(model)
    failure: Optional[Exception] = None
    if rank() == 0:
        try:
            torch.save(state, path)
        except Exception as error:
            failure = error
    said = _said_by_rank_0("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if said:
        raise Error(f"rank 0 could not write '{path}': {said}")


def _whole_state(value: Any) -> Any:
    """Of what has a state; of a pipeline, that of all stages, and of compression those of all ranks."""
    if hasattr(value, "whole_state_dict"):
        return value.whole_state_dict()
    return value.state_dict() if hasattr(value, "state_dict") else value


def _refuse_one_stage(value: Any) -> None:
    if any(is_of_stage(p) for group in getattr(value, "param_groups", ()) for p in group["params"]):
        raise UsageError(
            f"{type(value).__name__} has the state of one stage, and only rank 0's would be written: save an optimizer of a pipeline in one "
            "file a rank"
        )
    if not isinstance(value, torch.nn.Module) or hasattr(value, "whole_state_dict"):
        return
    pipes = [each for each in value.modules() if hasattr(each, "whole_state_dict")]
    if any(is_of_stage(p) for pipe in pipes for p in pipe.parameters()):
        raise UsageError(f"{type(value).__name__} has a pipeline inside, and only rank 0's stage would be written: save one file a rank")


def _said_by_rank_0(text: str) -> str:
    raw = text.encode()
    length = torch.tensor([len(raw)])
    broadcast(length)
    if not int(length):
        return ""
    image = torch.zeros(int(length), dtype=torch.uint8)
    if rank() == 0:
        image = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    broadcast(image)
    return image.numpy().tobytes().decode()
