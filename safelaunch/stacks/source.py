"""Finds the function, calls and loops around a source line."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from safelaunch.model import Frame
from safelaunch.stacks.frames import basename, short

ReadSource = Callable[[str], "str | None"]  # path → text of the file, or None
NO_SOURCE: ReadSource = lambda path: None  # noqa: E731


class Located(Protocol):
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


LOOPS = (ast.For, ast.While, ast.AsyncFor)
AnyLoop = ast.For | ast.While | ast.AsyncFor
_LINES = "lines"  # attribute of each node: the lines of its file


@lru_cache(64)
def tree_of(text: str) -> ast.Module:
    """Parses a source file; returns an empty module if it isn't Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        vars(node)[_LINES] = lines
    return tree


def tree_in(path: str, read_source: ReadSource) -> ast.Module:
    """Returns the file's tree; an empty module if the file can't be read."""
    return tree_of(read_source(path) or "")


def scope_at(frame: Located, read_source: ReadSource) -> ast.AST:
    return scope_of(tree_in(frame.file, read_source), frame.line)


def scope_of(tree: ast.Module, line: int) -> ast.AST:
    scope: ast.AST = tree
    for node in ast.walk(tree):  # breadth first: inner functions come later
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and spans(node, line):
            scope = node
    return scope


def spans(node: ast.stmt | ast.expr | ast.ExceptHandler, line: int) -> bool:
    return node.lineno <= line <= end_of(node)


def end_of(node: ast.stmt | ast.expr | ast.ExceptHandler) -> int:
    return node.end_lineno or node.lineno


def holds(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and begin_of(block[0]) <= line <= end_of(block[-1])


def begin_of(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Call))


def runs_aside(frame: Frame, read_source: ReadSource) -> str:
    """Returns ``a finalizer`` or ``a signal handler`` if Python can call this function at any line, else ""."""
    name = short(frame.function)
    if name == "__del__":
        return "a finalizer"
    return "a signal handler" if name in _signal_handlers(read_source(frame.file) or "") else ""


def handler_of(frame: Frame, read_source: ReadSource) -> ast.ExceptHandler | None:
    nodes = ast.walk(tree_in(frame.file, read_source))
    handlers = (node for node in nodes if isinstance(node, ast.ExceptHandler))
    return next((handler for handler in handlers if handler.lineno < frame.line <= end_of(handler)), None)


@lru_cache(256)
def _signal_handlers(text: str) -> frozenset[str]:
    calls = calls_in(tree_of(text if "signal" in text else ""))
    handlers = (call.args[1] for call in calls if len(call.args) == 2 and "signal" in names_in(call.func))
    return frozenset(name for handler in handlers for name in list(names_in(handler))[:1])


def name_called(func: ast.expr) -> str:
    """Returns ``f`` for ``a.f()`` and ``f()``; "" for any other expression."""
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def calls_at(frame: Frame, read_source: ReadSource) -> list[ast.Call]:
    return [call for call in calls_in(tree_in(frame.file, read_source)) if spans(call, frame.line)]


def names_called_at(frame: Frame, read_source: ReadSource) -> set[str]:
    return {name_called(call.func) for call in calls_at(frame, read_source)}


# --- loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceLoop:
    line: int
    # It is in another loop of its function or a caller, so a rank past it can be a round behind or ahead.
    enclosed: bool
    inside: Frame = field(compare=False)  # frame in the loop
    # Conditions, in words, of each ``break``, or ``return`` to where another rank is, that ends it early.
    breaks: tuple[str, ...] = field(default=(), compare=False)
    end: int = field(default=0, compare=False)

    @property
    def place(self) -> str:
        return f"{basename(self.inside.file)}:{self.line}"

    def has(self, place: Located) -> bool:
        return place.file == self.inside.file and self.line <= place.line <= self.end


def ifs_with(ends: tuple[type[ast.stmt], ...], loop: AnyLoop, may: Callable[[ast.expr], bool]) -> tuple[str, ...]:
    """Returns in words each ``if`` in the loop with one of ``ends`` in its body and a condition ``may`` accepts."""
    ifs = [part for part in ast.walk(loop) if isinstance(part, ast.If) and any(isinstance(s, ends) for s in part.body)]
    ifs = [branch for branch in ifs if may(branch.test)]
    return tuple(
        f"`if {text_of(branch.test)}` at line {branch.lineno}"
        for branch in sorted(ifs, key=lambda branch: branch.lineno)
    )


def loops_at(frame: Frame, read_source: ReadSource) -> list[SourceLoop]:
    around = loops_around(scope_at(frame, read_source), frame.line)
    return [SourceLoop(loop.lineno, n > 0, frame, end=end_of(loop)) for n, loop in enumerate(around)]


def loops_around(scope: ast.AST, line: int) -> list[AnyLoop]:
    nodes = (node for node in ast.walk(scope) if isinstance(node, LOOPS) and spans(node, line))
    return sorted(nodes, key=lambda loop: loop.lineno)


def attempts_of(loop: AnyLoop) -> list[ast.Try]:
    """Returns each ``try`` that ends the loop when it succeeds: after a failure, the loop retries it."""
    tries = (statement for statement in loop.body if isinstance(statement, ast.Try))
    return [attempt for attempt in tries if isinstance((attempt.orelse or attempt.body)[-1], (ast.Return, ast.Break))]


MOST_TEXT = 120


def text_of(node: ast.expr | ast.stmt) -> str:
    """Returns the node's source on one line, shortened."""
    text = _written(node) or ast.unparse(node).split("\n")[0]
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


def _written(node: ast.expr | ast.stmt) -> str:
    """Returns the node's source on one line; empty without a source, or with a comment between its lines."""
    lines: Sequence[str] = vars(node).get(_LINES, ())[node.lineno - 1 : end_of(node)]
    if not lines or node.end_col_offset is None:
        return ""
    # Column offsets count bytes.
    first, last = lines[0].encode()[node.col_offset :].decode(), lines[-1].encode()[: node.end_col_offset].decode()
    if len(lines) == 1:
        return lines[0].encode()[node.col_offset : node.end_col_offset].decode()
    parts = [part.strip().removesuffix("\\").rstrip() for part in (first, *lines[1:-1], last)]
    if any("#" in part for part in parts):
        return ""
    text = parts[0]
    for part in parts[1:]:
        text += part if text.endswith(("(", "[", "{")) or part.startswith((")", "]", "}")) else f" {part}"
    return text


def names_in(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name):
            yield part.id


def except_words(handler: ast.ExceptHandler) -> str:
    return f"except {text_of(handler.type)}" if handler.type is not None else "except"
