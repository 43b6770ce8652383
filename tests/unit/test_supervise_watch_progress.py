"""The watch over the ranks' pages: learned thresholds, unseen ranks and restarts."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from safelaunch.beacon import layout, page
from safelaunch.capture.counters import Counters
from safelaunch.capture.pages import Roster
from safelaunch.job.paths import RunPaths
from safelaunch.model import Gpu
from safelaunch.supervise.watch import stall
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.stall import Policy
from safelaunch.supervise.watch.strides import MOST_POINTS, Strides
from tests.support.watched import train, watched


def wait(watch: Watch, now: float, seconds: float) -> Iterator[tuple[float, stall.StallEvent]]:
    for tick in range(int(seconds * 4)):
        event = watch.tick(now + 0.1 + tick / 4).event
        if event is not None:
            yield tick / 4, event


def test_freeze_of_fast_steps_is_suspected_at_the_floor() -> None:
    watch, ranks = watched()
    now, events = train(watch, ranks, 100)
    assert events == []
    delay_s, event = next(wait(watch, now, 30))
    assert (event.kind, 4.9 <= delay_s <= 5.6) == ("suspect", True)
    assert event.stall is not None and event.stall.threshold_s == 5.0
    assert "floor" in watch.threshold().why


def test_steps_before_the_first_tick_count() -> None:
    """A quick job makes a hundred in the time between two looks."""
    watch, ranks = watched()
    for rank in (0, 1):
        ranks.step(rank, 100, 10.4, first_step_ns=int(10.1e9))
    delay_s, event = next(wait(watch, 10.4, 700))
    assert (event.kind, 4.9 <= delay_s <= 5.6) == ("suspect", True)


def test_steps_of_excused_job_before_first_tick_are_ignored() -> None:
    watch, ranks = watched()
    for rank in (0, 1):
        ranks.step(rank, 100, 10.4, first_step_ns=int(10.1e9), paused=True)
    watch.tick(10.5)
    assert not watch._step_rhythm.knows_enough


def test_threshold_before_enough_steps_is_ten_minutes() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 10)
    delay_s, _ = next(wait(watch, now, 700))
    assert delay_s >= 599


def test_slow_steps_raise_the_threshold() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 60, length_s=4.0)
    delay_s, _ = next(wait(watch, now, 60))
    assert 9 <= delay_s <= 12, "2.5 x 4 s, and the bucket's width"


def test_cap_overrides_the_learned_threshold() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 60, length_s=4.0)
    watch.cap_s = 7.0
    delay_s, _ = next(wait(watch, now, 60))
    assert 6.5 <= delay_s <= 8


def test_explicit_threshold_is_not_learned() -> None:
    watch, ranks = watched(None)
    now, _ = train(watch, ranks, 100)
    assert next(wait(watch, now, 700))[0] >= 599


def test_pause_is_not_learned_although_ranks_count_differently() -> None:
    watch, ranks = watched()
    now, _ = train(watch, ranks, 60, behind=30)
    ranks.step(0, 60, now, paused=True)
    assert list(wait(watch, now, 300)) == []
    ranks.step(0, 61, now + 300, paused=False)
    ranks.step(1, 31, now + 300)
    watch.tick(now + 300.1)
    assert watch.threshold().seconds == 5.0


# --- one node of several, and restarted ranks -------------------------------------------------------------------------


IMPATIENT = Policy(stall_s=5.0, startup_s=60.0, max_stall_s=60.0)


def test_gpu_reading_is_usual_once_every_rank_has_stepped_since() -> None:
    watch, ranks = watched()
    train(watch, ranks, 5)
    computes, spins = (Gpu(0, power_w=600),), (Gpu(0, power_w=190),)
    assert watch.usual_gpus == ()
    watch.keep_gpus(computes, 15.5)
    assert watch.usual_gpus == ()
    ranks.step(0, 6, 16.0)
    watch.tick(16.0)
    assert watch.usual_gpus == ()
    ranks.step(1, 6, 16.0)
    watch.tick(16.0)
    assert watch.usual_gpus == computes
    for at_s in (600.0, 1200.0, 1800.0):
        watch.keep_gpus(spins, at_s)
    assert watch.usual_gpus == computes


def test_link_counters_are_kept_for_one_quiet_time() -> None:
    watch, ranks = watched()
    train(watch, ranks, 5)
    assert watch.quiet_links is None
    watch.keep_links({"eth0": {"rx_errors": 3}})
    watch.tick(17.0)
    assert watch.quiet_links == {"eth0": {"rx_errors": 3}}
    for rank in (0, 1):
        ranks.step(rank, 6, 18.0)
    watch.tick(18.0)
    assert watch.quiet_links is None


class Node:
    """A run directory that ranks and an agent write into, and the watch over it."""

    def __init__(self, root: Path) -> None:
        self.run = RunPaths(root)
        self.run.pages.mkdir()
        self.watch = Watch(Roster(self.run), IMPATIENT, 0.0)
        self._kept: list[object] = []

    def rank(self, rank: int, world: int, *, ticks: int = 100, last_step_s: float = 0.0, steps: int = 0) -> None:
        """Creates a rank's page; ``ticks`` is the start time of its process."""
        name = layout.page_name(0, rank, os.getpid() if ticks == 100 else os.getpid() + ticks)
        mapped, words = page.create(os.fspath(self.run.pages / name))
        words[layout.PID] = int(name.rpartition("-")[2])
        words[layout.RANK], words[layout.WORLD_SIZE], words[layout.START_TICKS] = rank, world, ticks
        words[layout.LAST_STEP_NS], words[layout.USER_STEPS] = int(last_step_s * 1e9), steps
        words[layout.FIRST_STEP_NS] = 1_000_000_000 * bool(steps)
        words[layout.READY] = layout.MAGIC
        self._kept += [mapped, words]

    def starts(self, *ranks: int, ticks: int = 100, attempt: int = 0, world: int = 0, pid: int = 0) -> None:
        workers = {str(rank): [rank, pid or 4000 + rank, ticks] for rank in ranks}
        self.says("started", attempt=attempt, workers=workers, world_size=world)

    def says(self, event: str, **values: Any) -> None:
        with self.run.agent_events.open("a") as file:
            file.write(json.dumps({"event": event, "time_unix_s": 1.0, **values}) + "\n")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("workers", "pages", "world", "unseen"),
    [((0, 1), (0, 1), 2, ()), ((2, 3), (2, 3), 4, (0, 1)), ((1,), (1,), 4, (0, 2, 3)), ((0, 1), (0,), 2, ())],
    ids=["one node", "two nodes", "nodes of different size", "a rank without a beacon"],
)
def test_unseen_ranks_run_on_other_nodes(
    node: Node, workers: tuple[int, ...], pages: tuple[int, ...], world: int, unseen: tuple[int, ...]
) -> None:
    node.starts(*workers)
    for rank in pages:
        node.rank(rank, world)
    node.watch.tick(1.0)
    assert node.watch.unseen == unseen


