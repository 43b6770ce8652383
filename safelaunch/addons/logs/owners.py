"""Decides which rank each report of a log is about.

A rank is named only if the text gives it: a prefix, a file's name, a launcher's list that leaves no choice. Everything
else belongs to a process that has a label instead: a number of its own among the ranks, and what the log calls it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from safelaunch.addons.logs.calls import OF_NCCL
from safelaunch.addons.logs.heard import Heard, LoggedJob, RankEnd, local_label, was_terminated
from safelaunch.addons.logs.lines import LOCAL, MAX_RANKS, LogLine
from safelaunch.addons.logs.tracebacks import CUT_OFF, OpenTraceback
from safelaunch.model import RankException
from safelaunch.stacks.failures import fingerprints, first_failure
from safelaunch.verdict.exceptions import is_consequence
from safelaunch.verdict.exits import UNKNOWN_SIGNAL

UNSIGNED = "a process that the log does not name"
_Raised = tuple[OpenTraceback, RankException]
_MOST_UNSIGNED = 4
_RANKS = range(MAX_RANKS)


@dataclass
class Owners:
    """Reports about each rank, and how it ended."""

    job: LoggedJob
    heard: dict[int, Heard] = field(default_factory=dict)
    ended: dict[int, RankEnd] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)  # processes whose rank is not known, by their numbers here
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(MAX_RANKS * 2)))

    @cached_property
    def first_times(self) -> dict[str, str]:
        """When the first failure was seen on each host, as its launcher printed it; "" if it did not."""
        found: dict[str, str] = {}
        for one in self.ended.values():
            if one.root:
                found[one.host] = min(found.get(one.host, one.time), one.time)
        return found

    @property
    def known(self) -> set[int]:
        """The ranks that the log names, without those that are local ones on what may be one of several nodes."""
        known = {*self.heard, *self.ended} - self.labels.keys()
        if not self.job.assumes_one_node:
            return known
        return {one for one in known if one in self.job.heard or (one in self.ended and self.ended[one].time)}

    @classmethod
    def of(cls, job: LoggedJob) -> Owners:
        found = cls(
            job,
            {one: heard for one, heard in job.heard.items() if isinstance(one, int) and one in _RANKS},
            {rank: ended for rank, ended in job.ended.items() if rank in _RANKS},
        )
        nodes = job.nodes()
        named = sorted(((name, one) for name, one in job.heard.items() if isinstance(name, str)), key=_in_order)
        for name, heard in named:
            if name not in nodes:
                found._place(name, heard)
        for name, heard in named:
            if name in nodes:
                found._share_out(name, heard)
        if (unsigned := job.heard.get(None)) is not None:
            found._share_out(None, unsigned)
        found._drop_doubles()
        found._place_xids()
        for label, ended in job.lost.items():
            found._lose(label, ended)
        if (
            job.nccl_failed is not None
            and not found._has_failed()
            and not any(one.raised for one in found.heard.values())
        ):
            found._lose_to_nccl(job.nccl_failed)
        found._place_warnings([heard for name, heard in job.heard.items() if name is None or name in nodes])
        return found

    def note_signals(self) -> None:
        """Takes the signals of which faulthandler printed stacks, for processes whose end nothing else reports."""
        for rank, heard in self.heard.items():
            crash, ended = heard.crashed(ended=False), self.ended.get(rank)
            untold = ended is None or ended.code == UNKNOWN_SIGNAL
            if crash is not None and untold and heard.uncaught(ended=False) is None:
                self.ended[rank] = RankEnd(-crash.signal, crash.line, root=True)

    def _place(self, name: str, heard: Heard) -> None:
        """Gives the lines of one process, task or container to its rank, or to a label."""
        rank = self.job.rank_of(name)
        rank = rank if rank in _RANKS else None
        if rank is not None and rank in self.heard:
            self.heard[rank].absorb(heard)
        elif rank is not None:
            self.heard[rank] = heard
        elif not self.job.ranks or heard.raised:
            heard.node = name if "pid=" not in name and len(name.split()) == 1 else ""
            node, _, local = name.partition(LOCAL)
            self._label(local_label(node, local) if local else name, heard)

    def _label(self, name: str, heard: Heard) -> int:
        if name in self.labels.values() and name.startswith("a process"):
            name = f"another{name[1:]}"
        taken = {*self.heard, *self.ended, *self.job.absent}
        number = next(number for number in self._numbers if number not in taken)
        self.labels[number], self.heard[number] = name, heard
        return number

    def _lose(self, label: str, ended: RankEnd) -> None:
        """Notes the end of a process without a rank, unless something else explains it."""
        pid = int(label.rpartition(" ")[2]) if label.startswith("process ") else 0
        if any(pid == one.pid or label in (self.labels.get(rank), f"rank {rank}") for rank, one in self.ended.items()):
            return
        names = self.labels.items()
        same = next((rank for rank, name in names if label == name or (pid and f"pid={pid}" in name)), None)
        if same is None and not pid and label and (rank := self.job.rank_of(label)) in _RANKS:
            same = rank
        raised = [one.raised[-1][1] for one in self.heard.values() if one.raised]
        explained = ended.code == 1 and bool(raised)  # that is how an exception ends a process
        if same is None and (explained or not all(map(is_consequence, raised)) or self._has_failed()):
            return
        self.ended[self._label(label or UNSIGNED, Heard(ended.line)) if same is None else same] = ended

    def _lose_to_nccl(self, line: LogLine) -> None:
        """NCCL failed for a reason of its own, and no traceback shows in which process."""
        told = first_failure(text for _, text in self.job.nccl_told)
        if told is not None and told.own:
            number = self._label(UNSIGNED, Heard(line))
            self.heard[number].fail(line, "NCCL error", told.text)

    def _place_xids(self) -> None:
        """Gives Xid errors to ranks: the kernel names a process, and NCCL the rank of it."""
        places = {process.rpartition(":")[2]: rank for process, (_, rank) in self.job.nccl_places.items()}
        pids = Counter(process.rpartition(":")[2] for process in self.job.nccl_places)
        known = {one.pid: rank for rank, one in self.ended.items()}
        for pid, number, line in self.job.xids:
            rank = places[str(pid)] if pids[str(pid)] == 1 else known.get(pid)
            if rank is not None and not (rank in self.heard and self.heard[rank].raised):
                self.heard.setdefault(rank, Heard(line)).fail(line, f"an error of its GPU (Xid {number})", line.text)

    def _drop_doubles(self) -> None:
        """Drops ends in a launcher's list if other lines show exceptions of the same processes without their ranks."""
        if any(self.heard[number].raised for number in self.labels):
            for rank in [rank for rank, one in self.ended.items() if one.code == 1 or not _failed(one)]:
                if rank not in self.heard:
                    del self.ended[rank]

    def _has_failed(self) -> bool:
        return any(_failed(one) for one in self.ended.values())

    def _share_out(self, by: str | None, said: Heard) -> None:
        """Gives the unsigned lines of a node, or of all, to the ranks that failed there, if that leaves no choice.

        torch's own check names the rank of its call.
        """
        ended = {rank: one for rank, one in self.ended.items() if one.by == by}
        signed = {rank for rank, one in self.heard.items() if one.raised and rank not in self.labels}
        failed = sorted(rank for rank, one in ended.items() if one.code == 1 and rank not in signed)
        alone = not ended and (by is not None or not (self.job.ended or signed))
        if ended or alone or all(is_consequence(self.heard[rank].raised[-1][1]) for rank in signed):
            self._share_crashes(by, said, ended, alone=alone)
            self._share_errors(by, said, failed, alone=not ended)

    def _share_crashes(self, by: str | None, said: Heard, ended: dict[int, RankEnd], *, alone: bool) -> None:
        crashed = [rank for rank, one in ended.items() if one.code < 0 and one.root]
        if len(crashed) == len(said.crashes) == 1:
            one = self.heard.setdefault(crashed[0], Heard(said.crashes[0].line, node=by or ""))
            one.crashes += said.crashes
        elif alone and said.crashed(ended=by in self.job.failed):
            number = self._label(_label_of(by), Heard(said.crashes[-1].line, node=by or ""))
            self.heard[number].crashes += said.crashes

    def _share_errors(self, by: str | None, said: Heard, failed: list[int], *, alone: bool) -> None:
        distinct = {(one.type, one.message, one.frames): (opened, one) for opened, one in said.raised}
        compared = {next(iter(told)): pair for pair in distinct.values() if (told := fingerprints(pair[1].message))}
        for rank, pair in compared.items():
            self._give(rank, pair, by)
        failed = [rank for rank in failed if rank not in compared]
        # A process prints the error that ends it last.
        errors = [pair for pair in reversed(distinct.values()) if pair not in compared.values()]
        causes = [pair for pair in errors if not is_consequence(pair[1])]
        effects = [pair for pair in errors if is_consequence(pair[1])]
        if alone and not said.uncaught(ended=by in self.job.failed):
            return
        if not failed:
            for pair in (_unlike(causes) or effects[:1])[: _MOST_UNSIGNED if alone else 0]:
                self._give(self._label(_label_of(by), Heard(pair[0].line, node=by or "")), pair, by)
            return
        alike = [one for _, one in said.raised if not is_consequence(one)]
        listed = [rank for rank in self.ended if self.ended[rank].by == by and rank not in self.heard]
        if len(_unlike(causes)) == 1 and not effects and len(alike) > len(failed) == 1 and len(listed) <= len(alike):
            failed = listed  # the launcher has stopped the others before they could end
            for rank in listed:
                self.ended[rank].code, self.ended[rank].stopped = 1, False
        if len(_unlike(causes)) == 1 and not effects:
            # Their lines may run into each other.
            everybody = len(failed) == 1 or len(failed) <= max(said.heads, len(said.raised))
            for rank in failed if everybody else self._first(failed):
                self._give(rank, causes[0], by)
            failed = [rank for rank in failed if not self.heard.get(rank) or not self.heard[rank].raised]
        elif causes and len(first := self._first(failed)) == 1:
            self._give(first[0], causes[0], by)
            failed = [rank for rank in failed if rank != first[0]]
        elif causes:
            for pair in _unlike(causes)[:_MOST_UNSIGNED]:
                self._give(self._label(_label_of(by), Heard(pair[0].line, node=by or "")), pair, by)
        for rank in failed:
            if effects:
                self._give(rank, effects[0], by)

    def _first(self, failed: list[int]) -> list[int]:
        """Returns the rank that the launcher calls the first, unless others ended in the same second."""
        if len(failed) < 2:
            return failed
        first = [rank for rank in failed if self.ended[rank].root]
        time = min((self.ended[rank].time for rank in first), default="")
        same = [rank for rank in failed if self.ended[rank].time == time]
        return first if len(first) == 1 and time and same == first else []

    def _give(self, rank: int, pair: _Raised, by: str | None) -> None:
        one = self.heard.setdefault(rank, Heard(pair[0].line, node=by or ""))
        one.raised.append(pair)
        one.after.lines = 0

    def _place_warnings(self, unsigned: Sequence[Heard]) -> None:
        """Gives NCCL's warnings to the rank of the process that signs them, or to a rank that raises the same words."""
        job, found = self.job, self.heard
        warnings = [(line, text, OF_NCCL.search(line.text)) for one in unsigned for line, text in one.warnings]
        pids = {one.pid: rank for rank, one in job.ended.items()}
        several = Counter(rank for _, rank in job.nccl_places.values())
        places = {process: rank for process, (_, rank) in job.nccl_places.items() if several[rank] == 1}
        raised = [rank for rank, one in found.items() if one.raised]
        signers = {by["pid"] for _, _, by in warnings if by}
        if len(signers) == len(raised) == 1:
            pids.setdefault(int(signers.pop()), raised[0])
        for line, text, by in warnings:
            rank = places.get(by["process"], pids.get(int(by["pid"]))) if by else None
            alike = (one for one in raised if text[:80] in found[one].raised[-1][1].message)
            rank = rank if rank is not None else next(alike, None)
            if rank in found:
                found[rank].warnings.append((line, text))
            elif rank is not None and job.nccl_failed and (told := first_failure([text])) and told.own:
                found[rank] = Heard(line, warnings=[(line, text)])
                found[rank].fail(line, "NCCL error", text)


def _failed(one: RankEnd) -> bool:
    """Returns whether it ended badly, and not because the launcher stopped it."""
    return not (one.stopped or one.code == 0 or was_terminated(one.code))


def _label_of(node: str | None) -> str:
    return f"a process of {node}" if node else UNSIGNED


def _unlike(errors: Sequence[_Raised]) -> list[_Raised]:
    """Returns one error of each type and line. One that the log cuts off may be any of the others."""
    kinds: dict[tuple[str, object], _Raised] = {}
    for pair in errors:
        kinds.setdefault((pair[1].type, pair[1].frames[:1]), pair)
    whole = [pair for pair in kinds.values() if pair[1].type != CUT_OFF] or list(kinds.values())
    return sorted(whole, key=lambda pair: pair[0].line.number)


def _in_order(named: tuple[str, Heard]) -> str:
    """Returns a key that sorts ``worker-2`` before ``worker-10``."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), named[0])
