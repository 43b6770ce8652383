"""What runs inside a scheduler's job: claims the attempt, runs its safelaunch, and leaves how it ended.

The scripts of ``batch`` call it: ``python -m safelaunch.addons.sweep.task QUEUE NAME DIRECTORY ATTEMPT ... -- COMMAND``
QUEUE is the scheduler's module, NAME the submission's. The files by which an attempt is known, whatever the scheduler
still knows of it, are in the job's directory, which every node and the submitting host share:

    attempt-1.claim   who runs the attempt: a link that only one task can make, so no attempt runs twice
    attempt-1.end     how it ended
    attempt-1.pace    its newest step
    attempt-1.closed  colaunch has recorded its end: a task that the scheduler requeues later must not begin
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

# Every job pays for what is imported here before its own safelaunch starts; the rest is imported where it is used.
if TYPE_CHECKING:
    from safelaunch.addons.sweep.steps import Steps

EXIT_SPARE = 75  # not 0: a job that needs this one must not begin because of a task that did nothing
CANNOT_START = 127
TICK_S = 0.25
LOOK_FIRST_S, LOOK_EVERY_S, PACE_EVERY_S = 3.0, 1.0, 5.0
SIGNAL_COMES_S = 0.5  # a scheduler may signal every process of a job, and the job may end before we hear of it
KILL_AFTER_S = 45.0  # torchrun may take 30 s
# How long the disk may refuse the end; after that only the scheduler knows it.
LEAVE_FOR_S, LEAVE_EVERY_S = 60.0, 2.0
# They stand in the command, and are filled in here: only the job knows them.
FIRST_HOST, RENDEZVOUS_PORT, JOB_ID = "@{first-host}", "@{rdzv-port}", "@{job-id}"
MARK = "COLAUNCH_SUBMISSION"  # by which the supervisor that srun has started on this node is found
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def port_token(index: int) -> str:
    """What stands for a leased port in the command and the environment."""
    return f"@{{port-{index}}}"


class SchedulerJob(Protocol):
    """What a job sees of itself: ``SCHEDULER_JOB`` of the scheduler's module, made with the job's environment.

    ``restart``: how often the scheduler has requeued it; ``node``: its own name for the node; ``cores``: None if not
    known.
    """

    restart: int
    node: str
    gpus: tuple[str, ...]
    cores: int | None

    def environment(self) -> Mapping[str, str]:
        """Defaults for the job's variables."""

    def first_host(self) -> str:
        """The first of the job's nodes; empty if unknown."""

    def why_ended(self) -> str:
        """The scheduler's word for why it ends the job, see ``Queue.meanings``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the job's safelaunch."""
    words = _parser().parse_args(argv)
    environ = dict(os.environ)
    return SchedulerTask(words, environ, import_module(words.queue).SCHEDULER_JOB(environ)).run()


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="safelaunch.addons.sweep.task")
    found.add_argument("queue")
    found.add_argument("name")
    found.add_argument("directory", type=Path)
    found.add_argument("attempt", type=int)
    found.add_argument("--cwd", default="/")
    found.add_argument("--timeout", type=float)
    found.add_argument("--ports", type=int, default=0)
    found.add_argument("command", nargs="+")
    return found


