"""Waiting for a sign, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(reached: Callable[[], object], patience_s: float = 90.0) -> None:
    deadline = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
