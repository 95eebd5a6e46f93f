"""Which folder may include which: includes go one way, from later layers to earlier ones."""

import posixpath
import re

from . import cpp

# A folder includes itself and folders of earlier rows; folders of one row do not know each other.
LAYERS = [
    ["base"],
    ["patterns"],
    ["wire", "kernels"],
    ["transports"],
    ["collectives", "compressors"],
    ["engine"],
    ["state"],
    ["step"],
    ["data_parallel", "embedding", "experts", "pipeline"],
    ["world", "data"],
    ["workload"],
    ["planner"],
    ["measure"],
    ["weft_torch"],
]
DEPTH = {folder: depth for depth, row in enumerate(LAYERS) for folder in row}

# The folder that each public header belongs to. One that is not listed is an error: add it where it belongs.
PUBLIC = {
    "base": ["arena.h", "clock.h", "config.h", "dtype.h", "error.h", "function_ref.h", "inline_function.h",
             "pollable.h", "random.h", "task.h"],
    "transports": ["comm.h", "kernel_costs.h", "traffic.h", "transport.h"],
    "collectives": ["collective.h", "sparse.h"],
    "engine": ["engine.h", "trace.h"],
    "state": ["train/optimizer_options.h"],
    "step": ["train/shape.h", "train/stage_options.h", "train/tensor_options.h"],
    "data_parallel": ["train/scheme_options.h"],
    "embedding": ["train/tables_options.h"],
    "experts": ["train/expert_options.h"],
    "data": ["train/data_options.h"],
    "world": ["weft.h", "world.h"],
    "workload": ["train/model_options.h", "train/options.h", "train/run.h"],
}
FOLDER_OF_PUBLIC = {header: folder for folder, headers in PUBLIC.items() for header in headers}

# Libraries that only some files of src/ may include, or none at all.
LIBRARIES = [
    (re.compile(r"mpi\.h$"), "MPI", re.compile(r"src/transports/mpi")),
    (re.compile(r"(boost/)?asio\b"), "asio", re.compile(r"src/transports/tcp")),
    (re.compile(r"openssl/"), "OpenSSL", re.compile(r"src/transports/tcp")),
    (re.compile(r"(torch|ATen|c10)/"), "torch", re.compile(r"weft_torch/")),
    (re.compile(r"(fmt|spdlog)/"), "fmt", re.compile(r"src/")),  # torch brings another fmt
    (re.compile(r"(cuda|cub|nccl|thrust)(_\w+)?(/|\.h)"), "CUDA", re.compile(r"src/kernels/cuda/")),
]


def folder_of(path):
    """The layer's folder of a file in src/, weft_torch/ or include/weft/, or None for a public header nobody listed."""
    parts = path.split("/")
    if parts[0] == "weft_torch":
        return parts[0]
    if parts[0] == "src":
        return parts[1] if len(parts) > 2 else None
    return FOLDER_OF_PUBLIC.get(posixpath.relpath(path, "include/weft"))


def resolve(name, tree):
    """The file in the tree that #include "name" means, or None."""
    return next((p for p in (f"include/{name}", f"src/{name}", name) if p in tree.texts), None)


def check(path, text, tree):
    """(line, message) for each include of a file in src/, weft_torch/ or include/weft/ that goes the wrong way."""
    mine = folder_of(path)
    if mine not in DEPTH:
        yield 1, ("public header without a layer: list it in tools/lint_rules/layers.py" if path.startswith("include/")
                  else f"{path} is in no layer of tools/lint_rules/layers.py")
        return
    for line, name, is_system in cpp.includes(text):
        for pattern, library, allowed in LIBRARIES:
            if pattern.match(name) and not (allowed and allowed.match(path)):
                yield line, f"<{name}>: {library} has no place here"
        if is_system:
            continue
        target = resolve(name, tree)
        if target is None:
            yield line, f'"{name}" is in none of include/, src/ and weft_torch/ (write "folder/file.h")'
            continue
        if path.startswith("include/") and target.startswith("src/"):
            yield line, f'a public header includes "{name}" of src/'
        theirs = folder_of(target)
        if theirs in DEPTH and theirs != mine and DEPTH[theirs] >= DEPTH[mine]:
            yield line, f'{mine} includes "{name}" of {theirs}, which comes after or beside it'


def check_listed(path, _text, tree):
    """(line, message) for a source file that no CMakeLists.txt above it names: it would silently not be built."""
    folder = path
    while folder:
        folder = posixpath.dirname(folder)
        name = re.escape(posixpath.relpath(path, folder or "."))
        lists = tree.texts.get(posixpath.join(folder, "CMakeLists.txt"), "")
        if re.search(rf"(?<![\w/.-]){name}(?![\w/.-])", lists):
            return
    yield 1, "in no CMakeLists.txt: it is not built"


def closure(path, tree, roots=("include/", "src/", "tests/", "")):
    """The file and everything in the tree that it includes, directly or not."""
    seen, todo = set(), [path]
    while todo:
        current = todo.pop()
        if current in seen or current not in tree.texts:
            continue
        seen.add(current)
        for _, name, _ in cpp.includes(tree.texts[current]):
            todo += [root + name for root in roots]
    return sorted(seen)
