#!/usr/bin/env python3
"""`weft plan` as a user runs it, and runs that go by it: plan_test.py PATH_TO_WEFT [unittest arguments].

Needs no torch: outlines are from FLOPs.
"""
from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else ""
SMALL = ("--preset", "tiny", "--width", "64", "--vocabulary", "2000")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))  # a sanitizer makes everything slower


class PlanTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-plan-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def weft(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run((WEFT, *arguments), capture_output=True, text=True, timeout=60 * FACTOR, check=False,
                              cwd=self.folder)

    def plan(self, *arguments: str) -> dict[str, Any]:
        done = self.weft("plan", *SMALL, *arguments, "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def outline(self, *arguments: str) -> None:
        done = self.weft("outline", *SMALL, "--data", "synthetic", "--synthetic-tokens", "20000", "--flops", "1gflops",
                         *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_stages(self) -> None:
        flags = ("--layers", "4", "--ranks", "4", "--mesh", "dp=2,pp=2", "--accumulate", "4", "--global-batch", "8", "--flops", "1gflops",
                 "--scheme", "powersgd", "--powersgd-rank", "2")
        plan = self.plan(*flags, "--link", "100mbit,50us", "--backward-rank", "2")
        self.assertEqual(plan["mesh"], "dp=2,pp=2")
        self.assertEqual(len(plan["stages"]), 2)
        self.assertTrue(all(s["bubble_seconds"] > 0 and s["exposed_seconds"] > 0 for s in plan["stages"]), plan["stages"])
        tied = [row for row in plan["rows"] if row["strategy"] == "tied"]
        self.assertEqual([(row["ranks"], row["divisor"], row["scheme"]) for row in tied], [(4, 2, "dense")] * 2)
        (back,) = [row for row in plan["rows"] if row["tensor"].startswith("gradients of layer")]
        self.assertIn("factors of 2 columns in 1 of 4", back["why"])  # of the last stage of two, the last message
        # Free links leave the bubble alone, and fewer stages are idle for less.
        free = self.plan(*flags)
        self.assertEqual(free["exposed_seconds"], 0)
        text = self.weft("plan", *SMALL, *flags, "--schedule-svg", "step.svg").stdout
        self.assertIn("stage 0  F0 F1 B0 F2 B1 F3 B2 B3\nstage 1  F0 B0 F1 B1 F2 B2 F3 B3\n", text)
        drawn = (self.folder / "step.svg").read_text()
        self.assertEqual(drawn.count(">rank "), 4)
        spans = [(float(x), float(x) + float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', drawn)]
        self.assertGreater(len(spans), 4 * 2 * 2 * 4)  # of each rank two layers, forward and back, four times
        self.assertEqual(min(begin for begin, _ in spans), 70)  # where the axis begins
        self.assertAlmostEqual(max(end for _, end in spans), 1190, delta=0.02)
        chosen = self.plan(*flags, "--link", "20mbit,50us", "--compressed-stages", "auto")
        best = min(c["step_seconds"] for c in chosen["stages_candidates"])
        fastest = [c["compressed"] for c in chosen["stages_candidates"] if c["step_seconds"] <= best * (1 + 1e-6)]
        self.assertEqual(chosen["compressed_stages"], min(fastest))
        self.assertGreater(chosen["compressed_stages"], 0)
        self.assertEqual(self.plan(*flags, "--link", "100gbit,1us", "--compressed-stages", "auto")["compressed_stages"], 0)
        # And of how many columns factors are: each as if it had been asked for by itself (kernels are timed anew by each plan), and
        # no other number of them.
        both = self.plan(*flags, "--link", "20mbit,50us", "--backward-rank", "2", "--compressed-stages", "auto", "--factor-rank", "auto")
        self.assertEqual([c["columns"] for c in both["stages_candidates"]], [16, 8, 4, 2, 1])  # of 32 a message would be no shorter
        (back,) = [row for row in self.plan(*flags, "--backward-rank", "32")["rows"] if row["tensor"].startswith("gradients of layer")]
        self.assertIn("as they are, because factors of 32 columns would be no shorter", back["why"])
        (taken,) = [c for c in both["stages_candidates"] if c["columns"] == both["factor_rank"]]
        self.assertEqual(taken["compressed"], both["compressed_stages"])
        rank = str(both["factor_rank"])
        by_hand = self.plan(*flags[:-1], rank, "--link", "20mbit,50us", "--backward-rank", rank, "--compressed-stages", "auto")
        seconds = by_hand["stages_candidates"][by_hand["compressed_stages"]]["step_seconds"]
        near = [c["columns"] for c in both["stages_candidates"] if abs(c["step_seconds"] - seconds) < 0.005 * seconds]
        self.assertEqual(near, [both["factor_rank"]])
        # Whole numbers go back instead of factors; what a stage holds of a step is said.
        (back,) = [row for row in self.plan(*flags, "--backward-bits", "4")["rows"] if row["tensor"].startswith("gradients of layer")]
        self.assertIn("whole numbers of 4 bits in 1 of 4", back["why"])
        wide = ("--layers", "4", "--ranks", "4", "--mesh", "pp=4", "--accumulate", "8", "--global-batch", "8", "--flops", "1gflops")
        for how, held in (("single", [4, 3, 2, 1]), ("double", [7, 5, 3, 1])):
            self.assertEqual([s["held_micro_batches"] for s in self.plan(*wide, "--pipeline-warmup", how)["stages"]], held)
        self.assertIn("stage by stage: 7, 5, 3, 1 (single warm-up: 4, 3, 2, 1)", self.weft("plan", *SMALL, *wide, "--pipeline-warmup", "double").stdout)
        # A run takes it, and keeps it.
        self.outline("--layers", "4", "-o", "stages.json")
        for link, compresses in (("20mbit,50us", True), ("100gbit,1us", False)):
            done = self.weft("train", *SMALL, *flags[:10], "--scheme", "powersgd", "--compute", "emulated", "--transport", "sim", "--outline",
                             "stages.json", "--link", link, "--compressed-stages", "auto", "--steps", "3", "--out", link)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stderr, r"compressed-stages auto: \d of 2 stages compressed, because a step takes")
            self.assertRegex((self.folder / link / "config.toml").read_text(),
                             rf'(?m)^compressed-stages = "{"[12]" if compresses else "0"}"$')
        done = self.weft("train", *SMALL, *flags[:10], "--scheme", "powersgd", "--compute", "emulated", "--transport", "sim", "--outline", "stages.json",
                         "--link", "20mbit,50us", "--compressed-stages", "auto", "--factor-rank", "auto", "--backward-rank", "3", "--steps", "3", "--out", "both")
        self.assertEqual(done.returncode, 0, done.stderr)
        (columns,) = re.findall(r"compressed-stages auto: factors of (\d+) columns and \d of 2 stages compressed", done.stderr)
        config = dict(re.findall(r'(?m)^(powersgd-rank|backward-rank|factor-rank) *= *"?([^"\n]*)"?$', (self.folder / "both" / "config.toml").read_text()))
        self.assertEqual(config, {"powersgd-rank": columns, "factor-rank": "", "backward-rank": columns})
        # Critical messages: as fast by the timed table as all of them, unlike the epilogue; bfloat16 has half the bytes.
        piped = ("--layers", "4", "--ranks", "4", "--mesh", "pp=4", "--accumulate", "16", "--global-batch", "16", "--flops", "500gflops",
                 "--link", "500mbit,50us", "--scheme", "dense")
        critical = self.plan(*piped, "--backward-rank", "4", "--backward-messages", "critical")["backward_messages"]
        self.assertEqual((critical["all"], critical["epilogue"]), (48, 6))
        self.assertTrue(6 < critical["chosen"] <= 48, critical)  # (what coding takes is measured)
        self.assertAlmostEqual(critical["step_seconds"], critical["all_seconds"])
        self.assertLess(critical["step_seconds"], critical["epilogue_seconds"])
        self.assertRegex(critical["messages"], r"^16(/[123]:[0-9.-]+)+$")
        whole, half = ([row["bytes"] for row in self.plan(*piped, "--stage-wire", wire)["rows"] if row["strategy"] == "pipeline"]
                       for wire in ("float32", "bf16"))
        self.assertEqual([2 * b for b in half], whole)
        # What tensor-parallel ranks add up, but for the loss's two numbers of each rank a token; and sums of factors.
        cut = ("--layers", "2", "--ranks", "4", "--mesh", "dp=2,tp=2", "--flops", "500gflops", "--link", "500mbit,50us", "--scheme", "dense")
        whole, half = ([(row["bytes"], row["codec"]) for row in self.plan(*cut, "--tensor-wire", wire)["rows"] if row["strategy"] == "tensor"]
                       for wire in ("float32", "bf16"))
        self.assertEqual([(b if codec == "" else 2 * b) for b, codec in half], [b for b, _ in whole])
        self.assertEqual((len(half), sum(codec == "bf16" for _, codec in half)), (11, 10))
        of = {}
        for how in ((), ("--stage-sums", "bf16"), ("--stage-sums", "bf16", "--powersgd-wire", "float32"), ("--powersgd-wire", "bf16")):
            rows = self.plan(*flags, *how)["rows"]
            of[how] = {row["codec"] for row in rows if row["scheme"] == "powersgd"}
        self.assertEqual(list(of.values()), [{""}, {"bf16"}, {""}, {"bf16"}])
        for wrong, says in ((("--mesh", "dp=2,pp=2", "--layers", "4", "--backward-messages", "critical"), "nothing goes back as factors"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--stage-wire", "bf8"), "--stage-wire is float32 or bf16, not 'bf8'"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--backward-rank", "2", "--backward-messages", "8/1:0"),
                             "are of 8 micro-batches, and a step has 1"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--schedule", "interleaved", "--stage-chunks", "2", "--accumulate", "3"),
                             "a multiple of its 2 stages as micro-batches, not 3"),
                            (("--mesh", "dp=2,pp=2", "--layers", "1"), "layers must be at least 1 for each of 2 stages, not 1"),
                            (("--mesh", "pp=3"), "dp=1 times pp=3 times tp=1 is not the number of ranks, 4"),
                            (("--mesh", "dp=4", "--schedule", "gpipe"), "are of stages: --mesh pp=2"),
                            (("--mesh", "dp=4", "--tensor-wire", "bf16"), "--tensor-wire is of tensor-parallel ranks: --mesh tp=2"),
                            (("--mesh", "dp=2,tp=2", "--tensor-wire", "bf8"), "--tensor-wire is float32 or bf16, not 'bf8'"),
                            (("--mesh", "dp=4", "--scheme", "powersgd", "--powersgd-wire", "bf17"), "did you mean 'bf16'"),
                            (("--mesh", "dp=4", "--backward-rank", "2"), "there is one stage"),
                            (("--mesh", "dp=4", "--backward-bits", "8"), "there is one stage"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--backward-messages", "all"), "and nothing does"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--backward-forgets"), "and nothing does"),
                            (("--mesh", "dp=4", "--scheme", "spardl", "--stage-sums", "bf16"), "spardl has neither here"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--scheme", "dense", "--stage-sums", "bf16"),
                             "dense has neither here"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--scheme", "dense", "--compressed-stages", "1"), "dense on every stage"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--scheme", "dense", "--compressed-stages", "auto"),
                             "dense on every stage"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--untied", "--tied-sum", "two-step"), "two stages share"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--scheme", "spardl", "--untied", "--stage-sums", "bf16"),
                             "spardl has neither here"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--scheme", "powersgd", "--powersgd-wire", "float32", "--untied",
                              "--stage-sums", "bf16"), "powersgd has neither here"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--scheme", "spardl", "--stay-dense", "no.such.weight"),
                             "'no.such.weight' is to stay dense, and there is no such parameter"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--backward-bits", "5"), "whole numbers of 4 or 8 bits"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--backward-bits", "4", "--backward-rank", "2"), "not as both"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--factor-rank", "auto"), "with --compressed-stages auto"),
                            (("--mesh", "dp=2,pp=2", "--layers", "4", "--compressed-stages", "auto", "--factor-rank", "auto", "--backward-bits", "4"),
                             "nothing travels as factors"),
                            (("--mesh", "dp=2,pp=2", "--schedule", "1f2b"), "did you mean '1f1b'"),
                            (("--mesh", "dp=2,pp=2", "--compressed-stages", "3"), "compressed stages are 0 to 2, not 3"),
                            (("--model", "lm", "--mesh", "dp=2,pp=2"), "stages are of gpt, gpt-moe and bert")):
            done = self.weft("plan", "--preset", "tiny", "--ranks", "4", *wrong)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
            self.assertIn(says, done.stderr)

    def assert_adds_up(self, of: dict[str, Any], step_seconds: float) -> None:
        parts = [of[part] for part in ("compute_seconds", "work_seconds", "bubble_seconds", "exposed_seconds")] + [of.get("behind_seconds", 0)]
        self.assertAlmostEqual(sum(parts), step_seconds, delta=1e-6 * step_seconds, msg=of)
        self.assertTrue(all(part >= 0 for part in parts), of)

    def test_a_step_is_its_parts_on_every_stage(self) -> None:
        moe = ("--model", "gpt-moe", "--experts", "4")
        for mesh, micro_batches, more in (("dp=16", "1", ()), ("pp=4", "4", ()), ("dp=2,pp=4", "4", ()), ("dp=2,pp=2,tp=2", "4", ()),
                                          ("dp=4,ep=4", "1", moe)):
            ranks = 16 if mesh == "dp=16" else 4 if mesh in ("pp=4", "dp=4,ep=4") else 8
            plan = self.plan("--layers", "4", "--heads", "4", "--ranks", str(ranks), "--mesh", mesh, "--accumulate", micro_batches, "--global-batch",
                             "16", "--flops", "2gflops", "--scheme", "dense", "--link", "100mbit,50us", *more)
            self.assert_adds_up(plan, plan["step_seconds"])
            self.assertEqual(len(plan["stages"]), 4 if "pp=4" in mesh else 2 if "pp=2" in mesh else 1)
            for stage in plan["stages"]:
                self.assert_adds_up(stage, plan["step_seconds"])
                self.assertAlmostEqual(stage["exposed_seconds"] + stage["behind_seconds"], plan["exposed_seconds"], delta=1e-9)
                # What is waited for has names, and is what is not computed but for copies of gradients.
                waited = sum(w["seconds"] for w in stage["waited"])
                self.assertAlmostEqual(waited, plan["step_seconds"] - stage["compute_seconds"], delta=0.03 * plan["step_seconds"], msg=mesh)
            named = {w["strategy"] for stage in plan["stages"] for w in stage["waited"] if w["seconds"] > 0}
            for axis, strategy in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "experts")):
                self.assertEqual(f"{axis}=" in mesh, strategy in named, (mesh, named))
            if mesh != "dp=2,pp=4":
                continue
            # The first stage ends last, and waits for its sums; the last one waits for the first.
            first, last = plan["stages"][0], plan["stages"][-1]
            self.assertGreater(first["exposed_seconds"], 1.3 * last["exposed_seconds"], plan["stages"])
            self.assertGreater(last["behind_seconds"], first["behind_seconds"], plan["stages"])
            flags = ("--layers", "4", "--heads", "4", "--ranks", "8", "--mesh", mesh, "--accumulate", "4", "--global-batch", "16", "--flops", "2gflops",
                     "--scheme", "dense")
            free = self.plan(*flags)
            for stage in free["stages"]:  # control
                self.assertEqual(stage["exposed_seconds"] + stage["behind_seconds"], 0, stage)
                self.assertGreater(stage["bubble_seconds"], 0)
            text = self.weft("plan", *SMALL, *flags, "--link", "100mbit,50us").stdout
            self.assertRegex(text, r"\nstage +step +computes +work +bubble +exposed +behind  waits for\n0 .* sums of gradients [\d.]+ m?s")
            self.assertRegex(text, r"\n3 .*activations and gradients between stages [\d.]+ m?s \([\d.]+ m?s until others have started\)")

    def test_meshes(self) -> None:
        flags = ("--layers", "4", "--heads", "4", "--ranks", "8", "--nodes", "2", "--scale-up", "10gbit", "--link", "100mbit,50us",
                 "--global-batch", "16", "--flops", "2gflops", "--scheme", "dense")
        plan = self.plan(*flags)
        self.assertEqual((plan["mesh"], plan["meshes"]["cases"]), ("dp=8", 8))  # what was planned is as ever
        best = plan["meshes"]["best"]
        self.assertEqual(len(best), 5)
        self.assertEqual([m["step_seconds"] for m in best], sorted(m["step_seconds"] for m in best))
        for mesh in best:
            self.assertTrue(mesh["why"] and mesh["memory_bytes"] > 0, mesh)
            self.assertEqual("pp" in mesh["mesh"], mesh["bubble_seconds"] > 0, mesh)
            self.assert_adds_up(mesh, mesh["step_seconds"])
        # Each of them planned alone says the same (but for the kernels' costs, which are measured anew), and none is faster.
        of = {m["mesh"]: m for m in best}
        fastest = min(of.values(), key=lambda m: m["step_seconds"])
        for mesh in ("dp=8", "dp=4,pp=2", "dp=2,pp=4", "dp=4,tp=2", "dp=2,tp=4", "dp=2,pp=2,tp=2", "pp=4,tp=2", "pp=2,tp=4"):
            stages = int(mesh.partition("pp=")[2][:1] or 1)
            data = int(mesh.partition("dp=")[2][:1] or 1)
            micro_batches = 1 if stages == 1 else min(16 // data, 4 * stages)
            alone = self.plan(*flags, "--mesh", mesh, "--accumulate", str(micro_batches))
            self.assertNotIn("meshes", alone)
            self.assertGreater(alone["step_seconds"], 0.97 * fastest["step_seconds"], mesh)
            if mesh not in of:
                self.assertGreater(alone["step_seconds"], 0.97 * max(m["step_seconds"] for m in best), mesh)
                continue
            self.assertEqual(of[mesh]["micro_batches"], micro_batches)
            self.assertAlmostEqual(of[mesh]["step_seconds"], alone["step_seconds"], delta=0.03 * alone["step_seconds"], msg=mesh)
        # The best one as if it had been typed; flags of stages are of those meshes that have some.
        chosen = self.plan(*flags, "--mesh", "auto", "--schedule", "gpipe", "--backward-rank", "2")
        self.assertEqual(chosen["mesh"], chosen["meshes"]["best"][0]["mesh"])
        self.assertAlmostEqual(chosen["step_seconds"], chosen["meshes"]["best"][0]["step_seconds"], delta=0.03 * chosen["step_seconds"])
        text = self.weft("plan", *SMALL, *flags).stdout
        self.assertRegex(text, r"\npredicted: .*\n\nmeshes of 8 ranks, the fastest of 8\b.*\nmesh +micro-batches +step +computes +work +bubble +exposed +busiest node +memory +why\n")
        moe = self.plan("--model", "gpt-moe", "--heads", "4", "--experts", "4", "--ranks", "4", "--link", "1gbit,50us", "--scheme", "dense")
        self.assertEqual(moe["meshes"]["cases"], 3 + 2 + 1 + 2 + 1)  # ep divides dp: of 4 (tp 1, 2, 4) and, of two stages, 2 (tp 1, 2)
        # Where tokens go to experts as they like (no capacity), ranks wait for each other, and no stages are to blame.
        uneven = self.plan("--model", "gpt-moe", "--ranks", "4", "--global-batch", "4", "--length", "8", "--link", "100gbit,1us",
                           "--experts", "4", "--experts-every", "1", "--expert-capacity", "0", "--expert-choices", "1", "--flops", "2e7")
        for mesh in uneven["meshes"]["best"]:
            self.assertEqual("pp=" in mesh["mesh"] or "ep=" in mesh["mesh"], mesh["bubble_seconds"] > 0, mesh)
            self.assertFalse("pp=" not in mesh["mesh"] and "stages" in mesh["why"], mesh)
        self.assertTrue(any("whose experts have more rows" in mesh["why"] for mesh in uneven["meshes"]["best"]), uneven["meshes"])
        # Others have none, and nobody who names no ranks waits for them.
        self.assertNotIn("meshes", self.plan("--model", "lm", "--ranks", "4"))
        self.assertNotIn("meshes", self.plan("--link", "1gbit"))

    def test_tables_auto_says_why(self) -> None:
        flags = ("--model", "lm", "--preset", "tiny", "--width", "64", "--samples", "64", "--global-batch", "64", "--ranks", "8",
                 "--link", "1gbit,50us", "--scheme", "dense", "--optimizer", "adagrad")

        def table_of(vocabulary: str) -> tuple[str, dict[str, Any]]:
            done = self.weft("plan", *flags, "--vocabulary", vocabulary, "--tables", "auto", "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            plan = json.loads(done.stdout)
            (row,) = [r for r in plan["rows"] if r["tensor"].startswith("embedding.weight")]
            return plan["tables"], row

        tables, row = table_of("50000")
        self.assertEqual((tables, row["scheme"]), ("embrace", "embrace"))
        self.assertRegex(row["why"], r"^auto: a rank reads [\d.]+ % of its rows, .* a step by cost, allgather .*; columns of every row")
        tables, row = table_of("65")  # every row is read by every rank
        self.assertEqual((tables, row["scheme"]), ("dense", "dense"))
        self.assertRegex(row["why"], r"^auto: .* sending all of it takes no longer")
        for wrong, says in ((("--tables", "auto", "--tables-scheduling", "diagonal"), "diagonal"),
                            (("--tables", "embrace/output=dense"), "unknown table 'output'")):
            refused = self.weft("plan", *flags, *wrong)
            self.assertEqual(refused.returncode, 2)
            self.assertIn(says, refused.stderr)

    def test_shapes_of_the_papers_fit_into_little_memory(self) -> None:
        limit = 4 << 30  # of addresses: the tables of lm alone have 3.2 GB, a rank's gradients as many

        def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run((WEFT, "plan", "--preset", "paper", "--link", "10gbit,50us", *arguments, "--json"),
                                  capture_output=True, text=True, timeout=60 * FACTOR, check=False, cwd=self.folder,
                                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))

        for model, ranks, more in (("lm", "8", ("--tables", "embrace")), ("lm", "4", ("--scheme", "dense")),
                                   ("gnmt", "8", ("--tables", "embrace"))):
            done = limited("--model", model, "--ranks", ranks, *more)
            self.assertEqual(done.returncode, 0, (model, done.stderr[-400:]))
            plan = json.loads(done.stdout)
            self.assertGreater(plan["parameters"], 150e6)
            self.assertGreater(plan["byte_scale"], 1 if "dense" in more or model == "gnmt" else 0)
            if "dense" in more:  # the bytes are those of all elements: 2 (P-1)/P of 4 bytes
                self.assertAlmostEqual(plan["busiest_port_bytes"] / (1.5 * 4 * plan["parameters"]), 1, delta=0.01)
        # Control: what is walked whole does not fit. What is known not to fit before is a sentence.
        whole = limited("--model", "gnmt", "--ranks", "4", "--scheme", "powersgd")
        self.assertNotEqual(whole.returncode, 0)
        refused = self.weft("plan", "--model", "lm", "--preset", "paper", "--ranks", "64", "--scheme", "powersgd")
        self.assertEqual(refused.returncode, 2)
        self.assertRegex(refused.stderr, r"^weft: 64 ranks with 53\d{9} parameters together need about \d+ GiB, and [\d.]+ GiB are free: fewer ranks")

    def test_a_tied_table_is_dense_beside_tables_that_are_apart(self) -> None:
        def row_of(*tables: str) -> dict[str, Any]:
            plan = self.plan("--model", "gpt", "--ranks", "4", "--link", "1gbit,50us", "--scheme", "spardl", *tables)
            (row,) = [r for r in plan["rows"] if r["tensor"].startswith("embedding.token.weight")]
            return row

        apart = row_of("--tables", "embrace")
        self.assertEqual((apart["scheme"], apart["strategy"]), ("dense", "tables"))
        self.assertIn("a tied table stays on every rank", apart["why"])
        self.assertEqual(row_of()["scheme"], "spardl")  # a gradient like all others

    def test_rows_and_prediction(self) -> None:
        plan = self.plan("--ranks", "4", "--link", "100mbit,50us", "--scheme", "dense", "--show-schedule")
        self.assertEqual(sum(row["elements"] for row in plan["rows"]), plan["parameters"])
        slots = [row["slot"] for row in plan["rows"]]
        self.assertEqual(len(slots), len(set(slots)))
        for row in plan["rows"]:
            self.assertEqual([row[key] for key in ("strategy", "group", "ranks", "divisor", "scheme", "codec")],
                             ["data_parallel", "world", 4, 4, "dense", ""])
        # 2 (P-1)/P of 4 bytes an element; short buckets may take more bytes in fewer hops.
        exact = 2 * 3 / 4 * 4 * plan["parameters"]
        self.assertGreaterEqual(plan["busiest_port_bytes"], exact - 64)
        self.assertLess(plan["busiest_port_bytes"], 1.1 * exact)
        self.assertGreater(plan["exposed_seconds"], 0)
        self.assertGreaterEqual(plan["step_seconds"], plan["compute_seconds"])
        moves = plan["schedule"]["steady"]
        self.assertEqual([m["piece"] for m in moves if m["move"] == "compute" and m["piece"].startswith("update")],
                         ["update embedding", "update layer.0", "update layer.1", "update head"])
        # An exchange of the step before is awaited, one of this step is started inside of backward.
        self.assertTrue(any(m["move"] == "wait" and m["offset"] == 1 for m in moves))
        self.assertTrue(any(m["move"] == "start" and m["inside"] for m in moves))

    def test_rows_are_priced_by_the_link_of_the_run(self) -> None:
        def longest(*flags: str) -> tuple[float, float]:
            rows = self.plan("--ranks", "4", "--scheme", "dense", "--bucket-mib", "64", *flags)["rows"]
            row = max(rows, key=lambda r: r["bytes"])
            return row["bytes"], row["seconds"]

        for link, rate in (("10mbit,50us", 1.25e6), ("200mbit,50us", 25e6)):
            sent, seconds = longest("--link", link)
            # A ring of four: six hops, and its bytes at the link's rate.
            self.assertAlmostEqual(seconds, sent / rate + 6 * 50e-6, delta=0.02 * seconds)
        # Control: what is planned by another link is priced by that.
        sent, seconds = longest("--link", "10mbit,50us", "--plan-link", "200mbit,50us")
        self.assertLess(seconds, 1.2 * sent / 25e6)

    def test_a_slower_link_takes_longer_and_clipping_waits(self) -> None:
        fast, slow = (self.plan("--link", link, "--scheme", "dense") for link in ("1gbit,50us", "10mbit,50us"))
        self.assertGreater(slow["step_seconds"], 2 * fast["step_seconds"])
        clipped = self.plan("--link", "10mbit,50us", "--scheme", "dense", "--clip-norm", "1")
        # (The kernels' costs are measured anew for each plan.)
        self.assertGreater(clipped["step_seconds"], 0.99 * slow["step_seconds"])
        self.assertIn("clip-norm", clipped["updates_wait_because"])
        self.assertEqual(slow["updates_wait_because"], "")

    def test_tables(self) -> None:
        lm = ("--model", "lm", "--samples", "30", "--ranks", "4", "--link", "100mbit,50us", "--scheme", "dense")
        plan = self.plan(*lm, "--tables", "embrace", "--show-schedule")
        tables = [row for row in plan["rows"] if row["strategy"] == "embedding"]
        self.assertEqual([row["tensor"] for row in tables], ["embedding.weight", "softmax.weight"])
        self.assertEqual({row["scheme"] for row in tables}, {"embrace"})
        self.assertIn("the table does not", tables[0]["why"])
        self.assertIn("among the gradients", tables[1]["why"])
        self.assertGreater(tables[0]["bytes"], 0)
        starts = [m["exchange"] for m in plan["schedule"]["steady"] if m["move"] == "start"]
        self.assertIn("delayed rows of embedding.weight", starts)
        # The whole of them is more; a tied table says why it is whole.
        self.assertGreater(self.plan(*lm, "--tables", "dense")["busiest_port_bytes"], plan["busiest_port_bytes"])
        gpt = self.plan("--ranks", "4", "--tables", "embrace", "--scheme", "dense")
        self.assertTrue(any("tied" in row["why"] for row in gpt["rows"]), gpt["rows"])
        self.assertNotIn("embedding", {row["strategy"] for row in gpt["rows"]})

    def test_auto(self) -> None:
        hidden = self.plan("--link", "10gbit,5us", "--scheme", "auto", "--flops", "10mflops")
        self.assertEqual(hidden["scheme"], "dense")
        self.assertTrue(hidden["why"].startswith("stay dense, because"), hidden["why"])
        slow = self.plan("--link", "2mbit,50us", "--scheme", "auto", "--flops", "1tflops")
        self.assertIn(slow["scheme"], ("spardl", "powersgd"), slow["why"])
        self.assertGreaterEqual({c["name"] for c in slow["candidates"]}, {"dense", "dense-bf16", "spardl", "powersgd"})
        best = min(c["step_seconds"] for c in slow["candidates"])
        self.assertLess(slow["step_seconds"], 1.05 * best)  # (the kernels' costs are measured anew)
        self.assertTrue(all(row["why"].startswith(("auto: ", "stays dense: ")) for row in slow["rows"]), slow["rows"])

    def test_slices_of_experts_auto(self) -> None:
        moe = ("--model", "gpt-moe", "--experts", "8", "--scheme", "dense", "--ranks", "8", "--mesh", "ep=8", "--global-batch", "64")

        def plan(*arguments: str) -> dict[str, Any]:
            return self.plan(*moe, *arguments)

        chosen = {}
        for link, flops in (("160mbit,20us", "2gflops"), ("8gbit,5ms", "2tflops")):  # bytes are what costs, or messages
            made = plan("--link", link, "--flops", flops, "--expert-slices", "auto")
            seconds = {c["slices"]: c["step_seconds"] for c in made["slices_candidates"]}
            self.assertEqual(list(seconds), [1, 2, 4, 8])
            chosen[link] = made["expert_slices"]
            self.assertEqual(seconds[chosen[link]], min(seconds.values()))
            self.assertAlmostEqual(made["step_seconds"], min(seconds.values()), delta=0.1 * made["step_seconds"])
            (row,) = [r for r in made["rows"] if r["strategy"] == "experts"]
            self.assertIn(f"auto: {chosen[link]} slice", row["why"])
        self.assertGreater(chosen["160mbit,20us"], 1)
        self.assertEqual(chosen["8gbit,5ms"], 1)
        self.assertNotIn("expert_slices", plan("--link", "160mbit,20us", "--expert-slices", "2"))  # control: as it was told
        # A run takes it, and keeps it.
        self.outline("--model", "gpt-moe", "--experts", "8", "-o", "moe.json")
        run = ("train", *SMALL, *moe, "--compute", "emulated", "--transport", "sim", "--outline", "moe.json", "--link", "160mbit,20us")
        done = self.weft(*run, "--expert-slices", "auto", "--steps", "3", "--out", "run")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, r"expert-slices auto: \d slices?, because a step takes")
        self.assertRegex((self.folder / "run/config.toml").read_text(), r'(?m)^expert-slices = "[1248]"$')
        for arguments, says in ((("plan", *moe, "--expert-slices", "some"), "whole number of 1 or more, or auto"),
                                (("compare", "--model", "gpt-moe", "--ranks", "2", "--expert-slices", "auto"), "compare names their numbers")):
            done = self.weft(*arguments)
            self.assertEqual((done.returncode, says in done.stderr), (2, True), done.stderr)

    def test_an_encoder_and_a_decoder_with_experts(self) -> None:
        made = self.plan("--model", "bert2gpt2-moe", "--scheme", "dense", "--ranks", "4", "--mesh", "ep=4", "--link", "1gbit,50us")
        self.assertEqual([r["tensor"] for r in made["rows"] if r["strategy"] == "experts"], ["encoder.1.experts", "decoder.1.experts"])

    def test_text(self) -> None:
        done = self.weft("plan", *SMALL, "--ranks", "2", "--link", "1gbit,50us", "--show-schedule")
        self.assertEqual(done.returncode, 0, done.stderr)
        for part in ("table of every rank, steady", "compute  forward layer.0", "step n-1", "predicted:", "(dp=2)",
                     "from FLOPs at 50 GFLOP/s; --outline has measured ones", "in the bytes of their codec"):
            self.assertIn(part, done.stdout)

    def test_the_excerpt_of_the_readme(self) -> None:
        readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
        begin = readme.index("table of every rank, steady\n")
        excerpt = readme[begin:readme.index("```", begin)]
        self.assertGreater(excerpt.count("\n"), 5)
        done = self.weft("plan", "--ranks", "4", "--link", "200mbit,50us", "--show-schedule")
        self.assertIn(excerpt, done.stdout)

    def test_rows_have_their_columns(self) -> None:
        for codec in ("packed", "coo"):
            arguments = ("--ranks", "3", "--link", "1gbit,50us", "--scheme", "spardl", "--codec", codec)
            done = self.weft("plan", *SMALL, *arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = done.stdout.splitlines()
            head = next(i for i, line in enumerate(lines) if line.startswith("slot "))
            self.assertEqual(lines[head].split(), ["slot", "tensor", "elements", "strategy", "group", "divisor", "scheme",
                                                   "codec", "class", "bytes", "alone", "why"])
            rows = self.plan(*arguments)["rows"]
            self.assertEqual({row["scheme"] for row in rows}, {"spardl", "dense"})
            for line, row in zip(lines[head + 1:], rows, strict=False):
                written = codec if row["scheme"] == "spardl" else ""
                self.assertEqual(row["codec"], written, "what is sent dense is in no codec")
                words = [str(row["elements"]), row["strategy"], row["group"], "3", row["scheme"], written or "-"]
                self.assertIn(" ".join([*words, "gradient"]), " ".join(line.split()))

    def test_an_outline_says_itself_what_it_is_of(self) -> None:
        self.outline("-o", "o.json")
        done = self.weft("plan", "--outline", "o.json", "--ranks", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("(from FLOPs at 1 GFLOP/s)", done.stdout)
        same = self.weft("plan", "--outline", "o.json", "--ranks", "2", "--model", "gpt")  # control: the model that it is of
        self.assertEqual(same.returncode, 0, same.stderr)
        for arguments, words in ((("--model", "lm"), "--model lm, but the outline is of gpt"),
                                 (("--model=lm",), "--model lm, but the outline is of gpt"),
                                 (("--flops", "50gflops"), "--flops is a rate for a model without an outline")):
            refused = self.weft("plan", "--outline", "o.json", "--ranks", "2", *arguments)
            self.assertEqual(refused.returncode, 2, arguments)
            self.assertIn(words, refused.stderr)
            self.assertEqual(refused.stderr.count("\n"), 1, refused.stderr)

    def test_bad_input_is_one_sentence(self) -> None:
        for arguments, part in ((("--mesh", "dp=3"), "mesh"), (("--mesh", "pp=4"), "layers must be at least 1 for each of 4 stages"),
                                (("--scheme", "spardle"), "spardl"), (("--outline", "nowhere.json"), "nowhere.json"),
                                (("--flops", "fast"), "no rate"), (("--ranks", "0"), "ranks")):
            done = self.weft("plan", *SMALL, *arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn(part, done.stderr, arguments)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_an_emulated_run_has_its_prediction_and_its_trace(self) -> None:
        self.outline("-o", "o.json")
        done = self.weft("train", "--compute", "emulated", "--outline", "o.json", "--ranks", "2", "--steps", "8", "--link",
                         "20mbit,50us", "--scheme", "auto", "--out", "run")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("scheme auto:", done.stderr)
        summary = json.loads((self.folder / "run/summary.json").read_text())
        self.assertGreater(summary["predicted_step_seconds"], 0)
        self.assertNotEqual(summary["scheme"], "auto")
        config = (self.folder / "run/config.toml").read_text()
        self.assertIn(f'scheme = "{summary["scheme"]}"', config)
        events = json.loads((self.folder / "run/trace.json").read_text())["traceEvents"]
        names = {e.get("name", "") for e in events}
        self.assertIn("forward layer.0", names)
        self.assertTrue(any(n.startswith("gradients of bucket") for n in names))

    def test_a_step_of_more_than_a_day_is_refused(self) -> None:
        self.outline("-o", "o.json")
        outline = json.loads((self.folder / "o.json").read_text())
        for seconds, status in ((9e4, 0), (1e6, 2)):
            outline["blocks"][0]["forward_seconds"] = seconds
            (self.folder / "o.json").write_text(json.dumps(outline))
            done = self.weft("train", "--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--ranks", "2",
                             "--steps", "2", "--link", "1gbit,50us", "--out", f"run{status}")
            self.assertEqual(done.returncode, status, done.stderr)
        self.assertIn("more than a day", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertFalse((self.folder / "run2").exists())
        self.assertTrue((self.folder / "run0").exists())  # control
        refused = self.weft("plan", *SMALL, "--flops", "1flops")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("more than a day", refused.stderr)

    def test_a_thousand_simulated_ranks(self) -> None:
        self.outline("-o", "o.json")
        done = self.weft("train", "--compute", "emulated", "--transport", "sim", "--outline", "o.json", "--ranks", "1024",
                         "--byte-scale", "64", "--steps", "1", "--link", "1gbit,50us", "--scheme", "spardl", "--out", "run")
        self.assertEqual(done.returncode, 0, done.stderr)
        refused = self.weft("train", "--byte-scale", "64", "--compute", "emulated", "--outline", "o.json")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("--byte-scale", refused.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
