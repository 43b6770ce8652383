"""Finds the native code in which a sleeping thread waits.

``with lock:``, ``work.wait()`` and a C extension that waits for its own threads look the same from Python. The search
goes up from the sleeping thread's stack pointer, which the kernel knows. The first return address that follows a call
to one of the C library's wait functions is in the waiting code. Leftovers of earlier calls can lie in between, so calls
to other functions don't count. A call through a register does count, but not in Python itself, because a false match
there would be taken for a Python lock.
"""

from __future__ import annotations

import os
import platform
import re
import struct
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

from safelaunch.capture.memory import Mapping, ProcessMemory, Symbol

_FUTEX_PRIVATE = 0x80
MAX_THREADS = 1024  # per process; each takes 0.1 ms
STACK_BYTES = 4096
WHOLE_STACK_BYTES = 64 << 10
MOST_LIBRARIES = 8
_DELETED = " (deleted)"
_SEMAPHORES = "/dev/shm"  # of named semaphores (sem_overview(7))

_PASSED = re.compile(r"(libc|libpthread|ld|ld-\w.*|libstdc\+\+|libc\+\+)[.-].*|ld-musl.*|\[vdso\]")  # skipped
_PYTHON = re.compile(r"(lib)?python\d.*")
_LOCKS = r"PyThread_acquire_lock(_timed)?|_?PyMutex_Lock(Timed)?|_PySemaphore_Wait|_PyParkingLot_Park|PyEvent_Wait\w*"
_WAITS = (
    r"_*(epoll_p?wait2?|p?poll|p?select|read|recv\w*|accept4?|wait\w*|sig\w*wait\w*|(clock_)?nanosleep|u?sleep)"
    r"|_*(pthread|sem|cnd|mtx|thrd|lll)_\w*(wait|(?<!un)lock|join|once)\w*|syscall"
    r"|_ZNK?St\w*(condition_variable\w*wait|thread4join|mutex4lock|future\w*wait|atomic_futex\w*wait)\w*"
)
_WANTED = re.compile(f"({_LOCKS}|{_WAITS})".encode())
_STUB = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xf2?\xff\x25(?P<at>.{4})", re.DOTALL)  # in the procedure linkage table
_CALL = re.compile(rb"\xe8.{4}\Z|\xff(?:[\xd0-\xd7\x10-\x17]|[\x50-\x57].|[\x90-\x97\x15].{4}|\x14.)\Z", re.DOTALL)
_BY_REGISTER = re.compile(rb"\xff(?:[\xd0-\xd7\x10-\x17]|[\x50-\x57].|[\x90-\x97].{4})\Z", re.DOTALL)


def _passed(mapping: Mapping) -> bool:
    return _PASSED.fullmatch(mapping.name) is not None


