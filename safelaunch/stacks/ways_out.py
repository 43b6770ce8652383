"""Finds statements by which code skips the lines below, and the text that it prints then.

``print("loss is nan, skipping batch"); continue`` explains why a rank didn't reach the lines below in the loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename
from safelaunch.stacks.guards import SourceLoop
from safelaunch.stacks.source import ReadSource

_FIELD = re.compile(r"%(?:\(\w+\))?[-+ #0-9.]*[a-zA-Z]|\{[^{}]*\}")
_LEAST = 6  # letters; a shorter text wouldn't identify its statement


@dataclass(frozen=True)
class WayOut:
    """A statement after which the code continues elsewhere."""

    frame: Frame
    parts: tuple[str, ...]  # literal parts of the printed text, if any
    goes: str  # ``continue``, ``break``, ``return``, or "behind the `try`"
    after: str  # the enclosing ``except`` or ``if``
    skips: tuple[range, ...]  # lines
    swallows: bool  # it handles an exception

    @property
    def words(self) -> str:
        """``if bad(batch): continue``, or ``except OSError`` if the code continues after the ``try``."""
        return f"{self.after}: {self.goes}" if self.goes == "continue" else self.after

    def has_printed(self, line: str) -> bool:
        at = 0
        for part in self.parts:
            at = line.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return bool(self.parts)

    def is_in(self, text: str) -> bool:
        return all(part in text for part in self.parts) and any(map(self.has_printed, text.splitlines()))

    def leaves_out(self, frame: Frame) -> bool:
        return frame.file == self.frame.file and any(frame.line in lines for lines in self.skips)


def ways_out(frames: Iterable[Frame], read_source: ReadSource) -> Iterator[WayOut]:
    seen = set()
    for frame in frames:
        scope = src.context(frame, read_source).scope
        if scope not in seen:
            seen.add(scope)
            for block, around in src.blocks_in(scope.body):
                yield from _left(block, around, frame, getattr(scope, "end_lineno", None) or 1 << 30)


def ways_around(frames: Sequence[Frame], loop: SourceLoop, read_source: ReadSource) -> list[str]:
    """Returns in words how a round of a loop can skip a call, or compute its gradients without communication.

    Args:
        frames: The stack of the call, innermost first; the last frame is in the loop.
        loop: The loop. Ways to leave it don't count.
    """
    lefts = [
        left
        for left in ways_out(frames, read_source)
        if any(map(left.leaves_out, frames)) and (left.frame.function != frames[-1].function or loop.has(left.frame))
    ]
    last = {left.skips: left for left in lefts if left.goes in ("continue", "behind the `try`")}
    ways = [f"`{way.words}` at {basename(way.frame.file)}:{way.frame.line}" for way in last.values()]
    calls = (call for call in src.calls_in(loop.node) if isinstance(call.func, ast.Attribute))
    unsynced = (call.lineno for call in calls if src.name_called(call.func) == "no_sync")
    return ways + [f"`no_sync()` at line {line}" for line in sorted(unsynced)[:1]]


def _left(
    block: Sequence[ast.stmt], around: Sequence[src.Enclosing], frame: Frame, function_end: int
) -> Iterator[WayOut]:
    loop: src.AnyLoop | None = None
    tried: range | None = None  # lines of the ``try`` to which this handler belongs
    after = ""
    for each in around:
        if isinstance(each.statement, src.LOOPS):
            loop, tried, after = each.statement, None, ""
        elif each.handler is not None:
            body: Sequence[ast.stmt] = getattr(each.statement, "body", [])
            tried, after = range(body[0].lineno, src.end_of(body[-1]) + 1), each.text
        elif isinstance(each.statement, ast.If) and tried is None:
            after = each.text
    last = block[-1] if block and after else None
    leaves = isinstance(last, (ast.Continue, ast.Break, ast.Return))
    if last is None or isinstance(last, ast.Raise) or not (leaves or tried):
        return
    skips: tuple[range, ...] = (tried,) if tried is not None else ()
    if isinstance(last, ast.Return):
        skips += (range((loop or last).lineno, function_end + 1),)
    elif leaves and loop is not None:
        skips += (range((last if isinstance(last, ast.Continue) else loop).lineno, src.end_of(loop) + 1),)
    goes = type(last).__name__.lower() if leaves else "behind the `try`"
    for statement in block:
        parts = _prints(statement)
        if parts or statement is last:
            at = Frame(frame.file, statement.lineno, frame.function)
            yield WayOut(at, parts, goes, after, skips, tried is not None)


def _prints(statement: ast.stmt) -> tuple[str, ...]:
    # Any call counts: loggers and wrappers of ``print`` can have any name.
    call = statement.value if isinstance(statement, ast.Expr) else None
    parts = tuple(part for arg in call.args for part in _literals(arg)) if isinstance(call, ast.Call) else ()
    return parts if sum(map(str.isalpha, "".join(parts))) >= _LEAST else ()


def _literals(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant):
        parts = _FIELD.split(node.value) if isinstance(node.value, str) else []
    elif isinstance(node, ast.JoinedStr):
        parts = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
    elif isinstance(node, ast.BinOp):  # "..." % value, "..." + value
        parts = _literals(node.left) + (_literals(node.right) if isinstance(node.op, ast.Add) else [])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        parts = _literals(node.func.value)
    else:
        parts = []
    return [line for part in parts for line in part.split("\n")[:1] if line.strip()]
