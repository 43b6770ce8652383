"""Leases ports for jobs that need a fixed number, and reserves each with a bound socket.

A port that is free now may be taken before the job uses it. So this process binds it, without listening, until the job
is over. With SO_REUSEADDR on both sides, the job's own server can still bind it and listen. The kernel gives the port
to no program that asks for any port, and refuses programs that ask for it without that option. As ``bind`` is such a
program itself, two jobs never reserve the same port, even if they see different lease directories, such as two
containers on the host's network do.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Mapping

from safelaunch.leases.choose import numbers_in
from safelaunch.leases.holder import LeaseHolder
from safelaunch.leases.lease import Lease, port_key
from safelaunch.leases.store import LeaseStore
from safelaunch.system.errors import ResourceError
from safelaunch.system.files import text_of

FIRST, LAST = 20000, 65535
LOWEST = 1024
EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
RESERVED = "/proc/sys/net/ipv4/ip_local_reserved_ports"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTEN = "0A"
WELL_KNOWN = (29400, 29500)  # torchrun's defaults


def take(store: LeaseStore, count: int, about: LeaseHolder) -> Lease:
    """Leases ``count`` ports, outside the kernel's ephemeral range if possible. Raises ResourceError."""
    wanted = {port_key(port): port for port in candidates(text_of(EPHEMERAL), text_of(RESERVED))}
    bound: dict[str, socket.socket] = {}

    def pick(held: Mapping[str, LeaseHolder]) -> list[str] | None:
        """Ports that nobody uses, with or without a lease."""
        _close(bound)
        for key, port in wanted.items():
            if len(bound) == count:
                break
            if key not in held and (one := bind(port)) is not None:
                bound[key] = one
        return list(bound) if len(bound) == count else None

    try:
        lease = store.attempt(list(wanted), pick, about).lease
    except BaseException:
        _close(bound)
        raise
    if lease is None:
        _close(bound)
        raise _none_free(count)
    lease.sockets.update({key: one.detach() for key, one in bound.items()})
    return lease


def take_unleased(count: int) -> Lease:
    """``count`` free ports without a lease, for a node without a usable lease directory. Raises ResourceError."""
    found: dict[int, int] = {}
    for port in candidates(text_of(EPHEMERAL), text_of(RESERVED)):
        if len(found) == count:
            break
        if (one := bind(port)) is not None:
            found[port] = one.detach()
    lease = Lease({}, sockets={port_key(port): fd for port, fd in found.items()})
    if len(found) < count:
        lease.release()
        raise _none_free(count)
    return lease


def _none_free(count: int) -> ResourceError:
    what = "no port of this node is free" if count == 1 else f"fewer than {count} ports of this node are free"
    return ResourceError(f"{what}.", "ss -ltnp lists the programs that use them.")


def _close(bound: dict[str, socket.socket]) -> None:
    while bound:
        bound.popitem()[1].close()


def bind(port: int) -> socket.socket | None:
    """A socket that keeps ``port`` on all addresses without listening; None if any other socket is bound to it."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            one = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        try:
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            one.bind((address, port))
            # Only now: with the option, the bind would succeed beside another job's reservation.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
            return one
        except OSError as error:
            one.close()
            if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            return None
    return None


def listening() -> set[int]:
    """The TCP ports that any program listens on."""
    found = set()
    for path in TABLES:
        for line in text_of(path).splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == LISTEN:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def candidates(ephemeral: str, reserved: str) -> Iterator[int]:
    """Every port that may be leased, the safest first, by the texts of the two files in /proc/sys.

    If the ephemeral range covers every port, only the bound socket protects a port.
    """
    words = [int(word) for word in ephemeral.split() if word.isdigit()]
    low, high = words if len(words) == 2 else (32768, 60999)
    kept = set(WELL_KNOWN) | set(numbers_in(reserved))
    outside = [port for port in range(FIRST, LAST + 1) if not low <= port <= high and port not in kept]
    below = [port for port in range(LOWEST, FIRST) if not low <= port <= high and port not in kept]
    inside = [port for port in range(max(low, FIRST), high + 1) if port not in kept]
    yield from outside
    yield from reversed(below)
    yield from inside
