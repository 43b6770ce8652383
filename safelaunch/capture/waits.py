"""What a thread in a system call waits for: the call and its time limit, the lock on a file, whose futex."""

from __future__ import annotations

import os
import platform
import re
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safelaunch.capture.memory import Mapping, ProcessMemory, Symbol
from safelaunch.model import FileLock
from safelaunch.system import procstat
from safelaunch.system.files import text_of

# --- system calls -----------------------------------------------------------------------------------------------------
# Numbers on x86_64 and on aarch64: Linux ``arch/x86/entry/syscalls/syscall_64.tbl`` and
# ``include/uapi/asm-generic/unistd.h``.

_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "ioctl": (16, 29), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "access": (21, None), "select": (23, None), "sched_yield": (24, 124),
    "msync": (26, 227), "madvise": (28, 233), "pause": (34, None), "nanosleep": (35, 101), "sendfile": (40, 71),
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "sendto": (44, 206), "recvfrom": (45, 207),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "bind": (49, 200), "clone": (56, 220), "fork": (57, None),
    "vfork": (58, None), "execve": (59, 221), "wait4": (61, 260), "semop": (65, 193), "msgrcv": (70, 188),
    "fcntl": (72, 25), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "truncate": (76, 45),
    "ftruncate": (77, 46), "getdents": (78, None), "rename": (82, None), "mkdir": (83, None),
    "rmdir": (84, None), "unlink": (87, None), "readlink": (89, None), "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133), "statfs": (137, 43), "fstatfs": (138, 44), "sync": (162, 81),
    "mount": (165, 40), "futex": (202, 98), "io_getevents": (208, 4), "getdents64": (217, 61),
    "semtimedop": (220, 192), "clock_nanosleep": (230, 115), "epoll_wait": (232, None),
    "mq_timedreceive": (243, 183), "waitid": (247, 95), "openat": (257, 56), "newfstatat": (262, 79),
    "unlinkat": (263, 35), "renameat": (264, 38), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "splice": (275, 76), "sync_file_range": (277, 84), "epoll_pwait": (281, 22),
    "fallocate": (285, 47), "accept4": (288, 242), "preadv": (295, 69), "pwritev": (296, 70),
    "recvmmsg": (299, 243), "syncfs": (306, 267), "sendmmsg": (307, 269), "renameat2": (316, 276),
    "getrandom": (318, 278), "copy_file_range": (326, 285), "preadv2": (327, 286), "pwritev2": (328, 287),
    "statx": (332, 291), "io_uring_enter": (426, 426), "clone3": (435, 435), "openat2": (437, 437),
    "faccessat2": (439, 439), "epoll_pwait2": (441, 441), "futex_waitv": (449, 449), "mkdirat": (None, 34),
    "readlinkat": (None, 78),
}  # fmt: skip
_NAMES = {
    machine: {numbers[at]: name for name, numbers in _NUMBERS.items() if numbers[at] is not None}
    for at, machine in enumerate(("x86_64", "aarch64"))
}

# Calls whose first argument is the descriptor they work on.
FD_FIRST = {
    "read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev", "preadv2", "pwritev2",
    "close", "fstat", "fstatfs", "lseek", "ioctl", "fcntl", "flock", "fsync", "fdatasync", "ftruncate",
    "fallocate", "getdents", "getdents64", "sendfile", "splice", "copy_file_range", "sync_file_range",
    "syncfs", "bind", "connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg",
    "sendmmsg", "recvmmsg", "epoll_wait", "epoll_pwait", "epoll_pwait2", "io_uring_enter",
}  # fmt: skip

# Calls that name a path: which argument points at it.
PATH_ARGUMENT = {
    **dict.fromkeys(["open", "stat", "lstat", "access", "truncate", "rename", "mkdir", "rmdir", "unlink"], 0),
    **dict.fromkeys(["readlink", "statfs", "execve"], 0),
    **dict.fromkeys(["openat", "openat2", "newfstatat", "unlinkat", "renameat", "renameat2", "mkdirat"], 1),
    **dict.fromkeys(["faccessat", "faccessat2", "readlinkat", "statx"], 1),
}


