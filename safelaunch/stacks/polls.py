"""Finds the condition that a loop around a thread's innermost line polls, in its source.

In ``while not os.path.exists(flag): time.sleep(1)``, a stack shows only the sleep; the condition shows the file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename
from safelaunch.stacks.source import ReadSource

# A file, a pending c10d call, a child process, a c10d store key, or a call repeated while it raises.
WaitKind = Literal["file", "work", "process", "key", "attempt", ""]

_EXISTS = frozenset({"exists", "lexists", "isfile", "isdir", "is_file", "is_dir"})
# Functions of the standard library and torch that check these.
_ASKS: tuple[tuple[WaitKind, frozenset[str]], ...] = (
    ("work", frozenset({"is_completed", "is_success", "test"})),
    ("process", frozenset({"poll", "is_alive", "exitcode", "returncode"})),
    ("key", frozenset({"check", "num_keys"})),
    (
        "file",
        frozenset({"access", "stat", "getsize", "getmtime", "glob", "iglob", "listdir", "scandir", "iterdir"})
        | _EXISTS,
    ),
)
_REMOVES = frozenset({"remove", "unlink", "rmdir", "rmtree", "rename", "replace", "move"})
_SLEEPS = "sleep"
_LOCKS_A_FILE = re.compile(r"\b(?:flock|lockf)\(")
_LoopNode = ast.While | ast.For


@dataclass(frozen=True)
class Poll:
    """A condition or call that a loop repeats."""

    file: str
    line: int
    text: str  # as in the source
    of: WaitKind  # as far as names show
    made_at: tuple[Frame, ...] = ()  # for a file: other lines of the same function that use it, or that remove it
    removal: bool = False  # it lasts as long as the file exists

    @property
    def words(self) -> str:
        return f"`{self.text}` ({basename(self.file)}:{self.line})"

    @property
    def tries_a_lock(self) -> bool:
        return _LOCKS_A_FILE.search(self.text) is not None


def poll_at(stack: Sequence[Frame], read_source: ReadSource, *, asleep: bool = True) -> Poll | None:
    """Returns the poll whose loop contains the innermost user frame, or None.

    Args:
        stack: User frames, innermost first.
        asleep: Whether the thread sleeps, in the loop or in a function that the loop calls.
    """
    for frame in stack[: 2 if asleep else 1]:
        here = src.context(frame, read_source)
        names = (name for call in here.calls for name in src.names_in(call))
        if asleep and frame is stack[0] and not any(_SLEEPS in name for name in names):
            return None
        loops = [each.statement for each in here.around if each.in_body and isinstance(each.statement, _LoopNode)]
        if loops:
            return _of_loop(loops[-1], frame.file, frame.line, here.scope)
    return None


@lru_cache(256)
def _of_loop(loop: _LoopNode, file: str, line: int, scope: ast.AST) -> Poll | None:
    """Returns the loop's condition, the condition of the branch that leaves it, or the call that it retries."""
    asks = isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant)
    for part in (loop,) if asks else loop.body:
        if isinstance(part, ast.While) or (isinstance(part, ast.If) and isinstance(src.exit_of(part.body), src.ENDS)):
            removal = _lasts_while_it_exists(part)
            made_at = _made_at(part.test, file, scope, removal=removal)
            return Poll(file, part.lineno, src.head_of(part), _kind(part.test), made_at, removal)
    for attempt in loop.body:
        if isinstance(attempt, ast.Try):
            # Without an exception, the loop would have ended before ``line``.
            after = line > src.end_of(attempt) and attempt in src.attempts_of(loop)
            if after or any(src.holds(handler.body, line) for handler in attempt.handlers):
                tried = attempt.body[0]
                head = tried.items[0].context_expr if isinstance(tried, ast.With) else tried
                return Poll(file, tried.lineno, src.text_of(head), "attempt")
    return None


def _lasts_while_it_exists(part: ast.While | ast.If) -> bool:
    negated = isinstance(part.test, ast.UnaryOp) and isinstance(part.test.op, ast.Not)
    asked = part.test.operand if isinstance(part.test, ast.UnaryOp) else part.test
    exists = isinstance(asked, ast.Call) and not _EXISTS.isdisjoint(src.names_in(asked.func))
    return exists and isinstance(part, ast.While) is not negated


def _made_at(test: ast.expr, file: str, scope: ast.AST, *, removal: bool) -> tuple[Frame, ...]:
    asked = [name for call in src.calls_in(test) if _kind(call.func) == "file" for name in _named(call)]
    calls = src.calls_in(scope) if asked else []
    if removal:
        calls = [call for call in calls if src.name_called(call.func) in _REMOVES]
    lines = {call.lineno for call in calls if _kind(call.func) != "file" and set(_named(call)) & set(asked)}
    return tuple(Frame(file, line, "") for line in sorted(lines))


def _named(call: ast.Call) -> list[str]:
    objects = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [ast.unparse(node) for node in (*call.args, *objects)]


def _kind(test: ast.AST) -> WaitKind:
    names = set(src.names_in(test))
    return next((kind for kind, asks in _ASKS if names & asks), "")
