#!/usr/bin/env python3
"""The weft command as a user runs it: cli_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
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
FAMILIES = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
FIELDS = {"family", "algorithm", "transport", "ranks", "bytes", "seconds_median", "seconds_p99", "payload_bytes_per_rank",
          "formula_bytes_per_rank", "rounds", "formula_rounds", "ideal_seconds", "efficiency", "correct", "simulated"}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))  # a sanitizer makes everything slower
Row = dict[str, Any]


def environment(**extra: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | extra


def run(*command: str, timeout: float = 60, **extra: str) -> subprocess.CompletedProcess[str]:
    timeout *= FACTOR
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(**extra), check=False)


def weft(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return run(WEFT, *arguments, **extra)


def built(transport: str) -> bool:
    return transport in json.loads(weft("info", "--json").stdout)["build"]["transports"]


class CliTest(unittest.TestCase):
    def bench(self, *arguments: str, **extra: str) -> list[Row]:
        done = weft("bench", *arguments, "--json", **extra)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.rows(done.stdout)

    def rows(self, text: str) -> list[Row]:
        rows = [json.loads(line) for line in text.splitlines()]  # fails if anything but data is there
        self.assertTrue(rows)
        return rows

    def assert_as_formula(self, rows: list[Row]) -> None:
        for row in rows:
            self.assertLessEqual(FIELDS, row.keys())
            self.assertTrue(row["correct"], row)
            self.assertEqual(row["payload_bytes_per_rank"], row["formula_bytes_per_rank"], row)
            self.assertEqual(row["rounds"], row["formula_rounds"], row)
            self.assertLessEqual(row["seconds_median"], row["seconds_p99"])
            if row["efficiency"] is not None:
                self.assertAlmostEqual(row["efficiency"], row["ideal_seconds"] / row["seconds_median"])


class InfoTest(CliTest):
    def test_lists_settings_and_algorithms(self) -> None:
        info = json.loads(weft("info", "--json").stdout)
        self.assertIn("threads", info["build"]["transports"])
        self.assertIn("WEFT_TOKEN", {row["variable"] for row in info["settings"]})
        self.assertLessEqual(set(FAMILIES), {row["family"] for row in info["algorithms"]})
        text = weft("info").stdout
        for row in info["settings"]:
            self.assertIn(row["variable"], text)

    def test_lists_ways_of_tables(self) -> None:
        ways = {row["way"] for row in json.loads(weft("info", "--json").stdout)["tables"]}
        self.assertLessEqual({"dense", "push-pull", "allgather", "allgather-raw", "parallax", "parallax-pushed", "hashed", "alltoall",
                              "embrace"}, ways)
        for way in ways:
            self.assertIn(way, weft("info").stdout)

    def test_lists_schemes_that_train(self) -> None:
        schemes = json.loads(weft("info", "--json").stdout)["schemes"]
        self.assertLessEqual({"dense", "dense-bf16", "spardl", "topka", "powersgd"}, {row["scheme"] for row in schemes})
        text, help_text = weft("info").stdout, weft("train", "--help").stdout
        flags = set(re.findall(r"--([a-z-]+)", help_text))
        plan = ("plan", "--model", "gpt", "--preset", "tiny", "--ranks", "2", "--link", "100mbit,50us", "--json")
        for row in schemes:
            self.assertIn(row["scheme"], text)
            self.assertIn(row["summary"], text)
            self.assertLessEqual(set(row["options"].split(", ")), flags, row)
            done = weft(*plan, "--scheme", row["scheme"])
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(row["scheme"], {planned["scheme"] for planned in json.loads(done.stdout)["rows"]}, done.stdout)
        self.assertEqual(weft(*plan, "--scheme", "none-of-them").returncode, 2)  # control

    def test_a_setting_from_the_environment_and_never_the_token(self) -> None:
        token = "0123456789abcdef0123456789abcdef-secret"
        for arguments in (["info"], ["info", "--json"]):
            done = weft(*arguments, WEFT_TOKEN=token, WEFT_HOLD_LIMIT="77ms")
            self.assertIn("77 ms", done.stdout)
            self.assertNotIn(token, done.stdout + done.stderr)
        self.assertEqual(weft("info", WEFT_HOLD_LIMT="77ms").returncode, 2)

    def test_version_and_help(self) -> None:
        self.assertRegex(weft("--version").stdout, r"^weft \d+\.\d+\.\d+\n$")
        for verb in ([], ["info"], ["doctor"], ["bench"], ["launch"]):
            done = weft(*verb, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertRegex(done.stdout, "Usage|usage")


class DoctorTest(CliTest):
    def test_says_what_works_and_what_to_do(self) -> None:
        start = time.monotonic()
        done = weft("doctor", "--json")
        self.assertLess(time.monotonic() - start, 20)
        rows = {row["what"]: row for row in self.rows(done.stdout)}
        self.assertEqual(done.returncode, 0 if all(row["ok"] for row in rows.values()) else 1)
        for row in rows.values():
            self.assertTrue(row["ok"] or row["advice"], row)
        self.assertGreater(rows["memory copy"]["bytes_per_second"], 0)
        self.assertGreater(rows["ping-pong, threads"]["seconds"], 0)


class BenchTest(CliTest):
    def test_bytes_and_rounds_are_the_formulas_on_threads(self) -> None:
        for family in FAMILIES:
            for ranks in ("1", "3", "4"):
                rows = self.bench(family, "--ranks", ranks, "--iterations", "2", "--bytes", "4,52,4096,40012")
                self.assert_as_formula(rows)
                self.assertEqual({row["bytes"] for row in rows}, {4, 52, 4096, 40012})
                self.assertEqual({row["ideal_seconds"] for row in rows}, {None})

    def test_bytes_and_rounds_are_the_formulas_on_sim(self) -> None:
        for family in FAMILIES:
            for ranks in ("2", "5", "8", "33"):
                rows = self.bench(family, "--transport", "sim", "--ranks", ranks, "--bytes", "4,1028,65536")
                self.assert_as_formula(rows)
                self.assertTrue(all(row["simulated"] for row in rows))

    def test_sim_repeats_itself_and_stays_above_the_ideal(self) -> None:
        case = ("allreduce", "--transport", "sim", "--ranks", "8", "--link", "1gbit,50us", "--bytes", "1MiB..4MiB")
        first = self.bench(*case)
        self.assertEqual(first, self.bench(*case))
        for row in first:
            self.assertLessEqual(row["efficiency"], 1.0)
        self.assertGreater(max(row["efficiency"] for row in first), 0.9)

    def test_byte_scale_changes_the_memory_and_not_the_bytes(self) -> None:
        case = ("allgather", "--transport", "sim", "--ranks", "16", "--link", "1gbit,50us", "--bytes", "64KiB")
        plain, scaled = self.bench(*case), self.bench(*case, "--byte-scale", "64")
        for a, b in zip(plain, scaled, strict=True):
            self.assertEqual((a["algorithm"], a["payload_bytes_per_rank"]), (b["algorithm"], b["payload_bytes_per_rank"]))
            self.assertAlmostEqual(a["seconds_median"], b["seconds_median"], delta=0.02 * a["seconds_median"])

    def test_every_element_type(self) -> None:
        for dtype in ("float32", "float64", "bfloat16", "float16", "int32", "int64"):
            self.assert_as_formula(self.bench("allreduce", "--dtype", dtype, "--bytes", "1000", "--iterations", "2"))
        self.assert_as_formula(self.bench("broadcast", "--dtype", "bytes", "--bytes", "1001", "--iterations", "2"))

    def test_more_ranks_than_cores(self) -> None:
        for family in FAMILIES:
            self.assert_as_formula(self.bench(family, "--ranks", "8", "--bytes", "2KiB", "--iterations", "5"))

    def test_a_link_bounds_the_time(self) -> None:
        rows = self.bench("allreduce", "--link", "1gbit,50us", "--bytes", "1MiB", "--iterations", "5")
        self.assert_as_formula(rows)
        for row in rows:  # ideal: 2 n (P-1)/P bytes at 125 MB/s
            self.assertAlmostEqual(row["ideal_seconds"], 2 * 2**20 * 3 / 4 / 125e6)
            self.assertLess(row["efficiency"], 1.05)

    def test_nodes_share_a_port(self) -> None:
        link = ("--ranks", "4", "--nodes", "2", "--link", "100mbit,50us", "--scale-up", "1gbit")
        rows = self.bench("alltoall", *link, "--bytes", "16KiB", "--iterations", "3")
        self.assert_as_formula(rows)
        self.assertIn("hierarchical", {row["algorithm"] for row in rows})
        self.assertAlmostEqual(rows[0]["ideal_seconds"], 2 * 2 * 16384 / 12.5e6)

    def test_a_wrong_result_is_seen(self) -> None:
        for where in (["--transport", "threads"], ["--transport", "sim"]):
            for family in FAMILIES:
                done = weft("bench", family, *where, "--bytes", "4KiB", "--iterations", "1", "--json", "--spoil-result")
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertFalse(any(row["correct"] for row in self.rows(done.stdout)))

    def test_auto_is_marked_and_can_be_asked_for(self) -> None:
        rows = self.bench("allreduce", "--bytes", "1KiB", "--transport", "sim")
        auto = [row["algorithm"] for row in rows if row["auto"]]
        self.assertEqual(len(auto), 1)
        asked = self.bench("allreduce", "--bytes", "1KiB", "--transport", "sim", "--algorithm", "auto")
        self.assertEqual([row["algorithm"] for row in asked], auto)

    @unittest.skipIf(FACTOR != 1, "a sanitizer takes memory of its own")
    def test_an_all_gather_of_a_thousand_simulated_ranks_fits_into_2_gib(self) -> None:
        arguments = ("bench", "allgather", "--transport", "sim", "--ranks", "1024", "--bytes", "1KiB", "--algorithm", "bruck")
        with subprocess.Popen((WEFT, *arguments), stdout=subprocess.DEVNULL, env=environment()) as job:
            _, status, usage = os.wait4(job.pid, 0)
            job.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(job.returncode, 0)
        gib = usage.ru_maxrss / 2**20
        self.assertGreater(gib, 1)  # a thousand results of 1 MiB
        self.assertLess(gib, 1.5)

    def test_priority(self) -> None:
        row = self.bench("priority", "--iterations", "3", "--bytes", "256KiB")[0]
        for name in ("idle_seconds", "priority_seconds", "fifo_seconds"):
            self.assertGreater(row[name], 0)
        self.assertTrue(row["correct"])

    def test_priority_overtakes_in_virtual_time(self) -> None:
        row = self.bench("priority", "--iterations", "5", "--transport", "sim")[0]
        self.assertLess(row["priority_ratio"], 1.3)
        self.assertGreater(row["fifo_ratio"], 1.3)

    def test_overhead(self) -> None:
        row = self.bench("overhead", "--iterations", "20")[0]
        self.assertTrue(row["correct"])
        self.assertAlmostEqual(row["added_seconds"], row["engine_seconds"] - row["bare_seconds"])

    def test_the_table_has_a_row_for_each_algorithm(self) -> None:
        done = weft("bench", "allreduce", "--bytes", "4KiB", "--iterations", "2")
        self.assertEqual(done.stderr, "")
        for name in ("ring", "recursive_doubling", "rabenseifner", "direct", "median", "docs/measuring.md"):
            self.assertIn(name, done.stdout)

    def test_output_that_cannot_be_written_is_a_failure(self) -> None:
        for verb in (["info"], ["bench", "allreduce", "--bytes", "1KiB", "--iterations", "1", "--json"]):
            with open("/dev/full", "w") as full:
                ended = subprocess.run([WEFT, *verb], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertNotEqual(ended.returncode, 0)
            self.assertIn("could not be written", ended.stderr)

    def test_trace_that_cannot_be_written_is_said_at_once(self) -> None:
        done = weft("bench", "allreduce", "--trace", "/nonexistent/trace.json")
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stdout, "")
        self.assertIn("cannot be written", done.stderr)

    def test_processes_leave_traces_of_their_own(self) -> None:
        if not built("tcp"):
            self.skipTest("no tcp transport")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.bench("allreduce", "--transport", "tcp", "--ranks", "2", "--bytes", "64", "--iterations", "1", "--trace",
                       str(path))
            self.assertEqual(sorted(p.name for p in Path(folder).iterdir()), ["trace.json.rank0", "trace.json.rank1"])

    def test_trace(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for transport in ("threads", "sim"):
                path = str(Path(folder) / "trace.json")
                self.bench("allreduce", "--transport", transport, "--bytes", "64KiB", "--iterations", "1", "--trace", path)
                trace = json.loads(Path(path).read_text())
                self.assertTrue(trace["traceEvents"] if isinstance(trace, dict) else trace)


class SparseTest(CliTest):
    CASE = ("sparse_allreduce", "--length", "6000", "--density", "0.02", "--iterations", "2")
    ROWS = {"spardl", "topka", "topkdsa", "gtopk", "oktopk", "dense", "dense-bf16"}

    def assert_sound(self, rows: list[Row]) -> None:
        for row in rows:
            self.assertLessEqual(FIELDS | {"entries_out", "captured_energy", "select_seconds", "wire_seconds", "mass_error",
                                           "bytes_per_entry", "formula_is_bound", "k"}, row.keys())
            self.assertTrue(row["correct"], row)
            self.assertGreater(row["captured_energy"], 0)
            self.assertGreaterEqual(row["captured_energy"], row["energy_share"])
            self.assertLessEqual(row["energy_of_best"], 1.0001)
            if row["algorithm"] in ("spardl", "gtopk"):  # the others may choose more than k
                self.assertLessEqual(row["captured_energy"], 1.0001)
            if row["entries_out"] == row["k"]:
                self.assertAlmostEqual(row["energy_of_best"], row["captured_energy"], places=9)
            elif row["entries_out"] > row["k"]:
                self.assertLess(row["energy_of_best"], row["captured_energy"])
            # dense-bf16 rounds its sums, to 8 bits at each addition, and nobody keeps what that loses
            self.assertLess(row["mass_error"], 0.05 if row["algorithm"] == "dense-bf16" else 1e-5, row)
            self.assertGreater(row["entries_out"], 0)
            self.assertGreater(row["wire_seconds"], 0)
            if row["algorithm"] == "oktopk":
                continue  # settles first
            if row["formula_is_bound"]:
                self.assertLessEqual(row["payload_bytes_per_rank"], row["formula_bytes_per_rank"], row)
            else:
                self.assertEqual(row["payload_bytes_per_rank"], row["formula_bytes_per_rank"], row)
                self.assertEqual(row["rounds"], row["formula_rounds"], row)

    def test_every_row_on_threads_and_sim(self) -> None:
        for transport in ("threads", "sim"):
            for ranks in ("3", "4"):
                rows = self.bench(*self.CASE, "--transport", transport, "--ranks", ranks, "--codec", "coo", "--teams", "1")
                self.assertEqual({row["algorithm"] for row in rows}, self.ROWS)
                self.assert_sound(rows)
                of = {row["algorithm"]: row for row in rows}
                self.assertFalse(of["spardl"]["formula_is_bound"])
                self.assertEqual(of["spardl"]["entries_out"], of["spardl"]["k"])
                self.assertEqual(of["spardl"]["k"], 120)
                self.assertAlmostEqual(of["dense"]["energy_share"], 1, places=6)
                self.assertGreater(of["dense"]["captured_energy"], 1)
                for row in rows:
                    self.assertLessEqual(row["seconds_low"], row["seconds_median"])
                    self.assertLessEqual(row["seconds_median"], row["seconds_high"])
                    self.assertEqual(row["simulated"], transport == "sim")
                    self.assertEqual(row["select_seconds"] is None, transport == "sim")

    def test_oktopk_settles(self) -> None:
        row = self.bench(*self.CASE, "--transport", "sim", "--algorithm", "oktopk", "--codec", "coo", "--steps-before", "70")[0]
        self.assert_sound([row])
        self.assertTrue(2 / 3 * row["k"] <= row["entries_out"] <= 4 / 3 * row["k"], row)
        self.assertLessEqual(row["rounds"], row["formula_rounds"])  # balancing sends no empty lists
        # Its formula is for k selected and k in the result; both are at most 4k/3.
        self.assertLessEqual(row["payload_bytes_per_rank"], 4 / 3 * row["formula_bytes_per_rank"])

    def test_shifted_draws_are_others_each_step(self) -> None:
        case = ("sparse_allreduce", "--length", "60000", "--density", "0.02", "--iterations", "2", "--algorithm", "spardl", "--steps-before", "10")
        drawn, shifted = (self.bench(*case, "--transport", "sim", *flags)[0] for flags in ((), ("--shifted-draws",)))
        self.assert_sound([drawn, shifted])
        self.assertEqual((drawn["shifted_draws"], shifted["shifted_draws"]), (False, True))
        # Were it the same vector each step, residuals would grow in the same places and the sum's largest entries hold nearly everything.
        self.assertAlmostEqual(shifted["energy_share"] / drawn["energy_share"], 1, delta=0.1)
        on_threads = self.bench(*case, "--transport", "threads", "--shifted-draws")[0]
        self.assertAlmostEqual(shifted["captured_energy"], on_threads["captured_energy"], places=12)

    def test_codecs_teams_rules_and_blocks(self) -> None:
        spardl = (*self.CASE, "--algorithm", "spardl", "--transport", "sim")
        for codec in ("coo", "packed", "packed-bf16"):
            for more in (["--ranks", "8", "--teams", "4"], ["--ranks", "6", "--teams", "3"],
                         ["--ranks", "8", "--teams", "2", "--gather", "b-sag"], ["--blocks", "contiguous"],
                         ["--distribution", "heavy", "--residual", "drop"]):
                self.assert_sound(self.bench(*spardl, "--codec", codec, *more))
        sizes = [self.bench(*spardl, "--codec", codec)[0]["payload_bytes_per_rank"] for codec in ("coo", "packed", "packed-bf16")]
        self.assertEqual(sizes, sorted(sizes, reverse=True))

    def test_a_rule_that_loses_mass_is_seen(self) -> None:
        for transport in ("threads", "sim"):
            for rule in ("pres", "lres"):
                row = self.bench(*self.CASE, "--transport", transport, "--algorithm", "spardl", "--residual", rule)[0]
                self.assertGreater(row["mass_error"], 0.01)

    def test_threads_and_sim_are_worth_the_same(self) -> None:
        here = ("--algorithm", "spardl,topka,gtopk", "--codec", "coo", "--teams", "1")
        on = [self.bench(*self.CASE, *here, "--transport", transport) for transport in ("threads", "sim")]
        for a, b in zip(*on, strict=True):
            self.assertAlmostEqual(a["captured_energy"], b["captured_energy"], places=9)
            self.assertEqual(a["entries_out"], b["entries_out"])

    def test_a_wrong_result_is_seen(self) -> None:
        for transport in ("threads", "sim"):
            for more in ([], ["--buckets", "3"]):
                done = weft("bench", *self.CASE, *more, "--transport", transport, "--json", "--spoil-result")
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertFalse(any(row["correct"] for row in self.rows(done.stdout)))

    def test_buckets_in_flight_together(self) -> None:
        transports = ("threads", "sim", "tcp") if built("tcp") else ("threads", "sim")
        for quotas in ("adaptive", "proportional"):
            case = (*self.CASE, "--codec", "coo", "--teams", "1", "--buckets", "7", "--quotas", quotas)
            on = [self.bench(*case, "--transport", transport) for transport in transports]
            for rows in on:
                self.assert_sound(rows)
                self.assertEqual([row["algorithm"] for row in rows], [row["algorithm"] for row in on[0]])
                for row, first in zip(rows, on[0], strict=True):
                    self.assertEqual((row["buckets"], row["quotas"], row["k"]), (7, quotas, 120))
                    self.assertAlmostEqual(row["captured_energy"], first["captured_energy"], places=9)
                    self.assertEqual(row["payload_bytes_per_rank"] > 0, True)
                    if row["algorithm"] == "spardl":
                        self.assertEqual(row["entries_out"], row["k"])  # the quotas sum to k

    def test_one_bucket_is_the_vector(self) -> None:
        case = (*self.CASE, "--transport", "sim", "--algorithm", "spardl,topka,gtopk")
        for plain, layer in zip(self.bench(*case), self.bench(*case, "--buckets", "1"), strict=True):
            self.assertEqual((plain.pop("buckets"), plain.pop("quotas")), (None, None))
            self.assertEqual((layer.pop("buckets"), layer.pop("quotas")), (1, "adaptive"))
            self.assertEqual(plain, layer)

    def test_quotas_decide_about_the_energy_of_layers(self) -> None:
        case = ("sparse_allreduce", "--length", "160000", "--distribution", "layered", "--algorithm", "spardl", "--teams", "1",
                "--transport", "sim", "--steps-before", "10")
        one, adaptive, proportional = (self.bench(*case, *more)[0]["captured_energy"] for more in (
            ["--buckets", "1"], ["--buckets", "16"], ["--buckets", "16", "--quotas", "proportional"]))
        self.assertGreater(adaptive, 0.85 * one)
        self.assertLess(proportional, 0.5 * one)  # control

    def test_the_wire_alone_is_no_longer_than_the_step(self) -> None:
        rows = self.bench("sparse_allreduce", "--length", "200000", "--link", "100mbit,50us", "--iterations", "5", "--codec", "coo",
                          "--algorithm", "spardl,topka,topkdsa,dense")
        self.assert_sound(rows)
        for row in rows:
            self.assertGreater(row["wire_seconds"], 0.9 * row["ideal_seconds"], row)
            self.assertLess(row["wire_seconds"], 1.2 * row["seconds_p99"], row)

    def test_byte_scale(self) -> None:
        case = ("sparse_allreduce", "--transport", "sim", "--ranks", "8", "--density", "0.1", "--algorithm", "spardl", "--codec", "coo")
        plain = self.bench(*case, "--length", "640000")[0]
        scaled = self.bench(*case, "--length", "640000", "--byte-scale", "10")[0]
        self.assertEqual(scaled["length"], 640000)
        self.assertAlmostEqual(plain["payload_bytes_per_rank"], scaled["payload_bytes_per_rank"], delta=0.01 * plain["payload_bytes_per_rank"])
        self.assertAlmostEqual(plain["seconds_median"], scaled["seconds_median"], delta=0.02 * plain["seconds_median"])

    def test_over_tcp_and_under_launch(self) -> None:
        if not built("tcp"):
            self.skipTest("built without tcp")
        rows = self.bench(*self.CASE, "--transport", "tcp", "--ranks", "3", "--codec", "coo")
        self.assert_sound(rows)
        self.assertEqual({row["algorithm"] for row in rows}, self.ROWS)
        done = weft("launch", "-n", "2", "--", WEFT, "bench", *self.CASE, "--algorithm", "spardl", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assert_sound(self.rows(done.stdout.replace("[0] ", "")))

    def test_over_mpi(self) -> None:
        if not built("mpi") or shutil.which("mpirun") is None:
            self.skipTest("built without mpi")
        asan = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"  # of Open MPI
        self.assert_sound(self.bench(*self.CASE, "--transport", "mpi", "--ranks", "2", "--codec", "coo", ASAN_OPTIONS=asan))

    def test_the_table(self) -> None:
        done = weft("bench", *self.CASE)
        self.assertEqual(done.stderr, "")
        for name in (*self.ROWS, "median", "select", "wire", "energy", "mass error", "k = 120", "docs/measuring.md"):
            self.assertIn(name, done.stdout)
        self.assertIn("one is the least", weft("bench", "sparse_allreduce", "--length", "60", "--density", "1e-9",
                                              "--iterations", "1", "--algorithm", "spardl").stdout)

    def test_least_and_most(self) -> None:
        for length, density, ranks in (("1", "1", "1"), ("1", "0.5", "3"), ("5", "1", "8"), ("100", "1", "3")):
            rows = self.bench("sparse_allreduce", "--length", length, "--density", density, "--ranks", ranks, "--iterations", "1")
            self.assertTrue(all(row["correct"] for row in rows), rows)

    def test_alone_every_row_chooses_its_own_largest(self) -> None:
        for transport in ("threads", "sim"):
            for row in self.bench(*self.CASE, "--ranks", "1", "--transport", transport):
                self.assertEqual(row["payload_bytes_per_rank"], 0)
                if row["algorithm"] in ("spardl", "topka", "topkdsa", "gtopk"):
                    self.assertAlmostEqual(row["captured_energy"], 1, places=6, msg=row)

    def test_crossover(self) -> None:
        case = ("sparse_allreduce", "--transport", "sim", "--crossover", "--length", "25000000", "--codec", "coo")
        rows = self.bench(*case, "--ranks", "14")
        self.assertEqual([row["ranks"] for row in rows], [14] * 3)
        done = weft("bench", *case, "--ranks", "15")
        self.assertEqual(done.returncode, 2)
        self.assertIn("14, 64, 256, 1024", done.stderr)
        for row in rows:  # 16 k against 8 n bytes, and about as many rounds
            self.assertTrue(0.45 < row["crossover_density"] < 0.55, row)
            self.assertTrue(row["simulated"])

    def test_bad_input(self) -> None:
        def refused(*arguments: str, says: str) -> None:
            done = weft("bench", "sparse_allreduce", *arguments)
            self.assertEqual(done.returncode, 2, f"{arguments}: {done.stderr}")
            self.assertEqual(done.stdout, "")
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertRegex(done.stderr, says)

        for density in ("0", "-0.1", "1.5", "nan", "inf"):
            refused(f"--density={density}", says="density")
        for length in ("0", "-1", "5000000000", "nan"):
            refused(f"--length={length}", says="length")
        refused("--ranks", "4", "--teams", "3", says="3 do not divide 4")
        refused("--teams=-1", says="teams")
        refused("--ranks", "6", "--teams", "3", "--gather", "r-sag", says="power of two")
        refused("--codec", "zip", says="coo, packed or packed-bf16")
        refused("--residual", "none", says="gres, pres, lres, drop")
        refused("--blocks", "round", says="dealt, contiguous")
        refused("--gather", "ring", says="r-sag, b-sag")
        refused("--distribution", "uniform", says="gaussian")
        refused("--algorithm", "fast", says="spardl")
        refused("--threads", "0", says="threads")
        refused("--threads", "100000", says="threads must be 1 to 256")
        for buckets in ("0", "-1", "99999999999"):
            refused(f"--buckets={buckets}", says="--buckets must be 1 to 65536")
        refused("--length", "5", "--buckets", "6", says="6 are more than the 5 elements")
        refused("--quotas", "adaptive", says="--quotas are those of --buckets")
        refused("--buckets", "2", "--quotas", "equal", says="adaptive, proportional")
        refused("--buckets", "2", "--transport", "sim", "--crossover", says="without --buckets")
        refused("--steps-before=-1", says="steps-before")
        refused("--shifted-draws", "--distribution", "layered", says="layers")
        refused("--bytes", "4KiB", says="--length")
        refused("--crossover", says="sim")
        refused("--transport", "sim", "--trace", "/tmp/none", says="trace")
        refused("--transport", "sim", "--length", "10", "--byte-scale", "3", says="whole number")
        done = weft("bench", "allreduce", "--density", "0.1")
        self.assertEqual(done.returncode, 2)
        self.assertIn("sparse_allreduce", done.stderr)


class UsageTest(CliTest):
    def refused(self, *arguments: str, says: str) -> None:
        done = weft(*arguments)
        self.assertEqual(done.returncode, 2, f"{arguments}: {done.stderr}")
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        self.assertRegex(done.stderr, says)

    def test_a_world_that_mpi_does_not_know_is_refused(self) -> None:
        bench = ["bench", "allreduce", "--bytes", "4", "--iterations", "1", "--transport", "mpi"]
        if not built("mpi"):
            self.skipTest("built without mpi")
        asan = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"  # of Open MPI
        for rank in ("0", "1"):  # what another MPI's mpirun sets
            done = weft(*bench, PMI_RANK=rank, PMI_SIZE="2", ASAN_OPTIONS=asan)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(f"says rank {rank} of 2, but MPI says rank 0 of 1", done.stderr)
        done = weft("launch", "-n", "2", "--", WEFT, *bench, ASAN_OPTIONS=asan)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("of 2, but MPI says rank 0 of 1", done.stderr)

    def test_the_transport_of_the_environment_is_taken(self) -> None:
        for transport in ("threads", "tcp"):
            if transport == "tcp" and not built("tcp"):
                self.skipTest("built without tcp")
            row, = self.bench("allreduce", "--bytes", "4", "--iterations", "1", "--algorithm", "ring",
                              WEFT_TRANSPORT=transport)
            self.assertEqual(row["transport"], transport)

    def test_launch_passes_zero_bytes_on(self) -> None:
        done = subprocess.run([WEFT, "launch", "-n", "1", "--", "printf", r"a\0b\n"], capture_output=True, timeout=60)
        self.assertEqual(done.stdout, b"[0] a\0b\n")

    def test_refuses_in_one_sentence(self) -> None:
        self.refused("trian", says="unknown verb 'trian': did you mean 'train'")
        self.refused("bench", "allreduce", "--against", "mpi", "--dtype", "bfloat16", says="MPI has no bfloat16 sums")
        self.refused(says="subcommand")
        self.refused("bench", says="family")
        self.refused("bench", "allreduced", says="allreduce, reducescatter, .*priority, overhead")
        self.refused("bench", "allreduce", "--algorithm", "fast", says="ring, recursive_doubling, rabenseifner, direct")
        for link in ("nan", "-1gbit", "0gbit", "infgbit", "1gb", "1gbit,-5us", "1gbit,nan"):
            self.refused("bench", "allreduce", f"--link={link}", says="link")
        for ranks in ("0", "-1", "nan", "1000000"):
            self.refused("bench", "allreduce", f"--ranks={ranks}", says="ranks")
        self.refused("bench", "allreduce", "--ranks", "4", "--nodes", "5", says="only 4 ranks")
        self.refused("bench", "allreduce", "--bytes", "7", says="no whole number of float32")
        self.refused("bench", "allreduce", "--bytes", "8..4", says="FROM..TO")
        self.refused("bench", "allreduce", "--bytes", "nan", says="nan")
        self.refused("bench", "allreduce", "--dtype", "float", says="float32")
        self.refused("bench", "allreduce", "--dtype", "bytes", says="no sum")
        self.refused("bench", "allreduce", "--transport", "pigeon", says="threads, tcp, mpi, sim")
        self.refused("bench", "allreduce", "--iterations=-1", says="iterations")
        for scale in ("nan", "inf", "0", "-1"):
            self.refused("bench", "allreduce", "--transport", "sim", f"--byte-scale={scale}", says="byte-scale")
        self.refused("bench", "allreduce", "--byte-scale", "2", says="sim")
        self.refused("bench", "allreduce", "--against", "gloo", says="mpi")
        self.refused("bench", "allreduce", "--link", "1gbit", "--against", "mpi", says="against")
        self.refused("info", "more", says="more")
        self.refused("info", "--", "more", says="nothing behind --")
        self.refused("launch", "-n", "2", says="command is missing")
        self.refused("launch", "-n", "0", "--", "true", says="0")

    def test_a_link_is_for_emulated_networks(self) -> None:
        for transport in ("tcp", "mpi"):
            says = "netlab" if built(transport) else "built without"
            self.refused("bench", "allreduce", "--transport", transport, "--link", "1gbit", says=says)


class LaunchTest(CliTest):
    def test_prefixes_lines_and_sets_the_place(self) -> None:
        script = "echo $RANK/$WORLD_SIZE/$LOCAL_RANK/$MASTER_ADDR; echo problem >&2; printf unfinished"
        done = weft("launch", "-n", "3", "--", "sh", "-c", script)
        self.assertEqual(done.returncode, 0)
        expected = sorted(f"[{r}] {r}/3/{r}/127.0.0.1" for r in range(3)) + [f"[{r}] unfinished" for r in range(3)]
        self.assertEqual(sorted(done.stdout.splitlines()), sorted(expected))
        self.assertEqual(sorted(done.stderr.splitlines()), [f"[{r}] problem" for r in range(3)])

    def test_a_failing_rank_ends_the_others_at_once(self) -> None:
        start = time.monotonic()
        done = weft("launch", "-n", "3", "--", "sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 30")
        self.assertLess(time.monotonic() - start, 3)
        self.assertEqual(done.returncode, 7)
        self.assertIn("rank 1 failed first: it ended with status 7", done.stderr)

    def test_a_signal_is_named(self) -> None:
        done = weft("launch", "-n", "2", "--", "sh", "-c", "[ $RANK = 0 ] && kill -SEGV $$; sleep 30")
        self.assertEqual(done.returncode, 128 + signal.SIGSEGV)
        self.assertIn("rank 0 failed first: it was ended by SIGSEGV", done.stderr)

    def test_a_rank_that_does_not_listen_is_killed(self) -> None:
        start = time.monotonic()
        done = weft("launch", "-n", "2", "--", "sh", "-c", "[ $RANK = 0 ] && exit 3; trap '' TERM; sleep 30; sleep 30")
        self.assertLess(time.monotonic() - start, 8)
        self.assertEqual(done.returncode, 3)

    def test_an_unknown_command(self) -> None:
        done = weft("launch", "-n", "2", "--", "/no/such/program")
        self.assertEqual(done.returncode, 127)
        self.assertIn("/no/such/program", done.stderr)

    def test_ctrl_c_and_kill_leave_no_orphans(self) -> None:
        for how, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            mark = f"sleep 4{os.getpid()}.{int(how)}"
            job = subprocess.Popen([WEFT, "launch", "-n", "2", "--", "sh", "-c", f"exec {mark}"], env=environment(),
                                   stderr=subprocess.DEVNULL)
            self.wait_until(lambda: self.processes(mark) == 2)
            job.send_signal(how)
            self.assertEqual(job.wait(timeout=5), status)
            self.wait_until(lambda: self.processes(mark) == 0)

    def processes(self, mark: str) -> int:
        found = 0
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found += entry.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == mark
            except OSError:
                continue
        return found

    def wait_until(self, holds: Any) -> None:
        end = time.monotonic() + 5
        while not holds():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_each_job_has_a_token_that_is_never_printed(self) -> None:
        done = weft("launch", "-n", "2", "--verbose", "--", "sh", "-c", "echo $WEFT_TOKEN")
        tokens = {line.split("] ")[1] for line in done.stdout.splitlines()}
        self.assertEqual(len(tokens), 1)
        token = tokens.pop()
        self.assertRegex(token, re.compile("^[0-9a-f]{64}$"))
        self.assertNotIn(token, done.stderr)
        self.assertIn("rank 1 is process", done.stderr)
        again = weft("launch", "-n", "1", "--", "sh", "-c", "echo $WEFT_TOKEN", WEFT_TOKEN="x" * 40)
        self.assertNotIn(token, again.stdout)
        self.assertNotIn("x" * 40, again.stdout)


class ProcessesTest(CliTest):
    def test_bench_starts_its_ranks_over_tcp(self) -> None:
        if not built("tcp"):
            self.skipTest("built without tcp")
        for family in FAMILIES:
            rows = self.bench(family, "--transport", "tcp", "--ranks", "3", "--bytes", "4,40000", "--iterations", "3")
            self.assert_as_formula(rows)
            self.assertEqual({row["transport"] for row in rows}, {"tcp"})

    def test_bench_under_launch(self) -> None:
        if not built("tcp"):
            self.skipTest("built without tcp")
        done = weft("launch", "-n", "2", "--", WEFT, "bench", "allreduce", "--bytes", "4KiB", "--iterations", "3", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assert_as_formula(self.rows(done.stdout.replace("[0] ", "")))
        done = weft("launch", "-n", "2", "--", WEFT, "bench", "allreduce", "--ranks", "3")
        self.assertEqual(done.returncode, 2)
        self.assertIn("leave --ranks out", done.stderr)

    def test_priority_over_tcp_has_both_engines(self) -> None:
        if not built("tcp"):
            self.skipTest("built without tcp")
        row = self.bench("priority", "--transport", "tcp", "--ranks", "2", "--iterations", "2", "--bytes", "64KiB")[0]
        self.assertGreater(row["fifo_seconds"], 0)

    def test_bench_under_mpirun(self) -> None:
        if not built("mpi") or shutil.which("mpirun") is None:
            self.skipTest("built without mpi")
        asan = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"  # of Open MPI
        case = ("bench", "allreduce", "--bytes", "4,40000", "--iterations", "3", "--json")
        done = run(*MPIRUN, "-n", "2", WEFT, *case, ASAN_OPTIONS=asan)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assert_as_formula(self.rows(done.stdout))
        rows = self.bench("alltoall", "--transport", "mpi", "--ranks", "2", "--bytes", "4KiB", "--iterations", "3",
                          ASAN_OPTIONS=asan)
        self.assert_as_formula(rows)

    def test_against_mpi(self) -> None:
        if not (Path(WEFT).parent / "bench" / "mpi_peer").exists():
            self.skipTest("bench/mpi_peer is not built")
        asan = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"  # of Open MPI
        rows = self.bench("allgather", "--ranks", "2", "--bytes", "4KiB", "--iterations", "3", "--against", "mpi",
                          ASAN_OPTIONS=asan)
        self.assertEqual(rows[0]["transport"], "Open MPI")
        for row in rows[1:]:
            self.assertAlmostEqual(row["speed_over_mpi"], rows[0]["seconds_median"] / row["seconds_median"])


if __name__ == "__main__":
    if not WEFT:
        sys.exit(__doc__)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
