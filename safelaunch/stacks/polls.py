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

# Functions of the standard library and torch that check these.
_ASKS: tuple[tuple[WaitKind, frozenset[str]], ...] = (
    ("work", frozenset({"is_completed", "is_success", "test"})),
    ("process", frozenset({"poll", "is_alive", "exitcode", "returncode"})),
    ("key", frozenset({"check", "num_keys"})),
    (
        "file",
        frozenset(
            {"exists", "lexists", "isfile", "isdir", "is_file", "is_dir", "access", "stat", "getsize", "getmtime"}
        )
        | {"glob", "iglob", "listdir", "scandir", "iterdir"},
    ),
)
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
    made_at: tuple[Frame, ...] = ()  # for a file: other lines of the same function that use it

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
        text = read_source(frame.file) or ""
        poll = _in_source(text, frame.file, frame.line, asleep and frame is stack[0])
        if poll != "no loop":
            return poll if isinstance(poll, Poll) else None
    return None


@lru_cache(256)
def _in_source(text: str, file: str, line: int, sleeping: bool) -> Poll | Literal["no loop", "not here"]:
    tree = src.tree_of(text)
    scope = src.scope_of(tree, line)
    here = (call for call in src.calls_in(scope) if src.spans(call, line))
    if sleeping and not any(_SLEEPS in name for call in here for name in src.names_in(call)):
        return "not here"
    loops = [
        loop for loop in src.loops_around(scope, line) if isinstance(loop, _LoopNode) and src.holds(loop.body, line)
    ]
    return (_of_loop(loops[-1], file, line, tree) or "not here") if loops else "no loop"


def _of_loop(loop: _LoopNode, file: str, line: int, tree: ast.Module) -> Poll | None:
    """Returns the loop's condition, the condition of the branch that leaves it, or the call that it retries."""
    asks = isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant)
    for part in (loop,) if asks else loop.body:
        if isinstance(part, ast.While) or (isinstance(part, ast.If) and _leaves(part.body)):
            text = _shown("if " if isinstance(part, ast.If) else "while ", part.test)
            return Poll(file, part.lineno, text, _kind(part.test), _made_at(part.test, file, tree))
    for statement in loop.body:
        tried = next(iter(statement.body), None) if isinstance(statement, ast.Try) else None
        if isinstance(statement, ast.Try) and tried is not None and _comes_after(statement, line):
            return Poll(file, tried.lineno, _shown("", _head(tried)), "attempt")
    return None


def _made_at(test: ast.expr, file: str, tree: ast.Module) -> tuple[Frame, ...]:
    asked = [name for call in src.calls_in(test) if _kind(call.func) == "file" for name in _named(call)]
    calls = src.calls_in(src.scope_of(tree, test.lineno)) if asked else ()
    lines = {call.lineno for call in calls if _kind(call.func) != "file" and set(_named(call)) & set(asked)}
    return tuple(Frame(file, line, "") for line in sorted(lines))


def _named(call: ast.Call) -> list[str]:
    objects = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [ast.unparse(node) for node in (*call.args, *objects)]


def _comes_after(tried: ast.Try, line: int) -> bool:
    # Without an exception, the loop would have ended before ``line``.
    if any(src.holds(handler.body, line) for handler in tried.handlers):
        return True
    return line > src.end_of(tried) and (_leaves(tried.body) or _leaves(tried.orelse))


def _head(statement: ast.stmt) -> ast.expr | ast.stmt:
    return statement.items[0].context_expr if isinstance(statement, ast.With) else statement


def _leaves(block: Sequence[ast.stmt]) -> bool:
    last = block[-1] if block else None
    return _leaves(last.body) if isinstance(last, ast.With) else isinstance(last, (ast.Break, ast.Return))


def _kind(test: ast.AST) -> WaitKind:
    names = set(src.names_in(test))
    return next((kind for kind, asks in _ASKS if names & asks), "")


def _shown(before: str, node: ast.expr | ast.stmt) -> str:
    text = before + src.text_of(node)
    return text if len(text) <= src.MOST_TEXT else f"{text[: src.MOST_TEXT - 3]}..."


# --- a key of c10d's store --------------------------------------------------------------------------------------------


# --- locks ------------------------------------------------------------------------------------------------------------


# --- what its call is made on -----------------------------------------------------------------------------------------
