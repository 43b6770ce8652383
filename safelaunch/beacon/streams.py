"""Keeps what Python writes to stdout and stderr in the ring, without changing the streams' observable nature.

The raw layer under ``sys.stdout`` is replaced by a ``FileIO`` subclass on the same descriptor; the text layer is made
again with the same encoding, error handler, newline translation and buffering, so that ``fileno``, ``isatty``,
``tqdm``, ``subprocess`` and ``dup2`` see what they saw before. What C++ code or ``os.write`` puts on the descriptor is
not seen.
"""

from __future__ import annotations

import io
import sys

from . import ring as rings

TYPE_CHECKING = False
if TYPE_CHECKING:  # the typing module is not loaded for it: a rank pays for every import
    from typing import Any

_ring: rings.Ring | None = None


class _Tee(io.FileIO):
    """Writes to the descriptor as before; what was accepted also goes to the ring."""

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
                detach()  # a damaged ring must never cost the rank a line of its output
        return written


def attach(ring: rings.Ring) -> None:
    """Replaces ``sys.stdout`` and ``sys.stderr`` where they are the interpreter's own."""
    global _ring
    _ring = ring
    for name, stream in (("stdout", rings.STDOUT), ("stderr", rings.STDERR)):
        old = getattr(sys, name)
        new = _rebuilt(old, stream) if old is getattr(sys, f"__{name}__") else None
        if new is not None:
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


def detach() -> None:
    """Stops keeping output (in a forked child, or when the ring is damaged); the streams go on as before."""
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
