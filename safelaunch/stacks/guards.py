"""The conditions on the rank that decide whether a line is reached: ``if rank == 0:``, its ``else``, an early return.

Read from the source of the user's frames. A guard is a hint and never a verdict by itself: ``if rank == 0: save();
barrier()`` with a ``barrier()`` in the ``else`` is no fault. If a condition depends on the rank alone, it is evaluated
for each rank: then the source shows which ranks reach that line.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename
from safelaunch.stacks.source import ReadSource

# Names in torch, accelerate, transformers, Lightning and DeepSpeed that identify the process.
_OF_THE_RANK = re.compile(
    r"(?:^|_)rank(?:_|0?$)|^is_(?:local_|world_)?(?:main|master)|(?:global|process)_zero$|process_index"
    r"|^(?:get_)?coordinate$|^is_(?:first|last)(?:_stage)?$|^on_(?:main|local_main|last)_process$",
    re.IGNORECASE,
)
_GLOBAL = re.compile(r"^_?(?:get_)?(?:(?:global|world|dist|my)_)?rank$|^process_index$", re.IGNORECASE)
_LOCAL = re.compile(r"^_?(?:get_)?local_(?:rank|process_index)$", re.IGNORECASE)
_WORLD = re.compile(r"^_?(?:get_)?world_size$|^num_(?:processes|replicas|ranks)$", re.IGNORECASE)
_MAIN = re.compile(
    r"^is_(?:main|master)(?:_process|_rank)?$|^is_(?:global|world_process)_zero$|^rank_?(?:0|zero)$"
    r"|^is_rank_?(?:0|zero)$|^is_world_main$",
    re.IGNORECASE,
)
_DECORATORS = re.compile(r"rank_?zero|main_process|on_(?:main|last)|rank_?0|master_only", re.IGNORECASE)
_MOST_STEPS = 6  # from a name to the name that it stands for


@dataclass(frozen=True)
class Whereabouts:
    """The values that a condition on the rank can use."""

    rank: int
    local_rank: int
    world_size: int


@dataclass(frozen=True)
class Guard:
    """A condition or a loop before a line: the line is reached only if ``text``, at ``line``, is ``taken``.

    A cache and the ``except`` of an exception count as conditions, too.
    """

    file: str
    line: int
    text: str
    taken: bool
    test: ast.expr | None = field(default=None, compare=False, repr=False)
    names: Mapping[str, ast.expr] = field(default_factory=dict, compare=False, repr=False)
    beside: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # calls of the other branch
    asks_for_rank: bool = field(default=False, compare=False)  # it depends on the process: ranks can diverge here
    loop: bool = field(default=False, compare=False)  # it is the head of a ``for`` loop
    by_round: bool = False  # it depends on the number of the round alone, so that it is equal on all ranks
    again: bool = False  # it repeats what failed

    @property
    def words(self) -> str:
        """Returns ``if rank == 0 (train.py:14)``."""
        return f"{self.text} ({basename(self.file)}:{self.line})"

    def admits(self, one: Whereabouts) -> bool | None:
        """Returns whether this rank passes it; None if the condition depends on more than the rank."""
        if self.test is None:
            return None
        try:
            return bool(_value(self.test, one, self.names, _MOST_STEPS)) is self.taken
        except _UnknownError:
            return None


class _UnknownError(Exception):
    """The value can't be determined from the source alone."""


def guards_of(stack: Sequence[Frame], read_source: ReadSource) -> tuple[Guard, ...]:
    """Returns the guards of all lines of ``stack`` (the user's frames, innermost first), the innermost guard first.

    If both branches of an ``if`` call the function that the stack goes into, it keeps no rank away. Frames outside a
    signal handler haven't called it, so their guards don't count.
    """
    found = []
    for frame, into in zip(stack, (None, *stack), strict=False):
        guards = [one for one in reversed(way_to(frame, read_source)) if one.asks_for_rank and not one.loop]
        if any(guard.beside for guard in guards):
            called = _called_at(frame, read_source) if into is None else into.function.rpartition(".")[2]
            guards = [replace(guard, test=None) if called and called in guard.beside else guard for guard in guards]
        found += guards
        if src.runs_aside(frame, read_source):
            break
    return tuple(found)


