"""Runs in the guardian: watches a job, and ends it if the supervisor is killed. See ``guardian``.

The supervisor forks the first guardian, which is the job's parent. Later guardians are new interpreters, started by a
supervisor or a beacon. They find the job by the records in the run directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from safelaunch.beacon import layout
from safelaunch.job import process
from safelaunch.job.controlgroup import ControlGroup, kill_of
from safelaunch.job.paths import RunPaths, discard_unfinished
from safelaunch.job.process import ProcessId
from safelaunch.job.remains import Remains, members_of, note, parse

NAME = "sl-guardian"
GO, WELL = b"go", b"well"
GRACE_S = 5.0
LOOK_EVERY_S = 1.0  # for a guardian that isn't the job's parent
ORPHANS_EVERY_S = 0.25  # cheap: one system call for its own children
CHASE_S = 0.05
LEAVE_IT = os.WEXITED | os.WNOHANG | os.WNOWAIT  # waitid then leaves a zombie
LEAST_IDLE = 500  # idle time per search time: 0.2 % of a core, even on a node with many processes


@dataclass(frozen=True, slots=True)
class Post:
    supervisor: int
    commands: int  # pipe from the supervisor
    reports: int  # pipe to the supervisor
    held: tuple[int, ...]  # descriptors to keep open


class First:
    def __init__(self, run: RunPaths, group: ControlGroup | None, post: Post) -> None:
        self._run = run
        self._group = group
        self._post = post
        self._reports = post.reports
        self._agent: ProcessId | None = None
        self._ended = False
        self._helpers: set[ProcessId] = set()
        self._recorded: set[int] = set()
        self._children = process.Children()
        self._supervisor = post.supervisor

    def guard(self, become: Callable[[], NoReturn], at_once: bool) -> None:
        os.setsid()
        disguise(NAME)
        process.become_subreaper()
        try:
            self._agent = process.fork(become, lambda agent: self._may_go(agent, at_once))
        except OSError as error:
            self._report(f"failed {error.errno or 0}")
            if os.getppid() != self._supervisor:
                _clean_up(self._run.root, self._group)
            return
        self._report("started")
        if self._group is not None and not at_once:
            self._group.add(self._agent.pid)  # takes a few ms, while the launcher looks for modules
        _silence()
        if self._stay(*self._settle()):
            process.end_all(self._agent, self._all, grace_s=GRACE_S, kill=self._kill)
            _clean_up(self._run.root, self._group)

    def _may_go(self, agent: ProcessId, at_once: bool) -> None:
        """Waits until the supervisor lets the job start. Raises OSError if the supervisor was killed."""
        if at_once and self._group is not None:
            self._group.add(agent.pid)
        self._recorded.add(agent.pid)
        _note_ourselves(self._run)
        note(self._run, "agent", str(agent))
        if self._group is not None:
            note(self._run, "group", os.fspath(self._group.path))
        self._report(f"agent {agent}")
        if os.read(self._post.commands, len(GO) + 1).strip() != GO:
            raise InterruptedError(errno.EINTR, "the supervisor was killed")

    def _settle(self) -> tuple[int, int]:
        """Closes inherited descriptors. Returns the supervisor's pipe, and one that is readable when a child ends."""
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        commands, self._reports, woken, wake, *_ = _keep_only(
            [self._post.commands, self._post.reports, woken, wake, *self._post.held]
        )
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return commands, woken

    def _stay(self, pipe: int, woken: int) -> bool:
        """Watches until the supervisor dismisses this guardian (returns False) or is killed (returns True)."""
        commands = Commands(pipe)
        look = Every(ORPHANS_EVERY_S, self._note_orphans)
        while True:
            self._reap()
            ready = select.select([pipe, woken], [], [], look())[0]
            if woken in ready:
                os.read(woken, 4096)
            if pipe in ready:
                message = commands.read()
                if message is None or message.well:
                    return message is None
                self._helpers.update(message.members)

    def _reap(self) -> None:
        """Reaps children, after reporting the agent's end.

        The report comes first because, if this guardian is killed in between, the supervisor can still reap the agent.
        """
        assert self._agent is not None
        try:
            if not self._ended and (ended := os.waitid(os.P_PID, self._agent.pid, LEAVE_IT)) is not None:
                self._ended = True
                self._report(f"ended {_wait_status(ended)}")
                if os.getppid() == self._supervisor:
                    os.kill(self._supervisor, signal.SIGCHLD)  # wakes it
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # no process of the job is left

    def _note_orphans(self) -> None:
        for pid in self._children.new():
            if pid not in self._recorded and (orphan := process.identify(pid)) is not None:
                self._recorded.add(pid)
                note(self._run, "orphan", str(orphan))

    def _report(self, line: str) -> None:
        try:
            os.write(self._reports, f"{line}\n".encode())
        except OSError:
            return  # the supervisor is gone

    def _all(self) -> set[ProcessId]:
        self._reap()
        helpers = {helper for helper in self._helpers if helper.is_alive()}
        return helpers | {*process.descendants([os.getpid()])} | members_of(self._group)

    def _kill(self) -> None:
        """Kills the job: at once by its control group, else repeatedly, because escaping processes become children."""
        if self._group is not None:
            self._group.kill()
        deadline = time.monotonic() + CHASE_S
        while time.monotonic() < deadline and (below := process.children()):
            for pid in below:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still the child's
            self._reap()


