"""Whose code a thread waits in that sleeps in a futex, by the top of its stack; its process is not stopped.

``with lock:``, ``work.wait()`` and a C extension that waits for its own threads look alike from Python. The kernel
knows where the stack of a sleeping thread is. Upwards from there, the first return address behind a call of one of the
C library's waits is in the code that waits. Remains of earlier calls may lie between, so calls of anything else don't
count; but calls by a register do, outside Python itself, for who is mistaken for a file holds no lock of Python.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

MAX_THREADS = 64  # of a process
STACK_BYTES = 4096
MAX_TABLE_BYTES = 64 << 20

_PASSED = re.compile(r"(libc|libpthread|ld|ld-\w.*|libstdc\+\+|libc\+\+)[.-].*|ld-musl.*|\[vdso\]")  # wait for callers
_PYTHON = re.compile(r"(lib)?python\d.*")
_LOCKS = r"PyThread_acquire_lock(_timed)?|_?PyMutex_Lock(Timed)?|_PySemaphore_Wait|_PyParkingLot_Park|PyEvent_Wait\w*"
_WAITS = (
    r"_*(pthread|sem|cnd|mtx|thrd|lll)_\w*(wait|(?<!un)lock|join|once)\w*|syscall"
    r"|_ZNK?St\w*(condition_variable\w*wait|thread4join|mutex4lock|future\w*wait|atomic_futex\w*wait)\w*"
)
_WANTED = re.compile(f"({_LOCKS}|{_WAITS})".encode())
_STUB = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xf2?\xff\x25(?P<at>.{4})", re.DOTALL)  # of the procedure linkage table
_BY_REGISTER = re.compile(rb"\xff(?:[\xd0-\xd7\x10-\x17]|[\x50-\x57].|[\x90-\x97].{4})\Z", re.DOTALL)


class _Mapping(NamedTuple):
    start: int
    end: int
    offset: int
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def passed(self) -> bool:
        return _PASSED.fullmatch(self.name) is not None


class _Function(NamedTuple):
    begin: int
    end: int
    name: str


class Resting:
    """The threads of one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._left = MAX_THREADS

    def rests_in(self, syscall: str) -> str:
        """By ``/proc/<pid>/task/<tid>/syscall``: ``lock`` or ``gil`` of Python, else the file whose code waits.

        Empty if that is not found.
        """
        fields = syscall.split()
        if len(fields) != 9 or self._left == 0:
            return ""
        self._left -= 1
        with suppress(OSError, ValueError):  # it may have ended, or be another user's
            return self._rests_in(int(fields[7], 16), int(fields[8], 16))
        return ""

    def _rests_in(self, stack: int, instruction: int) -> str:
        at = self._mapping(instruction)
        if at is None or not at.passed:
            return at.name if at is not None else ""
        for (address,) in struct.iter_unpack("=Q", self._memory(stack, STACK_BYTES)):
            caller = self._mapping(address)
            if caller is None or caller.passed or not (wait := self._called(address)):
                continue
            if not _PYTHON.fullmatch(caller.name):
                return caller.name
            if any(one.begin < address <= one.end for one in self._functions(caller)):
                return "lock"
            if wait != "?":  # locks are semaphores
                return "gil" if wait.startswith(("pthread_cond_", "pthread_mutex_")) else caller.name
        return ""

    def _called(self, address: int) -> str:
        """The wait that the instruction before this address calls; ``?``: one by a register; empty: there is none."""
        if platform.machine() != "x86_64":
            return "some call"
        code = self._memory(address - 7, 7)
        if len(code) < 7:
            return ""
        (distance,) = struct.unpack("=i", code[3:])
        if code[2] == 0xE8:
            return self._name(address + distance) or self._behind_stub(address + distance)
        if code[1:3] == b"\xff\x15":
            return self._behind(address + distance)
        return "?" if _BY_REGISTER.search(code) else ""

    def _behind_stub(self, address: int) -> str:
        stub = _STUB.match(self._memory(address, 11))
        return self._behind(address + stub.end() + struct.unpack("=i", stub["at"])[0]) if stub else ""

    def _behind(self, slot: int) -> str:
        return self._name(int.from_bytes(self._memory(slot, 8), "little"))

    def _name(self, address: int) -> str:
        """Of a function that waits, by its begin."""
        at = self._mapping(address)
        found = self._functions(at) if at is not None and at.passed else ()
        return next((one.name for one in found if one.begin == address), "")

    def _functions(self, mapping: _Mapping) -> tuple[_Function, ...]:
        path = f"/proc/{self._pid}/root{mapping.path}"
        with suppress(OSError, OverflowError, IndexError, struct.error):  # the file may be damaged
            status = Path(path).stat()
            delta, found = _functions_of(path, (status.st_dev, status.st_ino, status.st_mtime_ns))
            base = mapping.start - mapping.offset - delta
            return tuple(_Function(base + one.begin, base + one.end, one.name) for one in found)
        return ()

    def _mapping(self, address: int) -> _Mapping | None:
        starts, mappings = self._executable
        at = bisect_right(starts, address) - 1
        return mappings[at] if at >= 0 and address < mappings[at].end else None

    @cached_property
    def _executable(self) -> tuple[list[int], list[_Mapping]]:
        found = []
        for line in Path(f"/proc/{self._pid}/maps").read_text("utf-8", "replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1]:
                start, _, end = fields[0].partition("-")
                found.append(_Mapping(int(start, 16), int(end, 16), int(fields[2], 16), fields[5]))
        return [one.start for one in found], found

    def _memory(self, address: int, size: int) -> bytes:
        try:
            with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
                data = os.pread(memory.fileno(), size, address)
        except (OSError, OverflowError):
            return b""
        return data[: len(data) & ~7] if size == STACK_BYTES else data


@lru_cache(maxsize=32)
def _functions_of(path: str, identity: tuple[int, int, int]) -> tuple[int, tuple[_Function, ...]]:
    """The exported functions of an ELF file that may be waits, and what to add to their place in the file."""
    with open(path, "rb") as file:

        def part(offset: int, size: int) -> bytes:
            return os.pread(file.fileno(), min(size, MAX_TABLE_BYTES), offset)

        head = part(0, 64)
        if head[:6] != b"\x7fELF\x02\x01":
            return 0, ()
        programs, sections = struct.unpack_from("<QQ", head, 32)
        program_count, _, section_count = struct.unpack_from("<HHH", head, 56)
        loaded = struct.iter_unpack("<IIQQQQQQ", part(programs, 56 * program_count))
        delta = next((one[3] - one[2] for one in loaded if one[0] == 1 and one[1] & 1), 0)
        table = list(struct.iter_unpack("<IIQQQQIIQQ", part(sections, 64 * section_count)))
        found = []
        for section in (one for one in table if one[1] == 11):  # the dynamic symbols, which no strip removes
            names = part(*table[section[6]][4:6])
            found += list(_wanted(part(*section[4:6]), names))
    return delta, tuple(found)


def _wanted(symbols: bytes, names: bytes) -> Iterator[_Function]:
    for name, info, _, _, value, size in struct.iter_unpack("<IBBHQQ", symbols[: len(symbols) // 24 * 24]):
        if info & 15 == 2 and value:
            known = _WANTED.match(names, name)
            if known is not None and names[known.end() : known.end() + 1] == b"\0":
                yield _Function(value, value + size, known[0].decode())
