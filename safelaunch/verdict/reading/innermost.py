"""What a thread's innermost line waits for, by its source. Pure.

Of ``while not os.path.exists(flag): time.sleep(1)`` a stack shows the sleep alone. The loop's own condition says what
is asked for again and again, in the words of whoever wrote it. Calls of c10d's store have no Python frames: the line
says which key it waits for, and the file which lines set it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
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


# --- a key of c10d's store --------------------------------------------------------------------------------------------

_WAITS = frozenset({"get", "wait"})
_SETS = frozenset({"set", "add", "append", "compare_set"})


@dataclass(frozen=True)
class StoreKey:
    """``text``: as it is written; ``value``: with the values of its names, where these are known. ``set_at``: the lines
    of the same file that set it."""

    text: str
    value: str = ""
    set_at: tuple[Frame, ...] = ()

    @property
    def words(self) -> str:
        """```f'run/{step}'` (run/15)``."""
        return f"`{self.text}` ({self.value})" if self.value and self.value not in self.text else f"`{self.text}`"


def store_key_at(frame: Frame, read_source: ReadSource, values: Mapping[str, str] | None = None) -> StoreKey | None:
    """The key for which this line waits in a store: of ``store.get(f"epoch/{n}")``, ``f"epoch/{n}"``.

    ``values``: of local variables, as Python writes them. None where the line waits for no key.
    """
    text = read_source(frame.file)
    found = _key_in_source(text, frame.file, frame.line) if text else None
    if found is None:
        return None
    key, set_at = found
    return StoreKey(ast.unparse(key)[:_MOST_TEXT], (_value(key, values or {}) or "")[:_MOST_TEXT], set_at)


@lru_cache(256)
def _key_in_source(text: str, file: str, line: int) -> tuple[ast.expr, tuple[Frame, ...]] | None:
    tree = tree_of(text)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)] if tree is not None else []
    here = (one for one in calls if one.lineno <= line <= (one.end_lineno or one.lineno))
    bound = (one for one in ast.walk(tree) if isinstance(one, ast.Assign)) if tree is not None else ()
    stores = {
        target.id for one in bound if _is_store(one.value) for target in one.targets if isinstance(target, ast.Name)
    }
    key = next((key for one in here for key in _keys(one, _WAITS, stores)), None)
    if key is None:
        return None
    shape = _shape(key)
    set_at = (one.lineno for one in calls if any(_shape(other) == shape for other in _keys(one, _SETS, stores)))
    return key, tuple(Frame(file, at, "") for at in sorted(set_at))


def _is_store(value: ast.expr) -> bool:
    return any("store" in name.lower() for name in names_in(value))


def _keys(call: ast.Call, functions: frozenset[str], stores: Set[str]) -> Iterator[ast.expr]:
    """The first argument of such a call of a store, be it by one of these names; of a list of one key, that."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and function.attr in functions and call.args):
        return
    if _is_store(function.value) or not stores.isdisjoint(names_in(function.value)):
        key = call.args[0]
        yield key.elts[0] if isinstance(key, (ast.List, ast.Tuple)) and len(key.elts) == 1 else key


def _shape(key: ast.expr) -> str:
    """Alike for two keys that differ in the names of variables inside a string."""
    if isinstance(key, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in key.values)
    return str(key.value) if isinstance(key, ast.Constant) else ast.dump(key)


def _value(key: ast.expr, values: Mapping[str, str]) -> str | None:
    """None where it takes more than the values of names."""
    if isinstance(key, ast.Constant):
        return str(key.value)
    if isinstance(key, ast.Name):
        return values[key.id].strip("'\"") if key.id in values else None
    if isinstance(key, ast.FormattedValue) and key.format_spec is None and key.conversion == -1:
        return _value(key.value, values)
    parts: list[str | None] = []
    if isinstance(key, ast.JoinedStr):
        parts = [_value(part, values) for part in key.values]
    elif isinstance(key, ast.BinOp) and isinstance(key.op, ast.Add):
        parts = [_value(key.left, values), _value(key.right, values)]
    known = [part for part in parts if part is not None]
    return "".join(known) if parts and len(known) == len(parts) else None
