"""Finds the stacks of processes in pasted text, in the formats of several tools, in any order.

- ``py-spy dump``, also ``--native``, ``--json`` and ``--subprocesses``; ``py-spy record -f raw``
- ``faulthandler``, also as torch calls it
- gdb's ``py-bt`` and ``thread apply all py-bt``; Python frames of ``thread apply all bt``
- ``pystack remote``, also ``--native``

Lines between stacks can identify the process: ``=== PID 7 ===``, ``--- rank 3 ---``, ``RANK=3``,
``$ py-spy dump --pid 7``. So can a prefix of each line: ``[rank3]: ``.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Annotated

import msgspec

from safelaunch.model import Frame
from safelaunch.system.decoding import from_builtins

MAIN = "MainThread"
_LINE_NUMBER = re.compile(r"^ {0,6}\d{1,7}\t")  # of ``cat -n``
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_QUOTE = re.compile(r"^\s*(?:[>|] ?)+")


@dataclass
class SavedThread:
    name: str = ""
    tid: int = 0
    active: bool = False
    frames: list[Frame] = field(default_factory=list)  # innermost first
    has_innermost: bool = True  # False if the stack has no header, and perhaps not all frames

    @property
    def is_main(self) -> bool:
        """True if this thread runs the script, judging by its name or else by its outermost frame."""
        python = [frame for frame in self.frames if frame.line]
        return self.name == MAIN or bool(not self.name and python and python[-1].function in _SCRIPTS)


@dataclass
class SavedProcess:
    pid: int = 0
    command: str = ""
    hints: list[str] = field(default_factory=list)  # preceding lines that might identify it
    speaker: str = ""  # prefix of all its lines
    parent: int = 0
    ended: bool = False  # the stacks are from its end
    threads: list[SavedThread] = field(default_factory=list)

    @property
    def main(self) -> SavedThread | None:
        return next((thread for thread in self.threads if thread.is_main), self.threads[-1] if self.threads else None)


_SCRIPTS = frozenset({"<module>", "_run_module_as_main"})
_BOOTSTRAP, _MOST_PIDS, _MOST_DIGITS, _TRIES = "_bootstrap", 1 << 23, 10, 8
_MOST_LINE, _MOST_RAW, _MOST_HINT = 1 << 12, 1 << 15, 1 << 8  # characters
_PROCESS = re.compile(r"Process (?P<pid>\d{1,9}): (?P<command>.*)")
_PARENT = re.compile(r"Parent Process (?P<pid>\d{1,9}): ")
_END_OF_GDB = re.compile(r"\[Inferior \d+ \(process (?P<pid>\d{1,9})\) detached\]")
# Headers of threads, and frames. ``last`` matches if the innermost frame comes last.
_SPIED = re.compile(r'Thread (?P<tid>0x[0-9A-Fa-f]{1,16}|\d{1,20}) \((?P<state>[\w+]+)\)(?:: "(?P<name>.*)")?$')
_HANDLED = re.compile(
    r"(?:Current thread|Thread) (?P<tid>0x[0-9a-f]{1,16})(?: \[.*\])? \(most recent call (?:first|(?P<last>last))\):"
)
_PYSTACK = re.compile(
    r"Traceback for thread (?P<tid>\d{1,20})(?: \(.*?\))? \[.*?\] \(most recent call (?P<last>last)\):"
)
_IN_GDB = re.compile(r'Thread (?P<number>\d+) \(.*?(?:LWP|process) (?P<tid>\d{1,20})\)(?: ".*")?.*\):$')
_PY_BT = re.compile(r"Traceback \(most recent call first\):")
_HEADERS = (_SPIED, _HANDLED, _PYSTACK, _IN_GDB, _PY_BT)
_HEADER = re.compile(
    r"(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]+ \(|Traceback (?:\(most|for thread)|Process \d+: |Python v\d"
)
_FIRST = "PTCF["
_SPIED_FRAME = re.compile(r"(?P<function>\S.*) \((?P<file>[^()]+?)(?::(?P<line>\d{1,9}))?\)$")
_FILE_FRAME = re.compile(
    r'(?:\((?:Python|C)\) )?File "(?P<file>.+?)", line (?P<line>\d{1,9}),? in (?P<function>[^ (]+)'
)
_GDB_FRAME = re.compile(
    r"#\d+ +(?:.*?\bfor file (?P<file>.+?), line (?P<line>\d{1,9}), in (?P<function>\S+) \(|"
    r"(?:0x[0-9a-f]+ in )?(?P<native>[\w:~<>.]+)(?:.*\bfrom (?P<library>\S+)$)?)"
)
_TAG = re.compile(
    r'process (?P<pid>\d{1,9}):"(?P<command>.*?)"$|'
    r'thread \((?P<tid>0x[0-9A-Fa-f]{1,16}|\d{1,20})\)(?:: "?(?P<name>.*?)"?)?$'
)
_SPEAKER = re.compile(r"(?P<who>\[[^\]]{1,60}\]:?|\((?!C\)|Python\))[^)]{1,60}\)|[\w.-]{1,60}(?::| +\|)) ?(?P<rest>.*)")
_ENVIRONMENT = re.compile(r"(?:export )?(?:LOCAL_)?RANK=\d+|Fatal Python error: ")
_PLACE = re.compile(r" \([^()]+:\d+\)$")
_SEPARATOR = re.compile(
    r"[=#*~+-]{2,}.*|[$#%] .*|\S*\w[\w~/\])]*[$#] \S.*|(?:export )?(?:LOCAL_)?(?:RANK|WORLD_SIZE)=\d+.*|[\w.-]{1,64}:|"
    r"[\w. /-]{0,40}\b(?:rank|pid|process|worker|node|host|pod)\b[ _=:#-]*\d+(?:[:.]?|\W.{0,40}:| *[(@].*)|"
    r"(?:kubectl|docker|ssh|py-spy|\+) .*",
    re.IGNORECASE,
)
# Printed by gdb before the first thread, and Markdown's code fence.
_NOISE = re.compile(
    r"\[|warning:|0x|Using host|Attaching|Reading|\d|To |line to|add-|set |For |info |\(gdb\)|```|\S+ \(.*\) at "
)
_MOST_BEFORE, _MOST_STRANGE = 32, 3
_SIGNS = re.compile(
    r"\(most recent call first\)|Thread (?:0x[0-9A-Fa-f]+|\d+) \(|Traceback for thread|<module> \(|\"thread_name\":"
)
# py-spy omits the directory from which a module was imported.
_LIBRARY = re.compile(
    r"(?:torch(?:vision|audio|data)?|numpy|scipy|pandas|pyarrow|transformers|accelerate|deepspeed|(?:pytorch_)?lightning|"
    r"lightning_fabric|datasets|ray|trl|peft|tokenizers|safetensors|huggingface_hub|requests|urllib3|httpx|aiohttp|boto3|"
    r"botocore|fsspec|s3fs|gcsfs|PIL|cv2|tqdm|wandb|tensorboard|mlflow|zmq|grpc|filelock|triton|apex|flash_attn|hydra|"
    r"omegaconf|webdataset|h5py|joblib|numba|streaming|composer)(?:\.py)?"
)


def processes_in(text: str) -> tuple[list[SavedProcess], float]:
    """Returns the processes in the text, and the fraction of the text that consists of stacks (0 to 1)."""
    if not _SIGNS.search(text):
        return [], 0.0
    lines = [_LINE_NUMBER.sub("", line) for line in _COLOURS.sub("", text).splitlines()]
    streams: dict[str, list[str]] = {}
    for line in lines:
        prefix, rest = _split_prefix(_QUOTE.sub("", line))
        streams.setdefault(prefix, []).append(rest)
    readers = {prefix: _StackReader(prefix) for prefix in streams}
    processes = [process for prefix, stream in streams.items() for process in readers[prefix].read(stream)]
    filled = sum(1 for line in lines if line.strip())
    return processes, sum(reader.used for reader in readers.values()) / max(filled, 1)


def _split_prefix(line: str) -> tuple[str, str]:
    if (match := _SPEAKER.match(line)) is None or _HEADER.match(line):
        return "", line
    rest = match["rest"]
    is_prefix = (
        _HEADER.match(rest)
        or _ENVIRONMENT.match(rest)
        or (rest[:1] == " " and (_FILE_FRAME.match(rest.strip()) or _PLACE.search(rest)))
    )
    return (match["who"], rest) if is_prefix else ("", line)


class _StackReader:
    """Reads the stacks in lines that have the same prefix.

    Attributes:
        used: Number of lines that belong to stacks of live processes.
        _open: Thread to which the next frames belong, their format, and whether the innermost one comes last.
        _before: Lines since the last stack.
    """

    def __init__(self, speaker: str) -> None:
        self.used = 0
        self._speaker = speaker
        self._processes: list[SavedProcess] = []
        self._process: SavedProcess | None = None
        self._open: tuple[SavedThread, re.Pattern[str], bool] | None = None
        self._before: deque[str] = deque(maxlen=_MOST_BEFORE)
        self._indent = 0

    def read(self, lines: Sequence[str]) -> Iterator[SavedProcess]:
        raw: list[str] = []
        at, tries = 0, _TRIES
        while at < len(lines):
            line = lines[at].strip()
            at += 1
            is_list = line[:2] in ("[", "[{") and tries > 0
            spied = _json_at(lines, at - 1) if is_list else None
            tries -= is_list
            if spied is not None:
                self._close()
                hints, tries = self._hints(), _TRIES
                self.used, at = self.used + spied[1] - at + 1, spied[1]
                self._processes += [replace(process, hints=hints) for process in _from_json(spied[0])]
            elif ";" in line and len(line) < _MOST_RAW and _is_raw(line):
                raw.append(line)
            elif 0 < len(line) < _MOST_LINE:
                took = self._take(line, len(lines[at - 1]) - len(lines[at - 1].lstrip()))
                self.used += took and not (self._process is not None and self._process.ended)
        self.used += len(raw)
        self._close()
        self._processes += [replace(process, hints=self._hints()) for process in _from_raw(raw)]
        for process in self._processes:
            yield from (
                part for part in _split_processes(process) if not part.ended and any(t.frames for t in part.threads)
            )

    def _begin(self, pid: int = 0, command: str = "", *, ended: bool = False) -> SavedProcess:
        self._close()
        self._process = SavedProcess(pid, command, self._hints(), self._speaker, ended=ended)
        self._processes.append(self._process)
        return self._process

    def _hints(self) -> list[str]:
        hints: list[str] = []
        strange = 0
        while self._before and strange < _MOST_STRANGE:
            line = self._before.pop()
            is_hint = len(line) < _MOST_HINT and _SEPARATOR.fullmatch(line)
            hints = [line, *hints] if is_hint else hints
            strange += not is_hint and not _NOISE.match(line)
        self._before.clear()
        return hints

    def _close(self) -> None:
        self._process = self._open = None

    def _take(self, line: str, indent: int) -> bool:
        if line[0] in _FIRST and self._begins(line):
            self._indent = indent
        elif not self._adds(line):
            inside = self._open is not None and indent > self._indent
            if self._open is not None and not inside and len(line) < _MOST_HINT and _SEPARATOR.fullmatch(line):
                self._close()
            if not inside:
                self._before.append(line)
            return inside
        return True

    def _begins(self, line: str) -> bool:
        if begin := _PROCESS.match(line):
            self._begin(int(begin["pid"]), begin["command"])
        elif (parent := _PARENT.match(line)) and self._process is not None:
            self._process.parent = int(parent["pid"])
        elif line.startswith("Fatal Python error"):
            self._begin(ended=True)
        elif (end := _END_OF_GDB.match(line)) and self._process is not None:
            self._process.pid = int(end["pid"])
            self._close()
        elif line.startswith("Traceback (most recent call last)"):
            self._open = None
            return False
        else:
            return self._opens(line)
        return True

    def _opens(self, line: str) -> bool:
        """Handles a thread's header; returns False for other lines. gdb prints its own header before ``py-bt``'s."""
        match = next((match for header in _HEADERS if (match := header.match(line))), None)
        if match is None:
            return False
        hints, py_bt = self._hints(), match.re is _PY_BT
        self._before.extend(hints)
        last = self._process.threads[-1] if self._process is not None and self._process.threads else None
        if self._process is None or hints or (py_bt and last is not None and last.frames):
            self._begin()
            last = None
        fields = match.groupdict(default="")
        name = MAIN if py_bt or fields.get("number") == "1" else fields.get("name", "")
        thread = SavedThread(name, _number(fields.get("tid") or "0"), fields.get("state", "").startswith("active"))
        if not py_bt or last is None:
            self._processes[-1].threads.append(thread)
        style = {_SPIED: _SPIED_FRAME, _IN_GDB: _GDB_FRAME}.get(match.re, _FILE_FRAME)
        self._open = (self._processes[-1].threads[-1], style, bool(fields.get("last")))
        return True

    def _adds(self, line: str) -> bool:
        """Adds a frame; returns False for other lines.

        A frame without a header starts a thread, whose innermost frames are missing.
        """
        if self._open is None:
            match = _SPIED_FRAME.match(line) if _PLACE.search(line) else None
            if match is None or not match["line"] or " " in match["function"] or not match["file"].endswith(".py"):
                return False
            thread = SavedThread(has_innermost=False)
            (self._process or self._begin()).threads.append(thread)
            self._open = (thread, _SPIED_FRAME, False)
        thread, style, last = self._open
        frame = _frame(line, style)
        if frame is not None:
            thread.frames.insert(0 if last else len(thread.frames), frame)
        return frame is not None


def _frame(raw: str, style: re.Pattern[str]) -> Frame | None:
    """Returns the frame in this line, or None; native frames have line 0."""
    if (match := style.match(raw)) is None:
        return None
    fields = match.groupdict()
    if fields.get("native"):
        return Frame(fields.get("library") or "??", 0, fields["native"])
    file, line = fields["file"], fields["line"]
    if line is None or raw.startswith("(C)"):
        is_named = re.search(r"\.so|^python|\.(?:c|cc|cpp|h|S)$", file)
        return Frame(file if is_named else "??", 0, fields["function"]) if line or is_named or file == "?" else None
    return Frame(_library_path(file), int(line), fields["function"])


def _split_processes(process: SavedProcess) -> Iterator[SavedProcess]:
    """Splits a process into processes with one main thread each. py-spy prints that thread first, others last."""
    groups: list[list[SavedThread]] = [[]]
    first = any(thread.name == MAIN or not thread.has_innermost for thread in process.threads[:1])
    for candidate in process.threads:
        full = any(member.is_main or not member.has_innermost for member in groups[-1])
        if full and (candidate.is_main or not first):
            groups.append([])
        groups[-1].append(candidate)
    if len(groups) > 1 and all(
        thread.frames and thread.frames[-1].function.endswith(_BOOTSTRAP) for thread in groups[-1]
    ):
        groups[-2:] = [[*groups[-2], *groups[-1]]]
    for at, threads in enumerate(groups):
        main = next((thread for thread in threads if thread.is_main), None)
        part = process if not at else SavedProcess(speaker=process.speaker)
        pid = part.pid or (main.tid if main is not None and main.tid < _MOST_PIDS else 0)
        yield replace(part, pid=pid, threads=threads)


# --- py-spy's JSON ----------------------------------------------------------------------------------------------------


_NumberText = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _SpiedFrame(msgspec.Struct):
    name: str
    filename: str
    line: _NumberText = 0


class _SpiedThread(msgspec.Struct):
    frames: list[_SpiedFrame]
    pid: _NumberText = 0
    thread_name: str | None = None
    os_thread_id: _NumberText | None = None
    active: bool = False


def _json_at(lines: Sequence[str], at: int) -> tuple[list[_SpiedThread], int] | None:
    """Returns the threads in a JSON list that begins at line ``at``, and the number of the next line, or None."""
    text = "\n".join(lines[at:])
    try:
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
        threads = from_builtins(value, list[_SpiedThread])
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    return threads, at + text[: len(text) - len(text.lstrip()) + end].count("\n") + 1


def _from_json(threads: Sequence[_SpiedThread]) -> Iterator[SavedProcess]:
    by_pid: dict[int, SavedProcess] = {}
    for thread in threads:
        name = MAIN if thread.os_thread_id == thread.pid else thread.thread_name or "?"
        frames = [Frame(_library_path(frame.filename), frame.line, frame.name) for frame in thread.frames]
        process = by_pid.setdefault(thread.pid, SavedProcess(thread.pid))
        process.threads.append(SavedThread(name, thread.os_thread_id or 0, thread.active, frames))
    yield from by_pid.values()


# --- py-spy record -f raw ---------------------------------------------------------------------------------------------

_SHARE = 0.5  # share of samples that a call needs to count as the thread's position


def _is_raw(line: str) -> bool:
    stack, _, count = line.rpartition(" ")
    return count.isdecimal() and len(count) < _MOST_DIGITS and any(_PLACE.search(part) for part in stack.split(";"))


def _from_raw(lines: Sequence[str]) -> Iterator[SavedProcess]:
    """Yields processes from lines that contain a stack, outermost frame first, followed by its number of samples."""
    counted: dict[tuple[str, ...], list[tuple[list[str], int]]] = {}
    for line in lines:
        stack, _, count = line.rpartition(" ")
        parts = stack.split(";")
        tags = tuple(takewhile(_TAG.match, parts))
        counted.setdefault(tags, []).append((parts[len(tags) :], int(count)))
    processes: dict[tuple[str, ...], SavedProcess] = {}
    for tags, samples in counted.items():
        matches = [tag.groupdict(default="") for text in tags if (tag := _TAG.match(text)) is not None]
        owners, threads = [tag for tag in matches if tag["pid"]], [tag for tag in matches if tag["tid"]]
        pids = (0, 0, *(int(tag["pid"]) for tag in owners))
        command = owners[-1]["command"] if owners else ""
        process = processes.setdefault(tags[: len(owners)], SavedProcess(pids[-1], command, parent=pids[-2]))
        frames = [
            frame for part in reversed(_common_calls(samples)) if (frame := _frame(part, _SPIED_FRAME)) is not None
        ]
        thread = threads[-1] if threads else {"name": "", "tid": "0"}
        process.threads.append(SavedThread(thread["name"], _number(thread["tid"]), frames=frames))
    yield from processes.values()


def _number(text: str) -> int:
    return int(text, 16 if text.startswith("0x") else 10)


def _common_calls(samples: Sequence[tuple[list[str], int]]) -> list[str]:
    """Returns the calls that most samples have in common, outermost first."""
    total, calls = sum(count for _, count in samples), list[str]()
    while True:
        counts: dict[str, int] = {}
        for parts, count in samples:
            if parts[: len(calls)] == calls and len(parts) > len(calls):
                counts[parts[len(calls)]] = counts.get(parts[len(calls)], 0) + count
        best = max(counts, key=lambda part: counts[part], default="")
        if not best or counts[best] < _SHARE * total:
            return calls
        calls.append(best)


def _library_path(path: str) -> str:
    """Returns the full path of a shortened library path such as ``threading.py`` or ``torch/nn/modules/module.py``."""
    first = PurePosixPath(path).parts[:1]
    if path.startswith("/") or not first:
        return path
    top = first[0].removesuffix(".py")
    if top in sys.stdlib_module_names:
        return f"/usr/lib/python3/{path}"
    return f"/usr/lib/python3/site-packages/{path}" if _LIBRARY.fullmatch(first[0]) else path