def test_restart_with_new_numbers_leaves_no_old_rank(node: Node) -> None:
    """A node has joined: torchrun renumbers the ranks and starts them again, and its count of restarts stays 0."""
    node.starts(0, 1)
    node.rank(0, 2)
    node.rank(1, 2)
    node.watch.tick(1.0)
    assert (node.watch.unseen, set(node.watch.last_progress)) == ((), {0, 1})
    node.starts(2, 3, ticks=900)
    node.rank(2, 4, ticks=900)
    node.watch.tick(2.0)
    node.rank(3, 4, ticks=901)
    node.watch.tick(3.0)
    assert (node.watch.unseen, set(node.watch.last_progress)) == ((0, 1), {2, 3})
    assert node.watch.state.base_s == 2.0, "its clock starts again"


@pytest.mark.parametrize(
    ("steps", "last_step_s", "now", "quiet"),
    [(0, 0.0, 50.0, 0.0), (11, 11.0, 20.0, 9.0), (11, 11.0, 12.5, 0.0), (3, 41.0, 81.0, 0.0)],
    ids=["no step", "long ago", "just now", "as long as a step takes"],
)
def test_quiet_time_is_reported_only_if_unusual(
    node: Node, steps: int, last_step_s: float, now: float, quiet: float
) -> None:
    node.rank(0, 1, steps=steps, last_step_s=last_step_s)
    node.watch.tick(now)
    assert node.watch.quiet_s(now) == quiet


def test_ranks_without_a_page_raise_no_suspicion(node: Node) -> None:
    """A rank can be stopped before it has a page, or run under ``python -I``."""
    node.starts(1, world=2, pid=os.getpid())
    glances = [node.watch.tick(now) for now in (1.0, 100.0, 1000.0)]
    assert (node.watch.own_ranks, node.watch.unseen, node.watch.world_size) == ((1,), (0,), 2)
    assert [glance.event for glance in glances if glance.event and glance.event.kind == "suspect"] == []


