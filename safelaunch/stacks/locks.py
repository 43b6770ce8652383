"""Finds the locks that a source line takes, and the locks held there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.source import ReadSource

_RELEASING = frozenset({"wait", "wait_for"})  # of a condition


@dataclass(frozen=True)
class LockTaken:
    name: str  # as in the source
    held_at: int = 0  # earlier line of the same function that took it


def lock_at(frame: Frame, read_source: ReadSource) -> LockTaken | None:
    """Returns the lock that the line takes by ``with`` or ``acquire()``; None unless there is exactly one."""
    here = src.context(frame, read_source)
    taken = list(_takings(here))
    names = [name for name, line in taken if line == frame.line]
    if len(names) != 1:
        return None
    held_at = max((line for name, line in taken if name == names[0] and line < frame.line), default=0)
    stored = [name for name in ast.walk(here.scope) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    root = names[0].partition(".")[0].partition("[")[0]
    if any(name.id == root and held_at <= name.lineno <= frame.line for name in stored):
        held_at = 0  # the name might mean another lock by then
    return LockTaken(names[0], held_at)


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
        here = src.context(frame, read_source)
        functions = [call.func for call in here.calls if depth == 0 and src.name_called(call.func) in _RELEASING]
        released = {ast.unparse(function.value) for function in functions if isinstance(function, ast.Attribute)}
        held = ((name, line) for name, line in _takings(here) if line < frame.line and name not in released)
        locks += [LockHeld(name, line, frame) for name, line in held]
    return tuple(locks)


def _takings(here: src.Context) -> Iterator[tuple[str, int]]:
    """Yields the source text of each lock taken on a line or certainly held there, and the line that took it.

    A lock is held until the statement that contains the first ``release()`` in the block of its ``acquire()``.
    """
    for each in here.around:
        statement = each.statement
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            for taken in (item.context_expr for item in statement.items):
                if isinstance(taken, (ast.Name, ast.Attribute, ast.Subscript)):
                    yield ast.unparse(taken), taken.lineno
        block = [*each.before, statement]
        for number, before in enumerate(block):
            name = _calls_on(before, "acquire")
            if name and not any(name in _released_in(after) for after in block[number + 1 :]):
                yield name, before.lineno


def _calls_on(statement: ast.stmt, method: str) -> str:
    call = statement.value if isinstance(statement, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) else None
    return ast.unparse(func.value) if isinstance(func, ast.Attribute) and func.attr == method else ""


def _released_in(statement: ast.stmt) -> set[str]:
    return {_calls_on(part, "release") for part in ast.walk(statement) if isinstance(part, ast.stmt)}
