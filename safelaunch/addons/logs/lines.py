"""Reads the lines of a job's output, and finds the speaker of each: a rank, a process, a container or a node.

Launchers put prefixes before lines, one around another: ``[rank3]:``, ``[default3]:``, `` 3: `` of ``srun -l``,
``[1,3]<stderr>:`` of ``mpirun``, ``(Worker pid=…)`` of Ray, ``[pod/…]`` of ``kubectl``, ``host: `` of ``pdsh``,
``worker-1  | `` of Docker Compose. They are taken off one at a time; the rank's own number counts most. A prefix that
none of these is, such as one of torchrun's ``--log-line-prefix-template``, is known by the tracebacks behind it.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile, islice
from pathlib import Path
from typing import BinaryIO

from safelaunch.bundle.reading.guard import STDIN

MAX_RANKS = 1 << 16
CHUNK_BYTES = 1 << 17
_MOST_SHAPES, _MOST_PARTS = 1 << 13, 64
MOST_LINE = 1 << 14  # characters


# Literals of which one is in each line that may report an error or an end. Parts of a file without any are skipped.
_NEEDLES = (
    b"Traceback (most", b'  File "', b"atchdog", b"NCCL WARN", b"xitcode", b"xit code", b"xit status", b"xited with",
    b"xited on", b"srun", b"slurmstepd", b"illed", b"terminated", b"terminate called", b"orld_rank", b"nqueued",
    b"atal", b"FATAL", b"CRITICAL", b"ERROR", b"rror: ", b"rror(", b"rror]", b"xception", b"[E", b"[F", b"\nE",
    b"corrupt", b"what():", b"Xid", b"ut of memory", b"OOM", b"oom", b"annot allocate", b"orker group", b"CANCELLED",
    b"return code", b"NCCL error", b" group.cc:", b"ignal", b"SIG", b"egmentation", b"core dumped", b"Process name: ",
    b" nranks ", b"subset of ranks", b"rrno", b"in use", b"No space", b"refused", b"o route to", b"CC error",
    b"illegal memory", b"launch failure", b"Killing", b"Assertion", b"MPI_ABORT", b"due to process", b"Unable to",
    b"cannot be", b"failed", b"FAILED", b"Failed", b"imed out", b"TIME LIMIT", b"eartbeat", b"where the task",
    b"o progress",
    b" nan", b"=nan", b":nan", b"NaN",
    b"fingerprint", b"FingerPrint",
)  # fmt: skip
LITERALS = tuple(needle.decode().strip("\n") for needle in _NEEDLES)  # the same, within a line
NOT_GZIP = (EOFError, zlib.error)  # what gzip raises of damaged files, besides OSError
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")


@dataclass(frozen=True)
class LogLine:
    """``may_tell``: it may report something; the others show no more than that the job works on."""

    file: str
    number: int
    text: str
    may_report: bool = True

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"


GZIP = b"\x1f\x8b"
_NAMES = re.compile(r"\.(?:log|out|err|txt|json|raw|folded|collapsed)(?:\.gz)?$|^std(?:out|err)$|^log", re.IGNORECASE)
_DEEPEST, _MOST_FILES = 6, 4096


def is_log(path: Path) -> bool:
    """Returns whether the path is a regular file of text, perhaps compressed, or standard input. Raises OSError."""
    if path == STDIN:
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(1 << 12)
    if head.startswith(GZIP):
        with suppress(OSError, *NOT_GZIP), gzip.open(path) as packed:
            head = packed.read(1 << 12)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return True
    damaged = head.decode("utf-8", "replace").count("\ufffd") + head.count(b"\0")
    of_dump = head.startswith(b"{") and b'"pg_config"' in head
    return not (of_dump or head.startswith((GZIP, b"BZh", b"\xfd7zXZ", b"\x80"))) and 5 * damaged <= len(head)


def logs_in(folder: Path) -> list[Path]:
    """Returns the files of text below ``folder`` with names of logs; of torchrun's tree, those of the last attempt."""
    attempts: dict[Path, int] = {}
    for path in islice(_files_below(folder, _DEEPEST), _MOST_FILES):
        if _NAMES.search(path.name) and is_log(path):
            tree = _IN_TREE.search(str(path))
            attempts[path] = int(tree["attempt"]) if tree else -1
    last = max(attempts.values(), default=-1)
    return sorted(path for path, attempt in attempts.items() if attempt in (-1, last))


