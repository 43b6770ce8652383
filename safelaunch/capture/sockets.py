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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from safelaunch.model import OtherEnd, ProcessState, ThreadState
from safelaunch.system import procstat
from safelaunch.system.files import text_of

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
    inodes = {inode for name in ("tcp", "tcp6") for inode in find_resending(_read(net / name))}
    if not inodes:
        return False
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return any(target in wanted for _, target in descriptors(pid))


def listeners(pid: int, port: int) -> dict[int, str]:
    """Who listens on a TCP port where this process lives: inode of the socket → its address."""
    net = Path(f"/proc/{pid}/net")
    return {inode: host for name in ("tcp", "tcp6") for inode, host in find_listening(_read(net / name), port)}


_PIDFD_GETFD = 438  # of every architecture; Linux 5.6


def times_out(pid: int, fd: int) -> bool:
    """Whether the socket has a time limit of its own (SO_RCVTIMEO, SO_SNDTIMEO), or that can't be read.

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
            return any(any(limit) for limit in limits)
    except OSError:
        return True


def has_socket(pid: int, inode: int) -> bool:
    return any(target == f"socket:[{inode}]" for _, target in descriptors(pid))


def descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """The descriptors of a process, as paths below ``/proc``, each with what it points at."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                path = Path(entry.path)
                yield path, _target(path)
    except OSError:
        return


def other_ends(pid: int, inodes: Collection[int]) -> dict[int, int]:
    """The inodes of these sockets of the process → those of the sockets at the other ends, if on this node.

    A connection that was not accepted yet has no socket there: that of the listener stands for it.
    """
    net, found = Path(f"/proc/{pid}/net"), {}
    for name in ("tcp", "tcp6"):
        table = _read(net / name)
        by_pair = {(fields[1], fields[2]): int(fields[9]) for fields in _connections(table)}
        pairs = {inode: pair for pair, inode in by_pair.items()}
        for inode in inodes:
            local, remote = pairs.get(inode, ("", ""))
            other = by_pair.get((remote, local))
            if other == 0:
                other = _listener(table, remote)
            if other is not None:
                found[inode] = other
    unix = {inode: unix_peer(inode) for inode in inodes if inode not in found}
    return found | {inode: peer for inode, peer in unix.items() if peer is not None}


def _listener(table: str, remote: str) -> int | None:
    """The inode of the socket that listens at this address, or else at all; None if none or several may be meant."""
    host, _, port = remote.partition(":")
    found = {at: number for number, at in find_listening(table, int(port, 16))}
    named = address(f"{host}:{port}").rpartition(":")[0].strip("[]")
    everywhere = {found[one] for one in ("0.0.0.0", "::") if one in found}
    return found.get(named, everywhere.pop() if len(everywhere) == 1 else None)


# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ANY_STATE, _SHOW_PEER, _NO_COOKIE, _PEER = 0xFFFFFFFF, 4, 0xFFFFFFFF, 2
_HEADER, _ASKED, _ANSWERED = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII"), struct.Struct("=BBBBIII")


def unix_peer(inode: int, *, deadline_s: float = 0.2) -> int | None:
    """The inode of the socket to which a Unix socket is connected; None where there is none, or the kernel is silent.

    ``/proc`` does not tell, so the kernel is asked as ``ss`` does (sock_diag(7)), of this process's network namespace.
    """
    asked = _ASKED.pack(socket.AF_UNIX, 0, 0, _ANY_STATE, inode & 0xFFFFFFFF, _SHOW_PEER, _NO_COOKIE, _NO_COOKIE)
    request = _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + asked
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(deadline_s)
            kernel.send(request)
            return _peer_in(kernel.recv(4096))
    except (OSError, struct.error):
        return None


def _peer_in(answer: bytes) -> int | None:
    size, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _SOCK_DIAG_BY_FAMILY:
        for begin, length in _attributes(answer, _HEADER.size + _ANSWERED.size, size, _PEER):
            if length == 4:
                return int.from_bytes(answer[begin : begin + 4], sys.byteorder)
    return None


