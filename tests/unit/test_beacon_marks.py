"""Phases and pauses as the page shows them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from safelaunch.beacon import layout, marks


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[memoryview]:
    """Page of this process; its clock advances by a second with each reading."""
    buffer = bytearray(layout.SIZE)
    monkeypatch.setattr(marks, "_bytes", buffer)
    monkeypatch.setattr(marks, "_words", memoryview(buffer).cast("Q"))
    ticks = iter(range(1, 1000))
    monkeypatch.setattr(marks, "monotonic_ns", lambda: next(ticks) * 10**9)
    yield marks._words


def marked_s(words: memoryview) -> int:
    return int(words[layout.MARKED_NS] // 10**9)


def test_leave_phase_restores_outer_phase(words: memoryview) -> None:
    marks.enter_phase("eval", 90)
    outer = marks.get_phase()
    before = marks.enter_phase("batch", 5)
    inner = marks.get_phase()
    entered_s = marked_s(words)
    marks.leave_phase(before)
    assert outer[:2] == ("eval", 90.0) and inner[:2] == ("batch", 5.0) and inner[2] > outer[2]
    assert marks.get_phase() == outer
    assert marked_s(words) > entered_s, "leaving a phase counts as progress"


def test_phase_without_timeout_inherits_outer_timeout(words: memoryview) -> None:
    marks.enter_phase("eval", 90)
    outer = marks.get_phase()
    marks.enter_phase("batch", 0)
    assert marks.get_phase() == ("batch", *outer[1:])


def test_get_phase_is_empty_outside_phases(words: memoryview) -> None:
    marks.leave_phase(marks.enter_phase("eval", 90))
    assert marks.get_phase()[:2] == ("", 0.0)


def test_pause_restarts_clock_of_outer_phases(words: memoryview) -> None:
    marks.enter_phase("eval", 90)
    before = marks.enter_phase("batch", 5)
    marks.pause(+1)
    marks.pause(-1)
    resumed_s = marked_s(words)
    marks.leave_phase(before)
    name, timeout_s, since_ns = marks.get_phase()
    assert (name, timeout_s, since_ns // 10**9) == ("eval", 90.0, resumed_s)
