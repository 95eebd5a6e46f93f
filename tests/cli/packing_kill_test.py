#!/usr/bin/env python3
"""A rank that is killed while experts move, over tcp: packing_kill_test.py PATH_TO_WEFT PATH_TO_DYING_TORCH [unittest arguments].

The second program is weft-torch, which kills itself at a message that the environment names (dying_rank.cc). A job packs its experts behind
step 10: rows wait on their way, so it pays.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

WEFT, DYING = (Path(argument).resolve() for argument in sys.argv[1:3])
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
RANKS, VICTIM = 4, 2
MOE = ("--model", "gpt-moe", "--preset", "tiny", "--width", "16", "--scheme", "dense", "--data", "synthetic", "--synthetic-tokens", "40000",
       "--global-batch", "64", "--length", "32", "--checkpoint-every", "4", "--keep-last", "9", "--mesh", "ep=4", "--resume", "auto")
# What decides about packing beside what is measured: bytes that cost something, and the same in every run.
FIGURES = "hop_seconds=1e-4,seconds_per_byte=1e-7,fold_seconds_per_byte=0"
MOVE = "experts that change hands"  # the operation
Done = subprocess.CompletedProcess[str]


class PackingKillTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-packing-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        # `weft` starts what lies beside it.
        shutil.copy(WEFT, self.folder / "weft")
        (self.folder / "weft-torch").symlink_to(DYING)

    def train(self, name: str, steps: int, packing: str = "auto", dies: str = "") -> Done:
        variables = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        variables |= {"OMP_NUM_THREADS": "1", "SLOW_MS": "20", "WEFT_FIGURES": FIGURES} | ({"DIES": dies} if dies else {})
        weft = str(self.folder / "weft")
        return subprocess.run([weft, "launch", "-n", str(RANKS), "--", weft, "train", *MOE, "--expert-packing", packing, "--steps", str(steps),
                               "--out", name], capture_output=True, text=True, timeout=60 * FACTOR, env=variables, check=False, cwd=self.folder)

    def ok(self, done: Done) -> Done:
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def losses(self, name: str) -> list[float]:
        return [row["loss"] for row in self.rows(name)]

    def packings(self, name: str) -> list[int]:
        return [row["packing"] for row in self.rows(name)]

    def killed(self, name: str, steps: int, message: int) -> None:
        """The survivors say one sentence each that names who died, and end."""
        began = time.monotonic()
        done = self.train(name, steps, dies=f"{VICTIM},{message},{MOVE}")
        self.assertEqual(done.returncode, 128 + signal.SIGKILL, done.stdout + done.stderr)
        self.assertLess(time.monotonic() - began, 45 * FACTOR)
        for rank in set(range(RANKS)) - {VICTIM}:
            sentences = [line for line in done.stderr.splitlines() if line.startswith(f"[{rank}] ") and "note:" not in line]
            self.assertEqual(len(sentences), 1, done.stderr)
            self.assertIn(f"rank {VICTIM}", sentences[0])

    def latest(self, name: str) -> int:
        return int((self.folder / name / "checkpoints/latest").read_text().split("-")[1])

    def test_a_job_goes_on_from_the_layout_before_or_the_one_behind_it(self) -> None:
        self.ok(self.train("whole", 13))
        self.assertEqual(self.packings("whole"), [1] * 10 + [2] * 3)
        self.ok(self.train("never", 13, packing="1"))
        # As long as the layout is the same, so are bits; then sums have another order: an experts' gradient of float32 is added in two halves,
        # each rounds by 2^-24 of itself, and three steps of Adam pass that on.
        self.assertEqual(self.losses("whole")[:10], self.losses("never")[:10])
        for mine, other in zip(self.losses("whole"), self.losses("never")):
            self.assertAlmostEqual(mine, other, delta=1e-4)

        # At its first message of the move, and when some have left.
        for message in (1, 2):
            name = f"killed-{message}"
            self.killed(name, 13, message)
            self.assertEqual(self.latest(name), 8)  # the layout before
            done = self.ok(self.train(name, 13))
            self.assertIn("resumed behind step 8", done.stdout)
            self.assertEqual(self.packings(name), [1] * 10 + [2] * 3)
            self.assertEqual(self.losses(name), self.losses("whole"))

        # The layout behind it: a job that goes on from packing 2 deals its experts first, and is killed there.
        self.ok(self.train("behind", 12))
        before = self.losses("behind")
        self.killed("behind", 13, 1)
        self.assertEqual((self.latest("behind"), self.losses("behind")), (12, before))
        self.ok(self.train("behind", 13))
        self.assertEqual(self.packings("behind"), [1] * 10 + [2] * 3)
        self.assertEqual(self.losses("behind"), self.losses("whole"))

        # Control: a checkpoint that is of both layouts is none, and the one before it serves.
        (torn,) = (self.folder / "behind/checkpoints").glob(f"step-12/rank-{VICTIM}-*")
        (other,) = (self.folder / "behind/checkpoints").glob(f"step-8/rank-{VICTIM}-*")
        shutil.rmtree(self.folder / "behind/checkpoints/step-13")
        shutil.copy(other, torn)
        done = self.ok(self.train("behind", 13))
        self.assertIn("step-12", done.stderr)
        self.assertIn("resumed behind step 8", done.stdout)
        self.assertEqual(self.losses("behind"), self.losses("whole"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
