"""Reads the output of a job, whoever launched it, as evidence: whose each line is, and what it reports.

Launchers put prefixes before lines, one around another: ``[rank3]:``, ``[default3]:``, `` 3: `` of ``srun -l``,
``[1,3]<stderr>:`` of ``mpirun``, ``(Worker pid=…)`` of Ray, ``[pod/…]`` of ``kubectl``. They are taken off one at a
time, the rank's own number counts most, and lines without any belong to nobody until torchrun's summary says who
failed.

Of all that a job prints only what reports an end is kept, so that a log of any size takes little memory.
"""

from __future__ import annotations

import codecs
import gzip
import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from msgspec import structs

from safelaunch.bundle.reading.guard import Found, Unreadable, cannot_be_read
from safelaunch.model import (
    UNKNOWN_SIZES,
    Collective,
    Evidence,
    FlightRecord,
    Frame,
    GroupStatus,
    MemoryKills,
    NcclLog,
    Outcome,
    RankEvidence,
    RankException,
    RankExit,
)
from safelaunch.verdict.exits import is_consequence
from safelaunch.verdict.reading import frames as fr
from safelaunch.verdict.reading import tracebacks
from safelaunch.verdict.reading.failures import fingerprints, last_abort

MAX_RANKS = 1 << 16
CHUNK_BYTES = 1 << 20
MOST_LINE = 1 << 14  # characters
_MOST_TAIL, _MOST_WARNINGS, _MOST_TRACEBACKS, _MOST_SPEAKERS = 60, 40, 20, 1 << 16
_MOST_MESSAGE, _MOST_SINCE, _MOST_LINES = 12, 40, 2000

# --- lines ------------------------------------------------------------------------------------------------------------

# What some line has in it that reports an end. The parts of a file that have none of these are not looked at.
_TELLING = (
    b"Traceback (most", b'  File "', b"atchdog", b"NCCL WARN", b"exitcode", b"srun: error", b"slurmstepd", b"illed",
    b"terminate called", b"orld_rank", b"enqueued", b"atal", b"corrupt", b"what():", b"Xid", b"ut of memory",
    b"orker group", b"CANCELLED", b"return code",
)  # fmt: skip
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")


@dataclass(frozen=True)
class _Line:
    file: str
    number: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"


STDIN = Path("/dev/stdin")
GZIP = b"\x1f\x8b"
_NAMES = re.compile(r"\.(?:log|out|err|txt|json)(?:\.gz)?$|^std(?:out|err)$|^log", re.IGNORECASE)
_DEEPEST, _MOST_FILES = 6, 4096


def is_log(path: Path) -> bool:
    """A regular file of text, perhaps compressed, that is no archive; or standard input. Raises OSError."""
    if path == STDIN:
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(1 << 12)
    if head.startswith(GZIP):
        with suppress(OSError, EOFError), gzip.open(path) as packed:
            head = packed.read(1 << 12)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    damaged = head.decode("utf-8", "replace").count("\ufffd")
    return b"\0" not in head and not head.startswith((GZIP, b"{", b"BZh", b"\xfd7zXZ")) and 5 * damaged <= len(head)


def logs_in(folder: Path) -> list[Path]:
    """The files of text below ``folder`` that are called as logs are; of torchrun's tree those of the last attempt."""
    found: dict[Path, int] = {}
    for path in islice(_below(folder, _DEEPEST), _MOST_FILES):
        if _NAMES.search(path.name) and is_log(path):
            tree = _IN_TREE.search(str(path))
            found[path] = int(tree["attempt"]) if tree else -1
    last = max(found.values(), default=-1)
    return sorted(path for path, attempt in found.items() if attempt in (-1, last))


