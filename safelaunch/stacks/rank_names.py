"""Recognizes, by the names in them, expressions that depend on the rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from safelaunch.stacks import source as src

# Names by which torch, accelerate, transformers, Lightning and DeepSpeed identify the process.
_RANK = re.compile(
    r"(?:^|_)rank(?:_|0?$)|^is_(?:local_|world_)?(?:main|master)|(?:global|process)_zero$|process_index"
    r"|^(?:get_)?coordinate$|^is_(?:first|last)(?:_stage)?$|^on_(?:main|local_main|last)_process$",
    re.IGNORECASE,
)
WORLD_SIZE = re.compile(r"^_?(?:get_)?world_size$|^num_(?:processes|replicas|ranks)$", re.IGNORECASE)
MAX_STEPS = 6  # from a name to its definition
_CASTS = frozenset({"int", "str", "bool", "get", "getenv"})


def depends_on_rank(test: ast.expr, names: Mapping[str, ast.expr], steps: int = MAX_STEPS) -> bool:
    """Returns whether the condition contains the rank, or a name defined by it.

    A function's result doesn't count as depending on the rank merely because the rank is one of its arguments.
    """
    words = list(identifiers(test))
    if any(_RANK.search(word) for word in words):
        return True
    values = (names[word] for word in words if steps and word in names)
    return any(depends_on_rank(plain, names, steps - 1) for value in values if (plain := _plain(value)) is not None)


def _plain(value: ast.expr) -> ast.expr | None:
    # For a value computed from arguments, only the function's name counts: it can contain the rank.
    calls = [call for call in ast.walk(value) if isinstance(call, ast.Call) and (call.args or call.keywords)]
    if all(_CASTS.intersection(src.names_in(call.func)) for call in calls):
        return value
    return value.func if isinstance(value, ast.Call) and not isinstance(value.func, ast.Call) else None


def identifiers(node: ast.AST) -> Iterator[str]:
    """Yields all names in ``node``, and the rank's variables that it looks up by a string: ``RANK``, ``LOCAL_RANK``."""
    yield from src.names_in(node)
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and part.value in ("RANK", "LOCAL_RANK"):
            yield str(part.value)
