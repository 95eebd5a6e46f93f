#!/usr/bin/env python3
"""`weft outline` as a user runs it: outline_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else ""
SMALL = ("--preset", "tiny", "--data", "synthetic", "--synthetic-tokens", "20000")
TINY = (*SMALL, "--steps", "3", "--warmup", "1")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))  # a sanitizer makes everything slower


class OutlineTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-outline-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def outline(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run((WEFT, "outline", *arguments), capture_output=True, text=True, timeout=60 * FACTOR,
                              env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, cwd=self.folder)

    def made(self, *arguments: str, name: str = "outline.json") -> dict[str, Any]:
        done = self.outline(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"{name} written", done.stdout)
        return json.loads((self.folder / name).read_text())

    def test_measured(self) -> None:
        outline = self.made(*TINY, "--global-batch", "4", "-o", "here.json", name="here.json")
        self.assertEqual((outline["model"], outline["source"], outline["side_by_side"]), ("gpt", "measured", 1))
        self.assertEqual(outline["tokens_per_rank"], 4 * 32)
        self.assertEqual([b["name"] for b in outline["blocks"]], ["embedding", "layer.0", "layer.1", "head"])
        self.assertEqual(outline["parameters"], sum(t["length"] for t in outline["tensors"]))
        # Two layers of 12 d^2 + 13 d, the tables, the last norm.
        self.assertEqual(outline["parameters"], 2 * (12 * 32 * 32 + 13 * 32) + (256 + 32) * 32 + 2 * 32)
        for block in outline["blocks"]:
            self.assertGreater(block["forward_seconds"], 0)
            self.assertGreater(block["backward_seconds"], 0)

    def test_ranks_share_the_global_batch(self) -> None:
        outline = self.made(*TINY, "--ranks", "2", "--global-batch", "8")
        self.assertEqual((outline["side_by_side"], outline["tokens_per_rank"]), (2, 4 * 32))

    def test_from_flops(self) -> None:
        whole = self.made(*TINY, "--model", "lm", "--flops", "2gflops")
        half = self.made(*TINY, "--model", "lm", "--flops", "1e9")
        self.assertEqual(whole["source"], "flops")
        for a, b in zip(whole["blocks"], half["blocks"]):
            self.assertAlmostEqual(2 * a["forward_seconds"], b["forward_seconds"], places=12)
            self.assertAlmostEqual(2 * a["forward_seconds"], a["backward_seconds"], places=12)
        self.assertEqual([t["name"] for t in whole["tables"]], ["embedding.weight"])

    def test_tables_of_each_model(self) -> None:
        pair = ["encoder.embedding.weight", "decoder.embedding.weight"]
        for model, tables in (("gpt", []), ("gnmt", pair), ("transformer", pair), ("bert", ["embedding.token.weight"])):
            outline = self.made(*TINY, "--model", model, "--flops", "1gflops")
            self.assertEqual([t["name"] for t in outline["tables"]], tables)
            blocks = [b["name"] for b in outline["blocks"]]
            if tables == pair:
                self.assertGreater(blocks.index("decoder.embedding"), max(i for i, b in enumerate(blocks) if b.startswith("encoder.")))

    def test_bad_input_is_one_sentence(self) -> None:
        for arguments, said in ((("--flops", "fast"), "fast"), (("--flops", "-1"), "-1"), (("--flops", "1xflops"), "1x"),
                                (("--model", "gtp"), "gpt"), (("--ranks", "0"), "ranks"),
                                (("--ranks", "4", "--global-batch", "2"), "global batch"),
                                (("--accumulate", "2"), "micro-batch"), (("-o", "no/such/folder.json"), "folder"),
                                (("--steps", "0"), "step"), (("--nonsense",), "--nonsense")):
            done = self.outline(*SMALL, *arguments)
            self.assertEqual(done.returncode, 2, f"{arguments}: {done.stderr}")
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn(said, done.stderr)
        self.assertEqual(os.listdir(self.folder), [])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
