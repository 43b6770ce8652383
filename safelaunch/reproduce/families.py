"""Groups that play the same part on different ranks, as the tensor-parallel groups of a job do, under one name.

A script then says ``group=group_1`` on all ranks, and each rank's ``group_1`` is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from safelaunch.reproduce.program import OUTSIDE, WORLD, Call, Program, RankProgram

Families = dict[str, list[tuple[int, ...]]]


def in_families(program: Program) -> tuple[Program, Families]:
    """The program with the names of families for those of groups, and each family's groups."""
    turn = {rank: _in_turn(one) for rank, one in program.ranks.items()}
    parts: dict[object, list[str]] = {}
    for name, ranks in program.groups.items():
        part = (len(ranks), tuple({turn[rank].get(name, -1) for rank in ranks}))
        parts.setdefault(name if name in program.makers else part, []).append(name)
    families: Families = {}
    name_of: dict[str, str] = {WORLD: WORLD, OUTSIDE: OUTSIDE}
    for names in parts.values():
        for group in names:
            members = program.groups[group]
            family = next(
                (f for f in dict.fromkeys(name_of[n] for n in names if n in name_of) if _fits(families[f], members)),
                None,
            )
            family = family or f"group_{len(families) + 1}"
            families.setdefault(family, []).append(members)
            name_of[group] = family
    programs = {rank: _renamed(one, name_of) for rank, one in program.ranks.items()}
    makers = {name_of[name]: ranks for name, ranks in program.makers.items()}
    return replace(program, ranks=programs, makers=makers), {name: sorted(groups) for name, groups in families.items()}


def _in_turn(program: RankProgram) -> dict[str, int]:
    """Group → its place among the groups of this rank, in the order in which it first calls in them."""
    return {name: place for place, name in enumerate(dict.fromkeys(call.group for call in program.calls))}


def _fits(family: list[tuple[int, ...]], members: tuple[int, ...]) -> bool:
    return not any(set(other) & set(members) for other in family)


def _renamed(program: RankProgram, name_of: Mapping[str, str]) -> RankProgram:
    return replace(program, calls=tuple(_call(call, name_of) for call in program.calls))


def _call(call: Call, name_of: Mapping[str, str]) -> Call:
    parts = tuple(_call(part, name_of) for part in call.parts)
    return replace(call, group=name_of[call.group], parts=parts)