def _below(folder: Path, deepest: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.is_file():
            yield path
        elif deepest and path.is_dir():
            yield from _below(path, deepest - 1)


def _opened(path: Path) -> BinaryIO:
    file = path.open("rb")
    packed = file.peek(2).startswith(GZIP)
    return gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[return-value]


def _lines(path: Path, name: str) -> Iterator[_Line | None]:
    """The lines of a file that may matter; None between two that are not neighbours."""
    number, rest, open_still = 0, b"", True
    with _opened(path) as file:
        begin = file.read(CHUNK_BYTES)
        wide = begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        decode = codecs.getincrementaldecoder("utf-16" if wide else "utf-8")("replace").decode
        chunk, first = begin, True
        while chunk:
            following = file.read(CHUNK_BYTES)
            if wide:
                text = decode(chunk)
                chunk = text.encode()
            whole, at = rest + chunk, len(rest + chunk) if not following else (rest + chunk).rfind(b"\n") + 1
            part, rest = whole[:at], whole[at:][-MOST_LINE:]
            telling = first or not following or open_still or any(needle in part for needle in _TELLING)
            if telling:
                for line in part.removesuffix(b"\n").split(b"\n"):
                    number += 1
                    yield _Line(name, number, _clean(line[-MOST_LINE:] if b"\r" in line else line[:MOST_LINE]))
            else:
                number += part.count(b"\n")
                yield None
            open_still = b'  File "' in part[-4096:] or b"\xe2\x94\x82" in part[-4096:]  # a box of rich's
            chunk, first = following, False


def _clean(line: bytes) -> str:
    """Without colours; of a progress bar, what it shows last."""
    text = line.decode("utf-8", "replace").rstrip()
    if "\r" in text:
        text = text.rpartition("\r")[2]
    return _COLOURS.sub("", text) if "\x1b" in text else text


# --- whose line it is -------------------------------------------------------------------------------------------------

Speaker = int | str  # a rank, or what stands for one: a process or a container

_TIME = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: (?:stderr|stdout) [FP])? ?"
)
# Pattern, and how much the number in it is worth as a rank: 3 the rank's own, 1 one that is as a rule, 0 none.
_PREFIXES: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"\[rank(?P<rank>\d{1,6})\]: ?"), 3),
    (re.compile(r"\[\d+,(?P<rank>\d{1,6})\](?:<std(?:err|out|diag)>)?: ?"), 2),
    (re.compile(r"\[(?P<role>[A-Za-z_]{1,40})(?P<rank>\d{1,6})\]: ?"), 1),
    (re.compile(r"\((?P<name>\w+(?: rank=\d+)?,? ?pid=\d+(?:, ip=[\w.:]+)?)\) ?"), 0),
    (re.compile(r"\[(?P<name>pod/[^\]\s]+)\] ?"), 0),
)
_TASK = re.compile(r" {0,6}(?P<rank>\d{1,6}): ?")
_IN_NAME = re.compile(r"rank[_-]?(?P<rank>\d{1,6})(?!\d)|_t?(?P<task>\d{1,6})\.(?:out|err|log|txt)(?:\.gz)?$")
_IN_TREE = re.compile(r"attempt_(?P<attempt>\d+)/(?P<rank>\d{1,6})/std(?:err|out)\.log$")


@dataclass(frozen=True)
class _Said:
    """A line without its prefixes. ``timed``: there was a time among these; ``sure``: torch's own of a rank."""

    line: _Line
    text: str
    speaker: Speaker | None
    timed: bool
    sure: bool


@dataclass
class _Names:
    """Whose lines a file's are. ``tasks``: ``srun -l`` has put a number before each."""

    of_file: Speaker | None
    tasks: bool

    def said(self, line: _Line) -> _Said:
        text, found, worth, timed = line.text, self.of_file, 0, False
        for _ in range(6):
            taken = False
            if self.tasks and (match := _TASK.match(text)):
                found, worth = (int(match["rank"]), 1) if worth < 1 else (found, worth)
                text, taken = text[match.end() :], True
            elif text[:1] in "[(0123456789":
                if match := _TIME.match(text):
                    text, taken, timed = text[match.end() :], True, True
                for pattern, value in _PREFIXES:
                    if match := pattern.match(text):
                        number = match.groupdict().get("rank")
                        name: Speaker = int(number) if number is not None else match["name"]
                        if (value > worth or found is None) and (isinstance(name, str) or name < MAX_RANKS):
                            found, worth = name, value
                        text, taken = text[match.end() :], True
                        break
            if not taken:
                break
        return _Said(line, text, found, timed, worth > 2)


def rank_of_name(name: str) -> int | None:
    """Whose file that is, by its name."""
    tree, inside = _IN_TREE.search(name), _IN_NAME.search(name)
    if tree:
        return int(tree["rank"])
    return int(inside["rank"] or inside["task"]) if inside else None


def _has_tasks(lines: Sequence[str]) -> bool:
    """Nearly all of them begin with a small number and a colon."""
    full = [line for line in lines if line.strip()]
    return len(full) >= 3 and sum(_TASK.match(line) is not None for line in full) > 0.9 * len(full)


