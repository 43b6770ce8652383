"""Waits for events, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def until(
    reached: Callable[[], object],
    what: str = "it",
    *,
    patience_s: float = PATIENCE_S,
    every_s: float = 0.02,
    more: Callable[[], object] = str,
) -> None:
    """Waits until ``reached`` is true. Its failure shows what ``more`` returns, such as the output of a process."""
    deadline = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < deadline, f"waited {patience_s:g} s for {what}\n{more()}"
        time.sleep(every_s)
