"""Checkpoint files are safetensors files: Python's safetensors reads what weft writes, and weft what it writes.

  safetensors_python_test.py SAFETENSORS_TEST    the C++ test, which is the other end (--write, --check)

Runs where this Python, or that of .venv, has safetensors and numpy.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77
try:
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as missing:
    venv = ROOT / ".venv/bin/python"
    if venv.exists() and pathlib.Path(sys.prefix) != ROOT / ".venv":
        os.execv(venv, [str(venv), *sys.argv])
    print(f"skipped: {missing} (pip install safetensors numpy)")
    sys.exit(SKIPPED)

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
         "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8}
NUMPY = {"BOOL": numpy.bool_, "U8": numpy.uint8, "I8": numpy.int8, "I16": numpy.int16, "U16": numpy.uint16,
         "F16": numpy.float16, "I32": numpy.int32, "U32": numpy.uint32, "F32": numpy.float32,
         "C64": numpy.complex64, "F64": numpy.float64, "I64": numpy.int64, "U64": numpy.uint64}
METADATA = {"step": "1000", 'a "b"\\\n\x01': "π 🧵", "": ""}


def content(name: str, size: int) -> bytes:
    return bytes((i * 7 + len(name.encode())) % 256 for i in range(size))


def sample() -> dict[str, tuple[str, list[int], bytes]]:
    """The table of Sample in safetensors_test.cc: name -> (dtype, shape, bytes)."""
    rows = {f"of.{dtype}": (dtype, [3, 5], content(f"of.{dtype}", 15 * size)) for dtype, size in SIZES.items()}
    rows["of.BOOL"] = ("BOOL", [3, 5], b"\1" * 15)
    for name, dtype, shape, size in [("scalar", "F32", [], 4), ("empty", "F64", [0, 3], 0), ("empty too", "U8", [2, 0], 0),
                                     ("", "U8", [1], 1), ('层."weight"\\\n\t\x7f🧵', "I32", [1, 1, 2], 8)]:
        rows[name] = (dtype, shape, content(name, size))
    return rows


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def python_reads(program: str, path: str) -> None:
    run(program, "--write", path).check_returncode()
    raw = pathlib.Path(path).read_bytes()
    tensors = {name: (t["dtype"], list(t["shape"]), bytes(t["data"])) for name, t in safetensors.deserialize(raw)}
    wanted = sample()
    assert tensors == wanted, {n: (tensors.get(n), w) for n, w in wanted.items() if tensors.get(n) != w}

    # As numpy arrays, of those types that numpy has.
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
        assert len(metadata.pop("weft.crc32c")) == len(metadata.pop("weft.header_crc32c")) == 8
        assert metadata == METADATA, metadata
        for name, (dtype, shape, data) in wanted.items():
            if dtype in NUMPY:
                array = file.get_tensor(name)
                assert array.dtype == NUMPY[dtype] and list(array.shape) == shape and array.tobytes() == data, name


def weft_reads(program: str, path: str) -> None:
    arrays = {name: numpy.frombuffer(data, dtype=NUMPY[dtype]).reshape(shape)
              for name, (dtype, shape, data) in sample().items() if dtype in NUMPY}
    safetensors.numpy.save_file(arrays, path, metadata=METADATA)
    done = run(program, "--check", path)
    assert done.returncode == 0, done.stdout + done.stderr

    # Negative control: another value is found.
    safetensors.numpy.save_file(arrays | {"scalar": numpy.array(0.5, dtype=numpy.float32)}, path, metadata=METADATA)
    done = run(program, "--check", path)
    assert done.returncode == 1 and "scalar" in done.stdout, done.stdout + done.stderr


def main() -> None:
    (program,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        python_reads(program, f"{folder}/weft.safetensors")
        weft_reads(program, f"{folder}/python.safetensors")
    print(f"safetensors {safetensors.__version__}: {len(sample())} tensors each way")


if __name__ == "__main__":
    main()
