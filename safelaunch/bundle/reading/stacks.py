"""Reads stacks that people have saved or pasted: what ``py-spy dump`` (text, ``--json``) and ``faulthandler`` print.

A file may hold those of one rank or of all; its name may say which rank that is. The rank of others is
``--local-rank`` of their command, else their place in the order of the files, which is said.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath

import msgspec

from safelaunch.bundle.reading.guard import Found, Unreadable, evidence_of, read_limited
from safelaunch.bundle.reading.log_lines import speakers_of_names
from safelaunch.model import Frame, ProcessEvidence, RankEvidence, StackSample, Thread
from safelaunch.system.decoding import from_json

MOST_BYTES, MOST_RANKS = 64 << 20, 1 << 16
_PROCESS = re.compile(r"Process (?P<pid>\d{1,9}): (?P<command>.*)")
_THREAD = re.compile(r'Thread (?P<tid>0x[0-9A-Fa-f]+|\d+) \([\w+]+\)(?:: "(?P<name>.*)")?$')
_OF_FAULTHANDLER = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r"\s+(?P<function>\S.*) \((?P<file>.+):(?P<line>\d{1,9})\)$")
_FRAME_OF_FAULTHANDLER = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d{1,9}) in (?P<function>.+)$')
_LOCAL_RANK = re.compile(r"--local[-_]rank[= ](?P<rank>\d{1,6})")
_MAIN = "MainThread"
# py-spy leaves out the directory from which a module was imported.
_PACKAGES = frozenset(
    [
        "torch",
        "torchvision",
        "numpy",
        "transformers",
        "accelerate",
        "deepspeed",
        "lightning",
        "pytorch_lightning",
        "datasets",
        "ray",
        "trl",
    ]
)


class _Spied(msgspec.Struct):
    """A frame in py-spy's JSON."""

    name: str
    filename: str
    line: int = 0


class _SpiedThread(msgspec.Struct):
    frames: list[_Spied]
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None


@dataclass
class _Process:
    pid: int = 0
    command: str = ""
    ended: bool = False  # its stacks are where it ended, not where it stands
    threads: list[tuple[str, list[Frame]]] = field(default_factory=list)  # name, frames: innermost first

    def sample(self, pid: int) -> StackSample:
        """The main thread is the one so called, else the last whose stack begins with the script."""
        names = [name for name, _ in self.threads]
        scripts = [at for at, (_, frames) in enumerate(self.threads) if frames and frames[-1].function == "<module>"]
        main = names.index(_MAIN) if _MAIN in names else scripts[-1] if scripts else len(names) - 1
        threads = (
            Thread(tuple(frames), _MAIN if at == main else name) for at, (name, frames) in enumerate(self.threads)
        )
        return StackSample(pid, 0.0, "a saved stack", tuple(threads))


def read_stacks(paths: Sequence[Path], root: Path | None = None, *, only_named: bool = False) -> Found | None:
    """The stacks in these files; None if none of them holds any. ``only_named``: those whose rank something tells."""
    ranks: dict[int, RankEvidence] = {}
    files: dict[str, str] = {}
    numbered = False
    whose = speakers_of_names([path.name for path in paths])
    for path in paths:
        try:
            seen = _processes(read_limited(path, MOST_BYTES))
        except Unreadable:
            continue
        processes = [one for one in seen if not one.ended and any(frames for _, frames in one.threads)]
        named = whose.get(path.name) if len(processes) == 1 else None
        for one in processes:
            told = _LOCAL_RANK.search(one.command)
            rank = int(named) if named is not None else int(told["rank"]) if told else None
            if rank is None or rank in ranks:
                if only_named:
                    continue
                rank, numbered = next(number for number in count() if number not in ranks), True
            if rank < MOST_RANKS:
                main = ProcessEvidence("main", stacks=(one.sample(one.pid),))
                ranks[rank] = RankEvidence(rank=rank, host="", pid=one.pid, main=main, beacon=False)
                files[f"ranks/{rank}/stack.txt"] = str(path.relative_to(root)) if root is not None else path.name
    if not ranks:
        return None
    remarks = ("nothing says whose stacks these are: ranks are counted in their order",) if numbered else ()
    evidence = evidence_of("hang", ranks.values())
    return Found(f"stacks of {len(ranks)} processes", evidence, files=files, remarks=remarks)


def _processes(data: bytes) -> list[_Process]:
    if data[:1] in (b"[", b"{"):
        try:
            return list(_of_json(from_json(data, list[_SpiedThread])))
        except (msgspec.DecodeError, RecursionError):
            return []
    return list(_of_text(data.decode("utf-8", "replace").splitlines()))


def _of_json(threads: Sequence[_SpiedThread]) -> Iterator[_Process]:
    by_pid: dict[int, _Process] = {}
    for thread in threads:
        name = _MAIN if thread.os_thread_id == thread.pid else thread.thread_name or ""
        frames = [Frame(_whole(one.filename), one.line, one.name) for one in thread.frames]
        by_pid.setdefault(thread.pid, _Process(thread.pid)).threads.append((name, frames))
    yield from by_pid.values()


def _of_text(lines: Sequence[str]) -> Iterator[_Process]:
    process: _Process | None = None
    for line in lines:
        if line.startswith("Fatal Python error"):
            yield from [process] if process is not None else []
            process = _Process(ended=True)
        elif begin := _PROCESS.match(line):
            yield from [process] if process is not None else []
            process = _Process(int(begin["pid"]), begin["command"])
        elif _OF_FAULTHANDLER.search(line):
            if process is None or _is_complete(process):
                yield from [process] if process is not None else []
                process = _Process()
            process.threads.append(("", []))
        elif process is not None and (found := _THREAD.match(line)):
            process.threads.append((found["name"] or "", []))
        elif process is not None and process.threads:
            frame = _FRAME_OF_FAULTHANDLER.match(line) or _FRAME.match(line)
            if frame is not None:
                process.threads[-1][1].append(Frame(_whole(frame["file"]), int(frame["line"]), frame["function"]))
    yield from [process] if process is not None else []


def _is_complete(process: _Process) -> bool:
    """faulthandler prints the main thread, which is the oldest, last."""
    frames = process.threads[-1][1] if process.threads else []
    return bool(frames) and frames[-1].function == "<module>"


def _whole(path: str) -> str:
    """``threading.py`` and ``torch/nn/modules/module.py`` as what they are: of the library."""
    first = PurePosixPath(path).parts[:1]
    if path.startswith("/") or not first:
        return path
    top = first[0].removesuffix(".py")
    if top in sys.stdlib_module_names:
        return f"/usr/lib/python3/{path}"
    return f"/usr/lib/python3/site-packages/{path}" if top in _PACKAGES else path
