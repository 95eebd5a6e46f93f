"""Just enough of C++ for the rules: comments and literals blanked, statements and blocks told apart.

It relies on formatted code (clang-format runs first) and knows no types; what it cannot tell, a rule must tolerate.
"""

import re
from dataclasses import dataclass, field

LITERAL_OR_COMMENT = re.compile(
    r'//[^\n]*|/\*.*?\*/'
    r'|R"(?P<delimiter>[^()\s\\]{0,16})\(.*?\)(?P=delimiter)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])(?:u8|[uUL])?'(?:\\.|[^'\\\n])*'",  # not the ' of 1'000
    re.DOTALL)
TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.']*|->|::|&&|\|\||\S")

CONTROL = {"if", "for", "while", "switch", "catch", "do", "else", "try"}
TYPE_KEYWORDS = {"namespace", "class", "struct", "union", "enum"}
SPECIFIERS = {"mutable", "noexcept", "constexpr", "static", "const", "override", "final"}
EXPRESSION_KEYWORDS = {"return", "co_return", "co_await", "co_yield", "case", "throw", "new", "else", "do"}
CLOSING = {")": "(", "]": "[", "}": "{"}
CAPTURING = "<capturing lambda>"
PLAIN_LAMBDA = "<lambda>"


def blank(text, keep_strings=False):
    """The text with comments (and literals) turned to spaces; every line keeps its number."""
    def replace(match):
        piece = match.group(0)
        if keep_strings and not piece.startswith("/"):
            return piece
        inner = re.sub(r"[^\n]", " ", piece)
        return inner if piece.startswith("/") else '""' + inner[2:]
    return LITERAL_OR_COMMENT.sub(replace, text)


def includes(text):
    """(line, name, is_system) of each #include."""
    for number, line in enumerate(blank(text, keep_strings=True).split("\n"), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(2), match.group(1) == "<"


@dataclass
class Token:
    text: str
    line: int


@dataclass
class Block:
    """A body in braces: of a function, a lambda, a control statement, a class or a namespace."""
    head: list
    first_line: int
    is_lambda: bool = False
    last_line: int = 0


@dataclass
class Parsed:
    statements: list = field(default_factory=list)  # lists of tokens; a lambda's body is one token in its statement
    blocks: list = field(default_factory=list)


def tokens_of(text):
    code = blank(text)
    # A preprocessor line with its continuations is no statement.
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), code, flags=re.MULTILINE)
    line, at = 1, 0
    for match in TOKEN.finditer(code):
        line += code.count("\n", at, match.start())
        at = match.start()
        yield Token(match.group(0), line)


def matching_open(tokens, close):
    """Index of the bracket that tokens[close] closes, or -1."""
    depth = 0
    for i in range(close, -1, -1):
        text = tokens[i].text
        if text in CLOSING:
            depth += 1
        elif text in "([{":
            depth -= 1
            if depth == 0:
                return i
    return -1


def trailing_return(tokens):
    """Index of a -> before a trailing return type at the end of the tokens, or -1."""
    for i in range(len(tokens) - 1, -1, -1):
        text = tokens[i].text
        if text == "->":
            return i if i and (tokens[i - 1].text in (")", "]") or tokens[i - 1].text in SPECIFIERS) else -1
        if not re.fullmatch(r"\w+|::|<|>|,|\*|&|&&", text):
            return -1
    return -1


def lambda_captures(tokens):
    """The capture list's tokens if a lambda's body is about to open, else None."""
    arrow = trailing_return(tokens)
    i = (arrow if arrow >= 0 else len(tokens)) - 1
    while i >= 0 and tokens[i].text in SPECIFIERS:
        i -= 1
    if i >= 0 and tokens[i].text == ")":
        i = matching_open(tokens, i) - 1
        if i >= 0 and tokens[i].text == ">":  # []<class T>(...)
            while i >= 0 and tokens[i].text != "]":
                i -= 1
    if i < 0 or tokens[i].text != "]":
        return None
    start = matching_open(tokens, i)
    before = tokens[start - 1].text if start > 0 else ""
    if (re.fullmatch(r"\w+", before) and before not in EXPRESSION_KEYWORDS) or before in (")", "]"):
        return None  # a subscript or an array
    return tokens[start + 1:i]


def brace_kind(statement, openers):
    """What a { opens after these tokens: 'lambda', 'block' or 'init'."""
    if not statement:
        return "block"
    if lambda_captures(statement) is not None:
        return "lambda"
    if openers:
        return "init"
    last = statement[-1].text
    if last in {")", ":", "}", "&", "&&"} | CONTROL | SPECIFIERS or trailing_return(statement) >= 0:
        return "block"
    words = [token.text for token in statement]
    if "requires" in words or words[0] == "extern":
        return "block"
    keyword = max((i for i, word in enumerate(words) if word in TYPE_KEYWORDS), default=None)
    return "block" if keyword is not None and "=" not in words[keyword:] else "init"


def split_control(statement):
    """`if (head) rest;` is two statements: the head, and the rest (itself perhaps one with a head)."""
    i = 0
    while i < len(statement) and statement[i].text in {"else", "do"}:
        i += 1
    if i >= len(statement) or statement[i].text not in CONTROL:
        return [statement]
    depth = 0
    for j in range(i + 1, len(statement)):
        depth += statement[j].text in ("(", "[", "{")
        depth -= statement[j].text in CLOSING
        if depth == 0 and statement[j].text == ")":
            rest = statement[j + 1:]
            return [statement[:j + 1]] + (split_control(rest) if rest else [])
    return [statement]


def parse(text):
    result = Parsed()
    statement, openers, stack = [], [], []

    def finish():
        if statement:
            result.statements.extend(split_control(statement))

    for token in tokens_of(text):
        if token.text == "{":
            kind = brace_kind(statement, openers)
            if kind != "init":
                block = Block(statement, statement[0].line if statement else token.line, kind == "lambda")
                if kind == "lambda":
                    captures = lambda_captures(statement)
                    block.first_line = token.line
                    stack.append((block, statement, openers, CAPTURING if captures else PLAIN_LAMBDA))
                else:
                    finish()
                    stack.append((block, [], [], None))
                result.blocks.append(block)
                statement, openers = [], []
                continue
        if token.text == "}" and "{" not in openers:
            finish()
            if not stack:
                statement, openers = [], []
                continue
            block, statement, openers, marker = stack.pop()
            block.last_line = token.line
            if marker:
                statement = statement + [Token(marker, token.line)]
            continue
        if token.text == ";" and not openers:
            finish()
            statement = []
            continue
        if token.text in ("(", "[", "{"):
            openers.append(token.text)
        elif token.text in CLOSING and openers:
            openers.pop()
        statement.append(token)
    finish()
    return result