def name_of(number: int, machine: str | None = None) -> str:
    """The name of a system call on ``machine`` (default: this one's ``platform.machine()``), or ``""``."""
    return _NAMES.get(machine or platform.machine(), {}).get(number, "")


def child_of(name: str, arguments: Sequence[int]) -> int | None:
    """The process for whose end ``wait4`` or ``waitid`` waits; None where any child will do."""
    if name == "wait4":
        pid = arguments[0] & 0xFFFFFFFF
    elif name == "waitid" and arguments[0] == _P_PID:
        pid = arguments[1] & 0xFFFFFFFF
    else:
        return None
    return pid if 0 < pid < 1 << 31 else None


# --- time limits ------------------------------------------------------------------------------------------------------

UNREADABLE_S = 0.0  # it has an unknown limit: it may end at any time

MemoryReader = Callable[[int, int], bytes]  # (address, size) → bytes of the process, fewer if they can't be read

_P_PID = 1
_MONOTONIC, _REALTIME = 1, 0
_TIMER_ABSTIME = 1
_FUTEX_COMMANDS, _FUTEX_PRIVATE = 0x7F, 0x80
_FUTEX_WAIT, _FUTEX_CLOCK_REALTIME = 0, 256

# Calls with a limit in milliseconds (negative: none) → the argument that holds it.
_MILLISECONDS = {"poll": 2, "epoll_wait": 3, "epoll_pwait": 3}
# Calls with a pointer to a relative timespec or timeval (null: none) → that argument.
_RELATIVE = {"ppoll": 2, "pselect6": 4, "select": 4, "epoll_pwait2": 3, "rt_sigtimedwait": 2, "semtimedop": 3}
_PER_SECOND = {"select": 1e6}  # a timeval; the others are timespecs


def ends_s(name: str, arguments: Sequence[int], memory: MemoryReader, *, now: float | None = None) -> float | None:
    """The latest time at which the call ends by itself (CLOCK_MONOTONIC, seconds); None if it has no limit.

    A thread that sleeps for a day is stuck; one that sleeps for a second may be polling. A relative limit is counted
    from ``now``, because the start of the call is unknown.
    """
    now = time.monotonic() if now is None else now
    if name in _MILLISECONDS:
        milliseconds = arguments[_MILLISECONDS[name]] & 0xFFFFFFFF
        return None if milliseconds >= 1 << 31 else now + milliseconds / 1000
    if name in _RELATIVE:
        return _relative(arguments[_RELATIVE[name]], memory, now, _PER_SECOND.get(name, 1e9))
    if name == "nanosleep":
        return _relative(arguments[0], memory, now) or UNREADABLE_S
    if name == "clock_nanosleep":
        clock = arguments[0] if arguments[1] & _TIMER_ABSTIME else None
        return _absolute(arguments[2], memory, now, clock) or UNREADABLE_S
    if name == "futex":
        operation = arguments[1]
        clock = _REALTIME if operation & _FUTEX_CLOCK_REALTIME else _MONOTONIC
        return _absolute(arguments[3], memory, now, None if operation & _FUTEX_COMMANDS == _FUTEX_WAIT else clock)
    return None


def _relative(address: int, memory: MemoryReader, now: float, per_second: float = 1e9) -> float | None:
    if not address:
        return None
    seconds = _seconds(memory(address, 16), per_second)
    return UNREADABLE_S if seconds is None else now + seconds


def _absolute(address: int, memory: MemoryReader, now: float, clock: int | None) -> float | None:
    """The time on CLOCK_MONOTONIC, in seconds. ``clock`` None: it is relative to now."""
    if clock is None or not address:
        return _relative(address, memory, now)
    seconds = _seconds(memory(address, 16), 1e9)
    if seconds is None or clock not in (_MONOTONIC, _REALTIME):
        return UNREADABLE_S
    return seconds if clock == _MONOTONIC else now + seconds - time.time()