class Resting:
    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory
        self._left = MAX_THREADS

    def rests_in(self, syscall: str) -> str:
        """Returns ``lock`` or ``gil`` if Python itself waits, else the file with the waiting code; empty if unknown.

        ``syscall`` is the text of ``/proc/<pid>/task/<tid>/syscall``.
        """
        fields = syscall.split()
        if len(fields) != 9 or self._left == 0:
            return ""
        self._left -= 1
        with suppress(OSError, ValueError):
            return self._rests_in(int(fields[7], 16), int(fields[8], 16))
        return ""

    def libraries(self, syscall: str) -> tuple[str, ...]:
        """Returns the files on a thread's native stack, except the C and C++ libraries.

        These files show which library started the thread, whatever code it is waiting in. The result contains ``?`` if
        the stack is unreadable or too deep. Leftovers of earlier calls can add files, but no file on the stack is
        missing. ``syscall`` is the same as for ``rests_in``.
        """
        fields = syscall.split()
        if len(fields) != 9:
            return ("?",)
        try:
            top = int(fields[7], 16)
            size = next(region.end for region in self._memory.regions if region.start <= top < region.end) - top
            words = self._memory.read(top, min(size, WHOLE_STACK_BYTES))
            files = self._files_of(words[: len(words) & ~7])
        except (OSError, ValueError, StopIteration):
            return ("?",)
        is_whole = 0 < len(words) == size and len(files) <= MOST_LIBRARIES
        return tuple(files) if is_whole else (*list(files)[:MOST_LIBRARIES], "?")

    def _files_of(self, words: bytes) -> dict[str, None]:
        starts, mappings = self._executable
        low, high = (starts[0], mappings[-1].end) if starts else (0, 0)
        files: dict[str, None] = {}
        for (address,) in struct.iter_unpack("=Q", words):
            if not low < address < high:
                continue
            at = self._mapping(address)
            if at is None or at.path in files or _passed(at) or not at.path.startswith("/"):
                continue
            if platform.machine() != "x86_64" or _CALL.search(self._memory.read(address - 7, 7)):
                files[at.path] = None
        return files

    def _rests_in(self, stack: int, instruction: int) -> str:
        at = self._mapping(instruction)
        if at is None or not _passed(at):
            return at.name if at is not None else ""
        words = self._memory.read(stack, STACK_BYTES)
        for (address,) in struct.iter_unpack("=Q", words[: len(words) & ~7]):
            caller = self._mapping(address)
            if caller is None or _passed(caller) or not (wait := self._called(address)):
                continue
            if not _PYTHON.fullmatch(caller.name):
                return caller.name
            if any(function.begin < address <= function.end for function in self._functions(caller)):
                return "lock"
            if wait != "?":  # locks are semaphores, so this is another wait
                return "gil" if wait.startswith(("pthread_cond_", "pthread_mutex_")) else caller.name
        return ""

    def _called(self, address: int) -> str:
        """Returns the wait called by the instruction before this address; ``?`` for a call through a register."""
        if platform.machine() != "x86_64":
            return "some call"
        code = self._memory.read(address - 7, 7)
        if len(code) < 7:
            return ""
        (distance,) = struct.unpack("=i", code[3:])
        if code[2] == 0xE8:
            return self._name(address + distance) or self._behind_stub(address + distance)
        if code[1:3] == b"\xff\x15":
            return self._behind(address + distance)
        return "?" if _BY_REGISTER.search(code) else ""

    def _behind_stub(self, address: int) -> str:
        stub = _STUB.match(self._memory.read(address, 11))
        return self._behind(address + stub.end() + struct.unpack("=i", stub["at"])[0]) if stub else ""

    def _behind(self, slot: int) -> str:
        return self._name(int.from_bytes(self._memory.read(slot, 8), "little"))

    def _name(self, address: int) -> str:
        at = self._mapping(address)
        functions = self._functions(at) if at is not None and _passed(at) else ()
        return next((function.name for function in functions if function.begin == address), "")

    def _functions(self, mapping: Mapping) -> tuple[Symbol, ...]:
        return self._memory.symbols(mapping, _WANTED)

    def _mapping(self, address: int) -> Mapping | None:
        starts, mappings = self._executable
        at = bisect_right(starts, address) - 1
        return mappings[at] if at >= 0 and address < mappings[at].end else None

    def shared_futex(self, arguments: Sequence[int]) -> tuple[str, str]:
        """Returns the path and identity of the mapped file that contains a futex shared by processes.

        The path ends with `` (deleted)`` if no process can open it by name any more. It is ``?`` if unreadable, and
        empty if the futex is private. ``arguments`` are the system call's.
        """
        if arguments[1] & _FUTEX_PRIVATE:
            return "", ""
        try:
            at = next(
                (mapping for mapping in self._memory.mappings if mapping.start <= arguments[0] < mapping.end), None
            )
            return ("", "") if at is None else (self._present_name(at), at.identity)
        except OSError:
            return "?", ""

    def _present_name(self, mapping: Mapping) -> str:
        """Returns the mapped file's current path.

        glibc creates a named semaphore under a temporary name, links it to its own name and removes the temporary one.
        So in its creator, the mapping names a deleted file, although other processes can open the semaphore.
        """
        if not mapping.path.endswith(_DELETED):
            return mapping.path
        inode = int(mapping.identity.partition(" ")[2])
        with os.scandir(f"/proc/{self._memory.pid}/root{_SEMAPHORES}") as entries:
            named = (entry.name for entry in entries if entry.inode() == inode)
            name = next(named, "")
        return f"{_SEMAPHORES}/{name}" if name else mapping.path

    @cached_property
    def _executable(self) -> tuple[list[int], list[Mapping]]:
        mappings = [mapping for mapping in self._memory.mappings if mapping.executable]
        return [mapping.start for mapping in mappings], mappings
