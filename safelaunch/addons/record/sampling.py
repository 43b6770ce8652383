"""Samples many processes at once with ``py-spy record``.

The main process of a rank is sampled in three passes: all threads, threads on a CPU, and the thread that holds the GIL.
Because py-spy doesn't pause the processes (``--nonblocking``), it can also sample processes that are stopped or in D
state. A sample costs half a millisecond of CPU time; ``rate_for`` limits the total to a share of the node.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
from msgspec.structs import replace

from safelaunch.addons.record.recording import ProcessRecord, StackNumbering, ThreadRecord
from safelaunch.capture import command, proc, ptrace, stacks
from safelaunch.capture.result import why
from safelaunch.job.process import ProcessTable, descendants, identify
from safelaunch.model import Frame
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of

FASTEST_HZ, SLOWEST_HZ = 20, 1
SAMPLE_CPU_S = 0.0006
MOST_CHILDREN = 4  # per rank: a loader's workers do the same work
MOST_PROCESSES = 256  # per node
PATIENCE_S = 5.0  # extra time for py-spy to read symbols on a busy node
LARGEST_FILE = 32 << 20
MOST_STACKS = 4000  # per thread
DEEPEST = 200
STOPPED = "it is stopped by a signal"

_NAMED = re.compile(r"thread \((?P<tid>\d+|0x[0-9A-Fa-f]+)\)(?:: (?P<name>.*))?", re.DOTALL)
_FOLDED_FRAME = re.compile(r"(?P<function>.*?) \((?P<file>.*):(?P<line>\d+)\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SampleTarget:
    pid: int
    start_ticks: int
    role: str = "main"

    @property
    def passes(self) -> tuple[str, ...]:
        return ("all", "active", "gil") if self.role == "main" else ("all",)


PASSES = {
    "all": ("-f", "chrometrace", "--idle"),
    "active": ("-f", "raw"),
    "gil": ("-f", "raw", "--gil"),
}


def rate_for(passes: int, cpus: int, share: float) -> int:
    """Returns the sampling rate in Hz at which ``passes`` passes together use about ``share`` of the CPUs."""
    affordable = share * cpus / (max(passes, 1) * SAMPLE_CPU_S)
    return round(min(FASTEST_HZ, max(SLOWEST_HZ, affordable)))


def children_of(pid: int, table: ProcessTable | None = None) -> list[SampleTarget]:
    running = (descendant for descendant in descendants([pid], table=table) if _runs_python(descendant.pid))
    return [SampleTarget(process.pid, process.start_ticks, "child") for process in islice(running, MOST_CHILDREN)]


def _runs_python(pid: int) -> bool:
    return Path(link_of(f"/proc/{pid}/exe")).name.startswith("python")


def sample(
    processes: Sequence[SampleTarget],
    numbers: StackNumbering,
    folder: Path,
    *,
    duration_s: float,
    rate_hz: int,
    stop: threading.Event | None = None,
    py_spy: str | None = None,
) -> list[ProcessRecord]:
    """Samples all processes at once, for at most ``duration_s + PATIENCE_S``. Never raises.

    Args:
        folder: Private folder for py-spy's output.
        stop: If set, the sampling ends early.
    """
    jobs = [(number, name) for number, process in enumerate(processes) for name in process.passes]
    states = [(identify(process.pid), _is_stopped(process.pid)) for process in processes]
    with tempfile.TemporaryDirectory(prefix="record-", dir=folder) as scratch:
        paths = {(number, name): Path(scratch) / f"{number}-{name}" for number, name in jobs}
        try:
            spy = stacks.find_py_spy(py_spy)
            argvs = [argv(spy, processes[at].pid, name, paths[at, name], duration_s, rate_hz) for at, name in jobs]
            outputs = command.run_together(argvs, Path(scratch), deadline_s=duration_s + PATIENCE_S, stop=stop)
        except (CaptureError, OSError) as error:
            problem = why(error) if isinstance(error, CaptureError) else f"py-spy record: {error.strerror or error}"
            return [ProcessRecord(process.pid, process.role, problem=problem) for process in processes]
        output_of = dict(zip(jobs, outputs, strict=True))
        records = []
        for at, process in enumerate(processes):
            was, was_stopped = states[at]
            if was is None or was.start_ticks != process.start_ticks:
                records.append(ProcessRecord(process.pid, process.role, problem="the process has ended"))
                continue
            data = {name: _read(paths[at, name]) for name in process.passes}
            problem = _problem(process.pid, output_of[at, "all"], data["all"], duration_s)
            problem = problem or (STOPPED if was_stopped and _is_stopped(process.pid) else "")
            record = _process(process, data, numbers, max(1, round(duration_s)) * rate_hz, problem)
            active = output_of.get((at, "active"))
            records.append(replace(record, tells_active=active is not None and active.returncode == 0))
        return records


def argv(spy: str, pid: int, name: str, path: Path, duration_s: float, rate_hz: int) -> list[str]:
    command_line = [spy, "record", "--pid", str(pid), "--output", os.fspath(path), "--threads", "--full-filenames"]
    return [
        *command_line,
        "--nonblocking",
        "--duration",
        str(max(1, round(duration_s))),
        "--rate",
        str(rate_hz),
        *PASSES[name],
    ]


def _problem(pid: int, output: command.Output, data: bytes, duration_s: float) -> str:
    if output.timed_out:
        return f"py-spy record gave no answer within {duration_s + PATIENCE_S:g} s"
    if output.returncode is None:
        return output.stderr
    if output.returncode != 0 or not data:
        return f"py-spy record: {ptrace.explain(output.stderr, ptrace.tracing_facts(pid)).message}"
    if identify(pid) is None:
        return "the process ended during the recording"
    return ""


def _is_stopped(pid: int) -> bool:
    return proc.state_letter(pid) in ("T", "t")


def _process(
    process: SampleTarget, data: dict[str, bytes], numbers: StackNumbering, ticks: int, problem: str
) -> ProcessRecord:
    passes: dict[str, Threads] = {}
    for name, content in data.items():
        try:
            # py-spy takes its full number of samples, at longer intervals if the node is busy.
            apart_s = _longest_s(passes["all"]) / max(1, ticks - 1) if name != "all" else 0.0
            passes[name] = (from_trace(content) if name == "all" else from_folded(content, apart_s)) if content else {}
        except ValueError as error:
            problem = problem or f"py-spy record: unreadable output: {error}"
            passes[name] = {}
    return ProcessRecord(
        pid=process.pid,
        role=role_of(process, passes["all"]),
        threads=records_of(process.pid, passes, numbers),
        problem=problem,
    )


def _longest_s(threads: Threads) -> float:
    return max((sum(thread.seconds.values()) for thread in threads.values()), default=0.0)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError:
        return b""
    return data if len(data) <= LARGEST_FILE else b""


# --- py-spy's output (pure) -------------------------------------------------------------------------------------------


@dataclass
class ThreadSamples:
    name: str = ""
    seconds: dict[tuple[Frame, ...], float] = field(default_factory=dict)


Threads = dict[int, ThreadSamples]


class _Arguments(msgspec.Struct, frozen=True):
    filename: str = ""
    line: int = 0


class _SamplerEvent(msgspec.Struct, frozen=True):
    name: str
    ph: str
    ts: int
    tid: int
    args: _Arguments = _Arguments()


def from_trace(data: bytes) -> Threads:
    """Reads the format ``-f chrometrace --threads``, events that push and pop frames. Raises ValueError."""
    threads: Threads = {}
    open_stacks: dict[int, list[tuple[str, Frame]]] = {}
    since: dict[int, int] = {}
    events = from_json(data, list[_SamplerEvent])
    by_time = sorted(range(len(events)), key=lambda at: events[at].ts)  # stable: events of one sample keep their order
    for at in by_time:
        event = events[at]
        stack = open_stacks.setdefault(event.tid, [])
        if since.get(event.tid) != event.ts:
            _close(threads, stack, since.get(event.tid), event.ts)
            since[event.tid] = event.ts
        if event.ph == "B":
            stack.append((event.name, Frame(event.args.filename, event.args.line, event.name)))
        elif event.ph == "E" and stack:
            stack.pop()
    for stack in open_stacks.values():
        _close(threads, stack, None, 0)
    return threads


def _close(threads: Threads, stack: list[tuple[str, Frame]], since: int | None, now: int) -> None:
    named = next((match for name, _ in stack if (match := _NAMED.fullmatch(name)) is not None), None)
    if named is None or since is None:
        return
    thread = threads.setdefault(_tid(named["tid"]), ThreadSamples(named["name"] or ""))
    frames = tuple(frame for _, frame in stack if frame.file or frame.line)[:DEEPEST]
    if frames:
        thread.seconds[frames] = thread.seconds.get(frames, 0.0) + (now - since) / 1e6


def _tid(text: str) -> int:
    return int(text, 0)


def from_folded(data: bytes, apart_s: float) -> Threads:
    """Reads the format ``-f raw --threads``: folded stacks, each with its number of samples.

    Args:
        apart_s: Seconds between two samples.
    """
    threads: Threads = {}
    for text in data.decode("utf-8", "replace").splitlines():
        stack, _, count = text.rpartition(" ")
        parts = stack.split(";")
        match = _NAMED.fullmatch(parts[0])
        frames = tuple(_folded_frame(part) for part in parts[1:])[:DEEPEST]
        if match is not None and count.isdecimal() and frames:
            thread = threads.setdefault(_tid(match["tid"]), ThreadSamples(match["name"] or ""))
            thread.seconds[frames] = thread.seconds.get(frames, 0.0) + int(count) * apart_s
    return threads


def _folded_frame(part: str) -> Frame:
    match = _FOLDED_FRAME.fullmatch(part)
    return Frame(match["file"], int(match["line"]), match["function"]) if match is not None else Frame("", 0, part)


def records_of(pid: int, passes: dict[str, Threads], numbers: StackNumbering) -> list[ThreadRecord]:
    """Merges the passes over a process into its threads, main thread first."""
    everything, active, gil = (passes.get(name, {}) for name in ("all", "active", "gil"))
    main = (
        pid
        if pid in everything
        else next((tid for tid, thread in everything.items() if thread.name == "MainThread"), pid)
    )
    order = sorted({*everything, *active, *gil}, key=lambda tid: (tid != main, tid))
    nothing = ThreadSamples()
    records = []
    for tid in order:
        anywhere = everything.get(tid, nothing)
        on_cpu, holding = active.get(tid, nothing), gil.get(tid, nothing)
        records.append(
            ThreadRecord(
                name=anywhere.name or on_cpu.name or holding.name,
                main=tid == main,
                stacks=_numbered(anywhere, numbers),
                active=_numbered(on_cpu, numbers),
                gil=_numbered(holding, numbers),
            )
        )
    return records


def _numbered(thread: ThreadSamples, numbers: StackNumbering) -> list[tuple[int, float]]:
    most = sorted(thread.seconds.items(), key=lambda item: -item[1])[:MOST_STACKS]
    return [(numbers.of(frames), round(seconds, 3)) for frames, seconds in most]


def role_of(process: SampleTarget, threads: Threads) -> str:
    if process.role == "main":
        return "main"
    from safelaunch.stacks.calls import LOADER_WORKER

    main: Iterable[tuple[Frame, ...]] = threads.get(process.pid, ThreadSamples()).seconds
    worker = any(map(LOADER_WORKER.on, main))
    return "dataloader worker" if worker else "child process"
