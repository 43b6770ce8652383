"""Slows a rank down from outside of its job: other processes, signals, quotas, a slow disk or link, swap.

An actor is called at the onset. It calls ``Scene.begin`` once the cause is there, and returns after ``Scene.ended`` is
set, having removed it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.qa.slow_cases import Case
from tests.support import cgroups, netns
from tests.support.jobs import Job

SPINS = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"
PAUSE_S = 0.1
HOGS = 2
BURST_S, BURSTS_EVERY_S = 8.0, 45.0
NEIGHBOUR_S = 5.0
SWAP_MIB = 64


class Scene:
    """A running job and the cause that is to slow it down."""

    def __init__(self, case: Case, scratch: Path, onset_s: float) -> None:
        self.case, self.scratch, self.onset_s = case, scratch, onset_s
        self.jobs: list[Job] = []
        self.network: netns.Network | None = None
        self.ended = threading.Event()
        self.problem = ""

    @property
    def pid(self) -> int:
        """Process of the planted rank."""
        return next(pid for job in self.jobs for rank, pid in job.ranks().items() if rank == self.case.rank)

    def last_step(self) -> int:
        lines = (self.scratch / "steps.txt").read_text().splitlines()
        return int(lines[-1].split()[0])

    def begin(self) -> None:
        """Records the onset."""
        (self.scratch / "onset.json").write_text(json.dumps({"step": self.last_step() + 1, "time": time.time()}))

    @contextmanager
    def acting(self, actor: Callable[[Scene], None] | None) -> Iterator[None]:
        """Calls the actor at the onset, in a thread. The job has made its first step."""
        if actor is None:
            yield
            return

        def act() -> None:
            if self.ended.wait(self.onset_s):
                return
            try:
                actor(self)
            except (OSError, StopIteration, subprocess.CalledProcessError) as error:
                self.problem = f"{self.case.outside}: {error!r}"

        thread = threading.Thread(target=act)
        thread.start()
        try:
            yield
        finally:
            self.ended.set()
            thread.join()


@contextmanager
def _spinning(cores: list[int]) -> Iterator[None]:
    # Each computes on its core, in its own session: the scheduler shares a core among sessions (autogroups).
    processes = []
    try:
        for core in cores:
            process = subprocess.Popen([sys.executable, "-c", SPINS], start_new_session=True)
            processes.append(process)
            os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def hog(scene: Scene) -> None:
    core = min(os.sched_getaffinity(scene.pid))
    with _spinning([core] * HOGS):
        scene.begin()
        scene.ended.wait()


def neighbour(scene: Scene) -> None:
    """Takes the core of a rank for a few seconds."""
    with _spinning([min(os.sched_getaffinity(scene.pid))]):
        scene.ended.wait(NEIGHBOUR_S)


def bursts(scene: Scene) -> None:
    """Takes all cores now and then."""
    while not scene.ended.is_set():
        with _spinning(sorted(os.sched_getaffinity(0))):
            scene.ended.wait(BURST_S)
        scene.ended.wait(BURSTS_EVERY_S)


def stops(scene: Scene) -> None:
    """Stops the rank for ``case.extra`` seconds at a time."""
    pid, dice = scene.pid, random.Random(0)
    scene.begin()
    with suppress(ProcessLookupError):
        while not scene.ended.wait(dice.uniform(0.3, 0.5)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(scene.case.extra)
            os.kill(pid, signal.SIGCONT)


def quota(scene: Scene) -> None:
    with cgroups.Limits("cpu") as limits:
        limits.cpu(scene.case.limit)
        limits.add(scene.pid)
        scene.begin()
        scene.ended.wait()


def disk(scene: Scene) -> None:
    with cgroups.Limits("io") as limits:
        limits.disk(scene.scratch, per_s=int(scene.case.limit))
        limits.add(scene.pid)
        scene.begin()
        scene.ended.wait()


def link(scene: Scene) -> None:
    """Limits what the node of the planted rank sends, and what it receives, to ``case.limit`` Mbit/s."""
    network, number = scene.network, scene.case.rank // (scene.case.ranks // scene.case.nodes)
    assert network is not None
    network.shape(number, f"{scene.case.limit:g}mbit")
    scene.begin()
    scene.ended.wait()


def swap(scene: Scene) -> None:
    """Adds swap: the program asks the kernel to write some of its memory there."""
    file = scene.scratch / "swap"
    with file.open("wb") as blocks:
        file.chmod(0o600)
        for _ in range(SWAP_MIB):
            blocks.write(bytes(1 << 20))
    subprocess.run(["mkswap", file], check=True, capture_output=True)
    subprocess.run(["swapon", file], check=True, capture_output=True)
    try:
        scene.begin()
        scene.ended.wait()
    finally:
        subprocess.run(["swapoff", file], check=True, capture_output=True)


ACTORS: dict[str, Callable[[Scene], None]] = {
    function.__name__: function for function in (hog, neighbour, bursts, stops, quota, disk, link, swap)
}
CONTROLLERS = {"quota": "cpu", "disk": "io"}
TAKE_ROOT = {"swap", "link"}
