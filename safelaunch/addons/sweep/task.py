"""Runs inside a scheduler's job: claims the attempt, runs the attempt's safelaunch, and records how it ended.

The scheduler's script runs ``python -m safelaunch.addons.sweep.task QUEUE NAME DIRECTORY ATTEMPT ... -- COMMAND``.
QUEUE is the scheduler's module, and NAME the submission's name. See ``attempt_files`` for the files in DIRECTORY.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import msgspec

from safelaunch.addons.sweep.attempt_files import AttemptClaim, AttemptFiles, TaskEnd
from safelaunch.addons.sweep.jobs import Pace, threads
from safelaunch.addons.sweep.paths import SweepPaths, newest
from safelaunch.job.process import ProcessId, identify
from safelaunch.system.console import say
from safelaunch.system.errors import SafelaunchError

# These imports delay every job's safelaunch; modules that aren't always needed are imported where they are used.
if TYPE_CHECKING:
    from safelaunch.addons.sweep.steps import Steps

EXIT_SPARE = 75  # not 0: a job that needs this one must not start because of a task that did nothing
CANNOT_START = 127
TICK_S = 0.25
LOOK_FIRST_S, LOOK_EVERY_S, PACE_EVERY_S = 3.0, 1.0, 5.0
SIGNAL_COMES_S = 0.5  # a scheduler might signal all processes of a job, which might end before we get the signal
KILL_AFTER_S = 45.0  # torchrun can take 30 s
# Time for which to retry if the end can't be written to disk; after that, only the scheduler knows it.
LEAVE_FOR_S, LEAVE_EVERY_S = 60.0, 2.0
# Placeholders in the command for values that only the job knows.
FIRST_HOST, RENDEZVOUS_PORT, JOB_ID = "@{first-host}", "@{rdzv-port}", "@{job-id}"
MARK = "COLAUNCH_SUBMISSION"  # identifies the supervisor that srun started on this node
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def port_token(index: int) -> str:
    return f"@{{port-{index}}}"


class SchedulerJob(Protocol):
    """A job's knowledge of itself, from its environment. The scheduler's module defines it as ``SCHEDULER_JOB``."""

    restart: int  # times the scheduler has requeued it
    node: str  # scheduler's name of this node
    gpus: tuple[str, ...]
    cores: int | None

    def environment(self) -> Mapping[str, str]:
        """Returns default values of the job's environment variables."""

    def first_host(self) -> str:
        """Returns the name of the first of the job's nodes; empty if unknown."""

    def why_ended(self) -> str:
        """Returns the scheduler's reason for ending the job; see ``Scheduler.meanings``."""


def main(argv: Sequence[str] | None = None) -> int:
    words = _parser().parse_args(argv)
    environ = dict(os.environ)
    return SchedulerTask(words, environ, import_module(words.queue).SCHEDULER_JOB(environ)).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="safelaunch.addons.sweep.task")
    parser.add_argument("queue")
    parser.add_argument("name")
    parser.add_argument("directory", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--cwd", default="/")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--ports", type=int, default=0)
    parser.add_argument("command", nargs="+")
    return parser