def way_to(frame: Frame, read_source: ReadSource) -> tuple[Guard, ...]:
    """Returns all conditions and loops around the line of ``frame``, in the order of their lines."""
    return _way(read_source(frame.file) or "", frame.file, frame.line)


def names_at(frame: src.Located, read_source: ReadSource) -> dict[str, ast.expr]:
    """Returns the names that stand for one expression at that line."""
    tree = src.tree_in(frame.file, read_source)
    return _assigned(tree) | _assigned(src.scope_of(tree, frame.line))


@lru_cache(256)
def _way(text: str, file: str, line: int) -> tuple[Guard, ...]:
    tree = src.tree_of(text)
    scope = src.scope_of(tree, line)
    names = _assigned(tree) | _assigned(scope)
    found = []
    for at, shown, taken, test in _on_the_way(scope, line):
        asks = test is None or asks_for_the_rank(test, names)
        found.append(Guard(file, at, shown, taken, test, names, _beside(scope, test, taken), asks))
    return tuple(sorted([*found, *_loops(scope, file, line, names)], key=lambda one: one.line))


def _beside(scope: ast.AST, test: ast.expr | None, taken: bool) -> frozenset[str]:
    """Returns the names of the functions that the other branch of this ``if`` calls."""
    ifs = (node for node in ast.walk(scope) if isinstance(node, ast.If) and node.test is test)
    other = next((node.orelse if taken else node.body for node in ifs), [])
    return frozenset(src.name_called(call.func) for one in other for call in src.calls_in(one))


_PLAIN = (ast.Expr, ast.Assign, ast.Return)


def _called_at(frame: Frame, read_source: ReadSource) -> str:
    nodes = (node for node in ast.walk(src.tree_in(frame.file, read_source)) if isinstance(node, _PLAIN))
    values = (node.value for node in nodes if src.spans(node, frame.line))
    return next((src.name_called(value.func) for value in values if isinstance(value, ast.Call)), "")


def _loops(scope: ast.AST, file: str, line: int, names: Mapping[str, ast.expr]) -> Iterator[Guard]:
    """Yields the heads of ``for`` loops around the line; the condition of a ``while`` is on the way anyway."""
    for loop in src.loops_around(scope, line):
        if not isinstance(loop, ast.While) and src.holds(loop.body, line):
            shown = f"for {src.text_of(loop.target)} in {src.text_of(loop.iter)}"
            asks = asks_for_the_rank(loop.iter, names)
            yield Guard(file, loop.lineno, shown, taken=True, asks_for_rank=asks, loop=True)


_Met = tuple[int, str, bool, "ast.expr | None"]  # line, text, whether it was taken, and test of a condition


def _on_the_way(scope: ast.AST, line: int) -> Iterator[_Met]:
    """Yields the conditions that were met before ``line`` was reached, from outside to inside."""
    for decorator in getattr(scope, "decorator_list", []):
        if any(_DECORATORS.search(name) for name in _words(decorator)):
            yield decorator.lineno, f"@{src.text_of(decorator)}", True, None
    block: Sequence[ast.stmt] | None = getattr(scope, "body", None)
    while block is not None:
        at = next((n for n, one in enumerate(block) if src.holds([one], line)), None)
        if at is None:
            return
        for before in block[:at]:
            yield from _left_before(before)
        yield from _within_statement(block[at], line)
        block = _inner_block(block[at], line)


def _left_before(statement: ast.stmt) -> Iterator[_Met]:
    """Yields the condition of ``if rank != 0: return`` before the line, which only the other ranks pass."""
    if not isinstance(statement, ast.If):
        return
    head = f"if {src.text_of(statement.test)}"
    if _leaves(statement.orelse):
        yield statement.lineno, f"{head}: … else: {src.text_of(statement.orelse[-1])}", True, statement.test
    elif _leaves(statement.body):
        yield statement.lineno, f"{head}: {src.text_of(statement.body[-1])}", False, statement.test


