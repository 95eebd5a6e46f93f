"""weft.optim.hybrid: an optimizer of torch that leaves sharded tables to the ranks that hold their columns."""

import math
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import torch

from . import _weft
from ._apart import holders_of, is_apart, is_held
from ._collectives import all_reduce
from ._columns import collective_state, gather, require_same
from ._tables import Tables, is_table
from ._weft import Error, UsageError
from ._world import init, rank
from .nn import Embedding, layers_of

__all__ = ["Hybrid", "clip_grad_norm_", "hybrid"]

_KEY = "weft_tables"
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


def hybrid(optimizer: torch.optim.Optimizer, *, clips: bool = False, scaler: Any = None, divisor: float = 0.0) -> "Hybrid":
    """Takes the sharded tables out of an optimizer, and updates them beside it: only rows that the step read, at their owners.

        optimizer = weft.optim.hybrid(torch.optim.Adam(model.parameters(), lr=1e-3))

    SGD and Adagrad do with rows what torch's do; SparseAdam, Adam and AdamW are lazy: rows without a gradient and their moments stay
    as they are (what torch.optim.SparseAdam does; AdamW's decay, too, is of the rows that are read). Momentum, weight decay other than
    AdamW's and every other optimizer are refused. Learning rate, betas, eps and weight decay are read from param_groups in each step, so
    torch's schedulers work; what was refused here is refused there, too.

    Options, equal on all ranks:
      clips     weft.clip_grad_norm_ is called before each step: rows are updated when the norm is known
      scaler    the torch.amp.GradScaler of the loop: an overflow on any rank makes a step that all ranks leave out
      divisor   of the sum of the ranks' gradients; 0: their number, as with the average of DataParallel
    """
    return Hybrid(optimizer, clips, scaler, divisor)


