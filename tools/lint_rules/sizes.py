"""Size is a smell: it is shown, and never fails."""

from . import cpp

FUNCTION_LINES = 60
ALGORITHM_LINES = 300  # a file of src/collectives/FAMILY/
FILE_LINES = 500
PARAMETERS = 5

NOT_FUNCTIONS = cpp.CONTROL | cpp.TYPE_KEYWORDS | {"requires"}
NOT_NAMES = {"alignas", "decltype", "noexcept", "requires", "__attribute__"}


def name_and_parameters(head):
    """A function's name and how many parameters it has, from the tokens before its body."""
    for i, token in enumerate(head):
        if token.text != "(" or i == 0 or head[i - 1].text in NOT_NAMES:
            continue
        depth, commas, empty = 0, 0, True
        for inner in head[i:]:
            depth += inner.text in ("(", "[", "{", "<")
            depth -= inner.text in (")", "]", "}", ">")
            if depth == 0:
                break
            commas += depth == 1 and inner.text == ","
            empty = empty and inner.text == "("
        return head[i - 1].text, 0 if empty else commas + 1
    return None, 0


def check_cpp(path, text):
    for block in cpp.parse(text).blocks:
        lines = block.last_line - block.first_line + 1
        if block.is_lambda:
            if lines > FUNCTION_LINES:
                yield block.first_line, f"a lambda has {lines} lines (more than {FUNCTION_LINES})"
            continue
        if not block.head or block.head[0].text in NOT_FUNCTIONS:
            continue
        name, parameters = name_and_parameters(block.head)
        if name is None:
            continue
        if lines > FUNCTION_LINES:
            yield block.first_line, f"{name} has {lines} lines (more than {FUNCTION_LINES})"
        if parameters > PARAMETERS:
            yield block.first_line, f"{name} has {parameters} parameters (more than {PARAMETERS})"


def check_file(path, text):
    lines = text.count("\n")
    algorithm = path.startswith("src/collectives/") and path.count("/") >= 3
    limit = ALGORITHM_LINES if algorithm else FILE_LINES
    if lines > limit:
        yield 1, f"{lines} lines (more than {limit})"
