#!/usr/bin/env python3
"""weft serve as a user runs it, on a checkpoint of a few steps: serve_test.py PATH_TO_WEFT [unittest arguments]."""
from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

WEFT = str(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else ""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_TOKEN")
FACTOR = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
TINY = ("--preset", "tiny", "--steps", "4", "--scheme", "dense", "--tokens", "bytes", "--text", "book.txt", "--global-batch", "4",
        "--ranks", "2")
Answer = dict[str, Any]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES} | {"OMP_NUM_THREADS": "1"}


class ServeTest(unittest.TestCase):
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="weft-serve-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        (cls.folder / "book.txt").write_text("the weaver takes the thread and the thread takes the loom. " * 200)
        for model in ("gpt-moe", "gpt"):
            done = cls.run_weft("train", "--model", model, *TINY, "--out", model)
            if done.returncode != 0:
                raise RuntimeError(done.stdout + done.stderr)

    @classmethod
    def run_weft(cls, *arguments: str, lines: str = "", before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run((*before, WEFT, *arguments), input=lines, capture_output=True, text=True, timeout=60 * FACTOR,
                              env=environment(), check=False, cwd=cls.folder)

    def serve(self, *arguments: str, requests: list[Any], model: str = "gpt-moe", before: tuple[str, ...] = ()) -> list[Answer]:
        lines = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in requests)
        done = self.run_weft("serve", "--checkpoint", model, *arguments, lines=lines, before=before)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_prompts_are_answered_and_bad_lines_are_not_the_end(self) -> None:
        answers = self.serve("--ranks", "3", requests=[
            {"prompt": "the weaver", "max_tokens": 6, "id": 1}, "no JSON", {"prompt": "x", "wat": 1, "id": "two"}, {"prompt": "y" * 40},
            {"prompt": "a", "max_tokens": 0}, {"prompt": ""}, {"tokens": [1, 300]}, {"prompt": "a", "temperature": -1}, [1], "",
            {"prompt": "a", "tokens": [1]}, '{"prompt": "a", "id": ' + "[" * 400000 + "]" * 400000 + "}",
            {"tokens": [116, 104, 101], "max_tokens": 4, "id": {"last": True}}])
        good = [answer for answer in answers if "error" not in answer]
        bad = [answer["error"] for answer in answers if "error" in answer]
        self.assertEqual([answer["id"] for answer in good], [1, {"last": True}])
        self.assertEqual([len(answer["tokens"]) for answer in good], [6, 4])
        self.assertEqual([answer["prompt_tokens"] for answer in good], [10, 3])
        for answer in good:
            self.assertGreater(answer["seconds"], 0)
            self.assertEqual(answer["text"].encode(errors="replace")[:1].isascii(), True)
        self.assertEqual(len(bad), 10)
        for says in ("not JSON", "unknown key 'wat'", "at most 31", "max_tokens must", "the prompt is empty", "vocabulary of 256", "temperature must",
                     "a JSON object", "either a prompt or tokens", "nested more than 32 deep"):
            self.assertEqual(len([sentence for sentence in bad if says in sentence]), 1, (says, bad))
        self.assertEqual([a["id"] for a in answers if "wat" in a.get("error", "")], ["two"])

    def test_answers_do_not_depend_on_ranks_placements_and_company(self) -> None:
        asks = [{"prompt": text, "max_tokens": 8, "temperature": heat, "top_k": 20, "seed": 5}
                for text, heat in (("the thread", 0), ("loom", 0.9), ("w", 2.0))]
        expected = [answer["tokens"] for answer in self.serve("--ranks", "1", "--placement", "static", requests=asks)]
        for flags in (("--ranks", "2", "--placement", "static"), ("--ranks", "3", "--placement", "history"),
                      ("--ranks", "4", "--placement", "lina", "--batch", "2")):
            self.assertEqual([answer["tokens"] for answer in self.serve(*flags, requests=asks)], expected, flags)
        other = [dict(ask, seed=6) for ask in asks]
        answers = [answer["tokens"] for answer in self.serve("--ranks", "2", requests=other)]
        self.assertEqual(answers[0], expected[0])  # the likeliest token has no seed
        self.assertNotEqual(answers[1:], expected[1:])
        alone = self.serve("--ranks", "2", requests=asks[1:2])
        self.assertEqual(alone[0]["tokens"], expected[1])

    def test_one_of_the_likeliest_is_the_likeliest(self) -> None:
        greedy, one, many = (answer["tokens"] for answer in self.serve("--ranks", "2", model="gpt", requests=[
            {"prompt": "the", "max_tokens": 12}, {"prompt": "the", "max_tokens": 12, "temperature": 3, "top_k": 1},
            {"prompt": "the", "max_tokens": 12, "temperature": 3}]))
        self.assertEqual(greedy, one)
        self.assertNotEqual(greedy, many)  # control

    def test_the_context_ends_an_answer(self) -> None:
        answer, = self.serve("--ranks", "2", requests=[{"prompt": "z" * 28, "max_tokens": 100}])
        self.assertEqual(len(answer["tokens"]), 4)

    def test_ranks_as_processes(self) -> None:
        asks = [{"prompt": "the loom", "max_tokens": 5}, {"prompt": "a", "max_tokens": 3}]
        expected = [answer["tokens"] for answer in self.serve("--ranks", "1", requests=asks)]
        lines = "".join(json.dumps(ask) + "\n" for ask in asks)
        (self.folder / "asks").write_text(lines)
        # Standard input is rank 0's own: under a launcher requests come by a socket.
        path = self.folder / "launched.sock"
        job = subprocess.Popen((WEFT, "launch", "-n", "2", "--", WEFT, "serve", "--checkpoint", "gpt-moe", "--socket", str(path)),
                               cwd=self.folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            answers = self.ask(path, lines, 2)
        finally:
            job.send_signal(signal.SIGINT)
            out, _ = job.communicate(timeout=30 * FACTOR)
        self.assertEqual([answer["tokens"] for answer in answers], expected, out)

    def ask(self, path: Path, lines: str, count: int) -> list[Answer]:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30 * FACTOR)
            for _ in range(int(300 * FACTOR)):
                try:
                    client.connect(str(path))
                    break
                except OSError:
                    time.sleep(0.1)
            client.sendall(lines.encode())
            client.shutdown(socket.SHUT_WR)
            data = b""
            while chunk := client.recv(65536):
                data += chunk
        answers = [json.loads(line) for line in data.splitlines()]
        self.assertEqual(len(answers), count)
        return answers

    def test_a_socket_serves_many_and_a_signal_ends_it(self) -> None:
        path = self.folder / "s.sock"
        job = subprocess.Popen((WEFT, "serve", "--checkpoint", "gpt-moe/checkpoints", "--ranks", "2", "--socket", str(path)), cwd=self.folder,
                               env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            first = self.ask(path, '{"prompt": "the", "max_tokens": 3}\nnothing\n', 2)
            with socket.socket(socket.AF_UNIX) as gone:  # asks, and does not wait
                gone.connect(str(path))
                gone.sendall(b'{"prompt": "w", "max_tokens": 20}\n')
            again = self.ask(path, '{"prompt": "the", "max_tokens": 3}\n', 1)
            self.assertEqual([a["tokens"] for a in first if "tokens" in a], [a["tokens"] for a in again])
            second = self.run_weft("serve", "--checkpoint", "gpt-moe", "--ranks", "2", "--socket", str(path))
            self.assertNotEqual(second.returncode, 0)
            self.assertIn("something is there already", second.stderr)
        finally:
            job.send_signal(signal.SIGINT)
            _, errors = job.communicate(timeout=30 * FACTOR)
        self.assertEqual(job.returncode, 0, errors)
        self.assertIn("requests answered", errors)
        self.assertFalse(path.exists())

    def test_paths_are_kept_and_taken_up(self) -> None:
        ask = [{"prompt": "the weaver takes", "max_tokens": 10}]
        first = self.serve("--ranks", "2", "--save-profile", "paths", requests=ask)
        self.assertTrue((self.folder / "paths").exists())
        self.assertEqual(self.serve("--ranks", "2", "--profile", "paths", requests=ask)[0]["tokens"], first[0]["tokens"])
        (self.folder / "broken").write_bytes(b"x" * 100)
        done = self.run_weft("serve", "--checkpoint", "gpt-moe", "--ranks", "2", "--profile", "broken")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("broken", done.stderr)

    def test_what_cannot_be_served(self) -> None:
        for arguments, says in ((("--checkpoint", "nowhere"), "no run of `weft train` is there"),
                                (("--checkpoint", "gpt-moe", "--placement", "ideal"), "a limit of serve-bench"),
                                (("--checkpoint", "gpt-moe", "--placement", "lima"), "did you mean 'lina'?"),
                                (("--checkpoint", "gpt-moe", "--most", "0"), "--most must be at least 1"),
                                (("--checkpoint", "gpt-moe", "--batch", "0"), "--batch must be at least 1"), ((), "--checkpoint")):
            done = self.run_weft("serve", *arguments)
            self.assertNotEqual(done.returncode, 0, arguments)
            self.assertEqual((done.stdout, len(done.stderr.splitlines())), ("", 1), done.stderr)
            self.assertIn(says, done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
