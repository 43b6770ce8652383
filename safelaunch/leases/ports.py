"""Ports for jobs that need a number: leased like GPUs, and kept from everybody else by a bound socket.

A number that was free a moment ago may be gone when it is used. So a port is bound here and stays bound, without
listening, until the job is over: with SO_REUSEADDR on both sides the job's own server can still bind it and listen,
while the kernel gives it to nobody who asks for any port, and refuses those who ask for it without that option.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from safelaunch.errors import ResourceError
from safelaunch.leases.holder import Holder
from safelaunch.leases.lease import Lease
from safelaunch.leases.store import Store

FIRST, LAST = 20000, 65535
LOWEST = 1024
EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
RESERVED = "/proc/sys/net/ipv4/ip_local_reserved_ports"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTEN = "0A"
WELL_KNOWN = (29400, 29500)  # what torchrun takes by itself


@dataclass
class Ports:
    """Ports that are ours until ``release``."""

    numbers: tuple[int, ...]
    lease: Lease

    def release(self) -> None:
        self.lease.release()


def key_of(port: int) -> str:
    """The name that a port is leased by."""
    return f"port-{port}"


def take(store: Store, count: int, about: Holder) -> Ports:
    """``count`` ports, outside the range that the kernel gives away by itself. Raises ResourceError."""
    taken = Ports((), Lease({}))
    try:
        for port in candidates(_read(EPHEMERAL), _read(RESERVED)):
            if len(taken.numbers) == count:
                return taken
            lease = _lease(store, port, about)
            if lease is None:
                continue
            bound = bind(port)
            if bound is None:  # somebody without a lease has it
                lease.release()
                continue
            taken.numbers += (port,)
            lease.sockets[key_of(port)] = bound.detach()
            taken.lease.add(lease)
    except BaseException:
        taken.release()
        raise
    if len(taken.numbers) == count:
        return taken
    taken.release()
    raise ResourceError(f"there are no {count} free ports on this node.", "See who has them: ss -ltnp")


def _lease(store: Store, port: int, about: Holder) -> Lease | None:
    key = key_of(port)
    return store.attempt([key], lambda held: None if held else [key], about).lease


def bind(port: int) -> socket.socket | None:
    """A socket that keeps ``port`` on all addresses, without listening; None when somebody has it."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            one = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            one.bind((address, port))
            return one
        except OSError as error:
            one.close()
            if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            return None
    return None


def listening() -> set[int]:
    """The ports that somebody listens on, whoever that is."""
    found = set()
    for path in TABLES:
        for line in _read(path).splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == LISTEN:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def candidates(ephemeral: str, reserved: str) -> Iterator[int]:
    """Every port that may be leased, those that are safest first; from the texts of the two files in /proc/sys.

    Where the kernel gives away every port by itself there is no outside: then the bound socket alone protects one.
    """
    words = [int(word) for word in ephemeral.split() if word.isdigit()]
    low, high = words if len(words) == 2 else (32768, 60999)
    kept = set(WELL_KNOWN) | set(_ports(reserved))
    outside = [port for port in range(FIRST, LAST + 1) if not low <= port <= high and port not in kept]
    below = [port for port in range(LOWEST, FIRST) if not low <= port <= high and port not in kept]
    inside = [port for port in range(max(low, FIRST), high + 1) if port not in kept]
    yield from outside
    yield from reversed(below)
    yield from inside


def _ports(text: str) -> Iterator[int]:
    """``80,8000-8010`` as ports."""
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if first.isdigit() and (last.isdigit() or not dash):
            yield from range(int(first), int(last or first) + 1)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
