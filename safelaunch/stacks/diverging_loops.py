"""Finds the loop that two diverging ranks are in, or that one of them has left."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.diverging import diverge
from safelaunch.stacks.guards import SourceLoop, loops_at, way_to
from safelaunch.stacks.same_on_ranks import is_by_round, round_counters
from safelaunch.stacks.source import ReadSource


def common_loop(
    first: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource
) -> tuple[SourceLoop, Sequence[Frame]] | None:
    """Returns a loop in which both stacks are at the same line, and the stack below that line.

    On that line, both must call what the loop yields (``for part in parts: part(m)``), or call the same function with
    it. Stacks are innermost first.
    """
    where = diverge(first, other)
    alike = not any(where.stacks)
    for depth, frame in reversed([*enumerate(where.shared)][0 if alike else -1 :]):
        calls = src.context(frame, read_source).calls
        used = {name for call in calls for name in src.names_in(call if alike else call.func)}
        loops = [loop for loop in loops_at(frame, read_source) if loop.line < frame.line and used & loop.targets]
        if loops:
            return loops[-1], first[: len(first) - depth]
    return None


def loop_left(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> SourceLoop | None:
    """Returns the loop that ``behind`` is in and ``ahead`` has left, in the same function, or None.

    Stacks are innermost first. In the function in which they diverge, one is inside the loop and the other after its
    end. (With a collective under ``if rank == 0`` in the loop, both are inside.)
    """
    where = diverge(ahead, behind)
    if not where.in_function:
        return None
    past, inside = where.stacks[0][0], where.stacks[1][0]
    loops = loops_at(inside, read_source)
    left = [loop for loop in loops if src.end_of(loop.node) < past.line and not src.attempts_of(loop.node)]
    if not left or src.context(inside, read_source).scope is not src.context(past, read_source).scope:
        return None
    return _left(left[0], where.shared, (ast.Break,), read_source)


def _left(
    loop: SourceLoop, callers: Iterable[Frame], ends: tuple[type[ast.stmt], ...], read_source: ReadSource
) -> SourceLoop:
    """Returns the loop with its early exits under conditions that can differ between ranks."""
    here = src.context(loop.inside, read_source)
    counters = {*round_counters(here.scope)}
    ifs = sorted((part for part in ast.walk(loop.node) if isinstance(part, ast.If)), key=lambda part: part.lineno)
    leaving = (part for part in ifs if any(isinstance(each, ends) for each in part.body))
    can_differ = (part for part in leaving if not is_by_round(part.test, here.names, counters))
    breaks = tuple(f"`{src.head_of(part)}` at line {part.lineno}" for part in can_differ)
    enclosed = loop.enclosed or any(loops_at(caller, read_source) for caller in callers)
    return replace(loop, enclosed=enclosed, breaks=breaks)


def loop_returned_from(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> SourceLoop | None:
    """Returns the loop that ``behind`` is in, in a function from which ``ahead`` has returned.

    ``ahead`` must be after the call of that function, and every condition on that call must hold there, too.
    """
    where = diverge(ahead, behind)
    if not where.in_function:
        return None
    (past, *_), (caller, *below) = where.stacks
    to_call, to_past = ({*way_to(frame, read_source)} for frame in (caller, past))
    first = next((loop for frame in below for loop in loops_at(frame, read_source)), None)
    if past.line <= caller.line or not to_call <= to_past or first is None:
        return None
    return _left(first, (*where.shared, caller), (ast.Break, ast.Return), read_source)
