"""The README keeps its word: its first program is the one that the package test builds and runs, and what it links to exists."""

import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


class Readme(unittest.TestCase):
    def test_first_program_is_the_one_that_is_built(self) -> None:
        (program,) = re.findall(r"```cpp\n(.*?)```", README, re.S)
        self.assertEqual(program, (ROOT / "tests/package/program.cc").read_text())

    def test_links_lead_somewhere(self) -> None:
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
            prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
            for target in re.findall(r"\]\(([^)#]+)\)", prose):
                if not target.startswith("http"):
                    self.assertTrue((page.parent / target).exists(), f"{page.name} links to {target}")

    def test_every_make_target_it_names_exists(self) -> None:
        makefile = (ROOT / "Makefile").read_text()
        targets = set(re.findall(r"\bmake ([a-z]+)", README))
        self.assertTrue({"demo", "test", "help"} <= targets)
        for target in targets:
            self.assertRegex(makefile, rf"(?m)^(\.PHONY:.*\b{target}\b|{target}\b.*:)")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
