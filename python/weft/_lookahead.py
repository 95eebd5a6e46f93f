"""weft.lookahead: a loader that is one step ahead, so that sharded tables know what the next batch reads."""

import itertools
from typing import Any, Callable, Dict, Hashable, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

import torch

from ._tables import UNFINISHED, Batch, Tables, plain_ids
from ._weft import UsageError
from .nn import Embedding, named_tables

Getter = Union[Hashable, Callable[[Any], Any]]
_Step = Tuple[List[Any], Dict[Tables, Batch]]  # the batches of a step, and what they read


def lookahead(
    loader: Iterable[Any],
    ids: Mapping[Any, Getter],
    *,
    accumulate: int = 1,
    model: Optional[torch.nn.Module] = None,
) -> "Lookahead":
    """Yields what the loader yields, and tells sharded tables the ids of the next step while this one runs.

        for batch in weft.lookahead(loader, ids={"encoder.embed": "src", "decoder.embed": lambda batch: batch["tgt"][:, :-1]}):
            ...; loss.backward(); optimizer.step()

    `ids`: for each table the key of its ids in a batch, or a function of the batch; a tensor, or a list of tensors where the layer is
    called with several. A table is named as weft.shard_embeddings names it (its place in the model), or is the layer itself. All
    tables of an optimizer are there. Ids that are announced count as read: their rows are touched by the step, if with a gradient of
    zero.

    `accumulate`: so many batches make a step, that is, optimizer.step() is called once after them; the last step may have fewer.
    `model`: in which the names are looked for, where several models are trained.

    Rows of the next batch are sent when this step's update of them is done; the other updates travel while the next forward runs. All
    ranks iterate over equally many batches.
    """
    return Lookahead(loader, ids, accumulate, model)


class Lookahead:
    """What lookahead() returns: each iteration is one over the loader."""

    def __init__(
        self,
        loader: Iterable[Any],
        ids: Mapping[Any, Getter],
        accumulate: int,
        model: Optional[torch.nn.Module],
    ) -> None:
        if accumulate < 1:
            raise UsageError(f"a step has at least one batch, not {accumulate}")
        self._loader = loader
        self._ids = dict(ids)
        self._accumulate = accumulate
        self._model = model

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        getters = self._getters()
        batches = iter(self._loader)
        step = self._next(batches, getters)
        try:
            while step is not None:
                following = self._next(batches, getters)
                for tables, batch in step[1].items():
                    if tables.unfinished:
                        raise UsageError(UNFINISHED)
                    batch.following = following[1][tables] if following is not None else None
                    tables.batch = batch
                yield from step[0]
                step = following
        finally:
            for tables in getters:
                if not tables.unfinished:
                    tables.batch = None

    def _next(self, batches: Iterator[Any], getters: Dict[Tables, List[Getter]]) -> Optional[_Step]:
        taken = list(itertools.islice(batches, self._accumulate))
        if not taken:
            return None
        read = {tables: Batch([_ids(taken, getter) for getter in mine]) for tables, mine in getters.items()}
        return taken, read

    def _getters(self) -> Dict[Tables, List[Getter]]:
        """Of each optimizer's tables, in their order."""
        given = {id(self._layer(key)): getter for key, getter in self._ids.items()}
        out: Dict[Tables, List[Getter]] = {}
        for key in self._ids:
            tables = self._layer(key)._tables
            if not tables.bound:
                raise UsageError(
                    f"table '{self._layer(key).name}' has no optimizer that updates it yet: optimizer = weft.optim.hybrid(optimizer) "
                    "comes before the loop over weft.lookahead"
                )
            if tables in out:
                continue
            missing = [layer.name for layer in tables.layers() if id(layer) not in given]
            if missing:
                raise UsageError(f"weft.lookahead is not told the ids of table '{missing[0]}', which the same optimizer updates")
            out[tables] = [given[id(layer)] for layer in tables.layers()]
        return out

    def _layer(self, key: Any) -> Embedding:
        if isinstance(key, Embedding):
            return key
        if self._model is not None:
            found = [m for name, m in self._model.named_modules() if name == key and isinstance(m, Embedding)]
        else:
            there = named_tables().get(key, [])
            found = [layer for layer in there if layer._tables.bound] or there[:1]
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"several models have a sharded table '{key}': weft.lookahead(..., model=model)")
        known = ", ".join(named_tables()) or "none"
        raise UsageError(f"there is no sharded table '{key}'; there are: {known}")


def _ids(batches: List[Any], getter: Getter) -> torch.Tensor:
    parts: List[torch.Tensor] = []
    for batch in batches:
        found = getter(batch) if callable(getter) else batch[getter]
        parts += [plain_ids(each) for each in (found if isinstance(found, (list, tuple)) else [found])]
    return torch.unique(torch.cat(parts)) if parts else torch.empty(0, dtype=torch.int64)