# --- what it reports --------------------------------------------------------------------------------------------------

_HEAD = "Traceback (most recent call last):"
_BOXED = re.compile(r"[╭┌+][─-]+ *Traceback \(most recent call last\)")  # as rich draws it
_FRAME_IN_BOX = re.compile(r"[│|] (?P<file>\S.*?):(?P<line>\d{1,9}) in (?P<function>\S+) *[│|]?$")
_OF_A_SUMMARY = re.compile(r" {1,3}traceback *: (?=Traceback \(most)")
_OF_A_CHILD = re.compile(r"-- Process (?P<rank>\d{1,6}) terminated with the following error")
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_NEW = re.compile(
    r"Traceback \(most|\[?[IWEF]\d{3,4} |-- Process |\d{4}-\d\d-\d\d|=====|-----|Exception (?:ignored|in thread)"
)
_GOES_ON = re.compile(r"nccl\w+Error|Last error:|[\w.]+: Connect to |[\w:]+Error: ")  # of NCCL's messages
_ERROR = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
_OF_SUMMARY = ("  ", "===", "---", "[", "Root Cause", "Failures:")
_NOT_OF_A_RANK = ("ChildFailedError", "SignalException")
_LAUNCHERS = ("/torch/distributed/run.py", "/torch/distributed/launcher/api.py")
_MOST_REMARK = 300
_REMARKS = re.compile(
    r"slurmstepd: error: \*\*\* (?P<slurm>(?:JOB|STEP) .*)|(?P<xid>NVRM: Xid .*)"
    r"|(?P<bus>.*GPU has fallen off the bus.*)|error: (?P<oom>Detected \d+ oom[-_]kill event.*)"
)


@dataclass
class _Open:
    """A traceback that is being read."""

    line: _Line
    lines: list[str]
    thread: bool
    said: _Said
    rank: int | None = None  # whose it is, as a line before it says
    indent: str = ""
    state: str = "frames"  # message | original | after | chain
    at: int = 0  # where the traceback that counts begins: the last of a chain
    rest: int = 0

    def take(self, text: str, *, timed: bool) -> bool:
        """Whether the line belongs to it. A time before it that the first line had not: it is another message."""
        if timed and not self.said.timed and self.state != "frames":
            return False
        if len(self.lines) >= _MOST_LINES:
            return False
        text = text.removeprefix(self.indent)
        indented = text.startswith((" ", "\t", "│", "|", "╭", "╰"))
        if self.state in ("frames", "original"):
            self.state = self.state if indented else "message"
        elif self.state == "message":
            if text.startswith("Original Traceback"):
                self.state = "original"
            elif not text.strip():
                self.state = "after"
            elif _NEW.match(text) or self.rest >= _MOST_MESSAGE or not (self.said.sure or _GOES_ON.match(text)):
                return False
            self.rest += 1
        elif text.startswith(_CHAIN):
            self.state = "chain"
        elif text.startswith(_HEAD) and self.state == "chain":
            self.state, self.at, self.rest = "frames", len(self.lines), 0
        elif text.strip():
            return False
        self.lines.append(text)
        return True

    def exception(self, at_s: float) -> RankException | None:
        lines = self.lines[self.at + 1 :]
        if _BOXED.match(self.lines[self.at]):
            boxed = (_FRAME_IN_BOX.match(line) for line in lines)
            frames = [f'  File "{one["file"]}", line {one["line"]}, in {one["function"]}' for one in boxed if one]
            lines = [*frames, *(line for line in lines if line and not line.startswith(("│", "|", "╭", "╰", " ")))]
        found = tracebacks.parse(lines)
        if found is None or not (error := _ERROR.match(found.message)):
            return None
        begin = self.lines.index(found.message, self.at)
        message = "\n".join([error["message"] or "", *self.lines[begin + 1 :]]).strip()
        return RankException(error["type"], message, at_s, found.frames, "\n".join(self.lines))


