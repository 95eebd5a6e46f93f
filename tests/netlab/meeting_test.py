#!/usr/bin/env python3
"""Where ranks meet on hosts as clusters have them: two networks, IPv6, and hosts files that lead a host's own name to loopback
(Debian's `127.0.1.1 host`). Needs root; exits with 77 elsewhere.

Usage: meeting_test.py PATH_OF_WEFT

Host i has eth0 (10.87.0.i+1 and fd87::i+1) and eth1 (10.88.0.i+1), each on a switch of its own.
"""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

NETLAB = str(Path(__file__).resolve().parents[2] / "tools" / "netlab")
LAB = f"meet{os.getpid()}"
HOSTS = 2
TOKEN = "0123456789abcdef" * 4
WEFT = ""
IPV6 = Path("/proc/net/if_inet6").exists()  # a kernel may have none
# A mount of its own in each rank: `netlab exec` gives every process a mount namespace.
ENTER = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


def ip(namespace: str, *words: str) -> None:
    subprocess.run(["ip", "-n", f"weft-{LAB}-{namespace}", *words], check=True)


def add_second_network() -> None:
    ip("sw", "link", "add", "br1", "type", "bridge", "forward_delay", "0")
    ip("sw", "link", "set", "br1", "up")
    for i in range(HOSTS):
        ip("sw", "link", "add", f"g{i}", "type", "veth", "peer", "name", "eth1", "netns", f"weft-{LAB}-h{i}")
        ip("sw", "link", "set", f"g{i}", "master", "br1", "up")
        ip(f"h{i}", "link", "set", "eth1", "up")
        ip(f"h{i}", "addr", "add", f"10.88.0.{i + 1}/24", "dev", "eth1")
        if IPV6:
            ip(f"h{i}", "addr", "add", f"fd87::{i + 1}/64", "dev", "eth0", "nodad")


class Meeting(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        subprocess.run([NETLAB, "up", "--lab", LAB, str(HOSTS), "1gbit"], check=True, capture_output=True)
        add_second_network()

    @classmethod
    def tearDownClass(cls) -> None:
        subprocess.run([NETLAB, "down", "--lab", LAB], check=True)

    def meet(self, placed: list[int], hosts: list[str], variables: dict[str, str]) -> list[tuple[int, str]]:
        """Starts rank r on host placed[r], whose hosts file has these lines; returns exit status and stderr of each."""
        ranks = []
        with tempfile.TemporaryDirectory() as folder:
            for i, lines in enumerate(hosts):
                Path(folder, f"hosts.{i}").write_text("127.0.0.1 localhost\n" + lines)
            for rank, host in enumerate(placed):
                environment = {"PATH": os.environ["PATH"], "RANK": str(rank), "WORLD_SIZE": str(len(placed)),
                               "MASTER_PORT": "29500", "WEFT_TOKEN": TOKEN, "WEFT_CONNECT_TIMEOUT": "12s", **variables}
                environment = {key: value for key, value in environment.items() if value}
                command = ["sh", "-c", ENTER, "sh", f"{folder}/hosts.{host}", WEFT, "bench", "allreduce", "--bytes", "64KiB",
                           "--algorithm", "ring", "--iterations", "1", "--json"]
                ranks.append(subprocess.Popen([NETLAB, "exec", "--lab", LAB, str(host), "--", *command], env=environment,
                                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            errors = [rank.communicate(timeout=60)[1] for rank in ranks]
        return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]

    def check_meet(self, placed: list[int], hosts: list[str], variables: dict[str, str]) -> None:
        for status, error in self.meet(placed, hosts, variables):
            self.assertEqual(status, 0, error)

    # What Debian's installer writes: the own name leads to loopback, the other's to its address.
    DEBIAN = ["127.0.1.1 h0\n10.87.0.2 h1\n", "10.87.0.1 h0\n127.0.1.1 h1\n"]

    def test_a_name_that_leads_to_loopback_on_its_own_host(self) -> None:
        self.check_meet([0, 1], self.DEBIAN, {"MASTER_ADDR": "h0"})

    def test_ranks_that_share_such_a_host_are_reached_from_elsewhere(self) -> None:
        self.check_meet([0, 0, 1, 1], self.DEBIAN, {"MASTER_ADDR": "h0"})

    def test_any_address_of_a_name_will_do(self) -> None:
        # The first address that the name means elsewhere is the second that it means to rank 0.
        self.check_meet([0, 1], ["10.87.0.1 h0\n10.88.0.1 h0\n", "10.88.0.1 h0\n"], {"MASTER_ADDR": "h0"})

    @unittest.skipUnless(IPV6, "this kernel has no IPv6")
    def test_ipv6(self) -> None:
        self.check_meet([0, 1, 1], ["", ""], {"MASTER_ADDR": "fd87::1"})
        self.check_meet([0, 1, 1], ["fd87::1 h0\n", "fd87::1 h0\n"], {"MASTER_ADDR": "h0"})

    def test_bind_chooses_the_network(self) -> None:
        for bind in ("eth1", ""):
            before = self.bytes_of("eth1")
            names = "10.88.0.1 h0\n"
            self.check_meet([0, 1], ["127.0.1.1 h0\n", names], {"MASTER_ADDR": "h0", "WEFT_BIND": bind})
            self.assertGreater(self.bytes_of("eth1"), before + 65536)
        # Control: bound to the other network, rank 0 does not answer where it is looked for, and both say where.
        first, second = self.meet([0, 1], ["127.0.1.1 h0\n", names],
                                  {"MASTER_ADDR": "h0", "WEFT_BIND": "eth0", "WEFT_CONNECT_TIMEOUT": "2s"})
        self.assertNotEqual(first[0], 0)
        self.assertIn("rank 0 is at 10.87.0.1:29501", first[1])
        self.assertIn("tried 10.88.0.1:29501: Connection refused", second[1])

    def test_without_a_token_nobody_listens_beyond_loopback_and_it_is_said(self) -> None:
        first, second = self.meet([0, 1], self.DEBIAN,
                                  {"MASTER_ADDR": "h0", "WEFT_TOKEN": "", "WEFT_CONNECT_TIMEOUT": "2s"})
        self.assertIn("rank 0 is at 127.0.1.1:29501, where only its own host reaches it", first[1])
        self.assertIn("WEFT_TOKEN", second[1])

    def bytes_of(self, device: str) -> int:
        path = f"/sys/class/net/{device}/statistics/tx_bytes"
        read = subprocess.run([NETLAB, "exec", "--lab", LAB, "0", "--", "cat", path], capture_output=True, text=True, check=True)
        return int(read.stdout)


if __name__ == "__main__":
    if os.geteuid() != 0:
        print("meeting: skipped, needs root")
        sys.exit(77)
    WEFT = sys.argv.pop()
    unittest.main()
