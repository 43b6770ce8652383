"""Stacks of a process, read from outside by py-spy (``py-spy dump --json``).

py-spy stops its target with ptrace while it reads; on a stopped process that fails, on one in D state it
never returns. Hence ``stack_of``: look at the state first, give every call a deadline, fall back to
``--nonblocking``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from safelaunch.capture import command, proc, tracing
from safelaunch.capture.redact import redact_text
from safelaunch.capture.result import Result, attempt
from safelaunch.errors import CaptureError
from safelaunch.launch.process import ProcessId, identify
from safelaunch.model import Frame, ProcessState, StackSample, Thread, ThreadState

DEADLINE_S = 3.0
NATIVE_DEADLINE_S = 20.0  # it reads the symbols of every loaded library


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int = 0


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False


_DECODER = msgspec.json.Decoder(list[_SpyThread])


def find_py_spy(given: str | None = None) -> str:
    """The py-spy to use: ``given``, else the one installed beside this Python, else the one on ``PATH``.

    Raises ``CaptureError`` when there is none.
    """
    if given:
        return given
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if not found:
        raise CaptureError("py-spy is not installed", f"{sys.executable} -m pip install py-spy")
    return found


def parse(data: bytes, *, pid: int, at_s: float, how: str, native: bool = False) -> StackSample:
    """The output of ``py-spy dump --json``. Raises ``CaptureError`` when it is not that."""
    try:
        threads = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CaptureError(f"{how}: unreadable output: {error}") from error
    return StackSample(
        pid=pid,
        at_s=at_s,
        how=how,
        native=native,
        threads=tuple(
            Thread(
                frames=tuple(Frame(frame.filename, frame.line, frame.name) for frame in thread.frames),
                name=redact_text(thread.thread_name or ""),
                os_tid=thread.os_thread_id,
                active=thread.active,
                owns_gil=thread.owns_gil,
            )
            for thread in threads
            if thread.pid in (0, pid)
        ),
    )


def dump(
    pid: int,
    *,
    deadline_s: float = DEADLINE_S,
    nonblocking: bool = False,
    native: bool = False,
    py_spy: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Result[StackSample]:
    """One run of py-spy on ``pid``, killed after ``deadline_s`` seconds; never raises.

    A target that a killed py-spy would leave stopped is set running again. ``native`` adds C frames and
    cannot be combined with ``nonblocking``, which then wins.
    """
    native = native and not nonblocking
    options = ["--nonblocking"] * nonblocking + ["--native"] * native
    how = " ".join(["py-spy dump --json", *options])

    def read() -> StackSample:
        begun = identify(pid)
        was_stopped = proc.state_letter(pid) == "T"
        at_s = clock()
        output = command.run(
            [find_py_spy(py_spy), "dump", "--json", *options, "--pid", str(pid)], deadline_s=deadline_s
        )
        if output.timed_out:
            resumed = "" if was_stopped or nonblocking else _set_running(pid, begun)
            raise CaptureError(f"{how}: no answer within {deadline_s:g} s{resumed}")
        if output.returncode != 0:
            facts = tracing.look(pid)
            raise CaptureError(f"{how}: {tracing.explain(output.stderr, facts)}")
        return parse(output.stdout, pid=pid, at_s=at_s, how=how, native=native)

    return attempt(how, read)


def stack_of(
    pid: int,
    state: ProcessState | None = None,
    *,
    deadline_s: float = DEADLINE_S,
    native: bool = False,
    py_spy: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Result[StackSample]:
    """The stacks of ``pid`` by the least intrusive way that works in its state; never raises.

    ``state``: an earlier look at the process; it settles whether a D state lasts, and that the pid was not
    reused. Takes at most ``deadline_s`` seconds, half as much again where the first way had to be given up.
    """
    begin = time.monotonic()

    def missing(reason: str) -> Result[StackSample]:
        return Result(None, "py-spy dump --json", time.monotonic() - begin, missing=reason)

    try:
        now = proc.read_quick(pid, clock=clock)
    except CaptureError as error:
        return missing(error.message)
    if state is not None and state.start_ticks != now.start_ticks:
        return missing(f"process {pid} is gone, its number was given to another")
    if now.state in "ZX":
        return missing(f"process {pid} is a zombie: it has ended, only its exit status is left")
    why = why_nonblocking(now, state)
    first = dump(pid, deadline_s=deadline_s, nonblocking=bool(why), native=native, py_spy=py_spy, clock=clock)
    if why or first.value is not None or "no answer within" not in first.missing:
        return _noted(first, why, begin)
    second = dump(pid, deadline_s=deadline_s / 2, nonblocking=True, py_spy=py_spy, clock=clock)
    if second.value is None:
        return missing(f"{first.missing}; then {second.missing}")
    return _noted(second, first.missing, begin)


def why_nonblocking(now: ProcessState, before: ProcessState | None = None) -> str:
    """Why py-spy must not stop this process, or ``""``. D state counts when an earlier look saw it too."""
    if now.state in "Tt":
        return "the process is stopped"
    if now.frozen:
        return "its cgroup is frozen"
    waiting = {t.tid for t in now.threads if t.state == "D"}
    if before is not None:
        waiting &= {t.tid for t in before.threads if t.state == "D"}
    return f"thread {min(waiting)} is in uninterruptible sleep" if waiting else ""


def to_text(sample: StackSample | None, state: ProcessState | None = None, *, missing: str = "") -> str:
    """``stack.txt``: the process, then each thread with its kernel state and frames, innermost first."""
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
        return "\n".join(lines) + "\n"
    lines += [f"Read by {sample.how}", ""]
    for thread in sorted(sample.threads, key=lambda t: t.os_tid != sample.pid):  # the main thread first
        known = kernel.get(thread.os_tid or 0)
        flags = ("active" if thread.active else "idle") + ("+gil" if thread.owns_gil else "")
        name = thread.name or (known.name if known else "")
        lines.append(f'Thread {thread.os_tid or "?"} ({flags}): "{name}"{_kernel(known)}')
        lines += [f"    {_frame(frame)}" for frame in thread.frames]
    return "\n".join(lines) + "\n"


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


def _noted(result: Result[StackSample], why: str, begin: float) -> Result[StackSample]:
    note = f"--nonblocking, may be inexact: {why}" if why else ""
    return Result(result.value, result.how, time.monotonic() - begin, result.missing, note)


def _set_running(pid: int, begun: ProcessId | None, patience_s: float = 0.3) -> str:
    """See to it that a target is not left stopped by the tracer that was just killed; says what was done.

    The kernel detaches a dead tracer's targets and lets them run. Where a stop that the tracer caused
    lingers, SIGCONT ends it.
    """
    until = time.monotonic() + patience_s
    while (letter := proc.state_letter(pid)) in ("t", "T"):
        if time.monotonic() >= until:
            if letter == "T" and begun is not None and identify(pid) == begun:
                os.kill(pid, signal.SIGCONT)
                return "; it left the process stopped, which was continued"
            return "; the process is still traced"
        time.sleep(0.01)
    return ""
