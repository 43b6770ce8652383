"""Healthy jobs that look hung to one of their nodes, or whose ranks get no core.

An attack gets through if safelaunch ends such a job, or blames a rank.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.qa.attacks.attack import Attack
from tests.support.jobs import Job
from tests.support.nodes import APART, TwoNodes, feed

PATIENCE_S = 400.0
EXPLICIT = ("--stall-timeout=3", "--max-stall=300")
AUTO = ("--stall-floor=3", "--max-stall=300")

# Each with the ranks per node. Rank 0 makes all others wait; they might poll for it.
SHAPES = tuple(
    (f"rank 0 {what}, {first}+{second} ranks, {name}", (first, second), own, words)
    for what, words in (
        ("evaluates", ("--poller=-1",)),
        ("evaluates, one polls", ("--poller=1",)),
        ("evaluates, the last polls", ("--poller=last",)),
    )
    for first, second in ((1, 1), (2, 2), (1, 3))
    for name, own in (("explicit", EXPLICIT), ("auto", AUTO))
)


def attacks(count: int, dice: random.Random) -> Iterator[Attack]:
    """Returns every shape, and starved and throttled ranks: at most ``count``."""
    found = [Attack(name, partial(_shape, ranks, own, words)) for name, ranks, own, words in SHAPES]
    found += [Attack(f"starved by nice, {own[0]}", partial(_starved_by_nice, own)) for own in (EXPLICIT, AUTO)]
    found += [
        Attack(f"throttled to {part:.0%} of a core", partial(_throttled, part), _cannot_throttle)
        for part in (0.002, 0.01, 0.05)
    ]
    dice.shuffle(found)
    yield from found[:count]


def _shape(ranks: tuple[int, int], own: tuple[str, ...], words: tuple[str, ...], scratch: Path) -> str:
    # Under auto the rhythm is known only after some steps.
    steps = ["--after=40", "--steps=60"] if own is AUTO else ["--after=5", "--steps=20"]
    mine = [word.replace("last", str(sum(ranks) - 1)) for word in words]
    with TwoNodes(scratch, own, [APART, "--how=evaluates", "--seconds=25", *steps, *mine], ranks=ranks) as nodes:
        return _wrong(nodes.jobs, sum(ranks))


def _starved_by_nice(own: tuple[str, ...], scratch: Path) -> str:
    after = 40 if own is AUTO else 5
    words = [*own, "--nproc-per-node=2", APART, "--how=starved", f"--after={after}", f"--steps={after + 3}"]
    with Job([*words, f"--scratch={scratch}"], scratch) as job:
        feed(job, scratch, after_s=20.0)
        return _wrong([job], 2)


def _throttled(part: float, scratch: Path) -> str:
    """Rank 0 evaluates while its control group gives it almost no CPU."""
    words = [*EXPLICIT, "--nproc-per-node=2", APART, "--how=evaluates", "--seconds=30", "--steps=8"]
    with Job([*words, f"--scratch={scratch}"], scratch) as job, _control_group() as group:
        job.until((scratch / "evaluating").exists, "an evaluation")
        group.limit(part)
        group.add(job.ranks()[0])
        time.sleep(20.0)
        group.limit(None)
        return _wrong([job], 2)


def _wrong(jobs: list[Job], trainers: int) -> str:
    results = [job.wait(PATIENCE_S) for job in jobs]
    trained = sum(line.endswith(" trained") for job in jobs for line in job.stdout.splitlines())
    wrong = [f"exit code {result.code}" for result in results if result.code]
    wrong += [f"{trained} of {trainers} ranks trained to the end"] if trained != trainers else []
    verdicts = [bundle.verdict for result in results for bundle in result.bundles]
    wrong += [f"a bundle of a {verdict['outcome']}" for verdict in verdicts if verdict["outcome"] != "dump"]
    wrong += [f"named: {culprit['reason']}" for verdict in verdicts for culprit in verdict["culprits"]]
    wrong += [f"{len(result.bundles)} bundles" for result in results if len(result.bundles) > 1]
    return "; ".join([*wrong, *(left for result in results for left in result.leftovers)])


# --- a private control group ------------------------------------------------------------------------------------------


class _Group:
    """A control group with the CPU controller, v1 or v2."""

    PERIOD_US = 500_000

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir()

    def limit(self, part: float | None) -> None:
        quota = None if part is None else max(1000, int(part * self.PERIOD_US))
        if (self._place / "cpu.max").exists():
            (self._place / "cpu.max").write_text(f"{'max' if quota is None else quota} {self.PERIOD_US}")
        else:
            (self._place / "cpu.cfs_period_us").write_text(str(self.PERIOD_US))
            (self._place / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))

    def add(self, pid: int) -> None:
        (self._place / "cgroup.procs").write_text(str(pid))


def _root() -> Path | None:
    # In this directory, a control group with a CPU limit can be created.
    unified = Path("/sys/fs/cgroup")
    if (unified / "cgroup.controllers").exists():
        return unified if "cpu" in (unified / "cgroup.subtree_control").read_text().split() else None
    return unified / "cpu" if (unified / "cpu" / "cgroup.procs").exists() else None


def _cannot_throttle() -> str:
    root = _root()
    return "" if root is not None and os.access(root, os.W_OK) else "no control group can be made here (root only)"


@contextmanager
def _control_group() -> Iterator[_Group]:
    root = _root()
    assert root is not None
    place = root / f"attack-{os.getpid()}-{time.monotonic_ns()}"
    group = _Group(place)
    try:
        yield group
    finally:
        for pid in (place / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(pid)
        place.rmdir()
