"""The pure parts of ``scripts/qa/gpu_check.py``: what readings show, how rows are judged, the table."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.qa import gpu_check
from tests.qa.gpu_check import Check, Machine, Measured, NotPossible, Row, problems_of_blocked, table
from tests.qa.gpu_readings import Reading, distinguishing, spreads, state_of


def readings(utilisation: float, memory: float, power: float | None, clock: float | None) -> list[Reading]:
    """Returns 20 readings that scatter by 2 %."""

    def around(value: float | None, number: int) -> float | None:
        return None if value is None else value * (0.98 + 0.002 * number)

    values = {"utilisation_percent": utilisation, "memory_percent": memory, "power_w": power, "sm_clock_mhz": clock}
    return [{name: around(value, number) for name, value in values.items()} for number in range(21)]


IDLE = readings(0, 0, 120, 1980)
COMPUTING = readings(100, 30, 690, 1500)
SPINNING = readings(100, 0, 150, 1980)


def test_spread_is_median_and_range_of_reported_values() -> None:
    seen = spreads(readings(100, 0, 100, None))
    assert str(seen["power_w"]) == "100 [98..102]" and "sm_clock_mhz" not in seen


@pytest.mark.parametrize(
    ("first", "second", "fields"),
    [
        (IDLE, COMPUTING, ("utilisation_percent", "memory_percent", "power_w", "sm_clock_mhz")),
        (COMPUTING, SPINNING, ("memory_percent", "power_w", "sm_clock_mhz")),
        (SPINNING, IDLE, ("utilisation_percent", "power_w")),
        (IDLE, IDLE, ()),
        (readings(0, 0, None, None), readings(0, 0, 700, None), ()),
        (readings(100, 0, 150, 1980), readings(100, 0, 160, 1980), ()),  # apart, but by less than a tenth
        (IDLE[:1], COMPUTING, ()),
    ],
)
def test_fields_distinguish_states_if_medians_and_ranges_differ(
    first: list[Reading], second: list[Reading], fields: tuple[str, ...]
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


def fails(machine: Machine) -> Measured:
    raise ValueError("unexpected")


def is_impossible(machine: Machine) -> Measured:
    raise NotPossible("no such thing")


@pytest.mark.parametrize(
    ("measure", "cuda", "measured", "verdict"),
    [
        (lambda machine: Measured("3"), False, "3", "ok"),
        (lambda machine: Measured("3", ["2 expected"]), False, "3; 2 expected", "differs"),
        (fails, False, "the check failed: ValueError: unexpected", "differs"),
        (is_impossible, False, "no such thing", "not possible here"),
        (fails, True, "torch sees no GPU: built without CUDA", "not possible here"),
    ],
)
def test_check_yields_row_whatever_happens(
    measure: Callable[[Machine], Measured], cuda: bool, measured: str, verdict: gpu_check.Judgement, tmp_path: Path
) -> None:
    here = machine(tmp_path, torch={"gpus": [], "missing": "built without CUDA"})
    assert Check("a", "b", 10, measure, cuda).row(here) == Row("a", "b", measured, verdict)


def test_check_without_time_left_is_not_possible(tmp_path: Path) -> None:
    row = Check("a", "b", 1000, fails, cuda=False).row(machine(tmp_path))
    assert row.verdict == "not possible here" and "s are left, and it needs 1000 s" in row.measured


def test_clocks_stay_untouched_without_option(tmp_path: Path) -> None:
    with pytest.raises(NotPossible, match="run it with --clocks"):
        gpu_check.clocks(machine(tmp_path))


def test_rule_without_readings_of_all_states_is_not_possible(tmp_path: Path) -> None:
    with pytest.raises(NotPossible, match="not every state"):
        gpu_check.rule(machine(tmp_path, values={"states": {"hold": IDLE}}))


def test_rule_differs_if_spinning_uses_much_power(tmp_path: Path) -> None:
    states = {"hold": IDLE, "compute": COMPUTING, "spin": SPINNING, "spin-wide": readings(100, 0, 650, 1980)}
    assert gpu_check.rule(machine(tmp_path, values={"states": states})).problems == ["spin-wide is taken for computing"]


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
            ["suspect, no-rank-stands-out (high) at lines [3]: It waits."],
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
