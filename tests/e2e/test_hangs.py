"""A sixteenth of the hang zoo's classes, for real: torchrun, gloo, py-spy. The others, and other culprits, come later.

``SAFELAUNCH_ZOO_SEED=N`` (the day of the year by default) chooses the sixteenth and the culprits, which stand in the
tests' names. ``--whole`` runs every class; ``scripts/qa/zoo.py`` runs every class with every rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qa import zoo
from tests.support.jobs import Job

# One group: whoever waits for a specimen has started those that follow.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240), pytest.mark.xdist_group("hangs")]

SEED = int(os.environ.get("SAFELAUNCH_ZOO_SEED", time.localtime().tm_yday))
QUICK = ("all-gather", "loader-asleep")
CASES = [
    pytest.param(
        specimen,
        (SEED + number) % specimen.ranks,
        id=f"{specimen.name}-{(SEED + number) % specimen.ranks}",
        marks=[pytest.mark.quick]
        if specimen.name in QUICK
        else [pytest.mark.rare]
        if specimen.rare or (SEED + number) % 16
        else [],
    )
    for number, specimen in enumerate(zoo.SPECIMENS)
]


class Ahead:
    """Runs the next specimens while one is waited for: most of a hang is waiting."""

    AT_ONCE = 3

    def __init__(self, cases: list[tuple[zoo.Specimen, int]], root: Path) -> None:
        self._cases = cases
        self._root = root
        self._jobs: dict[str, Job] = {}

    def job(self, specimen: zoo.Specimen, culprit: int) -> Job:
        at = self._cases.index((specimen, culprit))
        for following in self._cases[at : at + self.AT_ONCE]:
            self._start(*following)
        return self._jobs[specimen.name]

    def _start(self, specimen: zoo.Specimen, culprit: int) -> None:
        if specimen.name not in self._jobs and not specimen.unavailable():
            scratch = self._root / specimen.name
            scratch.mkdir()
            self._jobs[specimen.name] = zoo.start(specimen, culprit, scratch)

    def clean_up(self) -> None:
        for job in self._jobs.values():
            job.clean_up()


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = [(item.callspec.params["specimen"], item.callspec.params["culprit"]) for item in here]
    runs = Ahead(cases, tmp_path_factory.mktemp("zoo"))
    yield runs
    runs.clean_up()


@pytest.mark.parametrize(("specimen", "culprit"), CASES)
def test_the_verdict_on_a_hang(specimen: zoo.Specimen, culprit: int, ahead: Ahead) -> None:
    if specimen.unavailable():
        pytest.skip(specimen.unavailable())
    job = ahead.job(specimen, culprit)
    try:
        result = job.wait()
        assert zoo.judge(specimen, culprit, result) == [], f"{result.verdict['summary']}\n{result.stderr}"
    finally:
        job.clean_up()
