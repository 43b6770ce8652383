"""What a source file says of the lines at which ranks are: a loop that one of them has left."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from safelaunch.model import Frame
from safelaunch.verdict.reading.frames import basename, short

ReadSource = Callable[[str], "str | None"]  # path → text of the file, or None


class Located(Protocol):
    """A frame, or a condition."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


@lru_cache(64)
def tree_of(text: str) -> ast.Module | None:
    """None where the text is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _tree_in(path: str, read_source: ReadSource) -> ast.Module | None:
    text = read_source(path)
    return tree_of(text) if text else None


def runs_aside(frame: Frame, read_source: ReadSource) -> str:
    """What Python calls the function of ``frame`` as, whatever line it is at then; empty where a line calls it."""
    name = short(frame.function)
    if name == "__del__":
        return "a finalizer"
    return "a signal handler" if name in _signal_handlers(read_source(frame.file) or "") else ""


def handler_of(frame: Frame, read_source: ReadSource) -> ast.ExceptHandler | None:
    """The ``except`` in whose body the line is."""
    tree = _tree_in(frame.file, read_source)
    handlers = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)) if tree is not None else ()
    return next((one for one in handlers if one.lineno < frame.line <= (one.end_lineno or 0)), None)


@lru_cache(256)
def _signal_handlers(text: str) -> frozenset[str]:
    """The names of the functions that are given to ``signal.signal``."""
    tree = tree_of(text) if "signal" in text else None
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree is not None else ()
    given = (one.args[1] for one in calls if len(one.args) == 2 and "signal" in names_in(one.func))
    return frozenset(name for one in given for name in list(names_in(one))[:1])


def calls_method(frame: Frame, name: str, read_source: ReadSource) -> bool:
    """The line calls a method of this name without arguments, and none other but for the object: ``f(x).wait()``."""
    here = calls_at(frame, read_source)
    if not here or not isinstance(here[0].func, ast.Attribute):
        return False
    of_object = set(ast.walk(here[0].func))
    return here[0].func.attr == name and not here[0].args and of_object.issuperset(here[1:])


def is_given_by(frame: Frame, names: Collection[str], read_source: ReadSource) -> bool:
    """Whether the line calls a method of something that only calls of these names can have given: ``f(x).wait()``, or
    ``work.wait()`` where its function binds ``work`` to nothing but results of ``f``, or to items of a list of them.
    """
    tree = _tree_in(frame.file, read_source)
    called = [one.func.value for one in calls_at(frame, read_source) if isinstance(one.func, ast.Attribute)]
    return tree is not None and called != [] and _is_of(called[0], names, scope_of(tree, frame.line), frozenset())


_ITEMS, _ADDING = frozenset({"reversed", "list", "tuple", "iter"}), frozenset({"append", "extend", "insert"})


def _is_of(node: ast.AST, names: Collection[str], scope: ast.AST, asked: frozenset[str]) -> bool:
    if isinstance(node, ast.Call):
        called = name_called(node.func)
        of_items = called in _ITEMS and isinstance(node.func, ast.Name) and len(node.args) == 1
        return called in names or (of_items and _is_of(node.args[0], names, scope, asked))
    if isinstance(node, (ast.List, ast.Tuple)):
        return all(_is_of(one, names, scope, asked) for one in node.elts)
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


def name_called(func: ast.expr) -> str:
    """``f`` of ``a.f()`` and ``f()``; "" for any other expression."""
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def calls_at(frame: Frame, read_source: ReadSource) -> list[ast.Call]:
    """The calls on its line, the outermost one first."""
    tree = _tree_in(frame.file, read_source)
    return [
        one
        for one in (ast.walk(tree) if tree is not None else ())
        if isinstance(one, ast.Call) and one.lineno <= frame.line <= (one.end_lineno or one.lineno)
    ]


def names_called_at(frame: Frame, read_source: ReadSource) -> set[str]:
    """The names of the functions that the line calls itself."""
    return {name_called(call.func) for call in calls_at(frame, read_source)}


# --- locks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LockTaken:
    """The lock that a line takes, as written there. ``held_at``: the line of the same function that took it before."""

    name: str
    held_at: int = 0


def lock_at(frame: Frame, read_source: ReadSource) -> LockTaken | None:
    """The one lock that the line takes, by ``with`` or ``acquire()``; None where it takes none, or several."""
    tree = _tree_in(frame.file, read_source)
    if tree is None:
        return None
    scope = scope_of(tree, frame.line)
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
        tree = _tree_in(frame.file, read_source)
        if tree is None:
            continue
        scope = scope_of(tree, frame.line)
        released = _waited_on(scope, frame.line) if depth == 0 else set()
        for (line, end), name in _takings(scope):
            if line < frame.line <= end and name not in released:
                found.append(LockHeld(name, line, frame))
    return tuple(found)


def _waited_on(scope: ast.AST, line: int) -> set[str]:
    here = (one.func for one in ast.walk(scope) if isinstance(one, ast.Call) and one.lineno == line)
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
                        yield (line, one.end_lineno or line), ast.unparse(item.context_expr)
            name = _calls_on(one, "acquire")
            if name:
                ends = (each.lineno - 1 for each in block[number + 1 :] if name in _released_in(each))
                yield (one.lineno, next(ends, block[-1].end_lineno or one.lineno)), name


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


# --- loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """``line``: where it begins. ``enclosed``: in another loop, of its function or of a caller, that goes on behind it:
    a rank that is past it may be a round behind, as well as ahead. ``inside``: the frame that is in it. ``breaks``:
    in words, the conditions that end one early which a rank has left, by a ``break``, or a ``return`` to where the rank
    is. ``end``: its last line.
    """

    line: int
    enclosed: bool
    inside: Frame = field(compare=False)
    breaks: tuple[str, ...] = field(default=(), compare=False)
    end: int = field(default=0, compare=False)

    @property
    def place(self) -> str:
        """``train.py:21``."""
        return f"{basename(self.inside.file)}:{self.line}"

    def has(self, one: Located) -> bool:
        """Whether that line is in it."""
        return one.file == self.inside.file and self.line <= one.line <= self.end


def loop_left(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> Loop | None:
    """The loop that ``behind`` is inside of and ``ahead`` is past, in the same function; None if there is none. Stacks
    are innermost first.

    Both stacks are walked from outside to where they part: there, one function is at two lines. If one line lies in
    the body of a ``for`` or ``while`` and the other after that loop's end, the rank has left the loop. A collective
    under ``if rank == 0`` inside the loop has both lines inside.
    """
    callers: list[Frame] = []
    for one, other in zip(reversed(ahead), reversed(behind), strict=False):
        if (one.file, short(one.function)) != (other.file, short(other.function)):
            return None
        if one.line != other.line:
            tree = _tree_in(one.file, read_source)
            found = _loop_between(tree, other, one.line) if tree is not None else None
            if found is None:
                return None
            again = any(loops_at(caller, read_source) for caller in callers)
            return replace(found, enclosed=found.enclosed or again)
        callers.append(one)
    return None


def _loop_between(tree: ast.Module, inside: Frame, after: int) -> Loop | None:
    scope = scope_of(tree, inside.line)
    if scope is not scope_of(tree, after):
        return None
    around = loops_around(scope, inside.line)
    left = [loop.lineno for loop in around if (loop.end_lineno or 0) < after and not attempts_of(loop)]
    if not left:
        return None
    return Loop(left[0], around[0].lineno != left[0], inside, ifs_with(ast.Break, scope, left[0]))


def ifs_with(ends: type[ast.stmt] | tuple[type[ast.stmt], ...], scope: ast.AST, begin: int) -> tuple[str, ...]:
    """Each ``if`` with such a statement in the loop that begins there, in words."""
    loops = (one for one in ast.walk(scope) if isinstance(one, LOOPS))
    loop = next(one for one in loops if one.lineno == begin)
    ifs = [one for one in ast.walk(loop) if isinstance(one, ast.If) and any(isinstance(s, ends) for s in one.body)]
    return tuple(f"`if {text_of(one.test)}` at line {one.lineno}" for one in sorted(ifs, key=lambda one: one.lineno))


def loops_at(frame: Frame, read_source: ReadSource) -> list[Loop]:
    """The loops around its line, the outermost first."""
    tree = _tree_in(frame.file, read_source)
    if tree is None:
        return []
    scope = scope_of(tree, frame.line)
    return [
        Loop(one.lineno, n > 0, frame, end=one.end_lineno or 0) for n, one in enumerate(loops_around(scope, frame.line))
    ]


def loops_around(scope: ast.AST | None, line: int) -> list[ast.For | ast.While | ast.AsyncFor]:
    """The loops in ``scope`` that hold ``line``, the outermost first."""
    nodes = (node for node in (ast.walk(scope) if scope is not None else ()) if isinstance(node, LOOPS))
    return sorted((one for one in nodes if one.lineno <= line <= (one.end_lineno or 0)), key=lambda one: one.lineno)


LOOPS = (ast.For, ast.While, ast.AsyncFor)


def attempts_of(loop: ast.For | ast.While | ast.AsyncFor) -> list[ast.Try]:
    """Each ``try`` that ends the loop when it succeeds: what goes round is the same thing again after a failure."""
    tries = (one for one in loop.body if isinstance(one, ast.Try))
    return [one for one in tries if isinstance((one.orelse or one.body)[-1], (ast.Return, ast.Break))]


def scope_of(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function (or the module) that holds ``line``."""
    found: ast.AST = tree
    for node in ast.walk(tree):  # breadth first: inner functions come later
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= (node.end_lineno or 0):
            found = node
    return found


_MOST_TEXT = 120


def text_of(node: ast.AST) -> str:
    """Its first line, as Python would write it."""
    text = ast.unparse(node).split("\n")[0]
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…"


def names_in(node: ast.AST) -> Iterator[str]:
    """Yields each name and attribute in ``node``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Name):
            yield one.id
