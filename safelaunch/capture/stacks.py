"""Reads the stacks of a process from outside, with py-spy (``py-spy dump --json``).

A process that might be healthy is never stopped (``--nonblocking``). A ptrace stop ends ``recv`` with a timeout,
``semop``, ``epoll_wait`` and ``sigtimedwait`` with EINTR, which C code often treats as an error. It also shortens a
write to a full pipe, and unbuffered Python (``python -u``, as torchrun starts ranks) drops the rest. The disadvantage
of not stopping is that the stack of a thread that runs during the read can mix two moments. The scheduler's counters
show which threads ran.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import site
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from safelaunch.capture import command, proc, user_source
from safelaunch.capture.memory import ProcessMemory
from safelaunch.capture.ptrace import explain, may_read, summary, tracing_facts
from safelaunch.capture.result import Result, attempt
from safelaunch.capture.result import why as reason_of
from safelaunch.job.process import ProcessId, identify
from safelaunch.model import CallArguments, Frame, ProcessState, StackSample, Thread, ThreadState
from safelaunch.stacks.frames import is_library, is_ours
from safelaunch.stacks.kernel import WRITES
from safelaunch.system import commands
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.printable import clean

DEADLINE_S = 3.0
VERSION_S = 3.0
READS = 3  # if threads run during the read


class _SpyLocal(msgspec.Struct):
    name: str
    repr: str | None = None


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0
    locals: list[_SpyLocal] | None = None


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None
    thread_id: int = 0
    active: bool = False
    owns_gil: bool = False


_C10D = "torch/distributed/distributed_c10d.py"
_EXTENSIONS = "torch/utils/cpp_extension.py"
_INTEGER = re.compile(r"-?\d{1,9}")
_WAITS_FOR_KEY = re.compile(r"store\w*(?:\(\))?\.(?:get|wait)\((?P<key>.+)", re.IGNORECASE)
_NAME = re.compile(r"[^\W\d]\w*")
_VALUE = re.compile(r"-?\d{1,18}|'[^'\\]{0,120}'|\"[^\"\\]{0,120}\"")


def find_py_spy(path: str | None = None) -> str:
    """Returns ``path``, else the py-spy installed with this safelaunch, else the one on ``PATH``.

    Raises ``CaptureError`` if none exists.
    """
    if path:
        return path
    places = (Path(sys.executable).parent, Path(site.getuserbase(), "bin"))  # sudo removes the user's bin from PATH
    installed = next((str(place / "py-spy") for place in places if os.access(place / "py-spy", os.X_OK)), None)
    program = installed or shutil.which("py-spy")
    if not program:
        fix = commands.line(commands.pip_install("py-spy")).strip()
        raise CaptureError("py-spy is not installed", fix, "not installed")
    return program


def parse(data: bytes, *, pid: int, at_s: float, how: str, native: bool = False) -> StackSample:
    """Parses the output of ``py-spy dump --json``. Raises ``CaptureError``."""
    try:
        threads = from_json(data, list[_SpyThread])
    except msgspec.DecodeError as error:
        raise CaptureError(f"{how}: unreadable output: {error}") from error
    return StackSample(
        pid=pid,
        at_s=at_s,
        how=how,
        native=native,
        threads=tuple(
            Thread(
                frames=tuple(Frame(frame.filename, frame.line, frame.name) for frame in thread.frames),
                name=thread.thread_name or "",
                os_tid=thread.os_thread_id,
                active=thread.active,
                owns_gil=thread.owns_gil,
                ident=thread.thread_id,
                call=_arguments(thread.frames),
                names=_names_of_key(thread.frames),
                lock_file=_lock_file(thread.frames),
            )
            for thread in threads
            if thread.pid in (0, pid)
        ),
    )


def _arguments(frames: Iterable[_SpyFrame]) -> CallArguments | None:
    """Returns the ranks and tag in the innermost c10d call, dropping all other local variables."""
    frame = next((frame for frame in frames if frame.filename.endswith(_C10D)), None)
    values = {
        local.name: int(local.repr)
        for local in (frame.locals or () if frame is not None else ())
        if local.name in CallArguments.__struct_fields__ and local.repr is not None and _INTEGER.fullmatch(local.repr)
    }
    return CallArguments(**values) if values else None


def _names_of_key(frames: Sequence[_SpyFrame]) -> tuple[tuple[str, str], ...]:
    """Returns the numbers and strings in the store key that the innermost line waits for; empty if it doesn't wait."""
    inner = next((frame for frame in frames if frame.filename.endswith(".py")), None)
    if inner is None or not inner.locals or is_library(inner.filename):
        return ()
    match = _WAITS_FOR_KEY.search(user_source.line(inner.filename, inner.line) or "")
    names = set(_NAME.findall(match["key"])) if match else set()
    return tuple(
        (local.name, local.repr)
        for local in inner.locals
        if local.name in names and _VALUE.fullmatch(local.repr or "") and local.repr
    )


