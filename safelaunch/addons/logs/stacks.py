"""Reads saved or pasted stacks, and determines which rank each belongs to.

The rank is found in a file name, a preceding line, a line prefix, or the process's title or command line. If it isn't,
or if two processes have the same rank, they are labelled by pid, host or title. Workers and launchers aren't ranks.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from msgspec import structs

from safelaunch.addons.logs.lines import GZIP
from safelaunch.addons.logs.speakers import speakers_by_file
from safelaunch.addons.logs.stack_texts import MAIN, SavedProcess, processes_in
from safelaunch.bundle.reading.evidence import EvidenceSource, evidence_on
from safelaunch.bundle.reading.files import Unreadable, read_limited
from safelaunch.model import Frame, ProcessEvidence, RankEvidence, StackSample, Thread
from safelaunch.stacks import calls

MOST_BYTES, MOST_RANKS = 64 << 20, 1 << 16
_RANK = re.compile(
    r"(?<![a-z])(?<!local[_ -])(?<!node[_ -])(?<!machine[_ -])(?<!group[_ -])rank[ _=:#-]{0,2}(\d{1,5})(?!\d)",
    re.IGNORECASE,
)
_RANK_OPTION = re.compile(r"(?<!\S)(?:--(?:global[-_])?)?rank[= ](\d{1,5})(?!\S)", re.IGNORECASE)
_DIMENSION = re.compile(r"(?<![A-Za-z])(?:DP|TP|PP|EP|CP|SP)_?(\d{1,5})(?!\d)")
_LOCAL_RANK = re.compile(r"(?:--local[-_]rank[= ]|\bLOCAL_RANK=)(\d{1,5})(?!\d)")
_PID = re.compile(r"(?:\bpid|--pid|-p)[ =:#]*(\d{1,9})(?!\d)", re.IGNORECASE)
_WORLD = re.compile(r"\bWORLD_SIZE=(\d{1,5})(?!\d)")
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node[= ](\d{1,4})(?!\d)(?!.*--nnodes)")
_VALUES = frozenset({"-n", "-c", "--namespace", "--container", "-l", "-i", "-p", "-u", "-w"})
_TITLE = re.compile(r"[A-Za-z][\w.:-]*$")
# Kinds of processes that aren't ranks, by their frames.
_HELPERS = (
    ("torchrun's agent", calls.LibraryCall(("torch/distributed/elastic/agent/", "torch/distributed/launcher/api.py"))),
    ("a launcher", calls.LibraryCall(("accelerate/commands/launch.py", "deepspeed/launcher/"))),
    ("a helper of multiprocessing", calls.LibraryCall(("multiprocessing/resource_tracker.py",), frozenset({"main"}))),
    ("a helper of multiprocessing", calls.LibraryCall(("multiprocessing/forkserver.py",), frozenset({"main"}))),
    ("a helper of multiprocessing", calls.LibraryCall(("multiprocessing/managers.py",), frozenset({"serve_forever"}))),
    ("a compile worker", calls.LibraryCall(("torch/_inductor/compile_worker/",))),
)
_WORKER = "dataloader worker"
NATIVE = "without Python lines, which py-spy shows"


@dataclass
class _ProcessStack:
    process: SavedProcess
    file: str
    kind: str = ""
    rank: int | None = None
    host: str = ""
    titled: bool = False
    samples: list[StackSample] = field(default_factory=list)  # from several dumps, oldest first
    children: list[_ProcessStack] = field(default_factory=list)

    @property
    def frames(self) -> tuple[Frame, ...]:
        main = self.samples[-1].main_thread
        return main.frames if main is not None else ()

    @property
    def evidence(self) -> ProcessEvidence:
        return ProcessEvidence(self.kind or "main", stacks=tuple(self.samples))


@dataclass(frozen=True)
class SavedStacks:
    processes: tuple[_ProcessStack, ...]
    whole: frozenset[Path]  # files that contain little besides stacks

    @classmethod
    def of(cls, paths: Sequence[Path], root: Path | None = None) -> SavedStacks:
        stacks: dict[object, _ProcessStack] = {}
        speakers = speakers_by_file([path.name for path in paths])
        whole = []
        for path in paths:
            try:
                processes, share = processes_in(_text(path))
            except Unreadable:
                continue
            if processes and share >= _MOSTLY:
                whole.append(path)
            speaker = speakers.get(path.name) if len(processes) == 1 else None
            rank = speaker if isinstance(speaker, int) else None
            for key, stack in _identify(
                processes, str(path.relative_to(root)) if root is not None else path.name, rank
            ):
                stacks.setdefault(key, stack).samples.append(_sample(stack.process))
        for stack in stacks.values():
            stack.kind = stack.kind if any(frame.line for frame in stack.frames) else NATIVE
        return cls(tuple(stacks.values()), frozenset(whole))

    def evidence(self, *, only_named: bool = False) -> EvidenceSource | None:
        """Returns the evidence in the stacks; None if there is none. ``only_named`` omits unidentified processes."""
        return _stack_evidence(self.processes, only_named=only_named) if self.processes else None


_MOSTLY = 0.5


def _stack_evidence(stacks: Sequence[_ProcessStack], *, only_named: bool) -> EvidenceSource | None:
    ranks, left_out = _ranks_among(stacks)
    world = _world(stacks)
    _assign_ranks(ranks)
    ranks, without = [rank for rank in ranks if rank.rank is not None], [rank for rank in ranks if rank.rank is None]
    if ranks and all(rank.titled for rank in ranks):  # a program that titles its ranks, so the rest are others
        left_out += without
        without = []
    if only_named:
        without = []
    free = (number for number in count() if number not in {rank.rank for rank in ranks})
    labels = {next(free): stack for stack in without}
    every = {**{rank.rank: rank for rank in ranks if rank.rank is not None}, **labels}
    if not every and only_named:
        return None
    evidence = evidence_on("hang", (_evidence(rank, stack) for rank, stack in every.items()), world)
    evidence = structs.replace(
        evidence,
        labels=dict(zip(labels, _labels(without), strict=True)),
        world_guessed=not world or world < len(every),
    )
    files = {f"ranks/{rank}/stack.txt": stack.file for rank, stack in every.items()}
    what = f"stacks of {len(every)} processes" if every else "saved stacks"
    what = what if len(every) != 1 else "the stack of one process"
    return EvidenceSource(what, evidence, files=files, remarks=tuple(_remarks(left_out)))


def _evidence(rank: int, stack: _ProcessStack) -> RankEvidence:
    children = tuple(child.evidence for child in stack.children)
    return RankEvidence(rank=rank, host="", pid=stack.process.pid, main=stack.evidence, children=children, beacon=False)


def _identify(processes: Sequence[SavedProcess], name: str, rank: int | None) -> Iterator[tuple[object, _ProcessStack]]:
    """Yields the processes of a file, each with a key that identifies it. ``rank`` is the one in the file's name."""
    host = ""
    for at, process in enumerate(processes):
        host = _host(process) or ("" if process.hints else host)
        if len(processes) == 1 or _is_complete(process):
            process.pid = process.pid or next(
                (int(pid) for hint in reversed(process.hints) if (pid := _first(_PID, hint))), 0
            )
            tid = process.main.tid if process.main is not None else 0
            stack_rank = _rank(process) if rank is None else rank
            yield (
                (name, host, stack_rank, process.pid or tid or -at),
                _ProcessStack(process, name, _kind(process), stack_rank, host),
            )


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match is not None else ""


