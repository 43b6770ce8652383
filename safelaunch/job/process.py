"""Starts, signals and reaps the job's processes.

A process is identified by its pid *and* its start time. safelaunch never signals processes by name, by environment, or
by a pid that might have been reused.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from safelaunch.system import procstat

# Not SIGTSTP: Ctrl-Z stops safelaunch, as it would stop torchrun.
FORWARDED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
SI_KERNEL = 0x80  # siginfo.si_code of the terminal's signals
PR_SET_CHILD_SUBREAPER = 36
ASK_EVERY_S = 0.05
KILL_EVERY_S = 0.01
WHOLE = 2048  # bytes of a /proc file that a single read returns


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, identified by pid and start time."""

    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks}"

    def is_alive(self) -> bool:
        """Returns whether the process is running; False for a zombie."""
        stat = procstat.read(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state not in "ZX"

    def is_stopped(self) -> bool:
        stat = procstat.read(self.pid)
        return stat is not None and stat.start_ticks == self.start_ticks and stat.state in "Tt"

    def send(self, signum: int) -> bool:
        """Sends a signal, if the pid still belongs to this process; returns whether it did."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:
            return self._send_by_pid(signum)
        try:
            # The descriptor pins the pid, so this holds until the signal is sent.
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _send_by_pid(self, signum: int) -> bool:
        """Sends a signal by pid, for kernels before 5.3, which lack pidfd."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def identify(pid: int) -> ProcessId | None:
    """Returns the identity of a process, even of a zombie; None if it is gone."""
    stat = procstat.read(pid)
    return ProcessId(pid, stat.start_ticks) if stat else None


ProcessTable = Mapping[int, tuple[int, int]]


def process_table() -> ProcessTable:
    """Returns all processes of the node: pid → (ppid, start_ticks)."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return {pid: (stat.ppid, stat.start_ticks) for pid in pids if (stat := procstat.read(pid)) is not None}


def descendants(
    roots: Iterable[int], *, exclude: Iterable[int] = (), table: ProcessTable | None = None
) -> tuple[ProcessId, ...]:
    """Returns every process below ``roots``, parents before children.

    Args:
        exclude: Pids to leave out, with everything below them.
        table: Table of processes; None reads it now.
    """
    children: dict[int, list[ProcessId]] = {}
    for pid, (parent, start_ticks) in (process_table() if table is None else table).items():
        children.setdefault(parent, []).append(ProcessId(pid, start_ticks))
    excluded = set(exclude)
    below: list[ProcessId] = []
    queue = list(roots)
    while queue:
        for child in children.pop(queue.pop(0), ()):
            if child.pid not in excluded:
                below.append(child)
                queue.append(child.pid)
    return tuple(below)


def block_signals() -> frozenset[signal.Signals]:
    """Blocks the signals that the supervisor waits for; returns the previous mask, for the job.

    Call it in the main thread before starting others, so that they inherit the mask. Under ``nohup``, SIGHUP stays
    ignored and isn't forwarded, because torchrun would end the job.
    """
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD, signal.SIGALRM} - kept)
    return frozenset(signal.Signals(number) for number in before)


def start(
    argv: Sequence[str], env: Mapping[str, str], mask: Iterable[int], tell: Callable[[ProcessId], None] | None = None
) -> int:
    """Starts the job's first process in a new session; returns its pid. Raises OSError if it can't start.

    Args:
        tell: See ``fork``.
    """
    return fork(lambda: become_job(argv, env, mask), tell).pid


def become_job(argv: Sequence[str], env: Mapping[str, str], mask: Iterable[int]) -> NoReturn:
    """Runs in a forked child: becomes the job's first process. Resets SIGPIPE and SIGXFSZ, which Python ignores.

    Also resets SIGINT unless it is ignored: Python's handler would only set a flag, which exec would discard.
    """
    os.setsid()
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if "SAFELAUNCH_RUN_DIR" in env:  # so that the beacon recognises the agent
        env = {**env, "SAFELAUNCH_AGENT_PID": str(os.getpid())}
    os.execve(argv[0], list(argv), env)


def fork(become: Callable[[], NoReturn], tell: Callable[[ProcessId], None] | None = None) -> ProcessId:
    """Forks a child in which ``become`` calls ``exec``, and returns after the exec.

    The child waits until ``tell`` has returned, so every process is recorded before it runs. It exits if ``tell``
    raises, or if this process is killed. Raises what ``tell`` raises, and OSError if the exec fails. Call it while this
    process has only one thread.
    """
    may_go, go = os.pipe()
    problem, report = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)  # not to wait for itself
        _become(become, may_go, report)
    os.close(may_go)
    os.close(report)
    try:
        child = identify(pid) or ProcessId(pid, 0)
        if tell is not None:
            tell(child)
        os.write(go, b"!")
    except BaseException:
        os.close(go)
        os.waitpid(pid, 0)
        os.close(problem)
        raise
    os.close(go)
    number = os.read(problem, 16)  # empty after a successful exec
    os.close(problem)
    if number:
        os.waitpid(pid, 0)
        raise OSError(int(number), os.strerror(int(number)))
    return child


def _become(become: Callable[[], NoReturn], may_go: int, report: int) -> NoReturn:
    """Waits in the forked child for ``may_go``, then runs ``become``. Reports an error through ``report``."""
    try:
        if os.read(may_go, 1):
            become()
    except OSError as error:
        os.write(report, str(error.errno).encode())
    finally:
        os._exit(127)


def adopted(keep: Iterable[int]) -> tuple[ProcessId, ...]:
    """Returns the job's orphans that this process adopted: its children outside ``keep`` and outside its session.

    Our own programs (py-spy, copies) share our session; torchrun and everything below it don't. Reaps ended orphans.
    """
    kept = set(keep)
    foreign = [pid for pid in _children_in_session(ours=False) if pid not in kept]
    orphans = (identify(pid) for pid in foreign if reap(pid) is None)
    return tuple(orphan for orphan in orphans if orphan is not None)


def helpers() -> list[int]:
    """Returns this process's children in its own session, such as a bundle's copier."""
    return _children_in_session(ours=True)


def _children_in_session(*, ours: bool) -> list[int]:
    session = os.getsid(0)
    members = []
    for pid in children():
        try:
            if (os.getsid(pid) == session) == ours:
                members.append(pid)
        except ProcessLookupError:
            continue
    return members


def children() -> list[int]:
    """Returns our children, from the kernel's lists (CONFIG_PROC_CHILDREN) if available, else by a scan of /proc."""
    pids: list[int] = []
    try:
        for thread in os.scandir("/proc/self/task"):
            with open(f"{thread.path}/children") as file:
                pids += [int(word) for word in file.read().split()]
    except OSError:
        return [process.pid for process in descendants([os.getpid()])]
    return pids


class Children:
    """Lists the children of this single-threaded process. Polling costs one system call while they don't change."""

    def __init__(self) -> None:
        self._list = -1
        self._last = b""

    def new(self) -> list[int]:
        """Returns all children if any started or ended since the last call, else an empty list."""
        try:
            if self._list < 0:
                self._list = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
            listed = os.pread(self._list, 1 << 16, 0)
        except OSError:
            return children()
        if len(listed) > WHOLE:
            return children()
        if listed == self._last:
            return []
        self._last = listed
        return [int(word) for word in listed.split()]


def become_subreaper() -> None:
    """Makes this process adopt all orphans below it, even among descendants started before the call (Linux 4.11)."""
    try:
        import _ctypes  # all of ctypes takes 3 ms and 0.7 MiB, while the job waits

        prctl = _ctypes.dlsym(_ctypes.dlopen("", 0), "prctl")
        _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    except (ImportError, AttributeError):  # private to the standard library
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(pid: int) -> int | None:
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if done else None


def end_as(status: int) -> int:
    """Returns the exit code of a job; if a signal ended the job, ends this process by the same signal."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    signum = os.WTERMSIG(status)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    os.kill(os.getpid(), signum)
    return 128 + signum  # reached only if the kernel refuses


def end_all(
    agent: ProcessId | None,
    find: Callable[[], Iterable[ProcessId]],
    *,
    grace_s: float,
    kill: Callable[[], object] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ProcessId, ...]:
    """Sends SIGTERM, and SIGKILL after ``grace_s``; returns processes that are stuck in the kernel (D state).

    SIGTERM goes to the agent first, so that torchrun ends its ranks, then to the other processes. ``kill`` kills as
    many as it can in one call. ``find`` is called until it returns nothing twice in a row, because processes might
    start in the meantime, and a single scan of /proc can miss a process whose parent is ending.
    """
    processes: set[ProcessId] = {agent} if agent is not None else set()
    asked: set[ProcessId] = set()
    deadline = clock() + grace_s
    while True:
        processes.update(find())
        alive = [process for process in processes if process.is_alive()]
        # A stopped process handles no SIGTERM.
        if clock() >= deadline or (agent not in alive and all(process.is_stopped() for process in alive)):
            break
        for process in [agent] if agent is not None and agent in alive else alive:
            if process not in asked:
                asked.add(process)
                process.send(signal.SIGTERM)
        sleep(ASK_EVERY_S)
    return _kill_all(processes, find, clock() + max(2.0, grace_s), kill, sleep, clock)


def _kill_all(
    processes: set[ProcessId],
    find: Callable[[], Iterable[ProcessId]],
    deadline: float,
    kill: Callable[[], object],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> tuple[ProcessId, ...]:
    empty_passes = 0
    while True:
        kill()
        processes.update(find())
        alive = [process for process in processes if process.is_alive()]
        empty_passes = 0 if alive else empty_passes + 1
        if empty_passes == 2 or clock() >= deadline:
            return tuple(alive)
        for process in alive:
            process.send(signal.SIGKILL)
        if alive:
            sleep(KILL_EVERY_S)