def _seconds(data: bytes, per_second: float) -> float | None:
    if len(data) < 16:
        return None
    whole, part = struct.unpack("=qq", data[:16])
    return whole + part / per_second if whole >= 0 and 0 <= part < per_second else None


# --- futexes ----------------------------------------------------------------------------------------------------------
# ``with lock:``, ``work.wait()`` and a C extension that waits for its own threads look alike from Python. The kernel
# knows where the stack of a sleeping thread is. Upwards from there, the first return address behind a call of one of
# the C library's waits is in the code that waits. Remains of earlier calls may lie between, so calls of anything else
# don't count; but calls by a register do, outside Python itself, for who is mistaken for a file holds no lock of
# Python.

MAX_THREADS = 1024  # of a process; one takes 0.1 ms
STACK_BYTES = 4096
WHOLE_STACK_BYTES = 64 << 10
MOST_LIBRARIES = 8
_DELETED = " (deleted)"
_SEMAPHORES = "/dev/shm"  # where the C library keeps named semaphores (sem_overview(7))

_PASSED = re.compile(r"(libc|libpthread|ld|ld-\w.*|libstdc\+\+|libc\+\+)[.-].*|ld-musl.*|\[vdso\]")  # wait for callers
_PYTHON = re.compile(r"(lib)?python\d.*")
_LOCKS = r"PyThread_acquire_lock(_timed)?|_?PyMutex_Lock(Timed)?|_PySemaphore_Wait|_PyParkingLot_Park|PyEvent_Wait\w*"
_WAITS = (
    r"_*(epoll_p?wait2?|p?poll|p?select|read|recv\w*|accept4?|wait\w*|sig\w*wait\w*|(clock_)?nanosleep|u?sleep)"
    r"|_*(pthread|sem|cnd|mtx|thrd|lll)_\w*(wait|(?<!un)lock|join|once)\w*|syscall"
    r"|_ZNK?St\w*(condition_variable\w*wait|thread4join|mutex4lock|future\w*wait|atomic_futex\w*wait)\w*"
)
_WANTED = re.compile(f"({_LOCKS}|{_WAITS})".encode())
_STUB = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xf2?\xff\x25(?P<at>.{4})", re.DOTALL)  # of the procedure linkage table
_CALL = re.compile(rb"\xe8.{4}\Z|\xff(?:[\xd0-\xd7\x10-\x17]|[\x50-\x57].|[\x90-\x97\x15].{4}|\x14.)\Z", re.DOTALL)
_BY_REGISTER = re.compile(rb"\xff(?:[\xd0-\xd7\x10-\x17]|[\x50-\x57].|[\x90-\x97].{4})\Z", re.DOTALL)


def _passed(mapping: Mapping) -> bool:
    return _PASSED.fullmatch(mapping.name) is not None


