"""A thirtieth of the healthy programs that need no further library. The others come on the next days.

``SAFELAUNCH_ALIVE_SEED=N`` (the day of the year by default) chooses the thirtieth; ``scripts/qa/alive.py`` runs all
of them, by default settings.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.qa import alive

SEED = int(os.environ.get("SAFELAUNCH_ALIVE_SEED", time.localtime().tm_yday))
PARTS, AT_ONCE = 30, 3
BARE = [case for case in alive.CASES.values() if not case.needs]
HOW = alive.How(quiet_s=12.0, own=("--stall-floor=5",))


@pytest.mark.torch
@pytest.mark.timeout(900)
def test_none_is_ended_broken_or_accused(tmp_path: Path) -> None:
    """Three at a time, so that they also disturb each other."""
    cases = BARE[SEED % PARTS :: PARTS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda case: alive.run(case, tmp_path / case.name, HOW), cases))
    assert {answer.name: answer.wrong for answer in answers if answer.wrong} == {}
    assert any(not answer.skipped for answer in answers)


UNCOUNTED = (
    "a_child_that_writes_6_kb_a_second",
    "a_selector_and_a_unix_socket",
    "recv_of_datagrams",
    "splices_a_pipe_into_a_file",
)


@pytest.mark.torch
@pytest.mark.timeout(900)
def test_steady_work_that_the_kernel_hardly_counts_is_seen_under_an_explicit_threshold(tmp_path: Path) -> None:
    how = alive.How(quiet_s=40.0, own=("--stall-timeout=15",))  # on a busy machine, the process outside takes seconds
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda name: alive.run(alive.CASES[name], tmp_path / name, how), UNCOUNTED))
    assert {answer.name: answer.wrong or answer.skipped for answer in answers} == dict.fromkeys(UNCOUNTED, "")


def test_there_are_enough_and_of_every_kind() -> None:
    cases = alive.CASES.values()
    assert len(cases) >= 100 and len(BARE) >= 100
    assert sum(case.works for case in cases) >= 30
    assert {case.on for case in cases} == {"one", "all"}
    assert {case.at for case in cases} == {"spell", "start", "whole"}
