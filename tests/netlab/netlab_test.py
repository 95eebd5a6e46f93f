#!/usr/bin/env python3
"""tools/netlab: rates, ranks, byte check, failures, cleaning up. Needs root; under 60 s."""
from __future__ import annotations

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

NETLAB = str(Path(__file__).resolve().parents[2] / "tools" / "netlab")
LAB = f"test{os.getpid()}"
MEGABYTE = 1_000_000

# Rank 0 sends BYTES to rank 1 and prints the rate that rank 1 saw; both report CLAIM times what they moved.
TRANSFER = """
import json, os, socket, sys, time
size, claim = int(sys.argv[1]), float(sys.argv[2])
rank, where = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
assert os.environ["WORLD_SIZE"] == "2" and os.environ["LOCAL_RANK"] == "0"
assert os.environ["WEFT_TRANSPORT"] == "tcp" and len(os.environ["WEFT_TOKEN"]) == 64
if rank == 0:
    peer = socket.create_server(where).accept()[0]
    sent = 0
    while sent < size:
        chunk = bytes(min(1 << 18, size - sent))
        peer.sendall(chunk)
        sent += len(chunk)
    peer.shutdown(socket.SHUT_WR)
    print(peer.recv(100).decode(), flush=True)
else:
    for attempt in range(500):
        try:
            peer = socket.create_connection(where)
            break
        except OSError:
            time.sleep(0.01)
    got, buffer = 0, bytearray(1 << 18)
    while got < min(size // 10, 2_000_000):  # past the burst, and past TCP's start
        got += peer.recv_into(buffer)
    start, skipped = time.monotonic(), got
    while count := peer.recv_into(buffer):
        got += count
    rate = (got - skipped) / (time.monotonic() - start)
    peer.sendall(str(rate).encode())
    print("only rank 0 has stdout")
moved = [int(claim * size), 0] if rank == 0 else [0, int(claim * size)]
with open(os.environ["WEFT_NETLAB_REPORT"], "w") as report:
    json.dump({"rank": rank, "sent_bytes": moved[0], "received_bytes": moved[1]}, report)
"""