_WORK = re.compile(
    r"WorkNCCL\(SeqNum=(?P<seq>\d+)(?:, OpType=(?P<op>\w+))?(?:, NumelIn=(?P<size>\d+))?(?:, NumelOut=\d+)?"
    r"(?:, Timeout\(ms\)=(?P<ms>\d+))?"
)
_GROUP = re.compile(
    r"PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<name>[^\s(]+)(?:\((?P<called>[^)]*)\))?)? Rank (?P<place>\d+)"
)
_OF_NCCL = re.compile(r"(?:^|\s)[\w.-]+:(?P<pid>\d+):\d+ \[")
_AT_WORK = re.compile(r"work(?: sequence id)?: (?P<seq>\d+)")
_WHOSE = re.compile(r"\[(?:[^\]]* )?Rank (?P<rank>\d{1,6})\]")
_STATUS = re.compile(r"last enqueued (?:NCCL )?work: (?P<queued>-?\d+), last completed (?:NCCL )?work: (?P<done>-?\d+)")
_STACK = re.compile(r"#\d+ (?P<function>\S+) from (?P<file>.+):(?P<line>\d+)$")
_OPS = {
    "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip


_UNNAMED, _DEFAULT = "", "0"


@dataclass
class _Group:
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
class _Heard:
    """All that is kept of one speaker."""

    first: _Line
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_TAIL))
    raised: list[tuple[_Open, RankException]] = field(default_factory=list)
    warnings: list[tuple[_Line, str]] = field(default_factory=list)
    groups: dict[str, _Group] = field(default_factory=dict)
    watchdog: _Line | None = None
    last: _Line | None = None
    telling: _Line | None = None  # that says why a process was aborted
    opened: _Open | None = None
    before: str = ""
    since: int = 0  # lines since the newest traceback: whoever goes on printing has caught the exception

    @property
    def uncaught(self) -> tuple[_Open, RankException] | None:
        return self.raised[-1] if self.raised and self.since < _MOST_SINCE else None


_EXIT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)")
_DEEPSPEED = re.compile(r"--local_rank=(?P<rank>\d+)\b.*exits with return code = (?P<code>-?\d+)")
_SPAWNED = re.compile(r"process (?P<rank>\d+) terminated with (?:signal (?P<signal>SIG\w+)|exit code (?P<code>\d+))")
_FIELD = re.compile(r" {1,3}(?P<name>time|host|rank|exitcode|error_file|traceback) *: (?P<value>.*)")
_TASK_ENDED = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,-]+): "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<how>[A-Z][\w ]+))"
)
_SIGNALS = {
    "Killed": signal.SIGKILL, "Terminated": signal.SIGTERM, "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT, "Bus error": signal.SIGBUS, "Out Of Memory": signal.SIGKILL,
}  # fmt: skip
_KERNEL_KILL = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+)")
_RESTART = re.compile(r"will restart worker group|Restarting worker group")
_RAY_RANK = re.compile(r"pid=(?P<pid>\d+)\)[^)\n]{0,40}world_rank=(?P<rank>\d+)")
_WORLD = re.compile(r"world_size[=: ]+(?P<world>\d{1,6})\b", re.IGNORECASE)


@dataclass
class _Ended:
    """How a rank ended, by its launcher. ``root``: it was the first that the launcher saw fail."""

    code: int
    line: _Line
    pid: int = 0
    host: str = ""
    root: bool = False


