"""The Python package as a user meets it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time

import pytest

import weft


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_dense_training_equals_one_process(launch, size):
    launch("equality.py", size)


def test_a_package_without_its_extension_says_so(tmp_path):
    left_out = shutil.ignore_patterns("_weft*.so", "__pycache__")
    shutil.copytree(os.path.dirname(weft.__file__), tmp_path / "weft", ignore=left_out)
    done = subprocess.run([sys.executable, "-c", "import weft"], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: weft's extension is not built here: `make build`" in done.stderr, done.stderr


def test_averages_are_as_wide_as_the_widest_parameter(launch):
    launch("mixed.py", 3)


@pytest.mark.parametrize("kind, size", [("numpy", 1), ("numpy", 3), ("torch", 2)])
def test_collectives(launch, kind, size):
    launch("collectives.py", size, kind)


def test_collectives_over_mpi(launch):
    launch("collectives.py", 2, "numpy", launcher="mpirun")


def test_sparse_learns_conserves_skips_and_resumes_on_other_ranks(launch, tmp_path):
    launch("sparse.py", 3, tmp_path, "save")
    launch("sparse.py", 2, tmp_path, "load")


def test_a_job_that_goes_on_keeps_its_figures_of_the_link(launch, tmp_path):
    launch("figures.py", 5, tmp_path, "save")
    launch("figures.py", 5, tmp_path, "load")


def test_gradients_are_views_of_buckets(launch):
    launch("views.py", 2)


def test_backward_inside_of_backward(launch):
    launch("reentrant.py", 2)


def test_hooks_of_several_threads_at_once(launch):
    launch("threads.py", 2)


def test_trace_of_each_rank(launch, tmp_path):
    folder = tmp_path / "not" / "there"
    launch("traced.py", 2, folder)
    assert sorted(os.listdir(folder)) == ["trace.rank0.json", "trace.rank1.json"]
    for rank in range(2):
        with open(folder / f"trace.rank{rank}.json") as file:
            events = json.load(file)["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        names = {event["name"] for event in events}
        assert "all_reduce" in names and "plan of the step" in names, names
        assert any(name.startswith("gradients of") for name in names), names
        timed = [event for event in events if event["ph"] != "M"]
        assert timed and all(event["ts"] >= 0 for event in timed)
        waits = [event["dur"] for event in events if event.get("cat") == "waiting"]
        assert waits and (rank == 1 or max(waits) > 0.1e6), "microseconds: rank 0 waited for rank 1, which slept"


def test_a_trace_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("no folder")
    code = f"import weft; weft.init(trace={str(tmp_path / 'file')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and said.startswith("weft.UsageError: the trace '") and "cannot be written" in said, done.stderr


def test_fork_is_noticed(launch):
    launch("forks.py", 1)


def read_until(process, text, lines):
    output = ""
    while output.count(text) < lines:
        line = process.stdout.readline()
        assert line, output
        output += line
    return output


def test_interrupt_ends_a_wait_within_a_second(start):
    process = start("late.py", 2, "sleep")
    output = read_until(process, "is in", 2)
    time.sleep(1)
    assert process.poll() is None, "control: without a signal it waits"
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    started = time.monotonic()
    for rank in ranks:
        subprocess.run(["kill", "-INT", rank], check=False)
    output += process.communicate()[0]
    assert time.monotonic() - started < 1, output
    assert "KeyboardInterrupt" in output and process.returncode != 0
    assert "terminate called" not in output and "Aborted" not in output


def test_interrupt_ends_joining(start):
    process = start("late.py", 1, "alone")
    read_until(process, "is in", 1)
    process.kill()
    process.communicate()
    # A rank whose peer never comes.
    code = "import os, weft; os.environ.update(RANK='0', WORLD_SIZE='2'); print('joining', flush=True); weft.init()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    read_until(process, "joining", 1)
    time.sleep(0.5)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=20)[0]
    assert time.monotonic() - started < 1, output
    assert "KeyboardInterrupt" in output and process.returncode in (-signal.SIGINT, 130, 1)


def test_a_killed_rank_is_named(launch):
    output = launch("late.py", 3, "kill", status=None)
    said = re.findall(r"after ([\d.]+) s: (\w+) (.*)", output)
    assert len(said) == 1 and said[0][1] == "TransportError", output
    assert re.search(r"rank [12]\b", said[0][2]), output
    assert float(said[0][0]) < 3, output


def test_the_error_that_ended_a_rank_is_quoted(launch):
    output = launch("late.py", 2, "raise", status=None)
    said = [line for line in output.splitlines() if "after" in line]
    assert len(said) == 1 and "rank 1: the program ended with ArithmeticError: out of numbers" in said[0], output


def test_bad_options_are_one_sentence():
    import torch

    model = torch.nn.Linear(4, 4)
    for options, word in [
        ({"scheme": "spardle"}, "spardl"),
        ({"density": 0.0}, "density"),
        ({"densety": 0.1}, "densety"),
        ({"codec": "zip"}, "zip"),
        ({"bucket_mib": 0}, "bucket_mib"),
        ({"not_finite": "hope"}, "hope"),
        ({"teams": "many"}, "teams"),
    ]:
        with pytest.raises(weft.UsageError) as caught:
            weft.DataParallel(model, **options)
        assert word in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    # One parameter of float64 is enough: its gradient is not made narrower without a word.
    for one in (model, torch.nn.ReLU()):
        wide = torch.nn.Sequential(one, torch.nn.Linear(4, 4, dtype=torch.float64))
        for scheme in ("spardl", "dense-bf16", "powersgd"):
            with pytest.raises(weft.UsageError, match=f"float64 .*'{scheme}'"):
                weft.DataParallel(wide, scheme=scheme)
    with pytest.raises(weft.UsageError, match="no parameter"):
        weft.DataParallel(torch.nn.ReLU())


def test_types_that_cannot_be_averaged_are_refused_by_name():
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, dtype=torch.complex64))
    with pytest.raises(weft.UsageError) as caught:
        weft.DataParallel(net, scheme="dense")
    assert "'1.weight'" in str(caught.value) and "complex64" in str(caught.value) and "bfloat16" in str(caught.value)
    net[1].requires_grad_(False)  # control: what is not trained may be of any type
    net.register_parameter("scale", torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))
    weft.DataParallel(net, scheme="dense")
    with pytest.raises(RuntimeError, match="floating point"):  # torch itself trains no integers
        torch.nn.Parameter(torch.ones(3, dtype=torch.int64))


def test_memory_that_means_something_else_is_refused_by_name_or_resolved():
    import numpy
    import torch

    weft.init()
    for kind in (">f4", ">i8", [("a", ">f4")]):
        foreign = numpy.arange(4).astype(numpy.float32).astype(kind)
        for call in (weft.all_reduce, weft.broadcast):
            with pytest.raises(weft.UsageError, match="byte order") as caught:
                call(foreign)
            assert "\n" not in str(caught.value)
    native = numpy.arange(4).astype("<f4" if sys.byteorder == "little" else ">f4")  # control
    weft.all_reduce(native)
    assert native.tolist() == [0, 1, 2, 3]

    numbers = torch.tensor([1 + 2j, 3 - 4j])
    with pytest.raises(weft.UsageError):  # what is no number of weft cannot be added
        weft.all_reduce(numbers.clone())
    gathered = torch.zeros_like(numbers)
    weft.all_gather(gathered, numbers.conj())
    assert torch.equal(gathered, torch.tensor([1 - 2j, 3 + 4j]))
    for lazy in (torch._neg_view(torch.tensor([1.0, 2.0])), numbers.conj()):
        expected = lazy.clone()
        received = torch.zeros_like(expected)
        weft.all_to_all(received, lazy)
        assert torch.equal(received, expected), "what a tensor says, not what lies in its memory"


def test_a_state_is_what_its_tensors_say_not_their_memory():
    import torch

    def model():
        return weft.DataParallel(torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)), scheme="spardl", density=0.05)

    def residuals(state):
        return [row for row in state["rows"] if row["kind"] == "residual" and row["values"] is not None]

    first = model()
    first(torch.randn(3, 40)).square().sum().backward()
    saved = first.compression.state_dict()
    expected = [row["values"].clone() for row in residuals(saved)]
    assert len(expected) > 1 and all(values.ne(0).any() for values in expected)
    spaced = torch.stack([torch.cat(expected), torch.cat(expected) + 1], dim=1)

    def loaded(values_of):
        at = 0
        for row, values in zip(residuals(saved), expected):
            row["values"] = values_of(at, values.numel())
            at += values.numel()
        second = model()
        second.compression.load_state_dict(saved)
        return [row["values"] for row in residuals(second.compression.state_dict())]

    def equal(values_of):
        return all(torch.equal(a, b) for a, b in zip(loaded(values_of), expected))

    shared = torch.cat(expected)
    assert equal(lambda at, n: shared[at : at + n]), "tensors of one storage"
    assert equal(lambda at, n: spaced[at : at + n, 0]), "not contiguous"
    assert equal(lambda at, n: torch._neg_view(-shared[at : at + n])), "the negative of its memory"
    assert equal(lambda at, n: shared[at : at + n].double()), "another type"
    assert not equal(lambda at, n: spaced[at : at + n, 1]), "control: other values"
    with pytest.raises(weft.UsageError, match="elements"):  # control: a length that is wrong
        loaded(lambda at, n: shared)


def test_dir_lists_what_there_is():
    listed = dir(weft)
    assert listed == sorted(weft.__all__)
    for name in listed:
        assert getattr(weft, name) is not None
    assert {"DataParallel", "DDPState", "ddp_hook", "all_reduce", "UsageError", "__version__"} <= set(listed)
    # The names that load torch are there before it is loaded; one that is not listed is not there.
    code = "import sys, weft; assert 'DataParallel' in dir(weft) and 'torch' not in sys.modules; weft.Gradients"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "no attribute 'Gradients'" in done.stderr, done.stderr
    public = {name for name in vars(weft) if not name.startswith("_")} - {"TYPE_CHECKING", "Any", "List", "annotations"}
    assert public <= set(listed), public - set(listed)


def test_sparse_and_half_gradients_and_broken_backward():
    import torch

    embedding = torch.nn.Embedding(50, 8, sparse=True)
    model = weft.DataParallel(embedding, scheme="dense")
    model(torch.tensor([1, 1, 4])).sum().backward()
    assert not embedding.weight.grad.is_sparse and embedding.weight.grad.sum() == 24 and embedding.weight.grad[1, 0] == 2

    half = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    weft.DataParallel(half, scheme="dense")(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert half.weight.grad.dtype == torch.bfloat16 and half.weight.grad.eq(1).all()

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ArithmeticError("broken")

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    wrapped = weft.DataParallel(net, scheme="dense")
    with pytest.raises(ArithmeticError):
        net[1](Breaks.apply(net[0](torch.ones(1, 4)))).sum().backward()
    with pytest.raises(weft.UsageError, match="did not end"):
        wrapped(torch.ones(1, 4))


def test_module_is_let_go():
    import gc
    import weakref

    import torch

    module = torch.nn.Linear(4, 4)
    wrapped = weft.DataParallel(module, scheme="dense")
    wrapped(torch.ones(1, 4)).sum().backward()
    gone = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert gone() is None
    module(torch.ones(1, 4)).sum().backward()  # its hooks do nothing any more


def test_compiled_outside():
    import torch

    net = torch.nn.Linear(4, 4)
    parallel = weft.DataParallel(net, scheme="dense")
    compiled = torch.compile(parallel, backend="eager")
    compiled(torch.ones(2, 4)).sum().backward()
    assert net.weight.grad.eq(2).all()
    assert parallel.compression.step == 1  # the hooks were there


def has_a_compiler():
    return shutil.which("c++") and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))


@pytest.mark.skipif("not has_a_compiler()", reason="inductor needs a C++ compiler and Python's headers")
def test_compiled_by_inductor():
    """Inside and outside: the gradients are those of the module as it is."""
    import torch
    from torch._inductor import metrics

    def net():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))

    def gradients(module, call):
        call(torch.linspace(-1, 1, 24).reshape(4, 6)).square().sum().backward()
        return [p.grad for p in module.parameters()]

    plain, inside, outside = net(), net(), net()
    expected = gradients(plain, plain)
    torch._dynamo.reset()
    metrics.reset()
    around = weft.DataParallel(torch.compile(inside, backend="inductor"), scheme="dense")
    within = weft.DataParallel(outside, scheme="dense")
    for module, call, parallel in [(inside, around, around), (outside, torch.compile(within, backend="inductor"), within)]:
        for mine, reference in zip(gradients(module, call), expected):
            # Fused kernels add in another order: some roundings of 2^-24 of sums of at most 24 terms near one.
            assert torch.allclose(mine, reference, rtol=1e-5, atol=1e-5)
        assert parallel.compression.step == 1  # the hooks were there
    assert metrics.generated_kernel_count > 0, "control: inductor made the code"


def test_info_and_bench():
    # The installed torch is named before it is imported, and is the one that is imported.
    code = "import sys, weft; told = weft.info()['python']['torch']; assert 'torch' not in sys.modules; print(told); "
    code += "import torch; assert torch.__version__ == told == weft.info()['python']['torch']"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() != "None", done
    without = "import importlib.metadata as m, weft\ndef gone(name): raise m.PackageNotFoundError(name)\n"  # control
    without += "m.version = gone; assert weft.info()['python']['torch'] is None"
    assert subprocess.run([sys.executable, "-c", without]).returncode == 0
    assert {"threads", "sim"} <= set(weft.info()["build"]["transports"])
    assert weft.info()["build"]["version"] == weft.__version__
    rows = weft.bench("allreduce", ranks=2, transport="sim", link="1gbit,50us", bytes="64KiB", algorithm=["ring"])
    assert len(rows) == 1 and rows[0]["algorithm"] == "ring", rows
    with pytest.raises(weft.Error):
        weft.bench("allreduse")


WITH_GPU = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="no GPU here")


@WITH_GPU
def test_dense_training_of_cuda_tensors_equals_one_process(launch):
    launch("equality.py", 2, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=WITH_GPU)])
def test_stages_on_a_gpu_equal_one_process(launch, device):
    """The same job on the CPU says that it holds where there is no GPU."""
    launch("stage_cuda.py", 2, device)


@WITH_GPU
def test_cuda_tensors_are_staged():
    import torch

    x = torch.arange(5.0, device="cuda")
    weft.init()
    weft.all_reduce(x)
    assert x.tolist() == [0, 1, 2, 3, 4]
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)).cuda()
    same = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)).cuda()
    same.load_state_dict(net.state_dict())
    data = torch.randn(8, 64, device="cuda")
    weft.DataParallel(net, scheme="dense")(data).square().sum().backward()
    same(data).square().sum().backward()
    for mine, reference in zip(net.parameters(), same.parameters()):
        assert mine.grad.is_cuda and torch.equal(mine.grad, reference.grad)