def _lock_file(frames: Iterable[_SpyFrame]) -> str:
    """Returns the file that library ``filelock`` polls, or the lock file of a build of torch's C++ extensions.

    ``filelock`` opens the file only during each attempt, so it isn't among the process's descriptors.
    """
    for frame in frames:
        if "/filelock/" in frame.filename:
            return _text(frame, "lock_filename")
        if frame.filename.endswith(_EXTENSIONS):
            folder = _text(frame, "build_directory")
            return f"{folder}/lock" if folder else ""
    return ""


def _text(frame: _SpyFrame, name: str) -> str:
    shown = next((local.repr for local in frame.locals or () if local.name == name and local.repr), "")
    return "" if shown.endswith("...") else shown.strip("'\"")


def dump(
    pid: int,
    *,
    deadline_s: float = DEADLINE_S,
    nonblocking: bool = False,
    native: bool = False,
    py_spy: str | None = None,
) -> Result[StackSample]:
    """Runs py-spy once on ``pid``, for at most ``deadline_s`` seconds; never raises.

    Resumes the process if py-spy had to be killed and left it stopped. ``native`` adds C frames, unless
    ``nonblocking``. Also reads local variables, which show the peer of a send or receive, at no measurable cost. If
    py-spy fails to read them, reads only frames, which is more reliable.
    """
    native = native and not nonblocking
    options = ["--nonblocking"] * nonblocking + ["--native"] * native
    how = " ".join(["py-spy dump --json", *options])

    def read() -> StackSample:
        begin, begun = time.monotonic(), identify(pid)
        was_stopped = proc.state_letter(pid) == "T"
        at_s = time.monotonic()
        words = [find_py_spy(py_spy), "dump", "--json", *options, "--pid", str(pid)]
        output = command.run([*words, "--locals"], deadline_s=deadline_s)
        left_s = begin + deadline_s - time.monotonic()
        if output.returncode != 0 and not output.timed_out and left_s > 0:
            output = command.run(words, deadline_s=left_s)
        if output.timed_out:
            resumed = "" if was_stopped or nonblocking else _resume(pid, begun)
            raise CaptureError(f"{how}: no answer within {deadline_s:g} s{resumed}", kind="timeout")
        if output.returncode != 0:
            why = explain(output.stderr, tracing_facts(pid))
            raise CaptureError(f"{how}: {why.message}", why.fix, why.kind)
        return _with_tids_here(parse(output.stdout, pid=pid, at_s=at_s, how=how, native=native))

    return attempt(how, read)


def _with_tids_here(sample: StackSample) -> StackSample:
    """Converts the thread ids of a process in a container: for Python 3.11+, py-spy reports the container's ids."""
    inside = proc.tids_inside(sample.pid)
    if not inside:
        return sample
    schedule = proc.scheduled(sample.pid)

    def renumber(thread: Thread) -> Thread:
        tid = inside.get(thread.os_tid or 0)
        if tid is None or tid not in schedule:
            return thread
        return msgspec.structs.replace(thread, os_tid=tid, active=schedule[tid].runs)

    return msgspec.structs.replace(sample, threads=tuple(map(renumber, sample.threads)))


