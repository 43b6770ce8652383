"""The system calls in which processes hang: their names, and when they end by themselves.

Numbers: Linux ``arch/x86/entry/syscalls/syscall_64.tbl`` and ``include/uapi/asm-generic/unistd.h`` (aarch64).
"""

from __future__ import annotations

import platform
import struct
import time
from collections.abc import Callable, Sequence

X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 8: "lseek",
    9: "mmap", 10: "mprotect", 11: "munmap", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
    20: "writev", 21: "access", 23: "select", 24: "sched_yield", 26: "msync", 28: "madvise", 34: "pause",
    35: "nanosleep", 40: "sendfile", 41: "socket", 42: "connect", 43: "accept", 44: "sendto",
    45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 49: "bind", 56: "clone", 57: "fork", 58: "vfork",
    59: "execve", 61: "wait4", 65: "semop", 70: "msgrcv", 72: "fcntl", 73: "flock", 74: "fsync",
    75: "fdatasync", 76: "truncate", 77: "ftruncate", 78: "getdents", 82: "rename", 83: "mkdir",
    84: "rmdir", 87: "unlink", 89: "readlink", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 137: "statfs",
    138: "fstatfs", 162: "sync", 165: "mount", 202: "futex", 208: "io_getevents", 217: "getdents64",
    220: "semtimedop", 230: "clock_nanosleep", 232: "epoll_wait", 243: "mq_timedreceive", 247: "waitid",
    257: "openat", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 269: "faccessat", 270: "pselect6",
    271: "ppoll", 275: "splice", 277: "sync_file_range", 281: "epoll_pwait", 285: "fallocate",
    288: "accept4", 295: "preadv", 296: "pwritev", 299: "recvmmsg", 306: "syncfs", 307: "sendmmsg",
    316: "renameat2", 318: "getrandom", 326: "copy_file_range", 327: "preadv2", 328: "pwritev2",
    332: "statx", 426: "io_uring_enter", 435: "clone3", 437: "openat2", 439: "faccessat2",
    441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip

AARCH64 = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 34: "mkdirat",
    35: "unlinkat", 38: "renameat", 40: "mount", 43: "statfs", 44: "fstatfs", 45: "truncate",
    46: "ftruncate", 47: "fallocate", 48: "faccessat", 56: "openat", 57: "close", 61: "getdents64",
    62: "lseek", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64",
    69: "preadv", 70: "pwritev", 71: "sendfile", 72: "pselect6", 73: "ppoll", 76: "splice",
    78: "readlinkat", 79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync",
    84: "sync_file_range", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
    124: "sched_yield", 133: "rt_sigsuspend", 137: "rt_sigtimedwait", 183: "mq_timedreceive", 188: "msgrcv",
    192: "semtimedop", 193: "semop", 198: "socket", 200: "bind", 202: "accept", 203: "connect",
    206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 215: "munmap", 220: "clone",
    221: "execve", 222: "mmap", 226: "mprotect", 227: "msync", 233: "madvise", 242: "accept4",
    243: "recvmmsg", 260: "wait4", 267: "syncfs", 269: "sendmmsg", 276: "renameat2", 278: "getrandom",
    285: "copy_file_range", 286: "preadv2", 287: "pwritev2", 291: "statx", 426: "io_uring_enter",
    435: "clone3", 437: "openat2", 439: "faccessat2", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip

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
    machine = machine or platform.machine()
    if machine == "x86_64":
        return X86_64.get(number, "")
    if machine == "aarch64":
        return AARCH64.get(number, "")
    return ""


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

Memory = Callable[[int, int], bytes]  # (address, size) → bytes of the process, fewer if they can't be read

_P_PID = 1
_MONOTONIC, _REALTIME = 1, 0
_TIMER_ABSTIME = 1
_FUTEX_COMMANDS = 0x7F
_FUTEX_WAIT, _FUTEX_CLOCK_REALTIME = 0, 256

# Calls with a limit in milliseconds (negative: none) → the argument that holds it.
_MILLISECONDS = {"poll": 2, "epoll_wait": 3, "epoll_pwait": 3}
# Calls with a pointer to a relative timespec or timeval (null: none) → that argument.
_RELATIVE = {"ppoll": 2, "pselect6": 4, "select": 4, "epoll_pwait2": 3, "rt_sigtimedwait": 2, "semtimedop": 3}
_PER_SECOND = {"select": 1e6}  # a timeval; the others are timespecs


def ends_s(name: str, arguments: Sequence[int], memory: Memory, *, now: float | None = None) -> float | None:
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


def _relative(address: int, memory: Memory, now: float, per_second: float = 1e9) -> float | None:
    if not address:
        return None
    seconds = _seconds(memory(address, 16), per_second)
    return UNREADABLE_S if seconds is None else now + seconds


def _absolute(address: int, memory: Memory, now: float, clock: int | None) -> float | None:
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