MPI_PROGRAM = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, count = 1 << 20;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  float* in = calloc(count, 4);
  float* out = calloc(count, 4);
  in[7] = rank + 1;
  MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  printf("sum %g\\n", out[7]);
  MPI_Finalize();
  return argc > 1 && rank == 1 ? 9 : 0;
}
"""


def netlab(*args: str, lab: str = LAB) -> subprocess.CompletedProcess[str]:
    verb, *rest = args
    argv = [NETLAB, verb, "--lab", lab, *rest]
    return subprocess.run(argv, capture_output=True, text=True, timeout=50, check=False)


def transfer(size: int, claim: float = 1.0) -> subprocess.CompletedProcess[str]:
    return netlab("run", "--timeout", "30", "--", sys.executable, "-c", TRANSFER, str(size), str(claim))


def counters(stderr: str) -> dict[int, tuple[int, int]]:
    found = re.findall(r"^netlab: rank (\d+) tx (\d+) bytes rx (\d+) bytes [\d.]+ s$", stderr, re.M)
    return {int(rank): (int(tx), int(rx)) for rank, tx, rx in found}


def leftovers(lab: str) -> list[str]:
    places = (Path("/run/netns"), Path("/run/weft-netlab"))
    files = [str(f) for place in places if place.exists() for f in place.iterdir() if lab in f.name]
    return files + tagged_processes(lab)


def tagged_processes(lab: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[1-9]*"):
        try:
            if f"WEFT_NETLAB_RUN={lab}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
        except OSError:
            pass
    return found


class SharedLab(unittest.TestCase):
    """One lab of two hosts for all tests of a class."""

    @classmethod
    def setUpClass(cls) -> None:
        made = netlab("up", "2", "1gbit", "--latency-note")
        assert made.returncode == 0 and "latency" in made.stdout, made

    @classmethod
    def tearDownClass(cls) -> None:
        for _ in range(2):  # it may be repeated
            assert netlab("down").returncode == 0
        assert not leftovers(LAB), leftovers(LAB)


class Rates(SharedLab):
    def test_transfers_reach_the_rate_and_not_more(self) -> None:
        for rate, size in (("1gbit", 80), ("200mbit", 24), ("100mbit", 12)):
            ideal = float(rate[:-4]) * (125 if rate.endswith("gbit") else 0.125)
            self.assertEqual(netlab("rate", rate).returncode, 0)
            for _ in range(3):  # two noisy cores
                done = transfer(size * MEGABYTE)
                self.assertEqual(done.returncode, 0, done.stderr)
                reached = float(done.stdout) / MEGABYTE
                print(f"{rate}: {reached:.1f} MB/s of payload, {100 * reached / ideal:.1f} % of the link")
                if reached >= 0.85 * ideal:
                    break
            self.assertTrue(0.85 * ideal <= reached <= ideal, f"{rate}: {reached} MB/s of {ideal}")

    def test_up_again_changes_the_rate_and_refuses_another_size(self) -> None:
        self.assertEqual(netlab("up", "2", "50mbit").returncode, 0)
        self.assertIn("2 hosts at 50mbit, idle", netlab("status").stdout)
        self.assertEqual(netlab("up", "2", "1gbit").returncode, 0)
        other = netlab("up", "3", "1gbit")
        self.assertEqual(other.returncode, 2)
        self.assertIn("is up with 2 hosts, not 3", other.stderr)

    def test_wrong_usage(self) -> None:
        for words in (("up", "0", "1gbit"), ("up", "2", "fast"), ("rate", "0gbit"), ("run",), ("exec", "0"),
                      ("link", "2", "down"), ("exec", "7", "--", "true"), ("down", "--", "true"),
                      ("run", "--hosts", "3", "--", "true")):
            self.assertEqual(netlab(*words).returncode, 2, words)
        self.assertEqual(netlab("run", "--", "true", lab=f"{LAB}-none").returncode, 2)


class Runs(SharedLab):
    def test_counters_agree_with_true_reports(self) -> None:
        done = transfer(20 << 20)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("byte check: the counters agree", done.stderr)
        self.assertIn("[rank 1] only rank 0 has stdout\n", done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 1)
        seen = counters(done.stderr)
        self.assertTrue(20 << 20 <= seen[0][0] <= 1.1 * (20 << 20), seen)
        self.assertLessEqual(abs(seen[0][0] - seen[1][1]), 10_000)

    def test_reports_that_the_links_did_not_carry_fail(self) -> None:
        for claim, why in ((1.02, "bypassed the link"), (0.85, "too many")):
            done = transfer(20 << 20, claim)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("byte check failed: rank 0 reports", done.stderr)
            self.assertIn(why, done.stderr)
        small = transfer(1 << 20, 2.0)  # too few bytes to be checked
        self.assertEqual(small.returncode, 0, small.stderr)

    def test_bad_and_missing_reports_fail(self) -> None:
        large = '{"rank": 1, "sent_bytes": 99999999, "received_bytes": 0}'
        for report, why in (("garbage", "the report of rank 1 is wrong"), (large, "rank 0 reported no")):
            script = f"[ $RANK = 0 ] || echo '{report}' > $WEFT_NETLAB_REPORT"
            done = netlab("run", "--", "sh", "-c", script)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(why, done.stderr)

    def test_a_failing_rank_ends_the_others(self) -> None:
        for failure, status in (("exit 7", 7), ("kill -9 $$", 137)):
            start = time.monotonic()
            done = netlab("run", "--", "sh", "-c", f"[ $RANK = 1 ] && {failure}; sleep 40 & wait")
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn("rank 1 failed", done.stderr)
            self.assertTrue(2.9 < time.monotonic() - start < 6)
            self.assertEqual(tagged_processes(LAB), [])

    def test_a_flood_of_output_hides_no_failure(self) -> None:
        start = time.monotonic()
        done = netlab("run", "--", "sh", "-c", "[ $RANK = 0 ] && sleep 0.2 && exit 5; yes flood")
        self.assertEqual(done.returncode, 5)
        self.assertLess(time.monotonic() - start, 8)

    def test_timeout_and_stubborn_ranks(self) -> None:
        stubborn = "trap '' TERM; setsid sleep 40 & sleep 40; sleep 40"
        done = netlab("run", "--timeout", "0.3", "--", "sh", "-c", stubborn)
        self.assertEqual(done.returncode, 124, done.stderr)
        self.assertIn("timed out after 0.3 s", done.stderr)
        self.assertEqual(tagged_processes(LAB), [])

    def test_a_second_run_is_refused(self) -> None:
        first = subprocess.Popen([NETLAB, "run", "--lab", LAB, "--", "sleep", "40"], stderr=subprocess.PIPE)
        wait_for_ranks(LAB, 2)
        second = netlab("run", "--", "true")
        self.assertEqual(second.returncode, 2)
        self.assertIn("a run is going on", second.stderr)
        first.kill()  # nothing can be cleaned up now ...
        first.communicate()
        again = netlab("run", "--", "true")  # ... but the next run does it
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(tagged_processes(LAB), [])

    def test_links_can_be_pulled(self) -> None:
        def reach() -> bool:
            code = "import socket; socket.create_connection(('h0', 9), timeout=0.5)"
            done = netlab("exec", "1", "--", sys.executable, "-c", code)
            return "ConnectionRefusedError" in done.stderr

        self.assertTrue(reach())
        self.assertEqual(netlab("link", "1", "down").returncode, 0)
        self.assertIn("h1 10.87.0.2 link down", netlab("status").stdout)
        self.assertFalse(reach())
        self.assertEqual(netlab("link", "1", "up").returncode, 0)
        self.assertTrue(reach())


@unittest.skipUnless(shutil.which("mpicc") and shutil.which("mpirun"), "Open MPI is not installed")
class Mpi(SharedLab):
    def test_bytes_cross_the_links(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "program")
            subprocess.run(["mpicc", "-x", "c", "-", "-o", program], input=MPI_PROGRAM, text=True, check=True)
            option = "--mca coll_tuned_allreduce_algorithm 3 --mca coll_tuned_use_dynamic_rules 1"
            done = netlab("run", "--mpi", "--timeout", "30", "--mpi-arg", option, "--", program)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout, "sum 3\n")
            self.assertIn("[rank 1] sum 3\n", done.stderr)
            for moved in counters(done.stderr).values():
                for count in moved:  # two ranks: the whole vector each way
                    self.assertTrue(4 << 20 <= count <= 1.1 * (4 << 20), done.stderr)
            failing = netlab("run", "--mpi", "--timeout", "30", "--", program, "fail")
            self.assertEqual(failing.returncode, 9, failing.stderr)
            self.assertEqual(tagged_processes(LAB), [])


def wait_for_ranks(lab: str, count: int) -> None:
    for _ in range(500):
        if sum("sleep" in line for line in tagged_processes(lab)) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"the ranks did not start: {tagged_processes(lab)}")


class Cleaning(unittest.TestCase):
    def tearDown(self) -> None:
        self.assertEqual(netlab("down").returncode, 0)

    def test_interrupts_leave_nothing(self) -> None:
        for signum, mpi in ((signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["--mpi"])):
            if mpi and not shutil.which("mpirun"):
                continue
            words = ["run", "--lab", LAB, "--hosts", "3", "--rate", "100mbit", *mpi, "--", "sleep", "40"]
            run = subprocess.Popen([NETLAB, *words], stderr=subprocess.PIPE, text=True)
            wait_for_ranks(LAB, 3)
            start = time.monotonic()
            run.send_signal(signum)
            _, stderr = run.communicate(timeout=20)
            self.assertEqual(run.returncode, 128 + signum, stderr)
            self.assertIn(f"interrupted by {signum.name}", stderr)
            self.assertLess(time.monotonic() - start, 6)
            self.assertEqual(leftovers(LAB), [])

    def test_interrupted_while_making_the_lab(self) -> None:
        for delay in (0.1, 0.15, 0.2, 0.3):
            run = subprocess.Popen([NETLAB, "up", "--lab", LAB, "8", "1gbit"], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
            time.sleep(delay)
            run.send_signal(signal.SIGTERM)
            run.wait()
            if netlab("status").returncode != 0:  # else it was complete already
                self.assertEqual(leftovers(LAB), [])
            self.assertEqual(netlab("down").returncode, 0)

    def test_what_a_killed_netlab_left_is_replaced_and_removed(self) -> None:
        words = ["run", "--lab", LAB, "--hosts", "2", "--", "sleep", "40"]
        run = subprocess.Popen([NETLAB, *words], stderr=subprocess.DEVNULL)
        wait_for_ranks(LAB, 2)
        run.kill()
        run.wait()
        self.assertNotEqual(leftovers(LAB), [])
        self.assertEqual(netlab("status").returncode, 1)  # a temporary lab whose run has gone is no lab
        done = netlab("run", "--hosts", "3", "--", "true")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(counters(done.stderr)), 3)
        self.assertEqual(leftovers(LAB), [])

    def test_the_machines_own_network_is_untouched(self) -> None:
        def look() -> list[str]:
            lines = ["ip -br link", "ip -br addr", "ip route", "tc qdisc"]
            return [subprocess.check_output(line.split(), text=True) for line in lines]

        before = look()
        self.assertEqual(netlab("up", "2", "1gbit").returncode, 0)
        self.assertEqual(look(), before)
        self.assertEqual(netlab("down").returncode, 0)
        self.assertEqual(look(), before)

    def test_without_root(self) -> None:
        with tempfile.TemporaryDirectory() as folder:  # the checkout may lie where only root can read
            os.chmod(folder, 0o755)
            copy = shutil.copy(NETLAB, folder)
            words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", copy, "up", "2", "1gbit"]
            done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
        self.assertEqual(done.returncode, 77, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertIn("needs root", done.stderr)


if __name__ == "__main__":
    if os.geteuid() != 0:
        print("netlab: skipped, needs root")
        sys.exit(77)
    unittest.main()
