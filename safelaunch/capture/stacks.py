"""Reads the stacks of a process from outside, with py-spy (``py-spy dump --json``).

A process that may be healthy is never stopped for it (``--nonblocking``). A ptrace stop ends ``recv`` with a timeout,
``semop``, ``epoll_wait`` and ``sigtimedwait`` with EINTR, which C code often takes for an error. It also cuts a write
to a full pipe short, and Python without buffers (``python -u``, as torchrun starts ranks) drops the rest. The price:
the stack of a thread that runs while it is read may mix two moments. The scheduler's counters show which threads ran.
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
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from safelaunch.capture import command, proc, user_source
from safelaunch.capture.memory import ProcessMemory
from safelaunch.capture.result import Result, attempt
from safelaunch.capture.result import why as reason_of
from safelaunch.job.process import ProcessId, identify
from safelaunch.model import CallArguments, Frame, ProcessState, StackSample, Thread, ThreadState
from safelaunch.stacks.frames import is_library, is_ours
from safelaunch.stacks.kernel import WRITES
from safelaunch.system import commands
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import link_of, text_of
from safelaunch.system.printable import clean

DEADLINE_S = 3.0
VERSION_S = 3.0
READS = 3  # of a process whose threads run while they are read


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


def find_py_spy(given: str | None = None) -> str:
    """The py-spy to use: ``given``, else the one installed with this safelaunch, else the one on ``PATH``.

    Raises ``CaptureError`` if there is none.
    """
    if given:
        return given
    places = (Path(sys.executable).parent, Path(site.getuserbase(), "bin"))  # sudo leaves out the latter of PATH
    beside = next((str(place / "py-spy") for place in places if os.access(place / "py-spy", os.X_OK)), None)
    found = beside or shutil.which("py-spy")
    if not found:
        fix = commands.line(commands.pip_install("py-spy")).strip()
        raise CaptureError("py-spy is not installed", fix, "not installed")
    return found


def parse(data: bytes, *, pid: int, at_s: float, how: str, native: bool = False) -> StackSample:
    """Parses the output of ``py-spy dump --json``. Raises ``CaptureError`` for anything else."""
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
    """The ranks and the tag that the innermost call of c10d names. All other local variables are dropped here."""
    frame = next((frame for frame in frames if frame.filename.endswith(_C10D)), None)
    found = {
        one.name: int(one.repr)
        for one in (frame.locals or () if frame is not None else ())
        if one.name in CallArguments.__struct_fields__ and one.repr is not None and _INTEGER.fullmatch(one.repr)
    }
    return CallArguments(**found) if found else None


def _names_of_key(frames: Sequence[_SpyFrame]) -> tuple[tuple[str, str], ...]:
    """The numbers and strings that the innermost line names in its wait for a key of a store."""
    inner = next((frame for frame in frames if frame.filename.endswith(".py")), None)
    if inner is None or not inner.locals or is_library(inner.filename):
        return ()
    found = _WAITS_FOR_KEY.search(user_source.line(inner.filename, inner.line) or "")
    names = set(_NAME.findall(found["key"])) if found else set()
    return tuple(
        (local.name, local.repr)
        for local in inner.locals
        if local.name in names and _VALUE.fullmatch(local.repr or "") and local.repr
    )


def _lock_file(frames: Iterable[_SpyFrame]) -> str:
    """The file that the library ``filelock`` asks for again and again, and has open only as it asks; or the one that
    stands for a build of torch's C++ extensions.
    """
    for frame in frames:
        if "/filelock/" in frame.filename:
            return _text(frame, "lock_filename")
        if frame.filename.endswith(_EXTENSIONS):
            folder = _text(frame, "build_directory")
            return f"{folder}/lock" if folder else ""
    return ""


def _text(frame: _SpyFrame, name: str) -> str:
    """The value of a local variable that is a string; empty where py-spy could not read it, or not all of it."""
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

    If a killed py-spy leaves its target stopped, the target is continued. ``native`` adds C frames; ``nonblocking``
    wins over it. Local variables are asked for, as they tell whom a send or receive waits for: it costs nothing
    measurable. py-spy reads them less reliably than frames, so where it fails they are left out.
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
            resumed = "" if was_stopped or nonblocking else _set_running(pid, begun)
            raise CaptureError(f"{how}: no answer within {deadline_s:g} s{resumed}", kind="timeout")
        if output.returncode != 0:
            why = explain(output.stderr, tracing_facts(pid))
            raise CaptureError(f"{how}: {why.message}", why.fix, why.kind)
        return _with_tids_here(parse(output.stdout, pid=pid, at_s=at_s, how=how, native=native))

    return attempt(how, read)


def _with_tids_here(sample: StackSample) -> StackSample:
    """Renumbers the threads of a process in a container: on Python 3.11+, py-spy shows the numbers they have there."""
    inside = proc.tids_inside(sample.pid)
    if not inside:
        return sample
    known = proc.scheduled(sample.pid)

    def here(thread: Thread) -> Thread:
        tid = inside.get(thread.os_tid or 0)
        if tid is None or tid not in known:
            return thread
        return msgspec.structs.replace(thread, os_tid=tid, active=known[tid].runs)

    return msgspec.structs.replace(sample, threads=tuple(map(here, sample.threads)))


def stack_of(
    pid: int, state: ProcessState | None = None, *, deadline_s: float = DEADLINE_S, py_spy: str | None = None
) -> Result[StackSample]:
    """The stacks of ``pid``, read without stopping it, for at most ``deadline_s`` seconds; never raises.

    ``state``: an earlier look at the process, which shows whether its pid was reused.

    Reads up to ``READS`` times, until no thread that sleeps now ran meanwhile; each thread as first read whole.
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
    """The stacks of ``pid`` by ``read``, which is called up to ``READS`` times, until no thread that sleeps now ran
    meanwhile; each thread as first read whole.
    """
    found: Result[StackSample] | None = None
    for _ in range(READS):
        before = proc.scheduled(pid)
        one = read()
        after = proc.scheduled(pid)
        quiet = {tid for tid, now in after.items() if not now.runs and now == before.get(tid)}
        asleep = {tid for tid, now in after.items() if not now.runs}
        if one.value is not None:
            threads = found.value.threads if found is not None and found.value is not None else ()
            whole = {thread.os_tid: thread for thread in threads if not thread.torn}
            fresh = (_seen(thread, pid, after, quiet) for thread in one.value.threads)
            merged = tuple(whole.get(thread.os_tid, thread) if thread.torn else thread for thread in fresh)
            found = replace(one, value=msgspec.structs.replace(one.value, threads=merged))
            again = any(
                thread.torn and (thread.os_tid is None or thread.os_tid in asleep)
                for thread in merged
                if not all(is_ours(frame.file) for frame in thread.frames)  # as one that answers does
            )
        else:
            found = found or one
            again = not one.kind and quiet != set(after)  # else it is no torn read that it failed at
        if not again or time.monotonic() >= until:
            break
    assert found is not None
    return found


