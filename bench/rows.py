"""What the measuring scripts share: results as JSON lines that a second run goes on from, medians with an interval, tables in
Markdown, and what a build of `weft train` can do. Standard library only."""
from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN",
                      "WEFT_TRANSPORT")
Row = dict[str, Any]


class Rows:
    """A file of JSON lines. Two rows with the same values of `key` are one measurement: the later counts."""

    def __init__(self, path: Path, key: Sequence[str]) -> None:
        self.path = path
        self.key = tuple(key)
        self.rows: dict[tuple[Any, ...], Row] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the line that a killed run was writing
                self.rows[self.of(row)] = row

    def of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self.key)

    def has(self, row: Row) -> bool:
        return self.of(row) in self.rows

    def add(self, row: Row) -> None:
        """On disk when it returns. The line break comes first as well: the last line may be half a row."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as out:
            out.write(("\n" if torn else "") + json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())
        self.rows[self.of(row)] = row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows.values())


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that hold it with 95 % (the whole range where there are fewer than 6 values).

    Of n values the ranks j and n + 1 - j with j the largest for which P(Binomial(n, 1/2) < j) <= 0.025."""
    ordered = sorted(values)
    n = len(ordered)
    below, j = 0.0, 0
    while j < n // 2:
        below += math.comb(n, j) / 2**n
        if below > 0.025:
            break
        j += 1
    low = max(j - 1, 0)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds:.3f} s"


def duration_text(seconds: float) -> str:
    """Three digits and a unit."""
    if seconds == 0:
        return "0 s"
    value = float(f"{seconds:.3g}")
    if value >= 1000:
        return f"{value:,.0f} s"
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if abs(value) >= size), ("ns", 1e-9))
    return f"{value / size:#.3g}".rstrip(".") + f" {unit}"


def bytes_text(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def read_metrics(folder: Path) -> list[Row]:
    """The steps of a run of `weft train`; a line that is still being written is left out."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def plain_environment() -> dict[str, str]:
    """Of a process that no launcher started; torch gets one thread."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"}


class WeftTrain:
    """A build of the command: which flags and schemes its `train` knows, and a mark that changes with its bits."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        done = subprocess.run([str(self.path), "train", "--help"], capture_output=True, text=True, env=plain_environment(),
                              check=False)
        if done.returncode != 0:
            raise SystemExit(f"'{path} train --help' failed: {done.stderr.strip() or done.stdout.strip()}")
        self.flags = set(re.findall(r"^\s+(--[a-z0-9-]+)", done.stdout, re.MULTILINE))
        named = re.search(r"--scheme\s+TEXT\s+(.*?)\(", done.stdout, re.DOTALL)
        self.schemes = set(re.findall(r"[a-z][a-z0-9-]+", named[1])) if named else set()
        digest = hashlib.sha256()
        for program in (self.path, self.path.with_name("weft-torch")):
            if program.exists():
                digest.update(program.read_bytes())
        self.mark = digest.hexdigest()[:12]

    def can(self, arguments: Sequence[str]) -> bool:
        """Whether it knows all flags of `arguments`, and the scheme that they name."""
        words = list(arguments)
        if any(word.startswith("--") and word not in self.flags for word in words):
            return False
        return "--scheme" not in words or words[words.index("--scheme") + 1] in self.schemes
