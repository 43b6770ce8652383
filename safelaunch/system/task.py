"""Runs work in a thread, so that the supervisor's loop doesn't wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Starts ``work`` in a thread. ``result`` returns its result, or raises its exception."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._values.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.done

    def joined(self) -> T:
        self._thread.join()
        return self.result()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]
