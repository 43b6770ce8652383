"""The short history of a rank's steps."""

from __future__ import annotations

from itertools import pairwise

from safelaunch.supervise.watch.strides import MOST_POINTS, Strides


def test_few_steps_are_all_kept() -> None:
    strides = Strides()
    for step in range(1, 20):
        strides.saw(step * 1000, step)
        strides.saw(step * 1000, step)  # the page is read more often than it changes
    assert strides.points() == tuple((step * 1000, step) for step in range(1, 20))


def test_a_long_run_stays_small_evenly_spread_and_ends_with_its_newest_step() -> None:
    strides = Strides()
    for step in range(1, 100_001):
        strides.saw(step, step)
        assert len(strides.points()) <= MOST_POINTS + 1
    points = strides.points()
    assert points[0] == (1, 1) and points[-1] == (100_000, 100_000)
    assert len(points) > MOST_POINTS // 3
    gaps = [later[1] - earlier[1] for earlier, later in pairwise(points[1:-1])]
    assert max(gaps) <= 2 * min(gaps)


def test_nothing_seen() -> None:
    assert Strides().points() == ()
