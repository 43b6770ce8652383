"""The key of c10d's store that a line waits for, and the lines that set it, as the source shows them.

A call of the store has no Python frames of its own, and no backend records it. What the names in the key stood for is
told by the frame's local variables, where a stack reader saw them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from safelaunch.model import Frame
from safelaunch.verdict.reading.source import ReadSource, names_in, tree_of

_WAITS = frozenset({"get", "wait"})
_SETS = frozenset({"set", "add", "append", "compare_set"})
_MOST_TEXT = 120


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
    found = _in_source(text, frame.file, frame.line) if text else None
    if found is None:
        return None
    key, set_at = found
    return StoreKey(ast.unparse(key)[:_MOST_TEXT], (_value(key, values or {}) or "")[:_MOST_TEXT], set_at)


@lru_cache(256)
def _in_source(text: str, file: str, line: int) -> tuple[ast.expr, tuple[Frame, ...]] | None:
    tree = tree_of(text)
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)] if tree is not None else []
    here = (one for one in calls if one.lineno <= line <= (one.end_lineno or one.lineno))
    key = next((key for one in here for key in _keys(one, _WAITS)), None)
    if key is None:
        return None
    shape = _shape(key)
    set_at = (one.lineno for one in calls if any(_shape(other) == shape for other in _keys(one, _SETS)))
    return key, tuple(Frame(file, at, "") for at in sorted(set_at))


def _keys(call: ast.Call, functions: frozenset[str]) -> Iterator[ast.expr]:
    """The first argument of such a call of a store; of a list of one key, that."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and function.attr in functions and call.args):
        return
    if any("store" in name.lower() for name in names_in(function.value)):
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
