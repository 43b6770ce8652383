"""Keeps a rank's latest output, with timestamps, in a ring buffer: a shared file that outlives the rank.

Python's writes to stdout and stderr are copied there without changing how the streams behave: a ``FileIO`` subclass on
the same descriptor replaces the raw layer under ``sys.stdout``, and the text layer is rebuilt with the same encoding,
error handler, newline translation and buffering. ``fileno``, ``isatty``, ``tqdm``, ``subprocess`` and ``dup2`` work as
before. Output of C++ code or ``os.write`` isn't copied.

The ring has a header of four 64-bit words (magic, capacity, ``head``, ``tail``), then ``capacity`` bytes of records,
which wrap around. ``head`` and ``tail`` count bytes since the start: the oldest record begins at ``tail``, the next one
at ``head``. A record is its time (CLOCK_REALTIME, ns), length, stream, and data.
"""

from __future__ import annotations

import io
import struct
import sys
from time import time_ns

from . import page

TYPE_CHECKING = False
if TYPE_CHECKING:  # every import costs a rank time
    import mmap
    import os
    from typing import Any

CAPACITY = 64 * 1024
HEADER = struct.Struct("<QQQQ")
RECORD = struct.Struct("<QIB3x")
MAGIC = 0x534C52494E470001
STDOUT, STDERR = 1, 2


class Ring:
    """Writes a ring file.

    ``append`` never blocks, and doesn't fail on a full disk, because the file was allocated first.
    """

    def __init__(self, path: str, capacity: int = CAPACITY) -> None:
        self._map = page.mapped(path, HEADER.size + capacity)
        self._capacity = capacity
        self._head = self._tail = 0
        self._busy = False
        self._store()

    def _store(self) -> None:
        HEADER.pack_into(self._map, 0, MAGIC, self._capacity, self._head, self._tail)

    def append(self, stream: int, data: bytes | memoryview) -> None:
        # The ring never waits: if a thread or a signal handler interrupts a writer, its bytes are dropped. The flag
        # isn't atomic, but the reader survives a torn record.
        if self._busy:
            return
        self._busy = True
        try:
            room = self._capacity - RECORD.size
            if len(data) > room:
                data = bytes(data[-room:])
            need = RECORD.size + len(data)
            while self._head + need - self._tail > self._capacity:
                self._tail += RECORD.size + RECORD.unpack(self._read(self._tail, RECORD.size))[1]
            # Publish the tail before overwriting its bytes, and the head after writing new ones.
            self._store()
            self._write(self._head, RECORD.pack(time_ns(), len(data), stream) + bytes(data))
            self._head += need
            self._store()
        finally:
            self._busy = False

    def _read(self, at: int, size: int) -> bytes:
        return _read_wrapped(self._map, self._capacity, at, size)

    def _write(self, at: int, data: bytes) -> None:
        start = at % self._capacity
        first = min(len(data), self._capacity - start)
        self._map[HEADER.size + start : HEADER.size + start + first] = data[:first]
        if first < len(data):
            self._map[HEADER.size : HEADER.size + len(data) - first] = data[first:]


def _read_wrapped(buffer: bytes | mmap.mmap, capacity: int, at: int, size: int) -> bytes:
    start = at % capacity
    first = min(size, capacity - start)
    part = bytes(buffer[HEADER.size + start : HEADER.size + start + first])
    return part if first == size else part + bytes(buffer[HEADER.size : HEADER.size + size - first])


def read(path: str | os.PathLike[str]) -> list[tuple[int, int, bytes]]:
    """Returns the records of the ring at ``path``, oldest first: ``[(time_ns, stream, data)]``.

    ``stream`` is STDOUT or STDERR. The rank might be writing at the same time, so reading stops at the first invalid
    record. Raises OSError if the file can't be read, ValueError if it isn't a ring.
    """
    with open(path, "rb") as file:
        content = file.read(HEADER.size + 16 * CAPACITY)
    if len(content) < HEADER.size:
        raise ValueError("too short for a ring")
    magic, capacity, head, tail = HEADER.unpack_from(content)
    if magic != MAGIC or capacity != len(content) - HEADER.size or not 0 <= head - tail <= capacity:
        raise ValueError("not a ring, or a damaged one")
    records = []
    while head - tail >= RECORD.size:
        time, length, stream = RECORD.unpack(_read_wrapped(content, capacity, tail, RECORD.size))
        if length > head - tail - RECORD.size or stream not in (STDOUT, STDERR):
            break
        records.append((time, stream, _read_wrapped(content, capacity, tail + RECORD.size, length)))
        tail += RECORD.size + length
    return records


# --- the streams of Python --------------------------------------------------------------------------------------------

_ring: Ring | None = None


class _Tee(io.FileIO):
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
                detach()  # a damaged ring must never cost the rank its output
        return written


def install(path: str) -> None:
    """Replaces ``sys.stdout`` and ``sys.stderr`` if they are still the interpreter's own, and creates the ring."""
    global _ring
    _ring = Ring(path)
    page.keep(_ring)
    for name, stream in (("stdout", STDOUT), ("stderr", STDERR)):
        old = getattr(sys, name)
        new = _rebuilt(old, stream) if old is getattr(sys, f"__{name}__") else None
        if new is not None:
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


def detach() -> None:
    """Stops copying output, in a forked child or if the ring is damaged. The streams keep working."""
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
