"""Checks once, as soon as there is a rank, if py-spy can read its stacks, and prints a line if it can't."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial

from safelaunch.capture import command, stacks
from safelaunch.capture.result import why
from safelaunch.supervise.pollers import Poller
from safelaunch.system.console import say
from safelaunch.system.errors import CaptureError

VERSION_S = 3.0
INSTEAD = "the ranks send their stacks themselves, without C frames and without the stacks of child processes"
FIX = "run 'safelaunch doctor' where the job runs: it shows the fix"


class Tracing(Poller[str]):
    """Asks once per run. Neither check stops the rank."""

    name, again_s = "tracing", math.inf
    _asked = False

    def is_due(self, now: float) -> bool:
        return not self._asked and any(target.has_beacon for target in self._watch.targets())

    def question(self) -> Callable[[], str] | None:
        self._asked = True
        return partial(refusal, next(target.pid for target in self._watch.targets() if target.has_beacon))

    def take(self, answer: str, now: float) -> None:
        if answer:
            say(f"py-spy can't read the stacks of the ranks: {answer}; {INSTEAD}; {FIX}")


def refusal(pid: int) -> str:
    """Why py-spy can't read the stacks of ``pid``; empty if it can, or if that is not certain."""
    try:
        py_spy = stacks.find_py_spy()
        shown = command.run([py_spy, "--version"], deadline_s=VERSION_S)
    except CaptureError as error:
        return why(error)
    if shown.timed_out:
        return ""
    if shown.returncode or not shown.stdout.startswith(b"py-spy"):
        return f"{py_spy} does not work ({stacks.summary(shown.stderr) or 'no version'})"
    if may_read(pid):
        return ""
    read = stacks.dump(pid, nonblocking=True)  # its file may have rights that this process lacks
    if read.value is not None or read.kind == "timeout":
        return ""
    return why(stacks.explain("permission denied", stacks.tracing_facts(pid)))


def may_read(pid: int) -> bool:
    """Tells if this process may open the memory of ``pid``, for which the kernel asks the same as of a tracer."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass  # it has ended
    return True
