#!/usr/bin/env python3
"""Draws what bench/convergence measured, standard library only: one SVG for each model, size, optimizer and number of steps.

    bench/plot_convergence.py                                        build/bench/convergence.jsonl -> docs/results/
    bench/plot_convergence.py --in FILE --out FOLDER --model lm --size medium

Left: loss against steps. Middle: loss against seconds on the slow link, where there are such runs. Right: the gap to dense at
equal steps against density, a line for each recipe. Curves are running means over a twentieth of the steps (at least five);
the left ones are means over seeds, the middle ones show each seed.
"""
from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True
import curves  # noqa: E402
from rows import ROOT, Row, Rows  # noqa: E402

WIDTH, HEIGHT = 400, 300  # of a panel's frame
LEFT, TOP, BETWEEN, BELOW = 60, 50, 75, 150
COLOUR = {"dense": "#000000", "dense-bf16": "#888888", "powersgd-4": "#aa4499"}
DENSITY_COLOUR = {0.25: "#332288", 0.2: "#0072b2", 0.1: "#009e73", 0.05: "#b8a000", 0.03: "#e69f00", 0.01: "#d55e00"}
OTHER_COLOUR = "#56b4e9"
DASH = {"": "", "-warm": "7 4", "-packed": "12 3", "-layered": "1 3", "-warm-momentum": "2 3", "-warm-momentum-clip": "9 3 2 3"}
KIND_COLOUR = {"": "#d55e00", "-warm": "#009e73", "-packed": "#332288"}  # of the gaps
Points = list[tuple[float, float]]


class Line(NamedTuple):
    name: str
    points: Points
    colour: str
    dash: str = ""
    marks: bool = False


class Axis:
    """Maps values to 0..1, and has ticks at round values."""

    def __init__(self, values: Sequence[float], logarithmic: bool = False) -> None:
        self.place: Callable[[float], float] = math.log10 if logarithmic else float
        low, high = min(values), max(values)
        if high <= low:
            low, high = (low / 2, high * 2) if logarithmic else (low - 0.5, high + 0.5)
        if logarithmic:
            ticks = [digit * 10.0**power for power in range(-9, 10) for digit in (1, 2, 5)]
            self.ticks = [tick for tick in ticks if low <= tick * 1.001 and tick <= high * 1.001]
        else:
            step = nice_step(high - low)
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
            self.ticks = [low + i * step for i in range(round((high - low) / step) + 1)]
        self.low, self.high = self.place(low), self.place(high)

    def at(self, value: float) -> float:
        return (self.place(value) - self.low) / (self.high - self.low)


def nice_step(span: float) -> float:
    rough = span / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)


def smooth(losses: Sequence[float]) -> list[float]:
    """Running means over a twentieth of the steps; fewer at the start."""
    width = max(5, len(losses) // 20)
    sums = [0.0, *accumulate(losses)]
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / min(i + 1, width) for i in range(len(losses))]


def kind_of(recipe: str) -> str:
    return next((kind for kind in sorted(DASH, key=len, reverse=True) if kind and recipe.endswith(kind)), "")


def style(row: Row) -> dict[str, str]:
    colour = COLOUR.get(row["recipe"]) or DENSITY_COLOUR.get(row["density"], OTHER_COLOUR)
    return {"colour": colour, "dash": DASH[kind_of(row["recipe"])]}