class Hybrid(torch.optim.Optimizer):
    """What hybrid() returns: parameters other than tables are the inner optimizer's, and param_groups are its own.

    state_dict() has whole moments of tables by name, the same on any number of ranks: it and load_state_dict() are collectives, as
    the model's.
    """

    _step_supports_amp_scaling = True  # a scaler asks step() whether it counts: that depends on all ranks

    def __init__(self, inner: torch.optim.Optimizer, clips: bool, scaler: Any, divisor: float) -> None:
        # torch's own constructor would make groups once more: everything is the inner optimizer's.
        init()
        if isinstance(inner, Hybrid):
            raise UsageError("this optimizer has left its tables to weft already")
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise UsageError(f"scaler is a torch.amp.GradScaler, not {type(scaler).__name__}")
        self.inner = inner
        self._scaler = scaler
        self.tables: Optional[Tables] = None
        layers: List[Embedding] = []
        groups: List[int] = []  # of each table; by number, because load_state_dict() makes new ones
        for number, group in enumerate(inner.param_groups):
            for layer in layers_of(group["params"]):
                if layer.weight.requires_grad:
                    layers.append(layer)
                    groups.append(number)
        if not layers:
            return
        names = [_rule(inner, inner.param_groups[number]).name for number in groups]

        def rules() -> List[_weft.RowRule]:
            now = [_rule(inner, inner.param_groups[number]) for number in groups]
            if [rule.name for rule in now] != names:
                raise UsageError(f"{type(inner).__name__} has another decoupled_weight_decay than weft.optim.hybrid() was given")
            return now

        for layer in layers:
            if layer._tables.bound:
                raise UsageError(f"table '{layer.name}' has an optimizer already")
        waits = clips or scaler is not None
        self.tables = Tables(layers, rules, groups, waits=waits, skips=scaler is not None, divisor=divisor)
        if scaler is not None:
            self.tables.loss_scale = lambda: float(scaler.get_scale())
        for place, layer in enumerate(layers):
            layer._bind(self.tables, place)
        for group in inner.param_groups:
            for p in group["params"]:
                if is_table(p):
                    inner.state.pop(p, None)
            group["params"] = [p for p in group["params"] if not is_table(p)]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        names = ", ".join(self.tables.names) if self.tables is not None else "none"
        return f"{self.inner!r}\nsharded tables: {names}"

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: List[Dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> Dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        given = param_group["params"]
        if any(is_table(p) for p in ([given] if isinstance(given, torch.Tensor) else given)):
            raise UsageError("sharded tables are in the optimizer before weft.optim.hybrid() takes them out")
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)
        if self.tables is not None:
            for table in range(len(self.tables)):
                self.tables.drop(table)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._scales:
            if self.tables is None or self.tables.step():
                self.inner.step()
            return loss
        if self.grad_scale is not None:
            self._scaler.unscale_(self)  # and looks for infinities in what is not a table
        found = self._scaler._found_inf_per_device(self)
        overflow = any(bool(each) for each in found.values())
        committed = self.tables.step(_OVERFLOW if overflow else "") if self.tables is not None else not overflow
        if committed:
            self.inner.step()
        # What the scale becomes, all ranks decide alike.
        if not found:
            found[torch.device("cpu")] = torch.zeros(())
        for each in found.values():
            each.fill_(0.0 if committed else 1.0)
        return loss

    @property
    def _scales(self) -> bool:
        """A scaler calls step()."""
        if "found_inf" not in self.__dict__:
            return False
        if self._scaler is None:
            raise UsageError("sharded tables know nothing of this GradScaler: weft.optim.hybrid(optimizer, scaler=scaler)")
        return True

    # ---- state ----

    def state_dict(self) -> Dict[str, Any]:
        out = dict(self.inner.state_dict())
        if self.tables is not None:
            with collective_state():
                out[_KEY] = self._moments(self.tables)
        return out

    def _moments(self, tables: Tables) -> Dict[str, Dict[str, Any]]:
        tables.rest()
        out: Dict[str, Dict[str, Any]] = {name: {} for name in tables.names}
        layers = {layer.name: layer for layer in tables.layers()}
        for kind, name, dtype, raw in tables.core.state():
            if kind == "step":
                out[name][kind] = int.from_bytes(raw, "little", signed=True)
                continue
            layer = layers[name]
            mine = torch.empty((layer.num_embeddings, 0), dtype=_DTYPES[dtype])
            if raw:
                mine = torch.frombuffer(bytearray(raw), dtype=_DTYPES[dtype]).view(layer.num_embeddings, -1)
            out[name][kind] = gather(mine, layer.columns)
        return out

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        given = dict(state_dict)
        moments = given.pop(_KEY, None)
        if self.tables is not None:
            if moments is None:
                raise UsageError("this state is not of an optimizer with sharded tables: it has no 'weft_tables'")
            self._load(self.tables, moments)
        self.inner.load_state_dict(given)

    def _load(self, tables: Tables, moments: Dict[str, Dict[str, Any]]) -> None:
        tables.rest()
        layers = {layer.name: layer for layer in tables.layers()}
        wanted = [(kind, name, dtype) for kind, name, dtype, _ in tables.core.state()]
        plain, given = [], []
        for kind, name, dtype in wanted:
            value = moments.get(name, {}).get(kind)
            if value is None:
                raise UsageError(f"the state has no '{kind}' of table '{name}'")
            if kind == "step":
                given.append(torch.tensor(int(value)))
                plain.append((kind, name, int(value).to_bytes(8, "little", signed=True)))
                continue
            layer = layers[name]
            shape = (layer.num_embeddings, layer.embedding_dim)
            if tuple(value.shape) != shape:
                raise UsageError(f"'{kind}' of table '{name}' is {tuple(value.shape)} in the state, and the table {shape}")
            given.append(value)
            first, count = layer.columns(rank())
            mine = value[:, first : first + count].to("cpu", _DTYPES[dtype]).contiguous()
            plain.append((kind, name, mine.numpy().tobytes()))
        require_same("the state of the optimizer", given)
        for kind, name, raw in plain:
            tables.core.load(kind, name, raw)


_OVERFLOW = "a gradient of the scaled loss is not finite"


