"""The hang zoo, for real: torchrun, gloo, py-spy. CI runs one class of each mechanism, ``--whole`` runs all of them.

The tests' names have the rank that is the culprit; ``python -m scripts.qa zoo`` makes it each rank in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qa import zoo
from tests.support.jobs import Job

# One group: whoever waits for a specimen has started those that follow.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(240), pytest.mark.xdist_group("hangs")]

QUICK = ("all-gather", "loader-asleep")
IN_CI = {
    *QUICK,
    "asleep",  # in Python
    "read-fifo",  # in the kernel
    "gil",  # in native code, with the GIL
    "busy-python",  # in a loop that computes
    "stops-itself",  # stopped by a signal
    "lock-order",  # two threads of a rank
    "init-asleep",  # before the first collective
    "recv-recv",  # each waits for the other
    "group-order",  # the groups of two ranks in opposite orders
    "uneven-barrier",  # one has more batches than the others
    "swallowed",  # an exception that the script caught: Python 3.12
}


def marks(specimen: zoo.Specimen) -> list[pytest.MarkDecorator]:
    if specimen.name in QUICK:
        return [pytest.mark.quick]
    in_ci = specimen.name in IN_CI and not specimen.unavailable()
    return [] if in_ci else [pytest.mark.nightly]


CASES = [
    pytest.param(
        specimen, number % specimen.ranks, id=f"{specimen.name}-{number % specimen.ranks}", marks=marks(specimen)
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