def thin(points: Points, most: int = 200) -> Points:
    every = max(1, len(points) // most)
    return [point for i, point in enumerate(points) if i % every == 0 or i == len(points) - 1]


def step_lines(rows: Sequence[Row]) -> list[Line]:
    out = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        runs = curves.of(rows, recipe=recipe)
        means = [statistics.fmean(at) for at in zip(*(smooth(row["loss"]) for row in runs), strict=True)]
        out.append(Line(recipe, thin([(i + 1.0, loss) for i, loss in enumerate(means)]), **style(runs[0])))
    return out


def time_lines(rows: Sequence[Row]) -> list[Line]:
    return [Line(row["recipe"], thin(list(zip(accumulate(row["seconds"]), smooth(row["loss"]), strict=True))), **style(row))
            for row in rows]


def gap_lines(rows: Sequence[Row]) -> list[Line]:
    summaries = curves.at_equal_steps(rows)
    out = []
    for kind, dash in DASH.items():
        mine = sorted((s.density, 100 * s.gap) for s in summaries if s.density and kind_of(s.recipe) == kind)
        if mine:
            out.append(Line("constant" if not kind else kind[1:].replace("-", ", "), mine, KIND_COLOUR.get(kind, "#0072b2"), dash,
                            marks=True))
    ends = [s.density for s in summaries if s.density]
    for s in summaries:
        if not s.density and s.recipe != curves.DENSE and ends:
            level = [(min(ends), 100 * s.gap), (max(ends), 100 * s.gap)]
            out.append(Line(s.recipe, level, COLOUR.get(s.recipe, OTHER_COLOUR)))
    return out


def panel(left: float, lines: Sequence[Line], labels: tuple[str, str, str], logarithmic: bool = False) -> list[str]:
    title, across, up = labels
    x = Axis([p[0] for line in lines for p in line.points], logarithmic)
    y = Axis([p[1] for line in lines for p in line.points])
    px = lambda value: left + WIDTH * x.at(value)  # noqa: E731
    py = lambda value: TOP + HEIGHT * (1 - y.at(value))  # noqa: E731
    out = [f'<text x="{left + WIDTH / 2}" y="{TOP - 12}" class="middle title">{escape(title)}</text>']
    for tick in x.ticks:
        out.append(f'<line x1="{px(tick):.1f}" x2="{px(tick):.1f}" y1="{TOP}" y2="{TOP + HEIGHT}" class="grid"/>'
                   f'<text x="{px(tick):.1f}" y="{TOP + HEIGHT + 16}" class="middle">{tick:g}</text>')
    for tick in y.ticks:
        out.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{py(tick):.1f}" y2="{py(tick):.1f}" class="grid"/>'
                   f'<text x="{left - 6}" y="{py(tick) + 4:.1f}" class="end">{tick:.6g}</text>')
    out.append(f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" class="frame"/>')
    for line in lines:
        path = " ".join(f"{px(a):.1f},{py(b):.1f}" for a, b in line.points)
        out.append(f'<polyline points="{path}" stroke="{line.colour}" stroke-dasharray="{line.dash or "none"}" class="curve"/>')
        if line.marks:
            out += [f'<circle cx="{px(a):.1f}" cy="{py(b):.1f}" r="3" fill="{line.colour}"/>' for a, b in line.points]
    middle = TOP + HEIGHT / 2
    out.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" class="middle">{escape(across)}</text>')
    turned = f'transform="rotate(-90 {left - 44} {middle})"'
    out.append(f'<text x="{left - 44}" y="{middle}" class="middle" {turned}>{escape(up)}</text>')
    return out + legend(left, lines)


def legend(left: float, lines: Sequence[Line]) -> list[str]:
    """Below the panel, in two columns; a name once."""
    out = []
    for i, line in enumerate({line.name: line for line in lines}.values()):
        x, y = left + (i % 2) * WIDTH / 2, TOP + HEIGHT + 56 + 15 * (i // 2)
        out.append(f'<line x1="{x}" x2="{x + 26}" y1="{y}" y2="{y}" stroke="{line.colour}" '
                   f'stroke-dasharray="{line.dash or "none"}" class="curve"/>'
                   f'<text x="{x + 32}" y="{y + 4}">{escape(line.name)}</text>')
    return out


Panel = tuple[list[Line], tuple[str, str, str], bool]  # lines; title and names of the axes; logarithmic


def picture(steps: Sequence[Row], wall: Sequence[Row], heading: str) -> str:
    panels: list[Panel] = [(step_lines(steps), ("equal steps", "step", "loss"), False)]
    if wall:
        panels.append((time_lines(wall), (f"equal time, {wall[0]['link']}", "seconds", "loss"), False))
    if gaps := gap_lines(steps):
        panels.append((gaps, ("gap to dense at equal steps", "density", "gap, %"), True))
    return document(panels, heading)


def document(panels: Sequence[Panel], heading: str) -> str:
    """Panels side by side."""
    width = LEFT + len(panels) * (WIDTH + BETWEEN)
    body = [line for i, (lines, labels, logarithmic) in enumerate(panels)
            for line in panel(LEFT + i * (WIDTH + BETWEEN), lines, labels, logarithmic)]
    css = ("text{font:12px sans-serif;fill:#222}.middle{text-anchor:middle}.end{text-anchor:end}.title{font-weight:bold}"
           ".grid{stroke:#ddd}.frame{fill:none;stroke:#444}.curve{fill:none;stroke-width:1.6}")
    height = TOP + HEIGHT + BELOW
    size = f'width="{width}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">',
                      f"<style>{css}</style>", f'<rect {size} fill="#fff"/>',
                      f'<text x="{LEFT}" y="18">{escape(heading)}</text>', *body, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", dest="source", type=Path, default=ROOT / "build/bench/convergence.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results")
    parser.add_argument("--model", default="", help="only this one")
    parser.add_argument("--size", default="", help="only this one")
    options = parser.parse_args()
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in Rows(options.source, curves.KEY):
        if options.model in ("", row["model"]) and options.size in ("", row["sizes"]):
            groups.setdefault((row["model"], row["sizes"], row["common"], str(row["steps"]), row["data"]), []).append(row)
    drawn: set[Path] = set()
    for (model, size, common, steps, data), rows in groups.items():
        equal = curves.of(rows, kind="steps")
        if not curves.of(equal, recipe=curves.DENSE):
            continue
        path = options.out / f"convergence_{model}_{size}_{common.split()[1]}_{steps}.svg"
        if path in drawn:
            print(f"plot_convergence: {path.name} would hold two series ({common}, {data}): leave one out", file=sys.stderr)
            return 1
        drawn.add(path)
        path.write_text(picture(equal, curves.of(rows, kind="wall"), f"{model}, {size}, {common}, {steps} steps, text: {data}"))
        print(path)
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
