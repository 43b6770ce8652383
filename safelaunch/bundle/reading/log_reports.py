"""What a job has printed of its end: tracebacks, watchdogs whose time was up, and how launchers saw their ranks end.

Lines without a prefix belong to nobody until torchrun's summary says who failed. Of all that a job prints only what
reports an end is kept, so that a log of any size takes little memory.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain

from safelaunch.bundle.reading.launch_line import best_launch
from safelaunch.bundle.reading.log_events import Events
from safelaunch.bundle.reading.log_lines import LITERALS, LOCAL, MAX_RANKS, Line, Said, Speaker
from safelaunch.bundle.reading.log_tracebacks import (
    BARE,
    BOXED,
    FATAL,
    HEAD,
    MOST_MESSAGE,
    SIGNALS,
    After,
    Crash,
    Traceback,
)
from safelaunch.model import Frame, RankException, Rendezvous
from safelaunch.verdict.exits import UNKNOWN_SIGNAL, is_consequence, one_line, signal_name
from safelaunch.verdict.reading import frames as fr
from safelaunch.verdict.reading import tracebacks
from safelaunch.verdict.reading.failures import fingerprints, last_abort, options_refused

_MOST_TAIL, _MOST_WARNINGS, _MOST_TRACEBACKS, _MOST_SPEAKERS = 60, 40, 20, 1 << 16

_OF_A_SUMMARY = re.compile(r" {1,3}traceback *: (?=Traceback \(most)")
_OF_A_CHILD = re.compile(r"-- Process (?P<rank>\d{1,6}) terminated with the following error")
_FRAME = re.compile(r' +File "[^"]+", line \d+(?:, in \S|$)')
# A launcher's, about a process that it has started.
_OF_A_PROGRAM = re.compile(r"Command '.{0,200}?(?:python|torchrun|accelerate|deepspeed)", re.IGNORECASE | re.DOTALL)
_STATUS_OF_A_PROGRAM = re.compile(r"died with <Signals\.(?P<name>SIG\w+)|exit status (?P<code>\d+)")
# What is no output of the script's own: of launchers, and of torch's log.
_NOT_OWN = re.compile(
    r"\s|\[?[IWEF]\d{3,4} |===|---|\[|Root Cause|Failures:|srun: |slurmstepd: |Exception (?:ignored|in thread)"
    r"|Killing subprocess |Exception raised from |frame #\d+: |$"
)
_NOT_OF_A_RANK = ("ChildFailedError", "SignalException", "KeyboardInterrupt")
_LAUNCHERS = (
    "/torch/distributed/run.py", "/torch/distributed/launcher/api.py", "/horovod/runner/launch.py",
    "/ray/_private/worker.py",
)  # fmt: skip
_OF_RAY = re.compile(r"ray\.exceptions\.RayTaskError\(\w+\): ray::.*?\(pid=(?P<pid>\d+)")  # what a worker has raised
# c10d's store, of torchrun's agents or of the ranks, does not answer.
_OF_RENDEZVOUS = re.compile(
    r"(?:while trying to connect to|failed to connect to|Connection to) \(?\[?(?P<host>[\w.-]+)\]?"
    r"[,:]+ ?(?P<port>\d{2,5})"
)
_NOT_MET = re.compile(rf"{_OF_RENDEZVOUS.pattern}|\b\d+/\d+ clients joined|failed to listen on any local network")
_LISTENS = re.compile(r"failed to listen on any local network address.*port: (?P<port>\d+)")
_OF_A_SOCKET = re.compile(
    r"\[c10d\] (?P<what>The (?:\w+ socket has failed|IPv\d network addresses of .* cannot be retrieved)"
    r".*\((?:errno: (?!97\b)|gai error).*)"
)
# GPUs that are lost or broken; other numbers are mostly the application's own.
_XID = re.compile(r"NVRM: Xid \(.*\): (?P<number>48|79|94|95|119), pid='?(?P<pid>\d+)")
_LAUNCHER_PID = re.compile(r"[EW]\d{4} [\d:.]+ (?P<pid>\d+) ")
_KILLED_BY_LAUNCHER = re.compile(r"Unable to shutdown process (?P<pid>\d+) via")
_CLOSING = re.compile(r"Sending process (?P<pid>\d+) closing signal")
_CLOSED_BY = re.compile(r"NCCL WARN .*(?:remote peer|recv from|send to|from peer) (?P<host>[\w.-]+)<\d+>")
_ON_HOST = re.compile(
    r"(?P<prefix>[\w.-]+):\d+:\d+ \[\d+\] |.*\b(?:on|host(?:name)?|node)[=:]? (?P<host>(?=[\w.-]*\d)[\w.-]+)(?=[ ,)]|$)"
)
_NODE_FAILED = re.compile(r"[Nn]ode failure on (?P<host>[\w.-]+)")
_STEP = re.compile(
    r"\b(?P<word>[Ss]tep|[Ii]t(?:er(?:ation)?)?|[Ee]poch|[Bb]atch)s?\b\W{0,4}(?P<number>\d{1,9})(?!\.\d)"
    r"|(?:\|| |:|\[|^) *(?P<done>\d{1,9})/\d{2,9}(?: |\]|$)"
)
_MOST_REMARK, _MOST_COMMAND = 300, 1 << 14
_REMARKS = re.compile(
    r"slurmstepd: error: \*\*\* (?P<slurm>(?:JOB|STEP) .*)|(?P<xid>NVRM: Xid .*)"
    r"|(?P<bus>.*GPU has fallen off the bus.*)|error: (?P<oom>Detected \d+ oom[-_]kill event.*)"
    r"|(?P<ray>Worker PID: \d+ Worker exit type: .*|A worker died or was killed while executing task .*)"
    r"|\.cuh?:\d+: .*(?P<kernel>Assertion [`'].* failed)|(?P<stopped>Killing subprocess)(?= \d)"
)


_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+))?(?:(?:, )?OpType=(?P<op>\w+))?(?:, NumelIn=(?P<size>\d+))?(?:, NumelOut=\d+)?"
    r"(?:, Timeout\(ms\)=(?P<ms>\d+))?"
)
_GROUP = re.compile(
    r"PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<name>[^\s(]+)(?:\((?P<called>[^)]*)\))?)? Rank (?P<place>\d+)"
)
OF_NCCL = re.compile(r"(?:^|\s)(?P<process>[\w.-]+:(?P<pid>\d+)):\d+ \[")
_IN_NCCL = re.compile(rf"{OF_NCCL.pattern}.* comm 0x\w+ rank (?P<rank>\d{{1,6}}) nranks (?P<world>\d{{1,6}}) ")
# What NCCL returns to who calls it. A warning alone is none: it tries something else, or a peer ended before it.
_NCCL_FAILED = re.compile(
    r"\bnccl(?:\w+Error|Invalid\w+): |NCCL error: |NCCL error in: |NCCL INFO group\.cc:\d+ -> [1-6]\b"
)
_AT_WORK = re.compile(r"\bat (?:NCCL )?work(?: sequence id)?: (?P<seq>\d+)")
_WHOSE = re.compile(r"\[(?:[^\]]* )?Rank (?P<rank>\d{1,6})\]")
_STATUS = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<queued>-?\d+),(?: last started (?:NCCL )?work: (?P<started>-?\d+),)?"
    r" last completed (?:NCCL )?work: (?P<done>-?\d+)",
    re.IGNORECASE,
)
# Horovod names the tensors that a rank has not submitted; before 0.18, the ranks that have not submitted a tensor.
_NOT_SUBMITTED = re.compile(
    r"(?P<rank>\d{1,6})!?: \[(?P<tensors>[^\]]+)\]$"
    r"|(?:.*\s|Stalled ops:|^)(?P<tensor>\S+) \[missing ranks: (?P<ranks>\d+(?:, \d+)*)\]$"
)
_STACK = re.compile(r"#\d+ (?P<function>\S+) from (?P<file>.+):(?P<line>\d+)$")
_OPS = {
    "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip


UNNAMED, DEFAULT = "", "0"


@dataclass
class Group:
    """What a rank's watchdog has said of one group. ``seq``: of the call whose time was up."""

    called: str = ""
    place: int | None = None
    seq: int = 0
    op: str = ""
    frames: list[Frame] = field(default_factory=list)  # innermost first
    size: int | None = None
    ms: int = 0
    queued: int = -1
    done: int = -1