def _seen(thread: Thread, pid: int, threads: Mapping[int, proc.Scheduled], quiet: Collection[int]) -> Thread:
    """With its kernel id, which py-spy finds without a stop only on Python 3.11+, and whether it ran meanwhile."""
    tid = thread.os_tid
    if tid is None and (tid := proc.tid_of(ProcessMemory(pid), thread.ident, threads)) is not None:
        thread = msgspec.structs.replace(thread, os_tid=tid, active=threads[tid].runs)
    return msgspec.structs.replace(thread, torn=len(quiet) < len(threads) if tid is None else tid not in quiet)


def with_c_frames_of(pid: int, state: ProcessState | None = None, *, deadline_s: float) -> Result[StackSample]:
    """The stacks of ``pid`` with C frames, for which it is stopped; never raises. ``state`` as for :func:`stack_of`."""
    try:
        why = why_nonblocking(_alive(pid, state), state)
    except CaptureError as error:
        why = error.message
    if why:
        return Result(None, "py-spy dump --json --native", 0.0, missing=why)
    return dump(pid, deadline_s=deadline_s, native=True)


def _alive(pid: int, state: ProcessState | None) -> ProcessState:
    """The process now, the same as in ``state``; raises ``CaptureError``."""
    now = proc.read_quick(pid)
    if state is not None and state.start_ticks != now.start_ticks:
        raise CaptureError(f"process {pid} is gone, and another process has its pid")
    if now.state in "ZX":
        raise CaptureError(f"process {pid} is a zombie: it has ended, and only its exit status is left")
    return now


def why_nonblocking(now: ProcessState, before: ProcessState | None = None) -> str:
    """Why py-spy must not stop this process, or ``""``. D state counts when an earlier look saw it too; the system call
    is known from the earlier look alone.
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
        return _shown(lines)
    lines += [f"Read by {sample.how}", ""]
    for thread in sorted(sample.threads, key=lambda t: t.os_tid != sample.pid):  # the main thread first
        known = kernel.get(thread.os_tid or 0)
        flags = ("active" if thread.active else "idle") + ("+gil" if thread.owns_gil else "")
        flags += ", ran while it was read" if thread.torn else ""
        name = thread.name or (known.name if known else "")
        lines.append(f'Thread {thread.os_tid or "?"} ({flags}): "{name}"{_kernel(known)}')
        lines += [f"    {_frame(frame)}" for frame in thread.frames]
    return _shown(lines)


def _shown(lines: Iterable[str]) -> str:
    """The lines as text. Names and arguments come from the job, so control characters are replaced."""
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


def _set_running(pid: int, begun: ProcessId | None, patience_s: float = 0.3) -> str:
    """Makes sure that a killed tracer does not leave its target stopped; returns what it did, in words.

    The kernel detaches a dead tracer's targets and lets them run. If a stop by the tracer remains, SIGCONT ends it.
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


# --- why a process could not be traced --------------------------------------------------------------------------------
# py-spy's messages name the failed system call, but rarely the cause: in a container without CAP_SYS_PTRACE, it
# prints ``Failed to get process executable name. Check that the process is running``.

