"""Layers over several ranks. weft.nn.Embedding: torch.nn.Embedding with its table cut by columns; weft.nn.MoE: experts."""

import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from . import _weft
from ._apart import tell_ddp, watch_ddp
from ._columns import collective_state, drawn, gather, require_same, scatter
from ._experts import MoE, moe_loss
from ._tables import Batch, Tables, is_table, plain_ids, table_of
from ._weft import UsageError
from ._world import init, rank, size

__all__ = ["Embedding", "MoE", "Placement", "moe_loss", "shard_embeddings"]

_layers: "weakref.WeakSet[Embedding]" = weakref.WeakSet()
_made = 0


class Embedding(torch.nn.Module):
    """A drop-in for torch.nn.Embedding. Each rank holds some columns of all rows; the rows that a batch reads travel, not the table.

        embed = weft.nn.Embedding(50_000, 512)                    # or weft.shard_embeddings(model), which swaps them in
        optimizer = weft.optim.hybrid(torch.optim.Adam(model.parameters()))

    Every rank makes it in the same place of its program and calls it equally often, with its own ids: an empty tensor where it has
    none (after weft.lookahead, which knows all ids, calling it is a rank's own business). What it returns are the bits of plain
    indexing. Outside of training (after model.eval()) a lookup asks all ranks, and has no gradient.

    Initial values are torch's, rank 0's on all ranks; no rank has the whole table in memory while they are drawn. `weight` is this rank's columns, [num_embeddings, some], in the host's memory
    and of float32 or float64 whatever the model is moved to; results are on the device of the ids. state_dict() has the whole table
    under the same name; it and load_state_dict() are collectives. padding_idx: the row is stored and returned as any other, only its
    gradient is dropped. `sparse` changes nothing: gradients are of rows always.

    weft.optim.hybrid() updates it. `weight.grad` says only whether gradients of rows wait for the optimizer's step: it is None, or a
    zero. To set it to None or to zero, as zero_grad() of a module does, drops them.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int] = None,
        max_norm: Optional[float] = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Optional[torch.Tensor] = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        name: Optional[str] = None,
    ) -> None:
        super().__init__()
        global _made
        if max_norm is not None:
            raise UsageError("max_norm needs whole rows, and each rank has some of their columns: a sharded table has no max_norm")
        if scale_grad_by_freq:
            raise UsageError("scale_grad_by_freq counts ids of the batch of one rank: a sharded table has no scale_grad_by_freq")
        if num_embeddings < 1 or embedding_dim < 1:
            raise UsageError(f"a sharded table has rows and columns, not {num_embeddings} x {embedding_dim}")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise UsageError(f"padding_idx {padding_idx} is none of the {num_embeddings} rows")
            padding_idx %= num_embeddings
        if _weight is not None:
            if tuple(_weight.shape) != (num_embeddings, embedding_dim):
                raise UsageError(f"the weight is {tuple(_weight.shape)}, not {(num_embeddings, embedding_dim)}")
            dtype = dtype or _weight.dtype
        dtype = dtype or torch.get_default_dtype()
        if dtype not in (torch.float32, torch.float64):
            raise UsageError(f"a sharded table is float32 or float64, not {str(dtype).removeprefix('torch.')}")
        init()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, norm_type, False, sparse
        self.name = name or f"table{_made}"
        _made += 1
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.weight = _Columns(torch.empty(0, dtype=dtype, device="cpu"), requires_grad=not _freeze)
        self.weight._weft_table = weakref.ref(self)  # type: ignore[attr-defined]
        self._tables = Tables([self], lambda: [_weft.RowRule("sgd")], [0], bound=False)
        self._place = 0  # in them
        self.weight.data = self._tables.values(0)
        self._fill(_weight, dtype)
        _layers.add(self)
        watch_ddp()

    def _fill(self, given: Optional[torch.Tensor], dtype: torch.dtype) -> None:
        """Rank 0's values. All ranks draw, some rows at a time: torch's generators stay as they would be."""
        if given is None:
            scatter(drawn(self.embedding_dim, dtype, self.padding_idx), self.weight.data, self.columns)
        else:
            whole = given.detach()
            scatter(lambda begin, end: whole[begin:end].to("cpu"), self.weight.data, self.columns)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        padding_idx: Optional[int] = None,
        max_norm: Optional[float] = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> "Embedding":
        """As torch's: rank 0's values; frozen, unless it is told otherwise."""
        rows, columns = embeddings.shape
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return cls(rows, columns, *options, _weight=embeddings, _freeze=freeze)

    @classmethod
    def from_embedding(cls, module: torch.nn.Embedding, name: Optional[str] = None) -> "Embedding":
        """Takes a torch.nn.Embedding over: its options, and rank 0's values."""
        out = cls(
            module.num_embeddings,
            module.embedding_dim,
            module.padding_idx,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.sparse,
            _weight=module.weight,
            _freeze=not module.weight.requires_grad,
            name=name,
        )
        return out.train(module.training)

    def columns(self, of_rank: int) -> Tuple[int, int]:
        """The first column that a rank holds, and how many."""
        return self._tables.core.columns(self._place, of_rank)

    @property
    def sent_bytes(self) -> Dict[str, int]:
        """Payload that this rank has sent for the table, by what was sent: ids, rows, prior and delayed gradients."""
        return self._tables.core.sent_bytes(self._place)

    @property
    def prior_share(self) -> float:
        """Of the rows that the last announced step updated: how many of them the next one reads."""
        return self._tables.core.prior_share(self._place)

    @property
    def padding_row(self) -> int:
        return -1 if self.padding_idx is None else self.padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        out: torch.Tensor
        if learns and self.training:
            out = _Lookup.apply(self.weight, self, ids)  # type: ignore[no-untyped-call]
        else:
            out = self._tables.look_up(self._place, plain_ids(ids), self.training, learns)[0]
            out = out.to(ids.device).view(*ids.shape, self.embedding_dim)
        return out

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        first, count = self.columns(rank())
        return text + f", columns {first} to {first + count - 1} of rank {rank()}" if count else text + f", no column of rank {rank()}"

    # ---- state ----

    def _save_to_state_dict(self, destination: Dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with collective_state():
            self._tables.rest()
            destination[prefix + "weight"] = gather(self.weight.detach(), self.columns)

    def _load_from_state_dict(
        self,
        state_dict: Dict[str, Any],
        prefix: str,
        local_metadata: Dict[str, Any],
        strict: bool,
        missing_keys: List[str],
        unexpected_keys: List[str],
        error_msgs: List[str],
    ) -> None:
        whole = state_dict.get(prefix + "weight")
        if whole is None:
            if strict:
                missing_keys.append(prefix + "weight")
            return
        if tuple(whole.shape) != (self.num_embeddings, self.embedding_dim):
            wanted = (self.num_embeddings, self.embedding_dim)
            error_msgs.append(f"{prefix}weight is {tuple(whole.shape)}, and the whole table {wanted}")
            return
        self._tables.rest()
        require_same(f"table '{self.name}' of the state", [whole])
        first, count = self.columns(rank())
        with torch.no_grad():
            self.weight.copy_(whole[:, first : first + count])

    def reset_parameters(self) -> None:
        """New values, rank 0's on all ranks. A collective."""
        self._tables.rest()
        self._fill(None, self.weight.dtype)

    def _bind(self, tables: Tables, place: int) -> None:
        """From now on the table is that one of another step; its values stay."""
        self._tables.rest()
        values = tables.values(place)
        values.copy_(self.weight.detach())
        self._tables, self._place = tables, place
        self.weight.data = values

    def _apply(self, fn: Any, recurse: bool = True) -> "Embedding":
        """The table stays where it is; of another type it cannot become."""
        sample = fn(torch.empty(0, dtype=self.weight.dtype, device="cpu"))
        if sample.dtype != self.weight.dtype:
            there = str(sample.dtype).removeprefix("torch.")
            raise UsageError(f"the sharded table '{self.name}' stays {self.dtype_name}: make the model {there} before weft.shard_embeddings")
        return self


class _Columns(torch.nn.Parameter):
    @property
    def grad(self) -> Optional[torch.Tensor]:
        layer = table_of(self)
        if layer is None or not layer._tables.has_gradient(layer._place):
            return None
        out = torch.zeros(1, dtype=self.dtype, device="cpu").as_subclass(_Waits)
        out.drop = lambda: layer._tables.drop(layer._place)
        return out

    @grad.setter
    def grad(self, value: Optional[torch.Tensor]) -> None:
        layer = table_of(self)
        if value is not None:
            raise UsageError("gradients of sharded tables are of rows, and are not set: weft.clip_grad_norm_ scales them")
        if layer is not None:
            layer._tables.drop(layer._place)


class _Waits(torch.Tensor):
    """`grad` of a table while gradients of its rows wait: one zero, which changes no norm."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    drop: Callable[[], None]

    def zero_(self) -> "_Waits":
        self.drop()
        return self


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, layer: Embedding, ids: torch.Tensor) -> torch.Tensor:
        plain = plain_ids(ids)
        rows, batch = layer._tables.look_up(layer._place, plain, True, True)
        ctx.read = (layer, plain, batch)
        return rows.to(ids.device).view(*ids.shape, layer.embedding_dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[None, None, None]:
        layer, ids, batch = ctx.read
        tables: Tables = layer._tables
        read_of: Optional[Batch] = batch
        tables.take(layer._place, ids, read_of, gradient)
        return None, None, None


class Placement(NamedTuple):
    """What was done with an embedding, and why."""

    sharded: bool
    why: str


def shard_embeddings(model: torch.nn.Module) -> Dict[str, Placement]:
    """Puts a weft.nn.Embedding in the place of each torch.nn.Embedding of the model that can be sharded; says what became of each.

    On all ranks; values are rank 0's. Left as they are: a weight that another module uses too (tied), a frozen one, a class derived
    from torch.nn.Embedding, max_norm, scale_grad_by_freq, types other than float32 and float64. Optimizers come after this. A
    weft.nn.Embedding that is there already gets its name in the model. torch's DistributedDataParallel and weft.DataParallel, around
    the model, a part of it or a module that has it inside, leave sharded tables alone.
    """
    if isinstance(model, torch.nn.Embedding):
        raise UsageError("there is nothing around this embedding to swap it in: weft.nn.Embedding.from_embedding(module)")
    init()
    users = _users(model)
    out: Dict[str, Placement] = {}
    swapped: Dict[int, Embedding] = {}
    for path, parent, attribute, module in list(_children(model, "")):
        if isinstance(module, Embedding):
            module.name = path
            out[path] = Placement(True, _share(module))
        elif isinstance(module, torch.nn.Embedding):
            why = _why_not(module, path, users)
            if why:
                out[path] = Placement(False, why)
                continue
            if id(module) not in swapped:  # one module in two places stays one
                swapped[id(module)] = Embedding.from_embedding(module, path)
            setattr(parent, attribute, swapped[id(module)])
            out[path] = Placement(True, _share(swapped[id(module)]))
    tell_ddp(model)
    return out


def _share(layer: Embedding) -> str:
    first, count = layer.columns(rank())
    what = f"columns {first} to {first + count - 1} of {layer.embedding_dim}" if count else f"none of {layer.embedding_dim} columns"
    return f"rank {rank()} of {size()} holds {what}"


def _children(module: torch.nn.Module, prefix: str) -> Iterator[Tuple[str, torch.nn.Module, str, torch.nn.Module]]:
    for attribute, child in module._modules.items():
        if child is not None:
            path = f"{prefix}{attribute}"
            yield path, module, attribute, child
            yield from _children(child, path + ".")


def _users(model: torch.nn.Module) -> Dict[int, List[Tuple[int, str]]]:
    """Of each parameter: which modules have it, and the name it has there."""
    out: Dict[int, List[Tuple[int, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                out.setdefault(id(parameter), []).append((id(module), f"{path}.{name}" if path else name))
    return out


def _why_not(module: torch.nn.Embedding, path: str, users: Dict[int, List[Tuple[int, str]]]) -> str:
    others = [name for owner, name in users[id(module.weight)] if owner != id(module)]
    if others:
        return f"its weight is {others[0]}, too: all rows get a gradient"
    if type(module) is not torch.nn.Embedding:
        return f"it is a {type(module).__name__}, which may do more than a torch.nn.Embedding"
    if not module.weight.requires_grad:
        return "it is frozen: nothing of it is exchanged"
    if module.max_norm is not None:
        return "max_norm needs whole rows on one rank"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq counts ids of the batch of one rank"
    if module.weight.dtype not in (torch.float32, torch.float64):
        return f"it is {str(module.weight.dtype).removeprefix('torch.')}; a sharded table is float32 or float64"
    return ""


def named_tables() -> Dict[str, List[Embedding]]:
    """Layers that live, by name."""
    out: Dict[str, List[Embedding]] = {}
    for layer in sorted(_layers, key=lambda each: each.name):
        out.setdefault(layer.name, []).append(layer)
    return out


def layers_of(parameters: List[torch.Tensor]) -> List[Embedding]:
    found = [table_of(p) for p in parameters if is_table(p)]
    return [layer for layer in found if layer is not None]
