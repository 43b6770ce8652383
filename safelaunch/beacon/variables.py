"""Reads the variables of functions that run, without leaving a trace."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MOST_FRAMES = 32
OPTIMIZED = 0x1  # in ``co_flags``: a function's own variables, and no module's


def upwards(frame: Any) -> Iterator[Any]:
    """The frame and those around it."""
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def in_variables(frame: Any, read: Callable[[Any], Any]) -> Any:
    """``read`` of the function's variables; None where they must not be looked at.

    Before Python 3.13, to look leaves a copy of them behind, which would keep tensors alive. While a tracer is at a
    line (a debugger at its prompt), the interpreter writes that copy back afterwards: what is missing is deleted.
    """
    if sys.version_info >= (3, 13):
        return read(frame.f_locals)
    if frame.f_trace is not None:
        return None
    variables = frame.f_locals
    try:
        return read(variables)
    finally:
        if frame.f_code.co_flags & OPTIMIZED:
            variables.clear()
