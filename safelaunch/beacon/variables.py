"""Reads the variables of running functions without side effects."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MOST_FRAMES = 32
OPTIMIZED = 0x1  # flag in ``co_flags``: a function, not a module


def upwards(frame: Any) -> Iterator[Any]:
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def in_variables(frame: Any, read: Callable[[Any], Any]) -> Any:
    """Returns the result of ``read`` for the function's variables; None if they must not be read.

    Before Python 3.13, reading variables leaves a copy of them, which would keep tensors alive. While a tracer is at a
    line (a debugger at its prompt), the interpreter writes that copy back, and deletes variables that aren't in it.
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
