"""What g++ 12 compiles wrongly, or not at all, around co_await.

g++ 12 destroys some temporaries of a full expression with co_await twice (aggregates, capturing lambdas, the
operands of ?:), so an awaiting statement names them first. A statement that is known to be safe (a trivially
destructible aggregate, a class with constructors) carries the comment  // lint: coroutine-ok (reason).
"""

import re

from . import cpp

ALLOW = re.compile(r"//\s*lint: coroutine-ok \(\S.*\)")
AWAIT = {"co_await", "co_yield"}


def await_in_conditional(texts):
    """co_await as an operand after ?, up to the end of the conditional expression."""
    depth, questions = 0, []
    for text in texts:
        if text in ("(", "[", "{"):
            depth += 1
        elif text in cpp.CLOSING:
            depth -= 1
            questions = [q for q in questions if q <= depth]
        elif text == "?":
            questions.append(depth)
        elif text == ",":
            questions = [q for q in questions if q < depth]
        elif text in AWAIT and questions:
            return True
    return False


def brace_temporaries(texts):
    """Braces that make a temporary: all but those of a variable's own declaration, `Type name{...}`."""
    depth = 0
    for i, text in enumerate(texts):
        if text == "{":
            before = texts[i - 2] if i >= 2 else ""
            declares = (depth == 0 and i >= 2 and re.fullmatch(r"[A-Za-z_]\w*", texts[i - 1])
                        and re.fullmatch(r"[A-Za-z_]\w*|>|\*|&|&&", before) and before not in cpp.EXPRESSION_KEYWORDS)
            if not declares:
                return True
        depth += text in ("(", "[", "{")
        depth -= text in cpp.CLOSING
    return False


def complaints(texts):
    if sum(text in AWAIT for text in texts) > 1:
        yield "more than one co_await in a statement"
    if await_in_conditional(texts):
        yield "co_await inside ?:"
    if cpp.CAPTURING in texts:
        yield "a capturing lambda in a statement with co_await: name it before"
    if brace_temporaries(texts):
        yield "a brace-initialised temporary in a statement with co_await: name it before"


def check(path, text):
    """(line, message) for each broken rule."""
    lines = text.split("\n")
    for statement in cpp.parse(text).statements:
        texts = [token.text for token in statement]
        awaits = [token.line for token in statement if token.text in AWAIT]
        if not awaits:
            continue
        first, last = statement[0].line, statement[-1].line
        if any(ALLOW.search(line) for line in lines[max(0, first - 2):last]):
            continue
        for message in complaints(texts):
            yield awaits[0], message
