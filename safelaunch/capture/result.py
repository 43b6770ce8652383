"""The result of a source of evidence, and the two guards around every source.

``attempt`` turns any failure into a result with the reason. ``within`` bounds code that may block in the kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from safelaunch.model import Artifact
from safelaunch.system.errors import CaptureError, Failure

T = TypeVar("T")


NO_ANSWER = "no answer from the kernel"


@dataclass(frozen=True)
class Result(Generic[T]):
    """One look at one source: ``value``, or None and the reason in ``missing``.

    ``how`` names the source as the manifest shows it (``py-spy dump --json``); ``note`` qualifies the value; ``kind``
    is the reason for code that must decide.
    """

    value: T | None
    how: str
    duration_s: float
    missing: str = ""
    note: str = ""
    kind: Failure = ""

    def artifact(self, path: str, size: int = 0) -> Artifact:
        """The manifest's entry for the file ``path`` of ``size`` bytes that holds this result."""
        return Artifact(path, self.how, round(self.duration_s, 6), self.missing, size, self.note)


def attempt(how: str, source: Callable[[], T]) -> Result[T]:
    """Calls ``source``. A ``CaptureError`` gives its message as the reason, any other error its type and text."""
    begin = time.monotonic()
    try:
        value = source()
    except CaptureError as error:
        return Result(None, how, time.monotonic() - begin, missing=_one_line(error), kind=error.kind)
    except Exception as error:  # noqa: BLE001 - the boundary: one source that fails costs only itself
        return Result(None, how, time.monotonic() - begin, missing=f"{type(error).__name__}: {error}")
    return Result(value, how, time.monotonic() - begin)


def within(deadline_s: float, what: str, source: Callable[[], T]) -> T:
    """Runs ``source`` in a daemon thread, and abandons it after ``deadline_s`` seconds.

    For reads that the kernel may not finish: files of ``/proc`` behind a lock of a process in D state, a dead
    mount. The abandoned thread stays until the kernel releases it. Raises ``CaptureError`` (kind ``timeout``) on the
    deadline, and whatever ``source`` raises.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            values.append(source())
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=call, name=f"capture {what}", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline_s))
    if errors:
        raise errors[0]
    if not values:
        raise CaptureError(f"{what}: {NO_ANSWER} within {deadline_s:g} s", kind="timeout")
    return values[0]


def _one_line(error: CaptureError) -> str:
    return f"{error.message} ({error.fix})" if error.fix else error.message
