"""Comments: lists that a tool has run together, and declarations that a comment has broken in two."""

import re

COLUMNS = 110  # as .clang-format has it
COMMENT = re.compile(r"^\s*//(?P<text>.*)$")
GAP = re.compile(r"\S( {2,})(?=\S)")
PROSE = re.compile(r"[A-Za-z']+[.,:]?")


def indentation(line):
    return len(line) - len(line.lstrip())


def merged(lines, at):
    """Whether lines[at], the text of a comment line, has a list's item inside of it, or is the rest of a line that was broken.

    An item is a short term, a gap, and what is said of it; what is said begins in one column, in the items and where it goes on.
    """
    text, below = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
    beside = lines[max(at - 1, 0):at] + [below]
    columns = {match.end() for line in beside for match in GAP.finditer(line)} | {indentation(line) for line in beside}
    for match in GAP.finditer(text):
        before = text[:match.start() + 1].split()[:-1]
        if len(before) > 1 and all(PROSE.fullmatch(word) for word in before[-3:]) and match.end() not in columns:
            return True
    if any(line.lstrip().startswith("- ") for line in lines) and re.search(r"[a-z.,;)] - [a-z]", text):
        return True
    return bool(text.startswith("  ") and re.fullmatch(r"[a-z]+", text.strip()) and indentation(below) > indentation(text) + 2)


def blocks(text):
    """(number of its first line, texts of its lines) of each run of comment lines."""
    first, lines = 0, []
    for number, line in enumerate(text.split("\n"), 1):
        match = COMMENT.match(line)
        if match:
            if not lines:
                first = number
            lines.append(match.group("text"))
        elif lines:
            yield first, lines
            lines = []
    if lines:
        yield first, lines


def broken(above, line):
    """Whether two lines of code were one but for the comment behind them."""
    match = re.match(r"\s+(?P<code>[^/\s].*?[;,{])\s+//", line)
    if not match or not above.strip() or re.search(r"[;{}:,]$|//", above) or "// NOLINT" in line:
        return False
    if re.match(r"\s*(?:#|\}? ?else\b|(?:if|for|while|template|requires)\b)", above):  # two lines of their own
        return False
    return len(above) + 1 + len(match.group("code")) <= COLUMNS


def check(path, text):
    """(line, message)"""
    for first, lines in blocks(text):
        for at in range(len(lines)):
            if merged(lines, at):
                yield first + at, "a list that was run together: one item a line"
    lines = text.split("\n")
    for number in range(1, len(lines)):
        if broken(lines[number - 1], lines[number]):
            yield number, "a declaration that the comment behind it breaks in two: the comment goes above it"
