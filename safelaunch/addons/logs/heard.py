"""Records of what a job has printed: of a process, of an end that a launcher reports, and of the whole job.

Lines without a prefix have no rank until torchrun's summary names those that failed. Nothing is kept but what reports
an end, so that a log of any size takes little memory.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from dataclasses import dataclass, field

from safelaunch.addons.logs.events import Events
from safelaunch.addons.logs.lines import LOCAL, LogLine, Speaker, SpokenLine
from safelaunch.addons.logs.tracebacks import MOST_MESSAGE, After, Crash, OpenTraceback
from safelaunch.model import Frame, RankException, Rendezvous
from safelaunch.verdict.exceptions import is_consequence

MOST_WARNINGS = 40
_MOST_TAIL, _MOST_TRACEBACKS, _MOST_SPEAKERS, _MOST_REMARK = 60, 20, 1 << 16, 300
UNNAMED, DEFAULT = "", "0"  # names of groups


@dataclass
class WatchdogReport:
    """Report of a rank's watchdog about one group."""

    called: str = ""
    place: int | None = None
    seq: int = 0  # number of the call that timed out
    op: str = ""
    frames: list[Frame] = field(default_factory=list)  # innermost first
    size: int | None = None
    ms: int = 0
    queued: int = -1
    done: int = -1


@dataclass
class Heard:
    """Lines of one speaker that matter."""

    first: LogLine
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_TAIL))
    raised: list[tuple[OpenTraceback, RankException]] = field(default_factory=list)
    warnings: list[tuple[LogLine, str]] = field(default_factory=list)
    groups: dict[str, WatchdogReport] = field(default_factory=dict)
    watchdog: LogLine | None = None
    timed_out: bool = False  # its later exceptions are effects
    last: LogLine | None = None
    telling: LogLine | None = None  # reason of an abort
    opened: OpenTraceback | None = None
    before: str = ""  # the previous line
    node: str = ""  # or container
    after: After = field(default_factory=After)  # lines after the newest of ``raised``
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
        return self.raised[-1][0].line if self.raised else self.crashes[-1].line if self.crashes else None

    def fail(self, line: LogLine, kind: str, what: str) -> None:
        """Notes an error that a library prints and no traceback shows."""
        opened = OpenTraceback(line, [line.text], False, SpokenLine(line, line.text, None, timed=False))
        self.note(opened, RankException(kind, what, 0.0))

    def note(self, opened: OpenTraceback, raised: RankException) -> None:
        self.raised = [*self.raised[-_MOST_TRACEBACKS:], (opened, raised)]
        self.after = After.of(opened.lines[-1], self.tail)

    def absorb(self, other: Heard) -> None:
        """Adds lines of the same process that have another prefix."""
        if other.raised:
            self.raised, self.after = [*self.raised, *other.raised], other.after
        self.tail.extend(other.tail)
        self.crashes += other.crashes
        self.warnings += other.warnings
        self.hosts |= other.hosts

    def restart(self) -> None:
        """Drops its failures, which did not end the job."""
        self.raised, self.crashes, self.groups, self.watchdog, self.opened = [], [], {}, None, None
        self.timed_out = False

    def restart_after(self, number: int) -> None:
        """Keeps its failures before this line apart from those after it."""
        self.earlier += [pair for pair in self.raised if pair[0].line.number < number]
        self.raised = [pair for pair in self.raised if pair[0].line.number > number]
        self.crashes = [crash for crash in self.crashes if crash.line.number > number]

    def uncaught(self, *, ended: bool) -> tuple[OpenTraceback, RankException] | None:
        """Returns its last exception if that ended it.

        Args:
            ended: something else reports that its process has failed
        """
        return self.raised[-1] if self.raised and self.after.is_end(self.raised[-1][1], ended=ended) else None

    def crashed(self, *, ended: bool) -> Crash | None:
        """Returns what faulthandler printed at its end."""
        return self.crashes[-1] if self.crashes and self.crashes[-1].is_end(ended=ended) else None


@dataclass
class RankEnd:
    """How a rank ended, by its launcher."""

    code: int
    line: LogLine
    pid: int = 0
    host: str = ""
    root: bool = False  # the first that the launcher saw fail
    by: Speaker | None = None  # speaker of the launcher's lines: of several nodes, each has a launcher
    stopped: bool = False  # by the launcher
    time: str = ""  # as torchrun's summary prints it, if it does


