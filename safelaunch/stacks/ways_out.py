"""Finds statements by which code skips the lines below, and the text that it prints then.

``print("loss is nan, skipping batch"); continue`` explains why a rank didn't reach the lines below in the loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename
from safelaunch.stacks.source import ReadSource, except_words

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

    @property
    def words(self) -> str:
        """``if bad(batch): continue``, or ``except OSError`` if the code continues after the ``try``."""
        return f"{self.after}: {self.goes}" if self.goes == "continue" else self.after

    @property
    def swallows(self) -> bool:
        return self.after.startswith("except")

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
    scopes = set()
    for frame in frames:
        scope = src.scope_at(frame, read_source)
        if isinstance(scope, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)) and scope not in scopes:
            scopes.add(scope)
            yield from _in_block(scope.body, _Around(frame, getattr(scope, "end_lineno", None) or 1 << 30))


def ways_around(frames: Sequence[Frame], begin: int, read_source: ReadSource) -> list[str]:
    """Returns in words how a round of a loop can skip a call, or compute its gradients without communication.

    Args:
        frames: The stack of the call, innermost first; the last frame is in the loop.
        begin: First line of the loop. Ways to leave it don't count.
    """
    scope = src.scope_at(frames[-1], read_source)
    loops = src.loops_around(scope, frames[-1].line)
    body = next((range(loop.lineno, src.end_of(loop) + 1) for loop in loops if loop.lineno == begin), ())
    lefts = [
        left
        for left in ways_out(frames, read_source)
        if any(map(left.leaves_out, frames)) and (left.frame.function != frames[-1].function or left.frame.line in body)
    ]
    last = {left.skips: left for left in lefts if left.goes in ("continue", "behind the `try`")}
    ways = [f"`{way.words}` at {basename(way.frame.file)}:{way.frame.line}" for way in last.values()]
    calls = (call for call in src.calls_in(scope) if call.lineno in body and isinstance(call.func, ast.Attribute))
    unsynced = (call.lineno for call in calls if src.name_called(call.func) == "no_sync")
    return ways + [f"`no_sync()` at line {line}" for line in sorted(unsynced)[:1]]


@dataclass(frozen=True)
class _Around:
    frame: Frame
    end: int  # last line of the function
    loop: ast.stmt | None = None
    trial: range | None = None  # lines of the ``try`` to which this handler belongs
    after: str = ""


def _in_block(block: Sequence[ast.stmt], around: _Around) -> Iterator[WayOut]:
    for statement in block:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        is_loop = isinstance(statement, src.LOOPS)
        inside = replace(around, loop=statement, trial=None, after="") if is_loop else around
        for name in ("body", "orelse", "finalbody"):
            nested = getattr(statement, name, None) or []
            if isinstance(statement, ast.If) and not around.trial:
                head = f"if {src.text_of(statement.test)}"
                inside = replace(around, after=head if name == "body" else f"else of {head}")
            yield from _in_block(nested, inside)
        for handler in getattr(statement, "handlers", ()):
            yield from _in_block(handler.body, _handling(statement, handler, around))
    goes = _exit_kind(block[-1], around) if block else ""
    for statement in block if goes else ():
        parts = _prints(statement)
        if parts or statement is block[-1]:
            frame = Frame(around.frame.file, statement.lineno, around.frame.function)
            yield WayOut(frame, parts, goes, around.after, tuple(_skipped(block[-1], around)))


def _handling(statement: ast.stmt, handler: ast.ExceptHandler, around: _Around) -> _Around:
    body: Sequence[ast.stmt] = getattr(statement, "body", [])
    return replace(around, trial=range(body[0].lineno, src.end_of(body[-1]) + 1), after=except_words(handler))


def _exit_kind(last: ast.stmt, around: _Around) -> str:
    if isinstance(last, (ast.Continue, ast.Break, ast.Return)):
        return type(last).__name__.lower() if around.after else ""
    return "behind the `try`" if around.trial is not None and not isinstance(last, ast.Raise) else ""


def _skipped(last: ast.stmt, around: _Around) -> Iterator[range]:
    if around.trial is not None:
        yield around.trial
    if isinstance(last, (ast.Continue, ast.Break)) and around.loop is not None:
        begin = last if isinstance(last, ast.Continue) else around.loop
        yield range(begin.lineno, src.end_of(around.loop) + 1)
    elif isinstance(last, ast.Return):
        yield range(around.loop.lineno if around.loop is not None else last.lineno, around.end + 1)


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
