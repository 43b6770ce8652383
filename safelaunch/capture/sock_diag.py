"""Queries the kernel for sockets through sock_diag(7): ends of Unix sockets, bytes of TCP connections."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_TABLE_BYTES = 4 << 20  # bounds the time on a node with tens of thousands of connections

# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_ANY_STATE, _SHOW_PEER, _SHOW_QUEUE, _NO_COOKIE, _PEER, _QUEUE = 0xFFFFFFFF, 4, 16, 0xFFFFFFFF, 2, 4
_SHUTDOWN, _BOTH_WAYS = 6, 3  # set if the other end was closed
_HEADER, _REQUEST, _REPLY = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII"), struct.Struct("=BBBBIII")


@dataclass(frozen=True)
class UnixSocket:
    peer: int | None  # inode at its other end, 0 until it is accepted there; None without another end
    unread: int  # bytes that have arrived; connections, if it listens


def unix_peer(inode: int) -> int | None:
    """Returns the inode of the socket to which a Unix socket is connected, in this network namespace; None if unknown.

    ``/proc`` doesn't show it, so the kernel is queried as ``ss`` does.
    """
    by_inode = _unix_sockets(inode)
    return by_inode[inode].peer or None if by_inode is not None and inode in by_inode else None


def unix_sockets() -> dict[int, UnixSocket] | None:
    """Returns all Unix sockets of this network namespace by inode; None if the kernel doesn't report them."""
    return _unix_sockets(None)


def _unix_sockets(inode: int | None) -> dict[int, UnixSocket] | None:
    request = _REQUEST.pack(
        socket.AF_UNIX, 0, 0, _ANY_STATE, (inode or 0) & 0xFFFFFFFF, _SHOW_PEER | _SHOW_QUEUE, _NO_COOKIE, _NO_COOKIE
    )
    by_inode: dict[int, UnixSocket] = {}

    def add(answer: bytes, begin: int, end: int) -> None:
        *_, number, _, _ = _REPLY.unpack_from(answer, begin)
        attributes = _attributes(answer, begin + _REPLY.size, end)
        values = {kind: int.from_bytes(answer[at : at + min(size, 4)], sys.byteorder) for kind, at, size in attributes}
        is_over = values.get(_PEER) == 0 and values.get(_SHUTDOWN) == _BOTH_WAYS
        by_inode[number] = UnixSocket(None if is_over else values.get(_PEER), values.get(_QUEUE, 0))

    return by_inode if _query(request, add, every=inode is None) else None


# linux/inet_diag.h, linux/tcp.h: bytes_acked and bytes_received in tcp_info, in each socket since Linux 4.6
_DUMP, _DONE, _CONNECTED, _WITH_INFO, _INFO = 0x300, 3, 0x1BE, 1 << 1, 2  # states with a process and a peer
_INET_REQUEST, _INET_REPLY_SIZE, _INODE_AT, _BYTES_AT = struct.Struct("=BBBxI48x"), 72, 68, 120
_BUSY_AT = 168  # tcpi_busy_time, since Linux 4.10


def tcp_bytes() -> dict[int, int] | None:
    """Returns the bytes sent and received by each TCP connection of this network namespace, by inode.

    None if the kernel doesn't answer or has too many connections. Needs no rights.
    """
    by_inode: dict[int, int] = {}

    def add(inode: int, answer: bytes, begin: int, at: int, length: int) -> None:
        if length >= _BYTES_AT + 16:
            by_inode[inode] = sum(struct.unpack_from("=QQ", answer, at + _BYTES_AT))

    return by_inode if _tcp(add) else None


@dataclass(frozen=True)
class TcpConnection:
    local: str  # address and port
    remote: str
    busy_s: float  # since it began: time in which data waited for its acknowledgement
    sent_bytes: int = 0  # that were acknowledged


def tcp_connections() -> dict[int, TcpConnection] | None:
    """Returns the TCP connections of this network namespace by inode; None as for ``tcp_bytes``."""
    by_inode: dict[int, TcpConnection] = {}

    def add(inode: int, answer: bytes, begin: int, at: int, length: int) -> None:
        if length >= _BUSY_AT + 8:
            ports, size = struct.unpack_from(">HH", answer, begin + 4), 4 if answer[begin] == socket.AF_INET else 16
            places = (answer[begin + offset : begin + offset + size] for offset in (8, 24))
            local, remote = (f"{ipaddress.ip_address(place)}:{port}" for place, port in zip(places, ports, strict=True))
            (sent,), (busy_us,) = (struct.unpack_from("=Q", answer, at + place) for place in (_BYTES_AT, _BUSY_AT))
            by_inode[inode] = TcpConnection(local, remote, busy_us / 1e6, sent)

    return by_inode if _tcp(add) else None


def _tcp(add: Callable[[int, bytes, int, int, int], None]) -> bool:
    """Calls ``add(inode, answer, begin, at, length)`` for each connection, with the place of its tcp_info."""

    def add_info(answer: bytes, begin: int, end: int) -> None:
        (inode,) = struct.unpack_from("=I", answer, begin + _INODE_AT)
        for kind, at, length in _attributes(answer, begin + _INET_REPLY_SIZE, end):
            if kind == _INFO:
                add(inode, answer, begin, at, length)

    requests = (
        _INET_REQUEST.pack(family, socket.IPPROTO_TCP, _WITH_INFO, _CONNECTED)
        for family in (socket.AF_INET, socket.AF_INET6)
    )
    return all(_query(request, add_info, every=True) for request in requests)


def _query(body: bytes, add: Callable[[bytes, int, int], None], *, every: bool, deadline_s: float = 0.5) -> bool:
    """Queries sock_diag for one socket, or for all if ``every``. Returns False if that fails, or if there are too many.

    Calls ``add(answer, begin, end)`` for each socket.
    """
    flags = _NLM_F_REQUEST | (_DUMP if every else 0)
    request = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, flags, 0, 0) + body
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
        pass  # not supported by the kernel
    return False


def _parts(answer: bytes, add: Callable[[bytes, int, int], None]) -> bool:
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
    while at + 4 <= min(end, len(answer)):
        length, kind = struct.unpack_from("=HH", answer, at)
        yield kind, at + 4, length - 4
        at += max(4, (length + 3) & ~3)
