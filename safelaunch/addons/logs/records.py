"""Records of what a job has printed: of a process, of an end that a launcher reports, and of the whole job.

Lines without a prefix have no rank until torchrun's summary names those that failed. Nothing is kept but what reports
an end, so that a log of any size takes little memory.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from dataclasses import dataclass, field

from safelaunch.addons.logs.error_lines import ErrorLines
from safelaunch.addons.logs.lines import LOCAL, LogEntry, LogLine, Speaker
from safelaunch.addons.logs.tracebacks import MOST_MESSAGE, Crash, LinesAfter, OpenTraceback
from safelaunch.model import Frame, RankException, Rendezvous
from safelaunch.verdict.exceptions import is_consequence

MOST_WARNINGS = 40
_MOST_TAIL, _MOST_TRACEBACKS, _MOST_SPEAKERS, _MOST_REMARK = 60, 20, 1 << 16, 300
UNNAMED, DEFAULT = "", "0"  # names of groups


@dataclass
class WatchdogReport:
    """Report of a rank's watchdog about one group."""

    description: str = ""
    group_rank: int | None = None
    seq: int = 0  # number of the call that timed out
    op: str = ""
    frames: list[Frame] = field(default_factory=list)  # innermost first
    size: int | None = None
    timeout_ms: int = 0
    last_enqueued: int = -1
    last_completed: int = -1


@dataclass
class SpeakerOutput:
    """Lines of one speaker that matter."""

    first: LogLine
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_TAIL))
    errors: list[tuple[OpenTraceback, RankException]] = field(default_factory=list)
    warnings: list[tuple[LogLine, str]] = field(default_factory=list)
    groups: dict[str, WatchdogReport] = field(default_factory=dict)
    watchdog: LogLine | None = None
    timed_out: bool = False  # its later exceptions are effects
    last: LogLine | None = None
    abort_line: LogLine | None = None  # reason of an abort
    traceback: OpenTraceback | None = None
    before: str = ""  # the previous line
    node: str = ""  # or container
    after: LinesAfter = field(default_factory=LinesAfter)  # lines after the newest of ``raised``
    crashes: list[Crash] = field(default_factory=list)
    block: dict[str, str] = field(default_factory=dict)  # fields of one failure in a launcher's summary
    block_at: LogLine | None = None
    block_root: bool = False
    earlier: list[tuple[OpenTraceback, RankException]] = field(default_factory=list)  # before the launcher's restart
    heads: int = 0  # number of first lines of tracebacks
    hosts: set[str] = field(default_factory=set)  # possible names of its host
    steps: dict[str, int] = field(default_factory=dict)  # highest number printed, by the word for steps
    socket_at: LogLine | None = None
    socket: str = ""  # newest report of c10d about a socket

    @property
    def end(self) -> LogLine | None:
        """The line where its process seems to have ended."""
        return self.errors[-1][0].line if self.errors else self.crashes[-1].line if self.crashes else None

    def fail(self, line: LogLine, kind: str, what: str) -> None:
        """Notes an error that a library prints and no traceback shows."""
        traceback = OpenTraceback(line, [line.text], False, LogEntry(line, line.text, None, timed=False))
        self.note(traceback, RankException(kind, what, 0.0))

    def note(self, traceback: OpenTraceback, error: RankException) -> None:
        self.errors = [*self.errors[-_MOST_TRACEBACKS:], (traceback, error)]
        self.after = LinesAfter.of(traceback.lines[-1], self.tail)

    def absorb(self, other: SpeakerOutput) -> None:
        """Adds lines of the same process that have another prefix."""
        if other.errors:
            self.errors, self.after = [*self.errors, *other.errors], other.after
        self.tail.extend(other.tail)
        self.crashes += other.crashes
        self.warnings += other.warnings
        self.hosts |= other.hosts

    def restart(self) -> None:
        """Drops its failures, which did not end the job."""
        self.errors, self.crashes, self.groups, self.watchdog, self.traceback = [], [], {}, None, None
        self.timed_out = False

    def restart_after(self, number: int) -> None:
        """Keeps its failures before this line apart from those after it."""
        self.earlier += [pair for pair in self.errors if pair[0].line.number < number]
        self.errors = [pair for pair in self.errors if pair[0].line.number > number]
        self.crashes = [crash for crash in self.crashes if crash.line.number > number]

    def final_error(self, *, has_failed: bool) -> tuple[OpenTraceback, RankException] | None:
        """Returns its last exception if that ended it.

        Args:
            has_failed: something else reports that its process has failed
        """
        return self.errors[-1] if self.errors and self.after.is_end(self.errors[-1][1], has_failed=has_failed) else None

    def final_crash(self, *, has_failed: bool) -> Crash | None:
        """Returns what faulthandler printed at its end."""
        return self.crashes[-1] if self.crashes and self.crashes[-1].is_end(has_failed=has_failed) else None


@dataclass
class RankEnd:
    """How a rank ended, by its launcher."""

    code: int
    line: LogLine
    pid: int = 0
    host: str = ""
    root: bool = False  # the first that the launcher saw fail
    reporter: Speaker | None = None  # speaker of the launcher's lines: of several nodes, each has a launcher
    stopped: bool = False  # by the launcher
    time: str = ""  # as torchrun's summary prints it, if it does


