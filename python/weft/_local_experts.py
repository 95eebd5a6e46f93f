"""The experts of a layer that this rank holds: what they compute, and the state of the whole layer."""

from typing import Any, Callable, Dict, Iterable, List, Tuple

import torch

from ._apart import set_holders
from ._collectives import all_reduce, broadcast
from ._columns import collective_state, require_same, wants_whole
from ._weft import UsageError
from ._world import rank, size


class FeedForward(torch.nn.Module):
    """An expert, where none is given: two matrices with biases, and an activation between them."""

    def __init__(self, width: int, hidden: int, activation: Callable[[torch.Tensor], torch.Tensor], **kind: Any) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden, **kind)
        self.activation = activation
        self.down = torch.nn.Linear(hidden, width, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.activation(self.up(x)))
        return out


class LocalExperts(torch.nn.ModuleDict):
    """Those of a layer that this rank holds, by their numbers in the layer."""

    holds_own_experts = True

    def __init__(self, name: str, make: Callable[[int], torch.nn.Module], count: int, ep: int) -> None:
        super().__init__()
        self.layer_name, self.count, self.ep = name, count, ep
        self.each = count // ep
        first = rank() % ep * self.each
        tensors: Dict[str, Tuple[torch.Size, torch.dtype]] = {}
        for number in range(count):
            module = make(number)  # all ranks draw all of them: torch's generators stay as they would be
            mine = {key: (tensor.shape, tensor.dtype) for key, tensor in module.state_dict().items()}
            if number > 0 and mine != tensors:
                raise UsageError(f"layer '{name}': expert {number} has other tensors than expert 0: experts of a layer are alike")
            tensors = mine
            for tensor in module.state_dict().values():
                broadcast(tensor)
            if first <= number < first + self.each:
                self[str(number)] = module
        for p in self.parameters():
            set_holders(p, size() // ep)

    def numbers(self) -> List[str]:
        return list(self.keys())

    def trained(self) -> List[torch.Tensor]:
        return [p for p in self.parameters() if p.requires_grad]

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`counts`: rows of each source and own expert, as the rows are ordered."""
        of_source = counts.view(-1, self.each)
        order, totals = _by_expert(of_source)
        order = order.to(rows.device)
        given = []
        for module, mine in zip(self.values(), torch.split(rows.index_select(0, order), totals)):
            out = module(mine) if mine.shape[0] > 0 else mine
            if out.shape != mine.shape:
                raise UsageError(f"an expert of layer '{self.layer_name}' made {tuple(out.shape)} of {tuple(mine.shape)}")
            given.append(out)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return torch.cat([each.to(given[0].dtype) for each in given]).index_select(0, back)

    # ---- state: of the whole layer ----

    def _save_to_state_dict(self, destination: Dict[str, Any], prefix: str, keep_vars: bool) -> None:
        template = next(iter(self.values())).state_dict()
        with collective_state():
            for number in range(self.count):
                key = str(number)
                mine = self[key].state_dict() if key in self else {}
                for name, like in template.items():
                    tensor = mine[name].detach() if mine else torch.empty_like(like)
                    root = number // self.each
                    whole = tensor.contiguous()
                    if size() > 1:
                        broadcast(whole.clone() if mine and root != rank() else whole, root=root)
                    destination[f"{prefix}{key}.{name}"] = whole if wants_whole() else tensor.new_empty(0)

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
        """Each expert takes what is its own; here it is looked at whether the layer is whole, and the same on all ranks."""
        template = next(iter(self.values())).state_dict()
        names = [f"{prefix}{number}.{name}" for number in range(self.count) for name in template]
        if strict:
            others = [name for name in names if name.removeprefix(prefix).split(".")[0] not in self]
            missing_keys += [name for name in others if name not in state_dict]
            known = set(names)
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]
        require_same(f"layer '{self.layer_name}' of the state", [state_dict[name] for name in names if name in state_dict])


def _by_expert(of_source: torch.Tensor) -> Tuple[torch.Tensor, List[int]]:
    """Rows come ordered by source, then by expert. The order by expert, then by source, and the rows of each expert."""
    flat = of_source.reshape(-1)
    first = (flat.cumsum(0) - flat).view_as(of_source)
    order = [torch.arange(int(f), int(f) + int(n)) for f, n in zip(first.t().reshape(-1), of_source.t().reshape(-1))]
    return torch.cat(order), of_source.sum(0).tolist()
