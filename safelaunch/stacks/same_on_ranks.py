"""Recognizes the parts of a condition that have the same value on all ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set

from safelaunch.stacks import source as src
from safelaunch.stacks.rank_names import depends_on_rank

_COUNTING = frozenset({"range", "trange", "enumerate", "count"})
_SETTINGS = frozenset({"args", "cfg", "config", "conf", "opt", "opts", "hparams", "params", "settings", "flags"})
_CASTS = frozenset({"int", "float", "bool", "str", "min", "max", "round", "abs"})
_MOST_STEPS = 6  # from a name to its definition


def is_same_on_ranks(value: ast.expr, names: Mapping[str, ast.expr], steps: int = _MOST_STEPS) -> bool:
    """Returns whether all ranks compute the same value, from constants, settings, and names defined by these."""
    if not steps or depends_on_rank(value, names):
        return False
    calls = [*src.calls_in(value)]
    if any(not isinstance(call.func, ast.Name) or call.func.id not in _CASTS for call in calls):
        return False
    allowed = {"", *_CASTS} if calls else {""}
    for name in _names_except_settings(value):
        plain = names.get(name)
        if name not in allowed and (plain is None or not is_same_on_ranks(plain, names, steps - 1)):
            return False
    return True


def is_by_round(test: ast.expr, names: Mapping[str, ast.expr], counters: Set[str]) -> bool:
    """Returns whether a condition depends on ``counters`` of rounds alone, so that it is equal on all ranks."""
    if depends_on_rank(test, names) or any(src.calls_in(test)):
        return False
    alike = {name for name, value in names.items() if is_same_on_ranks(value, names)}
    return alike.union(counters).issuperset(_names_except_settings(test))


def _names_except_settings(test: ast.expr) -> Iterator[str]:
    nodes = list(ast.walk(test))
    owners = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in owners:
            *where, name = ast.unparse(node).split(".")
            if not name.isupper() and not _SETTINGS.intersection(where):
                yield ".".join((*where, name))


def round_counters(scope: ast.AST) -> Iterator[str]:
    """Yields variables that count iterations: ``step`` in ``for step in range(n)``, or with ``step += 1`` in a loop."""
    loops = (node for node in ast.walk(scope) if isinstance(node, src.LOOPS))
    for loop in loops:
        if not isinstance(loop, ast.While) and _COUNTING.intersection(src.names_in(loop.iter)):
            yield ast.unparse(loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target)
        each_round = [] if any(isinstance(node, ast.Continue) for node in ast.walk(loop)) else loop.body
        added = (
            statement
            for statement in each_round
            if isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.Constant)
        )
        yield from (ast.unparse(statement.target) for statement in added)
