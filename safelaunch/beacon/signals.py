"""Keeps the script's signals away from the beacon's threads."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # importing signal costs a rank 2 ms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

_OF_FAULTS = {4, 5, 6, 7, 8, 11}  # ILL, TRAP, ABRT, BUS, FPE, SEGV


def without(start: Callable[[], T]) -> T:
    """Calls ``start`` with all signals blocked. The threads that it starts inherit this.

    A script can block a signal in all of its threads and wait for it in one of them. If another thread didn't block it,
    the kernel could deliver the signal there, and its default action would end the process.
    """
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - _OF_FAULTS)
    try:
        return start()
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
