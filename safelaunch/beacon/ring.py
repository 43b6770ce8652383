"""A ring buffer of a rank's latest output, with times, in a shared file that outlives the rank.

Layout: a header of four 64-bit words (magic, capacity, ``head``, ``tail``), then ``capacity`` bytes of records, which
wrap around. ``head`` and ``tail`` count bytes since the start: the oldest record begins at ``tail``, the next one is
written at ``head``. A record consists of its time (CLOCK_REALTIME, ns), its length, its stream, and the data.
"""

from __future__ import annotations

import mmap
import os
import struct
from time import time_ns

CAPACITY = 64 * 1024
HEADER = struct.Struct("<QQQQ")
RECORD = struct.Struct("<QIB3x")
MAGIC = 0x534C52494E470001
STDOUT, STDERR = 1, 2


class Ring:
    """Writes one ring file. ``append`` never blocks and never fails on a full disk: the file is allocated first."""

    def __init__(self, path: str, capacity: int = CAPACITY) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER.size + capacity)
            self._map = mmap.mmap(fd, HEADER.size + capacity)
        finally:
            os.close(fd)
        self._capacity = capacity
        self._head = self._tail = 0
        self._busy = False
        self._store()

    def _store(self) -> None:
        HEADER.pack_into(self._map, 0, MAGIC, self._capacity, self._head, self._tail)

    def append(self, stream: int, data: bytes | memoryview) -> None:
        # If another thread, or a signal handler that prints, interrupts a writer, the ring drops the second one's bytes
        # instead of waiting. Checking and setting the flag is not atomic, but the reader survives a torn record.
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
            # Publish the tail before overwriting its bytes, and the head after writing the new ones.
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

    ``stream`` is STDOUT or STDERR. The rank may write at the same time, so reading stops at the first invalid record.
    Raises OSError if the file cannot be read, ValueError if it is not a ring.
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
