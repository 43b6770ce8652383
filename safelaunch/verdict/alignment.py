"""Flight Recorder entries of all ranks, aligned by process group and sequence number.

Sequence numbers count the collectives of one group on one rank, so ranks that run the same program have the same
operation under the same number. Everything here tolerates windows of different length (a ring buffer that wrapped), a
rank without a record, and gloo's quirks: ``state`` is not looked at, ``retired`` is (:class:`Collective.completed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from msgspec import structs

from safelaunch.model import Collective, FlightRecord, RankEvidence
from safelaunch.model.entries import Entries, Same
from safelaunch.stacks.frames import Stack, stack_of
from safelaunch.verdict.c10d import DEFAULT_GROUPS, number_of
from safelaunch.verdict.columns import Window, program_of, windows_of
from safelaunch.verdict.comparable import OPEN, comparable

_NOTHING = Entries.of(())


class Alignment:
    """The records of all ranks, indexed. Building it is linear in the number of entries."""

    def __init__(self, ranks: Iterable[RankEvidence], world_size: int) -> None:
        self.world_size = world_size
        self._ranks = {rank.rank: rank for rank in ranks}
        self.records: dict[int, FlightRecord] = comparable(
            {rank: record for rank, one in self._ranks.items() if (record := _with_groups(one)) is not None}
        )
        self._rings = {rank: Entries.of(record.entries) for rank, record in self.records.items()}
        self._windows: dict[int, dict[str, Window]] = {}
        self._pending: dict[int, list[Collective]] = {}
        self._last: dict[int, dict[str, int]] = {}
        self._standings: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self._users: dict[str, set[int]] = {}
        self._completed: set[str] = set()
        self._most_entries = max(map(len, self._rings.values()), default=0)
        self._default: set[str] = {"0", ""}
        self._members: dict[str, tuple[frozenset[int], bool]] = {}
        self._closed: dict[str, bool] = {}
        for rank, record in self.records.items():
            self._index(rank, record, self._rings[rank])

    def _index(self, rank: int, record: FlightRecord, ring: Entries) -> None:
        kinds = ring.used()
        windows = self._windows[rank] = windows_of(ring, kinds, self._ranks[rank].code_roots)
        self._pending[rank] = _pending(ring)
        self._default.update(k.group for k in kinds.values() if not k.is_p2p and k.description in DEFAULT_GROUPS[2:])
        self._completed.update(kind.group for kind in kinds.values() if not kind.is_p2p and kind.completed)
        queued = {number for number, kind in kinds.items() if kind.started is False}
        last: dict[str, int] = {}
        for group, window in windows.items():
            entered = zip(reversed(window.numbers), reversed(window.positions), strict=True)
            begun = (number for number, position in entered if ring.kind_of[position] not in queued)
            newest = next(begun, -1)  # what the device has not begun, only the CPU has entered
            if newest >= 0:
                last[group] = newest
        waiting = {kinds[number].group for number in queued}
        transfers = {kind.group for kind in kinds.values() if kind.is_p2p} if self.is_whole(rank) else set()
        for group, status in record.status.items():
            # The ring holds the newest, so what it has of a group says it all; NCCL's status counts sends along.
            if group not in last and group not in transfers:
                last[group] = status.last_started if group in waiting else status.last_enqueued
        self._last[rank] = last
        for group in last:
            self._users.setdefault(group, set()).add(rank)

    def ring(self, rank: int) -> Entries:
        """All that the rank's record holds, in order; nothing without a record."""
        return self._rings.get(rank) or _NOTHING

    def entry(self, rank: int, group: str, seq: int) -> Collective | None:
        window = self.window(rank, group)
        return window.at(seq) if window else None

    def window(self, rank: int, group: str) -> Window | None:
        """The collectives of ``rank`` in ``group`` that its record still holds; None for none."""
        return self._windows.get(rank, {}).get(group)

    def stack(self, rank: int, entry: Collective) -> Stack:
        """The stack that ``rank`` recorded with one of its entries."""
        return stack_of(self._ranks[rank], entry.frames)

    def programs(self) -> dict[int, Window]:
        """All calls of each rank, whatever their groups: counted from the first, or by the number of the record."""
        whole = all(map(self.is_whole, self.records))  # blocks leave gaps in the numbers of a recorder
        return {
            rank: program_of(ring, self._ranks[rank].code_roots, counted=whole) for rank, ring in self._rings.items()
        }

    @cached_property
    def has_collectives(self) -> bool:
        """Some rank has recorded a collective. Older torch lets nobody outside see gloo's."""
        return any(self._windows.values())

    @cached_property
    def has_threads(self) -> bool:
        """Some rank has recorded calls of several threads."""
        threads = (ring.threads for ring in self._rings.values())
        return any(not isinstance(mine, Same) and len(set(mine)) > 1 for mine in threads)

    def groups(self) -> list[str]:
        return sorted({group for windows in self._windows.values() for group in windows})

    def first(self, rank: int, group: str) -> int:
        """The lowest sequence number of ``group`` that the window of ``rank`` holds; 0 for none."""
        window = self.window(rank, group)
        return window.numbers[0] if window else 0

    def last(self, rank: int, group: str) -> int:
        """The highest sequence number that ``rank`` has entered in ``group``; -1 for none."""
        return self._last.get(rank, {}).get(group, -1)

    def joined(self, rank: int) -> bool:
        """The rank has been a member of some group: it is past ``init_process_group``."""
        record = self.records.get(rank)
        return record is not None and bool(record.entries or record.groups or record.status)

    def pending(self, rank: int) -> list[Collective]:
        """What the rank has entered and not completed: of each thread the oldest in each group, as a backend works in
        order.
        """
        return self._pending.get(rank, [])

    def unended(self, rank: int) -> Collective | None:
        """The newest entry of a batch or block that ``rank`` has begun and not launched."""
        return next(reversed(self.ring(rank).matching(lambda kind: kind.state == OPEN)), None)

    def transfers(self, rank: int, group: str) -> list[Collective]:
        """The sends and receives of ``rank`` in ``group``, in order."""
        return self.ring(rank).matching(lambda kind: kind.is_p2p and kind.group == group)

    def is_behind(self, rank: int, entry: Collective) -> bool:
        """The device of ``rank`` is still in an earlier call of the group: it takes in order what the CPU queued."""
        if entry.by_gloo:
            return False
        return any(one.group == entry.group and one.seq < entry.seq and not one.is_p2p for one in self.pending(rank))

    def is_over_elsewhere(self, rank: int, entry: Collective) -> bool:
        """All other members have completed the collective that ``rank`` has not; its peers hold it up no more."""
        members, known = self.members(entry.group)
        if entry.is_p2p or not known or members <= {rank}:
            return False
        return set(self._standing(entry.group, entry.seq)[0]) <= {rank}

    def is_begun_elsewhere(self, rank: int, entry: Collective) -> bool:
        """The device of another member has begun the collective."""
        return not entry.is_p2p and not set(self._standing(entry.group, entry.seq)[1]) <= {rank}

    def _standing(self, group: str, seq: int) -> tuple[list[int], list[int]]:
        """The first two members that have not completed it, as far as is known, and the first two that have begun it.

        Two, because each member asks for the others.
        """
        if (group, seq) not in self._standings:
            open_still: list[int] = []
            begun: list[int] = []
            for rank in sorted(self.members(group)[0]):
                entry = self.entry(rank, group, seq)
                if len(open_still) < 2 and not (
                    self._is_left_out(rank, group, seq) if entry is None else entry.completed
                ):
                    open_still.append(rank)
                if len(begun) < 2 and entry is not None and entry.started:
                    begun.append(rank)
                if len(open_still) == len(begun) == 2:
                    break
            self._standings[group, seq] = (open_still, begun)
        return self._standings[group, seq]

    @cached_property
    def _with_transfers(self) -> frozenset[str]:
        return frozenset(kind.group for ring in self._rings.values() for kind in ring.used().values() if kind.is_p2p)

    def _is_left_out(self, rank: int, group: str, seq: int) -> bool:
        """``rank`` has completed the collective, and its record holds only what is pending, as NCCL's may.

        A backend works in order, so what comes before its oldest pending one is over. A ring that is full may have lost
        pending ones as well; who else has more entries shows that it is not. The status of a group tells it, too, but
        counts sends along.
        """
        record = self.records.get(rank)
        if record is None or self.is_whole(rank):
            return False
        if group in record.status and group not in self._with_transfers:
            return record.status[group].last_completed >= seq
        if not 0 <= seq < self.first(rank, group):
            return False
        ring = self.ring(rank)
        return len(ring) < self._most_entries and not any(kind.completed for kind in ring.used().values())

    def is_whole(self, rank: int) -> bool:
        """The record of ``rank`` goes back to its first entry: its ring buffer has not wrapped."""
        record = self.records.get(rank)
        return record is not None and (not record.entries or record.entries[0].record_id == 0)

    def front(self) -> dict[str, int]:
        """Group → the highest number that some rank waits in or has completed. What CPUs have queued behind that has
        not been tried yet.
        """
        found: dict[str, int] = {}
        for rank, last in self._last.items():
            oldest = {entry.group: entry.seq for entry in self.pending(rank) if not entry.is_p2p}
            for group, number in last.items():
                found[group] = max(found.get(group, -1), min(oldest.get(group, number), number))
        return found

    def ranks_of(self, group: str) -> tuple[int, ...]:
        """The members in the order of their ranks in the group; sorted where no dump tells the order."""
        for record in self.records.values():
            if record.groups.get(group):
                return record.groups[group]
        return tuple(sorted(self.members(group)[0]))

    def members(self, group: str) -> tuple[frozenset[int], bool]:
        """``(ranks of the group, is that known)``.

        Dumps say it in ``pg_config``; gloo's does so under the name ``""`` and for the default group only. Otherwise
        the ranks that have used the group are its members once a collective of it has completed, because that takes
        all of them. Before that, any rank of the world may be one.
        """
        if group not in self._members:
            self._members[group] = self._find_members(group)
        return self._members[group]

    def is_closed(self, group: str) -> bool:
        """Whether only ranks of this job are in it: each member lists it alike, or does not list its groups and has
        used it. A process from outside may be in a group with numbers of its own, which are not those of the job.
        """
        if group not in self._closed:
            self._closed[group] = self._is_closed(group)
        return self._closed[group]

    def _is_closed(self, group: str) -> bool:
        members, known = self.members(group)
        if not known or members - frozenset(range(self.world_size)):
            return False
        alike: tuple[int, ...] | None = None
        for member in members:
            listed = self.listed(member)
            if group in listed or (listed.keys() - {""} and group != DEFAULT_GROUPS[0]):
                ranks = listed.get(group, ())
                if ranks != alike and frozenset(ranks) != members:
                    return False
                alike = ranks
            elif group != DEFAULT_GROUPS[0] and self.last(member, group) < 0:
                return False
        return True

    def is_in_closed_groups(self, rank: int) -> bool:
        """Whether the rank lists its groups, and only ranks of this job are in them."""
        names = [name for name in self.listed(rank) if name]
        return bool(names) and all(map(self.is_closed, names))

    def listed(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """The members of each group that the rank's record lists; without a record, of those that it tells itself."""
        if rank in self.records:
            return self.records[rank].groups
        return self._ranks[rank].gil.groups if rank in self._ranks else {}

    def _find_members(self, group: str) -> tuple[frozenset[int], bool]:
        world = frozenset(range(self.world_size))
        for record in self.records.values():
            if record.groups.get(group):
                return frozenset(record.groups[group]), True
        if group in self._default:
            return world, True
        users = frozenset(self._users.get(group, ()))
        if group in self._completed and len(users) > 1 and len(self.records) == self.world_size:
            return users, True
        return world, False


def _with_groups(rank: RankEvidence) -> FlightRecord | None:
    """gloo's recorder does not know who is in a group; the rank does."""
    record, told = rank.flight_record, rank.gil.groups
    if record is None or not told:
        return record
    known = {name: ranks for name, ranks in record.groups.items() if ranks}
    return structs.replace(record, groups={**told, **known})


def _pending(ring: Entries) -> list[Collective]:
    oldest: dict[tuple[str, bool, int], Collective] = {}
    for entry in ring.matching(lambda kind: not kind.completed and kind.state != OPEN):
        if not entry.op and number_of(entry) <= 0:
            continue  # neither what nor which: nobody can be said to wait in it, or to be missing from it
        key = (entry.group, entry.is_p2p, entry.thread)
        if key not in oldest or _order(entry) < _order(oldest[key]):
            oldest[key] = entry
    return sorted(oldest.values(), key=lambda e: e.record_id)


def _order(entry: Collective) -> tuple[int, int]:
    return (number_of(entry), entry.record_id)


def out_of_sight(alignment: Alignment, groups: Iterable[str]) -> dict[str, int]:
    """Group → the first number that the windows of all its members still hold, where that is not the first of all.

    What happened before it, the recorders no longer tell.
    """
    found, late = {}, [rank for rank in alignment.records if not alignment.is_whole(rank)]
    for group in groups:
        members, _ = alignment.members(group)
        first = max((alignment.first(rank, group) for rank in late if rank in members), default=0)
        if first > 1:
            found[group] = first
    return found