class SchedulerTask:
    def __init__(self, words: argparse.Namespace, environ: dict[str, str], inside: SchedulerJob) -> None:
        self._arguments = words
        self._environ = environ
        self._scheduler_job = inside
        self._files = AttemptFiles(words.directory, words.attempt)
        self._paths = SweepPaths(words.directory.parent.parent)
        self._steps: Steps | None = None
        self._supervisor: ProcessId | None = None
        self._signalled = self._over_limit = False
        self._word = ""
        self._began_s = time.monotonic()

    def run(self) -> int:
        for signum in SIGNALS:
            signal.signal(signum, self._on_signal)
        before, restart = self._files.read_end(), self._scheduler_job.restart
        other = self._files.claim(
            AttemptClaim(self._arguments.name, restart, socket.gethostname(), round(time.time(), 3))
        )
        if other is not None:
            say(f"submission {other.name} runs this attempt; this one exits")
            return EXIT_SPARE
        if before is None and self._files.is_closed:
            say("this attempt was cancelled; there is nothing to do")
            return EXIT_SPARE
        if before is not None and (before.exit_code == 0 or self._files.is_closed):
            say(f"requeued, but the attempt already ended with exit code {before.exit_code}; there is nothing to do")
            self._files.write_end(msgspec.structs.replace(before, restart=restart))
            return before.exit_code
        self._to_log()
        bundles_before = self._paths.bundles_of(self._arguments.directory.name)
        code = self._work()
        if code and not self._signalled:
            time.sleep(SIGNAL_COMES_S)
        if self._signalled and not self._word:
            self._word = self._scheduler_job.why_ended()  # the job ended as soon as it was signalled
        self._write_end(self._end(code, self._paths.bundles_of(self._arguments.directory.name) - bundles_before))
        return code

    def _write_end(self, end: TaskEnd) -> None:
        deadline_s = time.monotonic() + LEAVE_FOR_S
        while True:
            try:
                return self._files.write_end(end)
            except OSError as error:
                if time.monotonic() > deadline_s:
                    return say(f"the job's outcome can't be written: {error}")
            time.sleep(LEAVE_EVERY_S)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _to_log(self) -> None:
        path = self._paths.log(self._arguments.directory.name, self._arguments.attempt)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def _work(self) -> int:
        try:
            values = self._values()
            command = [_substitute(word, values) for word in self._arguments.command]
            env = {name: _substitute(value, values) for name, value in self._environment().items()}
            child = subprocess.Popen(command, cwd=self._arguments.cwd, env=env, stdin=subprocess.DEVNULL)
        except (OSError, SafelaunchError, subprocess.SubprocessError) as error:
            say(f"the job could not be started: {error}")
            return CANNOT_START
        return self._watch(child)

    def _values(self) -> dict[str, str]:
        wanted = self._arguments.ports
        values = {JOB_ID: f"{self._arguments.name}.{self._scheduler_job.restart}"}
        if any(RENDEZVOUS_PORT in word for word in self._arguments.command):
            values[FIRST_HOST] = self._scheduler_job.first_host() or socket.gethostname()
            wanted += 1
        if wanted:
            from safelaunch.leases import ports
            from safelaunch.leases.holder import ourselves
            from safelaunch.leases.store import store_of

            self._lease = ports.take(
                store_of(self._environ), wanted, ourselves(self._arguments.directory.name, "colaunch")
            )
            numbers = [str(number) for number in self._lease.ports]
            values |= {port_token(index): number for index, number in enumerate(numbers[: self._arguments.ports])}
            values |= {RENDEZVOUS_PORT: numbers[-1]}
        return values

    def _environment(self) -> dict[str, str]:
        env = {**self._scheduler_job.environment(), **self._environ, MARK: self._arguments.name}
        if "OMP_NUM_THREADS" not in env and self._scheduler_job.cores is not None:
            env["OMP_NUM_THREADS"] = str(threads(self._arguments.command, self._scheduler_job.cores))
        return env

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        process = identify(child.pid)
        asked_s: float | None = None
        looked_s, shown_s = self._began_s + LOOK_FIRST_S - LOOK_EVERY_S, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(TICK_S)
                return 128 - code if code < 0 else code
            now = time.monotonic()
            if self._signalled and not self._word:
                self._word = self._scheduler_job.why_ended()
                with suppress(OSError):
                    self._files.write_end(self._end(128 + signal.SIGTERM))  # we might be killed before the job ends
            limit_s = self._arguments.timeout
            if limit_s is not None and now - self._began_s > limit_s and asked_s is None:
                self._over_limit, asked_s = True, now
                child.terminate()
            if asked_s is not None and now - asked_s > KILL_AFTER_S:
                child.kill()
            if process is not None and now - looked_s > LOOK_EVERY_S:
                looked_s = now
                with suppress(Exception):  # an error costs only the display
                    shown_s = self._look(process, now, shown_s)

    def _look(self, child: ProcessId, now: float, shown_s: float) -> float:
        """Reads the job's step, and periodically writes it to a file; returns the time of the last write."""
        self._supervisor = self._supervisor or self._find_supervisor(child)
        pace = self._pace()
        if pace.step is None or now - shown_s < PACE_EVERY_S:
            return shown_s
        self._files.write_pace(pace)
        return now

    def _find_supervisor(self, child: ProcessId) -> ProcessId | None:
        """Returns this node's safelaunch: the child itself, or the task that srun started on this node."""
        if Path(self._arguments.command[0]).name != "srun":
            return child
        from safelaunch.supervise.control import discover

        mark = f"{MARK}={self._arguments.name}".encode()
        for run in discover.find(discover.our_roots()):
            if run.supervisor is None:
                continue
            with suppress(OSError):
                if mark in Path(f"/proc/{run.supervisor.pid}/environ").read_bytes().split(b"\0"):
                    return run.supervisor
        return None

    def _pace(self) -> Pace:
        if self._supervisor is None:
            return Pace()
        if self._steps is None:
            from safelaunch.addons.sweep.steps import Steps
            from safelaunch.supervise.control import discover

            self._steps = Steps(discover.our_roots, time.monotonic)
        self._steps.look([self._supervisor])
        return self._steps.of(self._supervisor)

    def _end(self, code: int, bundles: Collection[str] = ()) -> TaskEnd:
        host = self._scheduler_job.node or socket.gethostname()
        pace = Pace()
        with suppress(Exception):  # the end matters more than its last step
            pace = self._pace()
        return TaskEnd(
            name=self._arguments.name,
            restart=self._scheduler_job.restart,
            exit_code=code,
            duration_s=round(time.monotonic() - self._began_s, 3),
            signalled=self._signalled,
            word=self._word,
            over_limit=self._over_limit,
            last_step=pace.step,
            gpus=tuple(f"{host}:{gpu}" for gpu in self._scheduler_job.gpus),
            bundle=newest(bundles),
            wrong=pace.wrong,
        )


def _substitute(text: str, values: Mapping[str, str]) -> str:
    for token, value in values.items():
        text = text.replace(token, value)
    return text


if __name__ == "__main__":
    sys.exit(main())
