"""safelaunch: torchrun that watches the job, finds out which rank and line hung it, and keeps the evidence.

A training script may call the functions below to help the watchdog. Outside a safelaunch run they do nothing.
"""

from __future__ import annotations

import sys as _sys
from contextlib import contextmanager as _contextmanager

_TYPE_CHECKING = False  # importing typing would cost a training script a few milliseconds
if _TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any as _Any

__version__ = "0.1.0"
__all__ = ["pause", "phase", "step"]


def _marks() -> _Any:
    """Returns this rank's beacon, if any. The beacon is loaded before the script, never by it."""
    return _sys.modules.get("_safelaunch_beacon.marks")


def step() -> None:
    """Marks one step of progress, for loops without a torch optimizer. Costs well under a microsecond."""
    marks = _marks()
    if marks is not None:
        marks.user_stepped()


@_contextmanager
def phase(name: str, timeout: float = 0.0) -> Iterator[None]:
    """Names what this rank does in the block (``with safelaunch.phase("eval", timeout=1800): ...``).

    ``timeout``: seconds after which the phase counts as stalled. 0 keeps the watchdog's own threshold.
    """
    marks = _marks()
    if marks is None:
        yield
        return
    before = marks.set_phase(name, timeout)
    try:
        yield
    finally:
        marks.set_phase(*before)


@_contextmanager
def pause() -> Iterator[None]:
    """Pauses the watch of this rank in the block (``with safelaunch.pause(): input()``)."""
    marks = _marks()
    if marks is None:
        yield
        return
    marks.pause(+1)
    try:
        yield
    finally:
        marks.pause(-1)
