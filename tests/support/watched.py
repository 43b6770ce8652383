"""A watch over ranks whose steps the test sets."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import msgspec

from safelaunch.job.process import identify
from safelaunch.model import Progress
from safelaunch.supervise.watch import stall
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.rhythm import ThresholdBounds
from safelaunch.supervise.watch.stall import Policy

POLICY = Policy(stall_s=600.0, startup_s=1800.0, max_stall_s=1800.0)


class Ranks:
    """Stands in for the roster: pages whose steps the test sets."""

    def __init__(self, count: int) -> None:
        self.attempt, self.starts, self.workers, self.agent_page, self.world_size = 0, 0, {}, None, 0
        me = identify(os.getpid())
        assert me is not None
        self.progress = {
            n: Progress(n, n, count, 0, me.pid, me.start_ticks, "torch", claimed_ns=int(5e9)) for n in range(count)
        }

    def refresh(self) -> list[Any]:
        return []

    def damaged(self) -> tuple[int, ...]:
        return ()

    def pages(self) -> dict[int, Any]:
        return {n: SimpleNamespace(read=lambda p=p: p, acknowledged=False) for n, p in self.progress.items()}

    def step(self, rank: int, step: int, at_s: float, **fields: Any) -> None:
        changed = {"step": step, "last_step_ns": int(at_s * 1e9), **fields}
        self.progress[rank] = msgspec.structs.replace(self.progress[rank], **changed)


BOUNDS = ThresholdBounds(floor_s=5.0)


def watched(bounds: ThresholdBounds | None = BOUNDS) -> tuple[Watch, Ranks]:
    ranks = Ranks(2)
    return Watch(ranks, POLICY, 10.0, bounds), ranks  # type: ignore[arg-type]


def train(
    watch: Watch, ranks: Ranks, steps: int, length_s: float = 1.0, behind: int = 0
) -> tuple[float, list[stall.StallEvent]]:
    """Steps of both ranks, a tick for each; rank 1 lags ``behind`` steps in count, not in time."""
    now, events = 10.0, []
    for step in range(1, steps + 1):
        now += length_s
        ranks.step(0, step, now)
        ranks.step(1, max(1, step - behind), now)
        events.append(watch.tick(now + 0.1).event)
    return now, [event for event in events if event is not None]
