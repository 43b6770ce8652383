"""What a source file says of the lines at which ranks are: a loop that one of them has left, a condition on the rank.

``if rank == 0: dist.all_reduce(...)`` is the commonest collective that peers never call. A condition on the rank is no
fault (``if rank == 0: save(); barrier()`` with a peer's ``else: barrier()``), so this is a sign, and never a verdict.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame
from safelaunch.reading.frames import basename, short

ReadSource = Callable[[str], "str | None"]  # path → text of the file, or None


def _tree_of(path: str, read_source: ReadSource) -> ast.Module | None:
    text = read_source(path)
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# --- loops ------------------------------------------------------------------------------------------------------------


def loop_left(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> int | None:
    """The line of the loop that ``behind`` is inside of and ``ahead`` is past, in the same function; None if there
    is none. Stacks are innermost first.

    Both stacks are walked from outside to where they part: there, one function is at two lines. If one line lies in
    the body of a ``for`` or ``while`` and the other after that loop's end, the rank has left the loop. A collective
    under ``if rank == 0`` inside the loop has both lines inside.
    """
    for one, other in zip(reversed(ahead), reversed(behind), strict=False):
        if (one.file, short(one.function)) != (other.file, short(other.function)):
            return None
        if one.line != other.line:
            tree = _tree_of(one.file, read_source)
            return _loop_between(tree, other.line, one.line) if tree is not None else None
    return None


def _loop_between(tree: ast.Module, inside: int, after: int) -> int | None:
    scope = _scope(tree, inside)
    if scope is not _scope(tree, after):
        return None
    loops = [
        node
        for node in ast.walk(scope)
        if isinstance(node, (ast.For, ast.While, ast.AsyncFor))
        and node.lineno <= inside <= (node.end_lineno or 0) < after
    ]
    return min((node.lineno for node in loops), default=None)


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function (or the module) that holds ``line``."""
    found: ast.AST = tree
    for node in ast.walk(tree):  # breadth first: inner functions come later
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


# --- conditions on the rank -------------------------------------------------------------------------------------------

# The words of torch, accelerate, transformers, Lightning and DeepSpeed for "which process am I".
_OF_THE_RANK = re.compile(
    r"(?:^|_)rank(?:_|0?$)|^is_(?:local_|world_)?(?:main|master)|(?:global|process)_zero$|process_index",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankTest:
    """``if`` on the rank: the file and line of the ``if``, and what it asks."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> str:
        """``if rank == 0 (train.py:14)``."""
        return f"if {self.text} ({basename(self.file)}:{self.line})"


def condition_on_rank(stack: Sequence[Frame], read_source: ReadSource) -> RankTest | None:
    """The innermost ``if`` on the rank around a line of ``stack`` (the user's frames, innermost first), or None."""
    for frame in stack:
        tree = _tree_of(frame.file, read_source)
        found = _around(tree, frame.line) if tree is not None else None
        if found is not None:
            return RankTest(frame.file, *found)
    return None


def _around(tree: ast.Module, line: int) -> tuple[int, str] | None:
    found: tuple[int, str] | None = None
    for node in ast.walk(tree):  # breadth first: inner ones come later
        if isinstance(node, ast.If) and _holds(node.body, line) and _names_the_rank(node.test):
            found = node.lineno, ast.unparse(node.test)
    return found if found is None or len(found[1]) <= 120 else (found[0], f"{found[1][:119]}…")


def _holds(body: Sequence[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _names_the_rank(test: ast.expr) -> bool:
    return any(_OF_THE_RANK.search(name) for name in _names(test))


def _names(test: ast.expr) -> Iterator[str]:
    for node in ast.walk(test):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