def _files_below(folder: Path, deepest: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.is_file():
            yield path
        elif deepest and path.is_dir():
            yield from _files_below(path, deepest - 1)


def _open_file(path: Path) -> BinaryIO:
    file = path.open("rb")
    packed = file.peek(2).startswith(GZIP)
    return gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[return-value]


def read_lines(path: Path, name: str) -> Iterator[LogLine | None]:
    """Yields the lines of a file that might matter, with the first and the last ones; None between two that are not
    neighbours.
    """
    number, open_still, first, shapes = 0, True, True, _Shapes()
    with _open_file(path) as file:
        for part, last in _blocks(file):
            if not part:
                break
            reporting, read_all = shapes.reporting(part), first or last or open_still
            if reporting or read_all:
                for line in part.removesuffix(b"\n").split(b"\n"):
                    number += 1
                    text = _clean(line[-MOST_LINE:] if b"\r" in line else line[:MOST_LINE])
                    may_report = read_all or _FORMS.search(line) is not None or _shape(line) in reporting
                    for message in _record_lines(text) if text.startswith("{") else (text,):
                        yield LogLine(name, number, message, may_report or text.startswith("{"))
            else:
                number += part.count(b"\n")
                yield None
            open_still = b'  File "' in part[-4096:] or b"\xe2\x94\x82" in part[-4096:]  # a box of rich's
            first = False


class _Shapes:
    """Lines without their digits. A job prints the same ones over and over, and looking only at new ones is ten times
    as fast as looking for all literals everywhere.
    """

    def __init__(self) -> None:
        self._harmless: set[bytes] = set()
        self._met: Counter[bytes] = Counter()  # of the others, in how many parts

    def reporting(self, part: bytes) -> set[bytes]:
        """Returns the lines of this part that may report an error, without those that are everywhere."""
        new = set(_shape(part).split(b"\n")) - self._harmless
        text = b"\n".join([b"", *new])
        literals = [literal for literal in _NEEDLES if literal in text]
        if len(self._harmless) + len(self._met) > _MOST_SHAPES:
            self._harmless.clear()
            self._met.clear()
        reporting = (
            {shape for shape in new if any(literal in b"\n" + shape for literal in literals)} if literals else set()
        )
        self._met.update(reporting)
        self._harmless |= new - reporting
        self._harmless |= {shape for shape in reporting if self._met[shape] > _MOST_PARTS}
        return reporting


def _shape(line: bytes) -> bytes:
    return line.translate(None, b"0123456789")


# Forms of lines that mean something only beside others: lists, commands, numbers of ranks.
_FORMS = re.compile(
    rb"\.py\b|\\$|orld[ _]?[Ss]ize|WORLD_SIZE|nproc|num_processes|NTASKS|rank \d+(?: of |/)|env://|^#\d|\[missing ranks"
    rb"|^(?:[^:]{0,80}: ?)?(?: {1,3}(?:time|host|rank) *: |\[\d\]:|-{9}|={9}|Root Cause|\d+!?: \[)| node |host"
)


def _blocks(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yields parts of whole lines, each with True if it is the last one, which is no shorter than the others."""
    decode: Callable[[bytes], bytes]
    decode, pending, rest = bytes, b"", b""
    if file.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # type: ignore[attr-defined]
        wide = codecs.getincrementaldecoder("utf-16")("replace")
        decode = lambda data: wide.decode(data).encode()  # noqa: E731
    while data := file.read(CHUNK_BYTES):
        whole = rest + decode(data)
        end = whole.rfind(b"\n") + 1
        rest = whole[end:][-MOST_LINE:]
        if len(data) == CHUNK_BYTES and pending:
            yield pending, False
            pending = b""
        pending += whole[:end]
    yield pending + rest, True


def _clean(line: bytes) -> str:
    """Returns a line without colours; of a progress bar, what it shows last."""
    text = line.decode("utf-8", "replace").rstrip()
    if "\r" in text:
        text = text.rpartition("\r")[2]
    return _COLOURS.sub("", text) if "\x1b" in text else text


# How loggers that write JSON, Docker among them, name the parts of a record.
_MESSAGES = ("log", "message", "msg", "event", "text")
_EXCEPTIONS = ("exc", "exc_info", "exc_text", "exception", "traceback", "stack_trace", "stack")


def _record_lines(text: str) -> list[str]:
    """Returns the lines of a record in JSON, each with its rank; ``text`` itself if it is no record."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    if not isinstance(record, dict):
        return [text]
    message = next((record[key] for key in _MESSAGES if isinstance(record.get(key), str)), None)
    if message is None:
        return [text]
    record |= {key: value for part in list(record.values()) if isinstance(part, dict) for key, value in part.items()}
    rank = next((record[key] for key in ("rank", "global_rank", "RANK") if isinstance(record.get(key), int)), None)
    level = next((str(record[key]).upper() for key in ("level", "lvl", "levelname", "severity") if record.get(key)), "")
    traceback = next((record[key] for key in _EXCEPTIONS if isinstance(record.get(key), str)), "")
    step = record.get("step")
    lines = [*f"{level and level + ': '}{message}".rstrip().splitlines(), *traceback.rstrip().splitlines()] or [""]
    lines[0] += f" step {step}" if isinstance(step, int) else ""
    return lines if rank is None else [f"[rank{rank}]: {line}" for line in lines]


# What other texts hardly hold: levels, warnings, errors, times of day, progress bars, metrics, launchers' names, and
# what reports an end.
_OUTPUT = re.compile(
    r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b|^\[?[DIWEF]\d{4} |\b\d\d:\d\d:\d\d\b"
    r"|Traceback \(most|\w(?:Error|Warning|Exception): |[Nn]o such file or directory|command not found"
    r"|core dumped|^Killed|terminate called|\d%\||\b(?:it|s|tokens|samples|images)/(?:s|sec|it|step)\b"
    r"|\b(?i:epoch|step|iter|iteration|batch|rank|world.size|gpu|cuda|pid|seed|loss|exit.?code|signal)s?\W{0,4}\d"
    r"|[\w)\]] ?[=:] ?-?(?:\d+\.\d+(?:e[+-]?\d+)?|nan|inf)(?![\w.])"
    r"|\b(?:torchrun|torch\.distributed|c10d|NCCL|srun|slurmstepd|mpirun|safelaunch|wandb): |\[rank|\[default\d|"
    + "|".join(re.escape(needle.decode()) for needle in _NEEDLES)
)


def looks_like_output(text: str) -> bool:
    """Returns whether a job may have printed this line."""
    return _OUTPUT.search(text) is not None


# --- speakers ---------------------------------------------------------------------------------------------------------

Speaker = int | str  # a rank, or what stands for one or several: a process, a container, a task, a node
LOCAL = " local rank "  # stands between the name of a node and a number of its own

_TIME = re.compile(
    r"(?:  \| )?\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"(?: (?:stderr|stdout) [FP]| \|)? ?"
    r"|\d\d:\d\d:\d\d[.,]\d+ |[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}(?=\[)"
)
_TORCH_RANK = re.compile(r".{0,120}?\[rank(?P<rank>\d{1,6})\]: ?")  # torch's, behind whatever others have put before it
# Pattern, and how much the number in it is worth as a rank: 1 one that is on a single node, 0 none.
_PREFIXES: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"\[(?:\d+,)?(?:mpirank:)?(?P<rank>\d{1,6})(?:,algo-\d+)?\]<std(?:err|out|diag)>: ?"), 2),
    (re.compile(r"\[\d+,(?P<rank>\d{1,6})\]: ?"), 2),
    (re.compile(r"(?:[0-9a-f]{8} )?\[rank=(?P<rank>\d{1,6})\] \|\| ?"), 2),
    (re.compile(r"\[?(?:rank|Rank|RANK)[:=]? ?(?P<rank>\d{1,6})(?:/\d{1,6})?(?:\]:? |: )"), 2),
    (re.compile(r"\[(?P<role>[A-Za-z_]{1,40})(?P<rank>\d{1,5})\]: ?"), 1),
    (re.compile(r"[a-z][\w-]*(?:\.[\w-]+){2,} (?P<rank>\d{1,6}): ?"), 2),
    (re.compile(r"\(\w+ rank=(?P<rank>\d{1,6}),? ?pid=\d+(?:, ip=[\w.:]+)?\) ?"), 2),
    (re.compile(r"\((?P<name>\w+,? ?pid=\d+(?:, ip=[\w.:]+)?)\) ?"), 0),
    (re.compile(r"\[(?P<name>pod/[^\]\s]+)\] ?"), 0),
)
# The name of a node or a container, as pdsh, Docker Compose and GNU parallel print it: it has a number. That of a task,
# as ``srun -l`` prints it, is one.
_MARKS = (r":(?: |$)", r" *\|(?: |$)", r"\t")
_HOST = re.compile(rf" {{0,6}}(?P<name>(?=[a-zA-Z._-]*\d)[\w.-]{{1,80}})(?P<mark>{'|'.join(_MARKS)})")
# c10d's own lines, in which older versions name the rank of their group; that of all ranks is the default one.
_C10D_RANK = re.compile(
    r"\[[EFW][^\]]*ProcessGroup\w+\.cpp:\d+\] \[(?:PG (?:ID )?0 (?:PG GUID 0\S* )?)?Rank (?P<rank>\d{1,6})\]"
)
# A field of a logger's lines.
_RANK_FIELD = re.compile(r".{0,100}?(?<![A-Za-z])[Rr](?:ank|ANK)[ =:_#-]?(?P<rank>\d{1,5})(?:/\d+)?(?= *[|\]>):,]| - )")
_LOGGER = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\d\d:\d\d")
_ERROR_LEVEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|Error|EXCEPTION)\b")
# A traceback at the end of a line that a progress bar has begun, or behind an unknown prefix.
_TRACEBACK_SUFFIX = re.compile(r".*\S(?P<space> ?)(?=Traceback \(most recent call last\):$)")
_IN_NAME = re.compile(r"(?<![A-Za-z])(?<!lora[_-])[Rr]ank[_-]?(?P<rank>\d{1,6})(?![\dA-Za-z]|[_-]?lora)")
_NUMBERED = re.compile(r"(?P<stem>.*[_-])t?(?P<rank>\d{1,6})\.(?:out|err|log|txt)(?:\.gz)?$")
_IN_TREE = re.compile(r"attempt_(?P<attempt>\d+)/(?P<rank>\d{1,6})/std(?:err|out)\.log$")


