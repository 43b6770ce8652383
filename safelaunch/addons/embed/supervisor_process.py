"""Starts the supervisor process for the caller of ``safelaunch.launch``, and communicates with it."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import rmtree
from typing import Any, TypeVar

from safelaunch.addons.embed.wire import (
    Connection,
    Done,
    FromSupervisor,
    LaunchRequest,
    RanksEnded,
    Ready,
    Refused,
    Stop,
    Stopping,
)
from safelaunch.beacon import entrypoint as ranks
from safelaunch.cli.api import interpreter
from safelaunch.system import errors
from safelaunch.system.console import say
from safelaunch.system.errors import UsageError

T = TypeVar("T")


class SupervisorProcess:
    def __init__(self, process: subprocess.Popen[bytes], line: Connection, ready: Ready) -> None:
        self._process = process
        self._line = line
        self._stop = False
        self._done: Done | None = None
        self.env = ready.env
        self._run_dir = ready.run_dir

    @classmethod
    def start(cls, request: LaunchRequest) -> SupervisorProcess | None:
        """Starts the supervisor and waits until the job can start. Returns None on failure.

        After a failure, the job runs unwatched. For invalid options, raises the error that the supervisor reports.
        """
        ours, child_end = socket.socketpair()
        try:
            # In its own session: Ctrl-C is for the caller.
            process = subprocess.Popen(
                [*interpreter("safelaunch.addons.embed.supervisor"), str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            say(f"cannot watch this job: no supervisor could be started ({error.strerror or error})")
            return None
        finally:
            child_end.close()
        line = Connection(ours, FromSupervisor)
        line.send(request)
        answer = line.wait()
        if isinstance(answer, Ready):
            return cls(process, line, answer)
        line.close()
        process.wait()
        if isinstance(answer, Refused):
            kind = getattr(errors, answer.kind, UsageError)
            raise kind(answer.message, answer.fix)
        say(f"cannot watch this job: its supervisor ended with {process.returncode}")
        return None

    def watched(self, entrypoint: Callable[..., T] | str | None) -> Callable[..., T] | str | None:
        """Wraps a function that ranks run. A program isn't wrapped: it gets the beacon through its environment."""
        return ranks.WatchedFunction(entrypoint, self.env) if self._run_dir and callable(entrypoint) else entrypoint

    @contextmanager
    def reported_to(self, workers: Any) -> Iterator[None]:
        """Reports what torch's launcher does while the context is active; ``workers`` is its module of processes."""
        if not self._run_dir:
            yield
            return
        agent = ranks.module("agent")
        detach = agent.attach(workers, self._run_dir, self._process.pid, self._asks_to_stop, self._stopping)
        try:
            yield
        finally:
            detach()

    def _asks_to_stop(self) -> bool:
        for message in self._line.received():
            if isinstance(message, Stop):
                self._stop = True
            elif isinstance(message, Done):
                self._done = message
        return self._stop

    def _stopping(self) -> None:
        self._send(Stopping())

    def _send(self, message: Stopping | RanksEnded) -> None:
        self._line.send(message)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCHLD)  # wakes it up

    def finish(self, *, failed: bool) -> Done:
        self._send(RanksEnded(failed))
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)  # if it is stopped, we would wait forever
        while self._done is None and (message := self._line.wait()) is not None:
            if isinstance(message, Done):
                self._done = message
        self._line.close()
        self._process.wait()
        if self._done is None:
            self._clean_up()
        return self._done or Done()

    def _clean_up(self) -> None:
        say(
            f"the supervisor of this job ended early with {self._process.returncode}: the rest of the job ran unwatched"
        )
        if self._run_dir:
            rmtree(self._run_dir, ignore_errors=True)
