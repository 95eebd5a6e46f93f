"""The `weft` command that comes with the package, from a shell and from Python."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any, Dict, List, NoReturn, Optional

from ._weft import Error, UsageError

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "weft")
# What launchers set: a measurement that Python starts is a job of its own.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_", "PMI_", "PMIX_", "SLURM_")


def main() -> NoReturn:
    """`weft ...` in a shell."""
    _require_program()
    os.execv(_PROGRAM, [_PROGRAM, *sys.argv[1:]])


def info() -> Dict[str, Any]:
    """Build, transports, settings and algorithms, as `weft info --json` tells them, and the versions of Python and torch."""
    out: Dict[str, Any] = json.loads(_run(["info", "--json"]))
    out["python"] = {"version": platform.python_version(), "torch": _torch_version()}
    return out


def bench(family: str, **options: Any) -> List[Dict[str, Any]]:
    """Measures on this machine, with ranks as threads, and returns the rows: `weft bench FAMILY --json`.

    Options are those of the command with underscores: bench("allreduce", ranks=4, link="1gbit,50us", bytes="1MiB..16MiB").
    """
    arguments = ["bench", family, "--json"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments += [flag, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]
    return [json.loads(line) for line in _run(arguments).splitlines()]


def _torch_version() -> Optional[str]:
    """Of the one that is loaded, else of the one that would be: importing it takes seconds."""
    loaded = getattr(sys.modules.get("torch"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _require_program() -> None:
    if not os.access(_PROGRAM, os.X_OK):
        sys.exit(f"weft: the command is not in this build ({_PROGRAM}): CLI11 and nlohmann-json were missing")


def _run(arguments: List[str]) -> str:
    if not os.access(_PROGRAM, os.X_OK):
        raise Error(f"the weft command is not in this build ({_PROGRAM}): CLI11 and nlohmann-json were missing")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    done = subprocess.run([_PROGRAM, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return done.stdout
    sentence = done.stderr.strip().removeprefix("weft: ") or f"weft ended with status {done.returncode}"
    raise (UsageError if done.returncode == 2 else Error)(sentence)
