"""Finds the locks that a source line takes, and the locks held there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.source import ReadSource


@dataclass(frozen=True)
class LockTaken:
    name: str  # as in the source
    held_at: int = 0  # earlier line of the same function that took it


def lock_at(frame: Frame, read_source: ReadSource) -> LockTaken | None:
    """Returns the lock that the line takes by ``with`` or ``acquire()``; None unless there is exactly one."""
    scope = src.scope_at(frame, read_source)
    taken = list(_takings(scope))
    here = [name for (line, _), name in taken if line == frame.line]
    if len(here) != 1:
        return None
    before = (line for (line, end), name in taken if name == here[0] and line < frame.line <= end)
    held_at = max(before, default=0)
    stored = [name for name in ast.walk(scope) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    root = here[0].partition(".")[0].partition("[")[0]
    if any(name.id == root and held_at <= name.lineno <= frame.line for name in stored):
        held_at = 0  # the name might mean another lock by then
    return LockTaken(here[0], held_at)


@dataclass(frozen=True)
class LockHeld:
    name: str
    line: int  # line of that function that took it
    frame: Frame

    def is_that(self, taken: LockTaken, at: Frame) -> bool:
        """Returns whether this lock, by its name, can be the lock that another thread takes ``at`` its line.

        ``self.lock`` is another lock in another class, and ``lock`` in another file.
        """
        (owner, name), (other_owner, other_name) = _parts(self.name), _parts(taken.name)
        if name != other_name:
            return False
        if owner == other_owner == "self":
            classes = {frame.function.rpartition(".")[0] for frame in (self.frame, at)} - {""}
            return self.frame.file == at.file and len(classes) < 2
        if "self" in (owner, other_owner):
            return "" not in (owner, other_owner)
        return owner == other_owner and (bool(owner) or self.frame.file == at.file)


def _parts(lock: str) -> tuple[str, str]:
    # Returns ``b`` and ``lock`` for ``a.b.lock``.
    owner, _, name = lock.rpartition(".")
    owner = owner.rpartition(".")[2]
    return "self" if owner == "cls" else owner, name


def locks_held(stack: Sequence[Frame], read_source: ReadSource) -> tuple[LockHeld, ...]:
    """Returns the locks held at the lines of ``stack`` (user frames, innermost first).

    If the innermost line calls ``wait()`` on a lock, that lock is released during the wait.
    """
    locks = []
    for depth, frame in enumerate(stack):
        scope = src.scope_at(frame, read_source)
        released = _waited_on(scope, frame.line) if depth == 0 else set()
        for (line, end), name in _takings(scope):
            if line < frame.line <= end and name not in released:
                locks.append(LockHeld(name, line, frame))
    return tuple(locks)


def _waited_on(scope: ast.AST, line: int) -> set[str]:
    here = (call.func for call in src.calls_in(scope) if call.lineno == line)
    return {ast.unparse(f.value) for f in here if isinstance(f, ast.Attribute) and f.attr in ("wait", "wait_for")}


def _takings(scope: ast.AST) -> Iterator[tuple[tuple[int, int], str]]:
    """Yields, for each lock taken, its line, the last line at which it is certainly held, and its source text.

    After ``acquire()``, the last line is the one before the first ``release()`` in the same block.
    """
    for block in _blocks(scope):
        for number, statement in enumerate(block):
            if isinstance(statement, (ast.With, ast.AsyncWith)):
                for item in statement.items:
                    if isinstance(item.context_expr, (ast.Name, ast.Attribute, ast.Subscript)):
                        line = item.context_expr.lineno
                        yield (line, src.end_of(statement)), ast.unparse(item.context_expr)
            name = _calls_on(statement, "acquire")
            if name:
                ends = (each.lineno - 1 for each in block[number + 1 :] if name in _released_in(each))
                yield (statement.lineno, next(ends, src.end_of(block[-1]))), name


def _blocks(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(scope):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                yield block


def _calls_on(statement: ast.stmt, method: str) -> str:
    call = statement.value if isinstance(statement, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) else None
    return ast.unparse(func.value) if isinstance(func, ast.Attribute) and func.attr == method else ""


def _released_in(statement: ast.stmt) -> set[str]:
    return {_calls_on(part, "release") for part in ast.walk(statement) if isinstance(part, ast.stmt)}