class Resting:
    """The threads of one process."""

    def __init__(self, memory: ProcessMemory) -> None:
        self._memory = memory
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

    def libraries(self, syscall: str) -> tuple[str, ...]:
        """Paths of the files whose code the native stack of a thread leads through, without the C and C++ libraries.

        A thread that a library has started runs that library's code, whatever it waits in. Holds ``?`` if the stack is
        not readable, or deeper than what is read. Remains of earlier calls can add files, but none is missing.

        Args:
            syscall: the thread's ``/proc/<pid>/task/<tid>/syscall``.
        """
        fields = syscall.split()
        if len(fields) != 9:
            return ("?",)
        try:
            top = int(fields[7], 16)
            size = next(region.end for region in self._memory.regions if region.start <= top < region.end) - top
            words = self._memory.read(top, min(size, WHOLE_STACK_BYTES))
            found = self._files_of(words[: len(words) & ~7])
        except (OSError, ValueError, StopIteration):  # it has ended, or is another user's
            return ("?",)
        is_whole = 0 < len(words) == size and len(found) <= MOST_LIBRARIES
        return tuple(found) if is_whole else (*list(found)[:MOST_LIBRARIES], "?")

    def _files_of(self, words: bytes) -> dict[str, None]:
        starts, mappings = self._executable
        low, high = (starts[0], mappings[-1].end) if starts else (0, 0)
        found: dict[str, None] = {}
        for (address,) in struct.iter_unpack("=Q", words):
            if not low < address < high:
                continue
            at = self._mapping(address)
            if at is None or at.path in found or _passed(at) or not at.path.startswith("/"):
                continue
            if platform.machine() != "x86_64" or _CALL.search(self._memory.read(address - 7, 7)):
                found[at.path] = None
        return found

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
            if wait != "?":  # locks are semaphores
                return "gil" if wait.startswith(("pthread_cond_", "pthread_mutex_")) else caller.name
        return ""

    def _called(self, address: int) -> str:
        """The wait that the instruction before this address calls; ``?``: one by a register; empty: there is none."""
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
        """Of a function that waits, by its begin."""
        at = self._mapping(address)
        found = self._functions(at) if at is not None and _passed(at) else ()
        return next((one.name for one in found if one.begin == address), "")

    def _functions(self, mapping: Mapping) -> tuple[Symbol, ...]:
        """The exported functions that may be waits."""
        return self._memory.symbols(mapping, _WANTED)

    def _mapping(self, address: int) -> Mapping | None:
        starts, mappings = self._executable
        at = bisect_right(starts, address) - 1
        return mappings[at] if at >= 0 and address < mappings[at].end else None

    def shared_futex(self, arguments: Sequence[int]) -> tuple[str, str]:
        """Finds the file in whose mapping a futex lies that other processes can wake.

        Returns its path, with `` (deleted)`` if no process can open it by a name any more, and its identity. The path
        is ``?`` if that is not readable, and empty if the futex belongs to this process alone.

        Args:
            arguments: of the system call.
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
        """Path of the mapped file under the name that it has now.

        glibc creates a named semaphore under a temporary name, links it to its own name and removes the temporary one,
        so that its creator shows a deleted file that others can open.
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
        found = [mapping for mapping in self._memory.mappings if mapping.executable]
        return [one.start for one in found], found


# --- locks on files ---------------------------------------------------------------------------------------------------

CALLS = ("flock", "fcntl")
_MAX_BYTES = 4096
_MAX_NAME = 60


@dataclass(frozen=True)
class LockRow:
    """A line of ``/proc/locks``: ``place`` is (major, minor, inode) of the file."""

    pid: int
    place: tuple[int, int, int]
    exclusive: bool
    of_file: bool = False  # of an open file (flock): whoever has that open has the lock


