"""Does a test exist? Answered from a file's text, by its syntax tree; nothing is imported or run."""

from __future__ import annotations

import ast

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_test(content: bytes, node: str) -> bool:
    """Whether a file holds the test of a node id (``path::Class::test[param]``); without ``::`` the file is enough.

    A class with bases may inherit the test from another file, so there the class is enough. In a file that is not
    Python the last name has to occur.
    """
    path, *names = node.split("::")
    names = [name.partition("[")[0] for name in names]
    if not names:
        return True
    if not path.endswith(".py"):
        return names[-1].encode() in content
    try:
        scope: list[ast.stmt] = ast.parse(content).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for position, name in enumerate(names):
        last = position == len(names) - 1
        found = next((each for each in _definitions(scope) if each.name == name), None)
        if found is None:
            return False
        if isinstance(found, _Function):
            return last
        if not last and found.bases and not any(each.name == names[-1] for each in _definitions(found.body)):
            return True
        scope = found.body
    return True


def _definitions(body: list[ast.stmt]) -> list[_Function | ast.ClassDef]:
    """Functions and classes of a body, also those under a condition."""
    found: list[_Function | ast.ClassDef] = []
    for statement in body:
        if isinstance(statement, _Function | ast.ClassDef):
            found.append(statement)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            found += _definitions([each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)])
    return found
