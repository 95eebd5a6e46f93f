#!/usr/bin/env python3
"""weft bench moe as a user runs it: bench_moe_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv.pop(1)).resolve()) if len(sys.argv) > 1 else ""
FIELDS = {"family", "algorithm", "transport", "ranks", "bytes", "seconds_median", "seconds_p99", "payload_bytes_per_rank",
          "formula_bytes_per_rank", "formula_is_bound", "bytes_as_formula", "rounds", "formula_rounds", "ideal_seconds", "efficiency",
          "correct", "simulated", "tokens", "width", "experts", "choices", "capacity_factor", "slices", "routing", "load",
          "load_max_over_mean", "dropped_share"}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
SMALL = ("--tokens", "50", "--width", "12", "--iterations", "2")
SIM = ("--transport", "sim")
Row = dict[str, Any]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    timeout = 100 * float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
    return subprocess.run([WEFT, "bench", "moe", *arguments], capture_output=True, text=True, timeout=timeout, env=clean, check=False)


def split(places: int, slices: int) -> list[int]:
    return [places // slices + (s < places % slices) for s in range(slices)]


class Tokens:
    """What a file of experts means, by plain loops."""

    def __init__(self, lines: list[list[int]], ranks: int, experts: int, factor: float) -> None:
        size = split(len(lines), ranks)
        self.ranks, self.experts, self.local = ranks, experts, experts // ranks
        self.places = []  # of each rank and expert
        self.dropped, copies = 0, 0
        self.load = [0] * experts
        for r in range(ranks):
            mine = lines[sum(size[:r]) : sum(size[: r + 1])]
            capacity = math.ceil(len(lines[0]) * factor * len(mine) / experts)
            chosen = [sum(line.count(e) for line in mine) for e in range(experts)]
            self.load = [a + b for a, b in zip(self.load, chosen)]
            copies += sum(chosen)
            self.dropped += sum(max(0, n - capacity) for n in chosen) if factor else 0
            self.places.append([capacity] * experts if factor else chosen)
        self.dropped_share = self.dropped / copies

    def rows(self, source: int, to: int, slices: int) -> list[int]:
        out = [0] * slices
        for e in range(to * self.local, (to + 1) * self.local):
            out = [a + b for a, b in zip(out, split(self.places[source][e], slices))]
        return out

    def pairwise(self, width: int) -> int:
        """Bytes of the busiest rank, out and home."""
        others = [[r for r in range(self.ranks) if r != me] for me in range(self.ranks)]
        return max(4 * width * sum(self.rows(me, r, 1)[0] + self.rows(r, me, 1)[0] for r in others[me]) for me in range(self.ranks))

    def hierarchical(self, width: int, slices: int, node: int) -> int:
        nodes, sent = self.ranks // node, []
        for me in range(self.ranks):
            total = 2 * slices * (node - 1) * nodes * 8
            for home in (False, True):
                def part(a: int, b: int, home: bool = home) -> int:
                    return 4 * width * sum(self.rows(b, a, slices) if home else self.rows(a, b, slices))

                total += sum(part(me, to) for to in range(self.ranks) if to % node != me % node)
                for other in range(nodes):
                    if other != me // node:
                        total += sum(part(me // node * node + mate, other * node + me % node) for mate in range(node))
            sent.append(total)
        return max(sent)


class BenchMoe(unittest.TestCase):
    def rows(self, *arguments: str) -> list[Row]:
        done = bench(*arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        for row in rows:
            self.assertLessEqual(FIELDS, row.keys())
            self.assertTrue(row["correct"], row)
            self.assertTrue(row["bytes_as_formula"], row)
            self.assertEqual(row["payload_bytes_per_rank"], row["formula_bytes_per_rank"], row)
        return rows

    def test_threads_and_sim_send_the_same(self) -> None:
        for ranks in ("1", "2", "4", "8"):
            for more in (("--choices", "2"), ("--capacity-factor", "0"), ("--routing", "zipf", "--choices", "2")):
                flags = (*SMALL, "--ranks", ranks, "--slices", "1,3", *more)
                if ranks == "8":
                    flags += ("--nodes", "2", "--link", "1gbit,5us")
                here, there = self.rows(*flags), self.rows(*flags, *SIM)
                names = ["pairwise", "hierarchical"] if ranks == "8" else ["pairwise"]
                self.assertEqual([(row["algorithm"], row["slices"]) for row in here], [(n, s) for s in (1, 3) for n in names])
                for a, b in zip(here, there):
                    for field in ("payload_bytes_per_rank", "bytes", "load", "dropped_share", "algorithm", "slices"):
                        self.assertEqual(a[field], b[field], field)
                    self.assertFalse(a["simulated"])
                    self.assertTrue(b["simulated"])
                    self.assertEqual(a["payload_bytes_per_rank"] == 0, ranks == "1")

    def test_a_file_says_who_goes_where(self) -> None:
        draw = random.Random(7)
        lines = [draw.sample([0, 0, 0, *range(1, 8)], 2) for _ in range(43)]
        lines = [line if line[0] != line[1] else [0, 5] for line in lines]
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "routing")
            Path(path).write_text("".join(f"{a} {b}\n" for a, b in lines))
            for factor in (0.0, 1.0):
                told = Tokens(lines, 4, 8, factor)
                rows = self.rows("--ranks", "4", "--width", "5", "--choices", "2", "--routing", path, "--capacity-factor", str(factor),
                                 "--nodes", "2", "--slices", "2", *SIM)
                for row in rows:
                    self.assertEqual(row["load"], told.load)
                    self.assertEqual(row["load_max_over_mean"], max(told.load) / (sum(told.load) / 8))
                    self.assertAlmostEqual(row["dropped_share"], told.dropped_share, places=15)
                self.assertGreater(told.dropped_share if factor else 1, 0)
                by_name = {row["algorithm"]: row["payload_bytes_per_rank"] for row in rows}
                self.assertEqual(by_name, {"pairwise": told.pairwise(5), "hierarchical": told.hierarchical(5, 2, 2)})
            (row,) = self.rows("--ranks", "4", "--choices", "2", "--tokens", "10", "--routing", path, "--slices", "1", *SIM)
            self.assertEqual(row["tokens"], 10)  # the rest is left out
            self.assertEqual(sum(row["load"]), 80)

    def test_a_file_is_not_trusted(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "routing"
            for text, says in (("", "no token"), ("8\n", "none of 0 to 7"), ("-1\n", "none of 0 to 7"), ("x\n", "no number"),
                               ("1\n\n", "line 2: 0 experts"), ("1 2\n", "2 experts"), ("1" * 5000 + "\n", "too long"),
                               ("99999999999999999999\n", "no number"), ("1\n2\n", "need 400")):
                path.write_text(text)
                done = bench("--routing", str(path), *SIM, *(("--tokens", "100") if "need" in says else ()))
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertIn(says, done.stderr)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            path.write_text("3 3\n")
            self.assertIn("twice", bench("--choices", "2", "--routing", str(path), *SIM).stderr)

    def test_more_of_the_same_rows_take_longer_and_slices_do_not_change_bytes(self) -> None:
        flags = ("--ranks", "8", "--experts", "16", "--width", "64", "--link", "100mbit,20us", "--slices", "1,4", *SIM)
        few, many = self.rows(*flags, "--tokens", "256"), self.rows(*flags, "--tokens", "1024")
        for a, b in zip(few, many):
            self.assertGreater(b["seconds_median"], 3 * a["seconds_median"])
            self.assertTrue(0.5 < b["efficiency"] <= 1, b)
        self.assertEqual(many[0]["payload_bytes_per_rank"], many[1]["payload_bytes_per_rank"])
        # Two directions at once: the home of one slice is under way while the next one goes out.
        self.assertLess(many[1]["seconds_median"], 1.02 * many[0]["seconds_median"])

    def test_load(self) -> None:
        even, skewed = (self.rows(*SIM, "--tokens", "4000", "--width", "1", "--slices", "1", "--routing", r)[0] for r in ("uniform", "zipf"))
        self.assertLess(even["load_max_over_mean"], 1.1)
        self.assertEqual(even["dropped_share"], 0)
        self.assertAlmostEqual(skewed["load_max_over_mean"], 8 / sum(1 / n for n in range(1, 9)), delta=0.1)
        self.assertGreater(skewed["dropped_share"], 0.1)

    def test_a_wrong_result_is_seen(self) -> None:
        for transport in ("threads", "sim"):
            done = bench(*SMALL, "--slices", "1", "--spoil-result", "--json", "--transport", transport)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertFalse(json.loads(done.stdout)["correct"])

    def test_table(self) -> None:
        done = bench(*SMALL, *SIM)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("50 tokens a rank of width 12, 8 experts", done.stdout)
        self.assertNotIn("!", done.stdout.split("median, p99")[0])

    def test_bad_input(self) -> None:
        for arguments, says in ((("--experts", "6"), "cannot be dealt to 4 ranks"), (("--experts", "2"), "cannot be dealt"),
                                (("--choices", "9"), "--choices"), (("--capacity-factor=-1",), "--capacity-factor"),
                                (("--capacity-factor", "nan"), "--capacity-factor"), (("--slices", "0"), "--slices"),
                                (("--width", "0"), "--width"), (("--tokens", "0"), "--tokens"), (("--routing", "zapf"), "zapf"),
                                (("--algorithm", "bruck"), "equal length"), (("--algorithm", "hierarchical"), "--nodes"),
                                (("--algorithm", "pairwize"), "pairwise"), (("--rows", "9"), "bench embedding"),
                                (("--bytes", "4"), "--width"), (("--tokens", "16000000", "--width", "4096"), "16 GB"),
                                ((*SIM, "--byte-scale", "2"), "--byte-scale")):
            done = bench(*arguments)
            self.assertEqual(done.returncode, 2, f"{arguments} {done.stderr}")
            self.assertEqual(done.stdout, "")
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertIn(says, done.stderr)
        done = subprocess.run([WEFT, "bench", "alltoall", "--width", "1"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("is for bench moe", done.stderr)


if __name__ == "__main__":
    unittest.main()
