"""`pip install .` gives a package and a command that work outside the tree, without torch.

    package_test.py COMPILER      the one of the build, so that ccache has what is to be compiled

It has it only from a folder as deep in the tree as the build's: ccache knows sources by their way from there.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77

PROGRAM = """
import sys, weft
assert weft.__file__.startswith(sys.argv[1]), weft.__file__
weft.init()
assert (weft.rank(), weft.size()) == (0, 1) and "torch" not in sys.modules
assert weft.info()["build"]["version"] == weft.__version__
"""


def main():
    if shutil.which("ccache") is None:
        print("the package is built once more, which takes minutes without ccache")
        return SKIPPED
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(prefix="package-", dir=ROOT / "build") as build:
        clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        install += ["--no-build-isolation", "--config-settings", f"build-dir={build}", "--target", folder, str(ROOT)]
        subprocess.run(install, check=True, env={**clean, "CXX": sys.argv[1], "CMAKE_BUILD_PARALLEL_LEVEL": "2"})
        here = {**clean, "PYTHONPATH": folder}
        subprocess.run([sys.executable, "-c", PROGRAM, folder], check=True, env=here, cwd=folder)
        command = os.path.join(folder, "bin", "weft")
        info = subprocess.run([command, "info", "--json"], check=True, env=here, stdout=subprocess.PIPE).stdout
        assert "threads" in json.loads(info)["build"]["transports"]
        # A verb that computes a model says which build has it.
        train = subprocess.run([command, "train"], env=here, stderr=subprocess.PIPE, text=True)
        assert train.returncode == 2 and "LibTorch" in train.stderr and train.stderr.count("\n") == 1, train
        # Nothing of the build or of a torch is in it.
        names = [str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file()]
        assert not [n for n in names if n.endswith((".a", ".h", ".cc", ".cmake")) or "torch" in n.lower()], names
        assert "weft/py.typed" in names and "weft/_weft.pyi" in names
    return 0


sys.exit(main())
