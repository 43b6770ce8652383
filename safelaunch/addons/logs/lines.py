"""Finds log files, and reads those lines that might matter."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from safelaunch.bundle.reading.files import STDIN

MAX_RANKS = 1 << 16
CHUNK_BYTES = 1 << 17
_MOST_SHAPES, _MOST_PARTS = 1 << 13, 64
MOST_LINE = 1 << 14  # characters


# Every line that might report an error or an end contains one of these; other blocks are skipped.
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
LITERALS = tuple(needle.decode().strip("\n") for needle in _NEEDLES)  # for one line
NOT_GZIP = (EOFError, zlib.error)  # raised by gzip for damaged files, besides OSError
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07")


@dataclass(frozen=True)
class LogLine:
    file: str
    number: int
    text: str
    may_report: bool = True  # else it only shows that the job is alive

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"


GZIP = b"\x1f\x8b"
_NAMES = re.compile(r"\.(?:log|out|err|txt|json|raw|folded|collapsed)(?:\.gz)?$|^std(?:out|err)$|^log", re.IGNORECASE)
_DEEPEST, _MOST_FILES = 6, 4096


def is_log(path: Path) -> bool:
    """Returns whether the path is stdin or a regular text file, compressed or not. Raises OSError."""
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
    """Returns the text files in ``folder`` with names typical of logs; for torchrun's logs, only the last attempt's."""
    attempts: dict[Path, int] = {}
    for path in islice(_files_below(folder, _DEEPEST), _MOST_FILES):
        if _NAMES.search(path.name) and is_log(path):
            tree = TORCHRUN_TREE.search(str(path))
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
    """Yields the first and last lines of a file, and the lines in between that might matter; None stands for a gap."""
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
            open_still = b'  File "' in part[-4096:] or b"\xe2\x94\x82" in part[-4096:]  # a box drawn by rich
            first = False


class _Shapes:
    """Shapes are lines without their digits. Checking only new shapes is ten times as fast as checking every line."""

    def __init__(self) -> None:
        self._harmless: set[bytes] = set()
        self._met: Counter[bytes] = Counter()  # number of blocks that contain each other shape

    def reporting(self, part: bytes) -> set[bytes]:
        """Returns the shapes of lines that might report an error, except shapes that occur in many blocks."""
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


# Lines that only have a meaning together with others: lists, commands, numbers of ranks.
_FORMS = re.compile(
    rb"\.py\b|\\$|orld[ _]?[Ss]ize|WORLD_SIZE|nproc|num_processes|NTASKS|rank \d+(?: of |/)|env://|^#\d|\[missing ranks"
    rb"|^(?:[^:]{0,80}: ?)?(?: {1,3}(?:time|host|rank) *: |\[\d\]:|-{9}|={9}|Root Cause|\d+!?: \[)| node |host"
)


def _blocks(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yields blocks of whole lines, each with True if it is the last one. The last block is never short."""
    decode: Callable[[bytes], bytes]
    decode, pending, unfinished = bytes, b"", b""
    if file.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # type: ignore[attr-defined]
        wide = codecs.getincrementaldecoder("utf-16")("replace")
        decode = lambda data: wide.decode(data).encode()  # noqa: E731
    while data := file.read(CHUNK_BYTES):
        whole = unfinished + decode(data)
        end = whole.rfind(b"\n") + 1
        unfinished = whole[end:][-MOST_LINE:]
        if len(data) == CHUNK_BYTES and pending:
            yield pending, False
            pending = b""
        pending += whole[:end]
    yield pending + unfinished, True


def _clean(line: bytes) -> str:
    text = line.decode("utf-8", "replace").rstrip()
    if "\r" in text:
        text = text.rpartition("\r")[2]
    return _COLOURS.sub("", text) if "\x1b" in text else text


# Keys of JSON log records, including Docker's.
_MESSAGES = ("log", "message", "msg", "event", "text")
_EXCEPTIONS = ("exc", "exc_info", "exc_text", "exception", "traceback", "stack_trace", "stack")


def _record_lines(text: str) -> list[str]:
    """Returns the lines in a JSON record, each with its rank in front; if it isn't a record, only ``text``."""
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


# Signs of a job's output: levels, warnings, errors, times, progress, metrics, launcher names, ends.
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
    return _OUTPUT.search(text) is not None


# --- quoting of pasted text -------------------------------------------------------------------------------------------


TORCHRUN_TREE = re.compile(r"attempt_(?P<attempt>\d+)/(?P<rank>\d{1,6})/std(?:err|out)\.log$")
_MARKS = " \t>|"


def common_quote(lines: Iterable[str]) -> str:
    """Returns the blanks and quotation marks (``> ``, ``| ``) that all non-empty lines begin with."""
    filled = [line for line in lines if line.strip(_MARKS + "\r\n")]
    first, last = min(filled, default=""), max(filled, default="")
    marks = len(first) - len(first.lstrip(_MARKS))
    return next((first[:end] for end in range(marks, 0, -1) if last.startswith(first[:end])), "")


def without_quote(line: str, quote: str) -> str:
    if line.startswith(quote):
        return line[len(quote) :]
    return line if line.strip(_MARKS + "\r\n") else ""
