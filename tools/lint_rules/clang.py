"""Rules that a compiler checks: form, clang-tidy, and public headers that stand alone."""

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

from . import layers

FORMAT = "clang-format-19"
TIDY = "clang-tidy-19"
WORKERS = os.cpu_count() or 1
DIAGNOSTIC = re.compile(
    r"^(?P<path>[^:\n]+):(?P<line>\d+):\d+: (?:fatal )?(?:error|warning): (?P<message>.*)$", re.MULTILINE)

# What no public header may reach, however indirectly: users bring their own versions of these, or none.
PRIVATE_LIBRARY = re.compile(
    r"/(torch|ATen|c10|fmt|spdlog|asio|openmpi|mpich|openssl|hwy|cuda|CLI|nlohmann)/"
    r"|/(mpi|cuda|cuda_runtime)\.h$|/asio\.hpp$")


def missing_tool(*tools):
    absent = [tool for tool in tools if not shutil.which(tool)]
    return f"{' and '.join(absent)} not found (make setup)" if absent else None


def parallel(function, items):
    with ThreadPoolExecutor(WORKERS) as pool:
        return [problem for problems in pool.map(function, items) for problem in problems]


def relative(path, root):
    return os.path.relpath(os.path.realpath(os.path.join(root, path)), os.path.realpath(root))


def check_format(tree):
    """(path, line, message) of the first misplaced thing in each file."""
    def one(path):
        done = subprocess.run([FORMAT, "--dry-run", "-Werror", "--ferror-limit=1", path], cwd=tree.root,
                              capture_output=True, text=True)
        match = DIAGNOSTIC.search(done.stderr)
        if match:
            return [(path, int(match["line"]), "not formatted (make format)")]
        return [(path, 1, done.stderr.strip() or "clang-format failed")] if done.returncode else []
    return parallel(one, tree.cpp())


def apply_format(tree):
    for path in tree.cpp():
        subprocess.run([FORMAT, "-i", path], cwd=tree.root, check=True)


def check_tidy(tree, build, cache):
    """(path, line, message) of clang-tidy for every compiled file of src/ and weft_torch/; each header's complaint once."""
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        commands = {relative(entry["file"], tree.root): entry["command"] for entry in json.load(file)}
    version = subprocess.run([TIDY, "--version"], capture_output=True, text=True, check=True).stdout

    def one(path):
        # The file, all it includes from here, how it is compiled, and the checks: nothing else changes the answer.
        key = tree.hash(layers.closure(path, tree), tree.texts[".clang-tidy"], commands[path], version)

        def compute():
            done = subprocess.run([TIDY, "-p", build, "--quiet", path], cwd=tree.root, capture_output=True, text=True)
            found = [[relative(match["path"], tree.root), int(match["line"]), match["message"]]
                     for match in DIAGNOSTIC.finditer(done.stdout)]
            if done.returncode and not found:
                found = [[path, 1, f"{TIDY} failed: {(done.stderr or done.stdout).strip()[-300:]}"]]
            return found
        return [tuple(problem) for problem in cache.get(key, compute)]
    paths = sorted(path for path in commands if path.startswith(("src/", "weft_torch/")) and path in tree.texts)
    return sorted(set(parallel(one, paths))), len(paths)


def check_headers(tree, cache):
    """(path, line, message) of every public header that does not compile alone or reaches a private library."""
    def one(path):
        name = os.path.relpath(path, "include")

        def compute():
            done = subprocess.run(
                ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-H", "-Iinclude", "-x", "c++", "-"],
                input=f'#include "{name}"\n', cwd=tree.root, capture_output=True, text=True)
            if done.returncode:
                match = DIAGNOSTIC.search(done.stderr)
                return [[path, int(match["line"]) if match else 1,
                         f"does not compile alone: {match['message'] if match else done.stderr[-200:]}"]]
            reached = re.findall(r"^\.+ (\S+)$", done.stderr, re.MULTILINE)
            private = next((header for header in reached if PRIVATE_LIBRARY.search(header)), None)
            return [[path, 1, f"reaches {private}"]] if private else []
        return [tuple(problem) for problem in cache.get(tree.hash(layers.closure(path, tree)), compute)]
    return parallel(one, tree.cpp("include/"))
