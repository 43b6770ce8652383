"""Sockets and pipes of a process, by their inodes: what they are, and who has the other end.

From ``/proc/<pid>/net`` (proc(5)) and sock_diag(7).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from safelaunch.capture.memory import ProcessMemory
from safelaunch.model import OtherEnd, ProcessState, ThreadState
from safelaunch.system import procstat
from safelaunch.system.files import link_of, text_of

MAX_TABLE_BYTES = 4 << 20  # on a node with tens of thousands of connections, stop rather than read for seconds

_TCP_STATES = {
    1: "established", 2: "connecting", 3: "syn received", 4: "fin wait 1", 5: "fin wait 2", 6: "time wait",
    7: "closed", 8: "close wait", 9: "last ack", 10: "listening", 11: "closing",
}  # fmt: skip


def describe(pid: int, inode: int) -> str:
    """``tcp 10.0.0.1:80 -> 10.0.0.2:9000 (established)``, ``unix /path``; ``socket:[inode]`` if not found."""
    net = Path(f"/proc/{pid}/net")
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        found = find_inet(_read(net / protocol), protocol, inode)
        if found:
            return found
    return find_unix(_read(net / "unix"), inode) or f"socket:[{inode}]"


def resends(pid: int) -> bool:
    """Whether a TCP peer of the process has not confirmed what was sent to it, so that the kernel sends it again.

    Then the network is at fault, or was: after an outage of a minute the kernel waits for up to a minute more.
    """
    net = Path(f"/proc/{pid}/net")
    late = {inode for name in ("tcp", "tcp6") for inode in find_resending(_read(net / name))}
    return bool(late) and not late.isdisjoint(inodes(pid))


def listeners(pid: int, port: int) -> dict[int, str]:
    """Who listens on a TCP port where this process lives: inode of the socket → its address."""
    net = Path(f"/proc/{pid}/net")
    return {inode: host for name in ("tcp", "tcp6") for inode, host in find_listening(_read(net / name), port)}


_PIDFD_GETFD = 438  # of every architecture; Linux 5.6


def times_out(pid: int, fd: int) -> bool:
    """Whether the socket has a time limit of its own (SO_RCVTIMEO, SO_SNDTIMEO, TCP_USER_TIMEOUT), or that can't be
    read.

    A copy of the descriptor is asked, which leaves the process alone.
    """
    import ctypes

    try:
        process = os.pidfd_open(pid)
        try:
            copy = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, fd, 0)
        finally:
            os.close(process)
        if copy < 0:
            return True
        with socket.socket(fileno=copy) as mine:
            limits = (
                mine.getsockopt(socket.SOL_SOCKET, option, 16) for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
            )
            of_tcp = mine.family != socket.AF_UNIX and mine.type == socket.SOCK_STREAM
            return any(map(any, limits)) or bool(
                of_tcp and mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            )
    except OSError:
        return True


def inodes(pid: int) -> Iterator[int]:
    """Those of the sockets that the process has open."""
    return (int(target[8:-1]) for _, target in descriptors(pid) if target.startswith("socket:["))


def descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """The descriptors of a process, as paths below ``/proc``, each with what it points at."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                path = Path(entry.path)
                yield path, link_of(path)
    except OSError:
        return


def other_ends(pid: int, mine: Collection[int]) -> dict[int, int]:
    """The inodes of these sockets of the process → those of the sockets at the other ends, if on this node.

    A connection that was not accepted yet has no socket there: that of the listener stands for it.
    """
    net, found = Path(f"/proc/{pid}/net"), {}
    for name in ("tcp", "tcp6"):
        table = _read(net / name)
        # Connections that a process has, or that wait to be accepted: only these have an inode, or are established.
        connections = (fields for fields in _rows(table) if fields[9] != "0" or fields[3] == "01")
        by_pair = {(fields[1], fields[2]): int(fields[9]) for fields in connections}
        pairs = {inode: pair for pair, inode in by_pair.items()}
        for inode in mine:
            local, remote = pairs.get(inode, ("", ""))
            other = by_pair.get((remote, local))
            if other == 0:
                other = _listener(table, remote)
            if other is not None:
                found[inode] = other
    unix = {inode: unix_peer(inode) for inode in mine if inode not in found}
    return found | {inode: peer for inode, peer in unix.items() if peer is not None}


