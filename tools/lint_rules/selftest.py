"""Negative controls: each rule must find what is planted here, and must leave the good example alone."""

import json
import os
import tempfile

from . import clang, comments, coroutines, layers, sizes, tree

# What a coroutine rule must find in the body of `Task<int> f(Comm comm, bool c)`, and what it must accept.
BAD_COROUTINES = {
    "brace-initialised": [
        "co_await g({.name = s});",
        "co_await g(Options{.name = s});",
        "auto x = co_await g(comm, {});",
        "co_await Awaiter{comm};",
        "co_return Result{co_await a()};",
        "for (int i = 0; i < 3; ++i) co_await g(Options{i});",
        "auto task = [](Comm other) -> Task<void> { co_await g({.name = s}); };",
        "co_await g(  // lint: coroutine-ok\n{.name = s});",  # a comment without a reason allows nothing
    ],
    "more than one": ["h(co_await a(), co_await b());", "co_return co_await a() + co_await b();"],
    "?:": ["int x = c ? co_await a() : co_await b();", "use(c ? 1 : co_await b());"],
    "capturing lambda": [
        "co_await run([&] { return 1; });",
        "co_await run([x = 1]() mutable -> int { return x; });",
        "auto y = co_await [=](int z) -> Task<int> { co_return z; }(1);",
    ],
}
GOOD_COROUTINES = [
    "const Options options{.name = s};\nco_await g(options);",
    "const Result result{co_await a()};",
    "auto task = [](Comm other) -> Task<void> { co_await a(); };\nco_await task(comm);",
    "if (co_await a()) co_await b();",
    "if (const int n = co_await a(); n > 0) {\n  co_await b();\n} else {\n  co_await d();\n}",
    "for (const Hop hop : hops(comm.size())) {\n  const Message m = co_await comm.recv(hop);\n}",
    "h(c ? 1 : 2, co_await a());",
    "int x = co_await a() ? 1 : 2;",
    "co_await run([](int z) { return z; });",
    "auto f = [&] { return 1; };\nco_await run(f);",
    'log("{co_await a, co_await b}");  // co_await g({.x = 1}) ? co_await a : 2',
    "// lint: coroutine-ok (Tag is trivial)\nco_await g(Tag{1});",
    "std::byte bytes[4]{};\nco_await g(bytes);",
    "co_await g(1'000, 'x', u'{');",
    "switch (co_await a()) {\n  case 1: {\n    co_await b();\n    break;\n  }\n  default:\n    co_await d();\n}",
]
MUTEX = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../src/base/mutex.h")
# Three ways to count; which of them holds the lock?
COUNTER = """#include "base/mutex.h"

class Counter {
 public:
  void add() {
    BODY
  }

 private:
  void add_locked() WEFT_REQUIRES(mutex_) { ++count_; }
  weft::Mutex mutex_;
  int count_ WEFT_GUARDED_BY(mutex_) = 0;
};

void count() { Counter().add(); }
"""
UNLOCKED = ("++count_;", "add_locked();", "{ const weft::Lock lock(mutex_); }\n    ++count_;",
            "weft::Lock lock(mutex_);\n    lock.unlock();\n    ++count_;")
LOCKED = ("const weft::Lock lock(mutex_);\n    ++count_;", "const weft::Lock lock(mutex_);\n    add_locked();")
# Pairs of files that another file could hide something in if they were read as one; what must be said of the first.
PLAIN = "int plain() { return two::value; }\n"
REFUSES = "namespace {\nint refuse(int x) { return x; }\n}  // namespace\n"
IN_PAIRS = [
    ("namespace {\nconst int kUnused = 1;\n}  // namespace\n", PLAIN, "unused-const-variable"),
    ("namespace {\nint uncalled() { return 1; }\n}  // namespace\n", PLAIN, "unused-function"),
    ("namespace one {\nusing two::value;\n}\n", "namespace one {\nusing two::value;\nint f() { return value; }\n}\n",
     "misc-unused-using-decls"),
    ("#ifndef SEEN\nbool g(bool b) {\n  if (b)\n    return true;\n  else\n    return true;\n}\n#endif\n",
     "#define SEEN 1\nint f() { return SEEN; }\n", "bugprone-branch-clone"),
    (f"{REFUSES}int f() {{ return refuse(1); }}\n", f"{REFUSES}int g() {{ return refuse(2); }}\n", None),
    ("int f() { return 1; }\n", PLAIN, None),
]
GOOD_HEADER = "#pragma once\n\n#include <string>\n\ninline std::string name() { return {}; }\n"


