"""Gives a common name to process groups with the same role, such as the tensor-parallel groups of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from safelaunch.addons.reproduce.program import WORLD, Program, RankProgram, ScriptCall

Families = dict[str, list[tuple[int, ...]]]


def with_group_families(program: Program) -> tuple[Program, Families]:
    """Returns the program with family names instead of group names, and the groups of each family."""
    # Rank → group → its position among this rank's groups, by first call.
    firsts = {
        rank: dict.fromkeys(call.group for call in rank_program.calls) for rank, rank_program in program.ranks.items()
    }
    turn = {rank: {name: place for place, name in enumerate(names)} for rank, names in firsts.items()}
    parts: dict[object, list[str]] = {}
    for name, ranks in program.groups.items():
        part = (len(ranks), tuple({turn[rank].get(name, -1) for rank in ranks}))
        parts.setdefault(name if name in program.makers else part, []).append(name)
    families: Families = {}
    name_of: dict[str, str] = {WORLD: WORLD}
    for names in parts.values():
        alike: list[str] = []
        for group in names:
            members = program.groups[group]
            apart = (family_name for family_name in alike if set(members).isdisjoint(chain(*families[family_name])))
            family = next(apart, f"group_{len(families) + 1}")
            if family not in families:
                alike.append(family)
            families.setdefault(family, []).append(members)
            name_of[group] = family
    programs = {rank: _renamed(rank_program, name_of) for rank, rank_program in program.ranks.items()}
    makers = {name_of[name]: ranks for name, ranks in program.makers.items()}
    return replace(program, ranks=programs, makers=makers), {name: sorted(groups) for name, groups in families.items()}


def _renamed(program: RankProgram, name_of: Mapping[str, str]) -> RankProgram:
    return replace(program, calls=tuple(_call(call, name_of) for call in program.calls))


def _call(call: ScriptCall, name_of: Mapping[str, str]) -> ScriptCall:
    parts = tuple(_call(part, name_of) for part in call.parts)
    return replace(call, group=name_of[call.group], parts=parts)
