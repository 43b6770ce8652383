"""What a source of evidence returns, and the two guards every source stands behind.

``attempt`` turns any failure into a result that says why; ``within`` bounds code that may block in the
kernel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from safelaunch.errors import CaptureError
from safelaunch.model import Artifact

T = TypeVar("T")


@dataclass(frozen=True)
class Result(Generic[T]):
    """One look at one source: ``value``, or None and the reason in ``missing``.

    ``how`` names the source as the manifest shows it (``py-spy dump --json``), ``note`` what qualifies the
    value.
    """

    value: T | None
    how: str
    duration_s: float
    missing: str = ""
    note: str = ""

    def artifact(self, path: str, size: int = 0) -> Artifact:
        """The manifest's line for the file ``path`` of ``size`` bytes that this result was written to."""
        return Artifact(path, self.how, round(self.duration_s, 6), self.missing, size, self.note)


def attempt(how: str, source: Callable[[], T]) -> Result[T]:
    """Call ``source``; a ``CaptureError`` is the reason as it stands, others are named with their type."""
    begin = time.monotonic()
    try:
        value = source()
    except CaptureError as error:
        return Result(None, how, time.monotonic() - begin, missing=_one_line(error))
    except Exception as error:  # noqa: BLE001 - the boundary: one source that fails costs only itself
        return Result(None, how, time.monotonic() - begin, missing=f"{type(error).__name__}: {error}")
    return Result(value, how, time.monotonic() - begin)


def within(deadline_s: float, what: str, source: Callable[[], T]) -> T:
    """``source()`` from a daemon thread, given up after ``deadline_s`` seconds.

    For reads that the kernel may not finish: files of ``/proc`` behind a lock of a process in D state, a dead
    mount. The abandoned thread stays until the kernel lets go. Raises ``CaptureError`` on the deadline, and
    whatever ``source`` raised.
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
        raise CaptureError(f"{what}: no answer from the kernel within {deadline_s:g} s")
    return values[0]


def _one_line(error: CaptureError) -> str:
    return f"{error.message} ({error.fix})" if error.fix else error.message
