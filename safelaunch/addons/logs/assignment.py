"""Assigns each report in a log to a rank.

A report belongs to a rank only if a prefix, a file name, or a launcher's unambiguous list says so. Other processes get
a label and an unused number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from safelaunch.addons.logs.calls import NCCL_PREFIX
from safelaunch.addons.logs.lines import MAX_RANKS, LogLine
from safelaunch.addons.logs.records import LoggedJob, RankEnd, SpeakerOutput, local_label, was_terminated
from safelaunch.addons.logs.speakers import LOCAL
from safelaunch.addons.logs.tracebacks import CUT_OFF, OpenTraceback
from safelaunch.model import RankException
from safelaunch.stacks.failures import fingerprints, first_failure
from safelaunch.verdict.exceptions import is_consequence
from safelaunch.verdict.exits import UNKNOWN_SIGNAL

UNNAMED_PROCESS = "a process that the log does not name"
_RaisedError = tuple[OpenTraceback, RankException]
_MOST_UNNAMED = 4
_RANKS = range(MAX_RANKS)


@dataclass
class RankAssignment:
    job: LoggedJob
    outputs: dict[int, SpeakerOutput] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)  # processes without a rank, by the number assigned to them
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(MAX_RANKS * 2)))

    @cached_property
    def first_times(self) -> dict[str, str]:
        """Host → time of its first failure, from torchrun's summary."""
        times: dict[str, str] = {}
        for end in self.ends.values():
            if end.root:
                times[end.host] = min(times.get(end.host, end.time), end.time)
        return times

    @property
    def named_ranks(self) -> set[int]:
        """Ranks that the log names. If there might be several nodes, local ranks don't count."""
        ranks = {*self.outputs, *self.ends} - self.labels.keys()
        if not self.job.assumes_one_node:
            return ranks
        return {rank for rank in ranks if rank in self.job.outputs or (rank in self.ends and self.ends[rank].time)}

    @classmethod
    def of(cls, job: LoggedJob) -> RankAssignment:
        assignment = cls(
            job,
            {rank: output for rank, output in job.outputs.items() if isinstance(rank, int) and rank in _RANKS},
            {rank: end for rank, end in job.ends.items() if rank in _RANKS},
        )
        nodes = job.nodes()
        by_name = sorted(
            ((name, output) for name, output in job.outputs.items() if isinstance(name, str)), key=_natural_key
        )
        for name, output in by_name:
            if name not in nodes:
                assignment._assign_output(name, output)
        for name, output in by_name:
            if name in nodes:
                assignment._assign_unnamed(name, output)
        if (unnamed := job.outputs.get(None)) is not None:
            assignment._assign_unnamed(None, unnamed)
        assignment._drop_duplicates()
        assignment._assign_xids()
        for label, end in job.unplaced.items():
            assignment._assign_unplaced(label, end)
        if (
            job.nccl_failed is not None
            and not assignment._has_failed()
            and not any(output.errors for output in assignment.outputs.values())
        ):
            assignment._assign_nccl_failure(job.nccl_failed)
        assignment._assign_warnings([output for name, output in job.outputs.items() if name is None or name in nodes])
        return assignment

    def note_signals(self) -> None:
        """Records fatal signals that are reported only by faulthandler's stacks."""
        for rank, output in self.outputs.items():
            crash, end = output.final_crash(has_failed=False), self.ends.get(rank)
            untold = end is None or end.code == UNKNOWN_SIGNAL
            if crash is not None and untold and output.final_error(has_failed=False) is None:
                self.ends[rank] = RankEnd(-crash.signal, crash.line, root=True)

    def _assign_output(self, name: str, output: SpeakerOutput) -> None:
        rank = self.job.rank_of(name)
        rank = rank if rank in _RANKS else None
        if rank is not None and rank in self.outputs:
            self.outputs[rank].absorb(output)
        elif rank is not None:
            self.outputs[rank] = output
        elif not self.job.ray_ranks or output.errors:
            output.node = name if "pid=" not in name and len(name.split()) == 1 else ""
            node, _, local = name.partition(LOCAL)
            self._label(local_label(node, local) if local else name, output)

    def _label(self, name: str, output: SpeakerOutput) -> int:
        if name in self.labels.values() and name.startswith("a process"):
            name = f"another{name[1:]}"
        used = {*self.outputs, *self.ends, *self.job.absent}
        number = next(number for number in self._numbers if number not in used)
        self.labels[number], self.outputs[number] = name, output
        return number

    def _assign_unplaced(self, label: str, rank_end: RankEnd) -> None:
        """Records the end of a process whose rank is unknown, unless another report explains it."""
        pid = int(label.rpartition(" ")[2]) if label.startswith("process ") else 0
        if any(pid == end.pid or label in (self.labels.get(rank), f"rank {rank}") for rank, end in self.ends.items()):
            return
        names = self.labels.items()
        same = next((rank for rank, name in names if label == name or (pid and f"pid={pid}" in name)), None)
        if same is None and not pid and label and (rank := self.job.rank_of(label)) in _RANKS:
            same = rank
        errors = [output.errors[-1][1] for output in self.outputs.values() if output.errors]
        explained = rank_end.code == 1 and bool(errors)  # exit code after an uncaught exception
        if same is None and (explained or not all(map(is_consequence, errors)) or self._has_failed()):
            return
        self.ends[self._label(label or UNNAMED_PROCESS, SpeakerOutput(rank_end.line)) if same is None else same] = (
            rank_end
        )

    def _assign_nccl_failure(self, line: LogLine) -> None:
        failure = self.job.nccl_failure
        if failure is not None and failure.own:
            number = self._label(UNNAMED_PROCESS, SpeakerOutput(line))
            self.outputs[number].fail(line, "NCCL error", failure.text)

    def _assign_xids(self) -> None:
        """Assigns Xid errors to ranks: the kernel reports the pid, and NCCL the rank with that pid."""
        places = {process.rpartition(":")[2]: rank for process, (_, rank) in self.job.nccl_places.items()}
        pids = Counter(process.rpartition(":")[2] for process in self.job.nccl_places)
        ranks = {end.pid: rank for rank, end in self.ends.items()}
        for pid, number, line in self.job.xids:
            rank = places[str(pid)] if pids[str(pid)] == 1 else ranks.get(pid)
            if rank is not None and not (rank in self.outputs and self.outputs[rank].errors):
                self.outputs.setdefault(rank, SpeakerOutput(line)).fail(
                    line, f"an error of its GPU (Xid {number})", line.text
                )

    def _drop_duplicates(self) -> None:
        # Exceptions without a rank come from processes that a launcher lists by rank.
        if any(self.outputs[number].errors for number in self.labels):
            for rank in [rank for rank, end in self.ends.items() if end.code == 1 or not _failed(end)]:
                if rank not in self.outputs:
                    del self.ends[rank]

    def _has_failed(self) -> bool:
        return any(_failed(end) for end in self.ends.values())

    def _assign_unnamed(self, node: str | None, output: SpeakerOutput) -> None:
        """Assigns output of an unknown rank, on a node or in the whole job, to ranks that failed there, if unambiguous.

        If torch's debug check reports an error, its message names the rank.
        """
        ends = {rank: end for rank, end in self.ends.items() if end.reporter == node}
        attributed = {rank for rank, output in self.outputs.items() if output.errors and rank not in self.labels}
        failed = sorted(rank for rank, end in ends.items() if end.code == 1 and rank not in attributed)
        no_other_source = not ends and (node is not None or not (self.job.ends or attributed))
        if ends or no_other_source or all(is_consequence(self.outputs[rank].errors[-1][1]) for rank in attributed):
            self._assign_crashes(node, output, ends, no_other_source=no_other_source)
            self._assign_errors(node, output, failed, no_other_source=not ends)

    def _assign_crashes(
        self, node: str | None, output: SpeakerOutput, ends: dict[int, RankEnd], *, no_other_source: bool
    ) -> None:
        crashed = [rank for rank, end in ends.items() if end.code < 0 and end.root]
        if len(crashed) == len(output.crashes) == 1:
            rank_output = self.outputs.setdefault(crashed[0], SpeakerOutput(output.crashes[0].line, node=node or ""))
            rank_output.crashes += output.crashes
        elif no_other_source and output.final_crash(has_failed=node in self.job.failed_speakers):
            number = self._label(_node_label(node), SpeakerOutput(output.crashes[-1].line, node=node or ""))
            self.outputs[number].crashes += output.crashes

    def _assign_errors(
        self, node: str | None, output: SpeakerOutput, failed: list[int], *, no_other_source: bool
    ) -> None:
        distinct = {(error.type, error.message, error.frames): (traceback, error) for traceback, error in output.errors}
        compared = {
            next(iter(compared_ranks)): pair
            for pair in distinct.values()
            if (compared_ranks := fingerprints(pair[1].message))
        }
        for rank, pair in compared.items():
            self._assign(rank, pair, node)
        failed = [rank for rank in failed if rank not in compared]
        # The error that ends a process is its last output.
        errors = [pair for pair in reversed(distinct.values()) if pair not in compared.values()]
        causes = [pair for pair in errors if not is_consequence(pair[1])]
        effects = [pair for pair in errors if is_consequence(pair[1])]
        if no_other_source and not output.final_error(has_failed=node in self.job.failed_speakers):
            return
        if not failed:
            for pair in (_distinct(causes) or effects[:1])[: _MOST_UNNAMED if no_other_source else 0]:
                self._assign(self._label(_node_label(node), SpeakerOutput(pair[0].line, node=node or "")), pair, node)
            return
        alike = [error for _, error in output.errors if not is_consequence(error)]
        listed = [rank for rank in self.ends if self.ends[rank].reporter == node and rank not in self.outputs]
        if len(_distinct(causes)) == 1 and not effects and len(alike) > len(failed) == 1 and len(listed) <= len(alike):
            failed = listed
            for rank in listed:
                self.ends[rank].code, self.ends[rank].stopped = 1, False
        if len(_distinct(causes)) == 1 and not effects:
            # Output of different ranks can be interleaved.
            everybody = len(failed) == 1 or len(failed) <= max(output.heads, len(output.errors))
            for rank in failed if everybody else self._first(failed):
                self._assign(rank, causes[0], node)
            failed = [rank for rank in failed if not self.outputs.get(rank) or not self.outputs[rank].errors]
        elif causes and len(first := self._first(failed)) == 1:
            self._assign(first[0], causes[0], node)
            failed = [rank for rank in failed if rank != first[0]]
        elif causes:
            for pair in _distinct(causes)[:_MOST_UNNAMED]:
                self._assign(self._label(_node_label(node), SpeakerOutput(pair[0].line, node=node or "")), pair, node)
        for rank in failed:
            if effects:
                self._assign(rank, effects[0], node)

    def _first(self, failed: list[int]) -> list[int]:
        """Returns the rank that the launcher reports as the first to fail; empty if others ended in the same second."""
        if len(failed) < 2:
            return failed
        first = [rank for rank in failed if self.ends[rank].root]
        time = min((self.ends[rank].time for rank in first), default="")
        same = [rank for rank in failed if self.ends[rank].time == time]
        return first if len(first) == 1 and time and same == first else []

    def _assign(self, rank: int, pair: _RaisedError, node: str | None) -> None:
        output = self.outputs.setdefault(rank, SpeakerOutput(pair[0].line, node=node or ""))
        output.errors.append(pair)
        output.after.lines = 0

    def _assign_warnings(self, unnamed: Sequence[SpeakerOutput]) -> None:
        """Assigns each NCCL warning to the rank with its pid, or else to one whose exception has the same text."""
        job, outputs = self.job, self.outputs
        warnings = [(line, text, NCCL_PREFIX.search(line.text)) for output in unnamed for line, text in output.warnings]
        pids = {end.pid: rank for rank, end in job.ends.items()}
        is_multi_node = Counter(rank for _, rank in job.nccl_places.values())
        places = {process: rank for process, (_, rank) in job.nccl_places.items() if is_multi_node[rank] == 1}
        failed = [rank for rank, output in outputs.items() if output.errors]
        signers = {prefix["pid"] for _, _, prefix in warnings if prefix}
        if len(signers) == len(failed) == 1:
            pids.setdefault(int(signers.pop()), failed[0])
        for line, text, prefix in warnings:
            rank = places.get(prefix["process"], pids.get(int(prefix["pid"]))) if prefix else None
            alike = (candidate for candidate in failed if text[:80] in outputs[candidate].errors[-1][1].message)
            rank = rank if rank is not None else next(alike, None)
            if rank in outputs:
                outputs[rank].warnings.append((line, text))
            elif rank is not None and job.nccl_failed and (failure := first_failure([text])) and failure.own:
                outputs[rank] = SpeakerOutput(line, warnings=[(line, text)])
                outputs[rank].fail(line, "NCCL error", text)


def _failed(end: RankEnd) -> bool:
    return not (end.stopped or end.code == 0 or was_terminated(end.code))


def _node_label(node: str | None) -> str:
    return f"a process of {node}" if node else UNNAMED_PROCESS


def _distinct(errors: Sequence[_RaisedError]) -> list[_RaisedError]:
    # Keeps one error of each type and line; truncated ones only if there are no others.
    kinds: dict[tuple[str, object], _RaisedError] = {}
    for pair in errors:
        kinds.setdefault((pair[1].type, pair[1].frames[:1]), pair)
    whole = [pair for pair in kinds.values() if pair[1].type != CUT_OFF] or list(kinds.values())
    return sorted(whole, key=lambda pair: pair[0].line.number)


def _natural_key(item: tuple[str, SpeakerOutput]) -> str:
    return re.sub(r"\d+", lambda number: number[0].zfill(20), item[0])
