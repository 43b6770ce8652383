"""A signal handler on a stack, and the code that it has interrupted. Pure.

Python calls a handler between two instructions of the main thread: it stands on the stack above a line that does not
call it. ``signal.signal(SIGTERM, self.on_notice)``, in a file of that stack, tells that it is one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame
from safelaunch.verdict.reading.frames import short
from safelaunch.verdict.reading.source import ReadSource, lock_at, locks_held, tree_of


@dataclass(frozen=True)
class Interruption:
    """``holder``: the frame of the interrupted code that is inside ``with`` the same lock, or the interrupted line."""

    handler: Frame
    holder: Frame


def interruption(stack: Sequence[Frame], read_source: ReadSource) -> Interruption | None:
    """The outermost handler on ``stack`` (the user's frames, innermost first), which waits for a lock; None without."""
    trees = {frame.file: tree for frame in stack if (tree := tree_of(read_source(frame.file) or "")) is not None}
    handlers = {name for tree in trees.values() for name in _registered(tree)}
    for place in range(len(stack) - 1, 0, -1):
        handler, below = stack[place - 1], stack[place:]
        tree = trees.get(below[0].file)
        if short(handler.function) not in handlers or tree is None:
            continue
        if short(handler.function) not in _called_at(tree, below[0].line):
            lock, held = lock_at(stack[0], read_source), locks_held(below, read_source)
            its = (one.frame for one in held if lock is not None and one.is_that(lock, stack[0]))
            return Interruption(handler, next(its, below[0]))
    return None


def _registered(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last(node.func) == "signal" and len(node.args) == 2:
            yield _last(node.args[1])


def _called_at(tree: ast.Module, line: int) -> set[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {_last(one.func) for one in calls if one.lineno <= line <= (one.end_lineno or one.lineno)}


def _last(node: ast.AST) -> str:
    """``self.writer.lock`` → ``lock``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