@dataclass(frozen=True)
class LogEntry:
    """A line without its prefixes."""

    line: LogLine
    text: str
    speaker: Speaker | None
    timed: bool  # a time is among the prefixes
    label: str = ""  # another name that they give its rank


@dataclass
class PrefixParser:
    """Finds the speakers of a file's lines."""

    file_speaker: Speaker | None
    hosts: re.Pattern[str] | None  # names of nodes, or tasks of Slurm, before the lines
    has_field: bool = False  # a logger names the rank in each of its lines
    template: re.Pattern[str] | None = None  # a prefix that its tracebacks have shown
    _record: Speaker | None = None  # speaker of the last line, if that belongs to the record of an error

    def parse(self, line: LogLine, ahead: Iterable[LogLine | None] = ()) -> LogEntry:
        """Returns a line without its prefixes, which name its speaker.

        Args:
            ahead: lines that follow it
        """
        text = line.text.removeprefix("stderr: ").removeprefix("stdout: ")
        speaker, worth, timed, label = self.file_speaker, int(isinstance(self.file_speaker, int)), False, ""
        if "[rank" in text and (rank_prefix := _TORCH_RANK.match(text)) and int(rank_prefix["rank"]) < MAX_RANKS:
            speaker, worth, text = int(rank_prefix["rank"]), 3, text[rank_prefix.end() :]
        if self.hosts is not None and (host := self.hosts.match(text)):
            speaker, worth, text = (host["name"], -1, text[host.end() :]) if speaker is None else (speaker, 0, text)
        for _ in range(6):
            taken = False
            if text[:1] in "[(0123456789RFMSTWabcdefghijklmnopqrstuvwxyz" or text.startswith("  | "):
                if match := _TIME.match(text):
                    text, taken, timed = text[match.end() :], True, True
                for pattern, value in _PREFIXES:
                    if match := pattern.match(text):
                        number = match.groupdict().get("rank")
                        name: Speaker = int(number) if number is not None else match["name"]
                        if value == 1:  # of one of the nodes
                            name = f"{speaker if isinstance(speaker, str) else ''}{LOCAL}{name}"
                        if (value > worth or speaker is None) and (isinstance(name, str) or name < MAX_RANKS):
                            label = speaker if isinstance(speaker, str) else label
                            speaker, worth = name, value
                        text, taken = text[match.end() :], True
                        break
            if not taken and (behind := _TRACEBACK_SUFFIX.match(text)):
                self.template = self.template or _template(behind[0], ahead)
            if not taken and self.template is not None and (match := self.template.match(text)):
                number = match.groupdict().get("rank")
                template_name = int(number) if number else None if _LOGGER.search(match[0]) else match[0].strip(" :")
                speaker, worth = (template_name, 2) if worth < 2 and template_name is not None else (speaker, worth)
                text, taken = text[match.end() :], True
            elif not taken and behind is not None and not behind["space"]:
                text, taken = text[behind.end() :], True
            if not taken:
                break
        if not isinstance(speaker, int) and (rank_prefix := _C10D_RANK.match(text)):
            label, speaker = speaker or "", int(rank_prefix["rank"])
        if self.has_field and speaker is None:
            speaker = self._by_field(text, timed=timed)
        return LogEntry(line, text, speaker, timed, label)

    def _by_field(self, text: str, *, timed: bool) -> Speaker | None:
        if field := _RANK_FIELD.match(text):
            self._record = int(field["rank"]) if _ERROR_LEVEL.search(text) else None
            return int(field["rank"])
        self._record = None if timed else self._record  # lines without a time are part of the record before them
        return self._record