def _text(path: Path) -> str:
    data = read_limited(path, MOST_BYTES)
    if data.startswith(GZIP):
        try:
            data = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(data, MOST_BYTES)
        except zlib.error:
            return ""
    return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")


def _is_complete(process: SavedProcess) -> bool:
    """Returns whether the stack contains the innermost frame. If it has no header, only a library frame shows that."""
    main = process.main
    return (
        main is not None
        and bool(main.frames)
        and (main.has_innermost or main.frames[0].file.startswith("/usr/lib/python3/"))
    )


def _sample(process: SavedProcess) -> StackSample:
    main = process.main
    threads = tuple(
        Thread(
            tuple(thread.frames),
            MAIN if thread is main else thread.name,
            os_tid=process.pid or None if thread is main else thread.tid or None,
            active=thread.active,
            cut=not thread.is_main or thread.frames[-1].function != "<module>",
        )
        for thread in process.threads
        if thread.frames
    )
    native = any(not frame.line for thread in threads for frame in thread.frames)
    return StackSample(process.pid, 0.0, "a saved stack", threads, native=native)


# --- what each process is ---------------------------------------------------------------------------------------------


def _kind(process: SavedProcess) -> str:
    main = process.main
    frames = tuple(main.frames) if main is not None else ()
    if calls.LOADER_WORKER.on(frames) or any(calls.LOADER_WORKER.on(thread.frames) for thread in process.threads):
        return _WORKER
    return next((kind for kind, mark in _HELPERS if mark.on(frames)), "")


def _ranks_among(stacks: Sequence[_ProcessStack]) -> tuple[list[_ProcessStack], list[_ProcessStack]]:
    """Returns the processes that might be ranks, with their workers, and the remaining processes.

    A worker whose parent is unknown belongs to the process that waits for workers, if there is exactly one.
    """
    ranks = [stack for stack in stacks if not stack.kind]
    by_pid = {rank.process.pid: rank for rank in ranks if rank.process.pid}
    loading = [rank for rank in ranks if calls.LOADER_WAIT.on(rank.frames)]
    left_out = []
    for stack in stacks:
        parent = by_pid.get(stack.process.parent) or (loading[0] if len(loading) == 1 else None)
        if stack.kind == _WORKER and parent is not None:
            parent.children.append(stack)
        elif stack.kind:
            left_out.append(stack)
    return ranks, left_out


