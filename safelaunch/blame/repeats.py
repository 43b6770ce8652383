"""Does a repeat point at the hardware? Pure.

A script's fault comes back at its line, or on its rank; as ranks have fixed GPUs, the same rank on the same GPU proves
nothing by itself. A faulty GPU or host comes back at other lines, or under another rank. So incidents that the script
explains count once: those at one line, and, where the line is only where a rank met its trouble, those of one rank at
one line. A line that was blamed on two GPUs is no GPU's; and where one rank was blamed each time, at other lines, and
was blamed on another GPU as well, the trouble goes with the rank.

What is left may still be chance: of the ``n`` incidents of a run, each hits one of ``G`` GPUs. The probability that
some GPU gets ``k`` of them is at most ``G * P(Binomial(n, 1/G) >= k)``. And it may be rank 0, which logs and saves:
``OF_RANK_0`` of all scripts are taken to have their faults only there, at whatever lines. A repeat is a firm suspicion
if chance and script do the same in at most ``FIRM`` of all cases. Otherwise it is said, in weaker words, only if every
incident hit that GPU.

``scripts/suspicions.py`` shows over random histories how often innocent hardware is suspected, and how soon a broken
GPU is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

from safelaunch.model import BlamedRank, Incident, Unit, format_ranks

FIRM = 0.1
OF_RANK_0 = 0.25
OF_ONE_EVENT_S = 180.0  # in which the nodes of a job write down whom they blame for it
_Place = tuple[object, ...]


@dataclass(frozen=True)
class Repeat:
    """A unit that was blamed at ``times`` places that the script does not explain.

    ``name``: the GPU's UUID, or the host's; ``host``: where the unit is; ``of``: how many such units the jobs had, at
    least; ``chance``: the probability of such a repeat where the hardware has nothing to do with it, at most.
    ``of_rank_0``: rank 0, or its node, was blamed each time.
    """

    unit: Unit
    name: str
    host: str
    of: int
    chance: float
    incidents: tuple[Incident, ...]
    of_rank_0: bool

    @property
    def is_firm(self) -> bool:
        """Whether script and chance are unlikely to have done it; else it may be the hardware, or one of them."""
        return self.chance <= FIRM

    @property
    def times(self) -> int:
        return len(self.incidents)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that were blamed there; empty for a node as a whole."""
        return tuple(sorted({rank.rank for one in self.incidents for rank in one.ranks}))


def repeats(incidents: Iterable[Incident], *, together: bool = False) -> tuple[Repeat, ...]:
    """The units that are to be suspected, GPUs first: of each run name by its own incidents, or by all ``together``.

    The host of a suspected GPU is not suspected for the same incidents.
    """
    found: list[Repeat] = []
    by_name: dict[str, list[Incident]] = {}
    for one in sorted(incidents, key=lambda incident: incident.unix_s):
        by_name.setdefault("" if together else one.run_name, []).append(one)
    for all_of_name in by_name.values():
        several = _events(all_of_name)
        gpus = _of_unit("gpu", several)
        explained = {one.id for repeat in gpus for one in repeat.incidents}
        hosts = _of_unit("host", several)
        found += [*gpus, *(one for one in hosts if not {incident.id for incident in one.incidents} <= explained)]
    return tuple(sorted(found, key=lambda one: one.unit == "host"))


def _events(incidents: Iterable[Incident]) -> list[Incident]:
    """One incident of each event: on several nodes each writes down its own. ``incidents``: the oldest first."""
    found: list[tuple[Incident, set[str]]] = []  # with those who wrote it down
    for one in incidents:
        at = next(
            (at for at, (other, by) in enumerate(found) if _is_same(other, one) and one.written_on not in by), None
        )
        if at is None:
            found.append((one, {one.written_on}))
        else:
            other, by = found[at]
            found[at] = (one if len(one.units) >= len(other.units) else other, {*by, one.written_on})
    return [one for one, _ in found]


def _is_same(earlier: Incident, later: Incident) -> bool:
    return later.unix_s - earlier.unix_s < OF_ONE_EVENT_S and _named(earlier) == _named(later)


def _named(one: Incident) -> tuple[object, ...]:
    return one.cause, _whom(one), blamed("host", one)


def suspected_gpus(incidents: Iterable[Incident], *, together: bool = False) -> frozenset[str]:
    """The UUIDs of those that are to be suspected."""
    return frozenset(one.name for one in repeats(incidents, together=together) if one.unit == "gpu")