def _leaves(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise))


def _within_statement(statement: ast.stmt, line: int) -> Iterator[_Met]:
    if isinstance(statement, ast.If):
        if src.holds(statement.body, line):
            yield statement.lineno, f"if {src.text_of(statement.test)}", True, statement.test
        elif src.holds(statement.orelse, line):
            yield statement.lineno, f"else of if {src.text_of(statement.test)}", False, statement.test
        else:
            yield from _within_expression(statement.test)
    elif isinstance(statement, ast.While) and src.holds(statement.body, line):
        yield statement.lineno, f"while {src.text_of(statement.test)}", True, statement.test
    elif isinstance(statement, _PLAIN):
        yield from _within_expression(statement.value)


def _within_expression(value: ast.expr | None) -> Iterator[_Met]:
    """Yields the conditions in ``rank == 0 and dist.barrier()`` and ``dist.barrier() if rank == 0 else None``."""
    if isinstance(value, ast.BoolOp) and isinstance(value.values[-1], ast.Call):
        test, taken = value.values[0], isinstance(value.op, ast.And)
        yield value.lineno, f"{src.text_of(test)} {'and' if taken else 'or'} …", taken, test
    elif isinstance(value, ast.IfExp) and isinstance(value.body, ast.Call) != isinstance(value.orelse, ast.Call):
        yield value.lineno, f"… if {src.text_of(value.test)}", isinstance(value.body, ast.Call), value.test


def _inner_block(statement: ast.stmt, line: int) -> Sequence[ast.stmt] | None:
    """Returns the block of ``statement`` that holds ``line``; None without blocks, or in another function."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return None
    blocks = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    blocks += [case.body for case in getattr(statement, "cases", [])]
    return next((block for block in blocks if isinstance(block, list) and src.holds(block, line)), None)


# --- what a condition depends on --------------------------------------------------------------------------------------


def _assigned(scope: ast.AST) -> dict[str, ast.expr]:
    """Returns names that stand for exactly one expression in ``scope``; a name assigned twice has no meaning."""
    found: dict[str, ast.expr | None] = {}
    for node in _statements(scope):
        for name, value in _pairs(node):
            found[name] = None if name in found else value
    return {name: value for name, value in found.items() if value is not None}


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes below ``scope``, except the bodies of its functions and classes."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _statements(child)


def _pairs(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _targets(target, node.value)
    elif (isinstance(node, ast.AnnAssign) and node.value is not None) or isinstance(node, ast.NamedExpr):
        yield from _targets(node.target, node.value)
    elif isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _targets(node.target, None)


def _targets(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        values = (
            value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else None
        )
        for number, one in enumerate(target.elts):
            yield from _targets(one, values[number] if values is not None else None)


def assignments_of_the_rank(module: ast.Module) -> list[ast.stmt]:
    """Returns the module's assignments of values that depend on rank or world size: ``r = dist.get_rank()``."""
    names = _assigned(module)
    values = {one: [value for _, value in _pairs(one) if value is not None] for one in module.body}
    return [
        one
        for one, assigned in values.items()
        if any(asks_for_the_rank(value, names) or any(map(_WORLD.match, _words(value))) for value in assigned)
    ]


_CASTS = frozenset({"int", "str", "bool", "get", "getenv"})


def asks_for_the_rank(test: ast.expr, names: Mapping[str, ast.expr], steps: int = _MOST_STEPS) -> bool:
    """Returns whether the condition depends on the process: it contains the rank, or a name that stands for the rank.

    The result of a function of the rank doesn't count.
    """
    words = list(_words(test))
    if any(_OF_THE_RANK.search(word) for word in words):
        return True
    values = (names[word] for word in words if steps and word in names)
    return any(asks_for_the_rank(plain, names, steps - 1) for value in values if (plain := _plain(value)) is not None)


