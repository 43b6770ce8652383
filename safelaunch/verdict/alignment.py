"""Flight Recorder entries of all ranks, aligned by process group and sequence number.

Ranks that run the same program have the same operation under the same number of a group. Windows of different length
(wrapped ring buffers) and ranks without a record are expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from msgspec import structs

from safelaunch.model import Collective, FlightRecord, RankEvidence
from safelaunch.model.entries import Entries, Same
from safelaunch.stacks.frames import Stack, stack_of
from safelaunch.verdict.c10d import DEFAULT_GROUPS, NO_DESCRIPTION, number_of
from safelaunch.verdict.columns import Window, windows_of
from safelaunch.verdict.comparable import NOT_LAUNCHED, comparable

_NOTHING = Entries.of(())


class Alignment:
    def __init__(self, ranks: Iterable[RankEvidence], world_size: int) -> None:
        self.world_size = world_size
        self._ranks = {rank.rank: rank for rank in ranks}
        self.records: dict[int, FlightRecord] = comparable(
            {rank: record for rank, evidence in self._ranks.items() if (record := _with_groups(evidence)) is not None}
        )
        self._rings = {rank: Entries.of(record.entries) for rank, record in self.records.items()}
        self._windows: dict[int, dict[str, Window]] = {}
        self._pending: dict[int, list[Collective]] = {}
        self._open_calls: dict[int, list[Collective]] = {}
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
            newest = next(begun, -1)  # calls that the device hasn't begun don't count as entered
            if newest >= 0:
                last[group] = newest
        waiting = {kinds[number].group for number in queued}
        transfers = {kind.group for kind in kinds.values() if kind.is_p2p} if self.is_whole(rank) else set()
        for group, status in record.status.items():
            # The ring holds the newest calls, so it is enough if it has the group. NCCL's status counts sends as well.
            if group not in last and group not in transfers:
                last[group] = status.last_started if group in waiting else status.last_enqueued
        self._last[rank] = last
        for group in last:
            self._users.setdefault(group, set()).add(rank)

    def ring(self, rank: int) -> Entries:
        return self._rings.get(rank) or _NOTHING

    def entry(self, rank: int, group: str, seq: int) -> Collective | None:
        window = self.window(rank, group)
        return window.at(seq) if window else None

    def window(self, rank: int, group: str) -> Window | None:
        return self._windows.get(rank, {}).get(group)

    def stack(self, rank: int, entry: Collective) -> Stack:
        return stack_of(self._ranks[rank], entry.frames)

    def program(self, rank: int, *, counted: bool = True) -> Window:
        """Returns all calls of one rank, in all groups, by their index or by the record's number."""
        ring = self.ring(rank)
        numbers = range(len(ring)) if counted else ring.record_ids
        return Window(ring, self._ranks[rank].code_roots, numbers, range(len(ring)))

    def programs(self) -> dict[int, Window]:
        """Returns all calls of each rank, in all groups."""
        whole = all(map(self.is_whole, self.records))  # merged blocks leave gaps in the numbers
        return {rank: self.program(rank, counted=whole) for rank in self._rings}

    @cached_property
    def has_collectives(self) -> bool:
        """Some rank recorded a collective. Older torch doesn't expose gloo's."""
        return any(self._windows.values())

    @cached_property
    def has_threads(self) -> bool:
        threads = (ring.threads for ring in self._rings.values())
        return any(
            not isinstance(threads_of_rank, Same) and len(set(threads_of_rank)) > 1 for threads_of_rank in threads
        )

    def groups(self) -> list[str]:
        return sorted({group for windows in self._windows.values() for group in windows})

    def first(self, rank: int, group: str) -> int:
        """Returns the lowest sequence number in the window; 0 if there is none."""
        window = self.window(rank, group)
        return window.numbers[0] if window else 0

    def last(self, rank: int, group: str) -> int:
        """Returns the highest sequence number that ``rank`` has entered; -1 if there is none."""
        return self._last.get(rank, {}).get(group, -1)

    def has_joined(self, rank: int) -> bool:
        """Returns whether the rank is past ``init_process_group``."""
        record = self.records.get(rank)
        return record is not None and bool(record.entries or record.groups or record.status)

    def pending(self, rank: int) -> list[Collective]:
        """Returns the oldest call of each thread and group that the rank didn't complete."""
        return self._pending.get(rank, [])

    def open_calls(self, rank: int) -> list[Collective]:
        """Returns all named calls that the rank didn't complete."""
        if rank not in self._open_calls:
            self._open_calls[rank] = self.ring(rank).matching(lambda kind: not kind.completed and bool(kind.op))
        return self._open_calls[rank]

    def unfinished_block(self, rank: int) -> Collective | None:
        """Returns the newest entry of a batch or block that the rank didn't launch."""
        return next(reversed(self.ring(rank).matching(lambda kind: kind.state == NOT_LAUNCHED)), None)

    def transfers(self, rank: int, group: str) -> list[Collective]:
        return self.ring(rank).matching(lambda kind: kind.is_p2p and kind.group == group)

    def is_behind(self, rank: int, entry: Collective) -> bool:
        """Returns whether the device is still in an earlier call of the group."""
        if entry.by_gloo:
            return False
        return any(
            pending_entry.group == entry.group and pending_entry.seq < entry.seq and not pending_entry.is_p2p
            for pending_entry in self.pending(rank)
        )

    def is_over_elsewhere(self, rank: int, entry: Collective) -> bool:
        """Returns whether all other members have completed the collective."""
        members, are_known = self.members(entry.group)
        if entry.is_p2p or not are_known or members <= {rank}:
            return False
        return set(self._standing(entry.group, entry.seq)[0]) <= {rank}

    def is_begun_elsewhere(self, rank: int, entry: Collective) -> bool:
        return not entry.is_p2p and not set(self._standing(entry.group, entry.seq)[1]) <= {rank}

    def _standing(self, group: str, seq: int) -> tuple[list[int], list[int]]:
        """Returns the first two members that haven't completed the call, and the first two that have begun it.

        Two are enough, because each member asks about the others.
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
        """Returns whether ``rank`` completed the collective, but its record holds only pending ones, as NCCL's can.

        Everything before its oldest pending call is completed. A full ring might have lost pending calls; another rank
        with more entries shows that this one isn't full. The group's status counts sends as well.
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
        """Returns whether the ring buffer hasn't wrapped."""
        record = self.records.get(rank)
        return record is not None and (not record.entries or record.entries[0].record_id == 0)

    def front(self) -> dict[str, int]:
        """Returns for each group the highest number that a rank waits in or has completed."""
        fronts: dict[str, int] = {}
        for rank, last in self._last.items():
            oldest = {entry.group: entry.seq for entry in self.pending(rank) if not entry.is_p2p}
            for group, number in last.items():
                fronts[group] = max(fronts.get(group, -1), min(oldest.get(group, number), number))
        return fronts

    def ranks_of(self, group: str) -> tuple[int, ...]:
        """Returns the members by their rank in the group; sorted if no dump has that order."""
        for record in self.records.values():
            if record.groups.get(group):
                return record.groups[group]
        return tuple(sorted(self.members(group)[0]))

    def members(self, group: str) -> tuple[frozenset[int], bool]:
        """Returns the ranks of the group, and if they are known for certain.

        Dumps list them in ``pg_config``; gloo's only for the default group, under the name ``""``. Otherwise the ranks
        that used the group are its members once a collective of it has completed. Before that, any rank might be one.
        """
        if group not in self._members:
            self._members[group] = self._find_members(group)
        return self._members[group]

    def is_closed(self, group: str) -> bool:
        """Returns whether only ranks of this job are in the group: each member lists it, or lists none and used it."""
        if group not in self._closed:
            self._closed[group] = self._is_closed(group)
        return self._closed[group]

    def _is_closed(self, group: str) -> bool:
        members, are_known = self.members(group)
        if not are_known or members - frozenset(range(self.world_size)):
            return False
        alike: tuple[int, ...] | None = None
        for member in members:
            listed = self.groups_of(member)
            if group in listed or (listed.keys() - {""} and group != DEFAULT_GROUPS[0]):
                ranks = listed.get(group, ())
                if ranks != alike and frozenset(ranks) != members:
                    return False
                alike = ranks
            elif group != DEFAULT_GROUPS[0] and self.last(member, group) < 0:
                return False
        return True

    def is_in_closed_groups(self, rank: int) -> bool:
        names = [name for name in self.groups_of(rank) if name]
        return bool(names) and all(map(self.is_closed, names))

    def groups_of(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Returns the members of each group by the rank's record, or else by the rank itself."""
        if rank in self.records:
            return self.records[rank].groups
        return self._ranks[rank].gil.groups if rank in self._ranks else {}

    def labels_of(self, rank: int) -> dict[str, str]:
        """Returns the descriptions that the creators of groups gave them; empty if none."""
        labels = {kind.group: kind.description for kind in self.ring(rank).used().values()}
        labels |= {name: text for name, text in self._ranks[rank].gil.called.items() if text not in NO_DESCRIPTION}
        return {name: text if text not in NO_DESCRIPTION else "" for name, text in labels.items()}

    @cached_property
    def _agreed_labels(self) -> dict[str | None, str]:
        labels: dict[str, set[str]] = {}
        for rank in self._ranks:
            for name, label in self.labels_of(rank).items():
                labels.setdefault(name, set()).add(label)
        return {name: label for name, (label, *others) in labels.items() if not others}

    def group(self, name: str | None) -> str:
        """Returns the group's name in words, with its description: ``group '0'``, ``group mesh_tp ('11')``."""
        label = self._agreed_labels.get(name)
        return f"group {label} ({name!r})" if label else f"group {name!r}"

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
    record, own_groups = rank.flight_record, rank.gil.groups
    if record is None or not own_groups:
        return record
    listed = {name: ranks for name, ranks in record.groups.items() if ranks}
    return structs.replace(record, groups={**own_groups, **listed})


def _pending(ring: Entries) -> list[Collective]:
    oldest: dict[tuple[str, bool, int], Collective] = {}
    for entry in ring.matching(lambda kind: not kind.completed and kind.state != NOT_LAUNCHED):
        if not entry.op and number_of(entry) <= 0:
            continue  # neither its operation nor its number is known, so it can't be compared
        key = (entry.group, entry.is_p2p, entry.thread)
        if key not in oldest or _order(entry) < _order(oldest[key]):
            oldest[key] = entry
    return sorted(oldest.values(), key=lambda e: e.record_id)


def _order(entry: Collective) -> tuple[int, int]:
    return (number_of(entry), entry.record_id)


def first_recorded_numbers(alignment: Alignment, groups: Iterable[str]) -> dict[str, int]:
    """Returns the first number that all members' windows hold, for groups that lost calls."""
    first_numbers, late = {}, [rank for rank in alignment.records if not alignment.is_whole(rank)]
    for group in groups:
        members, _ = alignment.members(group)
        first = max((alignment.first(rank, group) for rank in late if rank in members), default=0)
        if first > 1:
            first_numbers[group] = first
    return first_numbers
