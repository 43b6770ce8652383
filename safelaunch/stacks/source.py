"""Finds the function, calls and loops around a source line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from safelaunch.model import Frame
from safelaunch.stacks.frames import short

ReadSource = Callable[[str], "str | None"]  # path → text of the file, or None
NO_SOURCE: ReadSource = lambda path: None  # noqa: E731


LOOPS = (ast.For, ast.While, ast.AsyncFor)
AnyLoop = ast.For | ast.While | ast.AsyncFor
ENDS = (ast.Return, ast.Break)  # of a loop
EXITS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
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


@lru_cache(256)
def _signal_handlers(text: str) -> frozenset[str]:
    calls = calls_in(tree_of(text if "signal" in text else ""))
    handlers = (call.args[1] for call in calls if len(call.args) == 2 and "signal" in names_in(call.func))
    return frozenset(name for handler in handlers for name in list(names_in(handler))[:1])


def names_called(nodes: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset(name_called(call.func) for node in nodes for call in calls_in(node))


def name_called(func: ast.expr) -> str:
    """Returns ``f`` for ``a.f()`` and ``f()``; "" for any other expression."""
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


# --- what encloses a line ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enclosing:
    """A statement that contains a line."""

    statement: ast.stmt
    before: Sequence[ast.stmt]  # statements before it in its block
    block: Sequence[ast.stmt] = ()  # its block that contains the line; empty if none does
    handler: ast.ExceptHandler | None = None  # handler to which ``block`` belongs

    @property
    def in_body(self) -> bool:
        return bool(self.block) and self.block is getattr(self.statement, "body", None)

    @property
    def text(self) -> str:
        """Returns ``if rank == 0``, ``else of if rank == 0`` or ``except OSError``."""
        if self.handler is not None:
            return except_words(self.handler)
        head = head_of(self.statement) if isinstance(self.statement, (ast.If, *LOOPS)) else ""
        return head if self.in_body else f"else of {head}"


def blocks_in(
    block: Sequence[ast.stmt], around: tuple[Enclosing, ...] = ()
) -> Iterator[tuple[Sequence[ast.stmt], tuple[Enclosing, ...]]]:
    """Yields a block and the blocks inside it, inner ones first, with the statements around each, outermost first."""
    for number, statement in enumerate(block):
        if isinstance(statement, FUNCTIONS):
            continue
        for owner in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            handler = owner if isinstance(owner, ast.ExceptHandler) else None
            for inner in (getattr(owner, name, None) for name in ("body", "orelse", "finalbody")):
                if inner:
                    yield from blocks_in(inner, (*around, Enclosing(statement, block[:number], inner, handler)))
    yield block, around


class Context:
    """The function around a line."""

    def __init__(self, text: str, line: int) -> None:
        self.tree = tree_of(text)
        functions = (node for node in ast.walk(self.tree) if isinstance(node, FUNCTIONS) and spans(node, line))
        self.scope = [self.tree, *functions][-1]  # breadth first: inner functions come later
        self._line = line

    @cached_property
    def around(self) -> tuple[Enclosing, ...]:
        """The statements that contain the line, outermost first."""
        blocks = (found for found in blocks_in(self.scope.body) if holds(found[0], self._line))
        block, around = next(blocks, ((), ()))
        last = (Enclosing(each, block[:n]) for n, each in enumerate(block) if holds([each], self._line))
        return (*around, *list(last)[:1])

    @property
    def loops(self) -> list[AnyLoop]:
        return [each.statement for each in self.around if isinstance(each.statement, LOOPS)]

    @property
    def handlers(self) -> list[ast.ExceptHandler]:
        return [each.handler for each in self.around if each.handler is not None]

    @cached_property
    def calls(self) -> list[ast.Call]:
        """The calls on the line, outermost first."""
        return [call for call in calls_in(self.scope) if spans(call, self._line)]

    @cached_property
    def names(self) -> Mapping[str, ast.expr]:
        """Values of the names that the module or function assigns once."""
        return assigned(self.tree) | assigned(self.scope)


_context = lru_cache(256)(Context)


def context(frame: Frame, read_source: ReadSource) -> Context:
    return _context(read_source(frame.file) or "", frame.line)


def exit_of(block: Sequence[ast.stmt]) -> ast.stmt | None:
    """Returns the statement by which the code leaves at the end of a block, if any; looks into a final ``with``."""
    last = block[-1] if block else None
    return exit_of(last.body) if isinstance(last, ast.With) else last if isinstance(last, EXITS) else None


def attempts_of(loop: AnyLoop) -> list[ast.Try]:
    """Returns each ``try`` that ends the loop when it succeeds: after a failure, the loop retries it."""
    tries = (statement for statement in loop.body if isinstance(statement, ast.Try))
    return [attempt for attempt in tries if isinstance(exit_of(attempt.orelse or attempt.body), ENDS)]


# --- names ------------------------------------------------------------------------------------------------------------


@lru_cache(256)
def assigned(scope: ast.AST) -> dict[str, ast.expr]:
    # A name that is assigned twice has no definite expression.
    values: dict[str, ast.expr | None] = {}
    for node in _statements(scope):
        for name, value in bindings(node):
            values[name] = None if name in values else value
    return {name: value for name, value in values.items() if value is not None}


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    # Skips the bodies of functions and classes.
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _statements(child)


def bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
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
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        for number, element in enumerate(target.elts):
            yield from _targets(element, values[number] if len(values) == len(target.elts) else None)


# --- text -------------------------------------------------------------------------------------------------------------


MOST_TEXT = 120
_LINE_BREAK = re.compile(r"\s*\\?\n\s*")
_BREAK_AT_BRACKET = re.compile(r"(?<=[(\[{])\s*\\?\n\s*|\s*\\?\n\s*(?=[)\]}])")


def text_of(node: ast.expr | ast.stmt) -> str:
    """Returns the node's source on one line, shortened."""
    text = _written(node) or ast.unparse(node).split("\n")[0]
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


def _written(node: ast.expr | ast.stmt) -> str:
    """Returns the node's source on one line; empty without a source, or with a comment between its lines."""
    lines: Sequence[str] = vars(node).get(_LINES, ())[node.lineno - 1 : end_of(node)]
    if not lines or node.end_col_offset is None:
        return ""
    whole = "".join(lines).encode()  # column offsets count bytes
    text = whole[node.col_offset : len(whole) - len(lines[-1].encode()) + node.end_col_offset].decode()
    return "" if len(lines) > 1 and "#" in text else _LINE_BREAK.sub(" ", _BREAK_AT_BRACKET.sub("", text))


def names_in(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name):
            yield part.id


def except_words(handler: ast.ExceptHandler) -> str:
    return f"except {text_of(handler.type)}" if handler.type is not None else "except"


def head_of(statement: ast.If | AnyLoop) -> str:
    if isinstance(statement, (ast.If, ast.While)):
        return f"{type(statement).__name__.lower()} {text_of(statement.test)}"
    return f"for {text_of(statement.target)} in {text_of(statement.iter)}"
