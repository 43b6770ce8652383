"""What a source file says of the lines at which ranks are: a loop that one of them has left."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from safelaunch.model import Frame
from safelaunch.reading.frames import short

ReadSource = Callable[[str], "str | None"]  # path → text of the file, or None


@lru_cache(64)
def tree_of(text: str) -> ast.Module | None:
    """None where the text is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _tree_in(path: str, read_source: ReadSource) -> ast.Module | None:
    text = read_source(path)
    return tree_of(text) if text else None


def calls_method(frame: Frame, name: str, read_source: ReadSource) -> bool:
    """The line calls a method of this name without arguments, and none other."""
    tree = _tree_in(frame.file, read_source)
    here = [
        one
        for one in (ast.walk(tree) if tree is not None else ())
        if isinstance(one, ast.Call) and one.lineno <= frame.line <= (one.end_lineno or one.lineno)
    ]
    return len(here) == 1 and isinstance(here[0].func, ast.Attribute) and here[0].func.attr == name and not here[0].args


# --- loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """``line``: where it begins. ``enclosed``: in another loop, of its function or of a caller, that goes on behind it:
    a rank that is past it may be a round behind, as well as ahead.
    """

    line: int
    enclosed: bool


def loop_left(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> Loop | None:
    """The loop that ``behind`` is inside of and ``ahead`` is past, in the same function; None if there is none. Stacks
    are innermost first.

    Both stacks are walked from outside to where they part: there, one function is at two lines. If one line lies in
    the body of a ``for`` or ``while`` and the other after that loop's end, the rank has left the loop. A collective
    under ``if rank == 0`` inside the loop has both lines inside.
    """
    callers: list[Frame] = []
    for one, other in zip(reversed(ahead), reversed(behind), strict=False):
        if (one.file, short(one.function)) != (other.file, short(other.function)):
            return None
        if one.line != other.line:
            tree = _tree_in(one.file, read_source)
            found = _loop_between(tree, other.line, one.line) if tree is not None else None
            again = found is not None and any(_in_loop(caller, read_source) for caller in callers)
            return replace(found, enclosed=True) if found is not None and again else found
        callers.append(one)
    return None


def _loop_between(tree: ast.Module, inside: int, after: int) -> Loop | None:
    scope = scope_of(tree, inside)
    if scope is not scope_of(tree, after):
        return None
    around = _loops_around(scope, inside)
    left = [line for line, end in around if end < after]
    return Loop(min(left), enclosed=len(left) < len(around)) if left else None


def _in_loop(frame: Frame, read_source: ReadSource) -> bool:
    tree = _tree_in(frame.file, read_source)
    return tree is not None and bool(_loops_around(scope_of(tree, frame.line), frame.line))


def _loops_around(scope: ast.AST, line: int) -> list[tuple[int, int]]:
    """First and last line of each loop in ``scope`` that holds ``line``."""
    return [
        (node.lineno, node.end_lineno or 0)
        for node in ast.walk(scope)
        if isinstance(node, (ast.For, ast.While, ast.AsyncFor)) and node.lineno <= line <= (node.end_lineno or 0)
    ]


def scope_of(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function (or the module) that holds ``line``."""
    found: ast.AST = tree
    for node in ast.walk(tree):  # breadth first: inner functions come later
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


def names_in(node: ast.AST) -> Iterator[str]:
    """Yields each name and attribute in ``node``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Name):
            yield one.id
