"""Marks in the rank's page that this rank, or a process forked from it, has set a timer that can end it.

``/proc`` doesn't show the timers of ``alarm`` and ``setitimer``. Such a timer can end a process that would otherwise
wait forever.
"""

from __future__ import annotations

import functools

from . import imports, layout, log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FUNCTIONS = ("alarm", "setitimer")


def install(words: memoryview) -> None:
    """Wraps Python's functions that set timers, once module ``signal`` has been imported."""

    @log.guarded
    def replace(module: Any) -> None:
        for name in _FUNCTIONS:
            setattr(module, name, _noting(getattr(module, name), words))

    words[layout.TIMERS] = layout.NO_TIMER
    imports.after_import("signal", replace)


def _noting(function: Any, words: memoryview) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        words[layout.TIMERS] = layout.TIMER_SET
        return function(*args)

    return wrapper
