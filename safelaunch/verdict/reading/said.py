"""The ways in which code leaves out what stands below, and what it prints as it does. Pure.

``print("loss is nan, skipping batch"); continue`` tells why a rank did not come to what stands below in the loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from safelaunch.model import Frame
from safelaunch.verdict.reading.frames import basename
from safelaunch.verdict.reading.source import (
    LOOPS,
    ReadSource,
    calls_in,
    end_of,
    loops_around,
    name_called,
    scope_at,
    text_of,
)

_FIELD = re.compile(r"%(?:\(\w+\))?[-+ #0-9.]*[a-zA-Z]|\{[^{}]*\}")
_LEAST = 6  # letters of a text that tells one statement from others


@dataclass(frozen=True)
class Left:
    """A statement at ``frame`` behind which the code goes on elsewhere; it prints a text with these ``parts``, if any.

    ``goes``: how (``continue``, ``return``). ``after``: the ``except`` or ``if`` around it. ``skips``: the lines that
    it leaves out.
    """

    frame: Frame
    parts: tuple[str, ...]
    goes: str
    after: str
    skips: tuple[range, ...]

    @property
    def words(self) -> str:
        """``if bad(batch): continue``; ``except OSError``, behind whose ``try`` the code goes on."""
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
        """Whether a line of ``text`` is one that it printed."""
        return all(part in text for part in self.parts) and any(map(self.has_printed, text.splitlines()))

    def leaves_out(self, frame: Frame) -> bool:
        return frame.file == self.frame.file and any(frame.line in lines for lines in self.skips)


def left_by(frames: Iterable[Frame], read_source: ReadSource) -> Iterator[Left]:
    """Those in the functions of ``frames``."""
    seen = set()
    for frame in frames:
        scope = scope_at(frame, read_source)
        if isinstance(scope, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)) and scope not in seen:
            seen.add(scope)
            yield from _in_block(scope.body, _Around(frame, getattr(scope, "end_lineno", None) or 1 << 30))


def ways_around(frames: Sequence[Frame], begin: int, read_source: ReadSource) -> list[str]:
    """How a round of the loop that begins at ``begin`` may end, or compute its gradients alone, without the call that
    ``frames`` led to (innermost first; the last of them is in that loop); in words. Ways out of the loop are none.
    """
    scope = scope_at(frames[-1], read_source)
    loops = loops_around(scope, frames[-1].line)
    body = next((range(one.lineno, end_of(one) + 1) for one in loops if one.lineno == begin), ())
    lefts = [
        left
        for left in left_by(frames, read_source)
        if any(map(left.leaves_out, frames)) and (left.frame.function != frames[-1].function or left.frame.line in body)
    ]
    last = {left.skips: left for left in lefts if left.goes in ("continue", "behind the `try`")}
    found = [f"`{one.words}` at {basename(one.frame.file)}:{one.frame.line}" for one in last.values()]
    calls = (call for call in calls_in(scope) if call.lineno in body and isinstance(call.func, ast.Attribute))
    unsynced = (call.lineno for call in calls if name_called(call.func) == "no_sync")
    return found + [f"`no_sync()` at line {line}" for line in sorted(unsynced)[:1]]


@dataclass(frozen=True)
class _Around:
    """What a block stands in. ``end``: of the function. ``trial``: of a handler, the lines that it has left."""

    frame: Frame
    end: int
    loop: ast.stmt | None = None
    trial: range | None = None
    after: str = ""


def _in_block(block: Sequence[ast.stmt], around: _Around) -> Iterator[Left]:
    for statement in block:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        is_loop = isinstance(statement, LOOPS)
        inside = replace(around, loop=statement, trial=None, after="") if is_loop else around
        for name in ("body", "orelse", "finalbody"):
            nested = getattr(statement, name, None) or []
            if isinstance(statement, ast.If) and not around.trial:
                inside = replace(around, after=f"{'' if name == 'body' else 'else of '}if {text_of(statement.test)}")
            yield from _in_block(nested, inside)
        for handler in getattr(statement, "handlers", ()):
            yield from _in_block(handler.body, _handling(statement, handler, around))
    goes = _way_out(block[-1], around) if block else ""
    for statement in block if goes else ():
        parts = _prints(statement)
        if parts or statement is block[-1]:
            frame = Frame(around.frame.file, statement.lineno, around.frame.function)
            yield Left(frame, parts, goes, around.after, tuple(_skipped(block[-1], around)))


def _handling(statement: ast.stmt, handler: ast.ExceptHandler, around: _Around) -> _Around:
    what = f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"
    body: Sequence[ast.stmt] = getattr(statement, "body", [])
    return replace(around, trial=range(body[0].lineno, end_of(body[-1]) + 1), after=what)


def _way_out(last: ast.stmt, around: _Around) -> str:
    """How the code goes on behind a block, where that is elsewhere."""
    if isinstance(last, (ast.Continue, ast.Break, ast.Return)):
        return type(last).__name__.lower() if around.after else ""
    return "behind the `try`" if around.trial is not None and not isinstance(last, ast.Raise) else ""


def _skipped(last: ast.stmt, around: _Around) -> Iterator[range]:
    if around.trial is not None:
        yield around.trial
    if isinstance(last, (ast.Continue, ast.Break)) and around.loop is not None:
        begin = last if isinstance(last, ast.Continue) else around.loop
        yield range(begin.lineno, end_of(around.loop) + 1)
    elif isinstance(last, ast.Return):
        yield range(around.loop.lineno if around.loop is not None else last.lineno, around.end + 1)


# --- what a statement prints ------------------------------------------------------------------------------------------


def _prints(statement: ast.stmt) -> tuple[str, ...]:
    """The literal parts of the text that a call has: loggers and wrappers of ``print`` have any name."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    parts = tuple(part for one in call.args for part in _literals(one)) if isinstance(call, ast.Call) else ()
    return parts if sum(map(str.isalpha, "".join(parts))) >= _LEAST else ()


def _literals(node: ast.expr) -> list[str]:
    """The parts of a text that are the same each time, without those of which nobody knows what becomes of them."""
    if isinstance(node, ast.Constant):
        found = _FIELD.split(node.value) if isinstance(node.value, str) else []
    elif isinstance(node, ast.JoinedStr):
        found = [str(one.value) for one in node.values if isinstance(one, ast.Constant)]
    elif isinstance(node, ast.BinOp):  # "..." % value, "..." + value
        found = _literals(node.left) + (_literals(node.right) if isinstance(node.op, ast.Add) else [])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        found = _literals(node.func.value)
    else:
        found = []
    return [line for part in found for line in part.split("\n")[:1] if line.strip()]