def _listener(table: str, remote: str) -> int | None:
    """The inode of the socket that listens at this address, or else at all; None if none or several may be meant."""
    host, _, port = remote.partition(":")
    listening = list(find_listening(table, int(port, 16)))
    named = address(f"{host}:{port}").rpartition(":")[0].strip("[]")
    mine = [number for number, at in listening if at == named]
    mine = mine or [number for number, at in listening if at in ("0.0.0.0", "::")]
    return mine[0] if len(mine) == 1 else None


# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ANY_STATE, _SHOW_PEER, _SHOW_QUEUE, _NO_COOKIE, _PEER, _QUEUE = 0xFFFFFFFF, 4, 16, 0xFFFFFFFF, 2, 4
_SHUTDOWN, _BOTH_WAYS = 6, 3  # of a socket whose other end was closed
_HEADER, _ASKED, _ANSWERED = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII"), struct.Struct("=BBBBIII")


@dataclass(frozen=True)
class UnixSocket:
    """``peer``: the inode at its other end, 0 until it is accepted there; None where nobody is. ``unread``: bytes that
    have arrived, or of a listener, connections.
    """

    peer: int | None
    unread: int


def unix_peer(inode: int) -> int | None:
    """The inode of the socket to which a Unix socket is connected; None where there is none, or the kernel is silent.

    ``/proc`` does not tell, so the kernel is asked as ``ss`` does (sock_diag(7)), of this process's network namespace.
    """
    found = _unix_sockets(inode)
    return found[inode].peer or None if found is not None and inode in found else None


def unix_sockets() -> dict[int, UnixSocket] | None:
    """All Unix sockets of this process's network namespace, by their inodes; None where the kernel doesn't tell."""
    return _unix_sockets(None)


def _unix_sockets(inode: int | None) -> dict[int, UnixSocket] | None:
    asked = _ASKED.pack(
        socket.AF_UNIX, 0, 0, _ANY_STATE, (inode or 0) & 0xFFFFFFFF, _SHOW_PEER | _SHOW_QUEUE, _NO_COOKIE, _NO_COOKIE
    )
    found: dict[int, UnixSocket] = {}

    def add(answer: bytes, begin: int, end: int) -> None:
        *_, number, _, _ = _ANSWERED.unpack_from(answer, begin)
        attributes = _attributes(answer, begin + _ANSWERED.size, end)
        told = {kind: int.from_bytes(answer[at : at + min(size, 4)], sys.byteorder) for kind, at, size in attributes}
        is_over = told.get(_PEER) == 0 and told.get(_SHUTDOWN) == _BOTH_WAYS
        found[number] = UnixSocket(None if is_over else told.get(_PEER), told.get(_QUEUE, 0))

    return found if _ask(asked, add, every=inode is None) else None


# linux/inet_diag.h, linux/tcp.h: bytes_acked and bytes_received of tcp_info, which each socket has from Linux 4.6 on
_DUMP, _DONE, _CONNECTED, _WITH_INFO, _INFO = 0x300, 3, 0x1BE, 1 << 1, 2  # states but those without a process or a peer
_INET_ASKED, _INET_ANSWERED_SIZE, _INODE_AT, _BYTES_AT = struct.Struct("=BBBxI48x"), 72, 68, 120


def tcp_bytes() -> dict[int, int] | None:
    """The bytes sent and received so far by each TCP connection of this network namespace, by inode.

    None where the kernel doesn't answer, or has more of them than are read at once. Any user may ask. It doesn't count
    the bytes of Unix sockets.
    """
    found: dict[int, int] = {}

    def add(answer: bytes, begin: int, end: int) -> None:
        (inode,) = struct.unpack_from("=I", answer, begin + _INODE_AT)
        for kind, at, length in _attributes(answer, begin + _INET_ANSWERED_SIZE, end):
            if kind == _INFO and length >= _BYTES_AT + 16:
                found[inode] = sum(struct.unpack_from("=QQ", answer, at + _BYTES_AT))

    asked = (
        _INET_ASKED.pack(family, socket.IPPROTO_TCP, _WITH_INFO, _CONNECTED)
        for family in (socket.AF_INET, socket.AF_INET6)
    )
    return found if all(_ask(one, add, every=True) for one in asked) else None


