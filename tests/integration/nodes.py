"""Simulates two nodes on one host: two safelaunch processes whose agents meet, each with its own ranks and bundles."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jobs import PROGRAMS, Job

from safelaunch.leases import ports

ENV = {"GLOO_SOCKET_IFNAME": "lo"}


class TwoNodes:
    """``with TwoNodes(scratch, own, program, words) as nodes``. torchrun decides which node gets rank 0.

    ``ranks``: ranks per node. ``own``: options of safelaunch and torchrun, the same for both nodes. ``over``: how the
    agents meet; ``file``: in a file, so that the supervisors have no store in which to talk. ``late``: the second one
    is not started.
    """

    def __init__(
        self,
        scratch: Path,
        own: Sequence[str],
        words: Sequence[str | Path],
        *,
        ranks: tuple[int, int] = (2, 2),
        nnodes: str = "2",
        over: Literal["c10d", "static", "file"] = "c10d",
        late: bool = False,
    ) -> None:
        self.scratch = scratch
        self._nnodes, self._over = nnodes, over
        # Reserved, because the nodes take a moment to listen on it, and other tests choose ports meanwhile.
        self._reserved = next(filter(None, map(ports.bind, iter(lambda: random.randrange(24_000, 32_000), 0))))
        self._port = self._reserved.getsockname()[1]
        self._own = own
        self._ranks, self._words = ranks, list(words)
        self.jobs: list[Job] = []
        for number in (0,) if late else (0, 1):
            self.start(number)

    def start(self, number: int) -> Job:
        place = self.scratch / f"node-{number}"
        place.mkdir()
        words = [
            *self._own,
            f"--nnodes={self._nnodes}",
            *self._meet(number),
            f"--nproc-per-node={self._ranks[number]}",
            *self._words,
        ]
        job = Job([*words, f"--scratch={self.scratch}"], place, env=ENV)
        self.jobs.append(job)
        return job

    def _meet(self, number: int) -> list[str]:
        if self._over == "static":
            return [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={self._port}"]
        if self._over == "file":
            endpoint = f"--rdzv-endpoint={self.scratch / 'meeting'}"
            return ["--rdzv-backend=c10d", endpoint, "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"]

    def __enter__(self) -> TwoNodes:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            job.clean_up()
        self._reserved.close()

    def with_rank(self, rank: int) -> tuple[Job, Job]:
        """Waits until all ranks run, then returns the node with the rank, and the other node."""
        first, second = self.jobs
        want = sum(self._ranks)
        first.until(lambda: len(first.ranks()) + len(second.ranks()) == want, "all ranks")
        return (first, second) if rank in first.ranks() else (second, first)


APART = PROGRAMS / "apart.py"