class _Job:
    def __init__(self) -> None:
        self.heard: dict[Speaker | None, _Heard] = {}
        self.ended: dict[int, _Ended] = {}
        self.kills: dict[int, str] = {}
        self.ranks: dict[str, int] = {}  # of Ray's workers, by pid
        self.world = 0
        self.remarks: dict[str, None] = {}
        self._block: dict[str, str] = {}
        self._root = False
        self._at = _Line("", 0, "")
        self._stack: _Group | None = None  # whose stack the next lines may show

    def hear(self, said: _Said) -> None:
        one = self.heard.get(said.speaker)
        if one is None:
            speaker = said.speaker if len(self.heard) < _MOST_SPEAKERS else None
            one = self.heard.setdefault(speaker, _Heard(said.line))
        text, one.last = said.text, said.line
        if one.opened is not None and not one.opened.take(text, timed=said.timed):
            self._close(one)
        if one.opened is None:
            one.opened = self._opened(one, said)
        one.before = text
        one.since += one.opened is None and not text.startswith(_OF_SUMMARY)
        if one.opened is None or one.opened.state == "after":
            self._note(one, said)

    def _opened(self, one: _Heard, said: _Said) -> _Open | None:
        text = said.text
        if of_summary := _OF_A_SUMMARY.match(text):
            rank = re.match(r"\d+", self._block.get("rank", ""))
            return _Open(said.line, [text[of_summary.end() :]], False, said, int(rank[0]) if rank else None, "  ")
        if not (text.lstrip(" |+").startswith(_HEAD) or _BOXED.match(text)):
            return None
        thread = one.before.startswith(("Exception in thread", "Exception ignored"))
        of_child = _OF_A_CHILD.match(one.before)
        return _Open(said.line, [text], thread, said, int(of_child["rank"]) if of_child else None)

    def _close(self, one: _Heard) -> None:
        opened, one.opened = one.opened, None
        raised = opened.exception(opened.line.number * 1e-3) if opened is not None else None
        if opened is None or raised is None or opened.thread or raised.type.rpartition(".")[2] in _NOT_OF_A_RANK:
            return
        if any(fr.normal(one.file).endswith(_LAUNCHERS) for one in raised.frames):
            self._remark(f"torchrun itself failed: {raised.type}: {raised.message}", opened.line)
            return
        if fr.normal(raised.frames[0].file).endswith("/torch/multiprocessing/spawn.py"):  # of the ranks' parent
            if ended := _SPAWNED.search(raised.message):
                number = getattr(signal, ended["signal"] or "", 0)
                self.ended.setdefault(int(ended["rank"]), _Ended(int(ended["code"] or -number), opened.line, root=True))
            return
        if opened.rank is not None and opened.rank < MAX_RANKS:
            one = self.heard.setdefault(opened.rank, _Heard(opened.line))
        one.raised, one.since = [*one.raised[-_MOST_TRACEBACKS:], (opened, raised)], 0

    def end(self) -> None:
        for one in list(self.heard.values()):
            self._close(one)
        self._end_block()

    def _note(self, one: _Heard, said: _Said) -> None:
        text = said.text
        one.tail.append(text)
        if last_abort(text) is not None:
            one.telling = said.line
        if "NCCL WARN" in text and len(one.warnings) < _MOST_WARNINGS:
            one.warnings.append((said.line, text.partition("NCCL WARN")[2].strip()))
        if "atchdog" in text or "enqueued" in text:
            self._stack = self._note_watchdog(one, said) or self._stack
        if self._stack is not None and (found := _STACK.match(text)):
            self._stack.frames.append(Frame(found["file"], int(found["line"]), found["function"]))
        if (field := _FIELD.match(text)) is not None:
            self._block[field["name"]] = field["value"].strip()
            if field["name"] == "exitcode":
                self._at = said.line
        elif text.startswith(("[", "---", "===", "Root Cause")):
            self._end_block()
            self._root = text.startswith("Root Cause") or (self._root and not text.startswith("==="))
        if found := _EXIT.search(text) or _DEEPSPEED.search(text):
            pid = int(found.groupdict().get("pid") or 0)
            self.ended.setdefault(int(found["rank"]), _Ended(int(found["code"]), said.line, pid, root=True))
        if found := _TASK_ENDED.search(text):
            self._note_tasks(found, said.line)
        if found := _KERNEL_KILL.search(text):
            self.kills[int(found["pid"])] = text.strip()
        if found := _RAY_RANK.search(text):
            self.ranks[found["pid"]] = int(found["rank"])
        if found := _REMARKS.search(text):
            self._remark(next(filter(None, found.groups())), said.line)
        if "orker group" in text and _RESTART.search(text):
            self._begin_anew()
        if found := _WORLD.search(text):
            self.world = max(self.world, min(int(found["world"]), MAX_RANKS))

    def _remark(self, text: str, line: _Line) -> None:
        if len(self.remarks) < _MOST_WARNINGS:
            self.remarks[f"{' '.join(text.split())[:_MOST_REMARK]} [{line.where}]"] = None

    def _begin_anew(self) -> None:
        """torchrun starts the ranks again: what ended them before did not end the job."""
        for one in self.heard.values():
            one.raised, one.groups, one.watchdog, one.opened = [], {}, None, None
        self.ended.clear()

    def _end_block(self) -> None:
        """One failure of torchrun's summary is complete."""
        block, self._block = self._block, {}
        rank, code = (
            re.match(r"(\d+)", block.get("rank", "")),
            re.match(r"(-?\d+)(?: +\(pid: (\d+)\))?", block.get("exitcode", "")),
        )
        if rank and code and int(rank[1]) < MAX_RANKS:
            pid, host = int(code[2] or 0), block.get("host", "")
            self.ended[int(rank[1])] = _Ended(int(code[1]), self._at, pid, host, self._root)

    def _note_tasks(self, found: re.Match[str], line: _Line) -> None:
        code = int(found["code"]) if found["code"] else -_SIGNALS.get((found["how"] or "").strip(), 0)
        for part in found["tasks"].split(","):
            first, _, last = part.partition("-")
            for task in range(int(first or 0), min(int(last or first or 0), MAX_RANKS) + 1) if code else ():
                self.ended.setdefault(task, _Ended(code, line, host=found["host"], root=code not in (143, -15)))

    def _note_watchdog(self, one: _Heard, said: _Said) -> _Group | None:
        """Older watchdogs name the group behind the call only, and rank and process not at all where torch puts no
        prefix before its lines: then the rank in the group is the best there is.
        """
        group, work, status = (pattern.search(said.text) for pattern in (_GROUP, _WORK, _STATUS))
        whose = _WHOSE.search(said.text) if said.speaker is None else None
        if work is None and status is None:
            return None
        if whose is not None:
            one = self.heard.setdefault(int(whose["rank"]), _Heard(said.line))
            one.tail.append(said.text)
        one.watchdog = one.watchdog or said.line
        name = (group["name"] or group["id"]) if group else _UNNAMED
        at_work = _AT_WORK.search(said.text) if status else None
        unnamed = one.groups.get(_UNNAMED)
        if group and unnamed is not None and at_work is not None and int(at_work["seq"]) == unnamed.seq:
            one.groups.setdefault(name, one.groups.pop(_UNNAMED))
        mine = one.groups.setdefault(name, _Group())
        if group:
            mine.called, mine.place = group["called"] or "", int(group["place"])
        if work and not mine.op:
            mine.seq, mine.op, mine.ms = int(work["seq"]), work["op"] or "collective", int(work["ms"] or 0)
            mine.size = int(work["size"]) if work["size"] else None
        if status:
            mine.queued, mine.done = int(status["queued"]), int(status["done"])
            mine.seq = mine.seq or (int(at_work["seq"]) if at_work is not None else 0)
        return mine if not mine.frames else None


