"""What all ranks do or none: before they go on they tell each other what they have, and one that cannot go on says why."""

from typing import Callable, List, Optional, Sequence, Tuple, TypeVar

from ._weft import Error, UsageError
from ._world import session

T = TypeVar("T")
Lines = Sequence[Tuple[str, str]]  # what, and its value


def agreed(make: Callable[[], T], lines_of: Callable[[T], Lines], fix: str = "", agree: Optional[Callable[[Lines], None]] = None) -> T:
    """What `make` gives, of which all ranks have the same lines; `fix` ends the sentence where not. Where it fails on some ranks all raise:
    those what failed there, the others a UsageError that names the first of them. A collective: `agree`, or that of the session."""
    tell = agree or (lambda lines: session().agree(lines, fix))
    said: List[Tuple[str, str]]
    try:
        made = make()
        said = list(lines_of(made))
    except Exception as failure:
        try:
            tell([("", _sentence(failure))])
        except UsageError:  # of this rank, or of one before it
            pass
        raise
    tell(said)
    return made


def _sentence(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    return text if isinstance(failure, Error) else f"{type(failure).__name__}: {text}"