_CAP_SYS_PTRACE = 1 << 19
_DENIED = ("permission denied", "os error 13", "operation not permitted", "os error 1)", "eperm")
_ADD_CAPABILITY = "docker run --cap-add=SYS_PTRACE, or securityContext.capabilities.add: [SYS_PTRACE] in Kubernetes"


@dataclass(frozen=True)
class PtraceFacts:
    """The facts that decide whether we may trace a process. ``yama``: kernel.yama.ptrace_scope, None = off."""

    alive: bool
    same_user: bool
    capable: bool  # this process has CAP_SYS_PTRACE
    yama: int | None
    container: bool
    executable: str = ""


def tracing_facts(pid: int) -> PtraceFacts:
    """The current facts for ``pid``; never raises."""
    status = text_of(Path("/proc/self/status"))
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    target = re.search(r"^Uid:\s*\d+\s+(\d+)", text_of(Path(f"/proc/{pid}/status")), re.MULTILINE)
    yama = text_of(Path("/proc/sys/kernel/yama/ptrace_scope")).strip()
    return PtraceFacts(
        alive=target is not None,
        same_user=target is not None and int(target[1]) == os.geteuid(),
        capable=effective is not None and bool(int(effective[1], 16) & _CAP_SYS_PTRACE),
        yama=int(yama) if yama.isdigit() else None,
        container=Path("/.dockerenv").exists()
        or bool(re.search("docker|kubepods|containerd", text_of(Path("/proc/1/cgroup")))),
        executable=Path(link_of(f"/proc/{pid}/exe")).name,
    )


def explain(stderr: str, facts: PtraceFacts) -> CaptureError:
    """py-spy's error message as cause, remedy and kind of failure."""
    said = stderr.lower()
    if not facts.alive:
        return CaptureError("the process is gone")
    if "failed to suspend" in said:
        return CaptureError("the process is stopped, or in a state in which it cannot be suspended")
    if any(phrase in said for phrase in _DENIED):
        return _denied(facts)
    if "python version from target" in said or "not a python" in said:
        executable = facts.executable or "executable unknown"
        why = f"this is not a Python process, or its interpreter was stripped ({executable})"
        return CaptureError(why, kind="absent")
    if "unsupported" in said and "version" in said:
        return CaptureError(
            f"this py-spy does not know the target's Python: {summary(stderr)}", "upgrade py-spy", "outdated"
        )
    if "interpreter" in said:
        return CaptureError(f"no Python interpreter found: the process is starting or ending ({summary(stderr)})")
    return CaptureError(summary(stderr) or "py-spy failed without a message")


def refusal(pid: int) -> str:
    """Why py-spy can't read the stacks of ``pid``; empty if it can, or if that is not certain."""
    try:
        py_spy = find_py_spy()
        shown = command.run([py_spy, "--version"], deadline_s=VERSION_S)
    except CaptureError as error:
        return reason_of(error)
    if shown.timed_out:
        return ""
    if shown.returncode or not shown.stdout.startswith(b"py-spy"):
        return f"{py_spy} does not work ({summary(shown.stderr) or 'no version'})"
    if may_read(pid):
        return ""
    read = dump(pid, nonblocking=True)  # its file may have rights that this process lacks
    if read.value is not None or read.kind == "timeout":
        return ""
    return reason_of(explain("permission denied", tracing_facts(pid)))


def may_read(pid: int) -> bool:
    """Tells if this process may open the memory of ``pid``, for which the kernel asks the same as of a tracer."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass  # it has ended
    return True


def summary(stderr: str) -> str:
    """``Error: A / Caused by: 0: B 1: B`` as ``A: B``, without the backtrace."""
    text = re.split(r"^\s*(?:Stack backtrace|note:)", stderr, maxsplit=1, flags=re.MULTILINE)[0]
    parts: list[str] = []
    for line in text.splitlines():
        part = re.sub(r"^\s*(Error:|Caused by:|\d+:)\s*", "", line).strip()
        if part and part not in parts:
            parts.append(part)
    return ": ".join(parts)[:300]


def _denied(facts: PtraceFacts) -> CaptureError:
    if not facts.same_user and not facts.capable:
        other = f"with CAP_SYS_PTRACE: {_ADD_CAPABILITY}" if facts.container else "as root"
        fix = f"run safelaunch as that user, or {other}"
        return CaptureError("permission denied: the process runs as another user", fix, "denied")
    by_yama = f"permission denied by Yama (kernel.yama.ptrace_scope={facts.yama})"
    if facts.yama in (1, 2) and not facts.capable:
        fix = f"as root, sysctl kernel.yama.ptrace_scope=0; or grant CAP_SYS_PTRACE: {_ADD_CAPABILITY}"
        return CaptureError(by_yama, fix, "denied")
    if facts.yama == 3:
        fix = "no process may trace another until the next reboot: set it to 1 in /etc/sysctl.d and reboot"
        return CaptureError(by_yama, fix, "denied")
    why = "permission denied: a seccomp filter forbids ptrace, or CAP_SYS_PTRACE is missing"
    return CaptureError(why, _ADD_CAPABILITY, "denied")