# --- evidence ---------------------------------------------------------------------------------------------------------


def read_logs(paths: Sequence[Path], root: Path | None = None) -> Found:
    """The evidence in these files. Its ranks are empty where nothing in them reports an end. Raises Unreadable.

    ``root``: the folder from which they are called; without one, by their names alone.
    """
    job, count = _Job(), 0
    names = [str(path.relative_to(root)) if root is not None else path.name for path in paths]
    for path, name in zip(paths, names, strict=True):
        try:
            count += _read(path, name, job)
        except (OSError, EOFError, gzip.BadGzipFile) as error:
            raise cannot_be_read(error) if isinstance(error, OSError) else Unreadable("it is damaged") from error
    job.end()
    return _found(job, names, count)


def _read(path: Path, name: str, job: _Job) -> int:
    ahead: list[_Line | None] = []
    lines = _lines(path, name)
    for line in lines:
        ahead.append(line)
        if len(ahead) >= 200:
            break
    known = _Names(rank_of_name(name), _has_tasks([line.text for line in ahead if line is not None]))
    last = 0
    for line in (*ahead, *lines) if len(ahead) < 200 else _chained(ahead, lines):
        if line is not None:
            last = line.number
            job.hear(known.said(line))
    return last


def _chained(ahead: Iterable[_Line | None], lines: Iterator[_Line | None]) -> Iterator[_Line | None]:
    yield from ahead
    yield from lines


def _found(job: _Job, names: Sequence[str], count: int) -> Found:
    ranks, signed = _by_rank(job)
    world = max([job.world, *(rank + 1 for rank in ranks), *(rank + 1 for rank in job.ended)], default=0)
    files: dict[str, str] = {}
    _name_groups(ranks)
    groups = _groups(ranks)
    evidence = [_rank(rank, ranks.get(rank), job, groups, files) for rank in sorted({*ranks, *job.ended})]
    failed = any(
        one.exception or one.flight_record or (one.exit and one.exit.returncode and one.exit.before_close)
        for one in evidence
    )
    what, remarks = f"{'a log' if len(names) == 1 else f'{len(names)} logs'} of {count} lines", tuple(job.remarks)
    if not failed:
        return Found(what, Evidence("crash", max(world, 1), ()), remarks=remarks)
    missing = tuple(rank for rank in range(world) if rank not in ranks and rank not in job.ended)
    outcome: Outcome = (
        "hang" if any(one.flight_record for one in evidence) and not any(map(_failed, evidence)) else "crash"
    )
    told = Evidence(outcome, world, tuple(evidence), missing_ranks=missing, printed=signed)
    return Found(what, told, files=files, remarks=remarks)