@dataclass
class Heard:
    """All that is kept of one speaker."""

    first: Line
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_TAIL))
    raised: list[tuple[Traceback, RankException]] = field(default_factory=list)
    warnings: list[tuple[Line, str]] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    watchdog: Line | None = None
    timed_out: bool = False  # what it raises afterwards are effects
    last: Line | None = None
    telling: Line | None = None  # that says why a process was aborted
    opened: Traceback | None = None
    before: str = ""
    node: str = ""  # or container
    after: After = field(default_factory=After)  # the newest of ``raised``
    crashes: list[Crash] = field(default_factory=list)
    block: dict[str, str] = field(default_factory=dict)  # of a launcher's summary
    block_at: Line | None = None
    block_root: bool = False
    earlier: list[tuple[Traceback, RankException]] = field(default_factory=list)  # before the launcher's restart
    heads: int = 0  # first lines of tracebacks
    hosts: set[str] = field(default_factory=set)  # names that may be its host's
    steps: dict[str, int] = field(default_factory=dict)  # by what it calls them, the highest that it printed
    socket_at: Line | None = None
    socket: str = ""  # what c10d last reported of a socket

    def fail(self, line: Line, kind: str, what: str) -> None:
        """With an error that a library prints and no traceback shows."""
        opened = Traceback(line, [line.text], False, Said(line, line.text, None, timed=False))
        self.note(opened, RankException(kind, what, 0.0))

    def note(self, opened: Traceback, raised: RankException) -> None:
        self.raised = [*self.raised[-_MOST_TRACEBACKS:], (opened, raised)]
        self.after = After.of(opened.lines[-1], self.tail)

    def absorb(self, other: Heard) -> None:
        """What lines say of the same process that have another prefix."""
        if other.raised:
            self.raised, self.after = [*self.raised, *other.raised], other.after
        self.tail.extend(other.tail)
        self.crashes += other.crashes
        self.warnings += other.warnings
        self.hosts |= other.hosts

    def uncaught(self, *, ended: bool) -> tuple[Traceback, RankException] | None:
        """``ended``: something else says that its process has failed."""
        return self.raised[-1] if self.raised and self.after.is_end(self.raised[-1][1], ended=ended) else None

    def crashed(self, *, ended: bool) -> Crash | None:
        """What faulthandler printed at its end."""
        return self.crashes[-1] if self.crashes and self.crashes[-1].is_end(ended=ended) else None