class SchedulerTask:
    """One attempt, inside its job. ``inside``: what the scheduler says of it."""

    def __init__(self, words: argparse.Namespace, environ: dict[str, str], inside: SchedulerJob) -> None:
        self._words = words
        self._environ = environ
        self._inside = inside
        self._files = AttemptFiles(words.directory, words.attempt)
        self._paths = SweepPaths(words.directory.parent.parent)
        self._steps: Steps | None = None
        self._supervisor: ProcessId | None = None
        self._signalled = self._over_limit = False
        self._word = ""
        self._began_s = time.monotonic()

    def run(self) -> int:
        """Claims the attempt and runs it. Every other task of the attempt ends at once."""
        for signum in SIGNALS:
            signal.signal(signum, self._on_signal)
        before, restart = self._files.end(), self._inside.restart
        other = self._files.claim(AttemptClaim(self._words.name, restart, socket.gethostname(), round(time.time(), 3)))
        if other is not None:
            say(f"this job's work is done by the submission {other.name}; this one ends")
            return EXIT_SPARE
        if before is None and self._files.is_closed:
            say("this attempt was given up; there is nothing to do")
            return EXIT_SPARE
        if before is not None and (before.exit_code == 0 or self._files.is_closed):
            say(f"requeued, but its work has ended with exit code {before.exit_code}; there is nothing to do")
            self._files.leave(msgspec.structs.replace(before, restart=restart))
            return before.exit_code
        self._to_log()
        known = self._paths.bundles_of(self._words.directory.name)
        code = self._work()
        if code and not self._signalled:
            time.sleep(SIGNAL_COMES_S)
        if self._signalled and not self._word:
            self._word = self._inside.why_ended()  # the job ended as soon as it was asked to
        self._leave(self._end(code, self._paths.bundles_of(self._words.directory.name) - known))
        return code

    def _leave(self, end: TaskEnd) -> None:
        """Writes the end, once the disk takes it."""
        deadline_s = time.monotonic() + LEAVE_FOR_S
        while True:
            try:
                return self._files.leave(end)
            except OSError as error:
                if time.monotonic() > deadline_s:
                    return say(f"how the job ended cannot be written down: {error}")
            time.sleep(LEAVE_EVERY_S)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _to_log(self) -> None:
        """All output goes to the attempt's log from here on."""
        path = self._paths.log(self._words.directory.name, self._words.attempt)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def _work(self) -> int:
        try:
            values = self._values()
            command = [_filled(word, values) for word in self._words.command]
            env = {name: _filled(value, values) for name, value in self._environment().items()}
            child = subprocess.Popen(command, cwd=self._words.cwd, env=env, stdin=subprocess.DEVNULL)
        except (OSError, SafelaunchError, subprocess.SubprocessError) as error:
            say(f"the job could not be started: {error}")
            return CANNOT_START
        return self._watch(child)

    def _values(self) -> dict[str, str]:
        """The values of the tokens."""
        wanted = self._words.ports
        values = {JOB_ID: f"{self._words.name}.{self._inside.restart}"}
        if any(RENDEZVOUS_PORT in word for word in self._words.command):
            values[FIRST_HOST] = self._inside.first_host() or socket.gethostname()
            wanted += 1
        if wanted:
            from safelaunch.leases import ports
            from safelaunch.leases.holder import ourselves
            from safelaunch.leases.store import store_of

            self._lease = ports.take(store_of(self._environ), wanted, ourselves(self._words.directory.name, "colaunch"))
            numbers = [str(number) for number in self._lease.ports]
            values |= {port_token(index): number for index, number in enumerate(numbers[: self._words.ports])}
            values |= {RENDEZVOUS_PORT: numbers[-1]}
        return values

    def _environment(self) -> dict[str, str]:
        env = {**self._inside.environment(), **self._environ, MARK: self._words.name}
        if "OMP_NUM_THREADS" not in env and self._inside.cores is not None:
            env["OMP_NUM_THREADS"] = str(threads(self._words.command, self._inside.cores))
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
                self._word = self._inside.why_ended()
                with suppress(OSError):
                    self._files.leave(self._end(128 + signal.SIGTERM))  # we may be killed before the job has ended
            limit_s = self._words.timeout
            if limit_s is not None and now - self._began_s > limit_s and asked_s is None:
                self._over_limit, asked_s = True, now
                child.terminate()
            if asked_s is not None and now - asked_s > KILL_AFTER_S:
                child.kill()
            if process is not None and now - looked_s > LOOK_EVERY_S:
                looked_s = now
                with suppress(Exception):  # it costs the display only
                    shown_s = self._look(process, now, shown_s)

    def _look(self, child: ProcessId, now: float, shown_s: float) -> float:
        """Follows the job's steps, and leaves the newest one for colaunch now and then; returns when it last did."""
        self._supervisor = self._supervisor or self._found(child)
        pace = self._pace()
        if pace.step is None or now - shown_s < PACE_EVERY_S:
            return shown_s
        self._files.show(pace)
        return now

    def _found(self, child: ProcessId) -> ProcessId | None:
        """The safelaunch of this node: the child itself, or a task that srun has started here."""
        if Path(self._words.command[0]).name != "srun":
            return child
        from safelaunch.supervise.control import discover

        mark = f"{MARK}={self._words.name}".encode()
        for found in discover.find(discover.our_roots()):
            if found.supervisor is None:
                continue
            with suppress(OSError):
                if mark in Path(f"/proc/{found.supervisor.pid}/environ").read_bytes().split(b"\0"):
                    return found.supervisor
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
        host = self._inside.node or socket.gethostname()
        pace = Pace()
        with suppress(Exception):  # the end counts, not its last step
            pace = self._pace()
        return TaskEnd(
            name=self._words.name,
            restart=self._inside.restart,
            exit_code=code,
            duration_s=round(time.monotonic() - self._began_s, 3),
            signalled=self._signalled,
            word=self._word,
            over_limit=self._over_limit,
            last_step=pace.step,
            gpus=tuple(f"{host}:{gpu}" for gpu in self._inside.gpus),
            bundle=newest(bundles),
            wrong=pace.wrong,
        )


def _filled(text: str, values: Mapping[str, str]) -> str:
    for token, value in values.items():
        text = text.replace(token, value)
    return text


if __name__ == "__main__":
    sys.exit(main())
