"""How far running jobs are, asked of their supervisors without waiting for any of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from safelaunch.launch.paths import RunPaths
from safelaunch.launch.process import ProcessId
from safelaunch.session import discover
from safelaunch.session.control import MAX_LINE, Request, RunStatus

ANSWER_DEADLINE_S = 5.0


@dataclass(slots=True)
class _Question:
    connection: socket.socket
    deadline_s: float
    data: bytes = b""


class Steps:
    """Questions under way, at most one for each job. All methods return at once."""

    def __init__(self, places: Callable[[], tuple[Path, ...]], clock: Callable[[], float]) -> None:
        self._places = places
        self._clock = clock
        self._questions: dict[ProcessId, _Question] = {}

    @property
    def descriptors(self) -> list[int]:
        """To be waited for: an answer comes."""
        return [question.connection.fileno() for question in self._questions.values()]

    def ask(self, supervisors: Iterable[ProcessId]) -> None:
        """Asks each of these jobs, except where an answer is still awaited."""
        wanted = set(supervisors)
        for gone in [process for process in self._questions if process not in wanted]:
            self._drop(gone)
        for found in discover.find(self._places()):
            supervisor = found.supervisor
            if supervisor in wanted and supervisor is not None and supervisor not in self._questions:
                connection = _ask(RunPaths(found.directory).control)
                if connection is not None:
                    self._questions[supervisor] = _Question(connection, self._clock() + ANSWER_DEADLINE_S)

    def answers(self) -> dict[ProcessId, RunStatus]:
        """What has been answered since the last call."""
        found = {}
        for process, question in list(self._questions.items()):
            done = _read(question)
            if done:
                try:
                    found[process] = msgspec.json.decode(question.data, type=RunStatus)
                except msgspec.DecodeError:
                    pass  # of another version, or cut off by its end
            if done or self._clock() > question.deadline_s:
                self._drop(process)
        return found

    def _drop(self, process: ProcessId) -> None:
        self._questions.pop(process).connection.close()


def _ask(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(os.fspath(path))
        connection.send(msgspec.json.encode(Request("status")) + b"\n")
    except OSError:
        connection.close()
        return None
    return connection


def _read(question: _Question) -> bool:
    """Reads what is there; whether that is all."""
    while len(question.data) < 16 * MAX_LINE:
        try:
            chunk = question.connection.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if not chunk:
            return True
        question.data += chunk
    return True


def progress_of(status: RunStatus) -> tuple[int | None, float | None]:
    """Step and steps per second of the slowest rank that steps: the job is as far as that one."""
    stepping = [rank for rank in status.ranks if rank.step is not None and rank.state != "exited"]
    stepping = stepping or [rank for rank in status.ranks if rank.step is not None]
    if not stepping:
        return None, None
    slowest = min(stepping, key=lambda rank: rank.step or 0)
    return slowest.step, slowest.steps_per_s
