"""Runs helper programs (py-spy, nvidia-smi, ...) under a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safelaunch.system.errors import CaptureError

MAX_OUTPUT_BYTES = 64 << 20
MAX_STDERR_BYTES = 64 << 10
POLL_S = 0.1
GRACE_S = 0.5  # to reap a killed helper; a thread waits for one stuck in the kernel


class HelperReports:
    """Reports the pid of each helper as it starts, and kills helpers that are still running at the end.

    The supervisor forwards the pids to its guardian, which ends hung helpers if the supervisor is killed.
    """

    def __init__(self) -> None:
        self._report: Callable[[int], None] = lambda pid: None
        self._running: set[subprocess.Popen[bytes]] = set()
        self._starting: set[object] = set()
        self._closed = False

    def send_to(self, report: Callable[[int], None]) -> None:
        self._report, self._closed = report, False

    def started(self, pid: int) -> None:
        self._report(pid)

    @contextmanager
    def running(self, words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Starts ``words`` in a new process group, which ``end_all`` can kill until the context ends.

        Raises ``CaptureError`` if the program can't be started.
        """
        this = object()
        self._starting.add(this)
        try:
            if self._closed:
                raise CaptureError("the supervisor is ending")
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **_OWN_GROUP, **options)
            self._running.add(process)
        except OSError as error:
            raise CaptureError(f"cannot start {words[0]}: {error.strerror or error}") from error
        finally:
            self._starting.discard(this)
        self.started(process.pid)
        try:
            yield process
        finally:
            self._running.discard(process)

    def end_all(self) -> None:
        for process in tuple(self._running):
            _kill(process)

    def close(self) -> None:
        """Kills running helpers and refuses to start more. The threads that enforce deadlines end with this process."""
        self._closed = True
        until = time.monotonic() + GRACE_S
        while self._starting and time.monotonic() < until:
            time.sleep(0.001)
        self.end_all()


helper_reports = HelperReports()


@dataclass(frozen=True)
class Output:
    returncode: int | None
    stdout: bytes
    stderr: str
    timed_out: bool = False


def run(argv: list[str], *, deadline_s: float, cwd: Path | None = None) -> Output:
    """Runs ``argv`` without stdin for at most ``deadline_s`` seconds, then sends SIGKILL to its process group.

    Never waits for a helper stuck in the kernel. Raises ``CaptureError`` if the program can't be started.
    """
    begin = time.monotonic()
    with helper_reports.running(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd) as process:
        readers = [_PipeReader(process.stdout), _PipeReader(process.stderr)]
        for reader in readers:  # the pipes first: unlike a pid, they can be awaited without polling
            reader.thread.join(_left(begin, deadline_s))
        timed_out = any(reader.thread.is_alive() for reader in readers)  # or the helper's child keeps them open
        try:
            process.wait(_left(begin, deadline_s))
        except subprocess.TimeoutExpired:
            timed_out = True
        if timed_out:
            _kill(process)
            for reader in readers:
                reader.thread.join(GRACE_S)
    stdout, stderr = (bytes(reader.data) for reader in readers)
    return Output(process.returncode, stdout, stderr.decode("utf-8", "replace"), timed_out)


def run_together(
    commands: Sequence[Sequence[str]], folder: Path, *, deadline_s: float, stop: threading.Event | None = None
) -> list[Output]:
    """Runs all commands at once. After ``deadline_s`` seconds, or once ``stop`` is set, kills those still running.

    Stderr goes to files in ``folder``; stdout is discarded. Needs no threads. If a command can't be started, its return
    code is None and its stderr the reason.
    """
    until = time.monotonic() + deadline_s
    stop = stop or threading.Event()
    logs = [folder / f"stderr-{number}" for number in range(len(commands))]
    with ExitStack() as reported:
        running = [_started(words, log, reported) for words, log in zip(commands, logs, strict=True)]
        while any(isinstance(helper, subprocess.Popen) and helper.poll() is None for helper in running):
            if time.monotonic() > until or stop.wait(POLL_S):
                break
        return [_ended(helper, log) for helper, log in zip(running, logs, strict=True)]


def _started(words: Sequence[str], log: Path, reported: ExitStack) -> subprocess.Popen[bytes] | str:
    try:
        with log.open("wb") as file:
            helper = helper_reports.running(words, stdout=subprocess.DEVNULL, stderr=file)
            return reported.enter_context(helper)
    except CaptureError as error:
        return error.message
    except OSError as error:
        return f"cannot start {words[0]}: {error.strerror or error}"


def _ended(helper: subprocess.Popen[bytes] | str, log: Path) -> Output:
    if isinstance(helper, str):
        return Output(None, b"", helper)
    timed_out = helper.poll() is None
    if timed_out:
        _kill(helper)
    try:
        with log.open("rb") as file:
            stderr = file.read(MAX_STDERR_BYTES).decode("utf-8", "replace")
    except OSError:
        stderr = ""
    return Output(helper.returncode, b"", stderr, timed_out)


# A process group, not a session: the session distinguishes the supervisor's helpers from the job's orphans.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}


class _PipeReader:
    """Drains a pipe in a daemon thread; keeps ``MAX_OUTPUT_BYTES`` and drops the rest."""

    def __init__(self, pipe: object) -> None:
        self.data = bytearray()
        self._pipe = pipe
        self.thread = threading.Thread(target=self._drain, name="capture pipe", daemon=True)
        self.thread.start()

    def _drain(self) -> None:
        with self._pipe as pipe:  # type: ignore[attr-defined]
            while chunk := os.read(pipe.fileno(), 1 << 16):
                if len(self.data) < MAX_OUTPUT_BYTES:
                    self.data += chunk


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        if _OWN_GROUP:
            os.killpg(process.pid, signal.SIGKILL)  # the group id stays its pid while a member is alive
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name="capture reap", daemon=True).start()


def _left(begin: float, deadline_s: float) -> float:
    return max(0.0, begin + deadline_s - time.monotonic())
