"""Shares of time by cause, from counters: ``readings._shares``."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from safelaunch.addons.slow import readings
from safelaunch.addons.slow.readings import _shares, _Totals, measure
from safelaunch.capture.look import Target
from safelaunch.job.process import identify

START = _Totals(100.0, 10.0, 5.0, 1000, 50.0, 1.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("queued_s", "throttled_s", "quota", "queue"),
    [
        (3.0, 0.0, 0.0, 0.3),
        (3.0, 2.0, 0.2, 0.1),
        (3.0, 30.0, 0.3, 0.0),  # of a group with threads on many CPUs
        (3.0, -50.0, 0.0, 0.3),  # it has moved to another group
    ],
)
def test_throttled_time_is_part_of_the_time_in_the_run_queue(
    queued_s: float, throttled_s: float, quota: float, queue: float
) -> None:
    end = replace(START, at_s=110.0, queued_s=5.0 + queued_s, throttled_s=50.0 + throttled_s, stolen_s=0.5)
    shares = _shares(START, end, Counter())
    assert shares == {"cpu-steal": 0.0, "cpu-queue": pytest.approx(queue), "cpu-quota": pytest.approx(quota)}


def test_kernel_that_does_not_count_the_run_queue_still_tells_throttled_time() -> None:
    start = replace(START, queued_s=0.0)
    shares = _shares(start, replace(start, at_s=110.0, throttled_s=52.0), Counter())
    assert shares == {"cpu-steal": 0.0, "cpu-quota": pytest.approx(0.2)}


def test_request_that_got_no_answer_does_not_shift_later_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [True]  # by a measurement whose second request failed

    def post(*args: object, **options: object) -> bytes:
        begun[0] = not begun[0]
        return b"{}" if begun[0] else b'{"collecting_s": 0.0}'

    monkeypatch.setattr(readings, "post_to_python", post)
    here, stop = identify(os.getpid()), threading.Event()
    assert here is not None
    stop.set()
    (reading,) = measure([Target(0, 0, here.pid, here.start_ticks, socket=Path("socket"))], "a", stop)
    assert reading.shares["garbage-collection"] == 0.0


@pytest.mark.parametrize(
    ("faults", "slices", "memory", "disk", "queue"),
    [
        (0, 1000, 0.0, 0.1, 0.2),
        (2000, 2000, 0.3, 0.0, 0.0),  # it got a CPU once for each fault
        (1000, 4000, 0.15, 0.0, 0.15),
        (5, 1000, 0.001, 0.1, 0.199),
    ],
)
def test_rank_that_queues_after_each_page_fault_waits_for_memory(
    faults: int, slices: int, memory: float, disk: float, queue: float
) -> None:
    end = replace(START, at_s=110.0, queued_s=7.0, slices=START.slices + slices, major_faults=faults)
    shares = _shares(START, end, Counter({"S": 90, "D": 10}))
    expected = {"memory": memory, "disk": disk, "cpu-queue": queue}
    assert {name: shares[name] for name in expected} == pytest.approx(expected)