def has_rank_field(lines: Sequence[str]) -> bool:
    """Returns whether most lines of a log name a rank in the same way, as a logger's format does."""
    texts = [line for line in lines if _TIME.match(line)] or [line for line in lines if line.strip()]
    fields = [field for line in texts if (field := _RANK_FIELD.match(line))]
    return len(fields) > 3 and 2 * len(fields) > len(texts)


def _template(prefix: str, ahead: Iterable[LogLine | None]) -> re.Pattern[str] | None:
    """Returns a pattern of ``prefix`` with other numbers, if frames of a traceback have it before them, too. The number
    of it that has the most values is the rank.
    """
    parts, digits = [re.escape(piece) for piece in re.split(r"\d{1,6}", prefix)], r"(\d{1,6})"
    quoted = re.compile(rf'{digits.join(parts)}(?:  File ".*", line \d+|Traceback \(most)')
    lines = [match for line in ahead if line is not None and (match := quoted.search(line.text))]
    if not any("  File" in match[0] for match in lines):
        return None
    columns = list(zip(*(match.groups() for match in lines), strict=True))
    most = max((len({*column}) for column in columns), default=0)
    best = [at for at, column in enumerate(columns) if len({*column}) == most]
    if len({columns[at] for at in best}) == 1:
        parts[best[-1] : best[-1] + 2] = [r"(?P<rank>\d{1,5})".join(parts[best[-1] : best[-1] + 2])]
    return re.compile(r"\d{1,6}".join(parts))


