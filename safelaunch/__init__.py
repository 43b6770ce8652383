"""safelaunch: torchrun that watches the job, finds out which rank and line hung it, and keeps the evidence.

The functions below are optional hints that a training script may give; outside a safelaunch run they do nothing.
"""

from __future__ import annotations

import sys as _sys
from contextlib import contextmanager as _contextmanager

_TYPE_CHECKING = False  # typing itself would cost a training script a few milliseconds
if _TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any as _Any

__version__ = "0.1.0"
__all__ = ["pause", "phase", "step"]


def _marks() -> _Any:
    """The beacon of this rank where there is one: it is loaded before the script, and never by it."""
    return _sys.modules.get("_safelaunch_beacon.marks")


def step() -> None:
    """Marks one step of progress, for loops without a torch optimizer. Costs well under a microsecond."""
    marks = _marks()
    if marks is not None:
        marks.user_stepped()


@_contextmanager
def phase(name: str, timeout: float = 0.0) -> Iterator[None]:
    """Names what this rank does meanwhile (``with safelaunch.phase("eval", timeout=1800): ...``).

    ``timeout``: seconds after which the phase counts as stalled; 0 leaves the watchdog's own threshold.
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
    """This rank is not watched meanwhile (``with safelaunch.pause(): input()``)."""
    marks = _marks()
    if marks is None:
        yield
        return
    marks.pause(+1)
    try:
        yield
    finally:
        marks.pause(-1)
