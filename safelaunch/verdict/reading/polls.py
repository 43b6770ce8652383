"""What a loop asks for again and again, read from the source of the line at which its thread sleeps or spins.

Of ``while not os.path.exists(flag): time.sleep(1)`` a stack shows the sleep alone. The loop's own condition says what
is waited for, in the words of whoever wrote it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from safelaunch.model import Frame
from safelaunch.verdict.reading.frames import basename
from safelaunch.verdict.reading.source import ReadSource, names_in, scope_of, tree_of

# A file; a call of c10d under way; a child process; a key of c10d's store; the same call, which raises each time.
Kind = Literal["file", "work", "process", "key", "attempt", ""]

# The names of the standard library and of torch for these questions.
_ASKS: tuple[tuple[Kind, frozenset[str]], ...] = (
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
_MOST_TEXT = 120
_Loop = ast.While | ast.For


@dataclass(frozen=True)
class Poll:
    """``text``: the condition or the call, as written at ``line``. ``of``: what that asks for, as far as names tell.

    ``made_at``: of a file, the lines of the same source that do something else with what is written there.
    """

    file: str
    line: int
    text: str
    of: Kind
    made_at: tuple[Frame, ...] = ()

    @property
    def words(self) -> str:
        """```while not os.path.exists(flag)` (train.py:41)``."""
        return f"`{self.text}` ({basename(self.file)}:{self.line})"


def poll_at(stack: Sequence[Frame], read_source: ReadSource, *, asleep: bool = True) -> Poll | None:
    """The poll in whose loop the innermost of these frames of the user's is; None where the source shows none.

    ``asleep``: it is in a sleep of the loop's, or of a function that the loop calls.
    """
    for frame in stack[: 2 if asleep else 1]:
        text = read_source(frame.file)
        found = _in_source(text, frame.file, frame.line, asleep and frame is stack[0]) if text else "not here"
        if found != "no loop":
            return found if isinstance(found, Poll) else None
    return None


@lru_cache(256)
def _in_source(text: str, file: str, line: int, sleeping: bool) -> Poll | Literal["no loop", "not here"]:
    tree = tree_of(text)
    if tree is None:
        return "not here"
    scope = scope_of(tree, line)
    if sleeping and not any(_SLEEPS in name for one in _calls_of_line(scope, line) for name in names_in(one)):
        return "not here"
    loops = [one for one in ast.walk(scope) if isinstance(one, _Loop) and _within(one.body, line)]
    return (_of_loop(max(loops, key=lambda one: one.lineno), file, line, tree) or "not here") if loops else "no loop"


def _of_loop(loop: _Loop, file: str, line: int, tree: ast.Module) -> Poll | None:
    """Its condition; else that of the branch by which it is left; else what it tries."""
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        made_at = _made_at(loop.test, file, tree)
        return Poll(file, loop.lineno, _shown("while ", loop.test), _kind(loop.test), made_at)
    for statement in loop.body:
        if isinstance(statement, ast.If) and _leaves(statement.body):
            made_at = _made_at(statement.test, file, tree)
            return Poll(file, statement.lineno, _shown("if ", statement.test), _kind(statement.test), made_at)
    for statement in loop.body:
        tried = next(iter(statement.body), None) if isinstance(statement, ast.Try) else None
        if isinstance(statement, ast.Try) and tried is not None and _comes_after(statement, line):
            return Poll(file, tried.lineno, _shown("", _head(tried)), "attempt")
    return None


def _made_at(test: ast.expr, file: str, tree: ast.Module) -> tuple[Frame, ...]:
    """The other calls that name, as their argument or object, the file that ``test`` asks for: in the same function, as
    its variables may be other ones elsewhere.
    """
    asked = [name for one in _calls(test) if _kind(one.func) == "file" for name in _named(one)]
    calls = _calls(scope_of(tree, test.lineno)) if asked else ()
    found = {one.lineno for one in calls if _kind(one.func) != "file" and set(_named(one)) & set(asked)}
    return tuple(Frame(file, line, "") for line in sorted(found))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def _named(call: ast.Call) -> list[str]:
    """Its arguments, and the object whose method it is, as written."""
    objects = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [ast.unparse(one) for one in (*call.args, *objects)]


def _comes_after(tried: ast.Try, line: int) -> bool:
    """Whether ``line`` is reached by an exception of what is tried: without one the loop would be left before it."""
    if any(_within(handler.body, line) for handler in tried.handlers):
        return True
    return line > (tried.end_lineno or 0) and (_leaves(tried.body) or _leaves(tried.orelse))


def _head(statement: ast.stmt) -> ast.AST:
    """Of ``with open(path) as file: ...`` its call alone."""
    return statement.items[0].context_expr if isinstance(statement, ast.With) else statement


def _leaves(block: Sequence[ast.stmt]) -> bool:
    last = block[-1] if block else None
    return _leaves(last.body) if isinstance(last, ast.With) else isinstance(last, (ast.Break, ast.Return))


def _within(block: Sequence[ast.stmt], line: int) -> bool:
    return any(one.lineno <= line <= (one.end_lineno or one.lineno) for one in block)


def _calls_of_line(scope: ast.AST, line: int) -> Iterator[ast.Call]:
    return (
        one
        for one in ast.walk(scope)
        if isinstance(one, ast.Call) and one.lineno <= line <= (one.end_lineno or one.lineno)
    )


def _kind(test: ast.AST) -> Kind:
    names = set(names_in(test))
    return next((kind for kind, asks in _ASKS if names & asks), "")


def _shown(before: str, node: ast.AST) -> str:
    text = " ".join((before + ast.unparse(node)).split())
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
