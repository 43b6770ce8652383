"""What a thread's innermost line waits for, by its source. Pure.

Of ``while not os.path.exists(flag): time.sleep(1)`` a stack shows the sleep alone. The loop's own condition says what
is asked for again and again, in the words of whoever wrote it. Calls of c10d's store have no Python frames: the line
says which key it waits for, and the file which lines set it. Which lock a line takes, and who has it, is read likewise.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename
from safelaunch.stacks.source import ReadSource

# A file; a call of c10d under way; a child process; a key of c10d's store; the same call, which raises each time.
WaitKind = Literal["file", "work", "process", "key", "attempt", ""]

# The names of the standard library and of torch for these questions.
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
_MOST_TEXT = 120
_LoopNode = ast.While | ast.For


@dataclass(frozen=True)
class Poll:
    """``text``: the condition or the call, as written at ``line``. ``of``: what that asks for, as far as names tell.

    ``made_at``: of a file, the lines of the same source that do something else with what is written there.
    """

    file: str
    line: int
    text: str
    of: WaitKind
    made_at: tuple[Frame, ...] = ()

    @property
    def words(self) -> str:
        """```while not os.path.exists(flag)` (train.py:41)``."""
        return f"`{self.text}` ({basename(self.file)}:{self.line})"

    @property
    def tries_a_lock(self) -> bool:
        """By the names of the standard library."""
        return _LOCKS_A_FILE.search(self.text) is not None


def poll_at(stack: Sequence[Frame], read_source: ReadSource, *, asleep: bool = True) -> Poll | None:
    """The poll in whose loop the innermost of these frames of the user's is; None where the source shows none.

    ``asleep``: it is in a sleep of the loop's, or of a function that the loop calls.
    """
    for frame in stack[: 2 if asleep else 1]:
        text = read_source(frame.file) or ""
        found = _in_source(text, frame.file, frame.line, asleep and frame is stack[0])
        if found != "no loop":
            return found if isinstance(found, Poll) else None
    return None


@lru_cache(256)
def _in_source(text: str, file: str, line: int, sleeping: bool) -> Poll | Literal["no loop", "not here"]:
    tree = src.tree_of(text)
    scope = src.scope_of(tree, line)
    here = (one for one in src.calls_in(scope) if src.spans(one, line))
    if sleeping and not any(_SLEEPS in name for one in here for name in src.names_in(one)):
        return "not here"
    loops = [one for one in src.loops_around(scope, line) if isinstance(one, _LoopNode) and src.holds(one.body, line)]
    return (_of_loop(loops[-1], file, line, tree) or "not here") if loops else "no loop"


def _of_loop(loop: _LoopNode, file: str, line: int, tree: ast.Module) -> Poll | None:
    """Its condition; else that of the branch by which it is left; else what it tries."""
    asks = isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant)
    for one in (loop,) if asks else loop.body:
        if isinstance(one, ast.While) or (isinstance(one, ast.If) and _leaves(one.body)):
            text = _shown("if " if isinstance(one, ast.If) else "while ", one.test)
            return Poll(file, one.lineno, text, _kind(one.test), _made_at(one.test, file, tree))
    for statement in loop.body:
        tried = next(iter(statement.body), None) if isinstance(statement, ast.Try) else None
        if isinstance(statement, ast.Try) and tried is not None and _comes_after(statement, line):
            return Poll(file, tried.lineno, _shown("", _head(tried)), "attempt")
    return None


def _made_at(test: ast.expr, file: str, tree: ast.Module) -> tuple[Frame, ...]:
    """The other calls that name, as their argument or object, the file that ``test`` asks for: in the same function, as
    its variables may be other ones elsewhere.
    """
    asked = [name for one in src.calls_in(test) if _kind(one.func) == "file" for name in _named(one)]
    calls = src.calls_in(src.scope_of(tree, test.lineno)) if asked else ()
    found = {call.lineno for call in calls if _kind(call.func) != "file" and set(_named(call)) & set(asked)}
    return tuple(Frame(file, line, "") for line in sorted(found))


def _named(call: ast.Call) -> list[str]:
    """Its arguments, and the object whose method it is, as written."""
    objects = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [ast.unparse(one) for one in (*call.args, *objects)]


def _comes_after(tried: ast.Try, line: int) -> bool:
    """Whether ``line`` is reached by an exception of what is tried: without one the loop would be left before it."""
    if any(src.holds(handler.body, line) for handler in tried.handlers):
        return True
    return line > src.end_of(tried) and (_leaves(tried.body) or _leaves(tried.orelse))


def _head(statement: ast.stmt) -> ast.expr | ast.stmt:
    """Of ``with open(path) as file: ...`` its call alone."""
    return statement.items[0].context_expr if isinstance(statement, ast.With) else statement


def _leaves(block: Sequence[ast.stmt]) -> bool:
    last = block[-1] if block else None
    return _leaves(last.body) if isinstance(last, ast.With) else isinstance(last, (ast.Break, ast.Return))


def _kind(test: ast.AST) -> WaitKind:
    names = set(src.names_in(test))
    return next((kind for kind, asks in _ASKS if names & asks), "")


def _shown(before: str, node: ast.expr | ast.stmt) -> str:
    text = before + src.text_of(node)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


# --- a key of c10d's store --------------------------------------------------------------------------------------------

_WAITS = frozenset({"get", "wait"})
_SETS = frozenset({"set", "add", "append", "compare_set"})


@dataclass(frozen=True)
class StoreKey:
    """``text``: as it is written; ``value``: with the values of its names, where these are known. ``set_at``: the lines
    of the same file that set it.
    """

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
    found = _key_in_source(read_source(frame.file) or "", frame.file, frame.line)
    if found is None:
        return None
    key, set_at = found
    return StoreKey(src.text_of(key), (_value(key, values or {}) or "")[:_MOST_TEXT], set_at)


@lru_cache(256)
def _key_in_source(text: str, file: str, line: int) -> tuple[ast.expr, tuple[Frame, ...]] | None:
    tree = src.tree_of(text)
    calls = list(src.calls_in(tree))
    here = (call for call in calls if src.spans(call, line))
    bound = (one for one in ast.walk(tree) if isinstance(one, ast.Assign))
    stores = {
        target.id for one in bound if _is_store(one.value) for target in one.targets if isinstance(target, ast.Name)
    }
    key = next((key for one in here for key in _keys(one, _WAITS, stores)), None)
    if key is None:
        return None
    shape = _shape(key)
    set_at = (call.lineno for call in calls if any(_shape(other) == shape for other in _keys(call, _SETS, stores)))
    return key, tuple(Frame(file, at, "") for at in sorted(set_at))


def _is_store(value: ast.expr) -> bool:
    return any("store" in name.lower() for name in src.names_in(value))


def _keys(call: ast.Call, functions: frozenset[str], stores: Set[str]) -> Iterator[ast.expr]:
    """The first argument of such a call of a store, be it by one of these names; of a list of one key, that."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and function.attr in functions and call.args):
        return
    if _is_store(function.value) or not stores.isdisjoint(src.names_in(function.value)):
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


