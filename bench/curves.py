"""What loss curves of `weft train` say: pure functions over the rows of bench/convergence. Standard library only.

A row has model, recipe, density, seed, kind ("steps": all runs have equal steps; "wall": equal seconds on a slow link), and
for each step loss, seconds, bytes (sent by rank 0). The loss at the end is the mean over the last twentieth of the
steps, at least five: single steps are noisy.
"""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

Row = dict[str, Any]
SERIES = ("model", "sizes", "common", "kind", "steps", "link", "wall", "data")  # what is compared has these in common
KEY = (*SERIES, "recipe", "flags", "seed")
DENSE = "dense"
BYTES_BAR = 0.25  # of dense's, over the whole run
GAP_BAR = 0.05


def end_loss(losses: Sequence[float]) -> float:
    last = max(5, len(losses) // 20)
    return statistics.fmean(losses[-last:])


def steps_within(seconds: Sequence[float], limit: float) -> int:
    """How many steps ended in time."""
    return sum(total <= limit for total in accumulate(seconds))


def loss_at(row: Row, limit: float) -> float | None:
    """The loss after `limit` seconds; None before the fifth step."""
    done = steps_within(row["seconds"], limit)
    return end_loss(row["loss"][:done]) if done >= 5 else None


def of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def dense_fall(rows: Sequence[Row]) -> float:
    """By which share dense ends below its start; the smallest over seeds."""
    return min(1 - end_loss(row["loss"]) / row["loss"][0] for row in of(rows, recipe=DENSE))


def seed_spread(rows: Sequence[Row]) -> float:
    """Of dense's losses at the end: largest minus smallest, over their mean."""
    ends = [end_loss(row["loss"]) for row in of(rows, recipe=DENSE)]
    return (max(ends) - min(ends)) / statistics.fmean(ends)


class Summary(NamedTuple):
    recipe: str
    density: float | None
    seeds: int
    loss: float  # at the end, mean over seeds
    gap: float  # over dense with the same seed, relative; mean over seeds
    gap_low: float
    gap_high: float
    bytes_share: float  # of dense's with the same seed, over the whole run; mean over seeds


def at_equal_steps(rows: Sequence[Row]) -> list[Summary]:
    """Rows of one model, kind "steps". Only seeds that dense has count."""
    dense = {row["seed"]: row for row in of(rows, recipe=DENSE)}
    out = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        pairs = [(row, dense[row["seed"]]) for row in of(rows, recipe=recipe) if row["seed"] in dense]
        if not pairs:
            continue
        gaps = [end_loss(mine["loss"]) / end_loss(its["loss"]) - 1 for mine, its in pairs]
        shares = [sum(mine["bytes"]) / sum(its["bytes"]) for mine, its in pairs]
        out.append(Summary(recipe, pairs[0][0]["density"], len(pairs),
                           statistics.fmean(end_loss(mine["loss"]) for mine, _ in pairs), statistics.fmean(gaps), min(gaps),
                           max(gaps), statistics.fmean(shares)))
    return out


def best_within_bytes(summaries: Sequence[Summary]) -> Summary | None:
    """The lowest loss among the sparse ones that send at most BYTES_BAR of dense's bytes."""
    allowed = [s for s in summaries if s.density is not None and s.bytes_share <= BYTES_BAR]
    return min(allowed, key=lambda s: s.gap) if allowed else None


class WallSummary(NamedTuple):
    recipe: str
    seeds: int
    steps: float  # mean over seeds
    losses: list[float | None]  # at each moment, mean over seeds; None where a seed has too few steps
    lower: int  # seeds in which the loss at the last moment is below dense's


def at_equal_time(rows: Sequence[Row], moments: Sequence[float]) -> list[WallSummary]:
    """Rows of one model, kind "wall". Only seeds that dense has count."""
    dense = {row["seed"]: row for row in of(rows, recipe=DENSE)}
    out = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        runs = [row for row in of(rows, recipe=recipe) if row["seed"] in dense]
        if not runs:
            continue
        at = [[loss_at(row, moment) for row in runs] for moment in moments]
        means = [None if None in losses else statistics.fmean(x for x in losses if x is not None) for losses in at]
        pairs = [(loss_at(row, moments[-1]), loss_at(dense[row["seed"]], moments[-1])) for row in runs]
        lower = sum(mine is not None and its is not None and mine < its for mine, its in pairs)
        steps = statistics.fmean(steps_within(row["seconds"], moments[-1]) for row in runs)
        out.append(WallSummary(recipe, len(runs), steps, means, lower))
    return out


def same_curve(wall: Row, steps: Row) -> bool:
    """A slow link changes no bit: where both runs have a step, its loss is the same."""
    return all(a == b for a, b in zip(wall["loss"], steps["loss"], strict=False))
