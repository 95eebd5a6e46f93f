"""What is one rank's own: parameters that others do not have, so that nobody averages them or gives rank 0's values to all.

Sharded tables (weft.nn.Embedding), experts (weft.nn.MoE) and modules of a stage (weft.pipeline) are of this kind. torch's
DistributedDataParallel is told by name.
"""

from typing import Dict, List, Optional

import torch

from ._tables import is_table
from ._weft import UsageError

_watching_ddp = False


def set_holders(parameter: torch.Tensor, ranks: int) -> None:
    """So many ranks have it, and the same gradient of it."""
    parameter._weft_holders = ranks  # type: ignore[attr-defined]


def holders_of(parameter: Optional[torch.Tensor]) -> int:
    """Ranks that have an expert, or a parameter of a stage; 0: it is none."""
    return getattr(parameter, "_weft_holders", 0)


def set_of_stage(parameter: torch.Tensor) -> None:
    """Other ranks have other stages, and an optimizer's state of theirs."""
    parameter._weft_of_stage = True  # type: ignore[attr-defined]


def is_of_stage(parameter: Optional[torch.Tensor]) -> bool:
    return getattr(parameter, "_weft_of_stage", False)


def is_held(parameter: Optional[torch.Tensor]) -> bool:
    return holders_of(parameter) > 0


def is_apart(parameter: Optional[torch.Tensor]) -> bool:
    return is_table(parameter) or is_held(parameter)


def names_apart(module: torch.nn.Module) -> List[str]:
    """Of parameters, and of all that is inside of experts: buffers, too. In their order in the module."""
    out: Dict[str, None] = {}
    for path, each in module.named_modules():
        prefix = f"{path}." if path else ""
        out |= {prefix + key: None for key, p in each._parameters.items() if is_apart(p)}
        if getattr(each, "holds_own_experts", False):
            out |= {prefix + key: None for key, _ in (*each.named_parameters(), *each.named_buffers())}
    return list(out)


def tell_ddp(model: torch.nn.Module) -> None:
    """Whatever part of the model is wrapped, DDP leaves what is apart alone."""
    for module in model.modules():
        mine = names_apart(module)
        if mine:
            before = list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            module._ddp_params_and_buffers_to_ignore = before + [name for name in mine if name not in before]  # type: ignore[assignment]


def watch_ddp() -> None:
    """From the first such layer on: it may be inside of any module that is wrapped."""
    global _watching_ddp
    if not _watching_ddp:
        _watching_ddp = True
        torch.nn.modules.module.register_module_module_registration_hook(_leave_alone)


def _leave_alone(wrapper: torch.nn.Module, name: str, module: Optional[torch.nn.Module]) -> None:
    """DDP's constructor, which has just read what it is to leave alone, and has neither compared nor sent anything yet."""
    if name != "module" or module is None or not isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
        return
    mine = names_apart(module)
    if set(mine) <= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ())):
        return
    if not hasattr(wrapper, "parameters_to_ignore") or not hasattr(wrapper, "_module_parameters"):
        raise UsageError("this DistributedDataParallel is not known: call weft.shard_embeddings(model) on the model that it wraps")
    wrapper.parameters_to_ignore.update(mine)
    wrapper._module_parameters = [p for p in wrapper._module_parameters if not is_apart(p)]
    if not wrapper._module_parameters:
        raise UsageError("all parameters of this model are sharded tables: it needs no DistributedDataParallel, weft.optim.hybrid() updates it")
