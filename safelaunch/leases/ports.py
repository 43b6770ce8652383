"""Leases ports for jobs that need a fixed port number, and reserves each with a bound socket.

Another program could take a free port before the job uses it. To prevent that, this process binds the port, without
listening, until the job ends. Because both sockets set SO_REUSEADDR, the job's server can still bind the port and
listen. The kernel won't assign the port to programs that bind to port 0, and refuses it to programs that don't set that
option.

``bind`` itself binds without the option, so two jobs never reserve the same port, even if their lease directories
differ, as in two containers that use the host's network.
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
    """Leases ``count`` ports, if possible outside the ephemeral range. Raises ResourceError if too few are free."""
    wanted = {port_key(port): port for port in candidates(text_of(EPHEMERAL), text_of(RESERVED))}
    bound: dict[str, socket.socket] = {}

    def pick(held: Mapping[str, LeaseHolder]) -> list[str] | None:
        _close(bound)
        for key, port in wanted.items():
            if len(bound) == count:
                break
            if key not in held and (reservation := bind(port)) is not None:
                bound[key] = reservation
        return list(bound) if len(bound) == count else None

    try:
        lease = store.attempt(list(wanted), pick, about).lease
    except BaseException:
        _close(bound)
        raise
    if lease is None:
        _close(bound)
        raise _none_free(count)
    lease.sockets.update({key: reservation.detach() for key, reservation in bound.items()})
    return lease


def take_unleased(count: int) -> Lease:
    """Reserves ``count`` free ports without leasing them. Raises ResourceError if too few are free."""
    reserved: dict[int, int] = {}
    for port in candidates(text_of(EPHEMERAL), text_of(RESERVED)):
        if len(reserved) == count:
            break
        if (reservation := bind(port)) is not None:
            reserved[port] = reservation.detach()
    lease = Lease({}, sockets={port_key(port): fd for port, fd in reserved.items()})
    if len(reserved) < count:
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
    """Returns a socket that reserves ``port`` on all addresses without listening; None if the port is taken."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6
        try:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind((address, port))
            # Set earlier, the option would make bind ignore another job's reservation.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
            return probe
        except OSError as error:
            probe.close()
            if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            return None
    return None


def listening() -> set[int]:
    numbers = set()
    for path in TABLES:
        for line in text_of(path).splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == LISTEN:
                numbers.add(int(words[1].rpartition(":")[2], 16))
    return numbers


def candidates(ephemeral: str, reserved: str) -> Iterator[int]:
    """Yields every port that can be leased, the safest first.

    A port in the ephemeral range is protected only by the bound socket; such ports are yielded if the range covers all.

    Args:
        ephemeral: Content of /proc/sys/net/ipv4/ip_local_port_range.
        reserved: Content of /proc/sys/net/ipv4/ip_local_reserved_ports.
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