def clip_grad_norm_(
    parameters: Union[torch.nn.Module, torch.Tensor, Iterable[torch.Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: Optional[bool] = None,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ for a model, or its parameters, with sharded tables or experts, or of a pipeline's stage: the norm is of
    all columns of all ranks, and of every expert and every stage's parameter once.

    All ranks call it, once before an optimizer's step; where there are tables, with weft.optim.hybrid(optimizer, clips=True) (or a
    scaler). Gradients of other parameters are scaled in place and are the same on all ranks (averaged by DDP, say). A gradient of a table
    that is not finite, on any rank, makes the norm NaN on all of them, and the optimizer's step is left out. Without tables,
    experts and stages it is torch's.
    """
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    layers = [layer for layer in layers_of(given) if layer.weight.requires_grad]
    held = [p for p in given if is_held(p)]
    if not layers and held:
        return _clip_with_held(given, float(max_norm), float(norm_type), error_if_nonfinite)
    if not layers:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    tables = layers[0]._tables
    if any(layer._tables is not tables for layer in layers) or len(layers) != len(tables):
        raise UsageError("the norm is of all sharded tables of one optimizer: clip all parameters of the model at once")
    if not tables.bound:
        raise UsageError("sharded tables are clipped where an optimizer updates them: weft.optim.hybrid(optimizer, clips=True)")
    if float(norm_type) != 2.0:
        raise UsageError(f"gradients of sharded tables are clipped by their norm of type 2, not {norm_type}")
    if not float(max_norm) > 0:
        raise UsageError(f"max_norm is positive, not {max_norm}")
    gradients = [p.grad for p in given if not is_table(p) and p.grad is not None]
    squares = sum(_squares(p.grad) for p in given if not is_apart(p) and p.grad is not None)
    if held:
        squares += _squares_of_held(held)
    veto = "" if math.isfinite(squares) else "a gradient outside of the sharded tables is not finite"
    norm, scale = tables.clip(float(max_norm), squares, veto)
    if error_if_nonfinite and not math.isfinite(norm):
        raise Error("the norm of the gradients is not finite, so they are not clipped (error_if_nonfinite=False: the norm is returned)")
    if not math.isnan(norm) and scale != 1:
        for gradient in gradients:
            gradient.detach().mul_(scale)
    return torch.tensor(norm, dtype=torch.float64)


def _clip_with_held(given: List[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    if norm_type != 2.0:
        raise UsageError(f"gradients of experts and stages are clipped by their norm of type 2, not {norm_type}")
    squares = _squares_of_held(given) + sum(_squares(p.grad) for p in given if not is_held(p) and p.grad is not None)
    norm = math.sqrt(squares) if squares >= 0 else math.nan
    if error_if_nonfinite and not math.isfinite(norm):
        raise Error("the norm of the gradients is not finite, so they are not clipped (error_if_nonfinite=False: the norm is returned)")
    scale = max_norm / (norm + 1e-6)  # as torch has it
    if not scale >= 1:
        for p in given:
            if p.grad is not None:
                p.grad.detach().mul_(scale)
    return torch.tensor(norm, dtype=torch.float64)


def _squares_of_held(parameters: Iterable[torch.Tensor]) -> float:
    """Of the gradients of experts and stages of all ranks, each once. A collective."""
    total = torch.zeros(1, dtype=torch.float64)
    for p in parameters:
        if is_held(p) and p.grad is not None:
            total += _squares(p.grad) / holders_of(p)
    all_reduce(total)
    return float(total)


def _squares(gradient: torch.Tensor) -> float:
    values = gradient.coalesce()._values() if gradient.layout != torch.strided else gradient
    return float(values.detach().double().square().sum())


# ---- rules ----


def _sgd(group: Dict[str, Any]) -> Tuple[str, Dict[str, float]]:
    return "sgd", {"momentum": group["momentum"], "weight_decay": group["weight_decay"]}


def _adagrad(group: Dict[str, Any]) -> Tuple[str, Dict[str, float]]:
    more = {"lr_decay": group["lr_decay"], "initial_accumulator": group["initial_accumulator_value"]}
    return "adagrad", {"eps": group["eps"], "weight_decay": group["weight_decay"], **more}


def _adam(group: Dict[str, Any]) -> Tuple[str, Dict[str, float]]:
    beta1, beta2 = group["betas"]
    fields = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group.get("weight_decay", 0.0)}
    return "adamw" if group.get("decoupled_weight_decay") else "adam", fields


def _adamw(group: Dict[str, Any]) -> Tuple[str, Dict[str, float]]:
    return "adamw", _adam(group)[1]


_RULES: Dict[type, Callable[[Dict[str, Any]], Tuple[str, Dict[str, float]]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.SparseAdam: _adam,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
}
_REFUSED = ("amsgrad", "maximize", "differentiable")


def _rule(optimizer: torch.optim.Optimizer, group: Dict[str, Any]) -> _weft.RowRule:
    kind = type(optimizer)
    if kind not in _RULES:
        known = ", ".join(each.__name__ for each in _RULES)
        raise UsageError(f"rows of sharded tables are updated as by {known}; {kind.__name__} needs more than a row's gradient, or is not known")
    for option in _REFUSED:
        if group.get(option):
            raise UsageError(f"{kind.__name__} with {option}=True is not known for rows of sharded tables")
    name, fields = _RULES[kind](group)
    rule = _weft.RowRule(name)
    rule.lr = float(group["lr"])
    for field, value in fields.items():
        setattr(rule, field, float(value))
    rule.validate()
    return rule
