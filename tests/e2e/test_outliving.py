"""Ranks that raise and never exit: the watch resumes, and the verdict names the line that raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import Job, line_of
from tests.support.paths import PROGRAMS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

SCRIPT = PROGRAMS / "outliving.py"
OWN = ("--stall-timeout=8", "--startup-timeout=8", "--nproc-per-node=3")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "waits", "culprits"),
    [
        pytest.param(("handler", "--raise-on=0,2"), "close", [0, 2], id="exit-handler-of-two-ranks"),
        pytest.param(("handler", "--steps=0"), "close", [1], id="before-the-first-step"),
        pytest.param(("thread",), "thread", [1], id="thread-left-over"),
    ],
)
def test_a_rank_that_raised_and_never_exits_is_named_at_the_line_that_raised(
    tmp_path: Path, words: tuple[str, ...], waits: str, culprits: list[int]
) -> None:
    with Job([*OWN, SCRIPT, "--how", *words], tmp_path) as job:
        result = job.wait()
    verdict = result.verdict
    assert (result.code, verdict["outcome"], verdict["cause"]) == (124, "hang", "rank-exception"), result.said
    assert [one["rank"] for one in verdict["culprits"]] == culprits
    assert {one["frame"]["line"] for one in verdict["culprits"]} == {line_of(SCRIPT, "FAILS: batch")}
    assert "and never exited: it" in verdict["summary"]
    assert f"outliving.py:{line_of(SCRIPT, f'WAITS: {waits}')} (" in verdict["summary"]
    assert result.bundle.problems() == []
    assert result.leftovers == ()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["hook", "finally"])
def test_a_rank_that_never_gets_to_its_exit_is_named_with_its_exception(tmp_path: Path, how: str) -> None:
    with Job([*OWN, SCRIPT, "--how", how], tmp_path) as job:
        result = job.wait()
    verdict = result.verdict
    assert (result.code, verdict["outcome"]) == (124, "hang"), result.said
    assert [one["rank"] for one in verdict["culprits"]] == [1]
    assert verdict["culprits"][0]["frame"]["line"] == line_of(SCRIPT, f"WAITS: {how}")
    told = f"handles IndexError: list index out of range, raised at outliving.py:{line_of(SCRIPT, 'FAILS: batch')}"
    assert told in verdict["summary"]
    assert result.leftovers == ()