def holders(pid: int, fd: int) -> tuple[int, ...]:
    """The processes that hold the lock for which ``pid`` waits at its descriptor ``fd``; empty if unknown. Of a file
    that it has opened twice, it may be itself.

    The kernel names the process that has taken the lock, which comes first if it still has it. Any process that
    inherited the open file has that lock, too, and may release it.
    May block on a file system that does not answer, so call it under a deadline.
    """
    try:
        place = _place(Path(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        return ()
    held = _in_the_way(text_of("/proc/locks"), pid, place)
    if held is None:
        return ()
    taker = () if _has(held.pid, held) is False else (held.pid,)
    if not held.of_file:
        return taker
    others = (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - as everywhere in /proc
    return (*taker, *(other for other in others if other not in (pid, held.pid) and _has(other, held)))


def _in_the_way(table: str, pid: int, place: tuple[int, int, int]) -> LockRow | None:
    """The lock for whose end ``pid`` waits: its line stands above all that wait for it. None if its holder is unknown.

    Several processes may have locks on the same file, each on bytes of its own.
    """
    above = ""
    for line in table.splitlines():
        number, arrow, rest = line.partition("->")
        if not arrow:
            above = line
        elif any((one.pid, one.place) == (pid, place) for one in parse(f"{number} {rest}")):
            return next(parse(above), None)
    return None


def _has(pid: int, lock: LockRow) -> bool | None:
    """Whether a descriptor of the process has the lock; None if they cannot be read."""
    try:
        names = os.listdir(f"/proc/{pid}/fdinfo")  # noqa: PTH208
    except OSError:
        return None
    texts = (text_of(f"/proc/{pid}/fdinfo/{name}") for name in names)
    return any(lock in _locks_in(text) for text in texts)


def _locks_in(fdinfo: str) -> Iterator[LockRow]:
    return parse(fdinfo.replace("lock:", ""))


def lock_table() -> tuple[LockRow, ...]:
    """All locks of the node. While the kernel writes them down, nobody there gets or releases one: read it seldom."""
    return tuple(parse(text_of("/proc/locks")))


def locks_of(pid: int, *, of_others: bool, known: Sequence[LockRow] | None = None) -> tuple[FileLock, ...]:
    """The exclusive locks on files that ``pid`` has open: its own, with ``of_others`` those of other processes too.

    ``known``: the locks of the node, where they have been read.

    Not those that it shares: a child has its parent's file, and the lock on it. May block as :func:`holder` may, on a
    file that somebody has locked; the other files are not touched.
    """
    every = lock_table() if known is None else known
    wanted = {held for held in every if held.exclusive and (of_others or held.pid == pid)}
    inodes = {held.place[2] for held in wanted}
    found: dict[LockRow, str] = {}
    shared: set[LockRow] = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir() if inodes else ():
        try:
            text = path.read_text()
            inode = re.search(r"^ino:\s*(\d+)$", text, re.MULTILINE)  # Linux 5.14 and newer
            if inode is None or int(inode[1]) not in inodes:
                continue
            link = Path(f"/proc/{pid}/fd/{path.name}")
            name, place = str(link.readlink()), _place(link)
        except OSError:
            continue  # closed meanwhile
        found |= {held: name for held in wanted if held.place == place}
        shared |= {held for held in _locks_in(text) if held.pid != pid}
    return tuple(
        FileLock(name, held.pid, program(held.pid) if held.pid != pid else "")
        for held, name in found.items()
        if held not in shared
    )


def lock_on(pid: int, path: str) -> FileLock | None:
    """The exclusive lock of another process on the file that ``pid`` calls ``path``; None if unknown.

    May block on a file system that does not answer, so call it under a deadline.
    """
    try:
        place = _place(Path(f"/proc/{pid}/cwd", path))
    except (OSError, ValueError):
        return None
    others = (held for held in lock_table() if held.exclusive and held.pid != pid)
    held = next((held for held in others if held.place == place), None)
    return FileLock(path, held.pid, program(held.pid)) if held is not None else None


def program(pid: int) -> str:
    """`` (python tokenize.py, since 2026-03-01 14:02:11 UTC)``: what a process runs, and when it was started.

    Without arguments, which may hold secrets; empty if unknown.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:_MAX_BYTES].decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    script = next((word for word in words[1:] if word.endswith(".py")), "")
    names = [Path(word).name[:_MAX_NAME] for word in (words[0], script) if word]
    return f" ({' '.join(names)}{_since(pid)})" if names else ""


def _since(pid: int) -> str:
    stat = procstat.read(pid)
    boot = re.search(r"^btime (\d+)$", text_of("/proc/stat"), re.MULTILINE)
    if stat is None or boot is None:
        return ""
    begun = time.gmtime(int(boot[1]) + stat.start_ticks // os.sysconf("SC_CLK_TCK"))
    return time.strftime(", since %Y-%m-%d %H:%M:%S UTC", begun)


def parse(text: str) -> Iterator[LockRow]:
    """``1: FLOCK  ADVISORY  WRITE 4711 08:02:131 0 EOF``; those who wait have ``->`` behind the number, and are left
    out, as are those of another container, who have no number here.
    """
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->":
            continue
        major, _, rest = fields[5].partition(":")
        minor, _, inode = rest.partition(":")
        try:
            where = (int(major, 16), int(minor, 16), int(inode))
            held = LockRow(int(fields[4]), where, fields[3] == "WRITE", fields[1] == "FLOCK")
        except ValueError:
            continue  # a line of another kernel
        if held.pid > 0:
            yield held


def _place(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
