#!/usr/bin/env python3
"""weft bench embedding as a user runs it: bench_embedding_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv.pop(1)).resolve()) if len(sys.argv) > 1 else ""
FIELDS = {"family", "algorithm", "transport", "ranks", "bytes", "seconds_median", "seconds_p99", "payload_bytes_per_rank",
          "formula_bytes_per_rank", "formula_is_bound", "bytes_as_formula", "rounds", "formula_rounds", "ideal_seconds", "efficiency",
          "correct", "simulated", "unique_ratio", "prior_ratio", "rows", "columns", "tokens", "zipf", "negatives"}
WAYS = {"dense", "push-pull", "allgather", "allgather-raw", "parallax", "parallax-pushed", "hashed", "alltoall", "embrace"}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
SMALL = ("--rows", "900", "--columns", "6", "--tokens", "70", "--iterations", "3")
Row = dict[str, Any]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    timeout = 100 * float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
    return subprocess.run([WEFT, "bench", "embedding", *arguments], capture_output=True, text=True, timeout=timeout, env=clean,
                          check=False)


class BenchEmbedding(unittest.TestCase):
    def rows(self, *arguments: str) -> dict[str, Row]:
        done = bench(*arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return {row["algorithm"]: row for row in map(json.loads, done.stdout.splitlines())}

    def assert_sound(self, rows: dict[str, Row]) -> None:
        for row in rows.values():
            self.assertLessEqual(FIELDS, row.keys())
            self.assertTrue(row["correct"], row)
            self.assertTrue(row["bytes_as_formula"], row)
            self.assertEqual(row["iterations"], 3)
            self.assertGreater(row["seconds_median"], 0)
            if row["formula_is_bound"]:
                self.assertEqual(row["algorithm"], "allgather")
                self.assertLessEqual(row["payload_bytes_per_rank"], row["formula_bytes_per_rank"], row)
            else:
                self.assertEqual(row["payload_bytes_per_rank"], row["formula_bytes_per_rank"], row)

    def test_every_way(self) -> None:
        for ranks in ("1", "3", "4", "8"):
            for negatives in ("0", "20"):
                rows = self.rows(*SMALL, "--ranks", ranks, "--negatives", negatives)
                self.assertEqual(rows.keys(), WAYS)
                self.assert_sound(rows)
                self.assertEqual(len({(row["unique_ratio"], row["prior_ratio"]) for row in rows.values()}), 1)  # the same ids

    def test_bytes_are_in_the_order_of_the_formulas(self) -> None:
        rows = self.rows("--rows", "20000", "--columns", "32", "--tokens", "200", "--ranks", "8", "--iterations", "3")
        sent = {name: row["payload_bytes_per_rank"] for name, row in rows.items()}
        self.assertEqual(sent["dense"], 2 * 20000 * 32 * 4 * 7 // 8)
        self.assertEqual(sent["push-pull"], sent["dense"])
        self.assertEqual(sent["allgather-raw"], (8 + 200 * (8 + 32 * 4)) * 7)
        self.assertEqual(sent["embrace"], sent["alltoall"])
        for less, more in (("embrace", "parallax"), ("embrace", "allgather"), ("parallax", "parallax-pushed"),
                           ("allgather", "allgather-raw"), ("allgather-raw", "dense")):
            self.assertLess(sent[less], sent[more])

    def test_shared_negatives_are_all_reduced(self) -> None:
        for tokens, negatives in (("1000", "0"), ("100", "900")):
            row = self.rows("--rows", "100000", "--zipf", "0", "--tokens", tokens, "--negatives", negatives, "--ranks", "8",
                            "--ways", "allgather", "--iterations", "3")["allgather"]
            gathered = row["unique_ratio"] * 1000 * 64 * 4 * 7
            self.assertEqual(row["payload_bytes_per_rank"] < 0.7 * gathered, negatives != "0", row)

    def test_ratios(self) -> None:
        row = self.rows(*SMALL[2:], "--zipf", "0", "--rows", "1000000", "--ways", "embrace")["embrace"]
        self.assertGreater(row["unique_ratio"], 0.99)
        self.assertLess(row["prior_ratio"], 0.01)
        row = self.rows(*SMALL, "--zipf", "3", "--ways", "embrace")["embrace"]
        self.assertLess(row["unique_ratio"], 0.3)
        self.assertGreater(row["prior_ratio"], 0.5)

    def test_link(self) -> None:
        rows = self.rows("--rows", "5000", "--columns", "64", "--tokens", "600", "--link", "200mbit,50us", "--ways",
                         "dense,push-pull,allgather,embrace", "--iterations", "3")
        self.assert_sound(rows)
        for row in rows.values():
            self.assertTrue(row["shaped"])
            self.assertGreater(row["ideal_seconds"], 0)
            self.assertTrue(0.1 < row["efficiency"] < 1.05, row)  # (two noisy cores)
        self.assertLess(rows["embrace"]["seconds_median"], rows["dense"]["seconds_median"])

    def test_a_wrong_result_is_seen(self) -> None:
        for way in sorted(WAYS):
            done = bench(*SMALL, "--ways", way, "--spoil-result", "--json")
            self.assertEqual(done.returncode, 1, way + done.stderr)
            self.assertFalse(json.loads(done.stdout)["correct"])

    def test_table(self) -> None:
        done = bench(*SMALL, "--ways", "embrace,allgather")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("900 x 6 table, 70 tokens", done.stdout)
        self.assertIn("embrace", done.stdout)
        self.assertNotIn("!", done.stdout.split("median, p99")[0])

    def test_bad_input(self) -> None:
        for arguments, says in ((("--rows", "0"), "rows"), (("--columns", "0"), "columns"), (("--tokens", "-1"), "tokens"),
                                (("--negatives", "-1"), "negatives"), (("--zipf", "nan"), "zipf"), (("--zipf=-1",), "zipf"),
                                (("--ways", "embraced"), "embrace"), (("--ways", "scheme"), "scheme"),
                                (("--transport", "sim"), "ranks that run"), (("--bytes", "4"), "--rows"),
                                (("--algorithm", "ring"), "--ways"), (("--density", "0.1"), "sparse_allreduce")):
            done = bench(*arguments)
            self.assertEqual(done.returncode, 2, f"{arguments} {done.stderr}")
            self.assertEqual(done.stdout, "")
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertIn(says, done.stderr)
        done = subprocess.run([WEFT, "bench", "allreduce", "--zipf", "1"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("is for bench embedding", done.stderr)


if __name__ == "__main__":
    unittest.main()
