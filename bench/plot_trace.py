#!/usr/bin/env python3
"""Draws a trace.json of weft as an SVG: what one rank computes, waits for and sends, over some steps.

    bench/plot_trace.py runs/a/trace.json docs/trace.svg --rank 0 --from-step 2 --steps 2
"""
from __future__ import annotations

import argparse
import html
import json
from pathlib import Path
from typing import Any

LANES = ("computing", "waiting", "blocking", "prior", "gradient", "delayed")
COLOURS = {"forward": "#4e79a7", "backward": "#f28e2b", "update": "#59a14f", "waiting": "#e15759", "prior": "#b07aa1",
           "gradient": "#76b7b2", "blocking": "#edc948", "delayed": "#bab0ac"}
LEFT, WIDTH, ROW, GAP = 90, 1000, 26, 8

Event = dict[str, Any]


def lane_names(events: list[Event], rank: int) -> dict[Any, str]:
    return {e["tid"]: e["args"]["name"] for e in events
            if e.get("ph") == "M" and e.get("name") == "thread_name" and e.get("pid") == rank}


def colour(event: Event, lane: str) -> str:
    return COLOURS.get(event["name"].split(" ")[0] if lane == "computing" else lane, "#999999")


def window(slices: list[tuple[str, Event]], first: int, steps: int) -> tuple[float, float]:
    """From the first computation of a step to the last one of the steps behind it."""
    mine = [e for lane, e in slices if lane == "computing" and first <= e["args"]["step"] < first + steps]
    if not mine:
        raise SystemExit(f"the trace has no computation of the steps {first} to {first + steps - 1}")
    return min(e["ts"] for e in mine), max(e["ts"] + e["dur"] for e in mine)


def draw(slices: list[tuple[str, Event]], begin: float, end: float, title: str) -> str:
    shown = [(name, e) for name, e in slices if e["ts"] + e["dur"] > begin and e["ts"] < end]
    lanes = [lane for lane in LANES if any(name == lane for name, _ in shown)]
    scale = WIDTH / (end - begin)
    height = 40 + len(lanes) * (ROW + GAP) + 30
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{height}" '
           'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>',
           f'<text x="10" y="20" font-size="14">{html.escape(title)}</text>']
    for place, work in enumerate(("update", "forward", "backward")):
        left = LEFT + WIDTH - 230 + 80 * place
        out.append(f'<rect x="{left}" y="10" width="12" height="12" fill="{COLOURS[work]}"/>')
        out.append(f'<text x="{left + 16}" y="20">{work}</text>')
    for row, lane in enumerate(lanes):
        top = 34 + row * (ROW + GAP)
        out.append(f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end">{lane}</text>')
        out.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{ROW}" fill="#f4f4f4"/>')
        for name, event in shown:
            if name != lane:
                continue
            left = LEFT + (max(event["ts"], begin) - begin) * scale
            width = max(0.6, (min(event["ts"] + event["dur"], end) - max(event["ts"], begin)) * scale)
            out.append(f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{ROW}" fill="{colour(event, lane)}" '
                       f'stroke="white" stroke-width="0.3"><title>{html.escape(event["name"])}</title></rect>')
            if lane == "computing" and width > 7 * len(event["name"]):
                out.append(f'<text x="{left + 3:.2f}" y="{top + 17}" fill="white">{html.escape(event["name"])}</text>')
    bottom = 34 + len(lanes) * (ROW + GAP) + 10
    for tick in range(6):
        out.append(f'<text x="{LEFT + tick * WIDTH / 5:.0f}" y="{bottom}" text-anchor="middle">'
                   f'{(end - begin) * tick / 5 / 1000:.0f} ms</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--from-step", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    events = json.loads(options.trace.read_text())["traceEvents"]
    names = lane_names(events, options.rank)
    slices = [(names.get(e["tid"], ""), e) for e in events if e.get("ph") == "X" and e.get("pid") == options.rank]
    begin, end = window(slices, options.from_step, options.steps)
    title = options.title or f"rank {options.rank}, {options.steps} steps"
    options.svg.write_text(draw(slices, begin, end, title))


if __name__ == "__main__":
    main()
