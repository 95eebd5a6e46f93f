#!/usr/bin/env python3
"""Emulated and simulated training and comparisons by an outline, as a user of a weft without torch runs them:
emulated_test.py PATH_TO_WEFT [unittest arguments]."""
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
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))  # a sanitizer makes everything slower
BY_OUTLINE = ("--compute", "emulated", "--outline", "outline.json")
IN_VIRTUAL_TIME = (*BY_OUTLINE, "--transport", "sim")
LENGTH, BLOCKS = 50000, 2  # elements of a block's matrix
# 4 ms of forward, 8 ms of backward, 1 ms of update.
OUTLINE = {"model": "mine", "source": "flops", "flops_per_second": 1e12, "side_by_side": 1, "parameters": BLOCKS * LENGTH,
           "tokens_per_rank": 64, "other_seconds": 0, "tables": [],
           "blocks": [{"name": f"b{i}", "forward_seconds": 0.002, "backward_seconds": 0.004, "update_seconds": 0.0005}
                      for i in range(BLOCKS)],
           "tensors": [{"name": f"w{i}", "length": LENGTH, "rows": 250, "columns": 200, "block": i, "ready": 1}
                       for i in range(BLOCKS)]}
Done = subprocess.CompletedProcess[str]
Row = dict[str, Any]


