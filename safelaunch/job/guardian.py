"""Starts and replaces the guardian, a tiny process that ends the job if the supervisor is killed.

    safelaunch ── guardian ── torchrun ── ranks ── loader workers, helpers, ...
                     └── processes of the job that lost their parents

The guardian (code in ``guarding``) is the parent of the job and adopts the job's orphans (``PR_SET_CHILD_SUBREAPER``),
so all of the job's processes are below it, even if they daemonized or started new sessions. It acts only if the pipe to
the supervisor closes before the supervisor has dismissed it, and only on processes below it. After a normal end, the
job's daemons survive, as under torchrun.

The table shows what ends after these processes are killed, with and without a control group (``controlgroup``).

=====================================  =============================  =================================================
SIGKILL for                            with a group                   without
=====================================  =============================  =================================================
safelaunch, and any of the job         all of the job                 all of the job
the guardian                           nothing: it is replaced        nothing: it is replaced
the guardian, and safelaunch later     all of the job                 all of the job but (1)
safelaunch and the guardian            all, by torchrun's beacon      all below torchrun, and its orphans but (1)
safelaunch, the guardian and torchrun  ranks, killed by the kernel    ranks, killed by the kernel
=====================================  =============================  =================================================

(1) "But (1)" excepts a process with a new session and environment whose parents ended less than 0.25 s earlier. If a
guardian is killed while it ends a job, after torchrun has gone, the rest keeps running. Under ``exec``, the beacon of a
rank that imported torch acts instead of torchrun's.

``pkill safelaunch`` and ``pkill -f safelaunch`` don't match the guardian, because it has another name.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from safelaunch.beacon import layout
from safelaunch.job import guarding, process
from safelaunch.job.controlgroup import ControlGroup
from safelaunch.job.paths import RunPaths
from safelaunch.job.process import ProcessId
from safelaunch.system import procstat

TRIES = 3
LEAVES_S = 1.0  # for the guardian to exit, or to report the job's end
MEND_EVERY_S = 1.0
AGENT_EVERY_S = 1.0  # only a stopped guardian fails to report the agent's end


class Guardian:
    """Starts the job through a guardian, and replaces the guardian if it dies."""

    def __init__(self, run: RunPaths, leases: Sequence[int], group: ControlGroup | None) -> None:
        """Creates the supervisor's handle; ``fork`` starts the guardian.

        Args:
            leases: Descriptors that keep the job's resources and run directory locked while the guardian lives.
        """
        self.pid = 0
        self.group = group
        self._run = run
        self._leases = leases
        self._agent: ProcessId | None = None
        self._status: int | None = None
        self._is_parent = True  # the job's; False for a replacement
        self._commands = self._reports = -1
        self._rest = b""
        self._members: list[ProcessId] = []
        self._ended_s: float | None = None
        self._agent_due_s = 0.0
        self._mended_s = 0.0
        self._lines = _lifelines(run)
        self._fork: Callable[[], None] = lambda: None

    def fork(self, become: Callable[[], NoReturn], *, at_once: bool) -> None:
        """Forks the guardian, the future parent of the job. Call it while this process has only one thread.

        Raises OSError if the fork fails.

        Args:
            become: See ``process.fork``.
            at_once: True if the job might start processes within milliseconds.
        """
        self._fork = lambda: self._fork_once(become, at_once)
        self._fork()

    def _fork_once(self, become: Callable[[], NoReturn], at_once: bool) -> None:
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()
        supervisor = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            try:
                for descriptor in (self._commands, self._reports, self._lines[0]):
                    os.close(descriptor)
                post = guarding.Post(supervisor, commands, reports, (*self._leases, self._lines[1]))
                guarding.First(self._run, self.group, post).guard(become, at_once)
            finally:
                os._exit(0)
        os.close(commands)
        os.close(reports)

    def start(self) -> ProcessId:
        """Starts the job and returns its first process. Raises OSError if it can't start."""
        process.become_subreaper()  # to adopt the job if the guardian dies
        for _ in range(TRIES):
            if self._let_go():
                break
            process.reap(self.pid)
            for pipe in (self._commands, self._reports):
                os.close(pipe)
            self._fork()
        if self._agent is None:
            raise InterruptedError(errno.EINTR, "its guardians were killed before they started it")
        os.set_blocking(self._reports, False)
        self._members.append(self._agent)
        return self._agent

    def _let_go(self) -> bool:
        """Lets the forked job start; returns False if the guardian was killed before it could start the job."""
        self._agent = None
        self._rest = b""
        self._write(guarding.GO)
        while line := self._next_line():
            word, *numbers = line.split()
            if word == b"agent":
                self._agent = ProcessId(int(numbers[0]), int(numbers[1]))
            elif word == b"failed":
                raise OSError(int(numbers[0]), os.strerror(int(numbers[0])))
            elif word == b"started":
                return True
        if self._agent is not None and not self._has_become():
            self._agent.send(signal.SIGKILL)
            process.reap(self._agent.pid)
            self._agent = None
        return self._agent is not None

    def _has_become(self) -> bool:
        assert self._agent is not None
        stat = procstat.read(self._agent.pid)
        return stat is not None and self._agent.is_alive() and stat.name != guarding.NAME

    def ended(self) -> int | None:
        """Returns the wait status of the job's first process, or None while it runs. Call it regularly."""
        if self._status is None and self._is_parent:
            self._read_reports()
        if self._status is None:
            self._look_after(time.monotonic())
        if self._status is None and not self._is_parent and self._agent is not None:
            self._status = process.reap(self._agent.pid)
        return self._status

    @property
    def adopts_orphans(self) -> bool:
        """True while the first guardian lives, which adopts the job's orphans. Afterwards, this process adopts them."""
        return self._is_parent

    def adopt(self, member: ProcessId) -> None:
        """Tells the guardian about a process of the job that it can't find itself."""
        self._members = [*(process_id for process_id in self._members if process_id.is_alive()), member]
        self._write(str(member).encode())

    def dismiss(self) -> None:
        """Tells the guardian, after a normal end, to exit without ending anything. The job's daemons survive."""
        self._write(guarding.WELL)
        os.close(self._commands)
        if self.pid and not self._has_gone():  # it is stopped
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            self._has_gone()
        if self.group is not None:
            self.group.dissolve()
        for descriptor in (self._reports, *self._lines):
            os.close(descriptor)

    def _read_reports(self) -> None:
        try:
            while line := self._next_line():
                if line.startswith(b"ended "):
                    self._status = int(line.split()[1])
        except BlockingIOError:
            return

    def _next_line(self) -> bytes:
        """Returns a line from the guardian; empty if it is gone. Raises BlockingIOError if there is no line yet."""
        while b"\n" not in self._rest:
            chunk = os.read(self._reports, 4096)
            if not chunk:
                return b""
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _look_after(self, now: float) -> None:
        """Replaces a dead guardian, and kills a guardian that is stopped and so doesn't report that the agent ended."""
        assert self._agent is not None
        if self.pid and self._is_parent and (self._ended_s or now >= self._agent_due_s):
            self._agent_due_s = now + AGENT_EVERY_S
            if not self._agent.is_alive():
                self._ended_s = self._ended_s or now
                if now - self._ended_s > LEAVES_S:
                    os.kill(self.pid, signal.SIGKILL)  # the agent becomes our child, whose status we get
        status = process.reap(self.pid) if self.pid else None
        if status is not None:
            if self._is_parent:
                self._read_reports()
            self._is_parent = False
            self.pid = 0
            if self._agent.is_alive():
                self._say_gone(status)
        if not self.pid and now - self._mended_s > MEND_EVERY_S and self._agent.is_alive():
            self._mended_s = now
            self._mend()

    def _say_gone(self, status: int) -> None:
        from safelaunch.system.console import say

        how = f"was ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended"
        say(f"the guardian of this job {how}; starting a new one")

    def _mend(self) -> None:
        """Starts a replacement guardian. It isn't the job's parent, so the job's orphans must be reported to it."""
        from safelaunch.system.console import say

        commands, own_end = os.pipe()
        shared = [os.dup(descriptor) for descriptor in (commands, *self._leases)]
        for descriptor in shared:
            os.set_inheritable(descriptor, True)
        try:
            self.pid = _spawn(f"replace({os.fspath(self._run.root)!r}, {shared!r})")
        except OSError as error:
            os.close(own_end)
            say(f"no guardian ({error.strerror or error}): after a kill -9 of safelaunch, processes might survive")
            return
        finally:
            for descriptor in (commands, *shared):
                os.close(descriptor)
        os.close(self._commands)
        self._commands = own_end
        for member in self._members:
            self._write(str(member).encode())

    def _has_gone(self) -> bool:
        deadline = time.monotonic() + LEAVES_S
        while process.reap(self.pid) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _write(self, line: bytes) -> None:
        try:
            os.write(self._commands, line + b"\n")
        except OSError:
            return  # the next check replaces it


def _lifelines(run: RunPaths) -> tuple[int, int]:
    # The kernel notifies readers of a named pipe when its holders are dead. Only the supervisor holds ``life``; each
    # process that would end the job holds ``keepers``. If both are dead, ``rescue`` starts another guardian, unless a
    # normal end has removed it.
    run.rescue.write_bytes(f"{sys.executable}\0{_code(f'rescue({os.fspath(run.root)!r})')}".encode())
    for path in (run.life, run.keepers):
        os.mkfifo(path, 0o600)
    return os.open(run.life, os.O_RDWR | os.O_CLOEXEC), os.open(run.keepers, os.O_RDWR | os.O_CLOEXEC)


def _code(call: str) -> str:
    root = os.fspath(Path(__file__).resolve().parents[2])
    return f"import sys; sys.path.insert(0, {root!r}); from safelaunch.job import guarding; guarding.{call}"


def _spawn(call: str) -> int:
    # This process has threads, so it can't fork safely.
    env = {**os.environ, layout.GUARDIAN_CODE: _code(call)}
    return os.posix_spawn(sys.executable, [sys.executable, *layout.GUARDIAN_ARGUMENTS], env)