def _ask(asked: bytes, add: Callable[[bytes, int, int], None], *, every: bool, deadline_s: float = 0.5) -> bool:
    """Asks sock_diag for one socket, or ``every`` one, and has each in the answer added: where in that it begins and
    ends. False where the kernel is silent, refuses, or has more of them than are read at once.
    """
    flags = _NLM_F_REQUEST | (_DUMP if every else 0)
    request = _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, flags, 0, 0) + asked
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(deadline_s)
            kernel.send(request)
            size = 0
            while size < MAX_TABLE_BYTES:
                answer = kernel.recv(1 << 17)
                size += len(answer)
                if _parts(answer, add) or not every:
                    return True
    except (OSError, struct.error):
        pass  # a kernel without it
    return False


def _parts(answer: bytes, add: Callable[[bytes, int, int], None]) -> bool:
    """Whether it was the last one. Raises ``OSError`` for a refusal."""
    at = 0
    while at + _HEADER.size <= len(answer):
        size, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind == _DONE:
            return True
        if kind != _SOCK_DIAG_BY_FAMILY or size < _HEADER.size:
            raise OSError("sock_diag refuses")
        add(answer, at + _HEADER.size, at + size)
        at += (size + 3) & ~3
    return False


def _attributes(answer: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The attributes in a part of an answer: their kinds, where they begin, and their lengths."""
    while at + 4 <= min(end, len(answer)):
        length, kind = struct.unpack_from("=HH", answer, at)
        yield kind, at + 4, length - 4
        at += max(4, (length + 3) & ~3)


def _rows(table: str) -> Iterator[list[str]]:
    """The fields of each line of ``/proc/net/tcp`` and its kin: addresses in 1 and 2, state in 3, inode in 9."""
    return (fields for line in table.splitlines()[1:] if len(fields := line.split()) > 9)


def find_resending(table: str) -> tuple[int, ...]:
    """The inodes in ``/proc/net/tcp`` of established connections in which something is being sent again."""
    return tuple(
        int(fields[9])
        for fields in _rows(table)
        if fields[3] == "01" and fields[5].startswith("01:") and int(fields[6], 16)
    )


def find_listening(table: str, port: int) -> Iterator[tuple[int, str]]:
    """Inode and address of each socket in ``/proc/net/tcp`` or ``tcp6`` that listens on this port."""
    for fields in _rows(table):
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            yield int(fields[9]), address(fields[1]).rpartition(":")[0].strip("[]")


def find_inet(table: str, protocol: str, inode: int) -> str:
    """The line of ``/proc/net/<protocol>`` with this inode in words, or ``""``."""
    fields = next((fields for fields in _rows(table) if fields[9] == str(inode)), None)
    if fields is None:
        return ""
    local, remote = address(fields[1]), address(fields[2])
    if protocol.startswith("udp"):
        return f"{protocol} {local} -> {remote}"
    state = _TCP_STATES.get(int(fields[3], 16), fields[3])
    return f"{protocol} {local} ({state})" if state == "listening" else f"{protocol} {local} -> {remote} ({state})"


def find_unix(table: str, inode: int) -> str:
    """The line of ``/proc/net/unix`` with this inode in words, or ``""``."""
    wanted = str(inode)
    for line in table.splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) >= 7 and fields[6] == wanted:
            return f"unix {fields[7]}" if len(fields) == 8 else f"unix socket:[{inode}] (unnamed, e.g. a socketpair)"
    return ""


def address(text: str) -> str:
    """``0100007F:1F90`` (words in host byte order, hexadecimal) → ``127.0.0.1:8080``; IPv6 in brackets."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(host), 8)]
    raw = b"".join(words)
    if len(raw) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, raw)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{int(port, 16)}"


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TABLE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


# --- who has the other end --------------------------------------------------------------------------------------------
# A pipe ends only when nobody has its write end open any more, and a full one is emptied only by who has its read
# end. Both ends are inherited by every child that is forked meanwhile, so it is often not who it was meant to be.

CPU_S, DEADLINE_S = 0.5, 5.0  # a descriptor takes some microseconds, and on a busy machine the turn to read it

_WRITES = frozenset({"write", "writev", "sendto", "sendmsg", "sendmmsg", "sendfile"})
_IO_URING = "anon_inode:[io_uring]"  # what it has been asked for it does without a thread of the process
_KTHREADD = 2