def coroutine(body):
    return ("template <class T = int>\nclass Task {\n  struct alignas(16) P { int x = 0; };\n  P p_{1};\n"
            "  Task(int a) : p_{a} {}\n};\n"
            f"Task<int> f(Comm comm, bool c) {{\n{body}\nco_return 0;\n}}\n")


def planted(files):
    """A folder with these files in it, as a Tree; the caller keeps the folder alive."""
    folder = tempfile.TemporaryDirectory(prefix="weft-lint-")
    for path, text in files.items():
        full = os.path.join(folder.name, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as file:
            file.write(text)
    return folder, tree.Tree(folder.name)


class Controls:
    def __init__(self):
        self.failures = []

    def expect(self, what, messages, wanted):
        """`wanted` is part of a message that must be there, or None where none may be."""
        found = " | ".join(messages)
        if wanted is None and messages:
            self.failures.append(f"{what}: the good example is refused: {found}")
        elif wanted is not None and wanted not in found:
            self.failures.append(f"{what}: the planted violation was not found (wanted '{wanted}', found '{found}')")


def check_coroutines(controls):
    for wanted, bodies in BAD_COROUTINES.items():
        for body in bodies:
            controls.expect(f"coroutines: {body}", [m for _, m in coroutines.check("f.cc", coroutine(body))], wanted)
    for body in GOOD_COROUTINES:
        controls.expect(f"coroutines: {body}", [m for _, m in coroutines.check("f.cc", coroutine(body))], None)


def check_includes(controls):
    cases = [
        ("src/wire/a.cc", '#include "transports/t.h"\n', "comes after or beside"),
        ("src/wire/a.cc", '#include "kernels/k.h"\n', "comes after or beside"),
        ("src/wire/a.cc", '#include "weft/engine.h"\n', "comes after or beside"),
        ("src/base/a.cc", "#include <mpi.h>\n", "MPI"),
        ("src/transports/threads.cc", "#include <asio.hpp>\n", "asio"),
        ("src/engine/a.cc", "#include <openssl/evp.h>\n", "OpenSSL"),
        ("src/engine/a.cc", "#include <torch/torch.h>\n", "torch"),
        ("src/kernels/a.cc", "#include <cuda_runtime.h>\n", "CUDA"),
        ("src/engine/a.cc", '#include "data/d.h"\n', "comes after or beside"),
        ("src/data/a.cc", "#include <torch/torch.h>\n", "torch"),
        ("weft_torch/models/a.cc", "#include <fmt/core.h>\n", "fmt"),
        ("weft_torch/models/a.cc", '#include "weft/world.h"\n', None),
        ("src/wire/a.cc", '#include "b.h"\n', "is in none of include/, src/"),
        ("include/weft/unlisted.h", "#pragma once\n", "without a layer"),
        ("include/weft/comm.h", '#include "base/b.h"\n', "of src/"),
        ("src/elsewhere/a.cc", "", "in no layer"),
        ("src/transports/tcp.cc", '#include <asio.hpp>\n#include <openssl/evp.h>\n#include "wire/w.h"\n', None),
        ("src/transports/mpi.cc", '#include <mpi.h>\n#include "weft/comm.h"\n', None),
        ("weft_torch/models/a.cc", '#include <torch/torch.h>\n#include "data/d.h"\n#include "base/b.h"\n', None),
        ("src/engine/a.cc", '// #include <mpi.h>\n#include "weft/engine.h"\n#include "base/b.h"\n', None),
    ]
    there = {"src/transports/t.h": "", "src/kernels/k.h": "", "src/base/b.h": "", "src/wire/w.h": "",
             "include/weft/engine.h": "", "include/weft/comm.h": "", "include/weft/world.h": "", "src/data/d.h": ""}
    for path, text, wanted in cases:
        folder, files = planted({**there, path: text})
        controls.expect(f"includes: {path}: {text!r}", [m for _, m in layers.check(path, text, files)], wanted)
        folder.cleanup()


def check_listed(controls):
    folder, files = planted({"src/CMakeLists.txt": "set(s\n  base/there.cc\n)", "src/base/there.cc": "",
                             "src/base/here.cc": "", "src/other/there.cc": ""})
    for path, wanted in [("src/base/there.cc", None), ("src/base/here.cc", "not built"),
                         ("src/other/there.cc", "not built")]:
        controls.expect(f"listed: {path}", [m for _, m in layers.check_listed(path, "", files)], wanted)
    folder.cleanup()


def check_comments(controls):
    cases = [
        ("//   gres  not in the result. conserves lres  0 where this rank\n//   sent it.\n", "run together"),
        ("//   elements reaches 2  accumulate   the one pass\n//   and more\n", "run together"),
        ("//   bucket  where the first of its parameters\n//   is\n//           its priority\n", "run together"),
        ("// - one thing - another thing\n// - a third\n", "run together"),
        ("//   gres  not in the result. conserves\n//   lres  0 where this rank sent it\n//         or not\n", None),
        ("//   weft::run_ranks(4, body);     // ranks as threads\n//   weft::join_world();           // under mpirun\n", None),
        ("//   weft launch -n 4 -- ./program    four processes\n", None),
        ("// adam  m += (1 - b) * (g - m);  v = c * v + (1 - c) * g * g\n", None),
        ("  int node_size =\n      1;  // ranks of a group\n", "in two"),
        ("  std::vector<double>\n      values;  // of each\n", "in two"),
        ("  // ranks of a group\n  int node_size = 1;\n", None),
        ("  if (a)\n    f();  // or so\n", None),
        ("  const double value = " + "a" * 60 + " +\n      " + "b" * 40 + ";  // of both\n", None),
        ("extern char**\n    environ;  // NOLINT(x)\n", None),
    ]
    for text, wanted in cases:
        controls.expect(f"comments: {text!r}", [m for _, m in comments.check("a.h", text)], wanted)


def check_hygiene(controls):
    for line, wanted in [("// TO" "DO: later", "unfinished"), ("path = /wo" "rk/x", "one machine"), ("// done", None)]:
        controls.expect(f"hygiene: {line}", [m for _, m in tree.hygiene("a.cc", line)], wanted)


def check_sizes(controls):
    cases = [
        ("void f(int a, int b, int c, int d, int e, std::map<int, int> g) {}", "f has 6 parameters"),
        ("void f() {\n" + "  g();\n" * 60 + "}", "f has 62 lines"),
        ("void f(std::map<int, int> a, int b = g(1, 2), int c = 0, int d = 0, int e = 0) {\n" + "  g();\n" * 50 + "}", None),
        ("namespace n {\nstruct S {\n" + "  int x;\n" * 90 + "};\n}", None),
    ]
    for text, wanted in cases:
        controls.expect(f"sizes: {text[:40]}", [m for _, m in sizes.check_cpp("a.cc", text)], wanted)
    for path, lines, wanted in [("src/collectives/dense/a.cc", 301, "more than 300"), ("src/engine/a.cc", 301, None),
                                ("src/engine/a.cc", 501, "more than 500")]:
        controls.expect(f"sizes: {path}", [m for _, m in sizes.check_file(path, "x\n" * lines)], wanted)


def check_compilers(controls):
    """Form, clang-tidy and public headers, in one planted tree: one file breaks each rule, one breaks none."""
    with open(MUTEX, encoding="utf-8") as file:
        mutex = file.read()
    counters = {f"counter{i}.cc": COUNTER.replace("BODY", body) for i, body in enumerate(UNLOCKED + LOCKED)}
    folder, files = planted({
        ".clang-format": "BasedOnStyle: Google\n",
        ".clang-tidy": "Checks: '-*,bugprone-*,clang-diagnostic-*'\nWarningsAsErrors: '*'\nHeaderFilterRegex: '/src/'\n",
        "include/weft/good.h": GOOD_HEADER,
        "include/weft/needs_more.h": "#pragma once\ninline std::string name() { return {}; }\n",
        "include/weft/reaches.h": '#pragma once\n#include "weft/fmt/core.h"\n',
        "include/weft/fmt/core.h": "#pragma once\n",
        "src/base/form.cc": "int  f( ){return 1;}\n",
        "src/base/suspicious.h": "#pragma once\ninline bool g(bool b) {\n  if (b)\n    return true;\n"
                                 "  else\n    return true;\n}\n",
        "src/base/mutex.h": mutex,
        **{f"src/base/{name}": text for name, text in counters.items()},
        "src/base/tidy.cc": '#include "base/suspicious.h"\n\nbool h() { return g(true); }\n',
    })
    build = os.path.join(folder.name, "build")
    cache = tree.Cache(os.path.join(build, "cache"))
    with open(os.path.join(build, "compile_commands.json"), "w", encoding="utf-8") as file:
        json.dump([{"directory": folder.name, "file": os.path.join(folder.name, "src/base", name),
                    "command": f"clang++-19 -std=c++20 -Wthread-safety -I{folder.name}/src -c {folder.name}/src/base/{name}"}
                   for name in ("tidy.cc", "form.cc", *counters)], file)

    def said(problems, path):
        return [message for where, _, message in problems if where == path]
    form = clang.check_format(files)
    controls.expect("format", said(form, "src/base/form.cc"), "not formatted")
    controls.expect("format", said(form, "include/weft/good.h"), None)
    headers = clang.check_headers(files, cache)
    controls.expect("headers", said(headers, "include/weft/needs_more.h"), "does not compile alone")
    controls.expect("headers", said(headers, "include/weft/reaches.h"), "reaches")
    controls.expect("headers", said(headers, "include/weft/good.h"), None)
    for attempt in ("first run", "from the cache"):
        found, _ = clang.check_tidy(files, build, cache)
        controls.expect(f"tidy, {attempt}", said(found, "src/base/suspicious.h"), "bugprone-branch-clone")
        controls.expect(f"tidy, {attempt}", said(found, "src/base/form.cc"), None)
        for i, body in enumerate(UNLOCKED + LOCKED):
            wanted = "clang-diagnostic-thread-safety-analysis" if body in UNLOCKED else None
            controls.expect(f"tidy, {attempt}: {body}", said(found, f"src/base/counter{i}.cc"), wanted)
    # A header that changes must not be answered from the cache.
    files.texts["src/base/suspicious.h"] = "#pragma once\ninline bool g(bool b) { return b; }\n"
    with open(os.path.join(folder.name, "src/base/suspicious.h"), "w", encoding="utf-8") as file:
        file.write(files.texts["src/base/suspicious.h"])
    controls.expect("tidy, header mended", said(clang.check_tidy(files, build, cache)[0], "src/base/suspicious.h"), None)
    folder.cleanup()


def check_pairs(controls):
    """clang-tidy says of files that could be read as one what it says of each; and those that can be are."""
    for first, second, wanted in IN_PAIRS:
        # Both orders: a file can hide something in those before it, or in those after.
        for names in (("a.cc", "b.cc"), ("b.cc", "a.cc")):
            sources = {f"src/base/{name}": f'#include "base/two.h"\n\n{body}' for name, body in zip(names, (first, second))}
            folder, files = planted({
                ".clang-tidy": "Checks: '-*,bugprone-branch-clone,misc-unused-using-decls,clang-diagnostic-*'\nWarningsAsErrors: '*'\n",
                "src/base/two.h": "#pragma once\nnamespace two {\ninline constexpr int value = 2;\n}\n", **sources})
            build = os.path.join(folder.name, "build")
            cache = tree.Cache(os.path.join(build, "cache"))
            with open(os.path.join(build, "compile_commands.json"), "w", encoding="utf-8") as file:
                json.dump([{"directory": build, "file": f"{folder.name}/{path}",
                            "command": f"clang++-19 -std=c++20 -Wall -I{folder.name}/src -o {path}.o -c {folder.name}/{path}"}
                           for path in sources], file)
            found, _ = clang.check_tidy(files, build, cache)
            for name, expected in zip(names, (wanted, None)):
                said = [message for path, _, message in found if path == f"src/base/{name}"]
                controls.expect(f"tidy in pairs: {first!r} beside {second!r}", said, expected)
            folder.cleanup()
    ways = {body: ((), clang.own_names(body)) for body in (PLAIN, *IN_PAIRS[-2][:2])}
    if clang.grouped(ways) != [[IN_PAIRS[-2][0], PLAIN], [IN_PAIRS[-2][1]]]:
        controls.failures.append(f"tidy in pairs: read as one are {clang.grouped(ways)}")


def run():
    """Problems, as every rule gives them."""
    missing = clang.missing_tool(clang.FORMAT, clang.TIDY, "g++")
    if missing:
        return [("tools/lint", 1, missing)]
    controls = Controls()
    for check in (check_coroutines, check_includes, check_listed, check_comments, check_hygiene, check_sizes, check_compilers,
                  check_pairs):
        check(controls)
    return [("tools/lint_rules/selftest.py", 1, failure) for failure in controls.failures]
