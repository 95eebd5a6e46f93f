"""weft carries the traffic of distributed training: collectives, and gradients that are compressed on slow networks.

    import weft
    weft.init()                                              # under torchrun, mpirun, srun, weft launch, or alone
    model = weft.DataParallel(model, scheme="spardl", density=0.01)

Everything of torch is loaded when it is first used: `weft.init`, `weft.info` and collectives on NumPy arrays work without it.
examples/README.md is a tour, docs/running.md says how jobs are started.
"""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any, List

if _find_spec(__name__ + "._weft") is None:
    raise ImportError("weft's extension is not built here: `make build`, or `pip install .`")

from ._collectives import Work, all_gather, all_reduce, all_to_all, barrier, broadcast, reduce_scatter
from ._command import bench, info
from ._weft import Error, TimeoutError, TransportError, UsageError, __version__
from ._world import init, is_initialized, rank, shutdown, size, transport

if TYPE_CHECKING:
    from . import nn, optim, pipeline
    from ._columns import save
    from ._compression import Compression
    from ._data_parallel import DataParallel
    from ._ddp import DDPState, ddp_hook
    from ._lookahead import lookahead
    from .nn import shard_embeddings
    from .optim import clip_grad_norm_

__all__ = [
    "Compression",
    "DDPState",
    "DataParallel",
    "Error",
    "TimeoutError",
    "TransportError",
    "UsageError",
    "Work",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "bench",
    "broadcast",
    "clip_grad_norm_",
    "ddp_hook",
    "info",
    "init",
    "is_initialized",
    "lookahead",
    "nn",
    "optim",
    "pipeline",
    "rank",
    "reduce_scatter",
    "save",
    "shard_embeddings",
    "shutdown",
    "size",
    "transport",
]

_NEEDS_TORCH = {
    "Compression": "_compression",
    "DataParallel": "_data_parallel",
    "DDPState": "_ddp",
    "clip_grad_norm_": "optim",
    "ddp_hook": "_ddp",
    "lookahead": "_lookahead",
    "nn": "nn",
    "optim": "optim",
    "pipeline": "pipeline",
    "save": "_columns",
    "shard_embeddings": "nn",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'weft' has no attribute '{name}'")
    import importlib

    module = importlib.import_module(f".{_NEEDS_TORCH[name]}", __name__)
    value = module if name == _NEEDS_TORCH[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> List[str]:
    return sorted(__all__)
