"""Finds the conditions on the rank that decide whether a line is reached: an ``if``, its ``else``, an early return.

They are read from the source of the user's frames. A guard is a hint, never a verdict by itself: ``if rank == 0:
save(); barrier()`` with a ``barrier()`` in the ``else`` is correct. A condition on the rank alone is evaluated for each
rank, which shows the ranks that reach the line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename
from safelaunch.stacks.rank_names import MAX_STEPS, WORLD_SIZE, depends_on_rank, identifiers
from safelaunch.stacks.rank_values import UnknownValueError, Whereabouts, value_on_rank
from safelaunch.stacks.source import ReadSource

_DECORATORS = re.compile(r"rank_?zero|main_process|on_(?:main|last)|rank_?0|master_only", re.IGNORECASE)


@dataclass(frozen=True)
class Guard:
    """A condition or loop head before a line: the line is reached only if ``text``, at ``line``, is ``taken``.

    The decorator of a cache and the ``except`` of an exception count as conditions, too.
    """

    file: str
    line: int
    text: str
    taken: bool
    test: ast.expr | None = field(default=None, compare=False, repr=False)
    names: Mapping[str, ast.expr] = field(default_factory=dict, compare=False, repr=False)
    other_branch_calls: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    depends_on_rank: bool = field(default=False, compare=False)  # ranks can diverge here
    loop: bool = field(default=False, compare=False)  # head of a ``for`` loop
    by_round: bool = False  # it depends only on the number of the round, so it is equal on all ranks
    again: bool = False  # it retries what failed

    @property
    def words(self) -> str:
        return f"{self.text} ({basename(self.file)}:{self.line})"

    def admits(self, whereabouts: Whereabouts) -> bool | None:
        """Returns whether this rank passes it; None if the condition depends on more than the rank."""
        if self.test is None:
            return None
        try:
            return bool(value_on_rank(self.test, whereabouts, self.names, MAX_STEPS)) is self.taken
        except UnknownValueError:
            return None


def guards_of(stack: Sequence[Frame], read_source: ReadSource) -> tuple[Guard, ...]:
    """Returns the guards of all lines of ``stack`` (user frames, innermost first), the innermost guard first.

    An ``if`` with branches that both call the stack's next function is no guard. Frames outside a signal handler didn't
    call it, so their guards don't count.
    """
    blocking = []
    for frame, into in zip(stack, (None, *stack), strict=False):
        guards = [guard for guard in reversed(way_to(frame, read_source)) if guard.depends_on_rank and not guard.loop]
        if any(guard.other_branch_calls for guard in guards):
            called = _called_at(frame, read_source) if into is None else into.function.rpartition(".")[2]
            guards = [
                replace(guard, test=None) if called and called in guard.other_branch_calls else guard
                for guard in guards
            ]
        blocking += guards
        if src.runs_aside(frame, read_source):
            break
    return tuple(blocking)


def way_to(frame: Frame, read_source: ReadSource) -> tuple[Guard, ...]:
    return _way(read_source(frame.file) or "", frame.file, frame.line)


def names_at(frame: src.Located, read_source: ReadSource) -> dict[str, ast.expr]:
    tree = src.tree_in(frame.file, read_source)
    return _assigned(tree) | _assigned(src.scope_of(tree, frame.line))


@lru_cache(256)
def _way(text: str, file: str, line: int) -> tuple[Guard, ...]:
    tree = src.tree_of(text)
    scope = src.scope_of(tree, line)
    names = _assigned(tree) | _assigned(scope)
    conditions = []
    for at, shown, taken, test in _on_the_way(scope, line):
        asks = test is None or depends_on_rank(test, names)
        conditions.append(Guard(file, at, shown, taken, test, names, _beside(scope, test, taken), asks))
    return tuple(sorted([*conditions, *_loops(scope, file, line, names)], key=lambda guard: guard.line))


def _beside(scope: ast.AST, test: ast.expr | None, taken: bool) -> frozenset[str]:
    ifs = (node for node in ast.walk(scope) if isinstance(node, ast.If) and node.test is test)
    other = next((node.orelse if taken else node.body for node in ifs), [])
    return frozenset(src.name_called(call.func) for statement in other for call in src.calls_in(statement))


_PLAIN = (ast.Expr, ast.Assign, ast.Return)


def _called_at(frame: Frame, read_source: ReadSource) -> str:
    nodes = (node for node in ast.walk(src.tree_in(frame.file, read_source)) if isinstance(node, _PLAIN))
    values = (node.value for node in nodes if src.spans(node, frame.line))
    return next((src.name_called(value.func) for value in values if isinstance(value, ast.Call)), "")


def _loops(scope: ast.AST, file: str, line: int, names: Mapping[str, ast.expr]) -> Iterator[Guard]:
    for loop in src.loops_around(scope, line):
        if not isinstance(loop, ast.While) and src.holds(loop.body, line):
            shown = f"for {src.text_of(loop.target)} in {src.text_of(loop.iter)}"
            asks = depends_on_rank(loop.iter, names)
            yield Guard(file, loop.lineno, shown, taken=True, depends_on_rank=asks, loop=True)


_Met = tuple[int, str, bool, "ast.expr | None"]  # line, text, whether it was taken, test of a condition


def _on_the_way(scope: ast.AST, line: int) -> Iterator[_Met]:
    for decorator in getattr(scope, "decorator_list", []):
        if any(_DECORATORS.search(name) for name in identifiers(decorator)):
            yield decorator.lineno, f"@{src.text_of(decorator)}", True, None
    block: Sequence[ast.stmt] | None = getattr(scope, "body", None)
    while block is not None:
        at = next((n for n, statement in enumerate(block) if src.holds([statement], line)), None)
        if at is None:
            return
        for before in block[:at]:
            yield from _left_before(before)
        yield from _within_statement(block[at], line)
        block = _inner_block(block[at], line)


def _left_before(statement: ast.stmt) -> Iterator[_Met]:
    """Yields the condition of ``if rank != 0: return``, which only the other ranks pass."""
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
    # ``rank == 0 and dist.barrier()``, and ``dist.barrier() if rank == 0 else None``
    if isinstance(value, ast.BoolOp) and isinstance(value.values[-1], ast.Call):
        test, taken = value.values[0], isinstance(value.op, ast.And)
        yield value.lineno, f"{src.text_of(test)} {'and' if taken else 'or'} …", taken, test
    elif isinstance(value, ast.IfExp) and isinstance(value.body, ast.Call) != isinstance(value.orelse, ast.Call):
        yield value.lineno, f"… if {src.text_of(value.test)}", isinstance(value.body, ast.Call), value.test


def _inner_block(statement: ast.stmt, line: int) -> Sequence[ast.stmt] | None:
    """Returns the block of ``statement`` that holds ``line``; None without one, or if it is in another function."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return None
    blocks = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    blocks += [case.body for case in getattr(statement, "cases", [])]
    return next((block for block in blocks if isinstance(block, list) and src.holds(block, line)), None)


def _assigned(scope: ast.AST) -> dict[str, ast.expr]:
    # A name that is assigned twice has no definite expression.
    assigned: dict[str, ast.expr | None] = {}
    for node in _statements(scope):
        for name, value in _pairs(node):
            assigned[name] = None if name in assigned else value
    return {name: value for name, value in assigned.items() if value is not None}


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    # Skips the bodies of functions and classes.
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
        for number, element in enumerate(target.elts):
            yield from _targets(element, values[number] if values is not None else None)


def assignments_of_the_rank(module: ast.Module) -> list[ast.stmt]:
    """Returns the module's assignments that depend on rank or world size: ``r = dist.get_rank()``."""
    names = _assigned(module)
    values = {statement: [value for _, value in _pairs(statement) if value is not None] for statement in module.body}
    return [
        statement
        for statement, assigned in values.items()
        if any(depends_on_rank(value, names) or any(map(WORLD_SIZE.match, identifiers(value))) for value in assigned)
    ]