# --- locks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LockTaken:
    """The lock that a line takes, as written there. ``held_at``: the line of the same function that took it before."""

    name: str
    held_at: int = 0


def lock_at(frame: Frame, read_source: ReadSource) -> LockTaken | None:
    """The one lock that the line takes, by ``with`` or ``acquire()``; None where it takes none, or several."""
    scope = src.scope_at(frame, read_source)
    taken = list(_takings(scope))
    here = [name for (line, _), name in taken if line == frame.line]
    if len(here) != 1:
        return None
    before = (line for (line, end), name in taken if name == here[0] and line < frame.line <= end)
    held_at = max(before, default=0)
    stored = [one for one in ast.walk(scope) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    root = here[0].partition(".")[0].partition("[")[0]
    if any(one.id == root and held_at <= one.lineno <= frame.line for one in stored):
        held_at = 0  # the name may stand for another lock by then
    return LockTaken(here[0], held_at)


@dataclass(frozen=True)
class LockHeld:
    """``frame`` is inside of the statements that hold a lock, which ``line`` of its function has taken."""

    name: str
    line: int
    frame: Frame

    def is_that(self, taken: LockTaken, at: Frame) -> bool:
        """Whether it may be the lock that a thread takes ``at`` another line, by what both call it.

        ``self.lock`` of two classes are two locks, as ``lock`` in two files.
        """
        (mine, one), (its, other) = _parts(self.name), _parts(taken.name)
        if one != other:
            return False
        if mine == its == "self":
            classes = {frame.function.rpartition(".")[0] for frame in (self.frame, at)} - {""}
            return self.frame.file == at.file and len(classes) < 2
        if "self" in (mine, its):
            return "" not in (mine, its)
        return mine == its and (bool(mine) or self.frame.file == at.file)


def _parts(lock: str) -> tuple[str, str]:
    """``a.b.lock`` → whose it is, ``b``, and its name; ``self`` also for ``cls``."""
    owner, _, name = lock.rpartition(".")
    owner = owner.rpartition(".")[2]
    return "self" if owner == "cls" else owner, name


def locks_held(stack: Sequence[Frame], read_source: ReadSource) -> tuple[LockHeld, ...]:
    """The locks that the lines of ``stack`` (the user's frames, innermost first) are inside of. One on which the
    innermost line calls ``wait()`` is released meanwhile.
    """
    found = []
    for depth, frame in enumerate(stack):
        scope = src.scope_at(frame, read_source)
        released = _waited_on(scope, frame.line) if depth == 0 else set()
        for (line, end), name in _takings(scope):
            if line < frame.line <= end and name not in released:
                found.append(LockHeld(name, line, frame))
    return tuple(found)


def _waited_on(scope: ast.AST, line: int) -> set[str]:
    here = (one.func for one in src.calls_in(scope) if one.lineno == line)
    return {ast.unparse(f.value) for f in here if isinstance(f, ast.Attribute) and f.attr in ("wait", "wait_for")}


def _takings(scope: ast.AST) -> Iterator[tuple[tuple[int, int], str]]:
    """Of each taking of a lock: its line, the last one at which it is held for sure, and the lock as written.

    After ``acquire()`` that is the line before the first ``release()``, if only a straight line of statements follows.
    """
    for block in _blocks(scope):
        for number, one in enumerate(block):
            if isinstance(one, (ast.With, ast.AsyncWith)):
                for item in one.items:
                    if isinstance(item.context_expr, (ast.Name, ast.Attribute, ast.Subscript)):
                        line = item.context_expr.lineno
                        yield (line, src.end_of(one)), ast.unparse(item.context_expr)
            name = _calls_on(one, "acquire")
            if name:
                ends = (each.lineno - 1 for each in block[number + 1 :] if name in _released_in(each))
                yield (one.lineno, next(ends, src.end_of(block[-1]))), name


def _blocks(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(scope):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                yield block


def _calls_on(statement: ast.stmt, method: str) -> str:
    """``lock`` of the statement ``lock.acquire()``, whatever its arguments; else empty."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) else None
    return ast.unparse(func.value) if isinstance(func, ast.Attribute) and func.attr == method else ""


def _released_in(statement: ast.stmt) -> set[str]:
    return {_calls_on(one, "release") for one in ast.walk(statement) if isinstance(one, ast.stmt)}


# --- what its call is made on -----------------------------------------------------------------------------------------


def calls_method(frame: Frame, name: str, read_source: ReadSource) -> bool:
    """The line calls a method of this name without arguments, and none other but for the object: ``f(x).wait()``."""
    here = src.calls_at(frame, read_source)
    if not here or not isinstance(here[0].func, ast.Attribute):
        return False
    of_object = set(ast.walk(here[0].func))
    return here[0].func.attr == name and not here[0].args and of_object.issuperset(here[1:])


def is_given_by(frame: Frame, names: Collection[str], read_source: ReadSource) -> bool:
    """Whether the line calls a method of something that only calls of these names can have given: ``f(x).wait()``, or
    ``work.wait()`` where its function binds ``work`` to nothing but results of ``f``, or to items of a list of them.
    """
    called = [one.func.value for one in src.calls_at(frame, read_source) if isinstance(one.func, ast.Attribute)]
    return called != [] and _is_of(called[0], names, src.scope_at(frame, read_source), frozenset())


_ITEMS, _ADDING = frozenset({"reversed", "list", "tuple", "iter"}), frozenset({"append", "extend", "insert"})


def _is_of(node: ast.AST, names: Collection[str], scope: ast.AST, asked: frozenset[str]) -> bool:
    if isinstance(node, ast.Call):
        called = src.name_called(node.func)
        of_items = called in _ITEMS and isinstance(node.func, ast.Name) and len(node.args) == 1
        return called in names or (of_items and _is_of(node.args[0], names, scope, asked))
    if isinstance(node, (ast.List, ast.Tuple)):
        return all(_is_of(elt, names, scope, asked) for elt in node.elts)
    if isinstance(node, ast.ListComp):
        return _is_of(node.elt, names, scope, asked)
    if isinstance(node, ast.Subscript):
        return _is_of(node.value, names, scope, asked)
    if not isinstance(node, ast.Name):
        return False
    if node.id in asked:
        return True  # so far
    values = _values(node.id, scope)
    return bool(values) and all(_is_of(one, names, scope, asked | {node.id}) for one in values)


def _values(name: str, scope: ast.AST) -> list[ast.expr]:
    """What the function binds a variable to, or adds to the list in it; empty where that isn't plain to see."""
    bound, values = 0, list[ast.expr]()
    for one in ast.walk(scope):
        if isinstance(one, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension)):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            mine = sum(isinstance(target, ast.Name) and target.id == name for target in targets)
            value = one.iter if isinstance(one, (ast.For, ast.comprehension)) else one.value
            bound += mine
            values += [value] if mine and value is not None else []
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _ADDING:
            values += one.args if isinstance(one.func.value, ast.Name) and one.func.value.id == name else []
    stored = sum(_binds(one, name) for one in ast.walk(scope))
    return values if stored == bound and any(not _is_empty(value) for value in values) else []


def _binds(node: ast.AST, name: str) -> bool:
    """The variable, or an item of what is in it; of a function, its parameter."""
    if isinstance(node, ast.arg):
        return node.arg == name
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return name in node.names
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id == name and not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)


def _is_empty(value: ast.AST) -> bool:
    return isinstance(value, (ast.List, ast.Tuple)) and not value.elts
