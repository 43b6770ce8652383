"""Finds a process's sockets and the processes at their other ends, by inode.

The sources are ``/proc/<pid>/net`` (proc(5)) and sock_diag(7).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from safelaunch.capture.sock_diag import MAX_TABLE_BYTES, unix_peer
from safelaunch.system.files import link_of

_TCP_STATES = {
    1: "established", 2: "connecting", 3: "syn received", 4: "fin wait 1", 5: "fin wait 2", 6: "time wait",
    7: "closed", 8: "close wait", 9: "last ack", 10: "listening", 11: "closing",
}  # fmt: skip


def describe(pid: int, inode: int) -> str:
    """Describes a socket, e.g. ``tcp 10.0.0.1:80 -> 10.0.0.2:9000 (established)``; ``socket:[inode]`` if not found."""
    net = Path(f"/proc/{pid}/net")
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        text = find_inet(_read(net / protocol), protocol, inode)
        if text:
            return text
    return find_unix(_read(net / "unix"), inode) or f"socket:[{inode}]"


def resends(pid: int) -> bool:
    """Returns True if the kernel is resending data that a TCP peer of the process hasn't acknowledged.

    The cause is a network outage, which might already be over: after an outage of a minute, the kernel can take another
    minute to resend.
    """
    net = Path(f"/proc/{pid}/net")
    late = {inode for name in ("tcp", "tcp6") for inode in find_resending(_read(net / name))}
    return bool(late) and not late.isdisjoint(inodes(pid))


def listeners(pid: int, port: int) -> dict[int, str]:
    """Returns the sockets that listen on a TCP port in the process's network namespace: inode → address."""
    net = Path(f"/proc/{pid}/net")
    return {inode: host for name in ("tcp", "tcp6") for inode, host in find_listening(_read(net / name), port)}


_PIDFD_GETFD = 438  # on every architecture; Linux 5.6


def times_out(pid: int, fd: int) -> bool:
    """Returns True if the socket has a time limit (SO_RCVTIMEO, SO_SNDTIMEO, TCP_USER_TIMEOUT), or if that is unknown.

    Queries a copy of the descriptor, which doesn't disturb the process.
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
        with socket.socket(fileno=copy) as duplicate:
            limits = (
                duplicate.getsockopt(socket.SOL_SOCKET, option, 16)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
            )
            is_tcp = duplicate.family != socket.AF_UNIX and duplicate.type == socket.SOCK_STREAM
            return any(map(any, limits)) or bool(
                is_tcp and duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            )
    except OSError:
        return True


def inodes(pid: int) -> Iterator[int]:
    return (int(target[8:-1]) for _, target in descriptors(pid) if target.startswith("socket:["))


def descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """Yields a process's descriptors, as paths below ``/proc``, with their targets; nothing if they can't be read."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                path = Path(entry.path)
                yield path, link_of(path)
    except OSError:
        return


def other_ends(pid: int, own: Collection[int]) -> dict[int, int]:
    """Maps the process's sockets to the sockets at their other ends on this node, all by inode.

    If a connection hasn't been accepted yet, its other end is the listener's socket.
    """
    net, ends = Path(f"/proc/{pid}/net"), {}
    for name in ("tcp", "tcp6"):
        table = _read(net / name)
        # Connections that a process has (with an inode) or that wait to be accepted (established).
        connections = (fields for fields in _rows(table) if fields[9] != "0" or fields[3] == "01")
        by_pair = {(fields[1], fields[2]): int(fields[9]) for fields in connections}
        pairs = {inode: pair for pair, inode in by_pair.items()}
        for inode in own:
            local, remote = pairs.get(inode, ("", ""))
            end = by_pair.get((remote, local))
            if end == 0:
                end = _listener(table, remote)
            if end is not None:
                ends[inode] = end
    unix = {inode: unix_peer(inode) for inode in own if inode not in ends}
    return ends | {inode: peer for inode, peer in unix.items() if peer is not None}


def _listener(table: str, remote: str) -> int | None:
    """Returns the socket that listens at this address, or else at any address; None unless exactly one matches."""
    host, _, port = remote.partition(":")
    listening = list(find_listening(table, int(port, 16)))
    named = address(f"{host}:{port}").rpartition(":")[0].strip("[]")
    matches = [number for number, at in listening if at == named]
    matches = matches or [number for number, at in listening if at in ("0.0.0.0", "::")]
    return matches[0] if len(matches) == 1 else None


def _rows(table: str) -> Iterator[list[str]]:
    return (fields for line in table.splitlines()[1:] if len(fields := line.split()) > 9)


def find_resending(table: str) -> tuple[int, ...]:
    """Returns inodes in ``/proc/net/tcp`` of established connections that are resending data."""
    return tuple(
        int(fields[9])
        for fields in _rows(table)
        if fields[3] == "01" and fields[5].startswith("01:") and int(fields[6], 16)
    )


def find_listening(table: str, port: int) -> Iterator[tuple[int, str]]:
    """Yields the inode and address of each socket in ``/proc/net/tcp`` or ``tcp6`` that listens on this port."""
    for fields in _rows(table):
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            yield int(fields[9]), address(fields[1]).rpartition(":")[0].strip("[]")


def find_inet(table: str, protocol: str, inode: int) -> str:
    fields = next((fields for fields in _rows(table) if fields[9] == str(inode)), None)
    if fields is None:
        return ""
    local, remote = address(fields[1]), address(fields[2])
    if protocol.startswith("udp"):
        return f"{protocol} {local} -> {remote}"
    state = _TCP_STATES.get(int(fields[3], 16), fields[3])
    return f"{protocol} {local} ({state})" if state == "listening" else f"{protocol} {local} -> {remote} ({state})"


def find_unix(table: str, inode: int) -> str:
    wanted = str(inode)
    for line in table.splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) >= 7 and fields[6] == wanted:
            return f"unix {fields[7]}" if len(fields) == 8 else f"unix socket:[{inode}] (unnamed, e.g. a socketpair)"
    return ""


def address(text: str) -> str:
    """Decodes ``0100007F:1F90`` (hexadecimal words in host byte order) to ``127.0.0.1:8080``; IPv6 gets brackets."""
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
