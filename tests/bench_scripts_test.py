#!/usr/bin/env python3
"""The measuring scripts of bench/: bench_scripts_test.py [PATH_TO_WEFT] [unittest arguments].

What they compute from runs is compared with plain references; with PATH_TO_WEFT, torch and safetensors also the Python model
with weft's: the same weights give the same loss. Parts that cannot run say so.
"""
from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.dont_write_bytecode = True
BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
WEFT = str(Path(sys.argv.pop(1)).resolve()) if len(sys.argv) > 1 and Path(sys.argv[1]).is_file() else ""

import curves  # noqa: E402
import plot_convergence  # noqa: E402
import rows  # noqa: E402


def script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(BENCH / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


against = script("against_ddp")
convergence = script("convergence")
energy = script("energy")
quality = script("experts_quality")


def run(recipe: str, seed: int, losses: list[float], **more: Any) -> rows.Row:
    return {"recipe": recipe, "density": None, "seed": seed, "loss": losses, "seconds": [1.0] * len(losses),
            "bytes": [100] * len(losses)} | more


class EnergyTest(unittest.TestCase):
    def cell(self, returned: Callable[[int], float]) -> str:
        def run(options: argparse.Namespace, method: str, ranks: int, before: int, k: int) -> rows.Row:
            return {"k": k, "entries_out": round(returned(k)), "energy_of_best": k / 10_000}

        with mock.patch.object(energy, "run", run):
            return energy.cell(argparse.Namespace(entries=1000), "any", 8, 15)

    def test_each_method_gets_the_k_that_returns_as_many_entries(self) -> None:
        self.assertEqual(self.cell(lambda k: k), "0.100")
        self.assertEqual(self.cell(lambda k: 8 * k), "0.013 (k 125)")
        self.assertEqual(self.cell(lambda k: 5 * k**0.8), "0.076 (k 761)")  # 1256, 1046, 1009
        self.assertTrue(self.cell(lambda k: 3000).endswith("*"), "control: one that no k moves")


class ExpertsQualityTest(unittest.TestCase):
    def options(self, *arguments: str) -> argparse.Namespace:
        options: argparse.Namespace = quality.parse(list(arguments))
        return options

    def rows(self, flops: float = 1e6) -> list[rows.Row]:
        return [{"variant": variant, "seed": seed, "loss": [5.0 - 0.01 * step - 0.1 * (variant == "experts") for step in range(40)],
                 "load": [[1.5, 1.25]] * 40 if variant == "experts" else [[]] * 40,
                 "flops_per_token": flops if variant == "experts" else 1e6} for variant in ("dense", "experts") for seed in (1, 2)]

    def test_flops_are_those_of_a_token(self) -> None:
        # 10 tokens: 3 and 4 us of blocks, 1 us of the gate, 0.5 us for each row of two choices, at 1 GFLOP/s.
        outline = {"blocks": [{"forward_seconds": 3e-6}, {"forward_seconds": 4e-6}], "tokens_per_rank": 10, "flops_per_second": 1e9,
                   "experts": [{"gate_forward_seconds": 1e-6, "shared_forward_seconds": 0.0, "merge_forward_seconds": 0.0,
                                "row_forward_seconds": 0.5e-6, "choices": 2}]}
        self.assertAlmostEqual(quality.flops_per_token(outline), (3000 + 4000 + 1000) / 10 + 2 * 500)
        self.assertAlmostEqual(quality.flops_per_token(outline | {"experts": []}), 700)

    def test_only_equal_work_is_compared(self) -> None:
        with mock.patch("builtins.print") as printed:
            self.assertTrue(quality.report(self.rows(1.01e6), self.options()))
            self.assertIn("| experts | 2 | 1.010 M | ", printed.call_args_list[1].args[0])
            self.assertFalse(quality.report(self.rows(1.1e6), self.options()), "control: a tenth more")
            self.assertFalse(quality.report(self.rows()[:2], self.options()), "control: dense alone")

    def test_curves_and_loads_are_drawn(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch("builtins.print"):
            options = self.options("--svg", f"{folder}/a/b.svg")
            quality.draw(self.rows(), options)
            drawn = options.svg.read_text()
        xml.etree.ElementTree.fromstring(drawn)
        self.assertEqual(drawn.count("<polyline"), 4)  # two losses, two layers
        self.assertEqual(quality.load_lines(self.rows())[0].points[0], (1.0, 1.5))


class RowsTest(unittest.TestCase):
    def test_the_interval_holds_the_median_in_95_percent_and_a_tighter_one_does_not(self) -> None:
        # Coverage of ranks (j, n + 1 - j) by counting all outcomes above or below the true median.
        def coverage(n: int, j: int) -> float:
            return sum(math.comb(n, k) for k in range(j, n - j + 1)) / 2**n

        for n in (6, 15, 16, 45):
            _, low, high = rows.median_interval(list(range(1, n + 1)))
            self.assertEqual(low + high, n + 1)
            self.assertGreaterEqual(coverage(n, low), 0.95)
            self.assertLess(coverage(n, low + 1), 0.95)
        self.assertEqual(rows.median_interval([3, 1, 2]), (2, 1, 3))

    def test_durations_have_three_digits_in_the_unit_that_they_round_to(self) -> None:
        texts = [rows.duration_text(s) for s in (0.0373, 1.2984, 0.9996, 0.99949, 3.2e-6, 12.34, 1234.5, 5e-9, 0)]
        self.assertEqual(texts, ["37.3 ms", "1.30 s", "1.00 s", "999 ms", "3.20 us", "12.3 s", "1,230 s", "5.00 ns", "0 s"])

    def test_a_second_run_goes_on_behind_a_torn_line(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            first = rows.Rows(path, ("system", "round"))
            first.add({"system": "ddp", "round": 1, "seconds": [1]})
            with path.open("a") as out:
                out.write('{"system": "ddp", "rou')
            second = rows.Rows(path, ("system", "round"))
            self.assertTrue(second.has({"system": "ddp", "round": 1}))
            self.assertFalse(second.has({"system": "ddp", "round": 2}))
            second.add({"system": "ddp", "round": 2, "seconds": [2]})
            self.assertEqual([row["round"] for row in rows.Rows(path, ("system", "round"))], [1, 2])


class AgainstTest(unittest.TestCase):
    def test_a_step_of_the_job_ends_with_its_last_rank(self) -> None:
        self.assertEqual(against.of_the_job([[1, 5], [4, 2], [3, 3]]), [4, 2])
        self.assertEqual(against.of_the_job([[3, 1, 3, 1], [1, 3, 1, 3]]), [3, 1, 3, 1])  # and not 3 every time
        with self.assertRaises(ValueError):
            against.of_the_job([[1, 2], [1]])

    def test_a_run_of_weft_counts_the_job_and_no_warm_up(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            steps = [9.0, 9.0, 9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 7.0]
            Path(folder, "metrics.jsonl").write_text("".join(json.dumps(
                {"seconds": s, "waited_seconds": s / 2, "loss": 1.0}) + "\n" for s in steps) + '{"seconds": 5')
            summary = {"step_seconds": [9.0] * 3 + [3.0] * 5 + [7.0], "payload_bytes_per_step": 10, "parameters": 7}
            Path(folder, "summary.json").write_text(json.dumps(summary))
            row = against.weft_row(Path(folder))
            self.assertEqual(row["seconds"], [3.0] * 5)  # rank 0's are 2
            self.assertEqual(row["waited_seconds"], 1.0)

    def test_busy_time_counts_overlapping_operations_once(self) -> None:
        draw = random.Random(1)
        events, covered = [], set()
        for number in range(60):
            step, begin = number // 10, 1000 * (number // 10) + draw.randrange(800)
            end = begin + draw.randrange(1, 100)
            for phase, at in (("b", begin), ("e", end)):
                events.append({"ph": phase, "id": str(number), "ts": at, "name": "gradients of bucket", "args": {"step": step}})
            if 2 <= step < 5:
                covered |= set(range(begin, end))
        self.assertAlmostEqual(against.busy_seconds(events, 2, -1), 1e-6 * len(covered) / 3)
        self.assertNotAlmostEqual(against.busy_seconds(events, 2, 6), 1e-6 * len(covered) / 3)

    def test_bars_fail_where_weft_is_slower(self) -> None:
        def result(name: str, seconds: float) -> Any:
            (system,) = [s for s in against.SYSTEMS if s.name == name]
            return against.Result(system, seconds, 0.99 * seconds, 1.01 * seconds, [{"round": 1, "seconds": [seconds] * 15,
                                                                                     "parameters": 5}])

        fast = {"ddp": result("ddp", 6), "weft-dense": result("weft-dense", 5), "weft-spardl": result("weft-spardl", 0.9)}
        self.assertEqual([line.endswith("holds") for line in against.verdicts(fast, fast["ddp"], 6.0)], [True, True])
        slow = fast | {"weft-spardl": result("weft-spardl", 1.1)}
        self.assertEqual([line.endswith("FAILS") for line in against.verdicts(slow, slow["ddp"], 6.0)], [False, True])
        other = fast | {"weft-spardl": fast["weft-spardl"]._replace(rows=[{"round": 1, "seconds": [1] * 15, "parameters": 6}])}
        self.assertIn("NOT THE SAME MODEL", against.verdicts(other, other["ddp"], 6.0)[-1])

    def test_points_are_whole_sequences(self) -> None:
        point = against.point_of("1gbit:256")
        self.assertEqual((point.length, point.sequences), (128, 2))
        with self.assertRaises(argparse.ArgumentTypeError):
            against.point_of("1gbit:200")


class CurvesTest(unittest.TestCase):
    def test_the_gap_is_taken_seed_by_seed(self) -> None:
        series = [run("dense", 1, [8.0] + [4.0] * 9), run("dense", 2, [8.0] + [5.0] * 9),
                  run("sparse", 1, [8.0] + [4.4] * 9, bytes=[20] * 10, density=0.1),
                  run("sparse", 2, [8.0] + [5.5] * 9, bytes=[30] * 10, density=0.1),
                  run("sparse", 3, [8.0] + [1.0] * 9, density=0.1)]  # dense has no such seed
        dense, sparse = curves.at_equal_steps(series)
        self.assertEqual((dense.gap, dense.bytes_share), (0, 1))
        self.assertEqual(sparse.seeds, 2)
        self.assertAlmostEqual(sparse.gap, 0.1)
        self.assertAlmostEqual(sparse.bytes_share, 0.25)
        self.assertEqual(curves.best_within_bytes([dense, sparse]), sparse)
        self.assertEqual(curves.best_within_bytes([sparse, sparse._replace(density=None, gap=0)]), sparse)
        self.assertIsNone(curves.best_within_bytes([dense, sparse._replace(bytes_share=0.26)]))
        self.assertAlmostEqual(curves.dense_fall(series), 1 - 5 / 8)
        self.assertAlmostEqual(curves.seed_spread(series), 1 / 4.5)

    def test_equal_time_counts_only_steps_that_ended_in_time(self) -> None:
        slow = run("dense", 1, [float(10 - i) for i in range(10)], seconds=[2.0] * 10)
        fast = run("sparse", 1, [10 - i / 4 for i in range(40)], seconds=[0.5] * 40)
        dense, sparse = curves.at_equal_time([slow, fast], [4, 10.9])
        self.assertEqual((dense.steps, sparse.steps), (5, 21))
        self.assertEqual(dense.losses, [None, statistics.fmean([10, 9, 8, 7, 6])])
        self.assertEqual(sparse.losses[1], statistics.fmean(10 - i / 4 for i in range(16, 21)))
        self.assertEqual((dense.lower, sparse.lower), (0, 1))

    def test_curves_differ_in_one_bit(self) -> None:
        whole = run("dense", 1, [3.0, 2.0, 1.0])
        self.assertTrue(curves.same_curve(run("dense", 1, [3.0, 2.0]), whole))
        self.assertFalse(curves.same_curve(run("dense", 1, [3.0, math.nextafter(2.0, 3)]), whole))

    def test_recipes_have_names_of_their_own_and_share_what_must_be_equal(self) -> None:
        for optimizer in ("adamw", "sgd"):
            made = convergence.recipes(300, optimizer)
            self.assertEqual(len({recipe.name for recipe in made}), len(made))
            self.assertEqual(made[0].name, curves.DENSE)
            for recipe in made:
                self.assertEqual("--warmup-steps 100" in recipe.flags, "-warm" in recipe.name, recipe)
                self.assertEqual("--clip-norm 1" in recipe.flags, optimizer == "sgd", recipe)
                self.assertEqual(recipe.density is not None, "spardl" in recipe.name, recipe)


class PlotTest(unittest.TestCase):
    def series(self, kind: str) -> list[rows.Row]:
        shape = {"kind": kind, "link": "100mbit,50us"}
        names = [("dense", None), ("powersgd-4", None), ("spardl-0.1", 0.1), ("spardl-0.01", 0.01), ("spardl-0.01-warm", 0.01)]
        return [run(name, seed, [9.0 / (1 + i / 50) for i in range(100)], density=density, **shape)
                for (name, density), seed in itertools.product(names, (1, 2))]

    def test_the_picture_is_whole(self) -> None:
        text = plot_convergence.picture(self.series("steps"), self.series("wall"), "a < b")
        root = xml.etree.ElementTree.fromstring(text)
        curve = [e for e in root.iter() if e.tag.endswith("polyline")]
        self.assertEqual(len(curve), 5 + 10 + 3)  # means over seeds; each seed; constant, warm, powersgd
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for line in curve:
            for pair in line.get("points", "").split():
                x, y = map(float, pair.split(","))
                self.assertTrue(0 <= x <= width and 0 <= y <= height, pair)

    def test_running_means(self) -> None:
        losses = [float(i) for i in range(200)]
        self.assertEqual(plot_convergence.smooth(losses)[-1], curves.end_loss(losses))
        self.assertEqual(plot_convergence.smooth(losses)[:2], [0, 0.5])


@unittest.skipUnless(WEFT and importlib.util.find_spec("torch") and importlib.util.find_spec("safetensors"),
                     "needs PATH_TO_WEFT, torch and safetensors")
class ModelTest(unittest.TestCase):
    """bench/ddp.py's model is weft's gpt: its loss with the weights of a checkpoint is the one that weft got with them."""

    LENGTH, SEQUENCES = 16, 12

    def losses(self) -> tuple[float, float]:
        """Weft's loss in step 1, in which the batch is the whole text, and the Python model's on it. (Step 0 makes the weights
        so large that an activation's shape counts.)"""
        import safetensors.torch
        import torch

        import ddp

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text = "".join(random.Random(1).choices("abcdefgh \n", k=self.LENGTH * self.SEQUENCES + 1))
            (folder / "text").write_text(text)
            done = subprocess.run(
                [WEFT, "train", "--model", "gpt", "--preset", "tiny", "--dropout", "0", "--text", "text", "--tokens", "bytes",
                 "--ranks", "1", "--length", str(self.LENGTH), "--global-batch", str(self.SEQUENCES), "--steps", "2",
                 "--scheme", "dense", "--checkpoint-every", "1", "--lr", "0.05", "--out", "run"],
                cwd=folder, env=rows.plain_environment(), capture_output=True, text=True, check=False, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr)
            theirs = rows.read_metrics(folder / "run")[1]["loss"]
            saved = safetensors.torch.load_file(folder / "run/checkpoints/step-1/rank-0-of-1.safetensors")
        options = argparse.Namespace(vocabulary=256, context=32, width=32, layers=2, heads=2, dropout=0.0)
        model = ddp.Gpt(options)
        prefix = "model/value/"
        weights = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
        model.load_state_dict(weights)  # strict: names and shapes are the same
        tokens = torch.tensor(list(text.encode()))
        with torch.no_grad():
            return theirs, model(tokens[:-1].view(-1, self.LENGTH), tokens[1:].view(-1, self.LENGTH)).item()

    def test_the_same_weights_give_the_same_loss(self) -> None:
        theirs, ours = self.losses()
        # Both add 192 losses near 5 in float32; the batch's order differs: 192 roundings of 2^-24 at most.
        self.assertLess(abs(ours / theirs - 1), 192 * 2**-24)

    def test_another_activation_would_be_seen(self) -> None:
        import torch.nn.functional as F

        gelu = F.gelu
        F.gelu = lambda x, approximate: F.relu(x)
        try:
            theirs, ours = self.losses()
        finally:
            F.gelu = gelu
        self.assertGreater(abs(ours / theirs - 1), 192 * 2**-24)


@unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
class LazyErrorTest(unittest.TestCase):
    """bench/lazy_error says of what was drawn apart that it is, and of what was not, that it is not."""

    def values(self, what: str, shared: float) -> tuple[float, float, float, float]:
        import torch

        lazy = script("lazy_error")
        torch.manual_seed(2)
        e, x = (torch.randn(24, 5, 8, 6) for _ in range(2))
        change = x[:, 1:] - x[:, :-1] + shared * e[:, :-1]
        values = lazy.cosines(e[:, :-1], change) if what == "cosines" else lazy.products(e[:, :-1], change)
        if shared == 0:  # by the definition, of a pair of two steps
            left, right = e[3, 2], change[9, 2]
            by_hand = (left * right).sum() if what == "cosines" else (right.T @ left).norm()
            self.assertAlmostEqual(values[2, 3, 9].item(), (by_hand / (left.norm() * right.norm())).item(), places=5)
        return lazy.beside_permutations(values, 8, 400)

    def test_pairs_that_know_nothing_of_each_other_are_inside(self) -> None:
        for what in ("cosines", "products"):
            here, mean, low, high = self.values(what, 0)
            self.assertTrue(low <= here <= high and low < mean < high, what)
            here, _, low, high = self.values(what, 0.5)
            self.assertGreater(here, high, "control")

    def test_every_step_meets_another_one_near_it(self) -> None:
        import torch

        lazy = script("lazy_error")
        for steps in (2, 9, 160):
            for seed in range(5):
                order = lazy.other_steps(steps, 10, torch.Generator().manual_seed(seed)).tolist()
                self.assertEqual(sorted(order), list(range(steps)))
                self.assertTrue(all(0 < abs(i - j) < 10 for i, j in enumerate(order)))


if __name__ == "__main__":
    unittest.main()
