#!/usr/bin/env python3
"""`weft compare` as a user runs it: compare_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else ""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
TINY = ("--preset", "tiny", "--data", "synthetic", "--synthetic-tokens", "20000", "--global-batch", "4", "--length", "12",
        "--teams", "1", "--density", "0.05")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))  # a sanitizer makes everything slower
FIELDS = {"scheme", "link", "compute", "transport", "ranks", "step_seconds_median", "step_seconds_low", "step_seconds_high",
          "variant", "baseline", "speedup_over_baseline", "tokens_per_second", "payload_bytes_per_step", "formula_bytes_per_step", "exposed_share",
          "final_loss", "loss_gap"}
Done = subprocess.CompletedProcess[str]
Row = dict[str, Any]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"}


def median(values: list[float]) -> float:
    ordered, n = sorted(values), len(values)
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def interval(values: list[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics around the median with at least 95 %: by the binomial sum itself."""
    ordered, n = sorted(values), len(values)
    best = (ordered[0], ordered[-1])
    for cut in range(n // 2):
        outside = 2 * sum(math.comb(n, i) for i in range(cut + 1)) / 2 ** n
        if outside <= 0.05:
            best = (ordered[cut], ordered[n - 1 - cut])
    return best


class CompareTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-compare-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def weft(self, *arguments: str) -> Done:
        return subprocess.run((WEFT, *arguments), capture_output=True, text=True, timeout=60 * FACTOR, env=environment(),
                              check=False, cwd=self.folder)

    def compare(self, *arguments: str) -> Done:
        done = self.weft("compare", *arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done

    def rows(self, *arguments: str) -> list[Row]:
        return [json.loads(line) for line in self.compare(*arguments, "--json").stdout.splitlines()]

    def points(self, name: str) -> list[Row]:
        return [json.loads(line) for line in (self.folder / name / "points.jsonl").read_text().splitlines()]

    def refused(self, *arguments: str, says: str) -> None:
        """One sentence, exit status 2, and nothing is left behind."""
        before = sorted(self.folder.rglob("*"))
        done = self.weft("compare", *arguments)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn(says, done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("weft: "), done.stderr)
        self.assertEqual(sorted(self.folder.rglob("*")), before)


class RunTest(CompareTest):
    def test_every_scheme_gets_its_fastest_bucket_size(self) -> None:
        flags = (*TINY, "--ranks", "2", "--steps", "6", "--schemes", "dense,spardl", "--link", "10mbit,50us", "--out", "a")
        rows = self.rows(*flags, "--try-buckets", "0.01,1")
        points = {(p["variant"], p["link"]): p for p in self.points("a")}
        self.assertEqual(set(points), {(f"{scheme}+bucket-mib={size}", link) for scheme in ("dense", "spardl") for size in ("0.01", "1")
                                       for link in ("none", "10mbit,50us")})
        self.assertEqual([row["scheme"] for row in rows], ["dense", "spardl"])
        for row in rows:
            of = {size: median(points[f"{row['variant']}+bucket-mib={size}", row["link"]]["step_seconds"]) for size in ("0.01", "1")}
            best = min(of, key=of.__getitem__)
            self.assertEqual((row["step_seconds_median"], row["bucket_mib"]), (of[best], float(best)))
            unshaped = median(points[f"{row['variant']}+bucket-mib={best}", "none"]["step_seconds"])
            self.assertEqual(row["unshaped_step_seconds_median"], unshaped)
        self.assertIn(f"dense+bucket-mib={rows[0]['bucket_mib']:g} ", self.compare(*flags, "--try-buckets", "0.01,1").stdout)
        self.refused(*TINY, "--try-buckets", "1,x", says="--try-buckets '1,x' is no MIB,MIB,...")
        self.refused(*TINY, "--try-buckets", "4,4", says="--try-buckets has 4 twice")

    def test_rows_say_what_was_measured(self) -> None:
        flags = (*TINY, "--ranks", "2", "--steps", "7", "--schemes", "dense,spardl,powersgd", "--link", "10mbit,50us")
        rows = self.rows(*flags, "--out", "a")
        self.assertEqual([row["scheme"] for row in rows], ["dense", "spardl", "powersgd"])
        points = {(p["variant"], p["link"]): p for p in self.points("a")}
        self.assertEqual(len(points), 6)  # with those of T_inf
        dense = rows[0]
        for row in rows:
            self.assertLessEqual(FIELDS, row.keys())
            self.assertEqual((row["link"], row["compute"], row["transport"], row["ranks"]),
                             ("10mbit,50us", "real", "threads", 2))
            point, unshaped = points[row["scheme"], "10mbit,50us"], points[row["scheme"], "none"]
            seconds = point["step_seconds"]
            self.assertEqual(len(seconds), 7)
            self.assertEqual(row["step_seconds_median"], median(seconds))
            self.assertEqual((row["step_seconds_low"], row["step_seconds_high"]), interval(seconds))
            self.assertAlmostEqual(row["exposed_share"], 1 - median(unshaped["step_seconds"]) / median(seconds))
            self.assertAlmostEqual(row["speedup_over_baseline"], dense["step_seconds_median"] / row["step_seconds_median"])
            self.assertAlmostEqual(row["tokens_per_second"], 48 / row["step_seconds_median"])  # 4 sequences of 12
            self.assertEqual(point["losses"], unshaped["losses"])  # a link changes no bits
            self.assertEqual(row["final_loss"], point["losses"][-1])
            self.assertEqual(row["loss_gap"], row["final_loss"] - dense["final_loss"])
            self.assertLessEqual(row["payload_bytes_per_step"], row["formula_bytes_per_step"])
        parameters = dense["parameters"]
        self.assertEqual(dense["payload_bytes_per_step"], 4 * parameters)  # 2 (P-1)/P of 4 bytes each, P = 2
        self.assertEqual(dense["formula_bytes_per_step"], 4 * parameters)
        self.assertLess(rows[1]["payload_bytes_per_step"], 0.2 * dense["payload_bytes_per_step"])
        # 136 KiB through 10 Mbit/s take 111 ms, whatever else happens.
        self.assertGreater(dense["step_seconds_median"], 8 * 4 * parameters / 10e6 * 0.9)
        self.assertLess(dense["exposed_share"], 1)

    def test_taking_turns_changes_no_bits(self) -> None:
        rows = self.rows(*TINY, "--ranks", "2", "--steps", "7", "--schemes", "dense,spardl,oktopk", "--out", "a")
        for row in rows:
            flags = (*TINY, "--ranks", "2", "--steps", str(row["steps"]), "--checkpoint-every", "0", "--scheme", row["scheme"])
            done = self.weft("train", *flags, "--out", "t-" + row["scheme"])
            self.assertEqual(done.returncode, 0, done.stderr)
            metrics = (self.folder / ("t-" + row["scheme"]) / "metrics.jsonl").read_text().splitlines()
            losses = [json.loads(line)["loss"] for line in metrics]
            self.assertEqual(losses[-1], row["final_loss"])
            point = next(p for p in self.points("a") if p["scheme"] == row["scheme"])
            self.assertEqual(losses, point["losses"])
        self.assertNotEqual(rows[0]["final_loss"], rows[1]["final_loss"])  # the comparison could fail
        self.weft("train", *TINY, "--ranks", "2", "--steps", str(rows[0]["steps"]), "--checkpoint-every", "0", "--scheme", "dense",
                  "--seed", "2", "--out", "other")
        other = json.loads((self.folder / "other/summary.json").read_text())["final_loss"]
        self.assertNotEqual(other, rows[0]["final_loss"])

    def test_a_second_call_measures_only_what_is_missing(self) -> None:
        flags: tuple[str, ...] = (*TINY, "--ranks", "2", "--steps", "3", "--out", "a")
        self.compare(*flags, "--schemes", "dense,spardl", "--link", "50mbit,50us")
        first = self.points("a")
        self.assertEqual(self.rows(*flags, "--schemes", "dense,spardl", "--link", "50mbit,50us")[0]["step_seconds_median"],
                         median(next(p for p in first if p["link"] != "none")["step_seconds"]))
        self.assertEqual(self.points("a"), first)
        with (self.folder / "a/points.jsonl").open("a") as file:
            file.write('{"scheme": "topka", "link": "no')  # stopped while it wrote
        rows = self.rows(*flags, "--schemes", "dense,topka,spardl", "--sweep", "link=50mbit,25mbit")
        self.assertEqual([(r["scheme"], r["link"]) for r in rows],
                         [(s, link) for link in ("50mbit,50us", "25mbit,50us") for s in ("dense", "topka", "spardl")])
        points = self.points("a")
        self.assertEqual(points[:4], first)
        self.assertEqual(len(points), 9)
        self.assertEqual([r["took_turns_with_baseline"] for r in rows], [True, False, True, True, True, True])
        curves = re.findall(r' d="(M[^"h]*)"', (self.folder / "a/speedup.svg").read_text())
        self.assertEqual(len(curves), 3)
        for curve in curves:  # by the rate, not in the order in which rates were named
            places = [float(place.split()[0]) for place in re.split("[ML]", curve)[1:]]
            self.assertEqual((len(places), places), (2, sorted(places)))
        self.refused(*flags, "--lr", "0.5", says="other settings (lr = ")
        flags = tuple("3" if flag == "2" else flag for flag in flags)
        self.refused(*flags, says="other settings (ranks = 2 there, ranks = 3 here)")

    def test_the_page_needs_nothing_else(self) -> None:
        done = self.compare(*TINY, "--ranks", "2", "--steps", "3", "--schemes", "dense,spardl", "--link", "50mbit", "--out", "a")
        page = (self.folder / "a/compare.html").read_text()
        document = xml.dom.minidom.parseString(page)
        self.assertEqual(len(document.getElementsByTagName("svg")), 3)
        self.assertEqual(len(document.getElementsByTagName("table")), 1)
        self.assertFalse(document.getElementsByTagName("script") + document.getElementsByTagName("img"))
        self.assertNotIn("http", page.replace("http://www.w3.org/", ""))
        for name in ("step_time", "loss_by_step", "loss_by_time"):
            xml.dom.minidom.parse(str(self.folder / f"a/{name}.svg"))
        for text in ("speed-up", "exposed", "page: a/compare.html", "equal steps", "formula"):
            self.assertIn(text, done.stdout)
        with self.assertRaises(xml.parsers.expat.ExpatError):  # the parser would see a page that is not whole
            xml.dom.minidom.parseString(page[:-20])

    def test_tables(self) -> None:
        rows = self.rows("--preset", "tiny", "--model", "lm", "--samples", "30", "--data", "synthetic", "--synthetic-tokens", "20000",
                         "--global-batch", "4", "--length", "12", "--ranks", "2", "--steps", "3", "--link", "10mbit,50us",
                         "--tables", "scheme,embrace", "--out", "a")
        self.assertEqual([(row["scheme"], row["tables"]) for row in rows], [("dense", "scheme"), ("dense", "embrace")])
        self.assertEqual(rows[0]["baseline"], "dense+tables=scheme")
        self.assertLess(rows[1]["payload_bytes_per_step"], rows[0]["payload_bytes_per_step"])
        self.assertGreater(rows[1]["speedup_over_baseline"], 1)
        for row in rows:
            self.assertEqual(row["payload_bytes_per_step"], row["formula_bytes_per_step"], row)

    def test_policies_of_experts(self) -> None:
        moe = ("--model", "gpt-moe", "--preset", "tiny", "--global-batch", "16", "--ranks", "4")
        self.assertEqual(self.weft("outline", *moe, "--flops", "1gflops", "-o", "o.json").returncode, 0)
        rows = self.rows(*moe, "--policies", "plain,priority,deferred,micro-ops,tutel,lina", "--mesh", "ep=4", "--compute", "emulated",
                         "--transport", "sim", "--outline", "o.json", "--link", "20mbit,50us", "--steps", "3", "--out", "a")
        self.assertEqual([row["policy"] for row in rows], ["plain", "priority", "deferred", "micro-ops", "tutel", "lina"])
        self.assertEqual(rows[0]["baseline"], "dense+expert-policy=plain")
        self.assertEqual(len({row["payload_bytes_per_step"] for row in rows}), 1)  # the same bytes, in another order
        self.assertGreater(rows[-1]["speedup_over_baseline"], 1)
        # Lina waits less for rows.
        self.assertLess(rows[-1]["rows_backward_seconds"], rows[0]["rows_backward_seconds"])
        self.assertLess(rows[-1]["rows_share"], rows[0]["rows_share"])
        self.assertAlmostEqual(rows[0]["rows_share"] * rows[0]["step_seconds_median"],
                               rows[0]["rows_forward_seconds"] + rows[0]["rows_backward_seconds"])
        # Packing that is chosen: on two nodes, so that no token leaves one.
        wide = ("--model", "gpt-moe", "--preset", "tiny", "--global-batch", "64", "--ranks", "4")
        packs = (*wide, "--mesh", "ep=4", "--nodes", "2", "--scale-up", "1gbit", "--link", "20mbit,50us")
        self.assertEqual(self.weft("outline", *wide, "--flops", "1gflops", "-o", "p.json").returncode, 0)
        rows = self.rows(*packs, "--schemes", "dense,dense+expert-packing=auto,dense+expert-packing=2", "--compute", "emulated",
                         "--transport", "sim", "--outline", "p.json", "--steps", "3", "--out", "p")
        self.assertEqual([row["packing"] for row in rows], [1, 2, 2])
        self.assertGreater(rows[1]["speedup_over_baseline"], 1.1)
        self.assertAlmostEqual(rows[1]["speedup_over_baseline"], rows[2]["speedup_over_baseline"], delta=0.05)
        planned = self.weft("plan", *packs, "--outline", "p.json", "--expert-packing", "auto", "--scheme", "dense")
        self.assertIn("packing auto: 2, packing 2 behind step 10", planned.stdout)
        # In wall time, and with real computation.
        rows = self.rows(*moe, "--policies", "plain,lina", "--mesh", "ep=2", "--compute", "emulated", "--outline", "o.json", "--link",
                         "20mbit,50us", "--steps", "3", "--out", "b")
        self.assertEqual(rows[0]["payload_bytes_per_step"], rows[1]["payload_bytes_per_step"])
        rows = self.rows(*moe, "--policies", "plain,lina", "--mesh", "ep=4", "--data", "synthetic", "--synthetic-tokens", "20000", "--length",
                         "12", "--link", "20mbit,50us", "--steps", "3", "--out", "c")
        self.assertAlmostEqual(rows[0]["final_loss"], rows[1]["final_loss"], delta=1e-4)

    def test_stages(self) -> None:
        job = ("--preset", "tiny", "--layers", "4", "--global-batch", "16", "--accumulate", "4", "--ranks", "4", "--mesh", "dp=2,pp=2")
        self.assertEqual(self.weft("outline", "--preset", "tiny", "--layers", "4", "--global-batch", "8", "--ranks", "1", "--flops", "1gflops",
                                   "-o", "o.json").returncode, 0)
        rows = self.rows(*job, "--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--link", "20mbit,50us", "--steps", "3",
                         "--variants", "dense,powersgd,dense+backward-rank=2,powersgd+backward-rank=2+compressed-stages=1,"
                         "dense+schedule=gpipe,dense+pipeline-warmup=double", "--out", "a")
        for row in rows:
            self.assertEqual(row["payload_bytes_per_step"], row["formula_bytes_per_step"], row["variant"])
        self.assertGreater(rows[2]["speedup_over_baseline"], 1)
        self.assertGreater(rows[3]["speedup_over_baseline"], rows[2]["speedup_over_baseline"])
        self.assertAlmostEqual(rows[0]["tokens_per_second"] * rows[0]["step_seconds_median"], 2 * 8 * 32, delta=1e-9)  # a rounding
        # Short names stand for long ones.
        short = self.rows(*job, "--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--link", "2mbit,50us", "--steps", "3",
                          "--backward-rank", "2", "--powersgd-rank", "2", "--variants", "dense+backward-rank=0,dp-powersgd,naive,cb,cb+fe,cb+fe+sc", "--out", "short")
        self.assertEqual([row["variant"] for row in short], [
            "dense+backward-rank=0", "powersgd+tied-sum=two-step+backward-rank=0+backward-messages=epilogue",
            "powersgd+error-feedback=off+tied-sum=scheme+backward-rank=2+backward-messages=all+backward-forgets=true",
            "dense+tied-sum=two-step+backward-rank=2", "dense+tied-sum=fused+backward-rank=2",
            "powersgd+tied-sum=fused+backward-rank=2+compressed-stages=auto"])
        sent = [row["payload_bytes_per_step"] for row in short]
        self.assertEqual(sent, [row["formula_bytes_per_step"] for row in short])
        self.assertTrue(sent[0] > sent[1] > sent[2] and sent[3] > sent[4] > sent[5] > sent[2], sent)
        # What they are compared with stays as it is beside them, and short names have options of their own. Control: by its own
        # word it is compressed.
        emulated = ("--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--link", "2mbit,50us", "--steps", "3")
        beside = self.rows(*job, *emulated, "--backward-bits", "4", "--backward-messages", "all", "--compressed-stages", "auto", "--factor-rank", "auto",
                           "--variants", "dense,dense+backward-messages=all,dp-powersgd,cb,cb+backward-rank=1,cb+fe+sc", "--out", "beside")
        self.assertEqual([row["variant"].split("+", 1)[1:] for row in beside], [
            [], ["backward-messages=all"], ["tied-sum=two-step+backward-bits=0+backward-messages=epilogue+compressed-stages=all"],
            ["tied-sum=two-step+backward-bits=4+compressed-stages=all"], ["tied-sum=two-step+compressed-stages=all+backward-rank=1"],
            ["tied-sum=fused+backward-bits=4+compressed-stages=auto"]])
        plain, word, powersgd, cb, thin, every = beside
        self.assertEqual(plain["stages_why"], "")

        def seconds(row: Row) -> float:
            return float(row["step_seconds_median"])

        # (Virtual time, but kernels are timed anew by each call.)
        self.assertAlmostEqual(seconds(plain) / seconds(short[0]), 1, delta=0.005)
        alone = self.rows(*job, *emulated, "--variants", "dp-powersgd", "--out", "alone")[0]
        self.assertAlmostEqual(seconds(powersgd) / seconds(alone), 1, delta=0.005)
        self.assertLess(seconds(word), 0.97 * seconds(plain))
        self.assertNotAlmostEqual(seconds(cb) / seconds(thin), 1, delta=0.005)
        self.assertRegex(every["stages_why"], r"^factors of \d+ columns and [12] of 2 stages compressed")
        self.refused(*job, *emulated, "--variants", "dense,dense+compressed-stages=auto+factor-rank=auto", "--out", "wrong",
                     says="nothing travels as factors")
        # What would change nothing of a variant that names it is refused; what all have in common is not.
        for option, says in (("stage-sums=bf16", "dense has neither here"), ("backward-messages=all", "and nothing does"),
                             ("backward-forgets=true", "and nothing does"), ("compressed-stages=1", "dense on every stage")):
            self.refused(*job, *emulated, "--variants", f"dense,dense+{option}", "--out", "wrong", says=says)
        self.rows(*job, *emulated, "--stage-sums", "bf16", "--backward-messages", "all", "--variants", "dense,powersgd+powersgd-rank=1",
                  "--out", "common")
        # How many stages are compressed follows from each link.
        rows = self.rows(*job, "--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--sweep", "link=100gbit,1us,2mbit,50us", "--steps",
                         "3", "--link", "1gbit", "--variants", "dense,powersgd+powersgd-rank=1+compressed-stages=auto", "--out", "auto")
        auto = {row["link"]: row for row in rows if row["variant"] != "dense"}
        self.assertTrue(auto["100gbit,1us"]["stages_why"].startswith("0 of 2 stages compressed"), auto)
        self.assertRegex(auto["2mbit,50us"]["stages_why"], "^[12] of 2 stages compressed")
        # In wall time by timers, and with real computation, schedules lose nothing.
        rows = self.rows(*job, "--compute", "emulated", "--outline", "o.json", "--link", "20mbit,50us", "--steps", "3", "--variants",
                         "dense,dense+schedule=zb-h1", "--out", "b")
        self.assertEqual(rows[0]["payload_bytes_per_step"], rows[1]["payload_bytes_per_step"])
        rows = self.rows(*job, "--data", "synthetic", "--synthetic-tokens", "20000", "--length", "12", "--link", "20mbit,50us", "--steps", "3",
                         "--variants", "dense,dense+schedule=zb-h1", "--out", "c")
        self.assertAlmostEqual(rows[0]["final_loss"], rows[1]["final_loss"], delta=1e-4)

    def test_more_ranks_than_cores_are_marked(self) -> None:
        cores = len(os.sched_getaffinity(0))
        done = self.compare(*TINY, "--ranks", str(os.cpu_count() or cores), "--threads", "2", "--steps", "1", "--schemes", "dense",
                            "--out", "a")
        self.assertIn("oversubscribed", done.stdout)
        self.assertIn("oversubscribed", (self.folder / "a/step_time.svg").read_text())


class BadInputTest(CompareTest):
    def test_flags(self) -> None:
        for arguments, says in (
                (("--schemes", "dense,spardel"), "did you mean 'spardl'"),
                (("--schemes", "dense,dense"), "'dense': it is there twice"),
                (("--schemes", "dense,"), "unknown scheme ''"),
                (("--model", "gtp"), "did you mean 'gpt'"),
                (("--compute", "emulate"), "did you mean 'emulated'"),
                (("--ranks", "0"), "ranks must be 1 to 256"), (("--ranks", "257"), "ranks must be 1 to 256"),
                (("--steps", "0"), "steps"), (("--density", "0"), "density"), (("--powersgd-rank", "0"), "powersgd-rank"),
                (("--sweep", "ranks=1,2"), "link=RATE"), (("--sweep", "link="), "link=RATE"),
                (("--sweep", "link=1gbit,fast"), "fast"), (("--sweep", "link=1gbit,1gbit"), "twice"),
                (("--link", "fast"), "fast"), (("--text", "/no/such/file"), "/no/such/file"),
                (("--no-such-flag",), "no-such-flag")):
            with self.subTest(arguments):
                self.refused(*arguments, says=says)

    def test_under_a_launcher(self) -> None:
        done = self.weft("launch", "-n", "2", "--", WEFT, "compare", *TINY)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("as threads of one process", done.stderr)

    def test_a_run_that_fails_ends_all_schemes(self) -> None:
        done = self.weft("compare", *TINY, "--ranks", "2", "--schemes", "dense,spardl", "--optimizer", "sgd", "--lr", "1e30",
                         "--out", "a")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stderr, r"step \d+: the loss is")
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