def _failed(one: RankEvidence) -> bool:
    """Not by the watchdog of a call whose time was up."""
    return one.exception is not None or (
        one.exit is not None
        and one.exit.before_close
        and one.exit.returncode not in (-signal.SIGABRT, 128 + signal.SIGABRT)
    )


def with_logs(found: Found, logs: Found) -> Found:
    """What dumps tell, and beside it what the same job has printed."""
    told = {one.rank: one for one in logs.evidence.ranks}
    if not told:
        return found
    ranks = {
        one.rank: structs.replace(told[one.rank], flight_record=one.flight_record) if one.rank in told else one
        for one in found.evidence.ranks
    }
    ranks = dict(sorted({**told, **ranks}.items()))
    world = max(found.evidence.world_size, logs.evidence.world_size)
    missing = tuple(rank for rank in found.evidence.missing_ranks if rank not in ranks)
    evidence = structs.replace(
        logs.evidence, world_size=world, ranks=tuple(ranks.values()), missing_ranks=missing, printed=None
    )
    return replace(
        found,
        what=f"{found.what} and {logs.what}",
        evidence=evidence,
        files={**logs.files, **found.files},
        remarks=logs.remarks,
    )


def _by_rank(job: _Job) -> tuple[dict[int, _Heard], tuple[int, ...]]:
    """Who said what, by rank, and of whom that is sure. Also of processes that some line names a rank's, and of lines
    that nobody signs."""
    found: dict[int, _Heard] = {one: heard for one, heard in job.heard.items() if isinstance(one, int)}
    named = {name: heard for name, heard in job.heard.items() if isinstance(name, str)}
    spare = iter(range(MAX_RANKS))
    for name, heard in sorted(named.items()):
        pid = re.search(r"pid=(\d+)", name)
        rank = job.ranks.get(pid[1]) if pid else None
        if rank is None:
            rank = next(one for one in spare if one not in found)
        found.setdefault(rank, heard)
    unsigned = job.heard.get(None)
    signed = {*found, *job.ended}
    if unsigned is not None:
        signed -= _give(unsigned, found, job)
        _give_warnings(unsigned, found, job)
    return found, tuple(sorted(signed))


def _give(unsigned: _Heard, found: dict[int, _Heard], job: _Job) -> set[int]:
    """What nobody has signed is given to those who failed: own errors to whoever failed first. Returns to whom, where
    that was a choice. torch's own check says whose call it is about.
    """
    known = {rank for rank, one in found.items() if one.raised}
    failed = [rank for rank, one in job.ended.items() if one.code == 1 and rank not in known]
    failed.sort(key=lambda rank: (not job.ended[rank].root, rank))
    if not failed and not job.ended and unsigned.uncaught and not known:
        failed = [0]
    distinct = {(one.type, one.message, one.frames): (opened, one) for opened, one in unsigned.raised}
    own = {next(iter(told)): pair for pair in distinct.values() if (told := fingerprints(pair[1].message))}
    errors = sorted(  # who ends, prints last
        (pair for pair in reversed(distinct.values()) if pair not in own.values()),
        key=lambda pair: is_consequence(pair[1]),
    )
    chosen = dict(zip([rank for rank in failed if rank not in own], errors, strict=False))
    for rank, (opened, raised) in {**own, **chosen}.items():
        one = found.setdefault(rank, _Heard(opened.line))
        one.raised.append((opened, raised))
        one.since = 0
    return set(chosen) if len(errors) > 1 or len(failed) > 1 else set()


def _give_warnings(unsigned: _Heard, found: dict[int, _Heard], job: _Job) -> None:
    """NCCL signs what it warns of with the process: to the rank of that, or to who raises it in the same words."""
    pids = {one.pid: rank for rank, one in job.ended.items()}
    for line, text in unsigned.warnings:
        pid = _OF_NCCL.search(line.text)
        rank = pids.get(int(pid["pid"])) if pid else None
        raised = (one for one, heard in found.items() if heard.raised and text[:80] in heard.raised[-1][1].message)
        rank = rank if rank is not None else next(raised, None)
        if rank is not None:
            found.setdefault(rank, _Heard(line)).warnings.append((line, text))


