"""Measures the time that Python's garbage collector takes, between two requests of the supervisor."""

from __future__ import annotations

import gc
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HANDLER = "safelaunch_garbage"
LONGEST_S = 120.0  # without a second request, the measurement ends

_meters: list[_Meter] = []


class _Meter:
    def __init__(self) -> None:
        self.collecting_s = 0.0
        self._until_s = time.monotonic() + LONGEST_S
        self._begin_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._begin_s = now
        elif self._begin_s:
            self.collecting_s += now - self._begin_s
        if now > self._until_s:
            self.end()

    def end(self) -> bool:
        """Returns False if it had ended before, or if the user's code removed it."""
        at = next((at for at, callback in enumerate(gc.callbacks) if callback is self), None)
        if at is not None:
            del gc.callbacks[at]
        return at is not None


def answer(request: Any, response: Any) -> None:
    """Begins to measure. If a measurement is in progress, ends it and responds with its seconds."""
    content = "{}"
    try:
        meter = _meters.pop() if _meters else None
        if meter is not None and meter.end():
            content = f'{{"collecting_s": {meter.collecting_s:.6f}}}'
        else:
            meter = _Meter()
            gc.callbacks.append(meter)
            _meters.append(meter)
    except Exception:  # the user's code has changed gc.callbacks, and an error must not reach C++
        content = "{}"
    response.set_content(content.encode(), "application/json")
    response.set_status(200)