@dataclass(frozen=True, slots=True)
class SupervisorMessage:
    """Message from the supervisor: a dismissal, or processes of the job that the guardian can't find itself."""

    well: bool
    members: list[ProcessId]


class Commands:
    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._rest = b""

    def read(self) -> SupervisorMessage | None:
        """Reads a message from the supervisor; returns None if the supervisor was killed."""
        chunk = os.read(self.pipe, 65536)
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return SupervisorMessage(WELL in lines, parse(line.decode("ascii", "replace") for line in lines))


class Every:
    """Calls ``work`` every ``seconds``, or less often if ``work`` takes long."""

    def __init__(self, seconds: float, work: Callable[[], object]) -> None:
        self._seconds = seconds
        self._work = work
        self._next_s = 0.0

    def __call__(self) -> float:
        """Calls ``work`` if it is due; returns the seconds until the next call."""
        begin = now = time.monotonic()
        if begin >= self._next_s:
            self._work()
            now = time.monotonic()
            self._next_s = now + max(self._seconds, LEAST_IDLE * (now - begin))
        return max(0.0, self._next_s - now)


def _wait_status(ended: os.waitid_result) -> int:
    if ended.si_code == os.CLD_EXITED:
        return ended.si_status << 8
    return ended.si_status | (0x80 if ended.si_code == os.CLD_DUMPED else 0)


def replace(root: str, descriptors: Sequence[int]) -> NoReturn:
    """Runs in a new interpreter that replaces a dead guardian; it isn't the job's parent.

    Args:
        descriptors: The supervisor's pipe, then the leases.
    """
    _begin()
    run = RunPaths(Path(root))
    keepers = os.open(run.keepers, os.O_RDWR | os.O_CLOEXEC)
    commands = Commands(_keep_only([*descriptors, keepers])[0])
    _note_ourselves(run)
    remains = Remains(run)
    look = Every(LOOK_EVERY_S, remains.find)
    while True:
        if select.select([commands.pipe], [], [], look())[0]:
            message = commands.read()
            if message is None:
                break
            if message.well:
                os._exit(0)
            remains.add(message.members)
    _end(run, remains)


def rescue(root: str) -> NoReturn:
    """Ends the job after supervisor and guardian were killed. Runs in an interpreter started by a beacon."""
    starter = process.identify(os.getppid())
    _begin()
    run = RunPaths(Path(root))
    try:
        keepers = os.open(run.keepers, os.O_RDWR | os.O_CLOEXEC)
        record = os.open(run.members, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os._exit(0)  # the job has ended, or another beacon was faster
    _keep_only([keepers, record])
    _note_ourselves(run)
    remains = Remains(run)
    if remains.group is not None and not remains.group.leave():
        remains.group = None  # killing it would kill this process first
    is_below_agent = os.environ.get(layout.GUARDIAN_STARTER) == layout.AGENT_ROLE
    if remains.group is None and is_below_agent and starter is not None and starter == remains.agent:
        _end_below(starter, remains)  # the agent's end would give its orphans another parent
    _end(run, remains)


def _end_below(agent: ProcessId, remains: Remains) -> None:
    # The agent is the reaper of its descendants now. Stop it, because it exits once its ranks have ended, and their
    # orphans would be lost.
    agent.send(signal.SIGSTOP)
    remains.spare = agent
    process.end_all(None, remains.find, grace_s=GRACE_S)
    remains.spare = None
    agent.send(signal.SIGKILL)


def _end(run: RunPaths, remains: Remains) -> NoReturn:
    process.end_all(remains.agent, remains.find, grace_s=GRACE_S, kill=kill_of(remains.group))
    _clean_up(run.root, remains.group)
    os._exit(0)


def _note_ourselves(run: RunPaths) -> None:
    if (ourselves := process.identify(os.getpid())) is not None:
        note(run, "guardian", str(ourselves))


def _begin() -> None:
    os.setsid()
    disguise(NAME)
    signal.pthread_sigmask(signal.SIG_BLOCK, process.FORWARDED)
    _silence()


def disguise(name: str) -> None:
    """Changes this process's name and command line, so that killing processes named safelaunch spares it.

    To change the command line, overwrites the arguments in memory, which only /proc still reads.
    """
    try:
        with open("/proc/self/stat", "rb") as stat:
            begin, end = (int(word) for word in stat.read().rpartition(b")")[2].split()[45:47])
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(memory, name.encode()[: end - begin - 1].ljust(end - begin, b"\0"), begin)
        finally:
            os.close(memory)
        with open("/proc/self/comm", "w") as comm:
            comm.write(name)
    except (OSError, ValueError):
        return  # not permitted


def _silence() -> None:
    # Other processes' pipes must not stay open.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)


def _keep_only(descriptors: Sequence[int]) -> list[int]:
    """Closes all descriptors above 2 except ``descriptors``, and renumbers these from 3 on; returns the new numbers."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3 + len(descriptors)) for descriptor in descriptors]
    numbers = range(3, 3 + len(descriptors))
    for number, descriptor in zip(numbers, high, strict=True):
        os.dup2(descriptor, number, inheritable=False)
    os.closerange(3 + len(descriptors), 65536)
    return list(numbers)


def _clean_up(root: Path, group: ControlGroup | None) -> None:
    from shutil import rmtree

    rmtree(root, ignore_errors=True)
    discard_unfinished(root.name)
    if group is not None:
        group.dissolve()
