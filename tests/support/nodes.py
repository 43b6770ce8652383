"""Simulates two nodes on one host: two safelaunch processes whose agents meet, each with its own ranks and bundles."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from safelaunch.leases import ports
from safelaunch.supervise.cluster.codec import Codec
from safelaunch.supervise.cluster.messages import LeaderPage
from safelaunch.supervise.cluster.rendezvous import _prefix
from safelaunch.supervise.cluster.store import Address, StoreClient
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

ENV = {"GLOO_SOCKET_IFNAME": "lo"}


class TwoNodes:
    """Two nodes of one job: ``with TwoNodes(scratch, own, words) as nodes``. torchrun decides which gets rank 0.

    Args:
        own: Options of safelaunch and torchrun, the same for both nodes.
        ranks: Ranks per node.
        over: Where the agents meet. ``file``: in a file, so the supervisors have no store. ``exec``: likewise, and
            safelaunch doesn't know about torchrun. ``task``: no torchrun; each node is one rank, as under srun.
            ``etcd``: in the etcd at ``endpoint``.
        late: The second node isn't started.
        hosts: Names of the two, in UTS namespaces (needs root).
        bundle_dir: Directory of both, as on a shared disk.
    """

    def __init__(
        self,
        scratch: Path,
        own: Sequence[str],
        words: Sequence[str | Path],
        *,
        ranks: tuple[int, ...] = (2, 2),
        nnodes: str = "2",
        over: Literal["c10d", "static", "file", "exec", "task", "etcd"] = "c10d",
        endpoint: str = "",
        late: bool = False,
        hosts: tuple[str, ...] = (),
        bundle_dir: Path | None = None,
    ) -> None:
        self.scratch = scratch
        self._hosts, self._bundle_dir = hosts, bundle_dir
        self._nnodes, self._over, self._port, self._endpoint = nnodes, over, free_port(), endpoint
        self._own = own
        self._ranks, self._words = ranks, list(words)
        self._store: StoreClient | None = None
        self.jobs: list[Job] = []
        for number in (0,) if late else (0, 1):
            self.start(number)

    def start(self, number: int) -> Job:
        place = self.scratch / f"node-{number}"
        place.mkdir()
        torchrun = [f"--nnodes={self._nnodes}", *self._meet(number), f"--nproc-per-node={self._ranks[number]}"]
        script = [*self._words, f"--scratch={self.scratch}"]
        env = dict(ENV)
        if self._over == "exec":
            launcher = [sys.executable, "-m", "torch.distributed.run"]
            words = ["exec", *self._own, "--", *launcher, *torchrun, *script]
        elif self._over == "task":
            env |= {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": self._nnodes}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
            words = ["exec", *self._own, "--", sys.executable, *script]
        else:
            words = [*self._own, *torchrun, *script]
        interpreter = named(self._hosts[number]) if self._hosts else ()
        job = Job(words, place, env=env, bundle_dir=self._bundle_dir, interpreter=interpreter)
        self.jobs.append(job)
        return job

    def _meet(self, number: int) -> list[str]:
        if self._over == "static":
            where = ["--master-addr=127.0.0.1", f"--master-port={self._port}", "--local-addr=127.0.0.1"]
            return [f"--node-rank={number}", *where]
        if self._over == "etcd":
            return ["--rdzv-backend=etcd-v2", f"--rdzv-endpoint={self._endpoint}", "--local-addr=127.0.0.1"]
        if self._over in ("file", "exec"):
            endpoint = f"--rdzv-endpoint={self.scratch / 'meeting'}"
            return ["--rdzv-backend=c10d", endpoint, "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"]

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()
        for job in self.jobs:
            job.clean_up()

    def page(self) -> LeaderPage:
        """Returns the current page of the supervisors' leader."""
        if self._store is None:
            self._store = StoreClient(Address("127.0.0.1", self._port))
        prefix = _prefix("none")
        data = self._store.get(f"{prefix}/head", deadline_s=30.0)
        return Codec(prefix).decode("head", data, LeaderPage) if data is not None else LeaderPage(0)

    def with_rank(self, rank: int) -> tuple[Job, Job]:
        """Waits until all ranks run, then returns the node with the rank, and the other node."""
        first, second = self.jobs
        want = sum(self._ranks)
        first.until(lambda: len(first.ranks()) + len(second.ranks()) == want, "all ranks")
        return (first, second) if rank in first.ranks() else (second, first)


def named(host: str) -> tuple[str, ...]:
    """An interpreter with safelaunch whose host has another name."""
    under = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host)
    return (*under, sys.executable, "-m", "safelaunch")


APART = PROGRAMS / "apart.py"
TASK = PROGRAMS / "task.py"  # the same as one task of several, which sets the rank variables itself
_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Returns a port that stays reserved: the nodes take a moment to listen on it, and other tests choose ports too."""
    found = next(filter(None, map(ports.bind, iter(lambda: random.randrange(24_000, 32_000), 0))))
    _RESERVED.append(found)
    return int(found.getsockname()[1])


def free_range(count: int, first: int, last: int) -> str:
    """Returns ``count`` ports in a row, as ``FIRST-LAST``. They stay reserved; safelaunch leases none below 20000."""
    while True:
        begin = random.randrange(first, last - count)
        found = [ports.bind(port) for port in range(begin, begin + count)]
        _RESERVED.extend(socket for socket in found if socket is not None)
        if all(found):
            return f"{begin}-{begin + count - 1}"


def feed(job: Job, scratch: Path, *, after_s: float = 0.0) -> None:
    """Ends what keeps rank 0 of ``apart.py --how=starved`` from its core, once it has been noticed, or ``after_s``."""
    starving = scratch / "starving"
    job.until(lambda: starving.exists() and starving.read_text(), "a rank that would compute")
    enough_s = job.seconds + after_s
    job.until(lambda: job.seconds > enough_s if after_s else "no step for" in job.stderr, "some time")
    for pid in starving.read_text().split():
        with suppress(ProcessLookupError):  # the job was ended
            os.kill(int(pid), signal.SIGKILL)
