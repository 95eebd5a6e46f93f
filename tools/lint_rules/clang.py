"""Rules that a compiler checks: form, clang-tidy, and public headers that stand alone."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from . import layers

FORMAT = "clang-format-19"
TIDY = "clang-tidy-19"
WORKERS = os.cpu_count() or 1
DIAGNOSTIC = re.compile(
    r"^(?P<path>[^:\n]+):(?P<line>\d+):\d+: (?:fatal )?(?:error|warning): (?P<message>.*)$", re.MULTILINE)

# Three quarters of clang-tidy's time goes into walking the headers of the standard library, once for each check. So files
# that are compiled in the same way are first read as one, up to this many: where nothing is said of all, nothing would be
# said of one. Of some that is not true, and they stand alone: those with macros or conditions, which reach into the file
# that follows, and those with using-declarations, which another file's use would count as used. (Whether a file includes
# what it needs is seen when it is built.)
TOGETHER = 10
STANDS_ALONE = re.compile(r"^\s*#\s*(?!include\b|pragma\b)|^using (namespace )?[\w:]+;", re.MULTILINE)
UNNAMED = re.compile(r"^namespace \{$(.*?)^\}  // namespace$", re.MULTILINE | re.DOTALL)
DEFINED = re.compile(r"^[^\s/}].*?\b([A-Za-z_]\w*)(?=[({;]| = | \{)", re.MULTILINE)

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


def flags_of(command):
    """What a compile command says besides its compiler, its file and where the result goes: a tuple."""
    flags = []
    words = iter(shlex.split(command)[1:])
    for word in words:
        if word in ("-c", "-o"):
            next(words)
        else:
            flags.append(word)
    return tuple(flags)


def own_names(text):
    """About what a file defines in unnamed namespaces, which two files read as one may not have both."""
    return {name for part in UNNAMED.findall(text) for name in DEFINED.findall(part)}


def grouped(files):
    """Lists of paths that can be read as one, of path -> (flags, own names)."""
    common = Counter(name for _, names in files.values() for name in names)
    groups = []
    # Files with the commonest names open groups, the others fill them evenly.
    for path in sorted(files, key=lambda path: -max((common[name] for name in files[path][1]), default=0)):
        flags, names = files[path]
        fitting = [group for group in groups
                   if len(group["paths"]) < TOGETHER and group["flags"] == flags and not group["names"] & names]
        if not fitting:
            groups.append({"paths": [], "flags": flags, "names": set()})
        group = min(fitting, key=lambda group: len(group["paths"])) if fitting else groups[-1]
        group["paths"].append(path)
        group["names"] |= names
    return [group["paths"] for group in groups]


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
    paths = sorted(path for path in commands if path.startswith(("src/", "weft_torch/")) and path in tree.texts)
    # The file, all it includes from here, how it is compiled, and the checks: nothing else changes the answer.
    keys = {path: tree.hash(layers.closure(path, tree), tree.texts[".clang-tidy"], commands[path], version) for path in paths}

    def said(*what):
        done = subprocess.run([TIDY, "--quiet", *what], cwd=tree.root, capture_output=True, text=True)
        found = [[relative(match["path"], tree.root), int(match["line"]), match["message"]]
                 for match in DIAGNOSTIC.finditer(done.stdout)]
        if done.returncode and not found:
            found = [[what[-1], 1, f"{TIDY} failed: {(done.stderr or done.stdout).strip()[-300:]}"]]
        return found

    def together(group):
        """Remembers that nothing is said of these files where that is so of all of them as one; else tries each half."""
        if len(group) < 2:
            return
        joined = os.path.join(build, f"together-{keys[group[0]]}.cc")
        with open(joined, "w", encoding="utf-8") as file:
            file.writelines(tree.texts[path] for path in group)
        found = said(joined, "--", *flags_of(commands[group[0]]))
        os.remove(joined)
        if found:
            together(group[:len(group) // 2])
            together(group[len(group) // 2:])
        else:
            for path in group:
                cache.get(keys[path], list)

    groups = grouped({path: (flags_of(commands[path]), own_names(tree.texts[path])) for path in paths
                      if not cache.knows(keys[path]) and not STANDS_ALONE.search(tree.texts[path])})
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(together, groups))

    def one(path):
        return [tuple(problem) for problem in cache.get(keys[path], lambda: said("-p", build, path))]
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
