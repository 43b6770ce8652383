"""The pure parts of ``scripts/qa/gpu_check.py``: what readings show, how rows are judged, the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.qa import gpu_check
from tests.qa.gpu_check import Check, Finding, Machine, NotPossible, Row, problems_of_blocked, table
from tests.qa.gpu_readings import CLOCK, FIELDS, MEMORY, POWER, UTILISATION, Reading, distinguishing, spreads, state_of


def readings(utilisation: float, memory: float, power: float | None, clock: float | None) -> list[Reading]:
    """Returns 20 readings that scatter by 2 %."""

    def around(value: float | None, number: int) -> float | None:
        return None if value is None else value * (0.98 + 0.002 * number)

    values = dict(zip(FIELDS, (utilisation, memory, power, clock), strict=True))
    return [{name: around(value, number) for name, value in values.items()} for number in range(21)]


IDLE = readings(0, 0, 120, 1980)
COMPUTING = readings(100, 30, 690, 1500)
SPINNING = readings(100, 0, 150, 1980)


def test_spread_is_median_and_range_of_reported_values() -> None:
    seen = spreads(readings(100, 0, 100, None))
    assert seen[POWER] == pytest.approx((98, 100, 102)) and CLOCK not in seen


@pytest.mark.parametrize(
    ("first", "second", "fields"),
    [
        (IDLE, COMPUTING, [UTILISATION, MEMORY, POWER, CLOCK]),
        (COMPUTING, SPINNING, [MEMORY, POWER, CLOCK]),
        (SPINNING, IDLE, [UTILISATION, POWER]),
        (IDLE, IDLE, []),
        (readings(0, 0, None, None), readings(0, 0, 700, None), []),
        (readings(100, 0, 150, 1980), readings(100, 0, 160, 1980), []),  # apart, but by less than a tenth
        (IDLE[:1], COMPUTING, []),
    ],
)
def test_fields_distinguish_states_if_medians_and_ranges_differ(
    first: list[Reading], second: list[Reading], fields: list[str]
) -> None:
    assert distinguishing(first, second) == fields


@pytest.mark.parametrize(
    ("taken", "state"),
    [
        (IDLE, "idle"),
        (COMPUTING, "computing"),
        (SPINNING, "spinning"),
        (readings(100, 0, 600, 1500), "computing"),  # an endless kernel that only calculates
        (readings(100, 20, 200, 1500), "computing"),
    ],
)
def test_state_follows_from_utilisation_memory_and_power(taken: list[Reading], state: str) -> None:
    assert state_of(spreads(taken), idle_w=120, computing_w=690) == state


def machine(tmp_path: Path, **facts: Any) -> Machine:
    return Machine({}, tmp_path, 0, sample_s=10, clocks=False, until_s=time.monotonic() + 100, **facts)


def fails(machine: Machine) -> Finding:
    raise ValueError("unexpected")


def is_impossible(machine: Machine) -> Finding:
    raise NotPossible("no such thing")


@pytest.mark.parametrize(
    ("measure", "cuda", "measured", "verdict"),
    [
        (lambda machine: ("3", ()), False, "3", "ok"),
        (lambda machine: ("3", ["2 expected"]), False, "3; 2 expected", "differs"),
        (fails, False, "the check failed: ValueError: unexpected", "differs"),
        (is_impossible, False, "no such thing", "not possible here"),
        (fails, True, "torch 2.13.0+cpu sees no GPU", "not possible here"),
    ],
)
def test_check_yields_row_whatever_happens(
    measure: Callable[[Machine], Finding], cuda: bool, measured: str, verdict: str, tmp_path: Path
) -> None:
    here = machine(tmp_path, torch={"gpus": [], "torch": "2.13.0+cpu"})
    assert Check("a", "b", 10, measure, cuda).row(here) == Row("a", "b", measured, verdict)


def test_check_without_time_left_is_not_possible(tmp_path: Path) -> None:
    row = Check("a", "b", 1000, fails, cuda=False).row(machine(tmp_path))
    assert row.verdict == "not possible here" and "s are left, and it needs 1000 s" in row.measured


def test_clocks_stay_untouched_without_option(tmp_path: Path) -> None:
    with pytest.raises(NotPossible, match="run it with --clocks"):
        gpu_check.clocks(machine(tmp_path))


WIDE_COMPUTING = readings(100, 0, 650, 1980)


@pytest.mark.parametrize(
    ("wide", "problems"),
    [
        (SPINNING, []),
        (WIDE_COMPUTING, ["spin-wide is taken for computing"]),
        (COMPUTING, ["compute and spin-wide look the same", "spin-wide is taken for computing"]),
    ],
)
def test_states_differ_if_readings_do_not_reveal_them(wide: list[Reading], problems: list[str]) -> None:
    text, found = gpu_check.judge_states({"hold": IDLE, "compute": COMPUTING, "spin": SPINNING, "spin-wide": wide})
    assert found == problems
    assert "spin: utilisation % 100 [98..102], memory utilisation % 0 [0..0], power W 150" in text
    assert "hold/spin by utilisation %, power W" in text


@pytest.mark.parametrize(
    ("middles", "problems"),
    [
        ((5.0, 5.04, 5.0, 5.04), []),
        ((5.0, 5.2, 5.0, 5.2), ["slower than by chance"]),
        ((5.0, 5.2, 5.3, 5.2), []),  # torchrun differs from itself as much
    ],
)
def test_overhead_is_compared_with_scatter_of_torchrun(middles: tuple[float, ...], problems: list[str]) -> None:
    text, found = gpu_check.judge_overhead([[0.99 * each, each, 1.01 * each] for each in middles])
    assert found == problems and text.startswith("ratio 1.0")


BLOCKED_LINE = next(
    n for n, text in enumerate(gpu_check.PROGRAM.read_text().splitlines(), 1) if "torch.cuda.synchronize()  #" in text
)


def verdict(outcome: str, cause: str = "gpu-kernel", line: int = BLOCKED_LINE) -> dict[str, Any]:
    culprits = [{"rank": 0, "frame": {"line": line}}]
    return {"outcome": outcome, "cause": cause, "confidence": "high", "summary": "It waits.", "culprits": culprits}


@pytest.mark.parametrize(
    ("early_s", "verdicts", "code", "problems"),
    [
        (8.2, [verdict("hang")], 124, []),
        (None, [verdict("hang")], 124, ["no message within 15 s"]),
        (16.0, [], None, ["no message within 15 s", "exit code None, expected 124", "0 bundles"]),
        (
            8.2,
            [verdict("suspect", "no-rank-stands-out", 3)],
            124,
            [f"not hang, gpu-kernel at line {BLOCKED_LINE}: It waits."],
        ),
    ],
)
def test_blocked_job_is_compared_with_expectation(
    early_s: float | None, verdicts: list[dict[str, Any]], code: int | None, problems: list[str]
) -> None:
    assert problems_of_blocked(gpu_check.EXPLICIT, early_s, verdicts, code) == problems


def test_table_wraps_cells_and_separates_rows() -> None:
    rows = [Row("1 a", "x", "y", "ok"), Row("2 b", "more words", "z", "differs")]
    assert table(rows, (5, 4, 8, 9)).splitlines() == [
        "check  expe  measured  verdict",
        "       cted",
        "-----  ----  --------  ---------",
        "1 a    x     y         ok",
        "-----  ----  --------  ---------",
        "2 b    more  z         differs",
        "       word",
        "       s",
        "-----  ----  --------  ---------",
    ]
