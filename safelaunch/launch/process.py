"""Starting, signalling and reaping the job's processes.

A process is identified by its pid *and* its start time: nothing is ever signalled by name, by environment, or by a pid
that may have been given to somebody else meanwhile.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from safelaunch import procstat

# Passed on to torchrun as they come. SIGTSTP is left alone: Ctrl-Z stops safelaunch, as it would stop torchrun.
FORWARDED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
SI_KERNEL = 0x80  # siginfo.si_code of a signal that the terminal sent, <signal.h>
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        found = procstat.read(self.pid)
        return found is not None and found.start_ticks == self.start_ticks and found.state not in "ZX"

    def is_stopped(self) -> bool:
        found = procstat.read(self.pid)
        return found is not None and found.start_ticks == self.start_ticks and found.state in "Tt"

    def send(self, signum: int) -> bool:
        """Sends a signal if the process is still the same one. Returns whether it was."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:
            return self._send_by_pid(signum)
        try:
            # The descriptor pins the pid: what the start time says now stays true until the signal is sent.
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(descriptor, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _send_by_pid(self, signum: int) -> bool:
        """For kernels older than 5.3, which have no pidfd."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def identify(pid: int) -> ProcessId | None:
    """The identity of a process, or None when it is gone. A zombie still has one."""
    found = procstat.read(pid)
    return ProcessId(pid, found.start_ticks) if found else None


def descendants(roots: Iterable[int], *, exclude: Iterable[int] = ()) -> tuple[ProcessId, ...]:
    """Every process below ``roots`` (not themselves), parents before children; one pass over /proc.

    ``exclude``: pids that are left out together with what is below them.
    """
    children: dict[int, list[procstat.Stat]] = {}
    for entry in list(os.scandir("/proc")):
        if entry.name.isdigit() and (found := procstat.read(int(entry.name))) is not None:
            children.setdefault(found.ppid, []).append(found)
    left_out = set(exclude)
    found_below: list[ProcessId] = []
    queue = list(roots)
    while queue:
        for child in children.pop(queue.pop(0), ()):
            if child.pid not in left_out:
                found_below.append(ProcessId(child.pid, child.start_ticks))
                queue.append(child.pid)
    return tuple(found_below)


def block_signals() -> frozenset[signal.Signals]:
    """Blocks what the supervisor waits for itself; returns the mask before, which the job must start with.

    To be called in the main thread before any other exists: threads inherit the mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD, signal.SIGALRM})
    return frozenset(signal.Signals(number) for number in before)


def start(
    argv: Sequence[str], env: Mapping[str, str], mask: Iterable[int], tell: Callable[[ProcessId], None] | None = None
) -> int:
    """Starts the job's first process in a session of its own, with our stdin, stdout and stderr; returns its pid.

    ``tell``: see ``fork``. Raises OSError when it cannot be started. Python ignores SIGPIPE and SIGXFSZ for itself; the
    job starts with the defaults.
    """

    def become() -> NoReturn:
        os.setsid()
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(argv[0], list(argv), env)

    return fork(become, tell).pid


def fork(become: Callable[[], NoReturn], tell: Callable[[ProcessId], None] | None = None) -> ProcessId:
    """Forks a child that will ``become`` another program (``exec``), and returns when it has.

    ``tell`` is told of the process before that: it waits for our word, and ends when we are killed first, or when
    ``tell`` raises. So there is no moment in which something runs that nobody knows of. Raises what ``tell`` raises,
    and OSError when it could not become what it should. To be called while this process has one thread.
    """
    may_go, go = os.pipe()
    problem, report = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)  # else it would wait for itself
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
    number = os.read(problem, 16)  # its end is closed by a successful exec
    os.close(problem)
    if number:
        os.waitpid(pid, 0)
        raise OSError(int(number), os.strerror(int(number)))
    return child


def _become(become: Callable[[], NoReturn], may_go: int, report: int) -> NoReturn:
    """In the forked child. ``report`` takes the number of the error that kept it from becoming something else."""
    try:
        if os.read(may_go, 1):
            become()
    except OSError as error:
        os.write(report, str(error.errno).encode())
    finally:
        os._exit(127)


def adopted(keep: Iterable[int]) -> tuple[ProcessId, ...]:
    """Our children that are neither in ``keep`` nor of our session: orphans of the job; ended ones are reaped here.

    What we start ourselves (py-spy, copies) shares our session; torchrun and all below it do not.
    """
    kept, session = set(keep), os.getsid(0)
    orphans = []
    for pid in _children():
        if pid in kept:
            continue
        try:
            foreign = os.getsid(pid) != session
        except ProcessLookupError:
            continue
        if foreign and reap(pid) is None and (orphan := identify(pid)) is not None:
            orphans.append(orphan)
    return tuple(orphans)


def helpers() -> list[int]:
    """Our children of our own session: what copies a bundle, or tells of one. The job's are of other sessions."""
    session = os.getsid(0)
    found = []
    for pid in _children():
        try:
            if os.getsid(pid) == session:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def _children() -> list[int]:
    """Our own children, from the kernel's list per thread (CONFIG_PROC_CHILDREN), else from all of /proc."""
    found: list[int] = []
    try:
        for thread in os.scandir("/proc/self/task"):
            with open(f"{thread.path}/children") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        return [process.pid for process in descendants([os.getpid()])]
    return found


def become_subreaper() -> None:
    """Orphans of the job become our children instead of init's, so that they can be found. Best effort (Linux 3.4)."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(pid: int) -> int | None:
    """The wait status of child ``pid`` if it has ended, else None."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if done else None


def end_as(status: int) -> int:
    """The exit code for a wait status; where a signal ended the job, ends this process by the same signal."""
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    signum = os.WTERMSIG(status)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if signum not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    os.kill(os.getpid(), signum)
    return 128 + signum  # not reached, unless the kernel refuses


def end_all(
    agent: ProcessId,
    find: Callable[[], Sequence[ProcessId]],
    *,
    grace_s: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ProcessId, ...]:
    """SIGTERM, grace, SIGKILL for the agent and all that ``find`` lists; returns what would not die.

    The agent is asked first, so that torchrun ends its ranks as it does when a user stops it; when it is gone, what is
    left is asked, too. ``grace_s`` seconds in all, then SIGKILL. ``find`` is called again and again, as processes may
    be started meanwhile. What is left in the end is in the kernel's hands (D state).
    """
    known: set[ProcessId] = {agent, *find()}
    asked: set[ProcessId] = set()
    deadline = clock() + grace_s
    while True:
        known.update(find())
        alive = [process for process in known if process.is_alive()]
        if not alive:
            return ()
        # A stopped process takes no SIGTERM; waiting for it would be in vain.
        if clock() >= deadline or (agent not in alive and all(process.is_stopped() for process in alive)):
            break
        for process in [agent] if agent in alive else alive:
            if process not in asked:
                asked.add(process)
                process.send(signal.SIGTERM)
        sleep(0.05)
    deadline = clock() + max(2.0, grace_s)
    while alive and clock() < deadline:
        for process in alive:
            process.send(signal.SIGKILL)
        sleep(0.05)
        known.update(find())
        alive = [process for process in known if process.is_alive()]
    return tuple(alive)