def stack_of(
    pid: int, state: ProcessState | None = None, *, deadline_s: float = DEADLINE_S, py_spy: str | None = None
) -> Result[StackSample]:
    """Reads the stacks of ``pid`` without stopping it, for at most ``deadline_s`` seconds; never raises.

    ``state`` is an earlier view of the process, which shows whether its pid has been reused.
    """
    begin = time.monotonic()
    until = begin + deadline_s
    try:
        _alive(pid, state)
    except CaptureError as error:
        return Result(None, "py-spy dump --json", time.monotonic() - begin, missing=error.message)

    def read() -> Result[StackSample]:
        return dump(pid, deadline_s=until - time.monotonic(), nonblocking=True, py_spy=py_spy)

    return replace(settled(pid, until, read), duration_s=time.monotonic() - begin)


def settled(pid: int, until: float, read: Callable[[], Result[StackSample]]) -> Result[StackSample]:
    """Reads the stacks of ``pid`` up to ``READS`` times, until every sleeping thread was asleep during a whole read.

    Keeps the first stack of each thread that didn't run while it was read.
    """
    best: Result[StackSample] | None = None
    for _ in range(READS):
        before = proc.scheduled(pid)
        result = read()
        after = proc.scheduled(pid)
        quiet = {tid for tid, now in after.items() if not now.runs and now == before.get(tid)}
        asleep = {tid for tid, now in after.items() if not now.runs}
        if result.value is not None:
            threads = best.value.threads if best is not None and best.value is not None else ()
            whole = {thread.os_tid: thread for thread in threads if not thread.torn}
            fresh = (_with_schedule(thread, pid, after, quiet) for thread in result.value.threads)
            merged = tuple(whole.get(thread.os_tid, thread) if thread.torn else thread for thread in fresh)
            best = replace(result, value=msgspec.structs.replace(result.value, threads=merged))
            again = any(
                thread.torn and (thread.os_tid is None or thread.os_tid in asleep)
                for thread in merged
                if not all(is_ours(frame.file) for frame in thread.frames)  # the answering thread runs
            )
        else:
            best = best or result
            again = not result.kind and quiet != set(after)  # otherwise, threads that ran don't explain the failure
        if not again or time.monotonic() >= until:
            break
    assert best is not None
    return best


def _with_schedule(thread: Thread, pid: int, threads: Mapping[int, proc.Scheduled], quiet: Collection[int]) -> Thread:
    tid = thread.os_tid
    if tid is None and (tid := proc.tid_of(ProcessMemory(pid), thread.ident, threads)) is not None:
        thread = msgspec.structs.replace(thread, os_tid=tid, active=threads[tid].runs)
    return msgspec.structs.replace(thread, torn=len(quiet) < len(threads) if tid is None else tid not in quiet)


def with_c_frames_of(pid: int, state: ProcessState | None = None, *, deadline_s: float) -> Result[StackSample]:
    """Reads the stacks of ``pid`` with C frames, which stops it; never raises.

    ``state`` is the same as for :func:`stack_of`.
    """
    try:
        why = why_nonblocking(_alive(pid, state), state)
    except CaptureError as error:
        why = error.message
    if why:
        return Result(None, "py-spy dump --json --native", 0.0, missing=why)
    return dump(pid, deadline_s=deadline_s, native=True)


def _alive(pid: int, state: ProcessState | None) -> ProcessState:
    now = proc.read_quick(pid)
    if state is not None and state.start_ticks != now.start_ticks:
        raise CaptureError(f"process {pid} is gone, and another process has its pid")
    if now.state in "ZX":
        raise CaptureError(f"process {pid} is a zombie: it has ended, and only its exit status is left")
    return now


def why_nonblocking(now: ProcessState, before: ProcessState | None = None) -> str:
    """Returns why py-spy must not stop this process; empty if it may.

    D state counts only if ``before`` shows it, too. Only ``before`` contains system calls.
    """
    if now.state in "Tt":
        return "the process is stopped"
    if now.frozen:
        return "its cgroup is frozen"
    waiting = {t.tid for t in now.threads if t.state == "D"}
    if before is not None:
        waiting &= {t.tid for t in before.threads if t.state == "D"}
    if waiting:
        return f"thread {min(waiting)} is in uninterruptible sleep"
    asleep = {t.tid for t in now.threads if t.state == "S"}
    writes = [t.tid for t in before.threads if t.tid in asleep and t.syscall_name in WRITES] if before else []
    return f"thread {min(writes)} waits in a write, which a stop would cut short" if writes else ""