def test_current_stall_includes_ranks_without_a_page(node: Node) -> None:
    node.starts(1, world=2, pid=os.getpid())
    node.watch.tick(1.0)
    stall = node.watch.current_stall(80.0)
    assert stall is not None
    assert (stall.ranks, stall.stalled_s, stall.before_first_step) == ((1,), 79.0, True)


def test_current_stall_excludes_ended_ranks_without_a_page(node: Node) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    node.starts(1, world=2, pid=ended.pid)
    node.watch.tick(1.0)
    assert node.watch.current_stall(80.0) is None


def test_agent_error_is_kept_until_the_next_start(node: Node) -> None:
    node.starts(0)
    node.says("failing", error="ConnectionError: the store is gone")
    node.says("closed")
    node.watch.tick(1.0)
    assert node.watch.roster.agent_error == "ConnectionError: the store is gone"
    node.starts(0)
    node.watch.tick(2.0)
    assert node.watch.roster.agent_error == ""


def test_absurd_world_size_is_ignored(node: Node) -> None:
    node.starts(0, world=1 << 40)
    node.watch.tick(1.0)
    assert node.watch.world_size == 1


def test_stop_of_supervisor_itself_is_remembered_briefly(node: Node) -> None:
    node.starts(0)
    for now in (1.0, 2.0, 45.0, 46.0):
        node.watch.tick(now)
    assert (node.watch.missed_s(46.0), node.watch.missed_s(100.0)) == (43.0, 0.0)


def test_quiet_counters_belong_to_their_quiet_time(node: Node) -> None:
    """Also before the first step, when the newest collective is the latest progress."""
    node.starts(0, 1)
    node.rank(0, 2)
    node.rank(1, 2)
    begin_s = time.monotonic()
    node.watch.tick(begin_s)
    before, after = Counters(begin_s, 0, {}), Counters(begin_s + 3.5, 0, {})
    node.watch.keep_quiet_counters(before)
    node.watch.tick(begin_s + 1.0)
    assert node.watch.quiet is before
    node.watch.note_collectives({0: 1, 1: 1}, begin_s + 3.0)
    node.watch.tick(begin_s + 3.5)
    assert node.watch.quiet is None
    node.watch.keep_quiet_counters(after)
    assert node.watch.quiet is after


def test_strides_keep_all_of_few_steps() -> None:
    strides = Strides()
    for step in range(1, 20):
        strides.add(step * 1000, step)
        strides.add(step * 1000, step)  # the page is read more often than it changes
    assert strides.points() == tuple((step * 1000, step) for step in range(1, 20))


def test_strides_of_long_run_are_few_and_even() -> None:
    strides = Strides()
    for step in range(1, 100_001):
        strides.add(step, step)
        assert len(strides.points()) <= MOST_POINTS + 1
    points = strides.points()
    assert points[0] == (1, 1) and points[-1] == (100_000, 100_000)
    assert len(points) > MOST_POINTS // 3
    gaps = [later[1] - earlier[1] for earlier, later in pairwise(points[1:-1])]
    assert max(gaps) <= 2 * min(gaps)


def test_strides_without_steps_are_empty() -> None:
    assert Strides().points() == ()


def test_held_watch_raises_suspicions_only_after_the_hold() -> None:
    watch, ranks = watched(None)
    ranks.step(0, 5, 10.0)
    ranks.step(1, 5, 10.0)
    watch.tick(12.0)
    events = []
    for now in range(16, 700, 4):
        glance = watch.tick(float(now))
        if now < 640:
            watch.hold(640.0)
            assert watch.state.status is stall.Status.WATCHING
        events += [(now, glance.event.kind)] if glance.event is not None and now >= 640 else []
    assert events == [(640, "suspect")]


def test_returned_functions_are_judged_once_all_have_returned() -> None:
    """Until then, one that has returned waits for the others; afterwards, its process should end."""
    watch, ranks = watched(None)
    for number in (0, 1):
        ranks.step(number, 5, 10.0)
    watch.tick(12.0)
    ranks.step(0, 5, 10.0, returned_ns=int(13e9))
    quiet = [watch.tick(now / 1.0).event for now in range(16, 600, 4)]
    assert quiet == [None] * len(quiet)
    ranks.step(1, 900, 600.0, returned_ns=int(600e9))
    events = [(now, event.kind) for now in range(600, 1300, 4) if (event := watch.tick(float(now)).event) is not None]
    assert [kind for _, kind in events] == ["suspect"] and 1200 <= events[0][0] < 1230
