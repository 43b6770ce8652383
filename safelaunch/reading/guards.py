"""Does a line stand under a condition on the rank? The source says so, where it can be read.

``if rank == 0: dist.all_reduce(...)`` is the commonest collective that peers never call. A condition on the rank is no
fault (``if rank == 0: save(); barrier()`` with a peer's ``else: barrier()``), so this is a sign, and never a verdict.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame
from safelaunch.reading.frames import basename
from safelaunch.reading.loops import ReadSource

# The words of torch, accelerate, transformers, Lightning and DeepSpeed for "which process am I".
_OF_THE_RANK = re.compile(
    r"(?:^|_)rank(?:_|0?$)|^is_(?:local_|world_)?(?:main|master)|(?:global|process)_zero$|process_index",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Condition:
    """``if`` on the rank: the file and line of the ``if``, and what it asks."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> str:
        """``if rank == 0 (train.py:14)``."""
        return f"if {self.text} ({basename(self.file)}:{self.line})"


def condition_on_rank(stack: Sequence[Frame], read_source: ReadSource) -> Condition | None:
    """The innermost ``if`` on the rank around a line of ``stack`` (the user's frames, innermost first), or None."""
    for frame in stack:
        text = read_source(frame.file)
        found = _around(text, frame.line) if text else None
        if found is not None:
            return Condition(frame.file, *found)
    return None


def _around(source: str, line: int) -> tuple[int, str] | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
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
