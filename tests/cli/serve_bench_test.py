#!/usr/bin/env python3
"""weft serve-bench as a user runs it: serve_bench_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else ""
SMALL = ("--layers", "4", "--width", "256", "--tokens", "64", "--profile-batches", "16", "--plan-time", "50us")
Row = dict[str, Any]


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((WEFT, "serve-bench", *arguments), capture_output=True, text=True, timeout=60, check=False)


class ServeBenchTest(unittest.TestCase):
    def rows(self, *arguments: str) -> list[Row]:
        done = weft(*arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def refused(self, *arguments: str, says: str) -> None:
        done = weft(*arguments)
        self.assertEqual((done.returncode, done.stdout, len(done.stderr.splitlines())), (2, "", 1), done.stderr)
        self.assertIn(says, done.stderr)

    def test_rows_of_all_placements_and_both_routers(self) -> None:
        rows = self.rows(*SMALL, "--requests", "24", "--transport", "sim", "--router", "stationary,drifting")
        self.assertEqual([(row["router"], row["placement"]) for row in rows],
                         [(router, placement) for router in ("stationary", "drifting")
                          for placement in ("static", "history", "lina", "ideal")])
        for row in rows:
            self.assertTrue(0 < row["seconds_p50"] <= row["seconds_p95"] <= row["seconds_p99"], row)
            self.assertEqual((row["compute"], row["transport"], row["weights"], row["requests"]), ("emulated", "sim", "resident", 24))
            self.assertEqual(row["moved_bytes"], 0)
        for router in ("stationary", "drifting"):
            of = {row["placement"]: row for row in rows if row["router"] == router}
            self.assertGreater(of["static"]["seconds_p95"], 1.6 * of["lina"]["seconds_p95"])
            self.assertAlmostEqual(of["ideal"]["max_load_p95"], 1)
            self.assertTrue(0 <= of["lina"]["replans"] < 0.5, of)
            self.assertEqual(of["static"]["replans"], 0)

    def test_the_same_walk_in_wall_time(self) -> None:
        rows = self.rows(*SMALL, "--requests", "4", "--warmup", "1", "--placement", "static,lina", "--flops", "100gflops",
                         "--link", "2gbit,50us", "--ranks", "4", "--experts", "4")
        self.assertEqual([row["transport"] for row in rows], ["threads", "threads"])
        virtual = self.rows(*SMALL, "--requests", "4", "--warmup", "1", "--placement", "static,lina", "--flops", "100gflops",
                            "--link", "2gbit,50us", "--ranks", "4", "--experts", "4", "--transport", "sim")
        for wall, simulated in zip(rows, virtual):
            # The same rows travel; timers are never early, and what else a machine does makes them late.
            self.assertEqual(wall["payload_bytes"], simulated["payload_bytes"])
            self.assertEqual(wall["max_load_p95"], simulated["max_load_p95"])
            self.assertGreater(wall["seconds_p50"], 0.9 * simulated["seconds_p50"])

    def test_weights_that_move_are_counted(self) -> None:
        row, = self.rows(*SMALL, "--requests", "4", "--transport", "sim", "--placement", "lina", "--weights", "moved", "--most", "2")
        expert = 4 * (8 * 256 * 256 + 5 * 256)
        self.assertGreater(row["moved_bytes"], 0)
        self.assertEqual(row["moved_bytes"] % expert, 0)

    def test_a_table_for_people(self) -> None:
        done = weft(*SMALL, "--requests", "4", "--transport", "sim", "--placement", "static,lina")
        self.assertEqual(done.returncode, 0, done.stderr)
        for words in ("resident", "simulated time", "static", "lina", "max load"):
            self.assertIn(words, done.stdout)

    def test_what_cannot_be_meant(self) -> None:
        self.refused("--placement", "linna", says="did you mean 'lina'?")
        self.refused("--router", "random", says="none of: stationary, drifting")
        self.refused("--transport", "tcp", says="none of: threads, sim")
        self.refused("--weights", "gone", says="none of: resident, moved")
        self.refused("--check", "luck", says="load or sets")
        self.refused("--experts", "64", "--ranks", "2", says="do not fit")
        self.refused("--ranks", "0", says="ranks must be 1 to")
        self.refused("--tokens", "0", says="at least one token")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
