"""Collects the facts in a log: per speaker (a process or node that prints), per ended rank, and for the whole job.

Only facts that can explain an end are kept, so logs of any size take little memory.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from dataclasses import dataclass, field

from safelaunch.addons.logs.error_lines import ErrorLines
from safelaunch.addons.logs.lines import LogLine
from safelaunch.addons.logs.speakers import LOCAL, LogEntry, Speaker
from safelaunch.addons.logs.tracebacks import MOST_MESSAGE, Crash, LinesAfter, OpenTraceback
from safelaunch.model import Frame, RankException, Rendezvous
from safelaunch.stacks.failures import KnownFailure, first_failure
from safelaunch.verdict.exceptions import is_consequence

MOST_WARNINGS = 40
_MOST_TAIL, _MOST_TRACEBACKS, _MOST_SPEAKERS, _MOST_REMARK = 60, 20, 1 << 16, 300
UNNAMED, DEFAULT = "", "0"


@dataclass
class WatchdogReport:
    description: str = ""
    group_rank: int | None = None
    seq: int = 0  # sequence number of the call that timed out
    op: str = ""
    frames: list[Frame] = field(default_factory=list)  # innermost first
    size: int | None = None
    timeout_ms: int = 0
    last_enqueued: int = -1
    last_completed: int = -1


@dataclass
class SpeakerOutput:
    first: LogLine
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_TAIL))
    errors: list[tuple[OpenTraceback, RankException]] = field(default_factory=list)
    warnings: list[tuple[LogLine, str]] = field(default_factory=list)
    groups: dict[str, WatchdogReport] = field(default_factory=dict)
    watchdog: LogLine | None = None
    timed_out: bool = False  # a collective timed out, so later exceptions are effects
    last: LogLine | None = None
    abort_line: LogLine | None = None  # gives the reason for an abort
    traceback: OpenTraceback | None = None
    before: str = ""
    node: str = ""  # name of the node or container
    after: LinesAfter = field(default_factory=LinesAfter)  # lines after the latest of ``errors``
    crashes: list[Crash] = field(default_factory=list)
    block: dict[str, str] = field(default_factory=dict)  # fields of one failure in a launcher's summary
    block_at: LogLine | None = None
    block_root: bool = False
    earlier: list[tuple[OpenTraceback, RankException]] = field(default_factory=list)  # errors before a restart
    heads: int = 0
    hosts: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)  # highest step printed, by the word used for steps
    socket_at: LogLine | None = None
    socket: str = ""  # c10d's latest report about a socket

    @property
    def end(self) -> LogLine | None:
        """The line at which the process seems to have ended, or None."""
        return self.errors[-1][0].line if self.errors else self.crashes[-1].line if self.crashes else None

    def fail(self, line: LogLine, kind: str, what: str) -> None:
        traceback = OpenTraceback(line, [line.text], False, LogEntry(line, line.text, None, timed=False))
        self.note(traceback, RankException(kind, what, 0.0))

    def note(self, traceback: OpenTraceback, error: RankException) -> None:
        self.errors = [*self.errors[-_MOST_TRACEBACKS:], (traceback, error)]
        self.after = LinesAfter.of(traceback.lines[-1], self.tail)

    def absorb(self, output: SpeakerOutput) -> None:
        if output.errors:
            self.errors, self.after = [*self.errors, *output.errors], output.after
        self.tail.extend(output.tail)
        self.crashes += output.crashes
        self.warnings += output.warnings
        self.hosts |= output.hosts

    def restart(self) -> None:
        self.errors, self.crashes, self.groups, self.watchdog, self.traceback = [], [], {}, None, None
        self.timed_out = False

    def restart_after(self, number: int) -> None:
        """Moves the errors that precede a restart, reported on line ``number``, to ``earlier``."""
        self.earlier += [pair for pair in self.errors if pair[0].line.number < number]
        self.errors = [pair for pair in self.errors if pair[0].line.number > number]
        self.crashes = [crash for crash in self.crashes if crash.line.number > number]

    def final_error(self, *, has_failed: bool) -> tuple[OpenTraceback, RankException] | None:
        """Returns the last exception if it ended the process, else None.

        Args:
            has_failed: True if another source reports that the process failed.
        """
        return self.errors[-1] if self.errors and self.after.is_end(self.errors[-1][1], has_failed=has_failed) else None

    def final_crash(self, *, has_failed: bool) -> Crash | None:
        return self.crashes[-1] if self.crashes and self.crashes[-1].is_end(has_failed=has_failed) else None


@dataclass
class RankEnd:
    code: int
    line: LogLine
    pid: int = 0
    host: str = ""
    root: bool = False  # first failure that the launcher saw
    reporter: Speaker | None = None  # speaker of the launcher's lines; each node can have a launcher
    stopped: bool = False
    time: str = ""  # from torchrun's summary


@dataclass
class LoggedJob:
    outputs: dict[Speaker | None, SpeakerOutput] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    unplaced: dict[str, RankEnd] = field(default_factory=dict)  # ends of processes without a rank, by label
    events: ErrorLines = field(default_factory=ErrorLines)
    launch: tuple[str, ...] = ()  # command that runs the job under safelaunch
    files: set[str] = field(default_factory=set)  # files that might each be a node's output
    labels: dict[str, set[int]] = field(default_factory=dict)  # alternative names of ranks in prefixes
    rendezvous: Rendezvous | None = None
    rendezvous_at: LogLine | None = None
    native: int = 0
    xids: list[tuple[int, str, LogLine]] = field(default_factory=list)  # (pid, Xid number, line)
    kills: dict[int, str] = field(default_factory=dict)  # the kernel's message by pid
    ray_ranks: dict[str, int] = field(default_factory=dict)  # ranks of Ray's workers by pid; -1 if ambiguous
    world: int = 0
    assumes_one_node: bool = False  # no sign of other nodes, so local ranks count as ranks
    # Speakers whose launcher reports a failed process.
    failed_speakers: set[Speaker | None] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    first_ranks: dict[Speaker | None, int] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)  # text -> place of its first occurrence
    nccl_places: dict[str, tuple[int, int]] = field(default_factory=dict)  # (size, rank) in the largest communicator
    nccl_failed: LogLine | None = None
    # Warnings and last errors of all speakers.
    nccl_messages: list[tuple[LogLine, str]] = field(default_factory=list)
    failed_hosts: dict[str, LogLine] = field(default_factory=dict)  # hosts that Slurm reports as failed
    closed_by: dict[str, LogLine] = field(default_factory=dict)  # hosts that closed connections

    @property
    def nccl_failure(self) -> KnownFailure | None:
        return first_failure(text for _, text in self.nccl_messages)

    def process(self, speaker: Speaker | None, line: LogLine) -> SpeakerOutput:
        """Returns the speaker's record of output; creates it if ``line`` is the speaker's first."""
        if (output := self.outputs.get(speaker)) is None:
            output = self.outputs.setdefault(
                speaker if len(self.outputs) < _MOST_SPEAKERS else None, SpeakerOutput(line)
            )
        return output

    def note_end(self, rank: int, code: int, line: LogLine, pid: int = 0) -> None:
        self.ends.setdefault(rank, RankEnd(code, line, pid, root=True))

    def note_unplaced(self, label: str, code: int, entry: LogEntry) -> None:
        if code and isinstance(entry.speaker, int) and not label:
            self.note_end(entry.speaker, of_shell(code), entry.line)
        elif code:
            self.unplaced.setdefault(label or str(entry.speaker or ""), RankEnd(of_shell(code), entry.line, root=True))

    def remark(self, text: str, line: LogLine) -> None:
        if len(self.remarks) < MOST_WARNINGS:
            self.remarks.setdefault(" ".join(text.split())[:_MOST_REMARK], line.where)

    def nodes(self) -> set[Speaker | None]:
        """Speakers that stand for several ranks: launchers, and prefixes that contain only a local rank."""
        local = (name.partition(LOCAL)[0] for name in self.outputs if isinstance(name, str) and LOCAL in name)
        speakers = {*self.files, *self.failed_speakers, *(end.reporter for end in self.ends.values()), *local}
        tasks = {name for name in self.outputs if isinstance(name, str) and name.isdigit()}
        # If a task without a launcher raises, it is a rank, and so are all tasks.
        return speakers - tasks if any(self.outputs[name].errors for name in tasks - speakers) else speakers

    def rank_of(self, name: str) -> int | None:
        node, _, local = name.partition(LOCAL)
        if local:
            first = self.first_ranks.get(node or None)
            return first + int(local) if first is not None else None
        ranks = self.labels.get(name, set())
        if len(ranks) == 1 and not any(
            ranks & other_ranks for label, other_ranks in self.labels.items() if label != name
        ):
            return next(iter(ranks))
        if pid := re.search(r"pid=(\d+)(, ip=[\w.:]+)?", name):
            rank = self.ray_ranks.get(pid[0].removeprefix("pid="), self.ray_ranks.get(pid[1], -1))
            return rank if rank >= 0 else None
        return int(name) if name.isdecimal() and len(name) < 6 else None

    def restore_previous_attempt(self) -> None:
        """Restores the root errors of the previous attempt if the last attempt raised only consequences."""
        if all(is_consequence(error) for output in self.outputs.values() for _, error in output.errors):
            for output in self.outputs.values():
                output.errors = [pair for pair in output.earlier if not is_consequence(pair[1])] or output.errors

    def accept_last_errors(self) -> bool:
        """Counts the last exceptions as final despite later output; False if there are none or the job finished."""
        if self.events.finished:
            return False
        ends = {(error.line.file, error.line.number) for error in self.events.errors() if not error.since}
        raisers = [
            output
            for output in self.outputs.values()
            if output.errors and (output.errors[-1][0].line.file, output.errors[-1][0].line.number) in ends
            if output.errors[-1][1].frames and output.after.lines <= MOST_MESSAGE
        ]
        for raiser in raisers:
            raiser.after = LinesAfter()
        return bool(raisers)

    def note_failed_rendezvous(self) -> None:
        """Records a failed rendezvous if a process without a known rank ended because it couldn't reach its store."""
        output = self.outputs.get(None)
        if (
            self.rendezvous is None
            and output is not None
            and output.socket_at is output.last
            and not (output.errors or self.ends)
        ):
            self.rendezvous, self.rendezvous_at = (
                Rendezvous(0, 0, store=output.socket.rstrip("."), error=""),
                output.last,
            )


def of_shell(code: int) -> int:
    """Converts an exit code from a shell or container (128 + signal) to Python's returncode (-signal)."""
    return 128 - code if 128 < code < 160 else code


def was_terminated(code: int) -> bool:
    """Returns whether SIGTERM ended the process, which launchers send to the remaining ranks after a failure."""
    return of_shell(code) == -signal.SIGTERM


def local_label(node: str, local: str | int) -> str:
    return f"local rank {local} of {node}" if node else f"local rank {local}"