def _rank(process: SavedProcess) -> int | None:
    numbers = [_first(_RANK, text) for text in (process.speaker, *reversed(process.hints))]
    numbers.append(_first(_RANK if _TITLE.match(process.command) else _RANK_OPTION, process.command))
    if rank := next(filter(None, numbers), ""):
        return int(rank)
    speaker = re.fullmatch(r"\[default(\d{1,5})\]:?|(\d{1,5}):", process.speaker)
    return int(speaker[1] or speaker[2]) if speaker is not None else None


def _assign_ranks(ranks: Iterable[_ProcessStack]) -> None:
    """Assigns ranks from dimensions in titles if each has one number, or from unique local ranks; drops duplicates."""
    ranks = list(ranks)
    apart = any(len(_dimensions(rank.process)) > 1 for rank in ranks)
    for find in (_title_rank, _local_rank):
        if all(rank.rank is None for rank in ranks) and not (apart and find is _title_rank):
            for stack in ranks:
                stack.rank = find(stack.process)
                stack.titled = find is _title_rank and stack.rank is not None
        counts = Counter(rank.rank for rank in ranks)
        for stack in ranks:
            if stack.rank is not None and (counts[stack.rank] > 1 or stack.rank >= MOST_RANKS):
                stack.rank, stack.titled = None, False


def _dimensions(process: SavedProcess) -> set[str]:
    return set(_DIMENSION.findall(process.command))


def _title_rank(process: SavedProcess) -> int | None:
    return next(map(int, _dimensions(process)), None)


def _local_rank(process: SavedProcess) -> int | None:
    number = next(filter(None, (_first(_LOCAL_RANK, text) for text in (process.command, *process.hints))), "")
    return int(number) if number else None


def _world(stacks: Iterable[_ProcessStack]) -> int:
    texts = [text for stack in stacks for text in (stack.process.command, *stack.process.hints)]
    return max(
        (int(number) for text in texts if (number := _first(_WORLD, text) or _first(_PER_NODE, text))), default=0
    )


# --- what they are called ---------------------------------------------------------------------------------------------


def _labels(processes: Sequence[_ProcessStack]) -> list[str]:
    """Labels processes: ``process 7``, ``process 7 (engine::scheduler)``, ``process 1 of worker-2``, ``stack 3``."""
    pids = Counter(process.process.pid for process in processes)
    labels = [_label(process, is_only=pids[process.process.pid] == 1) for process in processes]
    counts = Counter(labels)
    return [
        label if label and counts[label] == 1 else f"{label or 'stack'} {number}"
        for number, label in enumerate(labels, start=1)
    ]


def _label(stack: _ProcessStack, *, is_only: bool) -> str:
    process = stack.process
    title = process.command if _TITLE.match(process.command) else ""
    if not process.pid:
        return stack.host or title
    if stack.host and (not is_only or process.pid == 1):
        return f"process {process.pid} of {stack.host}"
    title = f" ({title})" if title else ""
    return f"process {process.pid}{title}" if is_only else f"process {process.pid}{title} in {stack.file}"


def _host(process: SavedProcess) -> str:
    """Returns the pod, container or node named before the stack, or ""."""
    for hint in reversed(process.hints):
        words = hint.strip(" =#*~+-$%:<>").split()
        at = next((n for n, word in enumerate(words) if word in ("exec", "ssh")), None)
        if at is not None:
            rest = iter(words[at + 1 :])
            name = next(
                (word for word in rest if not word.startswith("-") or (word in _VALUES and not next(rest, ""))), ""
            )
            return name.rpartition("/")[2]
        if prompt := re.match(r"[\w-]+@([\w.-]+)[:~]", hint):
            return prompt[1]
        if len(words) == 1 and re.fullmatch(r"[A-Za-z][\w.-]*", words[0]) and "=" not in hint.strip("= "):
            return words[0]
        if match := re.fullmatch(r"(?:host|node|pod)[ :=]+([\w.-]+)", " ".join(words), re.IGNORECASE):
            return match[1]
    return process.speaker.rstrip(":| ")


def _remarks(left_out: Sequence[_ProcessStack]) -> Iterator[str]:
    kinds: dict[str, list[int]] = {}
    for stack in left_out:
        kinds.setdefault(stack.kind or "of unknown rank", []).append(stack.process.pid)
    for kind, pids in kinds.items():
        listing = ", ".join(str(pid) for pid in pids[:4] if pid) + (", ..." if len(pids) > 4 else "")
        is_multi_node = f"{len(pids)} process{'es' * (len(pids) > 1)}"
        yield f"not compared: {is_multi_node} ({kind}{': ' * bool(listing)}{listing})"