_CUT_LINE = re.compile(
    r".*ProcessGroup\w+\.cpp:\d+\](?:(?: \[[^\]]*\])?|.*operation timeout: (?!.*ran for \d+ milliseconds).*)$"
)
_REST_OF_LINE = re.compile(r"[ \w(][^\[]")


def join_wrapped(line: LogLine, following: LogLine | None) -> LogLine | None:
    """Returns one of c10d's lines with its rest, which a terminal has put on the next line; None if it is whole."""
    if following is None or following.number != line.number + 1 or "ProcessGroup" not in line.text:
        return None
    if not _CUT_LINE.match(line.text) or not _REST_OF_LINE.match(following.text) or _TIME.match(following.text):
        return None
    is_other = following.text.startswith(("Traceback", "terminate", "  File"))
    return None if is_other else LogLine(line.file, line.number, line.text + following.text)


def speakers_by_file(names: Sequence[str]) -> dict[str, Speaker]:
    """Returns the speakers of files by their names. A number is a rank only if files have all from 0 or 1 on."""
    speakers: dict[str, Speaker] = {}
    numbered: dict[str, dict[int, str]] = {}
    for name in names:
        match = _IN_TREE.search(name) or _IN_NAME.search(name)
        if match is not None:
            speakers[name] = int(match["rank"])
        elif suffix := _NUMBERED.match(name):
            numbered.setdefault(suffix["stem"], {})[int(suffix["rank"])] = name
    for is_multi_node in numbered.values():
        if (
            len(is_multi_node) > 1
            and max(is_multi_node) < len(is_multi_node) + min(is_multi_node)
            and min(is_multi_node) < 2
        ):
            speakers |= {name: str(rank) for rank, name in is_multi_node.items()}
    return speakers


def host_pattern(lines: Sequence[str]) -> re.Pattern[str] | None:
    """Returns a pattern of the names of nodes, tasks or containers with which nearly all lines begin, and of names that
    differ from them in numbers alone. The launcher's own first lines have none.
    """
    matches = [_HOST.match(line) for line in lines if line.strip()]
    named = [match for match in dropwhile(lambda match: match is None, matches) if match is not None]
    names = {match["name"] for match in named}
    tasks = len(names) > 1 and names == {str(task) for task in range(len(names))}
    if len(named) < max(3, (2 - tasks) * len(names), 0.8 * (len(matches) - matches.index(named[0]) if named else 0)):
        return None
    shapes = {re.sub(r"\d+", r"\\d+", re.escape(match["name"])) for match in named}
    marks = {next(mark for mark in _MARKS if re.match(mark, match["mark"])) for match in named}
    return re.compile(rf" {{0,6}}(?P<name>{'|'.join(sorted(shapes))})(?:{'|'.join(sorted(marks))})")