@dataclass
class LoggedJob:
    """What the output of a job has reported."""

    outputs: dict[Speaker | None, SpeakerOutput] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    unplaced: dict[str, RankEnd] = field(default_factory=dict)  # processes without a rank, by their names in the log
    events: ErrorLines = field(default_factory=ErrorLines)
    launch: tuple[str, ...] = ()  # the command that runs it under safelaunch
    files: set[str] = field(default_factory=set)  # each might be the output of a node
    labels: dict[str, set[int]] = field(default_factory=dict)  # other names in the lines of ranks
    rendezvous: Rendezvous | None = None
    rendezvous_at: LogLine | None = None
    native: int = 0  # number of frames of C functions
    xids: list[tuple[int, str, LogLine]] = field(default_factory=list)  # pid, number
    kills: dict[int, str] = field(default_factory=dict)  # the kernel's words, by pid
    ray_ranks: dict[str, int] = field(default_factory=dict)  # ranks of Ray's workers, by pid
    world: int = 0
    assumes_one_node: bool = False  # nothing shows others: local ranks count as ranks
    failed_speakers: set[Speaker | None] = field(
        default_factory=set
    )  # speakers whose launcher reports a failed process
    absent: set[int] = field(default_factory=set)
    first_ranks: dict[Speaker | None, int] = field(default_factory=dict)  # first rank of each node
    remarks: dict[str, str] = field(default_factory=dict)  # and the places of the first of each
    nccl_places: dict[str, tuple[int, int]] = field(default_factory=dict)  # size and rank in the largest communicator
    nccl_failed: LogLine | None = None
    nccl_messages: list[tuple[LogLine, str]] = field(
        default_factory=list
    )  # warnings, and the last error, of all speakers
    failed_hosts: dict[str, LogLine] = field(default_factory=dict)  # as Slurm reports them
    closed_by: dict[str, LogLine] = field(default_factory=dict)  # hosts that closed connections of others

    def process(self, speaker: Speaker | None, line: LogLine) -> SpeakerOutput:
        """Returns the record of a speaker; ``line`` is its first if there is none yet."""
        if (output := self.outputs.get(speaker)) is None:
            output = self.outputs.setdefault(
                speaker if len(self.outputs) < _MOST_SPEAKERS else None, SpeakerOutput(line)
            )
        return output

    def note_end(self, rank: int, code: int, line: LogLine, pid: int = 0) -> None:
        """Notes the end of a rank, unless one is known."""
        self.ends.setdefault(rank, RankEnd(code, line, pid, root=True))

    def note_unplaced(self, label: str, code: int, entry: LogEntry) -> None:
        """Notes the end of a process whose rank the line does not give."""
        if code and isinstance(entry.speaker, int) and not label:
            self.note_end(entry.speaker, of_shell(code), entry.line)
        elif code:
            self.unplaced.setdefault(label or str(entry.speaker or ""), RankEnd(of_shell(code), entry.line, root=True))

    def remark(self, text: str, line: LogLine) -> None:
        if len(self.remarks) < MOST_WARNINGS:
            self.remarks.setdefault(" ".join(text.split())[:_MOST_REMARK], line.where)

    def nodes(self) -> set[Speaker | None]:
        """Returns the speakers of several ranks: those of launchers, and of processes that have a local rank."""
        local = (name.partition(LOCAL)[0] for name in self.outputs if isinstance(name, str) and LOCAL in name)
        speakers = {*self.files, *self.failed_speakers, *(end.reporter for end in self.ends.values()), *local}
        tasks = {name for name in self.outputs if isinstance(name, str) and name.isdigit()}
        # If one of the tasks raises and is without a launcher, it is a rank, and so are all.
        return speakers - tasks if any(self.outputs[name].errors for name in tasks - speakers) else speakers

    def rank_of(self, name: str) -> int | None:
        """Returns the rank of a process or task, if a line gives it."""
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
        """If the last attempt raised nothing but effects, takes the errors of the one before it, which ended that."""
        if all(is_consequence(error) for output in self.outputs.values() for _, error in output.errors):
            for output in self.outputs.values():
                output.errors = [pair for pair in output.earlier if not is_consequence(pair[1])] or output.errors

    def accept_last_errors(self) -> bool:
        """Takes the last exception for the end of its process, though that printed more afterwards: no line shows that
        the job worked on. Returns False if there is none.
        """
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
        """Notes a failed rendezvous if the last line of an unnamed process is that it could not reach its store."""
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
    """Returns the code of a process of which a shell, or a container, reports 128 and the number of its signal."""
    return 128 - code if 128 < code < 160 else code


def was_terminated(code: int) -> bool:
    """Returns whether SIGTERM ended it, which a launcher sends to the others."""
    return of_shell(code) == -signal.SIGTERM


def local_label(node: str, local: str | int) -> str:
    """Returns the name of a process of which nothing but the local rank is known."""
    return f"local rank {local} of {node}" if node else f"local rank {local}"
