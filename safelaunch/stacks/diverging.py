"""Finds the conditions by which one rank reached a line and another didn't."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.frames import short, spot
from safelaunch.stacks.guards import Guard, names_at, way_to
from safelaunch.stacks.same_on_ranks import is_same_on_ranks, round_counters, varying_names
from safelaunch.stacks.source import ReadSource, except_words

_CACHES = frozenset({"cache", "lru_cache", "cached", "cached_property", "memoize"})
_UP_TO_THE_FIRST = frozenset({"any", "all"})
_ENDS = (ast.Return, ast.Break, ast.Raise)


@dataclass(frozen=True)
class DivergingStacks:
    """Two stacks of user frames, from the function in which they diverge."""

    stacks: tuple[Sequence[Frame], ...]  # outermost frame first
    ways: tuple[list[Guard], ...]  # for each stack, the conditions that only its lines have, outermost first


def diverging_stacks(first: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource) -> DivergingStacks | None:
    """Returns where two stacks diverge; None if there is no such place or a source file is missing.

    They diverge in a function that both are in, or in two functions that one line calls by name: ``update(fill())``.
    Stacks are innermost first.
    """
    stacks = below_divergence(first, other) or _below_shared_line(first, other, read_source)
    if not stacks or any(not read_source(frame.file) for stack in stacks for frame in stack):
        return None
    callers = first[len(stacks[0]) :][::-1]
    ways = [list(_conditions_on(stack, callers, read_source)) for stack in stacks]
    own = (
        [guard for guard in way if guard not in other_way and _leads_to(guard, other_stack[0], read_source)]
        for way, other_way, other_stack in zip(ways, reversed(ways), reversed(stacks), strict=True)
    )
    return DivergingStacks(stacks, tuple(own))


def _leads_to(guard: Guard, target: Frame, read_source: ReadSource) -> bool:
    # A rank that took ``continue`` doesn't reach ``target`` if the loop then makes the same call for its next item, and
    # ``target`` is outside the loop.
    if not guard.text.endswith(": continue"):
        return True
    loops = src.loops_at(Frame(guard.file, guard.line, ""), read_source)
    return not loops or loops[-1].has(target)


def shared_depth(first: Sequence[Frame], other: Sequence[Frame]) -> int:
    pairs = zip(reversed(first), reversed(other), strict=False)
    return len(list(takewhile(lambda pair: spot(pair[0]) == spot(pair[1]), pairs)))


def below_divergence(first: Sequence[Frame], other: Sequence[Frame]) -> tuple[Sequence[Frame], ...]:
    """Returns both stacks, outermost first, from the function in which they diverge; empty if there is none."""
    stacks = _below(first, other)
    return stacks if stacks and spot(stacks[0][0])[:2] == spot(stacks[1][0])[:2] else ()


def _below_shared_line(
    first: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource
) -> tuple[Sequence[Frame], ...]:
    stacks, at = _below(first, other), shared_depth(first, other)
    called = src.names_called_at(first[-at], read_source) if stacks and at else set()
    return stacks if called and called >= {short(stack[0].function) for stack in stacks} else ()


def _below(first: Sequence[Frame], other: Sequence[Frame]) -> tuple[Sequence[Frame], ...]:
    at = shared_depth(first, other)
    return (first[::-1][at:], other[::-1][at:]) if at < min(len(first), len(other)) else ()


def _conditions_on(stack: Sequence[Frame], callers: Sequence[Frame], read_source: ReadSource) -> Iterator[Guard]:
    """Yields the conditions on a stack below its ``callers``, both outermost first.

    A counter of rounds that is passed as an argument counts as one in the called function, too.
    """
    counters, whole = frozenset[str](), [*callers, *stack]
    for depth, (frame, into) in enumerate(zip_longest(whole, whole[1:])):
        scope = src.scope_at(frame, read_source)
        counters |= frozenset(round_counters(scope))
        if depth >= len(callers):
            yield from _conditions(frame, into, scope, counters, read_source)
        counters = frozenset(_passed(frame, into, counters, read_source) if into is not None else ())


def _passed(frame: Frame, into: Frame, names: frozenset[str], read_source: ReadSource) -> Iterator[str]:
    """Yields the called function's parameters that receive one of ``names``, or the same value on all ranks."""
    function = src.scope_at(into, read_source)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    parameters = [arg.arg for arg in function.args.args]
    defaults = {
        **dict(zip(parameters[::-1], function.args.defaults[::-1], strict=False)),
        **{
            parameter.arg: value
            for parameter, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if value
        },
    }
    expressions = names_at(frame, read_source)
    for call in src.calls_at(frame, read_source):
        if src.name_called(call.func) == function.name:
            own = parameters[1:] if parameters[:1] in (["self"], ["cls"]) else parameters
            pairs = [*zip(own, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
            arguments = {**defaults, **{name: value for name, value in pairs if name is not None}}
            yield from (
                n
                for n, value in arguments.items()
                if ast.unparse(value) in names or is_same_on_ranks(value, expressions)
            )


def _conditions(
    frame: Frame, into: Frame | None, scope: ast.AST, counters: frozenset[str], read_source: ReadSource
) -> Iterator[Guard]:
    for decorator in getattr(scope, "decorator_list", []):
        if _CACHES.intersection(src.names_in(decorator)):
            yield Guard(frame.file, decorator.lineno, f"@{src.text_of(decorator)}", taken=False)
    for step in way_to(frame, read_source):
        if not step.loop and step.test is not None:
            by_round = not step.depends_on_rank and counters.issuperset(varying_names(step.test, step.names))
            yield replace(step, by_round=by_round)
    if (handler := src.handler_of(frame, read_source)) is not None:
        yield Guard(frame.file, handler.lineno, except_words(handler), taken=True)
    for handler in _of_further_attempts(scope, frame.line):
        words = f"{except_words(handler)}, then another attempt"
        yield Guard(frame.file, handler.lineno, words, taken=False, again=True)
    item = short(into.function) if into is not None else ""
    for call in src.calls_at(frame, read_source) if item else ():
        if src.name_called(call.func) in _UP_TO_THE_FIRST and item in {*_generated_by(call.args)}:
            yield Guard(frame.file, call.lineno, src.text_of(call), taken=True)


def _generated_by(arguments: Sequence[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, ast.GeneratorExp):
            yield from ("<genexpr>", *(src.name_called(call.func) for call in src.calls_in(argument.elt)))
        elif isinstance(argument, ast.Call):
            yield src.name_called(argument.func)


def _of_further_attempts(scope: ast.AST, line: int) -> Iterator[ast.ExceptHandler]:
    for attempt in (attempt for loop in src.loops_around(scope, line) for attempt in src.attempts_of(loop)):
        if src.holds(attempt.body, line):
            yield from (handler for handler in attempt.handlers if not isinstance(handler.body[-1], _ENDS))
