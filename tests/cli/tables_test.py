#!/usr/bin/env python3
"""The tables of docs/results: tables_test.py PATH_TO_WEFT [unittest arguments].

What is counted in them (bytes, rounds, entries, simulated times) is what this build gives, and the README's numbers are theirs. How they
are written is tried on tables whose commands are `echo`.
"""
from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
WEFT = Path(sys.argv.pop(1)).resolve()

import table_list  # noqa: E402
from table_list import Column, Source, Table, counted, field, name  # noqa: E402


def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("tables", str(ROOT / "bench/tables"))
    spec = importlib.util.spec_from_loader("tables", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


tables = script()


def check(root: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "bench/tables"), "--check", "--weft", str(WEFT), "--root", str(root), *more],
                          capture_output=True, text=True, check=False)


class Documents(unittest.TestCase):
    def test_say_what_the_tree_gives(self) -> None:
        done = check(ROOT)
        self.assertEqual(done.returncode, 0, f"\n{done.stderr}\n`bench/tables --counted` writes what is counted")

    def test_every_table_with_commands_is_on_the_list(self) -> None:
        marked = re.findall(r"<!-- table: (\S+) -->", "".join(path.read_text() for path in (ROOT / "docs/results").glob("*.md")))
        self.assertEqual(sorted(marked), sorted(one.name for one in table_list.TABLES))


class Controls(unittest.TestCase):
    """The check on a copy in which something is wrong. A quick table stands for all."""

    NAME = "engine/tcp"

    def changed(self, pattern: str, new: str, path: str = "docs/results/engine.md") -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            shutil.copytree(ROOT / "docs/results", root / "docs/results")
            shutil.copy(ROOT / "README.md", root)
            text = (root / path).read_text()
            before, marker, rest = text.partition(f"<!-- table: {self.NAME if 'docs' in path else 'readme/numbers'} -->")
            after, times = re.subn(pattern, new, rest, count=1)
            self.assertEqual(times, 1, pattern)
            (root / path).write_text(before + marker + after)
            done = check(root, "--only", self.NAME)
            self.assertEqual((root / path).read_text(), before + marker + after, "a check writes nothing")
            return done

    def test_the_copy_itself_passes(self) -> None:
        done = self.changed("ring", "ring")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_figure_that_differs_in_one_digit_is_found(self) -> None:
        done = self.changed(r"(\n\| ring \| [\d,]+)\d ", r"\g<1>x ")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"--- engine.md\n(.*\n)*-\| ring \| [\d,]+x .*\n\+\| ring \| [\d,]+ ")

    def test_a_row_that_is_gone_and_one_that_should_be_are_found(self) -> None:
        self.assertEqual(self.changed(r"\n\| ring .*", "").returncode, 1)
        self.assertEqual(self.changed(r"(\n\| )(ring .*)", r"\1\2\1old \2").returncode, 1)

    def test_another_command_is_found(self) -> None:
        self.assertEqual(self.changed("--byte-scale 16", "--byte-scale 8").returncode, 1)

    def test_a_measured_figure_is_not_judged_but_where_the_readme_has_it(self) -> None:
        self.assertEqual(self.changed(r"(\n\| rabenseifner \|.*\| )[\d.]+( % \|)", r"\g<1>1\2").returncode, 0)
        self.assertIn("--- README.md\n", self.changed(r"(\n\| ring \|.*\| )[\d.]+( % \|)", r"\g<1>1\2").stderr)

    def test_a_number_of_the_readme_that_no_table_has_is_found(self) -> None:
        self.assertEqual(self.changed(r"(all-reduce, 64 MiB[^|]*\| )", r"\g<1>1", "README.md").returncode, 1)


