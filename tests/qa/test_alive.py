"""Some of the healthy programs of ``python -m scripts.qa alive``, with a short spell."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.qa import alive

AT_ONCE = 3
BARE = [name for name, case in alive.CASES.items() if not case.needs]
HOW = alive.How(quiet_s=12.0, own=("--stall-floor=5",))
# Cases most easily taken for a hang: no rank computes, only a process outside the job can end the wait, and only a
# child process computes.
IN_CI = ("all_sleep", "a_file_lock_held_outside", "check_output_of_a_spinning_child")


def run_together(names: Sequence[str], how: alive.How, tmp_path: Path) -> list[alive.Answer]:
    """Runs three at a time, so that they also disturb each other."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda name: alive.run(alive.CASES[name], tmp_path / name, how), names))


@pytest.mark.torch
@pytest.mark.timeout(900)
def test_healthy_programs_are_never_ended_broken_or_blamed(tmp_path: Path) -> None:
    answers = run_together(IN_CI, HOW, tmp_path)
    assert {answer.name: answer.wrong for answer in answers if answer.wrong} == {}
    assert not [answer.name for answer in answers if answer.skipped]


UNCOUNTED = (
    "a_child_that_writes_6_kb_a_second",
    "a_selector_and_a_unix_socket",
    "recv_of_datagrams",
    "splices_a_pipe_into_a_file",
)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.timeout(900)
def test_steady_work_that_the_kernel_hardly_counts_is_seen_under_an_explicit_threshold(tmp_path: Path) -> None:
    how = alive.How(quiet_s=40.0, own=("--stall-timeout=15",))  # on a busy machine, the process outside takes seconds
    answers = run_together(UNCOUNTED, how, tmp_path)
    assert {answer.name: answer.wrong or answer.skipped for answer in answers} == dict.fromkeys(UNCOUNTED, "")


def test_there_are_enough_and_of_every_kind() -> None:
    cases = alive.CASES.values()
    assert len(cases) >= 100 and len(BARE) >= 100
    assert sum(case.works for case in cases) >= 30
    assert {case.on for case in cases} == {"one", "all"}
    assert {case.at for case in cases} == {"spell", "start", "whole"}