@dataclass
class LoggedJob:
    """What the output of a job has reported."""

    heard: dict[Speaker | None, Heard] = field(default_factory=dict)
    ended: dict[int, RankEnd] = field(default_factory=dict)
    lost: dict[str, RankEnd] = field(default_factory=dict)  # processes without a rank, by their names in the log
    events: Events = field(default_factory=Events)
    launch: tuple[str, ...] = ()  # the command that runs it under safelaunch
    files: set[str] = field(default_factory=set)  # each might be the output of a node
    labels: dict[str, set[int]] = field(default_factory=dict)  # other names in the lines of ranks
    rendezvous: Rendezvous | None = None
    rendezvous_at: LogLine | None = None
    native: int = 0  # number of frames of C functions
    xids: list[tuple[int, str, LogLine]] = field(default_factory=list)  # pid, number
    kills: dict[int, str] = field(default_factory=dict)  # the kernel's words, by pid
    ranks: dict[str, int] = field(default_factory=dict)  # ranks of Ray's workers, by pid
    world: int = 0
    assumes_one_node: bool = False  # nothing shows others: local ranks count as ranks
    failed: set[Speaker | None] = field(default_factory=set)  # speakers whose launcher reports a failed process
    absent: set[int] = field(default_factory=set)
    first: dict[Speaker | None, int] = field(default_factory=dict)  # first rank of each node
    remarks: dict[str, str] = field(default_factory=dict)  # and the places of the first of each
    nccl_places: dict[str, tuple[int, int]] = field(default_factory=dict)  # size and rank in the largest communicator
    nccl_failed: LogLine | None = None
    nccl_told: list[tuple[LogLine, str]] = field(default_factory=list)  # warnings, and the last error, of all speakers
    failed_hosts: dict[str, LogLine] = field(default_factory=dict)  # as Slurm reports them
    closed_by: dict[str, LogLine] = field(default_factory=dict)  # hosts that closed connections of others

    def process(self, speaker: Speaker | None, line: LogLine) -> Heard:
        """Returns the record of a speaker; ``line`` is its first if there is none yet."""
        if (one := self.heard.get(speaker)) is None:
            one = self.heard.setdefault(speaker if len(self.heard) < _MOST_SPEAKERS else None, Heard(line))
        return one

    def end(self, rank: int, code: int, line: LogLine, pid: int = 0) -> None:
        """Notes the end of a rank, unless one is known."""
        self.ended.setdefault(rank, RankEnd(code, line, pid, root=True))

    def lose(self, label: str, code: int, said: SpokenLine) -> None:
        """Notes the end of a process whose rank the line does not give."""
        if code and isinstance(said.speaker, int) and not label:
            self.end(said.speaker, of_shell(code), said.line)
        elif code:
            self.lost.setdefault(label or str(said.speaker or ""), RankEnd(of_shell(code), said.line, root=True))

    def remark(self, text: str, line: LogLine) -> None:
        if len(self.remarks) < MOST_WARNINGS:
            self.remarks.setdefault(" ".join(text.split())[:_MOST_REMARK], line.where)

    def nodes(self) -> set[Speaker | None]:
        """Returns the speakers of several ranks: those of launchers, and of processes that have a local rank."""
        local = (name.partition(LOCAL)[0] for name in self.heard if isinstance(name, str) and LOCAL in name)
        found = {*self.files, *self.failed, *(one.by for one in self.ended.values()), *local}
        tasks = {name for name in self.heard if isinstance(name, str) and name.isdigit()}
        # If one of the tasks raises and is without a launcher, it is a rank, and so are all.
        return found - tasks if any(self.heard[name].raised for name in tasks - found) else found

    def rank_of(self, name: str) -> int | None:
        """Returns the rank of a process or task, if a line gives it."""
        node, _, local = name.partition(LOCAL)
        if local:
            first = self.first.get(node or None)
            return first + int(local) if first is not None else None
        said = self.labels.get(name, set())
        if len(said) == 1 and not any(said & others for label, others in self.labels.items() if label != name):
            return next(iter(said))
        if pid := re.search(r"pid=(\d+)(, ip=[\w.:]+)?", name):
            rank = self.ranks.get(pid[0].removeprefix("pid="), self.ranks.get(pid[1], -1))
            return rank if rank >= 0 else None
        return int(name) if name.isdecimal() and len(name) < 6 else None

    def remember_attempts(self) -> None:
        """If the last attempt raised nothing but effects, takes the errors of the one before it, which ended that."""
        if all(is_consequence(raised) for one in self.heard.values() for _, raised in one.raised):
            for one in self.heard.values():
                one.raised = [pair for pair in one.earlier if not is_consequence(pair[1])] or one.raised

    def end_with_the_last_error(self) -> bool:
        """Takes the last exception for the end of its process, though that printed more afterwards: no line shows that
        the job worked on. Returns False if there is none.
        """
        if self.events.finished:
            return False
        ends = {(error.line.file, error.line.number) for error in self.events.errors() if not error.since}
        raisers = [
            one
            for one in self.heard.values()
            if one.raised and (one.raised[-1][0].line.file, one.raised[-1][0].line.number) in ends
            if one.raised[-1][1].frames and one.after.lines <= MOST_MESSAGE
        ]
        for raiser in raisers:
            raiser.after = After()
        return bool(raisers)

    def give_up_meeting(self) -> None:
        """Notes a failed rendezvous if the last line of an unnamed process is that it could not reach its store."""
        one = self.heard.get(None)
        if self.rendezvous is None and one is not None and one.socket_at is one.last and not (one.raised or self.ended):
            self.rendezvous, self.rendezvous_at = Rendezvous(0, 0, store=one.socket.rstrip("."), error=""), one.last


def of_shell(code: int) -> int:
    """Returns the code of a process of which a shell, or a container, reports 128 and the number of its signal."""
    return 128 - code if 128 < code < 160 else code


def was_terminated(code: int) -> bool:
    """Returns whether SIGTERM ended it, which a launcher sends to the others."""
    return of_shell(code) == -signal.SIGTERM


def local_label(node: str, local: str | int) -> str:
    """Returns the name of a process of which nothing but the local rank is known."""
    return f"local rank {local} of {node}" if node else f"local rank {local}"
