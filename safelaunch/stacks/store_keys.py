"""Finds the c10d store key that a line waits for, and the lines that set it.

Store calls have no Python frames, so only the source shows the key.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.source import ReadSource

_WAITS = frozenset({"get", "wait"})
_SETS = frozenset({"set", "add", "append", "compare_set"})


@dataclass(frozen=True)
class StoreKey:
    text: str  # as in the source
    value: str = ""  # with its variables' values, if known
    set_at: tuple[Frame, ...] = ()  # lines of the same file that set the key

    @property
    def words(self) -> str:
        return f"`{self.text}` ({self.value})" if self.value and self.value not in self.text else f"`{self.text}`"


def store_key_at(frame: Frame, read_source: ReadSource, values: Mapping[str, str] | None = None) -> StoreKey | None:
    """Returns the key that this line waits for: ``f"epoch/{n}"`` in ``store.get(f"epoch/{n}")``, or None.

    Args:
        values: Local variables and the ``repr`` of their values.
    """
    match = _key_in_source(src.context(frame, read_source), frame.file)
    if match is None:
        return None
    key, set_at = match
    return StoreKey(src.text_of(key), (_value(key, values or {}) or "")[: src.MOST_TEXT], set_at)


@lru_cache(256)
def _key_in_source(here: src.Context, file: str) -> tuple[ast.expr, tuple[Frame, ...]] | None:
    calls = list(src.calls_in(here.tree))
    bound = (binding for node in ast.walk(here.tree) for binding in src.bindings(node))
    stores = {name for name, value in bound if value is not None and _is_store(value)}
    key = next((key for call in here.calls for key in _keys(call, _WAITS, stores)), None)
    if key is None:
        return None
    shape = _shape(key)
    set_at = (call.lineno for call in calls if any(_shape(other) == shape for other in _keys(call, _SETS, stores)))
    return key, tuple(Frame(file, at, "") for at in sorted(set_at))


def _is_store(value: ast.expr) -> bool:
    return any("store" in name.lower() for name in src.names_in(value))


def _keys(call: ast.Call, functions: frozenset[str], stores: Set[str]) -> Iterator[ast.expr]:
    """Yields the key of a store call with one of these names: its first argument, or the only item of that list."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and function.attr in functions and call.args):
        return
    if _is_store(function.value) or not stores.isdisjoint(src.names_in(function.value)):
        key = call.args[0]
        yield key.elts[0] if isinstance(key, (ast.List, ast.Tuple)) and len(key.elts) == 1 else key


def _shape(key: ast.expr) -> str:
    # Equal for keys that differ only in variable names.
    if isinstance(key, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in key.values)
    return str(key.value) if isinstance(key, ast.Constant) else ast.dump(key)


def _value(key: ast.expr, values: Mapping[str, str]) -> str | None:
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
    constants = [part for part in parts if part is not None]
    return "".join(constants) if parts and len(constants) == len(parts) else None
