"""What ranks make a pipeline of: the list of modules and its options, as each has them and as all must have them alike."""

import itertools
import zlib
from typing import Any, Dict, Iterable, List, Tuple

import torch

from ._collectives import Work, broadcast
from ._compression import check_types, stable_name
from ._stage_walk import text_of
from ._weft import UsageError
from .nn import Embedding, MoE

Tied = Iterable[Tuple[str, str]]
Trained = Dict[int, Tuple[str, torch.nn.Parameter]]  # by identity, in the order of their first use; names are those of the whole list
Stage = Tuple[int, str, int, bool, List[int], int]  # stages, schedule, chunks, double_warmup, layers, compressed_stages
Listed = Tuple[List[torch.nn.Module], Trained, Stage]  # what a rank has before it keeps its own


def tie(modules: List[torch.nn.Module], tied: Tied) -> None:
    for first, second in tied:
        kept, replaced = _parameter(modules, first), _parameter(modules, second)
        if kept.shape != replaced.shape:
            raise UsageError(f"'{first}' is {tuple(kept.shape)} and '{second}' {tuple(replaced.shape)}: parameters of one shape are tied")
        for owner in torch.nn.ModuleList(modules).modules():
            for attribute in [name for name, p in owner._parameters.items() if p is replaced]:
                setattr(owner, attribute, kept)


def _parameter(modules: List[torch.nn.Module], name: str) -> torch.nn.Parameter:
    number, _, rest = name.partition(".")
    path, _, attribute = rest.rpartition(".")
    try:
        found = modules[int(number)].get_submodule(path)._parameters[attribute]
        assert found is not None
    except (ValueError, IndexError, AttributeError, KeyError, AssertionError):
        raise UsageError(f"tied: there is no parameter '{name}' in the list of modules") from None
    return found


def trained_of(modules: List[torch.nn.Module]) -> Trained:
    out: Trained = {}
    for number, module in enumerate(modules):
        for path, each in module.named_modules(prefix=str(number)):
            if isinstance(each, (Embedding, MoE)):
                raise UsageError(f"module {number} has a weft.nn.{type(each).__name__}, a layer over all ranks: a stage has none")
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state:
                raise UsageError(f"module '{path}', a {type(each).__name__}, has an extra state: the state of a stage is tensors only")
        for name, p in module.named_parameters():
            if p.requires_grad:
                out.setdefault(id(p), (stable_name(f"{number}.{name}"), p))
    check_types(out.values())
    return out


def lines_of(backward: Tuple[Any, ...], micro_batches: int, options: Dict[str, Any], listed: Listed) -> List[Tuple[str, str]]:
    """What all ranks must have alike, in words."""
    modules, trained, stage = listed
    names = ("stages", "schedule", "chunks", "double_warmup", "layers", "compressed_stages")
    names_back = ("backward_rank", "backward_bits", "backward_messages", "lazy_error", "seed")
    said = [*zip(names, stage), *zip(names_back, backward), ("micro_batches", micro_batches), ("the number of modules", len(modules))]
    said += sorted(options.items())
    out = [(name, str(value)) for name, value in said]
    for name, p in trained.values():
        out.append((f"parameter '{name}'", text_of(p)))
    users = [(name, [i for i, module in enumerate(modules) if any(q is p for q in module.parameters())]) for name, p in trained.values()]
    out.append(("who has which parameter", f"{zlib.crc32(repr(users).encode()):08x}"))
    seen = {id(p) for _, p in trained.values()}
    for number, module in enumerate(modules):  # all ranks get rank 0's
        for name, t in itertools.chain(module.named_parameters(), module.named_buffers()):
            if id(t) not in seen:
                seen.add(id(t))
                out.append((f"'{stable_name(f'{number}.{name}')}', which is not trained,", text_of(t)))
    return out


def from_rank_0(modules: List[torch.nn.Module]) -> None:
    tensors = {id(t): t for module in modules for t in itertools.chain(module.parameters(), module.buffers())}
    works = [broadcast(tensor.data, async_op=True) for tensor in tensors.values()]
    for work in works:
        assert isinstance(work, Work)
        work.wait()
