"""Makes tensors smaller, or larger if gloo wouldn't hang with small ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from math import prod

from safelaunch.addons.reproduce.program import ElementCounts, Program, ScriptCall

MOST_ELEMENTS = 1 << 24  # of a tensor that keeps its recorded size


def is_large(program: Program) -> bool:
    return any(number > MOST_ELEMENTS for number in _numbers(program))


def with_small_tensors(program: Program) -> Program:
    """Makes each tensor as small as possible. Different numbers of elements remain different."""
    step = program.world_size if any(call.op in _DIVIDED for call in _every(program)) else 1
    small = {number: (place + 1) * step for place, number in enumerate(sorted(_numbers(program)))}

    def sizes(old: ElementCounts) -> ElementCounts:
        return tuple((small[prod(size)],) if size else size for size in old)

    def smaller(call: ScriptCall) -> ScriptCall:
        return replace(call, sizes=sizes(call.sizes), parts=tuple(map(smaller, call.parts)))

    return _with_calls(program, smaller)


_DIVIDED = frozenset({"reduce_scatter_tensor", "all_to_all"})
_LARGER = "Tensors whose sizes differ have {} times as many elements: gloo might not notice it in small ones."
ABORTS = (
    "The sizes of an all_reduce differ: gloo aborts then, and other backends hang. The records of aborted ranks are"
    " lost, so a verdict on this script might name more or fewer of the ranks."
)


def with_sizes_that_gloo_checks(program: Program) -> Program:
    """Enlarges tensors so that gloo notices if their sizes differ in an ``all_reduce``.

    gloo aborts a rank that receives a segment longer than its own. If the segments are equally long, but some ranks
    have fewer, the ranks return from the call instead. Each rank has two segments.
    """
    for group in {call.group for call in _every(program)}:
        last = [rank.calls[-1] for rank in program.ranks.values() if rank.calls and rank.end.kind == "waits"]
        sizes = {prod(call.sizes[0]) for call in last if _is_sum(call, group)}
        if len(sizes) < 2:
            continue
        segments = 2 * len(program.members(group))
        times = 1 if len({-(-size // segments) for size in sizes}) == len(sizes) else segments
        program = _with_larger(program, group, sizes, times)
        program = replace(program, notes=(*program.notes, ABORTS, *([_LARGER.format(times)] if times > 1 else [])))
    return program


def _is_sum(call: ScriptCall, group: str) -> bool:
    return (call.op, call.group, len(call.sizes)) == ("all_reduce", group, 1)


def _with_larger(program: Program, group: str, sizes: Collection[int], times: int) -> Program:
    def larger(call: ScriptCall) -> ScriptCall:
        same = _is_sum(call, group) and prod(call.sizes[0]) in sizes
        return replace(call, sizes=((prod(call.sizes[0]) * times,),)) if same and times > 1 else call

    return _with_calls(program, larger)


def _numbers(program: Program) -> set[int]:
    parts = (part for call in _every(program) for part in (call, *call.parts))
    return {prod(size) for part in parts for size in part.sizes}


def _every(program: Program) -> Iterator[ScriptCall]:
    for rank in program.ranks.values():
        yield from rank.calls


def _with_calls(program: Program, change: Callable[[ScriptCall], ScriptCall]) -> Program:
    ranks = {
        r: replace(rank_program, calls=tuple(map(change, rank_program.calls)))
        for r, rank_program in program.ranks.items()
    }
    return replace(program, ranks=ranks)
