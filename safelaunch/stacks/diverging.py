"""Finds the conditions by which one rank reached a line and another didn't."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from types import NoneType

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import short, spot
from safelaunch.stacks.guards import Guard, Retry, conditions_to, loops_at
from safelaunch.stacks.same_on_ranks import is_by_round, is_same_on_ranks, round_counters
from safelaunch.stacks.source import ReadSource, except_words

_CACHES = frozenset({"cache", "lru_cache", "cached", "cached_property", "memoize"})
_UP_TO_THE_FIRST = frozenset({"any", "all"})


@dataclass(frozen=True)
class DivergingStacks:
    """Two stacks of user frames, outermost frame first."""

    shared: Sequence[Frame]  # frames in which both are at the same lines
    stacks: tuple[Sequence[Frame], Sequence[Frame]]  # the frames below these
    ways: tuple[list[Guard], ...] = ()  # for each stack, the conditions that only its lines have, outermost first

    @property
    def in_function(self) -> bool:
        """True if they diverge in a function that both are in."""
        first, other = self.stacks
        return bool(first and other) and spot(first[0])[:2] == spot(other[0])[:2]


def diverge(first: Sequence[Frame], other: Sequence[Frame]) -> DivergingStacks:
    """Returns where two stacks, innermost frame first, diverge."""
    pairs = zip(reversed(first), reversed(other), strict=False)
    depth = len(list(takewhile(lambda pair: spot(pair[0]) == spot(pair[1]), pairs)))
    return DivergingStacks(first[::-1][:depth], (first[::-1][depth:], other[::-1][depth:]))


def diverging_stacks(first: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource) -> DivergingStacks | None:
    """Returns where two stacks diverge; None if there is no such place or a source file is missing.

    They diverge in a function that both are in, or in two functions that one line calls by name: ``update(fill())``.
    Stacks are innermost first.
    """
    where = diverge(first, other)
    stacks = where.stacks
    there = where.in_function or _on_one_line(where, read_source)
    if not there or any(not read_source(frame.file) for stack in stacks for frame in stack):
        return None
    ways = [list(_guards_on(stack, where.shared, read_source)) for stack in stacks]
    own = (
        [guard for guard in way if guard not in other_way and _leads_to(guard, other_stack[0], read_source)]
        for way, other_way, other_stack in zip(ways, reversed(ways), reversed(stacks), strict=True)
    )
    return replace(where, ways=tuple(own))


def _on_one_line(where: DivergingStacks, read_source: ReadSource) -> bool:
    calls = src.context(where.shared[-1], read_source).calls if where.shared and all(where.stacks) else []
    return bool(calls) and src.names_called(calls) >= {short(stack[0].function) for stack in where.stacks}


def _leads_to(guard: Guard, target: Frame, read_source: ReadSource) -> bool:
    # A rank that took ``continue`` doesn't reach ``target`` if the loop then makes the same call for its next item, and
    # ``target`` is outside the loop.
    if not isinstance(src.exit_of(guard.otherwise), ast.Continue):
        return True
    loops = loops_at(Frame(guard.file, guard.line, ""), read_source)
    return not loops or loops[-1].has(target)


def _guards_on(stack: Sequence[Frame], callers: Sequence[Frame], read_source: ReadSource) -> Iterator[Guard]:
    """Yields the conditions on a stack below its ``callers``, both outermost first.

    A counter of rounds that is passed as an argument counts as one in the called function, too.
    """
    counters, whole = frozenset[str](), [*callers, *stack]
    for depth, (frame, into) in enumerate(zip_longest(whole, whole[1:])):
        here = src.context(frame, read_source)
        counters |= frozenset(round_counters(here.scope))
        if depth >= len(callers):
            yield from _guards(frame, into, counters, read_source)
        counters = frozenset(_passed(here, src.context(into, read_source), counters) if into is not None else ())


def _passed(here: src.Context, into: src.Context, names: frozenset[str]) -> Iterator[str]:
    """Yields the called function's parameters that receive one of ``names``, or the same value on all ranks."""
    function = into.scope
    if isinstance(function, ast.Module):
        return
    of = function.args
    parameters = [parameter.arg for parameter in of.args]
    keyword_defaults = ((parameter.arg, value) for parameter, value in zip(of.kwonlyargs, of.kw_defaults, strict=True))
    defaults = [*zip(parameters[::-1], of.defaults[::-1], strict=False), *keyword_defaults]
    for call in here.calls:
        if src.name_called(call.func) == function.name:
            own = parameters[parameters[:1] in (["self"], ["cls"]) :]
            keywords = ((keyword.arg, keyword.value) for keyword in call.keywords)
            arguments = dict([*defaults, *zip(own, call.args, strict=False), *keywords])
            for name, value in arguments.items():
                if name and value and (ast.unparse(value) in names or is_same_on_ranks(value, here.names)):
                    yield name


def _guards(frame: Frame, into: Frame | None, counters: frozenset[str], read_source: ReadSource) -> Iterator[Guard]:
    here = src.context(frame, read_source)
    for decorator in getattr(here.scope, "decorator_list", []):
        if _CACHES.intersection(src.names_in(decorator)):
            yield Guard(frame.file, decorator.lineno, f"@{src.text_of(decorator)}")
    for guard in conditions_to(frame, read_source):
        if guard.test is not None:
            yield replace(guard, by_round=is_by_round(guard.test, guard.names, counters))
    for handler in here.handlers[:1]:
        yield Guard(frame.file, handler.lineno, except_words(handler))
    for attempt in (attempt for loop in here.loops for attempt in src.attempts_of(loop)):
        for handler in attempt.handlers if src.holds(attempt.body, frame.line) else ():
            if isinstance(src.exit_of(handler.body), (ast.Continue, NoneType)):
                yield Retry(frame.file, handler.lineno, f"{except_words(handler)}, then another attempt")
    item = short(into.function) if into is not None else ""
    for call in here.calls if item else ():
        if src.name_called(call.func) in _UP_TO_THE_FIRST and item in {*_generated_by(call.args)}:
            yield Guard(frame.file, call.lineno, src.text_of(call))


def _generated_by(arguments: Sequence[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, ast.GeneratorExp):
            yield from ("<genexpr>", *(src.name_called(call.func) for call in src.calls_in(argument.elt)))
        elif isinstance(argument, ast.Call):
            yield src.name_called(argument.func)
