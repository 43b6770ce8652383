"""Evaluates a condition for one rank, from its source alone."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from safelaunch.stacks import source as src
from safelaunch.stacks.rank_names import WORLD_SIZE, identifiers

_GLOBAL = re.compile(r"^_?(?:get_)?(?:(?:global|world|dist|my)_)?rank$|^process_index$", re.IGNORECASE)
_LOCAL = re.compile(r"^_?(?:get_)?local_(?:rank|process_index)$", re.IGNORECASE)
_MAIN = re.compile(
    r"^is_(?:main|master)(?:_process|_rank)?$|^is_(?:global|world_process)_zero$|^rank_?(?:0|zero)$"
    r"|^is_rank_?(?:0|zero)$|^is_world_main$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Whereabouts:
    rank: int
    local_rank: int
    world_size: int


class UnknownValueError(Exception):
    """The value can't be determined from the source alone."""


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda item, other: item in other,
    ast.NotIn: lambda item, other: item not in other,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def value_on_rank(node: ast.expr, whereabouts: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    """Returns the value of an expression that uses only ranks and constants. Raises UnknownValueError for any other."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [value_on_rank(part, whereabouts, names, steps) for part in node.elts]
    if isinstance(node, ast.UnaryOp):
        inner = value_on_rank(node.operand, whereabouts, names, steps)
        return not inner if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else _unknown()
    if isinstance(node, ast.BoolOp):
        return _either(node, whereabouts, names, steps)
    if isinstance(node, ast.Compare):
        return _compared(node, whereabouts, names, steps)
    if isinstance(node, ast.BinOp):
        return _computed(node, whereabouts, names, steps)
    return _named(node, whereabouts, names, steps)


def _unknown() -> Any:
    raise UnknownValueError


def _either(node: ast.BoolOp, whereabouts: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> bool:
    """Evaluates ``and``, which is false if any part is false, even if others are unknown; ``or`` correspondingly."""
    decisive, unknown = isinstance(node.op, ast.Or), False
    for part in node.values:
        try:
            if bool(value_on_rank(part, whereabouts, names, steps)) is decisive:
                return decisive
        except UnknownValueError:
            unknown = True
    return bool(_unknown()) if unknown else not decisive


def _compared(node: ast.Compare, whereabouts: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> bool:
    values = [value_on_rank(part, whereabouts, names, steps) for part in (node.left, *node.comparators)]
    try:
        return all(_COMPARE[type(sign)](values[number], values[number + 1]) for number, sign in enumerate(node.ops))
    except TypeError:
        return bool(_unknown())


def _computed(node: ast.BinOp, whereabouts: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    values = [value_on_rank(part, whereabouts, names, steps) for part in (node.left, node.right)]
    compute = _ARITHMETIC.get(type(node.op))
    if compute is None or not all(isinstance(value, int) for value in values):
        return _unknown()
    try:
        return compute(*values)
    except ZeroDivisionError:
        return _unknown()


def _named(node: ast.expr, whereabouts: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    """Evaluates an expression that returns the rank, such as a name or a call, or a name defined by one."""
    if isinstance(node, ast.Name) and steps and node.id in names:
        return value_on_rank(names[node.id], whereabouts, names, steps - 1)
    if isinstance(node, ast.Call):
        return _called(node, whereabouts, names, steps)
    if isinstance(node, ast.NamedExpr):
        return value_on_rank(node.value, whereabouts, names, steps)
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return _of_environ(key, whereabouts) if "environ" in set(identifiers(node.value)) else _unknown()
    return _of_word(src.name_called(node), whereabouts)


def _called(node: ast.Call, whereabouts: Whereabouts, names: Mapping[str, ast.expr], steps: int) -> Any:
    word = src.name_called(node.func)
    if word in ("int", "str", "bool") and len(node.args) == 1:
        return value_on_rank(node.args[0], whereabouts, names, steps)
    if word == "range" and node.args:
        bounds = [value_on_rank(part, whereabouts, names, steps) for part in node.args]
        return range(*bounds) if all(isinstance(bound, int) for bound in bounds) else _unknown()
    if word in ("get", "getenv") and node.args and isinstance(node.args[0], ast.Constant):
        return _of_environ(node.args[0].value, whereabouts)
    if node.args or node.keywords:  # the rank in a group
        return _unknown()
    return _of_word(word, whereabouts)


def _of_environ(key: object, whereabouts: Whereabouts) -> int:
    variables = {"RANK": whereabouts.rank, "LOCAL_RANK": whereabouts.local_rank, "WORLD_SIZE": whereabouts.world_size}
    return variables[key] if isinstance(key, str) and key in variables else int(_unknown())


def _of_word(word: str, whereabouts: Whereabouts) -> int | bool:
    if _GLOBAL.match(word):
        return whereabouts.rank
    if _LOCAL.match(word):
        return whereabouts.local_rank if whereabouts.local_rank >= 0 else int(_unknown())
    if WORLD_SIZE.match(word):
        return whereabouts.world_size
    if _MAIN.match(word):
        return whereabouts.rank == 0
    return bool(_unknown())