def to_text(sample: StackSample | None, state: ProcessState | None = None, *, missing: str = "") -> str:
    """Formats ``stack.txt``: the process, then each thread with its kernel state and frames."""
    lines: list[str] = []
    if state is not None:
        lines.append(f"Process {state.pid}: {' '.join(state.cmdline) or state.name}")
        words = _STATE_WORDS.get(state.state, "")
        lines.append(f"State {state.state} ({words})" + (", cgroup frozen" if state.frozen else ""))
        lines += [f"Note: {state.note}"] if state.note else []
    elif sample is not None:
        lines.append(f"Process {sample.pid}")
    kernel = {thread.tid: thread for thread in state.threads} if state else {}
    if sample is None:
        lines += [f"No Python stacks: {missing or 'not taken'}", ""]
        lines += [f"Kernel thread {t.tid} {t.name!r}{_kernel(t)}" for t in kernel.values()]
        return _shown(lines)
    lines += [f"Read by {sample.how}", ""]
    for thread in sorted(sample.threads, key=lambda t: t.os_tid != sample.pid):  # the main thread first
        in_kernel = kernel.get(thread.os_tid or 0)
        flags = ("active" if thread.active else "idle") + ("+gil" if thread.owns_gil else "")
        flags += ", ran while it was read" if thread.torn else ""
        name = thread.name or (in_kernel.name if in_kernel else "")
        lines.append(f'Thread {thread.os_tid or "?"} ({flags}): "{name}"{_kernel(in_kernel)}')
        lines += [f"    {_frame(frame)}" for frame in thread.frames]
    return _shown(lines)


def _shown(lines: Iterable[str]) -> str:
    return "".join(f"{clean(line)}\n" for line in lines)


_STATE_WORDS = {
    "R": "running", "S": "sleeping", "D": "uninterruptible sleep", "T": "stopped by a signal", "t": "traced",
    "Z": "zombie", "X": "dead", "I": "idle", "P": "parked",
}  # fmt: skip


def _kernel(thread: ThreadState | None) -> str:
    if thread is None:
        return ""
    target = f" -> {thread.fd_target}" if thread.fd_target else ""
    call = thread.syscall_name or (f"syscall {thread.syscall}" if thread.syscall is not None else "")
    if call:
        call += f"(fd {thread.fd}{target})" if thread.fd is not None else target
    parts = [thread.state, call, f"in {thread.wchan}" if thread.wchan else ""]
    return f" [{', '.join(part for part in parts if part)}]"


def _frame(frame: Frame) -> str:
    return f"{frame.function} ({frame.file}:{frame.line})" if frame.line else f"{frame.function} ({frame.file})"


def _resume(pid: int, begun: ProcessId | None, patience_s: float = 0.3) -> str:
    """Resumes a process that a killed tracer left stopped. Returns a note for the user.

    The kernel detaches a dead tracer from its targets and resumes them. SIGCONT ends any remaining stop.
    """
    until = time.monotonic() + patience_s
    while (letter := proc.state_letter(pid)) in ("t", "T"):
        if time.monotonic() >= until:
            if letter == "T" and begun is not None and identify(pid) == begun:
                os.kill(pid, signal.SIGCONT)
                return "; py-spy left the process stopped, so safelaunch continued it"
            return "; the process is still traced"
        time.sleep(0.01)
    return ""


def refusal(pid: int) -> str:
    """Returns why py-spy can't read the stacks of ``pid``; empty if it can, or if this is uncertain."""
    try:
        py_spy = find_py_spy()
        version = command.run([py_spy, "--version"], deadline_s=VERSION_S)
    except CaptureError as error:
        return reason_of(error)
    if version.timed_out:
        return ""
    if version.returncode or not version.stdout.startswith(b"py-spy"):
        return f"{py_spy} doesn't work ({summary(version.stderr) or 'no version'})"
    if may_read(pid):
        return ""
    read = dump(pid, nonblocking=True)  # py-spy might have capabilities that this process lacks
    if read.value is not None or read.kind == "timeout":
        return ""
    return reason_of(explain("permission denied", tracing_facts(pid)))
