"""Examines the object whose method a line calls."""

from __future__ import annotations

import ast
from collections.abc import Collection

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.source import ReadSource


def calls_method(frame: Frame, name: str, read_source: ReadSource) -> bool:
    """Returns whether the line calls ``name`` without arguments and, apart from that, only computes its object."""
    calls = src.context(frame, read_source).calls
    if not calls or not isinstance(calls[0].func, ast.Attribute):
        return False
    of_object = set(ast.walk(calls[0].func))
    return calls[0].func.attr == name and not calls[0].args and of_object.issuperset(calls[1:])


def is_result_of(frame: Frame, names: Collection[str], read_source: ReadSource) -> bool:
    """Returns whether the object whose method the line calls must be a result of one of the functions ``names``.

    ``f(x).wait()`` proves it. So does ``work.wait()``, if ``work`` is assigned only results of ``f``, or items from a
    list of such results.
    """
    here = src.context(frame, read_source)
    called = [call.func.value for call in here.calls if isinstance(call.func, ast.Attribute)]
    return called != [] and _is_of(called[0], names, here.scope, frozenset())


_ITEMS, _ADDING = frozenset({"reversed", "list", "tuple", "iter"}), frozenset({"append", "extend", "insert"})


def _is_of(node: ast.AST, names: Collection[str], scope: ast.AST, asked: frozenset[str]) -> bool:
    if isinstance(node, ast.Call):
        called = src.name_called(node.func)
        of_items = called in _ITEMS and isinstance(node.func, ast.Name) and len(node.args) == 1
        return called in names or (of_items and _is_of(node.args[0], names, scope, asked))
    if isinstance(node, (ast.List, ast.Tuple)):
        return all(_is_of(elt, names, scope, asked) for elt in node.elts)
    if isinstance(node, (ast.ListComp, ast.Subscript)):
        return _is_of(node.elt if isinstance(node, ast.ListComp) else node.value, names, scope, asked)
    if not isinstance(node, ast.Name):
        return False
    if node.id in asked:
        return True  # already being examined
    values = _values(node.id, scope)
    return bool(values) and all(_is_of(value, names, scope, asked | {node.id}) for value in values)


def _values(name: str, scope: ast.AST) -> list[ast.expr]:
    """Returns all values assigned to a variable, or added to its list; empty if the source doesn't determine them."""
    bound, values = 0, list[ast.expr]()
    for part in ast.walk(scope):
        if isinstance(part, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension)):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            hits = sum(isinstance(target, ast.Name) and target.id == name for target in targets)
            value = part.iter if isinstance(part, (ast.For, ast.comprehension)) else part.value
            bound += hits
            values += [value] if hits and value is not None else []
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _ADDING:
            values += part.args if isinstance(part.func.value, ast.Name) and part.func.value.id == name else []
    stored = sum(_binds(part, name) for part in ast.walk(scope))
    return values if stored == bound and any(not _is_empty(value) for value in values) else []


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.arg):
        return node.arg == name
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return name in node.names
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id == name and not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)


def _is_empty(value: ast.AST) -> bool:
    return isinstance(value, (ast.List, ast.Tuple)) and not value.elts