def _of_unit(unit: Unit, incidents: Sequence[Incident]) -> list[Repeat]:
    counted = [one for one in incidents if _counts(unit, one)]
    at: dict[_Place, dict[str, Incident]] = {}  # place → unit → the newest incident there
    for one in counted:
        at.setdefault(_place(unit, one), {})[blamed(unit, one)] = one
    by_name: dict[str, list[Incident]] = {}
    for units in at.values():
        if len(units) == 1:
            ((name, one),) = units.items()
            by_name.setdefault(name, []).append(one)
    found = [_repeat(unit, name, several, len(at)) for name, several in by_name.items() if len(several) > 1]
    return [one for one in found if _is_said(one, len(at)) and not _goes_with_the_rank(unit, one.incidents, counted)]


def _repeat(unit: Unit, name: str, several: Sequence[Incident], of_incidents: int) -> Repeat:
    of = min(_alternatives(unit, one) for one in several)
    chance, of_rank_0 = chance_of(len(several), of_incidents, of), all(map(_is_of_rank_0, several))
    if of_rank_0:
        chance = OF_RANK_0 + (1 - OF_RANK_0) * chance
    newest_last = tuple(sorted(several, key=lambda one: one.unix_s))
    return Repeat(unit, name, _host_of(unit, name, newest_last), of, chance, newest_last, of_rank_0)


def _is_said(one: Repeat, of_incidents: int) -> bool:
    return one.is_firm or one.times == of_incidents


def _is_of_rank_0(one: Incident) -> bool:
    return re.match(r"0(?!\d)", _whom(one)) is not None


def _whom(one: Incident) -> str:
    """The ranks that an incident blames, or those of the node that it blames as a whole; empty if not known."""
    return format_ranks([rank.rank for rank in one.ranks]) or one.host_ranks


def _goes_with_the_rank(unit: Unit, there: Sequence[Incident], counted: Sequence[Incident]) -> bool:
    ranks, name = {_whom(one) for one in there}, blamed(unit, there[0])
    if len(ranks) > 1 or "" in ranks:
        return False
    return any(_whom(one) in ranks and blamed(unit, one) != name for one in counted)


def chance_of(times: int, of_incidents: int, of_units: int) -> float:
    """The largest probability that some one of ``of_units`` is hit ``times`` times, where each is as likely."""
    each = 1 / max(of_units, 1)
    tail = sum(
        comb(of_incidents, hits) * each**hits * (1 - each) ** (of_incidents - hits)
        for hits in range(times, of_incidents + 1)
    )
    return min(1.0, of_units * tail)


def _counts(unit: Unit, one: Incident) -> bool:
    """With one host or one GPU, a repeat proves nothing; nor does a verdict that is hardly better than a guess."""
    known = bool(blamed(unit, one)) and _alternatives(unit, one) > 1
    return known and unit in one.units and one.confidence != "low" and one.outcome != "dump"


def blamed(unit: Unit, one: Incident) -> str:
    """The only GPU or host that an incident blames; empty where there are several, or none is known."""
    names = {rank.gpu if unit == "gpu" else rank.host for rank in one.ranks}
    names |= set(one.hosts) if unit == "host" else set()
    return names.pop() if len(names) == 1 else ""


def _alternatives(unit: Unit, one: Incident) -> int:
    return one.of_gpus if unit == "gpu" else one.of_hosts


def _place(unit: Unit, one: Incident) -> _Place:
    """What a script's own fault would have in common with its repeat; without a line, only rank 0's node has that."""
    lines = tuple(sorted({(rank.file, rank.line) for rank in one.ranks if rank.file}))
    if not lines:
        return ("rank 0",) if _is_of_rank_0(one) else (one.id,)
    if unit == "gpu" and not one.line_tells:
        return lines, tuple(sorted(rank.rank for rank in one.ranks))
    return (lines,)


def _host_of(unit: Unit, name: str, several: Sequence[Incident]) -> str:
    if unit == "host":
        return name
    return next((rank.host for one in reversed(several) for rank in one.ranks if rank.gpu == name), "")


def place_words(one: Incident, name: str, unit: Literal["gpu", "host"]) -> str:
    """``rank 3 at train.py:41``; ``node-lost`` where no rank is blamed there."""
    there = [rank for rank in one.ranks if name in (rank.gpu if unit == "gpu" else rank.host)]
    return _rank_words(there[0]) if there else one.cause


def _rank_words(rank: BlamedRank) -> str:
    at = f" at {rank.file.rpartition('/')[2]}:{rank.line}" if rank.file else ""
    return f"rank {rank.rank}{at}"
