"""Reduces a program to as few ranks as still lead to the same verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from safelaunch.addons.reproduce.program import WORLD, Program, RankProgram, ScriptCall

_MOST_OF_A_KIND = 4
PredictVerdict = Callable[[Program], tuple[str, list[int]]]  # cause and culprits


def fewest_ranks(program: Program, culprits: Collection[int], predict: PredictVerdict) -> list[int]:
    """Returns the smallest set of ranks that leads to the same verdict.

    Returns all ranks if the verdict that ``predict`` returns doesn't name the ``culprits``.
    """
    every_rank, cause = sorted(program.ranks), predict(program)[0]
    kinds: dict[object, list[int]] = {}
    for rank in set(every_rank) - set(culprits):
        kinds.setdefault(_kind(program.ranks[rank]), []).append(rank)

    def is_reproduced(kept: Sequence[int]) -> bool:
        new_cause, named = predict(restricted_to(program, kept)) if len(kept) > 1 else ("", [])
        return new_cause == cause and {kept[place] for place in named} == set(culprits)

    for number in range(1, _MOST_OF_A_KIND + 1):
        kept = sorted({*culprits, *(rank for ranks in kinds.values() for rank in sorted(ranks)[:number])})
        if culprits and is_reproduced(every_rank) and is_reproduced(kept):
            for rank in sorted(set(kept) - set(culprits), reverse=True):
                fewer = [member for member in kept if member != rank]
                kept = fewer if is_reproduced(fewer) else kept
            return kept
    return every_rank


def _kind(program: RankProgram) -> object:
    alike = [replace(call, group="", root=None, other_roots=(), peer=None, parts=()) for call in program.calls[-8:]]
    return program.end, program.before, tuple(alike)


def restricted_to(program: Program, kept: Collection[int]) -> Program:
    """Returns the program of the ``kept`` ranks, renumbered; its groups contain only these ranks."""
    number = {rank: place for place, rank in enumerate(sorted(kept))}
    fewer = _Renumbering({name: program.members(name) for name in (WORLD, *program.groups)}, number)
    groups = {name: ranks for name in program.groups if len(ranks := fewer.ranks(name)) > 1}
    makers = {name: frozenset(number[r] for r in ranks if r in number) for name, ranks in program.makers.items()}
    return replace(
        program,
        ranks={number[rank]: fewer.program(program.ranks[rank]) for rank in sorted(number)},
        groups=groups,
        makers={name: ranks for name, ranks in makers.items() if name in groups},
    )


@dataclass(frozen=True)
class _Renumbering:
    members: Mapping[str, Sequence[int]]
    number: Mapping[int, int]  # new number of each remaining rank

    def ranks(self, group: str) -> tuple[int, ...]:
        return tuple(self.number[rank] for rank in self.members[group] if rank in self.number)

    def program(self, rank_program: RankProgram) -> RankProgram:
        calls = [self.call(call) for call in rank_program.calls]
        entries = tuple(left for call, left in zip(calls, rank_program.entries, strict=False) if call is not None)
        return replace(rank_program, calls=tuple(filter(None, calls)), entries=entries)

    def call(self, call: ScriptCall) -> ScriptCall | None:
        """Returns the call with new rank numbers; None if no other member of its group remains."""
        parts = tuple(filter(None, map(self.call, call.parts)))
        peer = self.place(call.group, call.peer)
        if len(self.ranks(call.group)) < 2 or (peer is None and call.peer is not None) or len(parts) < bool(call.parts):
            return None
        root = None if call.root is None else self.place(call.group, call.root) or 0
        pairs = ((rank, self.place(call.group, its)) for rank, its in call.other_roots if rank in self.number)
        other_roots = tuple((self.number[rank], its) for rank, its in pairs if its is not None)
        return replace(call, parts=parts, peer=peer, root=root, other_roots=other_roots)

    def place(self, group: str, place: int | None) -> int | None:
        """Returns the new position of a group's member; None if that rank isn't kept."""
        if place is None or place >= len(self.members[group]):
            return None
        rank = self.members[group][place]
        return self.ranks(group).index(self.number[rank]) if rank in self.number else None