# linux/inet_diag.h, linux/tcp.h: bytes_acked and bytes_received of tcp_info, which each socket has from Linux 4.6 on
_DUMP, _DONE, _CONNECTED, _WITH_INFO, _INFO = 0x300, 3, 0x1BE, 1 << 1, 2  # states but those without a process or a peer
_INET_ASKED, _INET_ANSWERED_SIZE, _INODE_AT, _BYTES_AT = struct.Struct("=BBBxI48x"), 72, 68, 120


def tcp_bytes(*, deadline_s: float = 0.5) -> dict[int, int] | None:
    """The bytes sent and received so far by each TCP connection of this network namespace, by inode.

    None where the kernel doesn't answer, or has more of them than are read at once. Any user may ask. It doesn't count
    the bytes of Unix sockets.
    """
    found: dict[int, int] = {}
    try:
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = _INET_ASKED.pack(family, socket.IPPROTO_TCP, _WITH_INFO, _CONNECTED)
            request = (
                _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _DUMP, 0, 0) + asked
            )
            with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
                kernel.settimeout(deadline_s)
                kernel.send(request)
                size = 0
                while size < MAX_TABLE_BYTES and not _bytes_in(answer := kernel.recv(1 << 17), found):
                    size += len(answer)
            if size >= MAX_TABLE_BYTES:
                return None
    except (OSError, struct.error):
        return None
    return found


def _bytes_in(answer: bytes, found: dict[int, int]) -> bool:
    """Adds what one part of the answer tells; whether it was the last. Raises ``OSError`` for a refusal."""
    at = 0
    while at + _HEADER.size <= len(answer):
        size, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind == _DONE:
            return True
        if kind != _SOCK_DIAG_BY_FAMILY or size < _HEADER.size:
            raise OSError("sock_diag refuses")
        (inode,) = struct.unpack_from("=I", answer, at + _HEADER.size + _INODE_AT)
        for begin, length in _attributes(answer, at + _HEADER.size + _INET_ANSWERED_SIZE, at + size, _INFO):
            if length >= _BYTES_AT + 16:
                found[inode] = sum(struct.unpack_from("=QQ", answer, begin + _BYTES_AT))
        at += (size + 3) & ~3
    return False


