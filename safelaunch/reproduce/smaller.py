"""The same hang with fewer ranks, and with smaller tensors; where gloo would not hang, with larger ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from safelaunch.reproduce.program import WORLD, Call, Program, RankProgram, Sizes

Tells = Callable[[Program], tuple[str, list[int]]]  # cause and culprits
MOST_ELEMENTS = 1 << 24  # of a tensor that is made as it was recorded
_MOST_OF_A_KIND = 4

# --- fewer ranks ------------------------------------------------------------------------------------------------------


def fewest_ranks(program: Program, culprits: Collection[int], tells: Tells) -> list[int]:
    """As few of the ranks as let ``tells`` say the same. All, where it does not name the ``culprits``."""
    everybody, cause = sorted(program.ranks), tells(program)[0]
    kinds: dict[object, list[int]] = {}
    for rank in set(everybody) - set(culprits):
        kinds.setdefault(_kind(program.ranks[rank]), []).append(rank)

    def shown(kept: Sequence[int]) -> bool:
        found, named = tells(of_ranks(program, kept)) if len(kept) > 1 else ("", [])
        return found == cause and {kept[place] for place in named} == set(culprits)

    for number in range(1, _MOST_OF_A_KIND + 1):
        kept = sorted({*culprits, *(rank for ranks in kinds.values() for rank in sorted(ranks)[:number])})
        if culprits and shown(everybody) and shown(kept):
            for rank in sorted(set(kept) - set(culprits), reverse=True):
                fewer = [one for one in kept if one != rank]
                kept = fewer if shown(fewer) else kept
            return kept
    return everybody


def _kind(one: RankProgram) -> object:
    """Ranks of one kind make the same last calls, each in groups of its own."""
    alike = [replace(call, group="", root=None, other_roots=(), peer=None, parts=()) for call in one.calls[-8:]]
    return one.end, one.before, tuple(alike)


def of_ranks(program: Program, kept: Collection[int]) -> Program:
    """The program of some of its ranks: with new numbers, in groups without the others."""
    number = {rank: place for place, rank in enumerate(sorted(kept))}
    fewer = _Fewer({name: program.members(name) for name in (WORLD, *program.groups)}, number)
    groups = {name: ranks for name in program.groups if len(ranks := fewer.ranks(name)) > 1}
    makers = {name: frozenset(number[r] for r in one if r in number) for name, one in program.makers.items()}
    return replace(
        program,
        ranks={number[rank]: fewer.program(program.ranks[rank]) for rank in sorted(number)},
        groups=groups,
        makers={name: one for name, one in makers.items() if name in groups},
    )


@dataclass(frozen=True)
class _Fewer:
    """``members``: of each group, as they were. ``number``: of each rank that stays, its new one."""

    members: Mapping[str, Sequence[int]]
    number: Mapping[int, int]

    def ranks(self, group: str) -> tuple[int, ...]:
        return tuple(self.number[rank] for rank in self.members[group] if rank in self.number)

    def program(self, one: RankProgram) -> RankProgram:
        calls = [self.call(call) for call in one.calls]
        entries = tuple(left for call, left in zip(calls, one.entries, strict=False) if call is not None)
        return replace(one, calls=tuple(filter(None, calls)), entries=entries)

    def call(self, call: Call) -> Call | None:
        """None where nobody is left to make it with."""
        parts = tuple(filter(None, map(self.call, call.parts)))
        peer = self.place(call.group, call.peer)
        if len(self.ranks(call.group)) < 2 or (peer is None and call.peer is not None) or len(parts) < bool(call.parts):
            return None
        root = None if call.root is None else self.place(call.group, call.root) or 0
        told = ((rank, self.place(call.group, its)) for rank, its in call.other_roots if rank in self.number)
        others = tuple((self.number[rank], its) for rank, its in told if its is not None)
        return replace(call, parts=parts, peer=peer, root=root, other_roots=others)

    def place(self, group: str, place: int | None) -> int | None:
        """What a place in the group is without the ranks that are left out."""
        if place is None or place >= len(self.members[group]):
            return None
        rank = self.members[group][place]
        return self.ranks(group).index(self.number[rank]) if rank in self.number else None


# --- smaller tensors --------------------------------------------------------------------------------------------------


def is_large(program: Program) -> bool:
    return any(number > MOST_ELEMENTS for number in _numbers(program))


def with_small_tensors(program: Program) -> Program:
    """Each tensor as small as can be. Numbers of elements that differ stay different."""
    step = program.world_size if any(call.op in _DIVIDED for call in _every(program)) else 1
    small = {number: (place + 1) * step for place, number in enumerate(sorted(_numbers(program)))}

    def sizes(given: Sizes) -> Sizes:
        return tuple((small[prod(size)],) if size else size for size in given)

    def smaller(call: Call) -> Call:
        return replace(call, sizes=sizes(call.sizes), parts=tuple(map(smaller, call.parts)))

    return _with_calls(program, smaller)


_DIVIDED = frozenset({"reduce_scatter_tensor", "all_to_all"})


# --- larger tensors ---------------------------------------------------------------------------------------------------

_LARGER = "The tensors whose sizes differ have {} times as many elements: of so small ones, gloo may not notice it."
ABORTS = (
    "The sizes of an all_reduce differ: there gloo aborts, where other backends hang. The records of aborted ranks are"
    " lost, so a verdict on this script may name more of the ranks, or fewer."
)


def with_sizes_that_gloo_checks(program: Program) -> Program:
    """gloo aborts the rank of an ``all_reduce`` that gets a longer segment than its own. Where segments are of one
    length, and some ranks only have fewer of them, ranks come back from the call. There are two segments a rank.
    """
    for group in {call.group for call in _every(program)}:
        last = [one.calls[-1] for one in program.ranks.values() if one.calls and one.end.kind == "waits"]
        sizes = {prod(call.sizes[0]) for call in last if _is_sum(call, group)}
        if len(sizes) < 2:
            continue
        segments = 2 * len(program.members(group))
        times = 1 if len({-(-size // segments) for size in sizes}) == len(sizes) else segments
        program = _with_larger(program, group, sizes, times)
        program = replace(program, notes=(*program.notes, ABORTS, *([_LARGER.format(times)] if times > 1 else [])))
    return program


def _is_sum(call: Call, group: str) -> bool:
    return (call.op, call.group, len(call.sizes)) == ("all_reduce", group, 1)


def _with_larger(program: Program, group: str, sizes: Collection[int], times: int) -> Program:
    def larger(call: Call) -> Call:
        same = _is_sum(call, group) and prod(call.sizes[0]) in sizes
        return replace(call, sizes=((prod(call.sizes[0]) * times,),)) if same and times > 1 else call

    return _with_calls(program, larger)


# --- all calls --------------------------------------------------------------------------------------------------------


def _numbers(program: Program) -> set[int]:
    parts = (part for call in _every(program) for part in (call, *call.parts))
    return {prod(size) for part in parts for size in part.sizes}


def _every(program: Program) -> Iterator[Call]:
    for one in program.ranks.values():
        yield from one.calls


def _with_calls(program: Program, change: Callable[[Call], Call]) -> Program:
    ranks = {r: replace(one, calls=tuple(map(change, one.calls))) for r, one in program.ranks.items()}
    return replace(program, ranks=ranks)
