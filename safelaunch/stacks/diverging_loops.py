"""Finds the loop that two diverging ranks are in, or that one of them has left."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from safelaunch.model import Frame
from safelaunch.stacks import source as src
from safelaunch.stacks.diverging import below_divergence, shared_depth
from safelaunch.stacks.guards import Guard, names_at, way_to
from safelaunch.stacks.rank_names import depends_on_rank
from safelaunch.stacks.same_on_ranks import round_counters, varying_names
from safelaunch.stacks.source import ReadSource


def common_loop(
    first: Sequence[Frame], other: Sequence[Frame], read_source: ReadSource
) -> tuple[Guard, Sequence[Frame]] | None:
    """Returns the head of a loop in which both stacks are at the same line, and the stack below that line.

    On that line, both must call what the loop yields (``for part in parts: part(m)``), or call the same function with
    it. Stacks are innermost first.
    """
    same = first[::-1][: shared_depth(first, other)]
    alike = len(same) == len(first) == len(other)
    for depth, frame in reversed([*enumerate(same)] if alike else [*enumerate(same)][-1:]):
        here = src.calls_at(frame, read_source)
        used = {name for call in here for name in src.names_in(call if alike else call.func)}
        loops = [loop for loop, targets in _loops_with_names(frame, read_source) if used & targets]
        if loops:
            return loops[-1], first[: len(first) - depth]
    return None


def _loops_with_names(frame: Frame, read_source: ReadSource) -> Iterator[tuple[Guard, set[str]]]:
    for loop in src.loops_around(src.scope_at(frame, read_source), frame.line):
        if not isinstance(loop, ast.While) and loop.lineno < frame.line:
            text = f"for {src.text_of(loop.target)} in {src.text_of(loop.iter)}"
            yield Guard(frame.file, loop.lineno, text, taken=True), set(src.names_in(loop.target))


def loop_left(ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource) -> src.SourceLoop | None:
    """Returns the loop that ``behind`` is in and ``ahead`` has left, in the same function, or None.

    Stacks are innermost first. In the function in which they diverge, one is inside the loop and the other after its
    end. (With a collective under ``if rank == 0`` in the loop, both are inside.)
    """
    stacks = below_divergence(ahead, behind)
    if not stacks:
        return None
    past, inside = stacks[0][0], stacks[1][0]
    scope, callers = src.scope_at(inside, read_source), ahead[len(stacks[0]) :]
    around = src.loops_around(scope, inside.line)
    left = [loop for loop in around if src.end_of(loop) < past.line and not src.attempts_of(loop)]
    if not left or scope is not src.scope_at(past, read_source):
        return None
    again = left[0] is not around[0] or any(src.loops_at(caller, read_source) for caller in callers)
    return _left(left[0], inside, again, (ast.Break,), read_source)


def _left(
    loop: src.AnyLoop, inside: Frame, enclosed: bool, ends: tuple[type[ast.stmt], ...], read_source: ReadSource
) -> src.SourceLoop:
    """Returns the loop with its early exits under conditions that can differ between ranks."""
    names = names_at(inside, read_source)
    counters = {*round_counters(src.scope_at(inside, read_source))}
    ifs = src.ifs_with(
        ends, loop, lambda test: depends_on_rank(test, names) or not counters.issuperset(varying_names(test, names))
    )
    return src.SourceLoop(loop.lineno, enclosed, inside, ifs, src.end_of(loop))


def loop_returned_from(
    ahead: Sequence[Frame], behind: Sequence[Frame], read_source: ReadSource
) -> src.SourceLoop | None:
    """Returns the loop that ``behind`` is in, in a function from which ``ahead`` has returned.

    ``ahead`` must be after the call of that function, and every condition on that call must hold there, too.
    """
    inner = below_divergence(ahead, behind)
    if not inner:
        return None
    (past, *_), (caller, *below) = inner
    to_call, to_past = ({*way_to(frame, read_source)} for frame in (caller, past))
    loops = (
        (loop, frame) for frame in below for loop in src.loops_around(src.scope_at(frame, read_source), frame.line)
    )
    first = next(loops, None)
    if past.line <= caller.line or not to_call <= to_past or first is None:
        return None
    again = any(src.loops_at(frame, read_source) for frame in behind[len(below) :])
    return _left(*first, again, (ast.Break, ast.Return), read_source)
