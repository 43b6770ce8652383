"""Durations in a phase of a script, an option, a variable and a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import safelaunch
from safelaunch.beacon import marks
from safelaunch.beacon.durations import seconds_of
from safelaunch.settings.config import resolve
from safelaunch.settings.options import Settings

GOOD: list[tuple[Any, float]] = [
    (300, 300.0),
    (1.5, 1.5),
    ("300", 300.0),
    ("90s", 90.0),
    ("5m", 300.0),
    (" 2H ", 7200.0),
    (timedelta(minutes=5), 300.0),
    (timedelta(milliseconds=1500), 1.5),
    (Fraction(1, 4), 0.25),
]
BAD: list[Any] = [
    "soon", "", "-5", "5 minutes", "1h30m", -1, True, float("nan"), float("inf"), 10**400, timedelta(0),
    timedelta(seconds=-3), [5], {"s": 5}, 1j, b"5m",
]  # fmt: skip


@pytest.mark.parametrize(("duration", "seconds"), GOOD)
def test_duration_is_converted_to_seconds(duration: Any, seconds: float) -> None:
    assert seconds_of(duration) == seconds


@pytest.mark.parametrize("duration", BAD, ids=repr)
def test_invalid_duration_raises_value_error(duration: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration: a positive number of seconds, 90s, 10m, 2h"):
        seconds_of(duration)


def _from_file(value: Any, place: Path) -> Settings:
    (place / "safelaunch.yaml").write_text(f"stall-timeout: {value}\n")
    return resolve((), {}, place, lambda: None)


PLACES: dict[str, Callable[[Any, Path], Settings]] = {
    "option": lambda value, place: resolve((("--stall-timeout", str(value)),), {}, place, lambda: None),
    "variable": lambda value, place: resolve((), {"SAFELAUNCH_STALL_TIMEOUT": str(value)}, place, lambda: None),
    "file": _from_file,
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("duration", [300, 300.0, "300", "5m"], ids=repr)
def test_option_accepts_duration_from_any_source(where: str, duration: Any, tmp_path: Path) -> None:
    assert PLACES[where](duration, tmp_path).stall_timeout_s == 300.0


@pytest.fixture(params=["outside a run", "inside a run"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the timeouts of entered phases, or None outside a run."""
    entered: list[float] = []
    if request.param == "outside a run":
        monkeypatch.delitem(sys.modules, "_safelaunch_beacon.marks", raising=False)
        return None
    of_rank = SimpleNamespace(
        enter_phase=lambda name, timeout_s: entered.append(timeout_s), leave_phase=lambda before: None
    )
    monkeypatch.setitem(sys.modules, "_safelaunch_beacon.marks", of_rank)
    return entered


@pytest.mark.parametrize(("duration", "seconds"), [*GOOD, (None, 0.0), (0, 0.0), (0.0, 0.0)])
def test_phase_accepts_any_duration(duration: Any, seconds: float, place: Any) -> None:
    with safelaunch.phase("eval", timeout=duration):
        pass
    assert place in (None, [seconds])


@pytest.mark.parametrize("duration", BAD, ids=repr)
def test_phase_with_invalid_timeout_raises_when_called(duration: Any, place: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        safelaunch.phase("eval", timeout=duration)
    assert place in (None, [])


def test_phase_works_as_decorator(place: Any) -> None:
    @safelaunch.phase("eval", timeout="5m")
    def evaluate() -> int:
        return 3

    assert (evaluate(), evaluate()) == (3, 3)
    assert place in (None, [300.0, 300.0])


def test_phase_timeout_is_capped_to_page_word() -> None:
    before = marks.enter_phase("eval", 1e300)
    assert marks.get_phase()[1] == marks.LONGEST_S
    marks.leave_phase(before)