_EXIT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)")
# DeepSpeed names the command of its last process there, whichever has failed.
_DEEPSPEED = re.compile(r"launch\.py:\d+:sigkill_handler\].*exits with return code = (?P<code>-?\d+)")
# Lightning, Composer, mpirun, MPI
_IN_WORDS = re.compile(
    r"(?:\[rank: |Rank |process rank )(?P<rank>\d{1,5})(?:\] Child process .{0,40}terminated with code "
    r"| crashed with exit code | .{0,80}exited on (?P<signal>signal) )(?P<code>-?\d+)"
    r"|MPI_ABORT was invoked on rank (?P<aborts>\d{1,5}) in communicator MPI_COMM_WORLD"
    r"|has exited due to process rank (?P<aborted>\d{1,5})\b"
)
# Launchers of clusters, and libraries that watch their processes, in all their wordings: who ended, and how.
_DIED = re.compile(
    r"(?P<label>\b(?i:rank|task|process|worker|pid)\b)[ :=#]{1,2}\[?(?P<number>\d{1,9})\]?\)?[^\d\n]{0,60}?"
    r"(?:\b(?i:died|killed|terminated|exited|ended|failed|crashed|aborted|received|caught)\b)[^\d\n]{0,40}?"
    r"(?:(?P<signalled>signal:? ?|SIG(?P<name>[A-Z]{3,4})\b|-(?=\d+\b))(?P<signal>\d{1,2})?"
    r"|(?:code|status):? ?\(?(?P<code>-?\d{1,3})\b)"
)
# What a shell prints of its own child, kubectl of a container, Slurm of a step.
_KILLED = re.compile(
    r"(?:\S+: line \d+: +)?(?P<pid>\d+)? *(?P<how>Killed|Segmentation fault|Aborted|Bus error|Illegal instruction"
    r"|Floating point exception)(?: \(core dumped\))?(?:$| {2,})"
)
_OOM_KILLED = re.compile(r"\bOOM[ -]?Killed\b|Detected \d+ oom[-_]kill event", re.IGNORECASE)
_RAY_MEMORY = re.compile(r"where the task \(.*\bpid=(?P<pid>\d+).* was (?:running|killed)")
_CONTAINER_CODE = re.compile(r"\s*[Ee]xit [Cc]ode: +(?P<code>\d{1,3})$")
_NAMED = re.compile(r"\s*Process name: (?:\[\[\d+,\d+\],)?(?P<rank>\d{1,6})\]?$")  # mpirun, horovodrun
_NAMED_CODE = re.compile(r"\s*Exit code: +(?P<code>\d{1,3})$")
_MONITORED = re.compile(r"Ranks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier")
_OF_CUDA = re.compile(r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(?P<what>(?:CUDA|NCCL) error.*)")
_SPAWNED = re.compile(r"process (?P<rank>\d+) terminated with (?:signal (?P<signal>SIG\w+)|exit code (?P<code>\d+))")
_FIELD = re.compile(r" {1,3}(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_TASK_ENDED = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<how>[A-Z][\w ]+))"
)
_CANCELLED = re.compile(r"\*\*\* (?:JOB .* CANCELLED|STEP .* CANCELLED .* DUE TO )")
_SIGNALLED = re.compile(r"Process \d+ got signal: (?:Signals\.)?(?P<signal>\w+)")
_SENT_WHEN = {
    "SIGHUP": "which a terminal sends that closes, and which ends torchrun under nohup, too: tmux or setsid help",
    "SIGINT": "which Ctrl-C sends",
    "SIGTERM": "which a scheduler sends, or kill",
}
_STOPPING = re.compile(r"srun: (?:Terminating |Force Terminated |Job step aborted)|\*\*\* (?:JOB|STEP) .* CANCELLED")
_KERNEL_KILL = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+)")
_RESTART = re.compile(r"will restart worker group|Restarting worker group")
_RAY_RANK = re.compile(r"(?:ip=(?P<ip>[\w.:]+), )?pid=(?P<pid>\d+)\)[^)\n]{0,40}world_rank=(?P<rank>\d{1,5})\b")
_RAY_OWN_RANK = re.compile(r"env:// \[rank=(?P<rank>\d{1,5}), world_size=")  # of the worker that says so
_RAY_DEAD = re.compile(
    r"Worker PID: (?P<pid>\d+) Worker exit type: (?!INTENDED)"
    r"(?:.*[Ee]xit code:? (?P<code>\d+)|.*(?P<memory>low on memory))?"
)
_WORLD = re.compile(
    r"(?:world[ _]size\W{1,4}|\branks? \d+ (?:of|out of) |\bnproc[-_]per[-_]node[= ]|\bnum_processes[= ]|SLURM_NTASKS="
    r"|registered. Starting with )(?P<world>\d{1,6})\b",
    re.IGNORECASE,
)


def _of_shell(code: int) -> int:
    """128 and a signal's number is how a shell, or a container, reports a signal."""
    return 128 - code if 128 < code < 160 else code


def local_label(node: str, local: str | int) -> str:
    """What a process is called of which the local rank is all that is known."""
    return f"local rank {local} of {node}" if node else f"local rank {local}"


@dataclass
class Ended:
    """How a rank ended, by its launcher. ``root``: it was the first that the launcher saw fail. ``by``: whose lines say
    so: of several nodes each has its launcher. ``stopped``: by the launcher. ``time``: of torchrun's summary, as it
    printed it; "" where there is none.
    """

    code: int
    line: Line
    pid: int = 0
    host: str = ""
    root: bool = False
    by: Speaker | None = None
    stopped: bool = False
    time: str = ""


