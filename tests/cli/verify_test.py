#!/usr/bin/env python3
"""`weft verify` as a user runs it: verify_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else ""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
TINY = ("--preset", "tiny", "--data", "synthetic", "--synthetic-tokens", "20000", "--global-batch", "4", "--length", "12",
        "--teams", "1", "--ranks", "2")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
Done = subprocess.CompletedProcess[str]
DISTANCES = ("gradient_distance", "parameter_distance", "drift")


class VerifyTest(unittest.TestCase):
    def verify(self, *arguments: str, before: tuple[str, ...] = ()) -> Done:
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"}
        return subprocess.run([*before, WEFT, "verify", *TINY, *arguments], capture_output=True, text=True,
                              timeout=60 * FACTOR, env=environment, check=False)

    def report(self, *arguments: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
        done = self.verify(*arguments, "--json", before=before)
        self.assertEqual(done.returncode, 0, done.stderr)
        text = done.stdout
        if before:  # the launcher names the rank of each line
            text = re.sub(r"^\[0\] ", "", text, flags=re.MULTILINE)
        result: dict[str, Any] = json.loads(text)
        return result

    def test_dense_has_the_bits_of_its_shadow(self) -> None:
        report = self.report("--scheme", "dense", "--steps", "4")
        self.assertIsNone(report["most_hurt_block"])
        self.assertEqual(report["loss"], report["shadow_loss"])
        self.assertGreater(len(report["parameters"]), 10)
        for row in report["parameters"] + report["blocks"]:
            self.assertEqual([row[name] for name in DISTANCES], [0, 0, 0], row)

    def test_a_sparse_scheme_is_seen(self) -> None:
        report = self.report("--scheme", "spardl", "--steps", "4")
        self.assertEqual(report["steps"], 4)
        for name in DISTANCES:
            self.assertGreater(max(row[name] for row in report["blocks"]), 0)
        worst = max(report["blocks"], key=lambda row: row["drift"])
        self.assertEqual(report["most_hurt_block"], worst["block"])
        # Blocks have the elements of their parameters.
        self.assertEqual(sum(row["elements"] for row in report["blocks"]),
                         sum(row["elements"] for row in report["parameters"]))

    def test_more_density_drifts_less(self) -> None:
        optimizer = ("--optimizer", "sgd", "--lr", "0.1", "--steps", "6")
        little = self.report("--scheme", "spardl", "--density", "0.01", *optimizer)
        much = self.report("--scheme", "spardl", "--density", "0.6", *optimizer)
        self.assertLess(max(row["drift"] for row in much["blocks"]), max(row["drift"] for row in little["blocks"]))

    def test_a_planted_fault_is_found_where_it_is(self) -> None:
        names = [row["parameter"] for row in self.report("--scheme", "dense", "--steps", "1")["parameters"]]
        for name in (names[3], names[-2]):
            report = self.report("--scheme", "dense", "--steps", "1", "--optimizer", "sgd", "--spoil", name)
            self.assertEqual(report["most_hurt_parameter"], name)
            for row in report["parameters"]:
                wrong = row["parameter"] == name
                self.assertEqual([row[d] > 0 for d in DISTANCES], [wrong] * 3, row)
            later = self.report("--scheme", "dense", "--steps", "4", "--optimizer", "sgd", "--spoil", name)
            self.assertEqual(later["most_hurt_parameter"], name)
        done = self.verify("--spoil", "nothing")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no parameter 'nothing'", done.stderr)

    def test_the_table_says_which_layer(self) -> None:
        done = self.verify("--scheme", "spardl", "--steps", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("is hurt most", done.stdout)
        same = self.verify("--scheme", "dense", "--steps", "2")
        self.assertIn("the same bits", same.stdout)

    def test_the_recipe_is_taken(self) -> None:
        recipe = ("--optimizer", "sgd", "--lr", "0.1", "--steps", "4")
        plain = self.report("--scheme", "spardl", *recipe)
        corrected = self.report("--scheme", "spardl", *recipe, "--momentum-correction", "0.9")
        self.assertNotEqual(plain["loss"], corrected["loss"])
        # The shadow takes the same number as its own momentum.
        dense = self.report("--scheme", "dense", *recipe, "--momentum", "0.9")
        self.assertEqual(dense["shadow_loss"], corrected["shadow_loss"])

    def test_bad_input_is_one_sentence(self) -> None:
        for arguments, says in ((("--scheme", "spardel"), "did you mean 'spardl'"),
                                (("--steps", "0"), "steps must be 1 or more"),
                                (("--momentum-correction", "0.9"), "momentum-correction is for sgd"),
                                (("--clip-local",), "clip-norm, which is 0"),
                                (("--optimizer", "sgd", "--lr", "1e30", "--steps", "6"), "step ")):
            done = self.verify(*arguments)
            self.assertNotEqual(done.returncode, 0, done.stdout)
            self.assertIn(says, done.stderr)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertEqual(done.returncode, 1)  # the loss was not finite

    def test_under_a_launcher(self) -> None:
        threads = self.report("--scheme", "spardl", "--steps", "3")
        if '"tcp"' not in subprocess.run([WEFT, "info", "--json"], capture_output=True, text=True, check=True).stdout:
            self.skipTest("no tcp transport")
        launched = self.report("--scheme", "spardl", "--steps", "3", before=(WEFT, "launch", "-n", "2", "--"))
        self.assertEqual(launched, threads)


if __name__ == "__main__":
    if not WEFT:
        sys.exit(__doc__)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
