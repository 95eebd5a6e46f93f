"""Beside torch.distributed and torch.amp: the hook of DDP, process groups, loss scales, and ranks that disagree."""

import os
import subprocess
import sys

import pytest
from conftest import JOBS, environment

ROOT = os.path.join(JOBS, "..", "..", "..")


def test_hook_of_stock_ddp(launch):
    launch("ddp.py", 2, launcher="torchrun")


def test_unused_parameters_stay_out_of_the_step_of_ddp(launch):
    launch("unused.py", 2, launcher="torchrun")


@pytest.mark.parametrize("kind, launcher", [("data_parallel", "weft"), ("ddp", "torchrun")])
def test_a_scaler_changes_no_state_and_skips_overflows(launch, kind, launcher):
    launch("scaled.py", 2, kind, launcher=launcher)


def test_place_and_token_of_a_process_group(launch):
    launch("groups.py", 3, launcher="torchrun")


@pytest.mark.skipif("os.geteuid() != 0", reason="network namespaces need root")
def test_place_and_token_of_a_process_group_between_hosts():
    command = [os.path.join(ROOT, "tools", "netlab"), "run", "--hosts", "3", "--rate", "1gbit", "--timeout", "90", "--"]
    done = subprocess.run([*command, sys.executable, os.path.join(JOBS, "hosts.py")], env=environment(), capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name, values",
    [
        ("divisor", (2.0, 4.0)),
        ("find_unused", (True, False)),
        ("not_finite", ("'nan'", "'skip'")),
        ("scaler", (True, False)),
        ("not_finite", ("'nan'", "'nan'")),  # control
    ],
)
def test_options_that_differ_between_ranks_are_noticed(launch, name, values):
    launch("options.py", 2, name, *values)
