"""The guardian: a tiny process that ends the job when the supervisor is killed.

It is made before the job, so that there is no moment without it. It knows the job by pid and start time: the agent, of
which it is told first, orphans, of which it is told as well, the workers that the agent wrote down, and all that it has
seen below these, looking every few seconds, because a rank that is killed together with the supervisor can no longer be
asked for its children. It acts on these and on nothing else, and only when the pipe to the supervisor closes without
the word that all is well.

The kernel's own parent-death signal is no substitute: it would end a rank before its children are known.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safelaunch.launch import process
from safelaunch.launch.paths import discard_unfinished
from safelaunch.launch.process import ProcessId

WELL = b"well"
GRACE_S = 5.0
LEAVES_S = 1.0  # for the guardian to end when all is well
LOOK_EVERY_S = 2.0
LEAST_IDLE = 500  # on a node with many processes a look takes longer, and comes less often: 0.2 % of a core


@dataclass(frozen=True, slots=True)
class Guardian:
    """The supervisor's end of it: the guardian's pid, and the pipe whose closing it waits for."""

    pid: int
    pipe: int

    def adopt(self, member: ProcessId) -> None:
        """Tells the guardian of a process of the job: first the agent, then those that it could not find from there."""
        self._write(f"{member.pid} {member.start_ticks}\n".encode())

    def dismiss(self) -> None:
        """The job has ended as it should: what it left behind on purpose stays."""
        self._write(WELL + b"\n")
        os.close(self.pipe)
        if not self._has_gone():  # stopped, by whatever: the end of the job does not wait for it
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet: the number is still its own
            self._has_gone()

    def _has_gone(self) -> bool:
        """Reaps it, waiting a moment; whether it is gone."""
        deadline = time.monotonic() + LEAVES_S
        try:
            while not os.waitpid(self.pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        except ChildProcessError:
            return True  # killed and reaped before
        return True

    def _write(self, data: bytes) -> None:
        try:
            os.write(self.pipe, data)
        except OSError:
            return  # the guardian was killed: what is left is the signal that torchrun gets at our death


def start(events: Path, run_dir: Path, leases: Sequence[int] = ()) -> Guardian:
    """Forks the guardian. To be called while this process has one thread. Raises OSError when that is not possible.

    ``leases``: descriptors that it shares, so that what the job was given is not free before it has ended the job.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return Guardian(pid, write)
    try:
        os.close(write)
        _guard(read, events, run_dir, leases)
    finally:
        os._exit(0)


def _guard(pipe: int, events: Path, run_dir: Path, leases: Sequence[int]) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # nobody's pipe may stay open because of us
        os.dup2(null, descriptor)
    keep = _keep_only([pipe, *leases])
    known: set[ProcessId] = set()
    agent: ProcessId | None = None
    rest = b""
    next_look_s = time.monotonic() + 0.2
    while True:
        if select.select([keep], [], [], max(0.0, next_look_s - time.monotonic()))[0]:
            chunk = os.read(keep, 65536)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            if WELL in lines:
                return
            members = parse(line.decode("ascii", "replace") for line in lines)
            known.update(members)
            agent = agent or next(iter(members), None)
        if (begin := time.monotonic()) >= next_look_s:
            known = _job(known, events)
            now = time.monotonic()
            next_look_s = now + max(LOOK_EVERY_S, LEAST_IDLE * (now - begin))
    if agent is not None:
        process.end_all(agent, lambda: tuple(_job(known, events)), grace_s=GRACE_S)
    from shutil import rmtree

    rmtree(run_dir, ignore_errors=True)
    discard_unfinished(run_dir.name)


def _keep_only(descriptors: Sequence[int]) -> int:
    """Closes everything from 3 on but ``descriptors``; returns the first of them. They get numbers from 3 on."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3 + len(descriptors)) for descriptor in descriptors]
    for number, descriptor in enumerate(high, start=3):
        os.dup2(descriptor, number)
    os.closerange(3 + len(descriptors), 65536)
    return 3


def _job(known: set[ProcessId], events: Path) -> set[ProcessId]:
    """Every living process of the job: those known before or told of, and all below them."""
    roots = known | set(parse(_workers(events)))
    alive = {root for root in roots if root.is_alive()}
    return alive | set(process.descendants(root.pid for root in alive))


def parse(lines: Iterable[str]) -> list[ProcessId]:
    """``pid start_ticks`` lines; others are passed over."""
    found = []
    for line in lines:
        words = line.split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            found.append(ProcessId(int(words[0]), int(words[1])))
    return found


def _workers(events: Path) -> list[str]:
    """The workers of all attempts, as the agent wrote them down when it started them."""
    import json

    lines = []
    try:
        text = events.read_text("utf-8", "replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            event = json.loads(line)
            lines += [f"{pid} {ticks}" for _, pid, ticks in event.get("workers", {}).values()]
        except (ValueError, AttributeError, TypeError):
            continue  # a line that was being written when everything was killed
    return lines