def _plain(value: ast.expr) -> ast.expr | None:
    """Returns the expression; if it is computed from arguments, only the function, whose name can have the rank."""
    calls = [one for one in ast.walk(value) if isinstance(one, ast.Call) and (one.args or one.keywords)]
    if all(_CASTS.intersection(src.names_in(call.func)) for call in calls):
        return value
    return value.func if isinstance(value, ast.Call) and not isinstance(value.func, ast.Call) else None


def _words(node: ast.AST) -> Iterator[str]:
    """Yields each name in ``node``, and the names of rank variables that are looked up as strings."""
    yield from src.names_in(node)
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and part.value in ("RANK", "LOCAL_RANK"):
            yield str(part.value)


# --- its value on one rank --------------------------------------------------------------------------------------------

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr, one: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    """Returns the value of an expression over ranks and constants. Raises ``_UnknownError`` for any other."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [_value(part, one, names, steps) for part in node.elts]
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand, one, names, steps)
        return not inner if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else _unknown()
    if isinstance(node, ast.BoolOp):
        return _either(node, one, names, steps)
    if isinstance(node, ast.Compare):
        return _compared(node, one, names, steps)
    if isinstance(node, ast.BinOp):
        return _computed(node, one, names, steps)
    return _named(node, one, names, steps)


def _unknown() -> Any:
    raise _UnknownError


def _either(node: ast.BoolOp, one: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> bool:
    """Evaluates ``and``, false if one part is false, whatever the others; and ``or`` accordingly."""
    decisive, unknown = isinstance(node.op, ast.Or), False
    for part in node.values:
        try:
            if bool(_value(part, one, names, steps)) is decisive:
                return decisive
        except _UnknownError:
            unknown = True
    return bool(_unknown()) if unknown else not decisive


def _compared(node: ast.Compare, one: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> bool:
    values = [_value(part, one, names, steps) for part in (node.left, *node.comparators)]
    try:
        return all(_COMPARE[type(sign)](values[number], values[number + 1]) for number, sign in enumerate(node.ops))
    except TypeError:
        return bool(_unknown())


def _computed(node: ast.BinOp, one: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    values = [_value(part, one, names, steps) for part in (node.left, node.right)]
    compute = _ARITHMETIC.get(type(node.op))
    if compute is None or not all(isinstance(value, int) for value in values):
        return _unknown()
    try:
        return compute(*values)
    except ZeroDivisionError:
        return _unknown()


def _named(node: ast.expr, one: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    """Evaluates a name or a call that gives the rank, or a name that stands for such an expression."""
    if isinstance(node, ast.Name) and steps and node.id in names:
        return _value(names[node.id], one, names, steps - 1)
    if isinstance(node, ast.Call):
        return _called(node, one, names, steps)
    if isinstance(node, ast.NamedExpr):
        return _value(node.value, one, names, steps)
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return _of_environ(key, one) if "environ" in set(_words(node.value)) else _unknown()
    return _of_word(src.name_called(node), one)


def _called(node: ast.Call, one: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    word = src.name_called(node.func)
    if word in ("int", "str", "bool") and len(node.args) == 1:
        return _value(node.args[0], one, names, steps)
    if word == "range" and node.args:
        bounds = [_value(part, one, names, steps) for part in node.args]
        return range(*bounds) if all(isinstance(bound, int) for bound in bounds) else _unknown()
    if word in ("get", "getenv") and node.args and isinstance(node.args[0], ast.Constant):
        return _of_environ(node.args[0].value, one)
    if node.args or node.keywords:  # of a group: a different rank
        return _unknown()
    return _of_word(word, one)


def _of_environ(key: object, one: Whereabouts) -> int:
    known = {"RANK": one.rank, "LOCAL_RANK": one.local_rank, "WORLD_SIZE": one.world_size}
    return known[key] if isinstance(key, str) and key in known else int(_unknown())


def _of_word(word: str, one: Whereabouts) -> int | bool:
    if _GLOBAL.match(word):
        return one.rank
    if _LOCAL.match(word):
        return one.local_rank if one.local_rank >= 0 else int(_unknown())
    if _WORLD.match(word):
        return one.world_size
    if _MAIN.match(word):
        return one.rank == 0
    return bool(_unknown())
