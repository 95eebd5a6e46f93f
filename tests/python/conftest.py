"""Starts the jobs of this folder as a user would: ranks are processes of `weft launch`, torchrun or mpirun.

A job (jobs/*.py) asserts on every rank; its ranks end with 0 where all of it held. PYTHONPATH names the package under test.
"""

import os
import shutil
import subprocess
import sys

import pytest

import weft
from weft._command import _PROGRAM

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jobs")
TIMEOUT_SECONDS = 100 * int(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))


def environment(**more):
    # One thread: with more, torch's threads spin where cores are busy.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def command_of(job, size, launcher, arguments):
    program = [sys.executable, os.path.join(JOBS, job), *map(str, arguments)]
    if launcher == "weft":
        return [_PROGRAM, "launch", "-n", str(size), "--", *program]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *program[1:]]
    if launcher == "mpirun":
        root = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        return ["mpirun", *root, "-n", str(size), *program]
    return program


@pytest.fixture
def launch():
    """launch(job, size, *arguments, launcher="weft", status=0) -> stdout and stderr together."""

    def run(job, size, *arguments, launcher="weft", status=0):
        if launcher == "mpirun" and ("mpi" not in weft.info()["build"]["transports"] or not shutil.which("mpirun")):
            pytest.skip("no mpi here")
        done = subprocess.run(
            command_of(job, size, launcher, arguments),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        if status is not None:
            assert done.returncode == status, done.stdout
        return done.stdout

    return run


@pytest.fixture
def start():
    """start(job, size, *arguments) -> the running process, which is ended with the test."""
    running = []

    def run(job, size, *arguments):
        running.append(
            subprocess.Popen(
                command_of(job, size, "weft" if size > 1 else "alone", arguments),
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()
