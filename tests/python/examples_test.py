"""The tour of examples/ does what its pages say."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import TIMEOUT_SECONDS, environment

import weft
from weft._command import _PROGRAM

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples")
BUILT = os.path.join(os.path.dirname(os.path.realpath(_PROGRAM)), "examples")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*command):
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def built(name):
    path = os.path.join(BUILT, name)
    if not os.path.exists(path):
        pytest.skip(f"{path} was not built")
    return path


def losses(output):
    return [float(text) for text in re.findall(r"loss ([\d.]+)", output)]


def sent(output):
    return [int(text) for text in re.findall(r"(\d+) bytes of gradients", output)]


def test_01_all_reduce():
    output = run(built("01_all_reduce"), "4")
    assert output.count("rank") == 4 and output.count("6 from each, 6000 in all; gradient 4") == 4, output
    output = run(_PROGRAM, "launch", "-n", "2", "--", built("01_all_reduce"))
    assert output.count("over tcp: 1 from each") == 2, output


def test_02_train():
    output = run(built("02_train"), "2")
    assert losses(output)[-1] < 0.9 * losses(output)[0] and sent(output)[-1] > 0, output


def test_08_moe():
    output = run(*TORCHRUN, os.path.join(EXAMPLES, "08_moe.py"))
    assert losses(output)[-1] < 0.7 * losses(output)[0], output
    assert "the state has 8 of them" in output, output


def test_07_pipeline():
    output = run(*TORCHRUN[:-1], "4", os.path.join(EXAMPLES, "07_pipeline.py"))
    assert losses(output)[-1] < 0.6 * losses(output)[0], output
    figures = re.findall(r"(\d+) bytes of gradients and (\d+) to other stages", output)
    # Of the last stage, back: fewer than the 64 points of 8 tokens by 32 values of a step, which backward_rank=0 sends.
    assert figures and all(int(gradients) > 0 and 0 < int(stages) < 4 * 64 * 8 * 32 for gradients, stages in figures), output
    assert "the state has 6 modules" in output, output


@pytest.mark.parametrize("name", ["03_data_parallel.py", "04_ddp_hook.py"])
def test_training_in_python(name):
    output = run(*TORCHRUN, os.path.join(EXAMPLES, name))
    assert losses(output)[-1] < 0.7 * losses(output)[0], output
    assert 0 < sent(output)[-1] < sent(output)[0] / 3, output  # at the warm-up's density it sends five times as much


def test_06_embedding():
    output = run(*TORCHRUN, os.path.join(EXAMPLES, "06_embedding.py"))
    assert losses(output)[-1] < 0.8 * losses(output)[0], output
    figures = re.findall(r"(\d+) bytes a step for a table of (\d+)", output)
    assert len(figures) == 2 and all(0 < int(rows) < int(table) / 5 for rows, table in figures), output


def test_05_mpirun():
    if "mpi" not in weft.info()["build"]["transports"] or not shutil.which("mpirun"):
        pytest.skip("no mpi here")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3", sys.executable]
    output = run(*command, os.path.join(EXAMPLES, "05_mpirun.py"))
    assert output.count("over mpi: sum 3, rows from [0, 1, 2], 3 ones, largest rank 2") == 3, output


def test_every_example_is_in_the_tour():
    with open(os.path.join(EXAMPLES, "README.md")) as page:
        text = page.read()
    names = [name for name in os.listdir(EXAMPLES) if re.match(r"\d\d_", name)]
    assert len(names) == 8 and all(f"]({name})" in text for name in names)
