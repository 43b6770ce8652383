"""System calls in which threads wait: their names and time limits."""

from __future__ import annotations

import platform
import struct
import time
from collections.abc import Callable, Sequence

# From Linux ``arch/x86/entry/syscalls/syscall_64.tbl`` and ``include/uapi/asm-generic/unistd.h`` (aarch64).

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

# Calls with a descriptor as their first argument.
FD_FIRST = {
    "read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev", "preadv2", "pwritev2",
    "close", "fstat", "fstatfs", "lseek", "ioctl", "fcntl", "flock", "fsync", "fdatasync", "ftruncate",
    "fallocate", "getdents", "getdents64", "sendfile", "splice", "copy_file_range", "sync_file_range",
    "syncfs", "bind", "connect", "accept", "accept4", "sendto", "recvfrom", "sendmsg", "recvmsg",
    "sendmmsg", "recvmmsg", "epoll_wait", "epoll_pwait", "epoll_pwait2", "io_uring_enter",
}  # fmt: skip

# Calls with a path → the argument that points to it.
PATH_ARGUMENT = {
    **dict.fromkeys(["open", "stat", "lstat", "access", "truncate", "rename", "mkdir", "rmdir", "unlink"], 0),
    **dict.fromkeys(["readlink", "statfs", "execve"], 0),
    **dict.fromkeys(["openat", "openat2", "newfstatat", "unlinkat", "renameat", "renameat2", "mkdirat"], 1),
    **dict.fromkeys(["faccessat", "faccessat2", "readlinkat", "statx"], 1),
}


def name_of(number: int, machine: str | None = None) -> str:
    """Returns the name of a system call on ``machine`` (by default, this machine), or ``""`` if unknown."""
    return _NAMES.get(machine or platform.machine(), {}).get(number, "")


def child_of(name: str, arguments: Sequence[int]) -> int | None:
    """Returns the process for which ``wait4`` or ``waitid`` waits; None if it waits for any child."""
    if name == "wait4":
        pid = arguments[0] & 0xFFFFFFFF
    elif name == "waitid" and arguments[0] == _P_PID:
        pid = arguments[1] & 0xFFFFFFFF
    else:
        return None
    return pid if 0 < pid < 1 << 31 else None


UNREADABLE_S = 0.0  # unknown, so the call might end at any time

MemoryReader = Callable[[int, int], bytes]  # (address, size) → bytes of the process, fewer if unreadable

_P_PID = 1
_MONOTONIC, _REALTIME = 1, 0
_TIMER_ABSTIME = 1
_FUTEX_COMMANDS = 0x7F
_FUTEX_WAIT, _FUTEX_CLOCK_REALTIME = 0, 256

# Calls with a limit in milliseconds (negative: none) → the argument with it.
_MILLISECONDS = {"poll": 2, "epoll_wait": 3, "epoll_pwait": 3}
# Calls with a pointer to a relative timespec or timeval (null: none) → that argument.
_RELATIVE = {"ppoll": 2, "pselect6": 4, "select": 4, "epoll_pwait2": 3, "rt_sigtimedwait": 2, "semtimedop": 3}
_PER_SECOND = {"select": 1e6}  # a timeval; the others are timespecs


def ends_s(name: str, arguments: Sequence[int], memory: MemoryReader, *, now: float | None = None) -> float | None:
    """Returns the time (CLOCK_MONOTONIC, seconds) by which the call ends by itself; None if it has no limit.

    A thread that sleeps for a day is stuck; one that sleeps for a second might be polling. A relative limit counts from
    ``now``, because the start of the call is unknown.
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
    """Reads a time limit at ``address``, and returns it in CLOCK_MONOTONIC seconds.

    If ``clock`` is None, the stored limit is relative to ``now``.
    """
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
