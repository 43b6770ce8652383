"""Nodes on one machine: each in a separate network namespace, with its own host name, around one switch.

A link can be cut and mended, or be slow and lossy from the start: a relay in user space carries its frames, because not
every kernel has ``tc netem``. Nothing is visible outside the namespaces.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

DEVICE = "eth0"  # of each node
NETNS = Path("/run/netns")
CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
_T = TypeVar("_T")


@cache
def cannot() -> str:
    """Tries to make such nodes, and returns why it is impossible here; empty if it is possible."""
    if os.getuid():
        return "network namespaces take root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    try:
        with Network(1, Path("/etc/hosts").parent, hosts=Path("/etc/hosts")) as network:
            done = subprocess.run([*network.enter(0), "true"], capture_output=True, text=True, check=False)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return "" if done.returncode == 0 else f"network namespaces cannot be entered here: {done.stderr.strip()}"


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def host(number: int) -> str:
    return f"node{number}"


def meeting(number: int, port: int, *, static: bool = False) -> list[str]:
    """Returns torchrun's options by which this node's agent meets the others, at node 0.

    Args:
        static: Without c10d's rendezvous, which compares wall clocks and numbers the nodes arbitrarily.
    """
    if static:
        return [f"--node-rank={number}", f"--master-addr={address(0)}", f"--master-port={port}"]
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{port}"]


class Network:
    """Network namespaces as nodes.

    Example: ``with Network(2, scratch) as network: Popen([*network.enter(0), "torchrun", ...])``

    Args:
        slow: Number → (seconds of delay each way, share of lost frames).
    """

    def __init__(
        self,
        nodes: int,
        scratch: Path,
        *,
        hosts: Path | None = None,
        slow: dict[int, tuple[float, float]] | None = None,
    ) -> None:
        self._name = f"sl{os.getpid()}-{next(_numbers)}"
        self.nodes = nodes
        self._slow = slow or {}
        self._relays: list[subprocess.Popen[bytes]] = []
        self._hosts = hosts or scratch / "hosts"
        if hosts is None:
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            for number in range(nodes):
                lines += [f"{address(number)} {host(number)}", f"::ffff:{address(number)} {host(number)}"]
            self._hosts.write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _space(self, number: int | None = None) -> str:
        return self._name if number is None else f"{self._name}-{number}"

    def _build(self) -> None:
        switch = self._space()
        _ip("", [f"netns add {name}" for name in (switch, *map(self._space, range(self.nodes)))])
        _ip(switch, ["link add br0 type bridge", "link set br0 up", "link set lo up"])
        for number in range(self.nodes):
            mine, plug = self._space(number), f"n{number}"
            _ip(switch, [f"link add {plug} type veth peer name {DEVICE} netns {mine}", f"link set {plug} up"])
            _ip(mine, [f"addr add {address(number)}/24 dev {DEVICE}", f"link set {DEVICE} up", "link set lo up"])
            if number in self._slow:
                ends = (f"r{number}", f"s{number}")
                _ip(switch, [f"link add {ends[0]} type veth peer name {ends[1]}"])
                _ip(switch, [*(f"link set {end} up" for end in ends), f"link set {ends[1]} master br0"])
                delay_s, loss = self._slow[number]
                words = [sys.executable, Path(__file__).with_name("relay.py"), plug, ends[0], str(delay_s), str(loss)]
                self._relays.append(subprocess.Popen(["nsenter", f"--net={NETNS / switch}", *words]))
            else:
                _ip(switch, [f"link set {plug} master br0"])

    def _remove(self) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for name in (*map(self._space, range(self.nodes)), self._space()):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def enter(self, number: int, *, ahead_s: int = 0) -> list[str]:
        """Returns a command prefix for this node; the process keeps its pid.

        Args:
            ahead_s: By its clocks, this node has been up this much longer than the machine.
        """
        ahead = ["--time", f"--monotonic={ahead_s}", f"--boottime={ahead_s}"] if ahead_s else []
        script = f'hostname {host(number)} && mount --bind {self._hosts} /etc/hosts && exec "$@"'
        entering = ["nsenter", f"--net={NETNS / self._space(number)}", "unshare", "--uts", "--mount", *ahead]
        return [*entering, "bash", "-c", script, "node"]

    def cut(self, number: int) -> None:
        """Takes the node's link down, at its switch: the node itself sees no carrier only as a pulled cable shows."""
        _ip(self._space(), [f"link set n{number} down"])

    def mend(self, number: int) -> None:
        _ip(self._space(), [f"link set n{number} up"])

    def shape(self, number: int, rate: str) -> None:
        """Limits the node's link to this rate (``10mbit``), in both directions."""
        for space, device in ((self._space(number), DEVICE), (self._space(), f"n{number}")):
            words = ["tc", "-n", space, "qdisc", "replace", "dev", device, "root", "tbf"]
            subprocess.run([*words, "rate", rate, "burst", "64kb", "latency", "400ms"], check=True, capture_output=True)

    def on(self, number: int, call: Callable[[], _T]) -> _T:
        """Calls something in a thread that is on this node; sockets made there stay there."""
        found: list[_T] = []
        problems: list[BaseException] = []

        def go() -> None:
            try:
                descriptor = os.open(NETNS / self._space(number), os.O_RDONLY)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(descriptor)
                found.append(call())
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        for problem in problems:
            raise problem
        return found[0]


def _ip(space: str, lines: Sequence[str]) -> None:
    # Raises CalledProcessError at the first command that fails.
    options = ["-n", space] if space else []
    words = ["ip", *options, "-batch", "-"]
    subprocess.run(words, input="\n".join(lines) + "\n", text=True, capture_output=True, check=True)
