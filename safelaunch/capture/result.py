"""Reads one source of evidence without failing or waiting forever."""

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
    value: T | None
    how: str  # the source as the manifest shows it (py-spy dump --json)
    duration_s: float
    missing: str = ""  # reason if the value is None
    note: str = ""  # qualifies the value
    kind: Failure = ""  # the reason, for code

    def artifact(self, path: str) -> Artifact:
        return Artifact(path, self.how, round(self.duration_s, 6), self.missing, note=self.note)


def attempt(how: str, source: Callable[[], T]) -> Result[T]:
    """Calls ``source``. On failure, the reason is the ``CaptureError``'s message, or another error's type and text."""
    begin = time.monotonic()
    try:
        value = source()
    except CaptureError as error:
        return Result(None, how, time.monotonic() - begin, missing=why(error), kind=error.kind)
    except Exception as error:  # noqa: BLE001 - one failing source costs only itself
        return Result(None, how, time.monotonic() - begin, missing=f"{type(error).__name__}: {error}")
    return Result(value, how, time.monotonic() - begin)


def within(deadline_s: float, what: str, source: Callable[[], T]) -> T:
    """Runs ``source`` in a daemon thread, and abandons it after ``deadline_s`` seconds.

    The kernel might never finish some reads, for example on a dead mount, or of ``/proc`` files if a process in D state
    holds their lock. The abandoned thread stays until the kernel releases it. Raises ``CaptureError`` (kind
    ``timeout``) at the deadline, and any error of ``source``.
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


def within_or(default: T, deadline_s: float, what: str, source: Callable[[], T]) -> T:
    """Runs ``within``, but returns ``default`` if the read doesn't finish in time or isn't permitted."""
    try:
        return within(deadline_s, what, source)
    except (CaptureError, OSError):
        return default


def left(until: float) -> float:
    """Returns the seconds until ``until`` (CLOCK_MONOTONIC). Raises TimeoutError if none are left."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def why(error: CaptureError) -> str:
    return f"{error.message} ({error.fix})" if error.fix else error.message
