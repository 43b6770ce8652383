"""Selects the recorded calls of all ranks, from shortly before they diverged until the hang.

If a call is left out, it is left out on all members of its group, so that the remaining calls still match.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.model import Collective
from safelaunch.verdict.c10d import op_name, signature
from safelaunch.verdict.columns import Window
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.transfers import RecordedTransfer

_LONGEST_ROUND = 256
_FEW = 2  # calls to keep before the divergence if they don't repeat

MatchKey = tuple[Hashable, ...]  # identifies a collective, or a send and its receive, on all ranks


@dataclass(frozen=True)
class Extent:
    """How much to keep: everything, each rank's ``last`` calls, or some iterations before the divergence."""

    everything: bool = False
    last: int | None = None
    rounds: int = 3


@dataclass(frozen=True)
class RecordedEntry:
    entry: Collective
    meeting: MatchKey  # group of a collective, or pair of a transfer
    place: int  # number within ``meeting``, ascending by one from call to call on each side
    transfer: RecordedTransfer | None = None

    @property
    def key(self) -> MatchKey:
        return (*self.meeting, self.place)


def recorded(facts: CaseFacts, extent: Extent) -> dict[int, list[RecordedEntry]]:
    """Returns the calls of each rank to replay, oldest first."""
    every = {rank: _entries_of(facts, rank) for rank in sorted(facts.alignment.records)}
    begins = _together({rank: _begin(facts, calls, extent) for rank, calls in every.items()}, every)
    first: dict[MatchKey, int] = {}
    for rank, calls in every.items():
        for meeting, place in _first_kept(calls, begins[rank]).items():
            first[meeting] = min(place, first.get(meeting, place))
    for rank, calls in every.items():  # a call that one side's ring has lost can't be replayed
        first_places = {call.meeting: call.place for call in reversed(calls)}
        for meeting in first:
            first[meeting] = max(first[meeting], first_places.get(meeting) or _behind_lost(facts, rank, meeting))
    return {rank: [call for call in calls if call.place >= first[call.meeting]] for rank, calls in every.items()}


def _entries_of(facts: CaseFacts, rank: int) -> list[RecordedEntry]:
    record = facts.alignment.records[rank]
    transfers: dict[int, RecordedTransfer] = {}
    for group in {entry.group for entry in record.entries if entry.is_p2p}:
        for matched in facts.transfers.of(rank, group) or ():
            transfers[matched.entry.record_id] = matched
    entries, counts = [], Counter[MatchKey]()
    for entry in record.entries:
        transfer = transfers.get(entry.record_id)
        if not entry.is_p2p and op_name(entry):
            entries.append(RecordedEntry(entry, (entry.group,), entry.seq))
        elif transfer is not None and (_can_be_counted(facts, transfer) or not entry.completed):
            meeting = (entry.group, transfer.sender, transfer.receiver)
            counts[meeting] += 1
            entries.append(RecordedEntry(entry, meeting, counts[meeting], transfer))
    return entries


def _can_be_counted(facts: CaseFacts, transfer: RecordedTransfer) -> bool:
    return facts.alignment.is_whole(transfer.sender) and facts.alignment.is_whole(transfer.receiver)


def _begin(facts: CaseFacts, calls: Sequence[RecordedEntry], extent: Extent) -> int:
    if extent.everything:
        return 0
    if extent.last is not None:
        return max(0, len(calls) - extent.last)
    parted = _parted(facts)
    apart = next(
        (at for at, entry in enumerate(calls) if entry.place >= parted.get(entry.meeting, entry.place + 1)), None
    )
    apart = len(calls) if apart is None else apart
    undone = next((at for at, entry in enumerate(calls) if not entry.entry.completed), len(calls))
    return _rounds_before(calls, min(apart, undone), extent.rounds)


def _together(begins: Mapping[int, int], every: Mapping[int, Sequence[RecordedEntry]]) -> dict[int, int]:
    """Moves each rank's start back to the latest call that all ranks made; without a near one, to its first call."""
    places = {
        rank: {(entry.meeting, entry.place): at for at, entry in enumerate(calls)} for rank, calls in every.items()
    }
    common = [
        key for key in next(iter(places.values()), {}) if all(key in rank_places for rank_places in places.values())
    ]
    for key in reversed(common):
        if all(rank_places[key] <= begins[rank] for rank, rank_places in places.items()):
            return {rank: rank_places[key] for rank, rank_places in places.items()}
    return dict(begins) if max(begins.values(), default=0) > _LONGEST_ROUND else dict.fromkeys(begins, 0)


def _parted(facts: CaseFacts) -> dict[MatchKey, int]:
    """Returns, for each group, the first number at which its members made different calls, or a member made none."""
    divergences: dict[MatchKey, int] = {}
    for group in facts.alignment.groups():
        parted = facts.histories.in_group(group).diverged_at
        last = min((facts.alignment.last(rank, group) for rank in _recording(facts, group)), default=0)
        divergences[(group,)] = min(last + 1, parted) if parted is not None else last + 1
    return divergences


def _recording(facts: CaseFacts, group: str) -> list[int]:
    members, _ = facts.alignment.members(group)
    return [rank for rank in members if rank in facts.alignment.records]


def _rounds_before(calls: Sequence[RecordedEntry], end: int, rounds: int) -> int:
    """Returns the index at which the last ``rounds`` complete iterations before ``end`` begin.

    If no calls repeat, returns the index of the last few calls.
    """
    codes = [(signature(call.entry), call.entry.group, call.entry.frames) for call in calls[:end]]
    for period in range(1, min(_LONGEST_ROUND, end // 2) + 1):
        if codes[end - period : end] == codes[end - 2 * period : end - period]:
            begin = end - 2 * period
            while end - begin < rounds * period and codes[begin - period : begin] == codes[begin : begin + period]:
                begin -= period
            return begin
    return max(0, end - _FEW * rounds)


def _first_kept(calls: Sequence[RecordedEntry], begin: int) -> Mapping[MatchKey, int]:
    """Returns, for each key, the first number that is kept; if there isn't one, the number after the last."""
    firsts: dict[MatchKey, int] = {}
    for at, entry in enumerate(calls):
        if at < begin:
            firsts[entry.meeting] = entry.place + 1
        elif entry.meeting not in firsts or firsts[entry.meeting] > entry.place:
            firsts[entry.meeting] = entry.place
    return firsts


def _behind_lost(facts: CaseFacts, rank: int, meeting: MatchKey) -> int:
    """Returns the first number that ``rank``'s ring buffer can't have lost, in a group without entries in it.

    If nothing shows which call was the rank's last in the group, it is the number after all completed calls.
    """
    if len(meeting) > 1 or facts.alignment.is_whole(rank):
        return 0
    group = str(meeting[0])
    members = facts.alignment.members(group)[0]
    if rank not in members:
        return 0
    last = facts.alignment.last(rank, group)
    windows = [window for peer in members if (window := facts.alignment.window(peer, group)) is not None]
    return last + 1 if last >= 0 else max(map(_last_over, windows), default=0) + 1


def _last_over(window: Window) -> int:
    over = (number for number in reversed(window.numbers) if (entry := window.at(number)) and entry.completed)
    return next(over, 0)
