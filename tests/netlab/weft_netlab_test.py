"""weft over real TCP links between network namespaces: it computes the right thing, its bytes cross the link, and a pulled link
becomes one clear sentence on the survivors; who leaves over a slow link loses nothing. Needs root; exits with 77 elsewhere.

Usage: weft_netlab_test.py PATH_OF_WEFT PATH_OF_LEAVING_RANK
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import unittest

NETLAB = pathlib.Path(__file__).resolve().parents[2] / "tools" / "netlab"
LAB = f"weft-test-{os.getpid()}"
WEFT = ""
LEAVING_RANK = ""


def netlab(verb: str, *arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [str(NETLAB), verb, "--lab", LAB, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]


class WeftOnLinks(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        up = netlab("up", "4", "1gbit")
        assert up.returncode == 0, up.stderr

    @classmethod
    def tearDownClass(cls) -> None:
        netlab("down")

    def test_all_reduce_is_right_and_its_bytes_cross_the_link(self) -> None:
        done = netlab("run", "--", WEFT, "bench", "allreduce", "--bytes", "8MiB", "--algorithm", "ring", "--iterations", "4",
                      "--ideal", "1gbit", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)  # netlab itself compares counters and recorded bytes
        (row,) = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertTrue(row["correct"])
        self.assertEqual(row["transport"], "tcp")
        self.assertEqual(row["payload_bytes_per_rank"], row["formula_bytes_per_rank"])
        self.assertEqual(row["rounds"], row["formula_rounds"])
        # The link is a bound of physics: faster would mean that the bytes took another way.
        self.assertGreater(row["seconds_median"], 0.97 * row["ideal_seconds"])
        self.assertIn("tx", done.stderr)

    def test_a_pulled_link_is_named_by_the_survivors_in_time(self) -> None:
        run = subprocess.Popen([str(NETLAB), "run", "--lab", LAB, "--", WEFT, "bench", "allreduce", "--bytes", "64MiB",
                                "--algorithm", "ring", "--iterations", "1000"],
                               env=os.environ | {"WEFT_DEAD_AFTER": "1s"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(4)  # it runs: a 64 MiB all-reduce takes 0.8 s
        self.assertIsNone(run.poll())
        pulled = time.monotonic()
        self.assertEqual(netlab("link", "2", "down").returncode, 0)
        try:
            _, errors = run.communicate(timeout=30)
        finally:
            run.kill()
            netlab("link", "2", "up")
        took = time.monotonic() - pulled
        self.assertNotEqual(run.returncode, 0)
        blaming = [line for line in errors.splitlines() if "rank 2" in line and not line.startswith("[rank 2]")]
        self.assertTrue(blaming, errors)
        # 1.5 s until everybody knows, 3 s that netlab gives the others to end, and the ends of six processes.
        self.assertLess(took, 8, errors)


class Leaving(unittest.TestCase):
    def tearDown(self) -> None:
        netlab("down")

    def test_what_was_sent_arrives_over_a_slow_link_before_the_goodbye(self) -> None:
        self.assertEqual(netlab("up", "2", "1mbit").returncode, 0)
        for rate, seconds in (("1mbit", 24), ("2mbit", 12)):
            self.assertEqual(netlab("rate", rate).returncode, 0)
            start = time.monotonic()
            done = netlab("run", "--timeout", "90", "--", LEAVING_RANK)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("rank 0 has left the job", done.stderr)
            self.assertGreater(time.monotonic() - start, 0.9 * seconds)  # control: it was that slow


if __name__ == "__main__":
    if os.geteuid() != 0:
        print("weft on netlab: skipped, needs root")
        sys.exit(77)
    LEAVING_RANK = sys.argv.pop()
    WEFT = sys.argv.pop()
    unittest.main()
