"""Classifies what the kernel shows of a thread's wait, independently of Python versions and architectures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from safelaunch.model import FileLock, OtherEnd, ProcessEvidence, ThreadState

_SLEEP = frozenset({"nanosleep", "clock_nanosleep", "pause", "rt_sigsuspend", "rt_sigtimedwait"})
_LOCK = frozenset({"futex", "futex_wait", "futex_waitv"})
_CHILD = frozenset({"wait4", "waitid", "waitpid"})
_SELECT = frozenset({"select", "pselect6"})
_POLL = frozenset({"poll", "ppoll", "epoll_wait", "epoll_pwait", "epoll_pwait2"})
_IO = frozenset(
    {"read", "write", "pread64", "pwrite64", "readv", "writev", "preadv", "pwritev", "preadv2", "pwritev2",
     "recv", "recvfrom", "recvmsg", "recvmmsg", "send", "sendto", "sendmsg", "sendmmsg", "connect", "accept", "accept4",
     "open", "openat", "openat2", "close", "flock", "fcntl", "fsync", "fdatasync", "sync", "syncfs", "msync",
     "sendfile", "splice", "copy_file_range", "io_getevents", "io_uring_enter", "stat", "fstat", "newfstatat", "statx",
     "getdents64", "rename", "renameat2", "unlink", "unlinkat", "ftruncate", "fallocate", "mkdir", "mkdirat"}
)  # fmt: skip
_WCHAN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sleep", ("nanosleep", "sys_pause", "sigtimedwait", "sigsuspend")),
    ("lock", ("futex",)),
    ("child", ("do_wait", "kernel_waitid")),
    ("poll", ("poll_schedule_timeout", "ep_poll", "epoll", "do_select", "do_poll")),
    (
        "io",
        ("pipe", "fifo", "wait_for_partner", "unix_stream", "unix_dgram", "wait_woken", "sk_wait", "sk_stream", "tcp_",
         "inet_", "skb_", "locks_lock", "flock", "fuse", "nfs", "rpc_", "tty", "n_tty", "folio_wait", "io_schedule"),
    ),
)  # fmt: skip

_LOCKS = frozenset({"flock", "fcntl"})
_LOCKED_BY = ", locked by "
WRITES = frozenset({"write", "writev", "pwrite64", "pwritev", "send", "sendto", "sendmsg", "sendmmsg", "sendfile"})

BUSY_SHARE = 0.2  # share of a core between the samples; cores can be shared, waits use under 0.02
_NOT_SEEN = ThreadState(tid=0, name="", state="")


@dataclass(frozen=True)
class KernelWait:
    kind: str  # running | sleep | lock | child | select | poll | io | disk | stopped | dead | unknown
    call: str = ""  # system call or wait channel, as shown to users
    cpu_share: float | None = None  # share of one core between the first and last sample; None with one sample
    left_s: float | None = None  # time from the last sample until the call times out; None without a timeout
    # Processes with the other end of its pipe or connection in the last sample; None if unknown.
    ends: tuple[OtherEnd, ...] | None = None
    again: bool = False  # it sleeps repeatedly
    thread: ThreadState = _NOT_SEEN  # sample that shows the wait, if any

    @property
    def wanted_lock(self) -> str:
        return self.thread.fd_target.partition(_LOCKED_BY)[0] if self.call in _LOCKS else ""

    @property
    def lock_holder(self) -> str:
        """Process that holds the wanted lock, as described by the kernel: ``pid 71 (python, since ...)``."""
        return self.thread.fd_target.partition(_LOCKED_BY)[2]

    @property
    def writes(self) -> bool:
        return self.call in WRITES

    @property
    def busy(self) -> bool:
        return self.kind == "running" or (self.cpu_share is not None and self.cpu_share >= BUSY_SHARE)


POLL_S = 2.0  # longest pause between two attempts to lock a file; sqlite pauses for at most 0.1 s


def polled_lock(process: ProcessEvidence, wait: KernelWait) -> FileLock | None:
    """Returns the file lock that the main thread might be polling, if exactly one lock qualifies, else None.

    A lock qualifies if the process has the file open, another process holds the lock in each sample that shows the
    thread asleep, and its sleeps are short.
    """
    if wait.kind not in ("sleep", "select") or wait.left_s is None or wait.left_s > POLL_S:
        return None
    locks = [{lock for lock in state.locks if lock.pid != state.pid} for state in process.states]
    common = set.intersection(*filter(None, locks)) if any(locks) else set()
    return common.pop() if len(common) == 1 else None


def thread_samples(process: ProcessEvidence, tid: int | None = None) -> list[tuple[float, ThreadState]]:
    """Returns (time, state) samples of a thread, by default the main thread, oldest first."""
    samples = []
    for state in process.states:
        wanted = (state.leads or state.pid) if tid is None else tid
        samples += [(state.at_s, thread) for thread in state.threads if thread.tid == wanted]
    return samples


def kernel_wait(process: ProcessEvidence, tid: int | None = None) -> KernelWait:
    """Returns what a thread (by default, the main thread) is waiting for.

    Only a lasting wait counts: state D or T must appear in all samples, and a thread that used much CPU time between
    the samples is running, whatever the samples show.
    """
    samples = thread_samples(process, tid)
    main = tid is None or (bool(process.states) and tid == process.pid)
    whole = {state.state for state in process.states} if main else set()
    if whole and whole <= {"Z", "X"}:
        return KernelWait("dead")
    if process.states and all(state.frozen for state in process.states):
        return KernelWait("stopped", "frozen cgroup")
    states = [thread.state for _, thread in samples] or sorted(whole)
    share = _cpu_share(samples)
    if states and all(state in "Tt" for state in states):
        return KernelWait("stopped", cpu_share=share)
    if states and all(state == "D" for state in states):
        return KernelWait("disk", _channel([t for _, t in samples]), cpu_share=share)
    starved = len(states) > 1 and all(state == "R" for state in states)  # ready to run, but without a core
    if starved or (share is not None and share >= BUSY_SHARE):
        return KernelWait("running", cpu_share=share)
    thread = _newest_wait(samples)
    if thread is not None:
        kind = kind_of(thread)
        return KernelWait(
            kind,
            thread.syscall_name or thread.wchan,
            share,
            _left_s(samples),
            _ends(thread, samples),
            again=kind in ("sleep", "select") and _again(samples),
            thread=thread,
        )
    running = bool(states) and all(state == "R" for state in states)  # in the only sample
    return KernelWait("running" if running else "unknown", cpu_share=share)


def _newest_wait(samples: list[tuple[float, ThreadState]]) -> ThreadState | None:
    # If a stack reader stopped the process, the call is ``restart_syscall`` and only the wait channel is right. Earlier
    # samples of the same wait name the call.
    telling = [thread for _, thread in samples if kind_of(thread) != "unknown"]
    same = list(takewhile(lambda thread: _channel_kind(thread) == _channel_kind(telling[-1]), reversed(telling)))
    return next((thread for thread in same if thread.syscall_name), same[0] if same else None)


def _channel_kind(thread: ThreadState) -> str:
    # Select and poll share a wait channel.
    kind = kind_of(thread)
    return "poll" if kind == "select" else kind


def _ends(waiting: ThreadState, samples: list[tuple[float, ThreadState]]) -> tuple[OtherEnd, ...] | None:
    same = (thread.ends for _, thread in reversed(samples) if thread.inode == waiting.inode)
    return next((ends for ends in same if ends is not None), None)


WAKES = 8  # between two samples; reading a sleeping thread's stack wakes it once or twice


def _again(samples: list[tuple[float, ThreadState]]) -> bool:
    """Returns whether the thread sleeps repeatedly: a sample shows it asleep after its first sleep must have ended.

    If no sample is late enough, many short sleeps between the samples count, too.
    """
    asleep = [(at_s, thread.ends_s) for at_s, thread in samples if kind_of(thread) in ("sleep", "select")]
    first = next((ends_s for _, ends_s in asleep if ends_s), None)
    if first is None or any(at_s > first for at_s, _ in asleep):
        return first is not None
    (begin_s, earliest), (end_s, latest) = samples[0], samples[-1]
    wakes = (latest.slices or 0) - (earliest.slices or 0) if earliest.slices is not None else 0
    return wakes >= WAKES and all(ends_s - at_s < end_s - begin_s for at_s, ends_s in asleep if ends_s)


def _left_s(samples: list[tuple[float, ThreadState]]) -> float | None:
    # Later samples can be wrong: a relative timeout is counted from the time of the sample.
    ends_s = next((thread.ends_s for _, thread in samples if thread.ends_s is not None), None)
    return None if ends_s is None else max(0.0, ends_s - samples[-1][0])


def kind_of(thread: ThreadState) -> str:
    """Returns what kind of event the system call waits for: sleep | lock | child | select | poll | io | unknown."""
    name = thread.syscall_name
    for kind, names in (("sleep", _SLEEP), ("lock", _LOCK), ("child", _CHILD), ("select", _SELECT), ("poll", _POLL)):
        if name in names:
            return kind
    if name in _IO:
        return "io"
    for kind, channels in _WCHAN:
        if any(channel in thread.wchan for channel in channels):
            return kind
    return "unknown"


def _channel(threads: list[ThreadState]) -> str:
    return next((t.wchan for t in threads if t.wchan not in ("", "0")), "") or next(
        (t.syscall_name for t in threads if t.syscall_name), ""
    )


def _cpu_share(samples: list[tuple[float, ThreadState]]) -> float | None:
    if len(samples) < 2:
        return None
    (begin, first), (end, last) = samples[0], samples[-1]
    return (last.cpu_ms - first.cpu_ms) / 1000 / (end - begin) if end > begin else None


def wait_words(wait: KernelWait) -> str:
    """Describes a wait for use in brackets: ``read on pipe:[7]``, ``97% of a core``."""
    if wait.kind == "running":
        return "" if wait.cpu_share is None else f"{wait.cpu_share:.0%} of a core"
    fd, target = wait.thread.fd, wait.thread.fd_target
    of_its_own = _STANDARD.get(fd, "") if fd is not None else ""
    target = f" on {of_its_own}{target}" if target else ""
    return f"{wait.call}{target}" if wait.call else ""


_STANDARD = {0: "standard input, ", 1: "standard output, ", 2: "standard error, "}
