"""The watch learns its threshold from the pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec

from safelaunch.job.process import identify
from safelaunch.model import Progress
from safelaunch.supervise.watch import stall
from safelaunch.supervise.watch.job import Watch
from safelaunch.supervise.watch.rhythm import Bounds

POLICY = stall.Policy(stall_s=600.0, startup_s=1800.0, max_stall_s=1800.0)


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


BOUNDS = Bounds(floor_s=5.0)


def watched(bounds: Bounds | None = BOUNDS) -> tuple[Watch, Ranks]:
    ranks = Ranks(2)
    return Watch(ranks, POLICY, 10.0, bounds), ranks  # type: ignore[arg-type]


def train(
    watch: Watch, ranks: Ranks, steps: int, length_s: float = 1.0, behind: int = 0
) -> tuple[float, list[stall.Event]]:
    """Steps of both ranks, a tick for each; rank 1 lags ``behind`` steps in count, not in time."""
    now, events = 10.0, []
    for step in range(1, steps + 1):
        now += length_s
        ranks.step(0, step, now)
        ranks.step(1, max(1, step - behind), now)
        events.append(watch.tick(now + 0.1).event)
    return now, [event for event in events if event is not None]


def wait(watch: Watch, now: float, seconds: float) -> Iterator[tuple[float, stall.Event]]:
    for tick in range(int(seconds * 4)):
        event = watch.tick(now + 0.1 + tick / 4).event
        if event is not None:
            yield tick / 4, event


def test_a_freeze_of_quick_steps_is_suspected_at_the_floor() -> None:
    watch, ranks = watched()
    now, events = train(watch, ranks, 100)
    assert events == []
    delay_s, event = next(wait(watch, now, 30))
    assert (event.kind, 4.9 <= delay_s <= 5.6) == ("suspect", True)
    assert event.stall is not None and event.stall.threshold_s == 5.0
    assert "floor" in watch.threshold().why


def test_steps_that_were_made_before_the_first_look_count() -> None:
    """A quick job makes a hundred in the time between two looks."""
    watch, ranks = watched()
    for rank in (0, 1):
        ranks.step(rank, 100, 10.4, first_step_ns=int(10.1e9))
    delay_s, event = next(wait(watch, 10.4, 700))
    assert (event.kind, 4.9 <= delay_s <= 5.6) == ("suspect", True)


def test_of_a_job_that_was_excused_they_do_not_count() -> None:
    watch, ranks = watched()
    for rank in (0, 1):
        ranks.step(rank, 100, 10.4, first_step_ns=int(10.1e9), paused=True)
    watch.tick(10.5)
    assert not watch._learned.knows_enough


def test_before_enough_steps_it_waits_for_ten_minutes() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 10)
    delay_s, _ = next(wait(watch, now, 700))
    assert delay_s >= 599


def test_slow_steps_raise_it() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 60, length_s=4.0)
    delay_s, _ = next(wait(watch, now, 60))
    assert 9 <= delay_s <= 12, "2.5 x 4 s, and the bucket's width"


def test_the_cap_comes_before_what_was_learned() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 60, length_s=4.0)
    watch.cap_s = 7.0
    delay_s, _ = next(wait(watch, now, 60))
    assert 6.5 <= delay_s <= 8


def test_an_explicit_threshold_is_not_learned() -> None:
    watch, ranks = watched(None)
    now, _ = train(watch, ranks, 100)
    assert next(wait(watch, now, 700))[0] >= 599


def test_a_pause_is_not_learned_and_ranks_may_count_differently() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 60, behind=30)
    ranks.step(0, 60, now, paused=True)
    assert list(wait(watch, now, 300)) == []
    ranks.step(0, 61, now + 300, paused=False)
    ranks.step(1, 31, now + 300)
    watch.tick(now + 300.1)
    assert watch.threshold().seconds == 5.0


# --- patience ---------------------------------------------------------------------------------------------------------
