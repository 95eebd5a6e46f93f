"""This process's place in the job: joining, leaving, and what happens at a fork and at the end of the program."""

import atexit
import os
import sys
from typing import Any, Optional, Union

from ._group import initialized_group, place_in, rank_and_size
from ._weft import Session, UsageError

_session: Optional[Session] = None
_forked = False
_watching = False

_FORKED = (
    "this process was forked after weft.init(), and weft works only in the process that called it: "
    "start ranks with torchrun, mpirun or weft launch, and leave weft alone in workers"
)


def init(*, process_group: Any = None, trace: Union[str, "os.PathLike[str]"] = "") -> None:
    """Joins the job that a launcher started (torchrun, mpirun, srun, weft launch); alone, a job of one rank.

    Returns when all ranks are there. A second call does nothing. Raises UsageError, TransportError or TimeoutError.

    `process_group`: of torch.distributed; its ranks are the job's, and its store tells them where to meet and a token of their own:
    no variable of a launcher is needed. Where torch.distributed is initialised, its default group is taken.

    `trace`: a folder in which each rank leaves trace.rankN.json at shutdown(): what it sent, computed and waited for, and when
    (ui.perfetto.dev opens it).
    """
    global _session, _watching
    if _forked:
        raise UsageError(_FORKED)
    if _session is not None:
        _require_same(_session, process_group)
        return
    group = process_group if process_group is not None else initialized_group()
    _session = Session(os.fspath(trace), None if group is None else place_in(group))
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_at_exit)


def _require_same(joined: Session, process_group: Any) -> None:
    if process_group is None:
        return
    rank, size = rank_and_size(process_group)
    if (rank, size) != (joined.rank, joined.size):
        raise UsageError(
            f"this process is rank {rank} of {size} in the process group, but weft was initialised as rank {joined.rank} of "
            f"{joined.size}: call weft.init(process_group=...) with that group first, or weft.shutdown() before"
        )


def shutdown() -> None:
    """Leaves the job: waits for what this rank has in flight, then says goodbye to the others. At exit it happens by itself."""
    global _session
    if _forked or _session is None:
        return
    mine, _session = _session, None
    mine.close()


def is_initialized() -> bool:
    return _session is not None and not _forked


def rank() -> int:
    """This process's rank, from 0."""
    return session().rank


def size() -> int:
    """The number of ranks."""
    return session().size


def transport() -> str:
    """What carries the bytes: "tcp", "mpi", or "threads" for a process alone."""
    return session().transport


def session() -> Session:
    """The joined world; raises UsageError where there is none."""
    if _forked:
        raise UsageError(_FORKED)
    if _session is None:
        raise UsageError("weft is not initialised in this process: call weft.init() first")
    return _session


def _after_fork() -> None:
    global _forked
    _forked = _session is not None


def _at_exit() -> None:
    # An exception that ended the program: the peers quote it instead of "has left the job".
    error = getattr(sys, "last_value", None)
    if error is not None and is_initialized():
        mine = session()
        mine.abandon(f"rank {mine.rank}: the program ended with {type(error).__name__}: {error}")
    shutdown()