def _attributes(answer: bytes, at: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where each such attribute of an answer begins, and its length."""
    while at + 4 <= min(end, len(answer)):
        length, attribute = struct.unpack_from("=HH", answer, at)
        if attribute == wanted:
            yield at + 4, length - 4
        at += max(4, (length + 3) & ~3)


def _connections(table: str) -> Iterator[list[str]]:
    """Those that a process has, or that wait to be accepted: these have no inode, nor have those that are over."""
    lines = (line.split() for line in table.splitlines()[1:])
    return (fields for fields in lines if len(fields) > 9 and (fields[9] != "0" or fields[3] == "01"))


def _target(path: Path) -> str:
    try:
        return os.fspath(path.readlink())
    except OSError:
        return ""  # closed meanwhile


def find_resending(table: str) -> tuple[int, ...]:
    """The inodes in ``/proc/net/tcp`` of established connections in which something is being sent again."""
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "01" and fields[5].startswith("01:") and int(fields[6], 16):
            found.append(int(fields[9]))
    return tuple(found)


def find_listening(table: str, port: int) -> Iterator[tuple[int, str]]:
    """Inode and address of each socket in ``/proc/net/tcp`` or ``tcp6`` that listens on this port."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            yield int(fields[9]), address(fields[1]).rpartition(":")[0].strip("[]")


def find_inet(table: str, protocol: str, inode: int) -> str:
    """The line of ``/proc/net/<protocol>`` with this inode in words, or ``""``."""
    wanted = str(inode)
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[9] == wanted:
            local, remote = address(fields[1]), address(fields[2])
            if protocol.startswith("udp"):
                return f"{protocol} {local} -> {remote}"
            state = _TCP_STATES.get(int(fields[3], 16), fields[3])
            return (
                f"{protocol} {local} ({state})" if state == "listening" else f"{protocol} {local} -> {remote} ({state})"
            )
    return ""


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
            parts: list[bytes] = []
            size = 0
            while size < MAX_TABLE_BYTES and (chunk := os.read(file.fileno(), 1 << 16)):
                parts.append(chunk)
                size += len(chunk)
            return b"".join(parts).decode("utf-8", "replace")
    except OSError:
        return ""


# --- who has the other end --------------------------------------------------------------------------------------------
# A pipe ends only when nobody has its write end open any more, and a full one is emptied only by who has its read
# end. Both ends are inherited by every child that is forked meanwhile, so it is often not who it was meant to be.

CPU_S, DEADLINE_S = 0.5, 5.0  # a descriptor takes some microseconds, and on a busy machine the turn to read it

_WRITES = frozenset({"write", "writev", "sendto", "sendmsg", "sendmmsg", "sendfile", "splice"})
_READS = frozenset({"read", "readv", "recvfrom", "recvmsg", "recvmmsg", "poll", "ppoll"})

Wanted = tuple[str, bool]  # what the descriptor points at, or a mapping; whether it has to be one for writing


@dataclass(frozen=True)
class _Until:
    cpu_s: float
    wall_s: float

    @property
    def is_over(self) -> bool:
        return time.thread_time() > self.cpu_s or time.monotonic() > self.wall_s


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
    found = _holders(frozenset(wanted.values()), pids, {state.pid for state in states}, until) if wanted else {}
    return tuple(_told(state, wanted, found) for state in states)


def _wanted(state: ProcessState) -> Iterator[tuple[int, Wanted]]:
    """What the other ends look like among the descriptors of whoever has them: tid → that."""
    waiting = [one for one in state.threads if one.inode is not None and one.syscall_name in _WRITES | _READS]
    pipes = [one for one in waiting if one.fd_target.startswith("pipe:")]
    for thread in pipes:
        yield thread.tid, (f"pipe:[{thread.inode}]", thread.syscall_name in _READS)
    others = {one.tid: one.inode for one in waiting if one not in pipes and one.inode is not None}
    peers = other_ends(state.pid, others.values()) if others else {}
    for tid, inode in others.items():
        if inode in peers:
            yield tid, (f"socket:[{peers[inode]}]", False)
    for thread in state.threads:
        if thread.syscall_name.startswith("futex") and thread.fd_target.startswith("/"):
            yield thread.tid, (thread.fd_target, True)  # a semaphore that processes share


def _holders(
    wanted: frozenset[Wanted], pids: Iterable[int], own: Collection[int], until: _Until
) -> dict[Wanted, tuple[OtherEnd, ...]]:
    targets = {target for target, _ in wanted}
    mapped = [one for one in wanted if one[0].startswith("/")]
    found: dict[Wanted, dict[int, OtherEnd]] = {one: {} for one in wanted}
    for pid in dict.fromkeys(pids):
        if pid not in own and until.is_over:
            found = {one: holders for one, holders in found.items() if holders and one[0].startswith("socket:")}
            break
        for path, target in descriptors(pid):
            for writes in _directions(path, target) if target in targets else ():
                if (target, writes) in found:
                    found[target, writes].setdefault(pid, OtherEnd(pid, _name(pid)))
        mappings = text_of(f"/proc/{pid}/maps") if mapped else ""
        for one in mapped:
            if one[0] in mappings:
                found[one].setdefault(pid, OtherEnd(pid, _name(pid)))
    return {one: tuple(holders.values()) for one, holders in found.items()}


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


def _told(
    state: ProcessState, wanted: dict[tuple[int, int], Wanted], found: dict[Wanted, tuple[OtherEnd, ...]]
) -> ProcessState:
    def one(thread: ThreadState) -> ThreadState:
        asked = wanted.get((state.pid, thread.tid))
        return structs.replace(thread, ends=found[asked]) if asked is not None and asked in found else thread

    if not any(pid == state.pid for pid, _ in wanted):
        return state
    return structs.replace(state, threads=tuple(map(one, state.threads)))