_READS = frozenset({"read", "readv", "recvfrom", "recvmsg", "recvmmsg", "poll", "ppoll", "splice"})

WantedEnds = tuple[str, bool]  # what the descriptor points at, or a mapping; whether it has to be one for writing


@dataclass(frozen=True)
class _Until:
    cpu_s: float
    wall_s: float

    @property
    def is_over(self) -> bool:
        return time.thread_time() > self.cpu_s or time.monotonic() > self.wall_s


@dataclass(frozen=True)
class _Holders:
    """Who has what was wanted. ``closed``: no descriptor can be out of sight. ``rings``: processes for which the kernel
    reads and writes (io_uring).
    """

    by: Mapping[WantedEnds, tuple[OtherEnd, ...]]
    closed: bool = False
    rings: frozenset[int] = frozenset()

    def is_closed(self, one: WantedEnds) -> bool:
        """As ``ends_closed`` in ``ThreadState``."""
        return self.closed and self.rings.isdisjoint(end.pid for end in self.by[one])


def with_ends(
    states: Sequence[ProcessState], pids: Iterable[int], *, deadline_s: float = DEADLINE_S
) -> tuple[ProcessState, ...]:
    """The same states, with the other ends of what their threads wait at. ``pids``: where to look, and in which order.

    The processes of ``states`` are always read. After ``CPU_S`` seconds of CPU, or ``deadline_s`` seconds, it gives up
    on all others. It then tells of connections whose other end it has found: these have one. Of a pipe or a semaphore
    it tells nothing, because what matters is that nobody else has it, and that may be among the rest.
    """
    until = _Until(time.thread_time() + CPU_S, time.monotonic() + deadline_s)
    wanted = {(state.pid, tid): one for state in states for tid, one in _wanted(state)}
    if not wanted and not any(thread.locked_by is not None for state in states for thread in state.threads):
        return tuple(states)
    shared = {
        (_own_socket(thread), False)
        for state in states
        for thread in state.threads
        if (state.pid, thread.tid) in wanted
    }
    own = [state.pid for state in states]
    found = _holders(frozenset(wanted.values()) | shared, own, pids, until)
    return tuple(_told(state, wanted, found) for state in states)


def _wanted(state: ProcessState) -> Iterator[tuple[int, WantedEnds]]:
    """What the other ends look like among the descriptors of whoever has them: tid → that."""
    waiting = [
        thread for thread in state.threads if thread.inode is not None and thread.syscall_name in _WRITES | _READS
    ]
    pipes = [one for one in waiting if one.fd_target.startswith("pipe:")]
    for thread in pipes:
        yield thread.tid, (f"pipe:[{thread.inode}]", thread.syscall_name in _READS)
    others = {one.tid: one.inode for one in waiting if one not in pipes and one.inode is not None}
    peers = other_ends(state.pid, others.values()) if others else {}
    for tid, inode in others.items():
        if inode in peers:
            yield tid, (f"socket:[{peers[inode]}]", False)
    for thread in state.threads:
        if thread.futex_file:
            yield thread.tid, (thread.futex_file, True)  # a semaphore that processes share


def _own_socket(thread: ThreadState) -> str:
    return f"socket:[{thread.inode}]"


def _holders(wanted: frozenset[WantedEnds], own: Collection[int], pids: Iterable[int], until: _Until) -> _Holders:
    targets = {target for target, _ in wanted}
    mapped = [one for one in wanted if " " in one[0]]  # device and inode
    found: dict[WantedEnds, dict[int, OtherEnd]] = {one: {} for one in wanted}
    mine: set[str] = set()  # of the job's processes: through these, a descriptor may have been given away
    seen: set[str] = set()
    given = {link_of(f"/proc/self/fd/{number}") for number in range(3)}  # to safelaunch, and on to the job
    unreadable, rings = set[int](), set[int]()
    began = min((one.start_ticks for one in map(procstat.read, own) if one is not None), default=0)
    groups = {_group(pid) for pid in own}
    for pid in dict.fromkeys((*own, *pids)):
        if pid not in own and until.is_over:
            return _Holders({one: tuple(each.values()) for one, each in found.items() if each and _is_socket(one)})
        its: set[str] = set()
        for path, target in descriptors(pid):
            its.add(target)
            for writes in _directions(path, target) if target in targets else ():
                if (target, writes) in found:
                    found[target, writes].setdefault(pid, OtherEnd(pid, _name(pid)))
        its.discard("")
        seen |= its
        rings |= {pid} if _IO_URING in its else set()
        mine |= its - given if pid in own else set()
        unreadable |= {pid} if not its and _hides_its(pid) else set()
        mappings = _mapped_files(pid) if mapped else frozenset()
        for one in mapped:
            if one[0] in mappings:
                found[one].setdefault(pid, OtherEnd(pid, _name(pid)))
    closed = not unreadable and _are_closed(own, mine, seen)
    if any(_may_have_inherited(pid, began, groups) for pid in unreadable):
        found = {one: each for one, each in found.items() if one not in mapped}
    return _Holders({one: tuple(each.values()) for one, each in found.items()}, closed, frozenset(rings))


