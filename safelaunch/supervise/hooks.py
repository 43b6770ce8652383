"""Runs the user's command for each bundle (``--on-bundle COMMAND``) or early look (``--on-suspect COMMAND``).

Only the end of the job waits for the command. ``posix_spawn`` unblocks the supervisor's signals in the child without a
wrapper. The command has its own process group, so that all of it can be killed. But it stays in safelaunch's session,
so that it can be distinguished from the job.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from safelaunch.model import EarlyLook, Verdict
from safelaunch.system.console import say
from safelaunch.system.task import BackgroundTask

DEADLINE_S = 30.0
SHELL = "/bin/sh"
_LAST_BYTES = 4096
_LAST_LINES = 3
_REAP_S = 1.0  # until a killed command is gone, unless it is stuck in the kernel


class Notifier:
    """Runs a command in a thread for each bundle."""

    def __init__(
        self,
        command: str | None = None,
        *,
        option: str = "--on-bundle",
        deadline_s: float = DEADLINE_S,
        report: Callable[[str], None] = say,
    ) -> None:
        self._command = command
        self._option = option
        self._deadline_s = deadline_s
        self._say = report
        self._under_way: list[BackgroundTask[None]] = []
        self._ended = False

    @property
    def patience_s(self) -> float:
        return self._deadline_s + 2 * _REAP_S

    @property
    def busy(self) -> bool:
        return any(not task.done for task in self._under_way)

    def notify(self, verdict: Verdict, bundle: Path, run_name: str) -> None:
        self.start(variables(verdict, bundle, run_name))

    def start(self, variables: Mapping[str, str]) -> None:
        if self._command is None or self._ended:
            return
        command, env = self._command, {**os.environ, **variables}
        self._under_way = [task for task in self._under_way if not task.done]
        self._under_way.append(BackgroundTask(self._option, lambda: self._run(command, env)))

    def end(self) -> None:
        self._ended = True
        for task in self._under_way:
            task.wait(2 * _REAP_S)

    def _run(self, command: str, env: Mapping[str, str]) -> None:
        try:
            problem = run(command, env, deadline_s=self._deadline_s, is_cancelled=lambda: self._ended)
        except OSError as error:
            problem = f"could not be started: {error.strerror or error}"
        if problem and not self._ended:
            self._say(f"{self._option} {problem}")


def variables(verdict: Verdict, bundle: Path, run_name: str) -> dict[str, str]:
    return _usable(
        {
            "SAFELAUNCH_BUNDLE": os.fspath(bundle),
            "SAFELAUNCH_VERDICT": os.fspath(bundle / "verdict.json"),
            "SAFELAUNCH_OUTCOME": verdict.outcome,
            "SAFELAUNCH_CAUSE": verdict.cause,
            "SAFELAUNCH_CONFIDENCE": verdict.confidence,
            "SAFELAUNCH_SUMMARY": " ".join(verdict.summary.split()),
            "SAFELAUNCH_CULPRITS": ",".join(str(culprit.rank) for culprit in verdict.culprits),
            "SAFELAUNCH_RUN_NAME": run_name,
        }
    )


def variables_of_look(look: EarlyLook, run_name: str) -> dict[str, str]:
    return _usable(
        {
            "SAFELAUNCH_SUMMARY": look.words,
            "SAFELAUNCH_CAUSE": look.cause,
            "SAFELAUNCH_RANKS": ",".join(str(place.rank) for place in look.places),
            "SAFELAUNCH_QUIET_S": f"{look.quiet_s:.0f}",
            "SAFELAUNCH_USUAL_S": f"{look.usual_s:.3g}",
            "SAFELAUNCH_RUN_NAME": run_name,
        }
    )


def _usable(values: Mapping[str, str]) -> dict[str, str]:
    return {name: value.replace("\0", "") for name, value in values.items()}


def run(command: str, env: Mapping[str, str], *, deadline_s: float, is_cancelled: Callable[[], bool]) -> str:
    """Runs ``command`` in the shell. Returns why it failed, or "" if it didn't. Raises OSError if it can't be started.

    The command's process group is killed after ``deadline_s`` seconds, or once ``is_cancelled`` returns true. Its
    output is shown only if it fails. The command counts as ended once the shell exits; background processes can
    continue.
    """
    read, write = os.pipe()
    try:
        pid = _start(command, env, write)
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    deadline = time.monotonic() + deadline_s
    output = b""
    try:
        while True:
            output = (output + _output(read, 0.05))[-_LAST_BYTES:]
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline or is_cancelled():
                os.killpg(pid, signal.SIGKILL)  # not reaped yet, so the pid is still the command's
                _reap(pid)
                return f"did not end within {deadline_s:g} s and was killed{_last_lines(output)}"
        output += _output(read, 0.0)
    finally:
        os.close(read)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
    return f"{how}{_last_lines(output)}"


def _start(command: str, env: Mapping[str, str], output: int) -> int:
    return os.posix_spawn(
        SHELL,
        [SHELL, "-c", command],
        dict(env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ],
        setpgroup=0,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
    )


def _reap(pid: int) -> None:
    deadline = time.monotonic() + _REAP_S
    while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
        time.sleep(0.02)


def _output(pipe: int, patience_s: float) -> bytes:
    ready, _, _ = select.select([pipe], [], [], patience_s)
    data = os.read(pipe, 65536) if ready else b""
    if ready and not data:
        time.sleep(patience_s)
    return data


def _last_lines(output: bytes) -> str:
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    shown = "".join(char if char.isprintable() else " " for line in [" | ".join(lines[-_LAST_LINES:])] for char in line)
    return f": {shown}" if shown else ""
