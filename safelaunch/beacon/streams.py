"""Copies what Python writes to stdout and stderr to the ring, without changing how the streams behave.

A ``FileIO`` subclass on the same descriptor replaces the raw layer under ``sys.stdout``. The text layer is rebuilt with
the same encoding, error handler, newline translation and buffering. So ``fileno``, ``isatty``, ``tqdm``, ``subprocess``
and ``dup2`` work as before. Output that C++ code or ``os.write`` sends to the descriptor is not copied.
"""

from __future__ import annotations

import io
import sys

from . import ring as rings

TYPE_CHECKING = False
if TYPE_CHECKING:  # a rank does not import typing: it pays for every import
    from typing import Any

_ring: rings.Ring | None = None


class _Tee(io.FileIO):
    """Writes to the descriptor as before, and copies the bytes that it accepted to the ring."""

    def __init__(self, fd: int, name: str, stream: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self.name = name
        self._stream = stream

    def write(self, data: Any) -> int:
        written = super().write(data)
        if written and _ring is not None:
            try:
                _ring.append(self._stream, memoryview(data).cast("B")[:written])
            except Exception:
                detach()  # a damaged ring must never cost the rank any output
        return written


def attach(ring: rings.Ring) -> None:
    """Replaces ``sys.stdout`` and ``sys.stderr`` if they are still the interpreter's own."""
    global _ring
    _ring = ring
    for name, stream in (("stdout", rings.STDOUT), ("stderr", rings.STDERR)):
        old = getattr(sys, name)
        new = _rebuilt(old, stream) if old is getattr(sys, f"__{name}__") else None
        if new is not None:
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


def detach() -> None:
    """Stops copying output, in a forked child or when the ring is damaged. The streams keep working."""
    global _ring
    _ring = None


def _rebuilt(old: Any, stream: int) -> io.TextIOWrapper | None:
    if not isinstance(old, io.TextIOWrapper):
        return None
    buffer = old.buffer
    raw = buffer.raw if isinstance(buffer, io.BufferedWriter) else buffer
    if type(raw) is not io.FileIO:
        return None
    old.flush()
    tee = _Tee(raw.fileno(), raw.name, stream)
    new = io.TextIOWrapper(
        tee if buffer is raw else io.BufferedWriter(tee),
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )
    vars(new)["mode"] = old.mode
    return new