class Written(unittest.TestCase):
    """Two counted rows, one that only measuring gives."""

    TABLE = Table("made/up", 0, (
        name("who", lambda row: row.get("system") or row["algorithm"]), counted("rounds", field("rounds")),
        Column("median", field("seconds")), Column("over", field("over"))),
        (Source("""echo '{"algorithm": "ring", "rounds": 6, "seconds": 2}'"""),
         Source("""echo '{"seconds": 8}'""", more=({"system": "MPI"},)),
         Source("""echo '{"algorithm": "tree", "rounds": 4, "seconds": 3}'""", slow=True),
         Source("""echo '{"algorithm": "ring", "rounds": 6}'; echo '{"algorithm": "tree", "rounds": 4}'""", counted=True)),
        derive=lambda _, measured: [row.update(over=8 / row["seconds"]) for row in measured.values()] and None)

    def written(self, block: str, one: Table = TABLE, **options: Any) -> tuple[list[str], list[str]]:
        """Lines of the table and problems, where the document has `block`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "docs/results/made.md")
            path.parent.mkdir(parents=True)
            path.write_text(f"before\n<!-- table: made/up -->\n{block}<!-- end -->\nafter\n")
            writer = tables.Writer(argparse.Namespace(**{"weft": WEFT, "root": Path(folder), "slow": False, "counted": False, "check": False,
                                                         "prefix": ""} | options))
            writer.count([one])
            writer.write(one)
            writer.finish()
            text = path.read_text()
        self.assertTrue(text.startswith("before\n<!-- table: made/up -->\n```\n") and text.endswith("\n<!-- end -->\nafter\n"), text)
        return [line for line in text.splitlines() if line.startswith("|")][2:], writer.problems

    OLD = "| who | median | over | rounds |\n|---|---|---|---|\n| MPI | 9 | 1 | - |\n| tree | 5 | 2 | 1 |\n| bush | 7 | 3 | 1 |\n"

    def test_what_is_counted_is_written_and_what_is_measured_stays(self) -> None:
        self.assertEqual(self.written(self.OLD, counted=True), (["| ring | 6 | - | - |", "| tree | 4 | 5 | 2 |", "| MPI | - | 9 | 1 |"], []))

    def test_what_is_measured_is_written_but_for_the_slow(self) -> None:
        self.assertEqual(self.written(self.OLD), (["| ring | 6 | 2 | 4.0 |", "| tree | 4 | 5 | 2 |", "| MPI | - | 8 | 1.0 |"], []))
        self.assertEqual(self.written(self.OLD, slow=True)[0][1], f"| tree | 4 | 3 | {8 / 3} |")

    def test_objects_may_have_lines_and_lists(self) -> None:
        whole = """{\n "algorithm": "ring",\n "list": [\n {\n "rounds": 7\n }\n ],\n "rounds": 6\n}\n"""
        listed = """word {\n{"benchmarks": [\n {"algorithm": "tree"},\n {"algorithm": "bush"}\n ]\n}\n"""
        found = tables.objects_of(f"{whole}{whole}said\n{listed}", Source(""))
        self.assertEqual([row["algorithm"] for row in found], ["ring", "ring", "tree", "bush"])

    def test_slow_rows_keep_their_places(self) -> None:
        counts = (Source("""echo '{"algorithm": "ring", "rounds": 6}'""", counted=True),
                  Source("""echo '{"algorithm": "tree", "rounds": 4}'""", counted=True, slow=True))
        old = "| who | rounds | median | over |\n|---|---|---|---|\n| tree | 9 | 5 | 2 |\n| ring | 5 | 2 | 1 |\n"
        self.assertEqual(self.written(old, self.TABLE._replace(sources=counts)), (["| tree | 9 | 5 | 2 |", "| ring | 6 | 2 | 1 |"], []))
        self.assertEqual(self.written(old, self.TABLE._replace(sources=counts), slow=True)[0][0], "| tree | 4 | 5 | 2 |")

    def test_a_measured_run_that_counts_otherwise_is_a_problem(self) -> None:
        sources = (self.TABLE.sources[0]._replace(command="""echo '{"algorithm": "ring", "rounds": 7, "seconds": 2}'"""), *self.TABLE.sources[1:])
        self.assertEqual(self.written("", self.TABLE._replace(sources=sources))[1], ["made/up: ring: rounds is 6 as counted and 7 as measured"])

    def test_a_command_that_fails_or_gives_nothing_changes_nothing(self) -> None:
        twice = """echo '{"algorithm": "ring"}'; echo '{"algorithm": "ring"}'; echo '{"algorithm": "ring"}'"""
        for command in ("false", "true", "echo '{}'; echo '{}'", twice):
            sources = (Source(command, more=({}, {}, {})), *self.TABLE.sources)
            with self.assertRaises(tables.Problem):
                self.written(self.OLD, self.TABLE._replace(sources=sources))


if __name__ == "__main__":
    unittest.main()
