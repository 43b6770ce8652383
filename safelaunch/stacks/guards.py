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
from functools import cached_property, lru_cache
from typing import ClassVar

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import basename
from safelaunch.stacks.rank_names import MAX_STEPS, WORLD_SIZE, depends_on_rank, identifiers
from safelaunch.stacks.rank_values import UnknownValueError, Whereabouts, value_on_rank
from safelaunch.stacks.source import ReadSource

_DECORATORS = re.compile(r"rank_?zero|main_process|on_(?:main|last)|rank_?0|master_only", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """A part of the way to a line."""

    file: str
    line: int
    text: str
    loop: ClassVar[bool] = False

    @property
    def words(self) -> str:
        return f"{self.text} ({basename(self.file)}:{self.line})"


@dataclass(frozen=True)
class Guard(Step):
    """A condition before a line: the line is reached only if ``text``, at ``line``, is ``taken``.

    The decorator of a cache and the ``except`` of an exception count as conditions, too.
    """

    taken: bool = True
    test: ast.expr | None = field(default=None, compare=False, repr=False)
    names: Mapping[str, ast.expr] = field(default_factory=dict, compare=False, repr=False)
    otherwise: Sequence[ast.stmt] = field(default=(), compare=False, repr=False)  # statements that other ranks run
    by_round: bool = False  # it depends only on the number of the round, so it is equal on all ranks

    @cached_property
    def depends_on_rank(self) -> bool:
        """True if it depends on the process: ranks can diverge here."""
        return self.test is None or depends_on_rank(self.test, self.names)

    def admits(self, whereabouts: Whereabouts) -> bool | None:
        """Returns whether this rank passes it; None if the condition depends on more than the rank."""
        if self.test is None:
            return None
        try:
            return bool(value_on_rank(self.test, whereabouts, self.names, MAX_STEPS)) is self.taken
        except UnknownValueError:
            return None


class Retry(Guard):
    """An ``except`` after which a loop makes another attempt."""


@dataclass(frozen=True)
class SourceLoop(Step):
    node: src.AnyLoop = field(compare=False, repr=False)
    inside: Frame = field(compare=False)  # frame in the loop
    # It is in another loop of its function or a caller, so a rank past it can be a round behind or ahead.
    enclosed: bool
    names: Mapping[str, ast.expr] = field(default_factory=dict, compare=False, repr=False)
    # Conditions, in words, of each ``break``, or ``return`` to where another rank is, that ends it early.
    breaks: tuple[str, ...] = field(default=(), compare=False)
    loop: ClassVar[bool] = True

    @property
    def depends_on_rank(self) -> bool:
        return not isinstance(self.node, ast.While) and depends_on_rank(self.node.iter, self.names)

    @property
    def targets(self) -> set[str]:
        """Names that a ``for`` loop assigns."""
        return set() if isinstance(self.node, ast.While) else {*src.names_in(self.node.target)}

    @property
    def place(self) -> str:
        return f"{basename(self.file)}:{self.line}"

    def has(self, place: Frame | Step) -> bool:
        return place.file == self.file and src.spans(self.node, place.line)


def loops_at(frame: Frame, read_source: ReadSource) -> list[SourceLoop]:
    """Returns the loops of the function around the line of ``frame``, outermost first."""
    here = src.context(frame, read_source)
    loops = enumerate(here.loops)
    return [SourceLoop(frame.file, loop.lineno, src.head_of(loop), loop, frame, n > 0, here.names) for n, loop in loops]


def guards_of(stack: Sequence[Frame], read_source: ReadSource) -> tuple[Guard, ...]:
    """Returns the guards of all lines of ``stack`` (user frames, innermost first), the innermost guard first.

    An ``if`` with branches that both call the stack's next function is no guard. Frames outside a signal handler didn't
    call it, so their guards don't count.
    """
    blocking = []
    for frame, into in zip(stack, (None, *stack), strict=False):
        for guard in reversed(conditions_to(frame, read_source)):
            if guard.depends_on_rank:
                called = _called_at(frame, read_source) if into is None else into.function.rpartition(".")[2]
                alike = bool(called) and called in src.names_called(guard.otherwise)
                blocking.append(replace(guard, test=None) if alike else guard)
        if src.runs_aside(frame, read_source):
            break
    return tuple(blocking)


def _called_at(frame: Frame, read_source: ReadSource) -> str:
    statements = [each.statement for each in src.context(frame, read_source).around[-1:]]
    values = [statement.value for statement in statements if isinstance(statement, _PLAIN)]
    return next((src.name_called(value.func) for value in values if isinstance(value, ast.Call)), "")


def way_to(frame: Frame, read_source: ReadSource) -> tuple[Guard | SourceLoop, ...]:
    """Returns all conditions and ``for`` loops around the line of ``frame``, in line order."""
    loops = loops_at(frame, read_source)
    loops = [loop for loop in loops if loop.targets and src.holds(loop.node.body, frame.line)]
    return tuple(sorted([*conditions_to(frame, read_source), *loops], key=lambda step: step.line))


def conditions_to(frame: Frame, read_source: ReadSource) -> tuple[Guard, ...]:
    return _conditions(src.context(frame, read_source), frame.file)


@lru_cache(256)
def _conditions(here: src.Context, file: str) -> tuple[Guard, ...]:
    decorators = [
        Guard(file, decorator.lineno, f"@{src.text_of(decorator)}")
        for decorator in getattr(here.scope, "decorator_list", [])
        if any(_DECORATORS.search(name) for name in identifiers(decorator))
    ]
    met = (condition for each in here.around for condition in _met(each))
    guards = [Guard(file, at.lineno, text, taken, test, here.names, other) for at, text, taken, test, other in met]
    return (*decorators, *guards)


# the place, its text, whether it was taken, its test, statements that run otherwise
_Met = tuple[ast.stmt | ast.expr, str, bool, ast.expr, Sequence[ast.stmt]]
_PLAIN = (ast.Expr, ast.Assign, ast.Return)


def _met(each: src.Enclosing) -> Iterator[_Met]:
    """Yields the conditions met before a line in the block of a statement around it, and in that statement."""
    for before in each.before:
        if isinstance(before, ast.If):  # ``if rank != 0: return``, which only the other ranks pass
            head = src.head_of(before)
            if (left := src.exit_of(before.orelse)) is not None:
                yield before, f"{head}: … else: {src.text_of(left)}", True, before.test, before.orelse
            elif (left := src.exit_of(before.body)) is not None:
                yield before, f"{head}: {src.text_of(left)}", False, before.test, before.body
    statement = each.statement
    if isinstance(statement, (ast.If, ast.While)) and each.block:
        other = statement.orelse if each.in_body else statement.body
        yield statement, each.text, each.in_body, statement.test, other
    elif isinstance(statement, (ast.If, *_PLAIN)):
        yield from _within(statement.test if isinstance(statement, ast.If) else statement.value)


def _within(value: ast.expr | None) -> Iterator[_Met]:
    # ``rank == 0 and dist.barrier()``, and ``dist.barrier() if rank == 0 else None``
    if isinstance(value, ast.BoolOp) and isinstance(value.values[-1], ast.Call):
        test, taken = value.values[0], isinstance(value.op, ast.And)
        yield value, f"{src.text_of(test)} {'and' if taken else 'or'} …", taken, test, ()
    elif isinstance(value, ast.IfExp) and isinstance(value.body, ast.Call) != isinstance(value.orelse, ast.Call):
        yield value, f"… if {src.text_of(value.test)}", isinstance(value.body, ast.Call), value.test, ()


def assignments_of_the_rank(module: ast.Module) -> list[ast.stmt]:
    """Returns the module's assignments that depend on rank or world size: ``r = dist.get_rank()``."""
    names = src.assigned(module)
    return [
        statement
        for statement in module.body
        if any(value is not None and _names_rank(value, names) for _, value in src.bindings(statement))
    ]


def _names_rank(value: ast.expr, names: Mapping[str, ast.expr]) -> bool:
    return depends_on_rank(value, names) or any(map(WORLD_SIZE.match, identifiers(value)))
