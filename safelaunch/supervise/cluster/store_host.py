"""Starts torch's store in a helper process, if torchrun's agents have none.

The socket listens before torch is imported, so early clients wait in its queue. If several supervisors run on the host,
the first to bind the port starts the store.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from safelaunch.job import process
from safelaunch.supervise.cluster.store import Address

PROGRAM = Path(__file__).with_name("store_program.py")
ENDS_S = 1.0
BACKLOG = 1024
_DISCARD = 9  # any port, because nothing is sent


class StoreHost:
    def __init__(self, address: Address, python: str, log: Path, tell: Callable[[int], None]) -> None:
        # tell: gets the helper's pid, to end it in any case
        self.address = address
        self._python = python
        self._log = log
        self._tell = tell
        self._pid = 0
        self._lifeline = -1
        self._ended = False
        self._refused = ""

    @property
    def has_started(self) -> bool:
        return self._pid != 0

    def start(self) -> None:
        """Starts the store if this is its host and the port is free. Might have to resolve a host name."""
        if self.has_started or not is_this_host(self.address.host):
            return
        try:
            listening = _listen(self.address)
        except OSError:
            return  # another process listens there
        with listening:
            high = fcntl.fcntl(listening, fcntl.F_DUPFD_CLOEXEC, 10)  # above the descriptors that are replaced
            try:
                self._spawn(high)
            finally:
                os.close(high)

    def _spawn(self, listening: int) -> None:
        ours, self._lifeline = os.pipe()
        env = {k: v for k, v in os.environ.items() if not k.startswith("SAFELAUNCH_")}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        log = os.fspath(self._log)
        try:
            self._pid = os.posix_spawn(
                self._python,
                [self._python, os.fspath(PROGRAM), "localhost" if _is_name(self.address.host) else self.address.host],
                env,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, ours, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                    (os.POSIX_SPAWN_DUP2, listening, 3),
                ],
                setpgroup=0,  # without the terminal's signals
                setsigmask=process.FORWARDED,  # a scheduler sends these to every process of the job
            )
            self._tell(self._pid)
        except OSError as error:
            self._lifeline = _closed(self._lifeline)
            self._refused, self._ended = str(error), True
        finally:
            os.close(ours)

    @property
    def problem(self) -> str:
        if self._pid and not self._ended:
            self._ended = process.reap(self._pid) is not None
        if not self._ended:
            return ""
        try:
            lines = self._log.read_text(errors="replace").split("\n")
        except OSError:
            lines = []
        texts = (line.strip() for line in reversed(lines) if line.strip())
        last = self._refused or next(texts, "no reason given")
        return f"the store that was started for the job's supervisors has ended: {last[:200]}"

    def close(self) -> None:
        if self._lifeline < 0:
            return
        self._lifeline = _closed(self._lifeline)
        deadline = time.monotonic() + ENDS_S
        while not self._ended:
            self._ended = process.reap(self._pid) is not None
            if not self._ended and time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the pid is still the helper's
                deadline += ENDS_S
            time.sleep(0.005)


def is_this_host(host: str) -> bool:
    """Returns whether ``host`` is this machine.

    If it is, packets to its address have that address as their source.
    """
    try:
        addresses = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, place in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                if probe.getsockname()[0] == probe.getpeername()[0]:
                    return True
        except OSError:
            continue
    return False


def _listen(address: Address) -> socket.socket:
    """Listens on an address.

    Given a name, listens on all addresses, because other nodes might resolve the name differently.
    """
    if _is_name(address.host):
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", address.port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)


def _is_name(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return False
    return True


def _closed(descriptor: int) -> int:
    os.close(descriptor)
    return -1
