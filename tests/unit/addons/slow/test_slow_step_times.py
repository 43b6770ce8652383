"""From which step on the steps take longer: ``step_times.StepTimes``."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from safelaunch.addons.slow.step_times import StepTimes


def after(durations_s: Iterable[float], times: StepTimes | None = None, *, per_tick: int = 1) -> StepTimes:
    """Returns the step times after these steps; the supervisor sees every ``per_tick``-th."""
    times = times if times is not None else StepTimes()
    now, step = times.points[-1] if times.points else (100.0, 0)
    for duration_s in durations_s:
        now, step = now + duration_s, step + 1
        if step % per_tick == 0:
            times = times.after(now, step)
    return times


@pytest.mark.parametrize("per_tick", [1, 4])
@pytest.mark.parametrize("growth", [1.15, 1.3, 3.0])
def test_onset_is_the_first_slow_step_to_within_a_window(growth: float, per_tick: int) -> None:
    times = after([0.2] * 400 + [0.2 * growth] * 200, per_tick=per_tick)
    assert times.onset is not None
    assert 350 <= times.onset.step <= 450
    assert times.onset.before_s == pytest.approx(0.2) and times.onset.now_s == pytest.approx(0.2 * growth)


def test_end_of_a_slow_time_is_noticed_and_another_one_is_a_new_onset() -> None:
    slow = after([0.2] * 400 + [0.3] * 200)
    normal = after([0.2] * 200, slow)
    again = after([0.3] * 200, normal)
    assert slow.onset is not None and normal.onset is None and again.onset is not None
    assert again.onset.step > 700


def test_scatter_is_no_onset() -> None:
    dice = random.Random(5)
    for _ in range(20):
        assert after(dice.uniform(0.1, 0.5) for _ in range(2000)).onset is None


def test_rare_long_steps_are_no_onset() -> None:
    assert after(30.0 if number % 100 == 99 else 0.2 for number in range(2000)).onset is None


def test_one_slow_window_is_no_onset() -> None:
    assert after([0.2] * 400 + [0.5] * 16 + [0.2] * 200).onset is None


def test_warm_up_is_not_the_usual_pace() -> None:
    times = after([1.0] * 8 + [0.2] * 400)
    assert times.onset is None and times.usual_s == pytest.approx(0.2)


def test_interruption_belongs_to_no_window() -> None:
    times = after([0.2] * 400)
    (end_s, step) = times.points[-1]
    times = times.interrupted().after(end_s + 600.0, step + 1)
    assert after([0.2] * 100, times).onset is None


def test_restart_forgets_the_pace() -> None:
    times = after([0.2] * 400).after(1000.0, 1)
    assert times.usual_s == 0.0