def _name_groups(ranks: Mapping[int, _Heard]) -> None:
    """A call whose group a rank has not named is that of the one group in which others make the like; else of all."""
    named = [(name, one) for heard in ranks.values() for name, one in heard.groups.items() if name != _UNNAMED]
    for heard in ranks.values():
        mine = heard.groups.pop(_UNNAMED, None)
        if mine is not None:
            like = {name for name, one in named if (one.op, one.size) == (mine.op, mine.size) or not one.op}
            heard.groups.setdefault(like.pop() if len(like) == 1 else _DEFAULT, mine)
    ops = {(name, one.seq): one for heard in ranks.values() for name, one in heard.groups.items() if one.op}
    for heard in ranks.values():
        for name, one in heard.groups.items():
            if not one.op and (other := ops.get((name, one.seq))) is not None:
                one.op, one.size = other.op, other.size


def _groups(ranks: Mapping[int, _Heard]) -> dict[str, tuple[int, ...]]:
    """The members of the groups, of which all have said which place they have in it."""
    places: dict[str, dict[int, int]] = {}
    for rank, heard in ranks.items():
        for name, one in heard.groups.items():
            if one.place is not None:
                places.setdefault(name, {})[one.place] = rank
    return {
        name: tuple(at[place] for place in range(len(at)))
        for name, at in places.items()
        if len(at) > 1 and set(at) == set(range(len(at)))
    }


def _rank(
    rank: int, heard: _Heard | None, job: _Job, groups: dict[str, tuple[int, ...]], files: dict[str, str]
) -> RankEvidence:
    ended, folder = job.ended.get(rank), f"ranks/{rank}"
    exception = record = log = None
    tail = heard.tail if heard is not None else ()
    unsigned = job.heard.get(None)
    if ended is not None and ended.code < 0 and unsigned is not None:
        tail = (*tail, *unsigned.tail)  # C++ and the kernel sign nothing
        files[f"{folder}/log_tail.txt"] = (unsigned.telling or unsigned.last or unsigned.first).where
    if heard is not None:
        files.setdefault(f"{folder}/log_tail.txt", (heard.telling or heard.last or heard.first).where)
        if heard.uncaught is not None:
            opened, exception = heard.uncaught
            files[f"{folder}/exception.json"] = opened.line.where
        if heard.watchdog is not None:
            record = _record(heard, groups)
            files[f"{folder}/flight_recorder.json"] = heard.watchdog.where
        if heard.warnings:
            log = NcclLog(heard.warnings[0][0].where, tuple(text for _, text in heard.warnings))
    exit_ = None
    if ended is not None:
        files.setdefault("launch.json", ended.line.where)
        by_launcher = -ended.code == signal.SIGTERM or ended.code == 128 + signal.SIGTERM
        exit_ = RankExit(ended.code, 0.0 if ended.root else 1.0, before_close=not by_launcher)
    kill = job.kills.get(ended.pid, "") if ended is not None else ""
    return RankEvidence(
        rank,
        host=ended.host if ended is not None else "",
        pid=ended.pid if ended is not None else 0,
        flight_record=record,
        exception=exception,
        exit=exit_,
        beacon=False,
        log_tail="\n".join(tail),
        nccl_log=log,
        memory_kills=MemoryKills(kernel_line=kill),
    )


def _record(heard: _Heard, groups: dict[str, tuple[int, ...]]) -> FlightRecord:
    entries = [
        Collective(
            name, one.seq, f"nccl:{_OPS.get(one.op, one.op.lower())}", completed=False, state="started",
            description=one.called, record_id=at, timeout_ms=one.ms,
            input_sizes=((one.size,),) if one.size is not None else UNKNOWN_SIZES, frames=tuple(one.frames),
        )
        for at, (name, one) in enumerate(heard.groups.items(), start=1)
        if one.seq
    ]  # fmt: skip
    status = {name: GroupStatus(one.queued, -1, one.done) for name, one in heard.groups.items() if one.queued >= 0}
    return FlightRecord("", tuple(entries), groups, status)
