#!/usr/bin/env python3
"""`weft train` as a user runs it: train_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else ""
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
TINY = ("--preset", "tiny", "--data", "synthetic", "--synthetic-tokens", "20000", "--global-batch", "4", "--length", "12",
        "--teams", "1", "--density", "0.05")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))  # a sanitizer makes everything slower
Done = subprocess.CompletedProcess[str]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"}


class TrainTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-train-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def run_command(self, *command: str) -> Done:
        return subprocess.run(command, capture_output=True, text=True, timeout=60 * FACTOR, env=environment(),
                              check=False, cwd=self.folder)

    def train(self, *arguments: str, before: tuple[str, ...] = ()) -> Done:
        return self.run_command(*before, WEFT, "train", *arguments)

    def ok(self, done: Done) -> Done:
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done

    def metrics(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def losses(self, name: str) -> list[float]:
        return [row["loss"] for row in self.metrics(name)]

    def refused(self, *arguments: str, says: str, before: tuple[str, ...] = ()) -> Done:
        """One sentence, no traceback, an exit status that is not 0."""
        done = self.train(*arguments, before=before)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertIn(says, done.stderr)
        self.assertNotIn("terminate called", done.stderr)
        if not before:
            self.assertEqual(len([line for line in done.stderr.splitlines() if "note:" not in line]), 1, done.stderr)
            self.assertTrue(done.stderr.startswith("weft: "), done.stderr)
        return done


class RunTest(TrainTest):
    def test_stages_train_and_go_on_elsewhere(self) -> None:
        tiny = (*TINY, "--layers", "4", "--scheme", "dense", "--steps", "6", "--accumulate", "2")
        self.ok(self.train(*tiny, "--ranks", "1", "--out", "one"))
        losses = self.losses("one")
        for name, flags in (("pipe", ("--mesh", "dp=2,pp=2")), ("zero", ("--mesh", "pp=4", "--schedule", "zb-h1", "--recompute")),
                            ("chunks", ("--mesh", "dp=2,pp=2", "--schedule", "interleaved", "--stage-chunks", "2"))):
            self.ok(self.train(*tiny, "--ranks", "4", *flags, "--out", name, "--checkpoint-every", "3"))
            for a, b in zip(self.losses(name), losses):
                self.assertAlmostEqual(a, b, delta=2e-4, msg=name)
        # Control: dropout of another seed is not one process's.
        self.ok(self.train(*tiny, "--ranks", "4", "--mesh", "dp=2,pp=2", "--seed", "2", "--out", "other"))
        self.assertGreater(abs(self.losses("other")[-1] - losses[-1]), 1e-3)
        # From four stages to two ranks without any, which forgets what was said of them; what is said anew has to be of use.
        self.refused("--resume", "zero", "--ranks", "2", "--mesh", "dp=2", "--schedule", "zb-h1", "--steps", "8", says="are of stages")
        self.ok(self.train("--resume", "zero", "--ranks", "2", "--mesh", "dp=2", "--steps", "8"))
        self.assertEqual(len(self.losses("zero")), 8)
        self.ok(self.train(*tiny, "--ranks", "4", "--mesh", "dp=2,pp=2", "--backward-rank", "2", "--backward-messages", "all",
                           "--backward-forgets", "--out", "lossy"))
        self.refused("--resume", "lossy", "--ranks", "4", "--backward-rank", "0", "--backward-messages", "all", "--steps", "8",
                     says="and nothing does")
        # What is typed of messages takes the place of what was there: whole numbers, factors of other columns, and neither.
        for steps, flag, value, kept in (("7", "--backward-bits", "4", (0, 4)), ("8", "--backward-rank", "3", (3, 0)), ("9", "--backward-rank", "0", (0, 0))):
            self.ok(self.train("--resume", "lossy", "--ranks", "4", flag, value, "--steps", steps))
            config = dict(re.findall(r"(?m)^(backward-rank|backward-bits) *= *(\d+)$", (self.folder / "lossy/config.toml").read_text()))
            self.assertEqual((int(config.get("backward-rank", 0)), int(config.get("backward-bits", 0))), kept)
        self.refused("--resume", "lossy", "--ranks", "4", "--backward-rank", "2", "--backward-bits", "4", "--steps", "10", says="not as both")
        self.ok(self.train("--resume", "lossy", "--ranks", "2", "--mesh", "dp=2", "--steps", "11"))
        self.assertEqual(len(self.losses("lossy")), 11)
        # Factors between stages, by processes; bytes are the formula's.
        done = self.ok(self.run_command(WEFT, "launch", "-n", "2", "--", WEFT, "train", *tiny, "--mesh", "pp=2", "--backward-rank", "2",
                                        "--out", "launched"))
        summary = json.loads((self.folder / "launched" / "summary.json").read_text())
        self.assertEqual(summary["payload_bytes_per_step"], summary["formula_bytes_per_step"], done.stderr)
        self.refused(*tiny, "--ranks", "4", "--mesh", "dp=2,pp=2", "--clip-norm", "1", "--clip-local", says="clip-local does not go with stages")
        self.refused(*tiny, "--ranks", "4", "--mesh", "dp=2,pp=2", "--optimizer", "sgd", "--momentum-correction", "0.9",
                     says="momentum-correction does not go with stages")

    def test_tensor_parallel_ranks_train_and_go_on_elsewhere(self) -> None:
        tiny = (*TINY, "--layers", "4", "--heads", "4", "--scheme", "dense", "--steps", "6", "--accumulate", "2")
        self.ok(self.train(*tiny, "--ranks", "1", "--out", "one"))
        losses = self.losses("one")
        for name, ranks, mesh in (("cut", "2", "tp=2"), ("all", "8", "dp=2,pp=2,tp=2")):
            self.ok(self.train(*tiny, "--ranks", ranks, "--mesh", mesh, "--out", name, "--checkpoint-every", "3"))
            for a, b in zip(self.losses(name), losses):
                self.assertAlmostEqual(a, b, delta=2e-4, msg=name)
        # From eight ranks of three axes to two along dp.
        self.ok(self.train("--resume", "all", "--ranks", "2", "--mesh", "dp=2", "--steps", "8"))
        self.assertEqual(len(self.losses("all")), 8)
        # By processes, with stages and factors; bytes are the formula's.
        done = self.ok(self.run_command(WEFT, "launch", "-n", "4", "--", WEFT, "train", *tiny, "--mesh", "pp=2,tp=2", "--backward-rank", "2",
                                        "--out", "launched"))
        summary = json.loads((self.folder / "launched" / "summary.json").read_text())
        self.assertEqual(summary["payload_bytes_per_step"], summary["formula_bytes_per_step"], done.stderr)
        self.refused(*tiny, "--ranks", "8", "--mesh", "tp=8", says="heads must be a multiple of the 8 tensor-parallel ranks, not 4")
        self.refused(*tiny, "--ranks", "4", "--mesh", "dp=2,tp=3", says="is not the number of ranks, 4")
        self.refused(*tiny, "--ranks", "2", "--mesh", "tp=2", "--clip-norm", "1", "--clip-local",
                     says="clip-local does not go with tensor-parallel ranks")
        self.refused("--model", "lm", "--preset", "tiny", "--ranks", "2", "--mesh", "tp=2", says="tensor parallelism is of gpt, gpt-moe and bert")

    def test_help_is_that_of_the_whole_verb(self) -> None:
        done = self.ok(self.train("--help"))
        for flag in ("--model", "--scheme", "--resume", "--config", "--lr-schedule"):
            self.assertIn(flag, done.stdout)

    def test_a_run_leaves_its_folder(self) -> None:
        done = self.ok(self.train(*TINY, "--ranks", "3", "--steps", "4", "--out", "a", "--link", "1gbit,50us"))
        self.assertIn("tokens/s", done.stdout)
        self.assertIn("formula", done.stdout)
        rows = self.metrics("a")
        self.assertEqual([row["step"] for row in rows], [0, 1, 2, 3])
        for row in rows:
            self.assertLessEqual({"loss", "lr", "density", "tokens", "seconds", "waited_seconds", "payload_bytes"}, row.keys())
        summary = json.loads((self.folder / "a/summary.json").read_text())
        self.assertEqual((summary["ranks"], summary["steps"], summary["compute"]), (3, 4, "real"))
        self.assertEqual(summary["final_loss"], rows[-1]["loss"])
        steps = summary["step_seconds"]
        self.assertEqual(len(steps), 4)
        self.assertEqual(summary["step_seconds_median"], sum(sorted(steps)[1:3]) / 2)
        # The last rank ends no step before rank 0 does.
        for step in range(1, 5):
            self.assertGreaterEqual(sum(steps[:step]), sum(row["seconds"] for row in rows[:step]) - 1e-9)
        self.assertEqual(max(summary["waiting_share"], 1), 1)
        sent = sum(row["payload_bytes"] for row in rows)
        self.assertTrue(sent <= summary["wire_bytes"] < 2 * sent + 10_000, summary)  # measuring the link is not among them
        trace = json.loads((self.folder / "a/trace.json").read_text())
        self.assertEqual({event["pid"] for event in trace["traceEvents"]}, {0, 1, 2})
        self.assertEqual(trace["otherData"]["left_out"], 0)
        self.assertTrue((self.folder / "a/checkpoints/step-4/index.safetensors").exists())
        self.refused(*TINY, "--out", "a", says="has a run already")

    def test_a_summary_has_what_the_plan_predicts(self) -> None:
        done = self.ok(self.train(*TINY, "--ranks", "2", "--steps", "14", "--scheme", "dense", "--link", "10mbit,50us", "--out", "a"))
        summary = json.loads((self.folder / "a/summary.json").read_text())
        self.assertIn("the plan predicts", done.stdout)
        # The link decides: the bytes of a step alone take that long, and predicting no link would miss it.
        wire = summary["payload_bytes_per_step"] / 1.25e6
        median = summary["step_seconds_median"]
        self.assertGreater(median, 0.9 * wire)
        self.assertTrue(0.7 * median < summary["predicted_step_seconds"] < 1.3 * median, summary)
        self.assertTrue(0 < summary["predicted_exposed_seconds"] < summary["predicted_step_seconds"], summary)
        self.assertAlmostEqual(summary["exposed_seconds"] - summary["predicted_exposed_seconds"],
                               median - summary["predicted_step_seconds"], places=6)
        self.assertEqual(summary["not_predicted_because"], "")
        # Control: where it cannot be told, it is not.
        for flags, why in ((("--ranks", "1", "--steps", "8"), "one rank"), (("--ranks", "2", "--steps", "3"), "too few steps")):
            done = self.ok(self.train(*TINY, *flags, "--scheme", "dense", "--out", why.replace(" ", "-")))
            summary = json.loads((self.folder / why.replace(" ", "-") / "summary.json").read_text())
            self.assertIn(why, summary["not_predicted_because"])
            self.assertIsNone(summary["predicted_step_seconds"])
            self.assertIn("no prediction: ", done.stdout)

    def test_tables_by_every_way(self) -> None:
        lm = (*TINY, "--model", "lm", "--samples", "30", "--scheme", "dense", "--steps", "4")
        for way in ("embrace", "alltoall", "hashed", "parallax", "allgather"):
            checkpoints = ("--checkpoint-every", "0") if way in ("hashed", "parallax") else ()
            self.ok(self.train(*lm, "--ranks", "3", "--tables", way, "--out", way, *checkpoints))
            for mine, other in zip(self.losses(way), self.losses("embrace")):
                self.assertAlmostEqual(mine, other, places=4, msg=way)
        self.assertEqual(self.losses("alltoall"), self.losses("embrace"))  # scheduling changes no bit
        # On another number of ranks it goes on; with clipping, and in several processes.
        self.ok(self.train(*lm[:-1], "6", "--ranks", "2", "--tables", "embrace", "--out", "embrace", "--resume"))
        self.assertEqual([row["step"] for row in self.metrics("embrace")], [0, 1, 2, 3, 4, 5])
        self.ok(self.train(*lm, "--tables", "embrace", "--clip-norm", "0.1", "--ranks", "2", "--out", "clipped"))
        self.ok(self.train(*lm, "--tables", "embrace", "--clip-norm", "0.1", "--out", "launched", before=(WEFT, "launch", "-n", "2", "--")))
        self.assertEqual(self.losses("clipped"), self.losses("launched"))
        # Dense tables move every row; those of rows without a gradient stay.
        self.ok(self.train(*lm, "--ranks", "3", "--tables", "dense", "--out", "dense"))
        self.assertNotEqual(self.losses("dense"), self.losses("embrace"))

    def test_tables_that_cannot_be_meant(self) -> None:
        lm = (*TINY, "--model", "lm", "--samples", "30", "--ranks", "2", "--steps", "2", "--out", "a")
        self.refused(*lm, "--tables", "embrase", says="did you mean 'embrace'?")
        self.refused(*lm, "--tables", "embrace", "--optimizer", "sgd", "--momentum", "0.9", says="momentum")
        self.refused(*lm, "--tables", "dense", "--tables-scheduling", "off", says="no scheduling of their own")
        self.refused(*lm, "--tables", "embrace", "--tables-scheduling", "on", says="unknown scheduling")
        self.assertFalse((self.folder / "a").exists())

    def test_a_default_folder_and_real_text(self) -> None:
        (self.folder / "book.txt").write_text("the cat sat on the mat and the dog sat on the cat . " * 40)
        self.ok(self.train("--preset", "tiny", "--model", "lm", "--text", "book.txt", "--ranks", "1", "--steps", "2",
                           "--checkpoint-every", "0", "--scheme", "dense"))
        (folder,) = (self.folder / "runs").iterdir()
        self.assertRegex(folder.name, r"^lm-dense-\d{8}-\d{6}$")
        self.assertFalse((folder / "checkpoints").exists())

    def test_models_of_pairs_and_spans(self) -> None:
        for model, classes in (("gnmt", 256), ("transformer", 256), ("bert", 12)):
            flags = (*TINY, "--model", model, "--scheme", "dense", "--steps", "3", "--checkpoint-every", "0")
            self.ok(self.train(*flags, "--ranks", "2", "--accumulate", "2", "--out", model))
            rows = self.metrics(model)
            self.assertEqual({row["tokens"] for row in rows}, {8 if model == "bert" else 48})  # two places, or 12 tokens
            self.assertLess(abs(self.losses(model)[0] - math.log(classes)), 0.3)  # nothing is known yet
            # Two ranks with two micro-batches each train on what one rank does, and not on another seed's batches.
            self.ok(self.train(*flags, "--ranks", "1", "--out", model + "-alone"))
            self.ok(self.train(*flags, "--ranks", "1", "--seed", "2", "--out", model + "-other"))
            gaps = [[abs(a - b) for a, b in zip(self.losses(model), self.losses(model + other))] for other in ("-alone", "-other")]
            self.assertLess(max(gaps[0]), 1e-4)
            self.assertGreater(max(gaps[1]), 1e-3)

    def test_experts_on_every_layout(self) -> None:
        moe = (*TINY, "--model", "gpt-moe", "--scheme", "dense", "--ranks", "4", "--expert-capacity", "0", "--checkpoint-every", "2")
        self.ok(self.train(*moe, "--steps", "4", "--out", "one"))
        for mesh in ("dp=4,ep=2", "ep=4"):
            self.ok(self.train(*moe, "--mesh", mesh, "--steps", "4", "--out", mesh))
            for mine, other in zip(self.losses(mesh), self.losses("one")):
                self.assertAlmostEqual(mine, other, delta=1e-5)
        # What was saved on one layout goes on on another, and on one rank.
        self.ok(self.train(*moe, "--mesh", "dp=4,ep=4", "--steps", "2", "--out", "half"))
        self.ok(self.train("--resume", "half", "--mesh", "dp=4,ep=2", "--steps", "3"))
        self.ok(self.train("--resume", "half", "--mesh", "dp=1", "--ranks", "1", "--steps", "4"))
        for mine, other in zip(self.losses("half"), self.losses("one")):
            self.assertAlmostEqual(mine, other, delta=1e-5)
        self.assertEqual(len(self.losses("half")), 4)

    def test_metrics_have_the_experts_load(self) -> None:
        moe = (*TINY, "--model", "gpt-moe", "--scheme", "dense", "--ranks", "2", "--mesh", "ep=2", "--experts-every", "1", "--steps", "4")
        self.ok(self.train(*moe, "--out", "a"))
        self.ok(self.train(*moe, "--expert-slices", "auto", "--out", "b"))
        for run in ("a", "b"):
            for line in (self.folder / run / "metrics.jsonl").read_text().splitlines():
                load = json.loads(line)["expert_load"]
                self.assertEqual(len(load), 2)
                for value in load:  # of 4 experts, and two choices of a token are two
                    self.assertTrue(1 <= value <= 2, value)
        self.ok(self.train(*TINY, "--ranks", "2", "--steps", "2", "--out", "dense"))
        self.assertNotIn("expert_load", (self.folder / "dense/metrics.jsonl").read_text())

    def test_experts_that_cannot_be_meant(self) -> None:
        moe = (*TINY, "--model", "gpt-moe", "--ranks", "4", "--steps", "1")
        for arguments, says in ((("--mesh", "ep=3"), "ep=3 does not divide"), (("--mesh", "ep=4", "--experts", "6"), "cannot be dealt"),
                                (("--expert-choices", "3"), "1 or 2"), (("--experts", "1"), "cannot choose 2 of 1"),
                                (("--expert-capacity", "-1"), "expert-capacity"), (("--expert-capacity", "nan"), "expert-capacity"),
                                (("--expert-slices", "0"), "expert-slices"),
                                (("--expert-policy", "lena"), "lina"), (("--mesh", "tp=4"), "heads must be a multiple of the 4"),
                                (("--expert-policy", "plain", "--expert-slices", "2"), "one slice"),
                                (("--mesh", "ep=4", "--expert-packing", "3"), "does not divide the 4 ranks"),
                                (("--mesh", "ep=2", "--expert-packing", "4"), "more than the 2 ranks"),
                                (("--mesh", "ep=4", "--expert-packing", "most"), "neither auto nor a number")):
            self.refused(*moe, *arguments, says=says)
        self.refused(*TINY, "--mesh", "ep=2", "--ranks", "4", "--steps", "1", says="no experts")

    def test_more_ranks_than_experts_and_more_experts_than_ranks(self) -> None:
        moe = (*TINY, "--model", "gpt-moe", "--scheme", "dense", "--steps", "3", "--checkpoint-every", "0", "--expert-capacity", "0")
        self.refused(*moe, "--ranks", "4", "--experts", "2", "--mesh", "ep=4", says="2 experts cannot be dealt to 4 ranks")
        for experts, ranks, mesh in (("2", "4", "dp=4,ep=2"), ("8", "2", "ep=2")):
            self.ok(self.train(*moe, "--experts", experts, "--ranks", "1", "--out", f"{experts}-alone"))
            self.ok(self.train(*moe, "--experts", experts, "--ranks", ranks, "--mesh", mesh, "--out", experts))
            for mine, other in zip(self.losses(experts), self.losses(f"{experts}-alone")):
                self.assertAlmostEqual(mine, other, delta=1e-5)
            counted = [json.loads((self.folder / f"{run}/summary.json").read_text())["parameters"] for run in (experts, f"{experts}-alone")]
            self.assertEqual(counted[0], counted[1])  # of the whole model, whoever has which expert
        self.assertNotAlmostEqual(self.losses("2")[-1], self.losses("8")[-1], delta=1e-5)  # control

    def test_two_dense_ways_of_tables_are_saved(self) -> None:
        self.ok(self.train("--preset", "tiny", "--model", "gnmt", "--ranks", "2", "--tables", "dense/decoder.embedding.weight=push-pull",
                           "--steps", "2", "--checkpoint-every", "2", "--out", "a"))
        self.assertTrue((self.folder / "a/checkpoints/step-2").is_dir())

    def test_a_gate_that_gives_no_numbers(self) -> None:
        moe = (*TINY, "--model", "gpt-moe", "--scheme", "dense", "--ranks", "2", "--mesh", "ep=2", "--steps", "9", "--checkpoint-every", "0")
        done = self.refused(*moe, "--optimizer", "sgd", "--lr", "1e30", "--out", "a", says="the loss is NaN on rank 0")
        self.assertRegex(done.stderr, r"step \d+")

    def test_config_file_round_trip(self) -> None:
        flags = ("--ranks", "2", "--steps", "3", "--lr", "0.0123", "--clip-norm", "0.7", "--link", "2gbit,20us",
                 "--skip-not-finite")
        self.ok(self.train(*TINY, *flags, "--out", "a"))
        config = (self.folder / "a/config.toml").read_text()
        self.assertNotIn("token = ", config.lower().replace("tokens = ", ""))
        self.assertIn('plan-link = "2gbit,20us"', config)  # that of the run
        self.ok(self.train("--config", "a/config.toml", "--out", "b"))
        self.assertEqual((self.folder / "b/config.toml").read_text(), config)
        self.assertEqual(self.losses("a"), self.losses("b"))
        self.ok(self.train("--config", "a/config.toml", "--out", "c", "--seed", "9"))  # flags override
        self.assertNotEqual(self.losses("a"), self.losses("c"))
        (self.folder / "bad.toml").write_text('modle = "gpt"\n')
        self.refused("--config", "bad.toml", says="modle")
        self.refused("--config", "none.toml", says="none.toml")

    def test_resume_goes_on_with_the_same_bits(self) -> None:
        flags = ("--ranks", "2", "--steps", "6")
        self.ok(self.train(*TINY, *flags, "--out", "a"))
        self.ok(self.train(*TINY, "--ranks", "2", "--steps", "3", "--out", "b"))
        self.ok(self.train("--resume", "b", "--steps", "6"))
        self.assertEqual(self.losses("a"), self.losses("b"))
        self.assertIn("nothing left", self.ok(self.train("--resume", "--out", "b")).stdout)
        self.ok(self.train(*TINY, *flags, "--out", "c", "--resume", "auto"))  # nothing there: from the beginning
        self.assertEqual(self.losses("a"), self.losses("c"))
        self.ok(self.train("--resume", "b", "--steps", "8", "--ranks", "3"))
        self.assertEqual(len(self.losses("b")), 8)

    def test_a_run_that_goes_on_keeps_the_scheme_that_was_chosen(self) -> None:
        for spelled in (("--scheme", "auto"), ("--scheme=auto",)):
            name = str(len(spelled))
            flags = (*TINY, *spelled, "--ranks", "2", "--link", "2mbit,50us", "--out", name, "--resume", "auto")
            self.assertIn("scheme auto:", self.ok(self.train(*flags, "--steps", "2")).stderr)
            config = self.folder / name / "config.toml"
            (line,) = [each for each in config.read_text().splitlines() if each.startswith("scheme = ")]
            self.assertNotIn("auto", line)
            again = self.ok(self.train(*flags, "--steps", "4"))
            self.assertNotIn("scheme auto:", again.stderr)
            self.assertIn(line, config.read_text())

    def test_tables_that_are_not_saved_are_refused_before_the_first_step(self) -> None:
        for way in ("hashed", "parallax", "parallax-pushed", "embrace/softmax.weight=hashed"):
            self.refused(*TINY, "--model", "lm", "--samples", "16", "--tables", way, "--out", "x", says="--checkpoint-every 0")
            self.assertFalse((self.folder / "x").exists())

    def test_ways_of_tables_that_were_chosen_are_kept(self) -> None:
        lm = (*TINY, "--model", "lm", "--samples", "16", "--optimizer", "adagrad", "--scheme", "dense")
        flags = (*lm, "--tables", "auto", "--ranks", "2", "--link", "100mbit,50us", "--out", "a", "--resume", "auto")
        self.assertRegex(self.ok(self.train(*flags, "--steps", "2")).stderr, r"tables auto: embedding.weight \S+, because .*softmax.weight \S+")
        config = self.folder / "a" / "config.toml"
        (line,) = [each for each in config.read_text().splitlines() if each.startswith("tables = ")]
        self.assertNotIn("auto", line)
        again = self.ok(self.train(*flags, "--steps", "4"))
        self.assertNotIn("tables auto:", again.stderr)
        self.assertIn(line, config.read_text())
        self.ok(self.train(*lm, "--tables", line.split('"')[1], "--ranks", "2", "--link", "100mbit,50us", "--out", "b", "--steps", "4"))
        self.assertEqual(self.losses("a"), self.losses("b"))


class LauncherTest(TrainTest):
    def setUp(self) -> None:
        super().setUp()
        if "tcp" not in json.loads(self.run_command(WEFT, "info", "--json").stdout)["build"]["transports"]:
            self.skipTest("built without tcp")

    def test_the_same_bits_as_threads_tcp_and_mpi(self) -> None:
        flags = (*TINY, "--steps", "4", "--checkpoint-every", "0")
        self.ok(self.train(*flags, "--ranks", "2", "--out", "threads"))
        self.ok(self.train(*flags, "--out", "tcp", before=(WEFT, "launch", "-n", "2", "--")))
        self.assertEqual(self.losses("threads"), self.losses("tcp"))
        if shutil.which("mpirun"):
            self.ok(self.train(*flags, "--out", "mpi", before=(*MPIRUN, "-n", "2")))
            self.assertEqual(self.losses("threads"), self.losses("mpi"))
        self.refused(*flags, "--ranks", "3", "--out", "x", says="leave --ranks out",
                     before=(WEFT, "launch", "-n", "2", "--"))
        self.refused(*flags, "--out", "tcp", says="has a run already", before=(WEFT, "launch", "-n", "2", "--"))

    def test_ranks_that_disagree(self) -> None:
        """Buckets, steps and meshes are compared: what notices it first is told, on both ranks, and nobody waits for a peer."""
        moe = (*TINY, "--model", "gpt-moe", "--scheme", "dense", "--mesh", "ep=2", "--experts $((4 + 4 * RANK))")
        pipe = (*TINY, "--scheme", "dense", "--accumulate", "2")
        plans = r"rank [01] has another plan of (buckets|the step) \([^)]*\) than rank [01]"
        for flags, says in ((moe, plans),
                            ((*pipe, "--mesh pp=2", "--schedule $(test $RANK = 0 && echo 1f1b || echo gpipe)"), plans),
                            ((*pipe, "--mesh pp=2", "--layers $((4 + RANK))"), plans),
                            ((*pipe, "--mesh pp=2", "--backward-bits $((4 + 4 * RANK))"), plans),
                            # What nobody asked a plan to choose is each rank's own, beside what it chooses.
                            ((*TINY, "--scheme", "powersgd", "--accumulate", "2", "--mesh pp=2", "--backward-rank $((2 + RANK)) --compressed-stages auto"), plans),
                            ((*pipe, "--mesh dp=2", "--heads $((2 + 2 * RANK))"), plans),
                            ((*pipe, "--mesh $(test $RANK = 0 && echo dp=2 || echo pp=2)"), plans)):
            command = " ".join((WEFT, "train", *flags, "--steps 2 --checkpoint-every 0 --out a"))
            with self.subTest(command):
                began = time.monotonic()
                done = self.run_command(WEFT, "launch", "-n", "2", "--", "sh", "-c", "exec " + command)
                self.assertNotEqual(done.returncode, 0, done.stdout)
                self.assertLess(time.monotonic() - began, 20 * FACTOR)  # no deadline was waited for
                for rank in (0, 1):
                    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith(f"[{rank}] ") and "weft: note: " not in line]
                    self.assertRegex(sentence, says)
                shutil.rmtree(self.folder / "a", ignore_errors=True)

    def test_a_launched_run_is_predicted_over_the_link_that_it_measured(self) -> None:
        flags = (*TINY, "--steps", "8", "--scheme", "dense", "--checkpoint-every", "0")
        starts = {"tcp": (WEFT, "launch", "-n", "2", "--")} | ({"mpi": (*MPIRUN, "-n", "2")} if shutil.which("mpirun") else {})
        for name, before in starts.items():
            self.ok(self.train(*flags, "--out", name, before=before))
            summary = json.loads((self.folder / name / "summary.json").read_text())
            self.assertEqual(summary["transport"], name)
            self.assertGreater(summary["predicted_step_seconds"], 0)
            self.assertIsNotNone(summary["exposed_seconds"])

    def kill_rank_1(self, job: subprocess.Popen[str], name: str, after: int) -> None:
        """When the run has a checkpoint and is at least so far."""
        end = time.monotonic() + 30 * FACTOR
        metrics = self.folder / name / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < after:
            self.assertLess(time.monotonic(), end)
            self.assertIsNone(job.poll())
            time.sleep(0.05)
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = entry.read_bytes().split(b"\0")
                command = (entry.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if b"RANK=1" in variables and str(self.folder).encode() in b"\0".join(variables) and b"weft-torch" in command:
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return
        self.fail("rank 1 was not found")

    def start(self, *arguments: str, ranks: int = 3) -> subprocess.Popen[str]:
        return subprocess.Popen([WEFT, "launch", "-n", str(ranks), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env=environment() | {"MARK": str(self.folder)}, cwd=self.folder)

    def test_a_killed_rank_is_named_by_every_survivor_and_the_run_resumes(self) -> None:
        command = ("--", WEFT, "train", *TINY, "--steps", "100000", "--checkpoint-every", "10", "--out", "a")
        job = self.start(*command)
        self.kill_rank_1(job, "a", after=20)
        _, errors = job.communicate(timeout=30 * FACTOR)
        self.assertEqual(job.returncode, 128 + signal.SIGKILL)
        for rank in (0, 2):
            sentences = [line for line in errors.splitlines() if line.startswith(f"[{rank}] ")]
            self.assertEqual(len(sentences), 1, errors)
            self.assertIn("rank 1", sentences[0])
        done = len(self.losses("a"))
        step = int((self.folder / "a/checkpoints/latest").read_text().split("-")[1])
        self.ok(self.train("--resume", "a", "--steps", str(step + 5), "--ranks", "3"))
        self.assertEqual([row["step"] for row in self.metrics("a")], list(range(step + 5)))
        self.assertGreaterEqual(done, 20)

    def test_a_kill_while_delayed_rows_are_under_way_loses_nothing(self) -> None:
        """Rows are split in every step: whenever it is killed, some are on their way or not yet applied."""
        lm = (*TINY, "--model", "lm", "--samples", "16", "--optimizer", "adagrad", "--scheme", "dense", "--tables", "embrace",
              "--tables-split-below", "1")
        job = self.start("--", WEFT, "train", *lm, "--steps", "100000", "--checkpoint-every", "7", "--out", "a")
        self.kill_rank_1(job, "a", after=10)
        _, errors = job.communicate(timeout=30 * FACTOR)
        self.assertEqual(job.returncode, 128 + signal.SIGKILL)
        self.assertIn("rank 1", errors)
        step = int((self.folder / "a/checkpoints/latest").read_text().split("-")[1])
        self.ok(self.train("--resume", "a", "--steps", str(step + 5), "--ranks", "3"))
        self.ok(self.train(*lm, "--steps", str(step + 5), "--ranks", "3", "--checkpoint-every", "0", "--out", "b"))
        self.assertEqual(self.losses("a"), self.losses("b"))
        self.ok(self.train(*lm, "--steps", str(step + 5), "--ranks", "3", "--checkpoint-every", "0", "--seed", "2", "--out", "c"))
        self.assertNotEqual(self.losses("a"), self.losses("c"))  # control

    def test_all_four_systems_together(self) -> None:
        """Experts of four ranks, a table of which rows travel, two stages with factors between them, sparse gradients."""
        moe = (*("16" if before == "--global-batch" else flag for before, flag in zip(("", *TINY), TINY)),
               "--model", "gpt-moe", "--mesh", "dp=4,pp=2,ep=4", "--accumulate", "4", "--untied")
        four = (*moe, "--scheme", "spardl", "--tables", "embrace", "--backward-rank", "2", "--expert-slices", "2", "--compressed-stages", "1")
        self.near_uncompressed(moe, four, ranks=8)
        self.kill_and_resume("killed", 8, *four)

    def test_all_four_systems_beside_a_table_that_stages_share(self) -> None:
        """The first and the last stage have copies of it, summed at once over all of them: no rows travel in its place."""
        flags = tuple("16" if before == "--global-batch" else flag for before, flag in zip(("", *TINY), TINY))
        four = (*flags, "--model", "gpt-moe", "--mesh", "dp=4,pp=2,ep=4", "--accumulate", "2", "--scheme", "spardl", "--backward-rank", "2",
                "--expert-slices", "2", "--tied-sum", "fused", "--compressed-stages", "1")
        self.kill_and_resume("killed", 8, *four)
        steps = str(len(self.losses("killed")))
        self.ok(self.train(*four, "--steps", steps, "--ranks", "8", "--seed", "2", "--out", "other"))
        self.assertNotEqual(self.losses("killed"), self.losses("other"))  # control
        plain = four[:four.index("--scheme")]
        self.near_uncompressed(plain, four, ranks=8)
        config = (self.folder / "killed/config.toml").read_text()
        self.assertIn('tied-sum = "fused"', config)
        self.assertIn("untied = false", config)

    def near_uncompressed(self, plain: tuple[str, ...], four: tuple[str, ...], ranks: int) -> None:
        """A short run ends within the spread of the seeds of the same run with nothing compressed, or a hundredth."""
        ends = []
        for seed in ("1", "2", "3"):
            self.ok(self.train(*plain, "--scheme", "dense", "--ranks", str(ranks), "--steps", "80", "--seed", seed, "--out", "dense" + seed))
            ends.append(sum(self.losses("dense" + seed)[-10:]) / 10)
        self.ok(self.train(*four, "--ranks", str(ranks), "--steps", "80", "--warmup-steps", "40", "--out", "four"))
        losses = self.losses("four")
        spread = max(ends) - min(ends)
        self.assertLess(abs(sum(losses[-10:]) / 10 - ends[0]), max(spread, 0.01 * ends[0]))
        self.assertGreater(losses[0] - losses[-1], 3 * spread)  # control: that far apart is more than nothing learnt

    def kill_and_resume(self, name: str, ranks: int, *flags: str) -> None:
        """Killed as processes, a run says who is gone, and goes on with the losses of one that was not."""
        job = self.start("--", WEFT, "train", *flags, "--steps", "100000", "--checkpoint-every", "5", "--out", name, ranks=ranks)
        self.kill_rank_1(job, name, after=12)
        _, errors = job.communicate(timeout=30 * FACTOR)
        self.assertEqual(job.returncode, 128 + signal.SIGKILL)
        self.assertIn("rank 1", errors)
        step = int((self.folder / name / "checkpoints/latest").read_text().split("-")[1])
        self.ok(self.train("--resume", name, "--steps", str(step + 5), "--ranks", str(ranks)))
        self.ok(self.train(*flags, "--steps", str(step + 5), "--ranks", str(ranks), "--out", "straight"))
        self.assertEqual(self.losses(name), self.losses("straight"))

    def test_launch_starts_again(self) -> None:
        job = self.start("--restarts", "1", "--", WEFT, "train", *TINY, "--steps", "300", "--checkpoint-every", "10",
                         "--out", "a", "--resume", "auto")
        self.kill_rank_1(job, "a", after=15)
        out, errors = job.communicate(timeout=60 * FACTOR)
        self.assertEqual(job.returncode, 0, errors)
        self.assertIn("starting all ranks again (1 of 1)", errors)
        self.assertIn("resumed behind step", out)
        self.assertEqual([row["step"] for row in self.metrics("a")], list(range(300)))


class BadInputTest(TrainTest):
    def test_a_wrong_command_line_is_not_started_again(self) -> None:
        done = self.train("--scheme", "spardel", before=(WEFT, "launch", "-n", "2", "--restarts", "2", "--"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertNotIn("again", done.stderr)

    def test_flags(self) -> None:
        for arguments, says in (
                (("--model", "gtp"), "did you mean 'gpt'"),
                (("--scheme", "spardel"), "did you mean 'spardl'"),
                (("--optimizer", "adamv"), "did you mean 'adam"),
                (("--quotas", "proportionate"), "did you mean 'proportional'"),
                (("--nesterov", "--optimizer", "sgd"), "momentum"), (("--mesh", "dp=3"), "--mesh"[2:]),
                (("--ranks", "0"), "ranks must be 1 to 256"),
                (("--ranks", "257"), "ranks must be 1 to 256"),
                (("--density", "0"), "density"), (("--density", "1.5"), "density"), (("--density", "x"), "density"),
                (("--text", "/no/such/file"), "/no/such/file"),
                ((*TINY, "--width", "65536", "--layers", "96"), "are free"),
                (("--preset", "tiny", "--data", "synthetic", "--synthetic-tokens", "9"), "too few"),
                (("--seed", "-1"), "seed"), (("--seed", "18446744073709551616"), "seed"),
                (("--steps", "0"), "steps"), (("--no-such-flag",), "no-such-flag"),
                (("--link", "fast"), "fast"), (("--resume", "nowhere"), "nowhere"), (("--resume",), "runs/")):
            with self.subTest(arguments):
                self.refused(*arguments, says=says)
        (self.folder / "empty.txt").write_text("")
        self.refused("--text", "empty.txt", says="empty")
        for arguments, says in (((*TINY, "--width", "65536", "--layers", "96"), "are free"),
                                (("--preset", "tiny", "--data", "synthetic", "--synthetic-tokens", "9"), "too few")):
            self.refused(*arguments, says=says, before=(WEFT, "launch", "-n", "2", "--"))
        self.assertEqual([p.name for p in self.folder.iterdir()], ["empty.txt"])  # nothing is left behind

    def test_meshes_and_stages_that_cannot_be(self) -> None:
        tiny = (*TINY, "--layers", "4", "--heads", "4", "--steps", "1", "--out", "a")
        for arguments, says in (
                (("--ranks", "4", "--mesh", "pp=3"), "dp=1 times pp=3 times tp=1 is not the number of ranks, 4"),
                (("--ranks", "4", "--mesh", "dp=4,pp=2"), "dp=4 times pp=2 times tp=1 is not the number of ranks, 4"),
                (("--ranks", "3", "--mesh", "tp=3"), "heads must be a multiple of the 3 tensor-parallel ranks, not 4"),
                (("--ranks", "8", "--mesh", "pp=8"), "layers must be at least 1 for each of 8 stages, not 4"),
                (("--ranks", "4", "--mesh", "pp=4", "--schedule", "interleaved", "--stage-chunks", "2", "--accumulate", "4"), "layers"),
                (("--ranks", "2", "--mesh", "pp=2", "--stage-layers", "4,0"), "--stage-layers '4,0' is no list"),
                (("--ranks", "2", "--mesh", "pp=2", "--stage-layers", "3,2"), "layers of stages are so many for each of 2, together the model's 4"),
                (("--ranks", "2", "--mesh", "pp=2", "--schedule", "interleaved", "--stage-chunks", "2", "--accumulate", "3"),
                 "interleaved takes a multiple of its 2 stages as micro-batches, not 3"),
                (("--ranks", "2", "--mesh", "pp=2", "--schedule", "1f2b"), "did you mean '1f1b'"),
                (("--ranks", "2", "--mesh", "pp=2", "--backward-rank", "-1"), "factors of 1 or more columns, or as they are (0), not -1"),
                (("--ranks", "2", "--mesh", "pp=2", "--tied-sum", "hierarchical"), "tied-sum hierarchical: the 2 ranks"),
                (("--ranks", "2", "--scheme", "powersgd", "--powersgd-rank", "0"), "powersgd-rank must be 1 to 1024")):
            with self.subTest(arguments):
                self.refused(*tiny, *arguments, says=says)
        self.assertEqual(list(self.folder.glob("a/*")), [])  # no run is left behind
        done = self.refused(*tiny, "--mesh", "pp=3", says="[0] weft: ", before=(WEFT, "launch", "-n", "2", "--"))
        self.assertIn("dp=1 times pp=3 times tp=1 is not the number of ranks, 2", done.stderr)

    def test_factors_that_are_no_shorter_are_not_taken(self) -> None:
        """More columns than a matrix has: it travels as it is, to the bit."""
        tiny = (*TINY, "--layers", "4", "--steps", "4", "--accumulate", "2", "--checkpoint-every", "0", "--ranks", "2")
        for flags, knob in ((("--scheme", "dense", "--mesh", "pp=2", "--backward-messages", "all"), "--backward-rank"),
                            (("--scheme", "powersgd", "--mesh", "dp=2"), "--powersgd-rank")):
            for columns in ("2", "1000"):
                self.ok(self.train(*tiny, *flags, knob, columns, "--out", knob + columns))
            dense = ("--scheme", "dense", *flags[2:4])
            self.ok(self.train(*tiny, *dense, "--out", knob))
            self.assertEqual(self.losses(knob + "1000"), self.losses(knob))
            self.assertNotEqual(self.losses(knob + "2"), self.losses(knob))  # control

    def test_a_loss_that_is_not_finite(self) -> None:
        done = self.refused(*TINY, "--ranks", "2", "--steps", "50", "--optimizer", "sgd", "--lr", "1e30", "--out", "a",
                            says="rank")
        self.assertRegex(done.stderr, r"step \d+")

    def test_damaged_and_foreign_checkpoints(self) -> None:
        self.ok(self.train(*TINY, "--ranks", "2", "--steps", "4", "--checkpoint-every", "2", "--out", "a"))
        index = self.folder / "a/checkpoints/step-4/index.safetensors"
        content = index.read_bytes()
        index.write_bytes(content[:-100])  # the last one is truncated: the one before it serves
        done = self.ok(self.train("--resume", "a"))
        self.assertIn("step-4", done.stderr)
        self.assertIn("resumed behind step 2", done.stdout)
        for name in ("step-2/index", "step-4/rank-1-of-2"):
            file = self.folder / f"a/checkpoints/{name}.safetensors"
            damaged = bytearray(file.read_bytes())
            damaged[-7] ^= 1
            file.write_bytes(damaged)
        self.refused("--resume", "a", "--steps", "9", says="no sound checkpoint")
        self.ok(self.train(*TINY, "--ranks", "2", "--steps", "1", "--out", "b"))
        self.refused("--resume", "b", "--steps", "3", "--width", "64", says="another model")
        self.refused("--resume", "b", "--steps", "3", "--optimizer", "sgd", says="optimizer")
        self.ok(self.train(*TINY, "--ranks", "2", "--layers", "4", "--steps", "1", "--out", "deep"))
        for mesh in ("dp=2", "pp=2"):  # a stage has not all names, whatever the model
            self.refused("--resume", "deep", "--steps", "3", "--layers", "2", "--mesh", mesh, says="it has 52 tensors, not 28")

    def test_a_disk_that_is_full(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("mounting a small disk needs root")
        small = self.folder / "small"
        small.mkdir()
        if self.run_command("mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)).returncode != 0:
            self.skipTest("no disk can be mounted here")
        self.addCleanup(self.run_command, "umount", "-l", str(small))
        self.ok(self.train(*TINY, "--ranks", "2", "--steps", "2", "--out", "small/a"))
        free = os.statvfs(small)
        (small / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_frsize - 300_000))
        self.refused("--resume", "small/a", "--steps", "4", says="No space left")
        (small / "ballast").unlink()
        self.assertIn("resumed behind step 2", self.ok(self.train("--resume", "small/a", "--steps", "4")).stdout)

    def test_the_command_without_torch(self) -> None:
        alone = self.folder / "weft"
        shutil.copy(WEFT, alone)
        done = self.run_command(str(alone), "train", "--ranks", "2")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("make build", done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
