"""What a source file says of a line at which ranks are: its function, the calls on it, the loops around it."""

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
    """A frame, or a condition."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


LOOPS = (ast.For, ast.While, ast.AsyncFor)
AnyLoop = ast.For | ast.While | ast.AsyncFor


_LINES = "lines"  # of a node of ours: those of its file


@lru_cache(64)
def tree_of(text: str) -> ast.Module:
    """Empty where the text is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        vars(node)[_LINES] = lines
    return tree


def tree_in(path: str, read_source: ReadSource) -> ast.Module:
    """Of the file; empty where it can't be read."""
    return tree_of(read_source(path) or "")


def scope_at(frame: Located, read_source: ReadSource) -> ast.AST:
    """The innermost function (or the module) that the line is in."""
    return scope_of(tree_in(frame.file, read_source), frame.line)


def scope_of(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function (or the module) that holds ``line``."""
    found: ast.AST = tree
    for node in ast.walk(tree):  # breadth first: inner functions come later
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and spans(node, line):
            found = node
    return found


def spans(node: ast.stmt | ast.expr | ast.ExceptHandler, line: int) -> bool:
    """Whether ``line`` is one of its lines."""
    return node.lineno <= line <= end_of(node)


def end_of(node: ast.stmt | ast.expr | ast.ExceptHandler) -> int:
    """Its last line."""
    return node.end_lineno or node.lineno


def holds(block: Sequence[ast.stmt], line: int) -> bool:
    """Whether ``line`` is in the block, decorators included."""
    return bool(block) and begin_of(block[0]) <= line <= end_of(block[-1])


def begin_of(statement: ast.stmt) -> int:
    """Its first line, or that of its first decorator."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def runs_aside(frame: Frame, read_source: ReadSource) -> str:
    """What Python calls the function of ``frame`` as, whatever line it is at then; empty where a line calls it."""
    name = short(frame.function)
    if name == "__del__":
        return "a finalizer"
    return "a signal handler" if name in _signal_handlers(read_source(frame.file) or "") else ""


def handler_of(frame: Frame, read_source: ReadSource) -> ast.ExceptHandler | None:
    """The ``except`` in whose body the line is."""
    nodes = ast.walk(tree_in(frame.file, read_source))
    handlers = (node for node in nodes if isinstance(node, ast.ExceptHandler))
    return next((handler for handler in handlers if handler.lineno < frame.line <= end_of(handler)), None)


@lru_cache(256)
def _signal_handlers(text: str) -> frozenset[str]:
    """The names of the functions that are given to ``signal.signal``."""
    calls = calls_in(tree_of(text if "signal" in text else ""))
    given = (call.args[1] for call in calls if len(call.args) == 2 and "signal" in names_in(call.func))
    return frozenset(name for one in given for name in list(names_in(one))[:1])


def name_called(func: ast.expr) -> str:
    """``f`` of ``a.f()`` and ``f()``; "" for any other expression."""
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def calls_at(frame: Frame, read_source: ReadSource) -> list[ast.Call]:
    """The calls on its line, the outermost one first."""
    return [one for one in calls_in(tree_in(frame.file, read_source)) if spans(one, frame.line)]


def names_called_at(frame: Frame, read_source: ReadSource) -> set[str]:
    """The names of the functions that the line calls itself."""
    return {name_called(call.func) for call in calls_at(frame, read_source)}


# --- loops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceLoop:
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


def ifs_with(ends: tuple[type[ast.stmt], ...], loop: AnyLoop, may: Callable[[ast.expr], bool]) -> tuple[str, ...]:
    """Each ``if`` with such a statement in the loop, and a condition that ``may``, in words."""
    ifs = [one for one in ast.walk(loop) if isinstance(one, ast.If) and any(isinstance(s, ends) for s in one.body)]
    ifs = [one for one in ifs if may(one.test)]
    return tuple(f"`if {text_of(one.test)}` at line {one.lineno}" for one in sorted(ifs, key=lambda one: one.lineno))


def loops_at(frame: Frame, read_source: ReadSource) -> list[SourceLoop]:
    """The loops around its line, the outermost first."""
    around = loops_around(scope_at(frame, read_source), frame.line)
    return [SourceLoop(one.lineno, n > 0, frame, end=end_of(one)) for n, one in enumerate(around)]


def loops_around(scope: ast.AST, line: int) -> list[AnyLoop]:
    """The loops in ``scope`` that hold ``line``, the outermost first."""
    nodes = (node for node in ast.walk(scope) if isinstance(node, LOOPS) and spans(node, line))
    return sorted(nodes, key=lambda one: one.lineno)


def attempts_of(loop: AnyLoop) -> list[ast.Try]:
    """Each ``try`` that ends the loop when it succeeds: what goes round is the same thing again after a failure."""
    tries = (one for one in loop.body if isinstance(one, ast.Try))
    return [one for one in tries if isinstance((one.orelse or one.body)[-1], (ast.Return, ast.Break))]


_MOST_TEXT = 120


def text_of(node: ast.expr | ast.stmt) -> str:
    """As the source has it, on one line."""
    text = _written(node) or ast.unparse(node).split("\n")[0]
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…"


def _written(node: ast.expr | ast.stmt) -> str:
    """Empty for what has no source, and for several lines with a comment in between."""
    lines: Sequence[str] = vars(node).get(_LINES, ())[node.lineno - 1 : end_of(node)]
    if not lines or node.end_col_offset is None:
        return ""
    # Columns count bytes.
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
    """Yields each name and attribute in ``node``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif isinstance(one, ast.Name):
            yield one.id