class ByOutline(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-emulated-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "outline.json").write_text(json.dumps(OUTLINE))
        # The command alone: with no weft-torch beside it, whatever needs torch fails.
        self.alone = self.folder / "weft"
        shutil.copy(WEFT, self.alone)

    def weft(self, *arguments: str) -> Done:
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        return subprocess.run((str(self.alone), *arguments), capture_output=True, text=True, timeout=60 * FACTOR,
                              env=environment, check=False, cwd=self.folder)

    def rows(self, *arguments: str) -> list[Row]:
        done = self.weft("compare", *arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def refused(self, *arguments: str, says: str) -> None:
        done = self.weft("compare", *arguments, "--out", "none")
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertEqual((done.stdout, len(done.stderr.splitlines())), ("", 1), done.stderr)
        self.assertIn(says, done.stderr)
        self.assertFalse((self.folder / "none").exists())


class EmulatedTest(ByOutline):
    def test_timers_and_virtual_time(self) -> None:
        flags = ("--compute", "emulated", "--outline", "outline.json", "--ranks", "3", "--steps", "4", "--schemes", "dense,spardl",
                 "--link", "20mbit,50us", "--teams", "1")
        emulated = self.rows(*flags, "--out", "a")
        simulated = self.rows(*flags, "--transport", "sim", "--out", "b")
        for real_time, virtual in zip(emulated, simulated):
            self.assertEqual((real_time["compute"], virtual["compute"]), ("emulated", "emulated"))
            self.assertEqual((real_time["transport"], virtual["transport"]), ("threads", "sim"))
            self.assertIsNone(real_time["final_loss"])
            self.assertIsNone(virtual["loss_gap"])
            self.assertEqual(real_time["payload_bytes_per_step"], virtual["payload_bytes_per_step"])
            self.assertGreaterEqual(real_time["step_seconds_median"], 0.0125)
        # 2/3 of twice 400 kB at 2.5 MB/s: 213 ms; a busy machine makes wall time longer, never shorter.
        self.assertGreater(emulated[0]["step_seconds_median"], 0.2)
        self.assertGreater(simulated[0]["step_seconds_median"], 0.2)
        self.assertLess(simulated[0]["step_seconds_median"], 0.26)
        self.assertIn("emulated", (self.folder / "a/compare.html").read_text())
        self.assertIn("weft compare: mine", (self.folder / "a/compare.html").read_text())
        self.assertFalse(real_time["occupies_cores"])  # an outline from FLOPs is of machines of their own
        self.assertIn("simulated", (self.folder / "b/step_time.svg").read_text())
        self.assertFalse((self.folder / "a/loss_by_step.svg").exists())

    def test_train(self) -> None:
        for transport in ("threads", "sim"):
            done = self.weft("train", "--compute", "emulated", "--outline", "outline.json", "--transport", transport, "--ranks", "2",
                             "--scheme", "dense", "--steps", "4", "--link", "20mbit,50us", "--out", transport)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("emulated", done.stdout)
            summary = json.loads((self.folder / transport / "summary.json").read_text())
            self.assertEqual((summary["compute"], summary["transport"], summary["final_loss"]), ("emulated", transport, None))
            self.assertEqual(summary["payload_bytes_per_step"], 400000)
            self.assertEqual(len((self.folder / transport / "metrics.jsonl").read_text().splitlines()), 4)

    def test_micro_batches(self) -> None:
        steps, sent = [], []
        for count in ("1", "16"):  # what is sent hides behind the backward of the last one
            done = self.weft("train", *IN_VIRTUAL_TIME, "--ranks", "2", "--scheme", "dense", "--steps", "4", "--link", "400mbit,50us",
                             "--bucket-mib", "0.1", "--accumulate", count, "--out", count)
            self.assertEqual(done.returncode, 0, done.stderr)
            summary = json.loads((self.folder / count / "summary.json").read_text())
            steps.append(summary["step_seconds_median"])
            sent.append(summary["payload_bytes_per_step"])
        self.assertEqual(sent, [400000, 400000])
        # 4 ms of a bucket's exchange, of which 4 ms and a quarter of a millisecond are hidden, in a step of 17.
        self.assertGreater(steps[1], steps[0] + 0.002)

    def test_bad_outlines(self) -> None:
        emulated = ("--compute", "emulated", "--outline")
        self.refused(*emulated, "none.json", says="none.json")
        (self.folder / "bad.json").write_text("{")
        self.refused(*emulated, "bad.json", says="bad.json")
        self.refused("--outline", "outline.json", says="--compute emulated")
        self.refused("--transport", "sim", says="--compute emulated")
        self.refused(*emulated, "outline.json", "--warmup-steps", "5", says="--warmup-steps")
        done = self.weft("train", *emulated, "outline.json", "--recompute")
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
        self.assertIn("nothing is computed again", done.stderr)
        self.refused(*emulated, "outline.json", "--model", "lm", says="the outline is of mine")

    def test_memory_that_is_not_there(self) -> None:
        tensors = [tensor | {"length": 5 * 10**10, "rows": 250 * 10**6} for tensor in OUTLINE["tensors"]]
        outline = OUTLINE | {"tensors": tensors, "parameters": 10**11}
        (self.folder / "huge.json").write_text(json.dumps(outline))
        self.refused("--compute", "emulated", "--outline", "huge.json", "--ranks", "8", says="are free")

    def test_variants_that_do_not_fit_together_run_one_by_one(self) -> None:
        flags = (*BY_OUTLINE, "--ranks", "2", "--steps", "3", "--schemes", "dense,spardl", "--teams", "1")
        one = 2 * 5 * 4 * BLOCKS * LENGTH  # bytes of a variant: 2 ranks, 5 copies
        together = self.rows(*flags, "--free-bytes", str(2 * one), "--out", "a")
        alone = self.rows(*flags, "--free-bytes", str(2 * one - 1), "--out", "b")
        self.assertEqual([(r["side_by_side"], r["took_turns_with_baseline"]) for r in together], [(True, True)] * 2)
        self.assertEqual([(r["side_by_side"], r["took_turns_with_baseline"]) for r in alone], [(False, False)] * 2)
        self.assertEqual([r["payload_bytes_per_step"] for r in together], [r["payload_bytes_per_step"] for r in alone])
        table = self.weft("compare", *flags, "--free-bytes", str(one), "--out", "b").stdout
        self.assertIn("one after another", table)
        self.assertNotIn("one after another", self.weft("compare", *flags, "--out", "a").stdout)
        done = self.weft("compare", *flags, "--free-bytes", str(one - 1), "--out", "c")
        self.assertEqual(done.returncode, 2)
        self.assertIn("are free", done.stderr)

    def test_what_needs_torch_says_so(self) -> None:
        for verb in ("train", "compare"):
            for flags in ((), ("--compute", "emulated")):
                done = self.weft(verb, *flags)
                self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
                self.assertIn("computes with LibTorch", done.stderr)
                self.assertIn("--outline FILE", done.stderr)
            self.assertIn("Usage: weft " + verb, self.weft(verb, "--help").stdout)
            self.assertIn("(weft " + verb + " --help)", self.weft(verb, "--no-such-flag").stderr)

    def test_outline_is_shown(self) -> None:
        done = self.weft("outline", "--show", "outline.json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("computes for 13 ms (from FLOPs)", done.stdout)
        self.assertEqual(self.weft("outline", "--show", "none.json").returncode, 2)

    def test_bytes_and_hidden_time_of_tables(self) -> None:
        lm = ("--model", "lm", "--preset", "tiny", "--vocabulary", "3000", "--samples", "30", "--global-batch", "16", "--ranks", "2")
        self.assertEqual(self.weft("outline", *lm, "--flops", "1gflops", "-o", "o.json").returncode, 0)
        flags = (*lm, "--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--steps", "7")
        ways = ("scheme", "allgather-raw", "hashed", "alltoall", "embrace")
        rows = self.rows(*flags, "--tables", ",".join(ways), "--link", "10mbit,50us", "--out", "a")
        for row in rows:  # of each step, so of their medians; between two ranks dense formulas are exact, too
            self.assertEqual(row["payload_bytes_per_step"], row["formula_bytes_per_step"], row["tables"])
        self.assertEqual(len({row["payload_bytes_per_step"] for row in rows}), 4)  # alltoall and embrace send the same
        hidden = {row["tables"]: row["hidden_share"] for row in rows}
        self.assertTrue(all(0 <= share <= 1 for share in hidden.values()), hidden)
        self.assertLess(hidden["alltoall"], hidden["embrace"])
        table = self.weft("compare", *flags, "--tables", ",".join(ways), "--link", "10mbit,50us", "--out", "a").stdout
        self.assertNotIn("exceeds", table)
        self.assertIn("hidden", table)
        # Control: a formula that is too small is seen.
        points = self.folder / "a/points.jsonl"
        lines = [json.loads(line) for line in points.read_text().splitlines()]
        points.write_text("".join(json.dumps(p | {"formula_bytes": p["formula_bytes"] - 1}) + "\n" for p in lines))
        table = self.weft("compare", *flags, "--tables", ",".join(ways), "--link", "10mbit,50us", "--out", "a").stdout
        self.assertIn("exceeds", table)
        # Nothing is hidden where nothing is computed.
        self.assertEqual(self.weft("outline", *lm, "--flops", "1000000gflops", "-o", "idle.json").returncode, 0)
        (idle,) = self.rows(*lm, "--compute", "emulated", "--transport", "sim", "--outline", "idle.json", "--steps", "7", "--tables",
                            "alltoall", "--link", "10mbit,50us", "--out", "b")
        self.assertLess(idle["hidden_share"], 0.01)

    def test_tables_auto_are_chosen_for_each_link(self) -> None:
        lm = ("--model", "lm", "--preset", "tiny", "--width", "64", "--vocabulary", "65", "--samples", "64", "--global-batch", "64", "--ranks", "8",
              "--optimizer", "adagrad")
        self.assertEqual(self.weft("outline", *lm, "--flops", "1gflops", "-o", "o.json").returncode, 0)
        flags = (*lm, "--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--steps", "3", "--tables", "dense,embrace,auto")
        rows = self.rows(*flags, "--link", "1gbit,50us", "--out", "a")
        chosen = rows[2]
        self.assertEqual((chosen["variant"], chosen["tables"]), ("dense+tables=auto", "dense"))  # every row is read
        self.assertRegex(chosen["tables_why"], r"embedding.weight dense, because .* sending all of it takes no longer")
        self.assertEqual([row["tables_why"] for row in rows[:2]], ["", ""])
        self.assertEqual(chosen["payload_bytes_per_step"], rows[0]["payload_bytes_per_step"])
        self.assertNotEqual(chosen["payload_bytes_per_step"], rows[1]["payload_bytes_per_step"])
        table = self.weft("compare", *flags, "--link", "1gbit,50us", "--out", "a").stdout
        self.assertIn("note: dense+tables=auto at 1gbit,50us: dense: ", table)
        # Control: of a large table few rows are read.
        large = tuple("50000" if flag == "65" else flag for flag in lm)
        self.assertEqual(self.weft("outline", *large, "--flops", "1gflops", "-o", "large.json").returncode, 0)
        (row,) = self.rows(*large, "--compute", "emulated", "--transport", "sim", "--outline", "large.json", "--steps", "3", "--tables",
                           "auto", "--link", "1gbit,50us", "--out", "b")
        self.assertEqual(row["tables"], "embrace")

    def test_a_split_that_is_useless_is_said_to_be(self) -> None:
        lm = ("--model", "lm", "--preset", "tiny", "--samples", "30", "--global-batch", "64", "--ranks", "4")

        def notes(vocabulary: str, *more: str) -> tuple[int, list[str]]:
            self.assertEqual(self.weft("outline", *lm, "--vocabulary", vocabulary, "--flops", "1gflops", "-o", "o.json").returncode, 0)
            shutil.rmtree(self.folder / "run", ignore_errors=True)
            done = self.weft("train", *lm, "--vocabulary", vocabulary, "--compute", "emulated", "--outline", "o.json", "--scheme", "dense",
                             "--tables", "embrace", "--steps", "6", "--out", "run", *more)
            self.assertEqual(done.returncode, 0, done.stderr)
            said = json.loads((self.folder / "run/summary.json").read_text())["notes"]
            self.assertEqual([note for note in said if f"note: {note}" not in done.stdout], [])
            return done.stderr.count("none are delayed any more"), said

        once, said = notes("40")  # every rank reads every row
        self.assertEqual((once, len(said)), (2, 2), said)  # a line for each table, by one rank
        self.assertRegex(said[0], r"^table '.*': \d+ % of its rows are read again by the next batch: none are delayed any more$")
        self.assertEqual(notes("50000"), (0, []))  # control


class VariantsTest(ByOutline):
    def test_options_reach_the_run(self) -> None:
        rows = self.rows(*IN_VIRTUAL_TIME, "--ranks", "4", "--steps", "3", "--link", "20mbit,50us", "--out", "a", "--variants",
                         "dense,topka+density=0.01+codec=coo,topka+density=0.02+codec=coo,powersgd+powersgd-rank=1,"
                         "powersgd+powersgd-rank=3,dense+bucket-mib=1+dense-below=0")
        self.assertEqual([r["scheme"] for r in rows], ["dense", "topka", "topka", "powersgd", "powersgd", "dense"])
        self.assertEqual(rows[1]["variant"], "topka+density=0.01+codec=coo")
        self.assertEqual({r["baseline"] for r in rows}, {"dense"})
        sent = [r["payload_bytes_per_step"] for r in rows]
        dense = 2 * 3 / 4 * 4 * BLOCKS * LENGTH
        self.assertEqual((sent[0], sent[5]), (dense, dense))
        for bytes_sent, density in ((sent[1], 0.01), (sent[2], 0.02)):  # k (P - 1) entries of 8 bytes, P - 1 heads a bucket
            entries = round(density * BLOCKS * LENGTH)
            self.assertTrue(0 <= bytes_sent - 3 * 8 * entries <= 3 * 4 * BLOCKS, (bytes_sent, entries))
        for bytes_sent, columns in ((sent[3], 1), (sent[4], 3)):  # two thin factors, by a ring or (short ones) by doubling
            factors = 4 * BLOCKS * columns * (250 + 200)
            self.assertTrue(2 * 3 / 4 * factors <= bytes_sent <= 2 * factors, (bytes_sent, factors))
        self.assertEqual([r["density"] for r in rows], [None, 0.01, 0.02, None, None, None])

    def test_baseline(self) -> None:
        flags = (*IN_VIRTUAL_TIME, "--ranks", "2", "--steps", "3", "--link", "20mbit,50us", "--out", "a")
        first = self.rows(*flags, "--variants", "topka,spardl")
        self.assertEqual([(r["baseline"], r["speedup_over_baseline"] == 1) for r in first], [("topka", True), ("topka", False)])
        named = self.rows(*flags, "--variants", "topka,spardl", "--baseline", "spardl")
        self.assertEqual([(r["baseline"], r["speedup_over_baseline"] == 1) for r in named], [("spardl", False), ("spardl", True)])
        self.assertAlmostEqual(first[1]["speedup_over_baseline"] * named[0]["speedup_over_baseline"], 1)
        dense = self.rows(*flags, "--variants", "topka,dense")
        self.assertEqual([r["baseline"] for r in dense], ["dense"] * 2)

    def test_bad_variants(self) -> None:
        for variants, says in (
                ("dense,spardel", "did you mean 'spardl'"), ("dense,spardl+temas=2", "did you mean 'teams'"),
                ("dense,dense", "it is there twice"), ("spardl+teams=2+density=0.1,spardl+density=0.1+teams=2", "it is there twice"),
                ("spardl+teams=2+teams=4", "teams twice"), ("dense+teams=2", "dense takes no teams"),
                ("powersgd+density=0.1", "powersgd takes no density"), ("spardl+powersgd-rank=2", "takes no powersgd-rank"),
                ("spardl+teams", "no OPTION=VALUE"), ("spardl+teams=", "no OPTION=VALUE"), ("spardl+", "no OPTION=VALUE"),
                ("spardl+teams=3", "a divisor of the 4 ranks"), ("spardl+teams=two", "whole number"),
                ("spardl+residual=none", "residual"), ("spardl+ranks=2", "unknown option"), ("dense,", "unknown scheme ''"),
                ("spardl+bucket-mib=0", "bucket-mib"), ("spardl+density=2", "density")):
            with self.subTest(variants):
                self.refused(*BY_OUTLINE, "--variants", variants, says=says)
        self.refused(*BY_OUTLINE, "--variants", "dense,topka", "--baseline", "tpka", says="did you mean 'topka'")
        self.refused(*BY_OUTLINE, "--variants", "dense", "--schemes", "dense", says="one of them")
        self.refused(*BY_OUTLINE, "--variants", "dense+bucket-mib=2", "--try-buckets", "1,4", says="a size of its own")

    def test_numbers_with_a_plus(self) -> None:
        rows = self.rows(*IN_VIRTUAL_TIME, "--ranks", "2", "--steps", "2", "--out", "a", "--variants", "dense,dense+lr=1e+0+dense-below=7")
        self.assertEqual(rows[1]["variant"], "dense+lr=1e+0+dense-below=7")


class NetworkTest(ByOutline):
    FLAGS = (*IN_VIRTUAL_TIME, "--ranks", "4", "--steps", "3", "--schemes", "dense", "--link", "20mbit,50us")

    def test_nodes(self) -> None:
        flat = self.rows(*self.FLAGS, "--out", "a")[0]
        shared = self.rows(*self.FLAGS, "--nodes", "2", "--out", "b")[0]
        slow = self.rows(*self.FLAGS, "--nodes", "2", "--scale-up", "5mbit", "--out", "c")[0]
        # Sums go by node: of n bytes n pass a node's port, where 1.5 n pass a rank's in a ring of four.
        self.assertAlmostEqual(shared["step_seconds_median"], 2 / 3 * flat["step_seconds_median"], delta=0.1 * flat["step_seconds_median"])
        self.assertGreater(slow["step_seconds_median"], 2 * flat["step_seconds_median"])
        done = self.weft("train", *BY_OUTLINE, "--transport", "sim", "--ranks", "4", "--steps", "3", "--scheme", "dense", "--link",
                         "20mbit,50us", "--nodes", "2", "--scale-up", "5mbit", "--out", "d")
        self.assertEqual(done.returncode, 0, done.stderr)
        summary = json.loads((self.folder / "d" / "summary.json").read_text())
        self.assertGreater(summary["step_seconds_median"], 1.5 * flat["step_seconds_median"])
        self.assertIsNone(summary["wire_bytes"])

    def test_every_link_of_a_sweep_is_planned_for_itself(self) -> None:
        # Where a hop takes long, spardl takes teams, which send more bytes in fewer hops.
        def sent(*flags: str) -> list[float]:
            rows = self.rows(*IN_VIRTUAL_TIME, "--ranks", "8", "--steps", "2", "--schemes", "spardl", "--codec", "coo", *flags)
            return [row["payload_bytes_per_step"] for row in rows]

        links = ("100mbit,1us", "100mbit,20ms")
        alone = [sent("--link", link, "--plan-link", link, "--out", f"alone{i}")[0] for i, link in enumerate(links)]
        self.assertNotEqual(alone[0], alone[1])
        self.assertEqual(sent("--sweep", "link=" + ",".join(links), "--out", "swept"), alone)
        # Control: one plan for all of them.
        self.assertEqual(sent("--sweep", "link=" + ",".join(links), "--plan-link", links[0], "--out", "one"), [alone[0]] * 2)

    def test_bad_nodes(self) -> None:
        self.refused(*BY_OUTLINE, "--nodes", "2", says="--link")
        self.refused(*self.FLAGS, "--nodes", "5", says="4 ranks")
        self.refused(*self.FLAGS, "--scale-up", "1gbit", says="--nodes")

    def test_many_ranks(self) -> None:
        done = self.weft("train", *IN_VIRTUAL_TIME, "--ranks", "300", "--scheme", "spardl", "--teams", "1", "--steps", "1",
                         "--out", "a")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.refused(*IN_VIRTUAL_TIME, "--ranks", "4097", says="1 to 4096")
        self.refused(*BY_OUTLINE, "--ranks", "257", says="1 to 256")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