class Printed:
    def __init__(self) -> None:
        self.heard: dict[Speaker | None, Heard] = {}
        self.ended: dict[int, Ended] = {}
        self.lost: dict[str, Ended] = {}  # processes whose rank nothing gives, by what the log calls them
        self.events = Events()
        self.launch: tuple[str, ...] = ()  # the command that started it, as one that runs it under safelaunch
        self._command = ""  # what may be the beginning of that
        self.files: set[str] = set()  # that may each be a node's
        self._first_end: dict[str, Line] = {}  # of a launcher, by its pid: where it reported the first failure
        self.labels: dict[str, set[int]] = {}  # the ranks that lines with these names have, too
        self.rendezvous: Rendezvous | None = None
        self.rendezvous_at: Line | None = None
        self.xids: list[tuple[int, str, Line]] = []  # pid, number
        self.put_down: set[int] = set()  # pids that a launcher had to kill
        self.stopped: dict[Speaker | None, set[str]] = {}  # pids that a launcher of torch has stopped after a failure
        self.kills: dict[int, str] = {}
        self.ranks: dict[str, int] = {}  # of Ray's workers, by pid
        self.world = 0
        self.failed: set[Speaker | None] = set()  # in whose lines a launcher says that some process has
        self.absent: set[int] = set()
        self.first: dict[Speaker | None, int] = {}  # of a node's ranks
        self._local: list[tuple[int, Ended]] = []  # by local rank
        self._tasks: list[tuple[int, Ended]] = []  # of Slurm: ranks, where none of them is a launcher
        self.remarks: dict[str, str] = {}  # and where each stands first
        self.nccl_places: dict[str, tuple[int, int]] = {}  # of a process in its largest communicator: size, rank
        self._stalled: dict[str, set[int]] = {}  # tensors of Horovod: who has not submitted it
        self._stalled_at: Line | None = None
        self._since_stalled = 0
        self.nccl_failed: Line | None = None
        self.failed_hosts: dict[str, Line] = {}  # by Slurm's word
        self.closed_by: dict[str, Line] = {}  # hosts that closed connections of others
        self.nccl_told: list[tuple[Line, str]] = []  # warnings, and the last error, in whoever's lines
        self._cancelled = False  # from outside, before anything failed: what comes after it are effects
        self._stopping = False  # Slurm ends the other tasks of the step
        self._of_spawn: dict[int, Line] = {}  # processes whose tracebacks follow
        self._named: int | None = None  # the process that mpirun saw end first
        self._stack: Group | None = None  # whose stack the next lines may show

    def nodes(self) -> set[Speaker | None]:
        """Who speaks for several ranks: in whose lines a launcher does, or some that have a local rank."""
        local = (name.partition(LOCAL)[0] for name in self.heard if isinstance(name, str) and LOCAL in name)
        found = {*self.files, *self.failed, *(one.by for one in self.ended.values()), *local}
        tasks = {name for name in self.heard if isinstance(name, str) and name.isdigit()}
        # If one of the tasks raises and is without a launcher, it is a rank, and so are all.
        return found - tasks if any(self.heard[name].raised for name in tasks - found) else found

    def rank_of(self, name: str) -> int | None:
        """Whose lines those of a process or task are, where a line says so."""
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

    def hear(self, said: Said) -> None:
        one = self.heard.get(said.speaker)
        if one is None:
            speaker = said.speaker if len(self.heard) < _MOST_SPEAKERS else None
            one = self.heard.setdefault(speaker, Heard(said.line))
        text, one.last = said.text, said.line
        if said.label and isinstance(said.speaker, int):
            self.labels.setdefault(said.label, set()).add(said.speaker)
        opened = one.opened
        one.heads += text.startswith(HEAD)
        if one.opened is not None and not one.opened.take(text, timed=said.timed):
            self._close(one)
            if one.opened is not None and not one.opened.take(text, timed=said.timed):
                self._close(one)
        if one.opened is None:
            one.opened = self._opened(one, said)
            if one.opened is not None:
                one.opened.socket, one.opened.ignored = one.socket, one.before.startswith("Exception ignored")
            self._note_nccl(one, said)
        if said.speaker is not None and (made := _STEP.search(text)):
            word, number = (made["word"] or "%").lower(), int(made["number"] or made["done"])
            one.steps[word] = max(number, one.steps.get(word, 0))
        one.before = text
        end = one.raised[-1][0].line if one.raised else one.crashes[-1].line if one.crashes else said.line
        own = one.opened is None and end.file == said.line.file and not (said.timed or _NOT_OWN.match(text))
        if own:
            one.after.goes_on(text)
        self._since_stalled += own
        if own and isinstance(said.speaker, str) and None in self.heard:
            self._go_on(self.heard[None])
        if text.startswith(FATAL):
            one.crashes = [*one.crashes[-1:], Crash(said.line, [text])]
        elif one.crashes:
            one.crashes[-1].take(text, own=own)
        telling = any(literal in text for literal in LITERALS)
        self.events.hear(said, telling=telling and one.opened is None and opened is None)
        if one.opened is None or one.opened.state == "after":
            one.tail.append(text)
            self._note_form(one, said)
            if telling:
                self._note(one, said)

    def _go_on(self, unsigned: Heard) -> None:
        """Nodes print their own, so the job has survived what nobody has signed."""
        if unsigned.opened is not None and unsigned.opened.state in ("message", "after"):
            self._close(unsigned)
        unsigned.after.goes_on_as_usual()

    def _opened(self, one: Heard, said: Said) -> Traceback | None:
        text = said.text
        if self._cancelled:
            return None
        if of_summary := _OF_A_SUMMARY.match(text):
            rank = re.match(r"\d+", one.block.get("rank", ""))
            return Traceback(
                said.line, [text[of_summary.end() :]], False, said, int(rank[0]) if rank else None, indent="  "
            )
        if not (text.lstrip(" |+").startswith(HEAD) or BOXED.match(text)):
            if of_ray := _OF_RAY.match(text):
                return Traceback(said.line, [HEAD], False, said, pid=of_ray["pid"])
            if _FRAME.match(text):
                return Traceback(said.line, [HEAD, text], False, said, cut=True)
            if not one.raised and BARE.match(text):
                return Traceback(said.line, [HEAD, text], False, said, state="message", cut=True)
            return None
        thread = one.before.startswith(("Exception in thread", "Exception ignored"))
        of_child = _OF_A_CHILD.match(one.before)
        return Traceback(said.line, [text], thread, said, int(of_child["rank"]) if of_child else None)

    def _close(self, one: Heard, *, at_end: bool = False) -> None:
        opened, one.opened = one.opened, None
        if opened is None:
            return
        raised = opened.exception(opened.line.number * 1e-3, cut_off=at_end)
        if raised is None:
            return
        place = f" at {raised.frames[0].file}:{raised.frames[0].line}" if raised.frames else ""
        what = f"{raised.type}: {raised.message}" if raised.message else raised.type
        self.events.add("traceback", f"{what}{place}", opened.said, harmless=opened.ignored)
        if opened.thread:
            again = one.raised and (one.raised[-1][1].type, one.raised[-1][1].message) == (raised.type, raised.message)
            one.raised = one.raised[:-1] if again else one.raised
            return
        kind = raised.type.rpartition(".")[2]
        if of_ray := _OF_RAY.match(f"{raised.type}: {raised.message}"):
            one.opened = Traceback(opened.line, [HEAD], False, opened.said, pid=of_ray["pid"])
            return
        if kind.startswith("Rendezvous") or _NOT_MET.search(raised.message):
            self._note_rendezvous(raised, opened.line)
            if any(fr.normal(one.file).endswith(_LAUNCHERS) or "/elastic/" in one.file for one in raised.frames):
                return
        if kind != "ChildFailedError" and any(fr.normal(one.file).endswith(_LAUNCHERS) for one in raised.frames):
            said = f"{raised.type}: {raised.message}" if raised.message else raised.type
            self._remark(f"the launcher itself ended: {said}", opened.line)
            return
        if kind == "SignalException" and (sent := _SIGNALLED.match(raised.message)):
            name = sent["signal"] if not sent["signal"].isdigit() else signal_name(-int(sent["signal"]))
            self._remark(", ".join(filter(None, (f"torchrun got {name}", _SENT_WHEN.get(name)))), opened.line)
        if kind == "CalledProcessError" and _OF_A_PROGRAM.match(raised.message):
            if how := _STATUS_OF_A_PROGRAM.search(raised.message):
                code = int(how["code"] or -getattr(signal, how["name"] or "", 0))
                self._lose("a process of the launcher's", code, opened.said)
            self._remark(f"what was launched has failed: {raised.message}", opened.line)
            return
        if kind in _NOT_OF_A_RANK:
            return
        if raised.frames and fr.normal(raised.frames[0].file).endswith(
            "/torch/multiprocessing/spawn.py"
        ):  # of the ranks' parent
            if ended := _SPAWNED.search(raised.message):
                number = getattr(signal, ended["signal"] or "", 0)
                self.ended.setdefault(int(ended["rank"]), Ended(int(ended["code"] or -number), opened.line, root=True))
            return
        if absent := _MONITORED.search(raised.message):
            self.absent |= {rank for one in absent["ranks"].split(", ") if (rank := int(one)) < MAX_RANKS}
        if raised.type.startswith("ray.exceptions."):
            self._remark(f"Ray: {raised.type}: {raised.message}", opened.line)
            return
        if opened.pid:
            whose = next((name for name in self.heard if f"pid={opened.pid}" in str(name)), f"pid={opened.pid}")
            one = self.heard.setdefault(self.ranks.get(opened.pid, whose), Heard(opened.line))
        if opened.rank is not None and opened.rank < MAX_RANKS:
            one = self.heard.setdefault(opened.rank, Heard(opened.line))
        for rank, inner in tracebacks.gathered(raised.message).items():
            if (
                rank < MAX_RANKS and rank != opened.said.speaker
            ):  # what it raised, in the words of a rank that reports it
                its = self.heard.setdefault(rank, Heard(opened.line))
                inner_kind, _, words = inner.message.partition(": ")
                its.raised = its.raised or [
                    (opened, RankException(inner_kind, words, raised.time_unix_s, inner.frames))
                ]
        if not one.timed_out:
            one.note(opened, raised)

    def end(self) -> None:
        for speaker, one in list(self.heard.items()):
            self._close(one, at_end=True)
            self._end_block(one, speaker)
        self._remember_attempts()
        for rank, line in self._of_spawn.items():
            if rank not in self.heard or not self.heard[rank].raised:  # its end is not in the log
                self.ended.setdefault(rank, Ended(1, line, root=True))
        pids = {one.pid for one in self.ended.values()} - {0}
        for (
            by,
            stopped,
        ) in self.stopped.items():  # torchrun lists all processes of its node: those that failed, and others
            failed = {str(one.pid) for one in self.ended.values() if one.by == by} | {
                str(one.pid) for _, one in self._local if one.by == by
            }
            self.world = max(self.world, len(failed | stopped) - ("0" in failed))
        if not self._has_several_nodes():
            self.first.setdefault(None, 0)
        for local, ended in self._local:
            if ended.pid in pids:
                continue
            first = self.first.get(ended.by)
            own = self.heard.get(local)
            if first is not None or (own is not None and own.raised):  # a prefix gives the same number
                self.ended.setdefault((first or 0) + local, ended)
            else:
                name = f"{ended.by or ''}{LOCAL}{local}"
                self.lost.setdefault(name if name in self.heard else local_label(str(ended.by or ""), local), ended)
        for rank, ended in self._tasks:
            if self._local or self.first:
                self._remark(ended.line.text, ended.line)
            else:
                self.ended.setdefault(rank, ended)
        for ended in self.ended.values():
            ended.stopped |= ended.pid in self.put_down

    def _note_form(self, one: Heard, said: Said) -> None:
        """Parts of a summary or of a list, whose lines say nothing by themselves."""
        text = said.text
        if self._stack is not None and (found := _STACK.match(text)):
            self._stack.frames.append(Frame(found["file"], int(found["line"]), found["function"]))
        if (field := _FIELD.match(text)) is not None:
            one.block[field["name"]] = field["value"].strip()
            if field["name"] == "exitcode":
                one.block_at = said.line
        elif text.startswith(("[", "---", "===", "Root Cause")):
            self._end_block(one, said.speaker)
            one.block_root = text.startswith("Root Cause") or (one.block_root and not text.startswith("==="))
        self._command = f"{self._command}\n{text}" if self._command else text
        if not text.endswith("\\") or len(self._command) > _MOST_COMMAND:
            self.launch, self._command = best_launch(self.launch, self._command), ""
        if self._stalled_at is not None and (found := _NOT_SUBMITTED.match(text)):
            self._note_stalled(found)
        if (own := _RAY_OWN_RANK.search(text)) and (pid := re.search(r"pid=(\d+)", str(said.speaker))):
            self.ranks[pid[1]] = int(own["rank"])
        if found := _WORLD.search(text):
            self.world = max(self.world, min(int(found["world"]), MAX_RANKS))

    def _note(self, one: Heard, said: Said) -> None:
        text = said.text
        if (xid := _XID.search(text)) is not None:
            self.xids.append((int(xid["pid"]), xid["number"], said.line))
        if last_abort(text) is not None or "watchdog got stuck" in text or options_refused(text):
            one.telling = said.line
        one.timed_out |= said.speaker is not None and "Watchdog caught collective operation timeout" in text
        if "atchdog" in text or "enqueued" in text:
            self._stack = self._note_watchdog(one, said) or self._stack
        if found := _EXIT.search(text):
            if launcher := _LAUNCHER_PID.match(text):
                self._note_restart(launcher["pid"], said.line)
            ended = Ended(int(found["code"]), said.line, int(found["pid"]), root=True, by=said.speaker)
            self._local.append((int(found["rank"]), ended))
        if found := _DEEPSPEED.search(text):
            self.failed.add(said.speaker)
            self.remarks.pop("Killing subprocess", None)  # this says why
            self._lose("" if said.speaker else "a process of DeepSpeed's", int(found["code"]), said)
        if (found := _OF_A_CHILD.match(text)) and int(found["rank"]) < MAX_RANKS:
            self._of_spawn.setdefault(int(found["rank"]), said.line)
        if found := _IN_WORDS.search(said.line.text):
            code = int(found["code"] or 1) * (-1 if found["signal"] else 1)
            self.ended.setdefault(
                int(found["rank"] or found["aborts"] or found["aborted"]), Ended(code, said.line, root=True)
            )
        if found := _NAMED.match(text):
            self._named = int(found["rank"])
        elif self._named is not None and (found := _NAMED_CODE.match(text)) and self._named < MAX_RANKS:
            self.ended.setdefault(self._named, Ended(int(found["code"]), said.line, root=True))
        if found := _OF_CUDA.search(text):
            one.fail(said.line, "RuntimeError", found["what"])
        if found := _TASK_ENDED.search(text):
            self._note_tasks(found, said.line)
        elif found := _DIED.search(text):
            self._note_died(found, said.line)
        elif found := _KILLED.match(text):
            self._lose(f"process {found['pid']}" if found["pid"] else "", -SIGNALS[found["how"]], said)
        elif _OOM_KILLED.search(text):
            pod = next((label for label in self._pods() if text.split()[:1] == [label.split("/")[1]]), "")
            self._lose(pod, -signal.SIGKILL, said)
        elif found := _RAY_MEMORY.search(text):
            self._lose(f"process {found['pid']}", -signal.SIGKILL, said)
        elif (found := _CONTAINER_CODE.match(text)) and self._named is None:
            self._lose("", int(found["code"]), said)
        if found := _KILLED_BY_LAUNCHER.search(text):
            self.put_down.add(int(found["pid"]))
        if found := _CLOSING.search(text):
            self.stopped.setdefault(said.speaker, set()).add(found["pid"])
        if found := _OF_A_SOCKET.search(text):
            one.socket, one.socket_at = found["what"], said.line
        if "Detected mismatch between coll" in text:
            self._note_compared(one, said)
        self._cancelled = self._cancelled or _CANCELLED.search(text) is not None
        self._stopping = self._stopping or _STOPPING.search(text) is not None
        if found := _KERNEL_KILL.search(text):
            self.kills[int(found["pid"])] = text.strip()
        if found := _RAY_RANK.search(text):
            rank = int(found["rank"])
            other = self.ranks.get(found["pid"], rank) != rank  # on another host
            self.ranks[found["pid"]] = -1 if other else rank
            self.ranks[f"{found['pid']}, ip={found['ip']}"] = rank
        if found := _RAY_DEAD.search(text):
            code = int(found["code"] or (-signal.SIGKILL if found["memory"] else UNKNOWN_SIGNAL))
            ended = Ended(code, said.line, int(found["pid"]), root=True)
            if found["pid"] in self.ranks:
                self.ended.setdefault(self.ranks[found["pid"]], ended)
            else:
                self.lost.setdefault(f"process {found['pid']}", ended)
        if found := _REMARKS.search(text):
            self._remark(next(filter(None, found.groups())), said.line)
        if "orker group" in text and _RESTART.search(text):
            self._begin_anew()
        if "by subset of ranks and are waiting for remainder of ranks" in text:
            self._stalled, self._stalled_at = {}, said.line

    def _remember_attempts(self) -> None:
        """If all that the last attempt raised is the effect of something, that is what ended the one before it."""
        if all(is_consequence(raised) for one in self.heard.values() for _, raised in one.raised):
            for one in self.heard.values():
                own = [pair for pair in one.earlier if not is_consequence(pair[1])]
                one.raised = own or one.raised

    def _has_several_nodes(self) -> bool:
        """Something shows that the launcher's processes are not all of the job."""
        stopped = self.stopped.get(None, set()) | {str(one.pid) for _, one in self._local if one.by is None}
        ranks = [rank for rank in self.heard if isinstance(rank, int)]
        asked = re.search(r"--?nnodes[= ](?!1\b)|--?node[-_]rank", " ".join(self.launch))
        return bool(asked or self.files or self._tasks) or max([self.world, *(rank + 1 for rank in ranks)]) > len(
            stopped
        )

    def _note_restart(self, launcher: str, line: Line) -> None:
        """A launcher that reports a second failure has started its ranks again after the first."""
        if (before := self._first_end.get(launcher)) is not None and before.file == line.file:
            for one in [*self.heard.values()]:
                self._close(one)
                one.earlier += [pair for pair in one.raised if pair[0].line.number < before.number]
                one.raised = [pair for pair in one.raised if pair[0].line.number > before.number]
                one.crashes = [crash for crash in one.crashes if crash.line.number > before.number]
            self._local = [(rank, ended) for rank, ended in self._local if ended.line != before]
            self.stopped.clear()
        self._first_end[launcher] = line

    def _note_died(self, found: re.Match[str], line: Line) -> None:
        number, name = int(found["number"]), found["name"]
        if found["code"]:
            code = int(found["code"])
        elif found["signal"] or name:
            code = -int(found["signal"] or getattr(signal, f"SIG{name}", 0))
        else:
            return
        if not code:
            return
        ended = Ended(_of_shell(code), line, root=True)
        label = found["label"].lower()
        if label in ("rank", "task") and number < MAX_RANKS:
            self.ended.setdefault(number, ended)
        else:
            self.lost.setdefault(f"{'process' if label == 'pid' else label} {number}", ended)

    def _lose(self, label: str, code: int, said: Said) -> None:
        """A process has ended of which the line gives no rank."""
        if code and isinstance(said.speaker, int) and not label:
            self.ended.setdefault(said.speaker, Ended(_of_shell(code), said.line, root=True))
        elif code:
            self.lost.setdefault(label or str(said.speaker or ""), Ended(_of_shell(code), said.line, root=True))

    def _note_compared(self, one: Heard, said: Said) -> None:
        """What torch's own check reports, in a line of a logger. The other rank that it names is one of the job's."""
        message = said.text[said.text.index("Detected mismatch between coll") :]
        ranks = [rank for rank in fingerprints(message) if rank < MAX_RANKS]
        if not ranks:
            return
        own, *others = ranks
        if not isinstance(said.speaker, int):
            one = self.heard.setdefault(own, Heard(said.line))
        one.fail(said.line, "RuntimeError", message)
        for rank in others:
            self.heard.setdefault(rank, Heard(said.line))

    def _pods(self) -> list[str]:
        return [name for name in (*self.heard, *self.labels) if isinstance(name, str) and name.startswith("pod/")]

    def _note_rendezvous(self, raised: RankException, line: Line) -> None:
        """Processes did not meet; the store where they were to do so may not answer."""
        found = _OF_RENDEZVOUS.search(raised.message) or _OF_RENDEZVOUS.search(raised.text)
        known = self.rendezvous
        if known is None or (found and not known.store):
            store = f"the store at {found['host']}:{found['port']} did not answer" if found else ""
            if listens := _LISTENS.search(raised.message):
                store = f"torchrun's store could not listen on port {listens['port']}"
            lines = [text for text in raised.text.splitlines() if found and found[0] in text]
            error = one_line(lines[-1] if lines else f"{raised.type.rpartition('.')[2]}: {raised.message}").rstrip(".")
            self.rendezvous, self.rendezvous_at = Rendezvous(0, 0, store=store, error=error), line

    def give_up_meeting(self) -> None:
        """The last that is heard of an unnamed process is that it could not reach or bind its store."""
        one = self.heard.get(None)
        if self.rendezvous is None and one is not None and one.socket_at is one.last and not (one.raised or self.ended):
            self.rendezvous, self.rendezvous_at = (
                Rendezvous(0, 0, store=one.socket.rstrip("."), error=""),
                one.socket_at,
            )

    def _note_stalled(self, found: re.Match[str]) -> None:
        self._since_stalled = 0
        for tensor in (found["tensor"] or found["tensors"].removesuffix(" ...")).split(", "):
            ranks = (int(rank) for rank in (found["rank"] or found["ranks"]).split(", "))
            self._stalled.setdefault(tensor, set()).update(rank for rank in ranks if rank < MAX_RANKS)

    def give_stalls(self, ranks: dict[int, Heard]) -> tuple[int, ...]:
        """Of Horovod's tensors that lack the same ranks, one stands for all: a group whose others wait in a call.
        Returns the ranks that Horovod has named.
        """
        if self._stalled_at is None or not self._stalled or self._since_stalled > MOST_MESSAGE:
            return ()
        alike = {frozenset(lack): tensor for tensor, lack in reversed(self._stalled.items())}
        self.world = max(self.world, *(rank + 1 for rank in (*ranks, *self.ended, *chain(*alike))))
        self.world += len(max(alike, key=len)) == self.world  # somebody has submitted it
        for rank in range(self.world):
            one = ranks.setdefault(rank, Heard(self._stalled_at))
            one.watchdog = one.watchdog or self._stalled_at
            frames = next((raised.frames for _, raised in one.raised if is_consequence(raised)), None)
            if frames is not None:  # a shutdown has ended its wait
                one.raised, one.timed_out = [], True
            for lack, tensor in alike.items():
                submitted, name = rank not in lack, tensor.rpartition("/")[2]
                one.groups[tensor] = Group("", rank, int(submitted), name, [*(frames or ())])
        return tuple(range(self.world))

    def uneven_steps(self, ranks: dict[int, Heard], known: Collection[int]) -> dict[int, int | None]:
        """The last step that each rank printed, if most printed the same one and others, which printed something, did
        not come to it.
        """
        counts = Counter(word for rank in known if rank in ranks for word in ranks[rank].steps)
        if not counts:
            return {}
        word = counts.most_common(1)[0][0]
        made = {rank: ranks[rank].steps.get(word, -1) for rank in known if rank in ranks and not ranks[rank].raised}
        last = max(made.values(), default=-1)
        ahead = [rank for rank, number in made.items() if number == last]
        if len(ahead) < 2 or len(ahead) == len(made) or 2 * len(ahead) <= max(len(made), self.world):
            return {}
        return {rank: number if number >= 0 else None for rank, number in made.items()}

    def _note_nccl(self, one: Heard, said: Said) -> None:
        if _NCCL_FAILED.search(said.text):
            self.nccl_failed = self.nccl_failed or said.line
        if " nranks " in said.text and (found := _IN_NCCL.search(said.text)):
            size, rank = min(int(found["world"]), MAX_RANKS), int(found["rank"])
            self.world = max(self.world, size)
            if size > self.nccl_places.get(found["process"], (0, 0))[0] and rank < MAX_RANKS:
                self.nccl_places[found["process"]] = size, rank
        if found := _ON_HOST.match(said.text):
            one.hosts.add(found["prefix"] or found["host"])
        if failed := _NODE_FAILED.search(said.text):
            self.failed_hosts.setdefault(failed["host"], said.line)
        if closed := _CLOSED_BY.search(said.text):
            self.closed_by.setdefault(closed["host"], said.line)
        _, warns, words = said.text.partition("NCCL WARN ")
        words = said.text if one.before.startswith("Last error:") else words
        if words and len(self.nccl_told) < _MOST_WARNINGS:
            self.nccl_told.append((said.line, words))
        if warns and len(one.warnings) < _MOST_WARNINGS:
            one.warnings.append((said.line, words.strip()))

    def _remark(self, text: str, line: Line) -> None:
        if len(self.remarks) < _MOST_WARNINGS:
            self.remarks.setdefault(" ".join(text.split())[:_MOST_REMARK], line.where)

    def _begin_anew(self) -> None:
        """torchrun starts the ranks again: what ended them before did not end the job."""
        for one in self.heard.values():
            one.raised, one.crashes, one.groups, one.watchdog, one.opened = [], [], {}, None, None
            one.timed_out = False
        self._stalled.clear()
        self.ended.clear()
        self._local.clear()

    def _end_block(self, one: Heard, speaker: Speaker | None) -> None:
        """One failure of torchrun's summary is complete."""
        block, one.block = one.block, {}
        rank = re.match(r"(\d+)", block.get("rank", ""))
        code = re.match(r"(-?\d+)(?: +\(pid: (\d+)\))?", block.get("exitcode", ""))
        if rank and code and int(rank[1]) < MAX_RANKS:
            at, host = one.block_at or one.first, block.get("host", "")
            ended = Ended(
                int(code[1]), at, int(code[2] or 0), host, one.block_root, speaker, time=block.get("time", "")
            )
            self.ended[int(rank[1])] = ended
            if local := re.search(r"local_rank: (\d+)", block["rank"]):
                self.first[speaker] = int(rank[1]) - int(local[1])

    def _note_tasks(self, found: re.Match[str], line: Line) -> None:
        code = int(found["code"]) if found["code"] else -SIGNALS.get((found["how"] or "").strip(), 0)
        for part in found["tasks"].split(","):
            first, _, last = part.partition("-")
            for task in range(int(first or 0), min(int(last or first or 0), MAX_RANKS) + 1) if code else ():
                stopped = code in (143, -15) or self._cancelled or (self._stopping and found["how"] == "Killed")
                ended = Ended(code, line, host=found["host"], root=not (stopped or self._stopping), stopped=stopped)
                self._tasks.append((task, ended))

    def _note_watchdog(self, one: Heard, said: Said) -> Group | None:
        """Older watchdogs name the group behind the call only, and rank and process not at all where torch puts no
        prefix before its lines: then the rank in the group is the best there is.
        """
        group, work, status = (pattern.search(said.text) for pattern in (_GROUP, _WORK, _STATUS))
        if work is None and status is None:
            return None
        whose = _WHOSE.search(said.text) if not isinstance(said.speaker, int) else None
        if whose is not None:
            everybody = group is None or (group["name"] or group["id"]) == DEFAULT or group["called"] == "default_pg"
            place, called = int(whose["rank"]), (group["called"] or group["name"] or group["id"]) if group else ""
            key: Speaker = place if everybody else f"rank {place} of group {called}"
            one = self.heard.setdefault(key, Heard(said.line))
            one.tail.append(said.text)
        one.watchdog = one.watchdog or said.line
        name = (group["name"] or group["id"]) if group else UNNAMED
        at_work = _AT_WORK.search(said.text) if status else None
        unnamed = one.groups.get(UNNAMED)
        if group and unnamed is not None and at_work is not None and int(at_work["seq"]) == unnamed.seq:
            one.groups.setdefault(name, one.groups.pop(UNNAMED))
        mine = one.groups.setdefault(name, Group())
        if group:
            mine.called, mine.place = group["called"] or "", int(group["place"])
        if work and not mine.op:
            op = work["op"] or ""
            mine.seq, mine.op, mine.ms = int(work["seq"] or 0), _OPS.get(op, op.lower()), int(work["ms"] or 0)
            mine.size = int(work["size"]) if work["size"] else None
        if status:
            mine.queued, mine.done = int(status["queued"]), int(status["done"])
            mine.seq = mine.seq or (int(at_work["seq"]) if at_work is not None else 0)
            if mine.queued > mine.done:  # a stream completes its works in their order
                mine.seq = mine.seq or mine.done + 1
        return mine if not mine.frames else None