def _mapped_files(pid: int) -> frozenset[str]:
    """Device and inode of each file that the process has mapped; a file has one path for who made it and another for
    who opened it by its name.
    """
    with suppress(OSError):  # it has ended, or is another user's
        return frozenset(mapping.identity for mapping in ProcessMemory(pid).mappings)
    return frozenset()


def _is_socket(one: WantedEnds) -> bool:
    return one[0].startswith("socket:")


def _group(pid: int) -> str:
    return text_of(f"/proc/{pid}/cgroup")


def _may_have_inherited(pid: int, began: int, groups: Collection[str]) -> bool:
    """Whether the process can be a child of the job's by its age (``began``: ticks) and control group."""
    state = procstat.read(pid)
    return state is not None and state.start_ticks >= began and _group(pid) in groups


def _hides_its(pid: int) -> bool:
    """Whether a process has descriptors that it does not show, because it belongs to another user.

    The job can have sent it one of its own over a Unix socket that is closed by now, whatever its age and group.
    """
    state = procstat.read(pid)
    if state is None or state.ppid in (0, _KTHREADD):  # init keeps what it is sent, and the kernel is sent nothing
        return False
    try:
        if state.state in "ZX":  # where other threads live, their descriptors are there and not shown
            return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()) > 1
        return any(True for _ in Path(f"/proc/{pid}/fd").iterdir())  # of which not one could be read
    except OSError as error:
        return isinstance(error, PermissionError)


def _are_closed(own: Collection[int], mine: Collection[str], seen: Collection[str]) -> bool:
    """Whether nobody out of sight has been given a descriptor by a process of the job: none is under way in a Unix
    socket, and none of ``mine``, which they have, leads to such a socket that is not among those ``seen``.
    """
    found, network = unix_sockets(), link_of("/proc/self/ns/net")
    if found is None or {link_of(f"/proc/{pid}/ns/net") for pid in own} - {network, ""}:
        return False
    unread = (one.peer for one in found.values() if one.unread)
    if not all(f"socket:[{peer}]" in seen and f"socket:[{peer}]" not in mine for peer in unread):
        return False
    open_here = (found.get(int(one[8:-1])) for one in mine if one.startswith("socket:["))
    return all(f"socket:[{one.peer}]" in seen for one in open_here if one is not None and one.peer is not None)


def _directions(path: Path, target: str) -> tuple[bool, ...]:
    """Whether it is open for writing; both where it is for reading as well. Those of sockets say nothing."""
    if target.startswith("socket:"):
        return (False,)
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ()  # closed meanwhile
    return tuple(writes for writes, bit in ((True, stat.S_IWUSR), (False, stat.S_IRUSR)) if mode & bit)


def _name(pid: int) -> str:
    found = procstat.read(pid)
    return found.name if found is not None else ""


def _told(state: ProcessState, wanted: Mapping[tuple[int, int], WantedEnds], found: _Holders) -> ProcessState:
    def one(thread: ThreadState) -> ThreadState:
        asked = wanted.get((state.pid, thread.tid))
        if thread.locked_by is not None:
            return structs.replace(thread, ends_closed=found.closed)
        if asked is None or asked not in found.by:
            return thread
        sharers = {end.pid for end in found.by.get((_own_socket(thread), False), ())} - {state.pid}
        told = structs.replace(thread, ends=found.by[asked], ends_closed=found.is_closed(asked))
        return structs.replace(told, lock_sharers=tuple(sorted(sharers))) if _is_socket(asked) else told

    return structs.replace(state, threads=tuple(map(one, state.threads)))
