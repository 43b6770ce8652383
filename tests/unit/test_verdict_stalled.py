"""A look at a job that stands, while one of its ranks computes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from safelaunch.model import Evidence, Progress, Verdict
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.stalled import is_stalled, rhythm_of
from tests.unit.evidence import behind, in_user, job, rank, waiting

STEP_NS = 100_000_000


def looked_at(stall_s: float, *, moving: bool = True, computes: bool = True, **page: Any) -> Evidence:
    """A dump of two ranks, whose steps take 0.1 s: one waits for the other, which computes."""
    marks = tuple((number * STEP_NS, number) for number in range(1, 61))
    known = {"history": marks, "first_step_ns": STEP_NS, "last_step_ns": 60 * STEP_NS, **page}
    one = rank(1, in_user(7), "run" if computes else "sleep", flight=behind())
    ranks = [waiting(0), one]
    pages = [msgspec.structs.replace(each.progress, **known) for each in ranks if each.progress is not None]
    ranks = [msgspec.structs.replace(each, progress=page) for each, page in zip(ranks, pages, strict=True)]
    return job(*ranks, outcome="dump", moving=moving, stall_s=stall_s)


def told(evidence: Evidence) -> Verdict:
    return diagnose(evidence)


def test_a_job_that_stands_while_a_rank_computes() -> None:
    verdict = told(looked_at(41.0))
    assert (verdict.cause, [one.rank for one in verdict.culprits], verdict.victims) == ("busy-loop", [1], "0")
    assert verdict.summary.startswith("No step for 41 s (usual 0.1 s): rank 1 spins in train.py:7 (train)")
    assert "while rank 0 waits in all_reduce" in verdict.summary
    assert verdict.summary.endswith(": slow or endless, a dump cannot tell.")
    assert verdict.confidence == "medium"
    assert "A process computes, and one look cannot distinguish slow from endless." in verdict.doubts


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (looked_at(0.3), "within a few steps"),
        (looked_at(4.0), "a short step may wait for a disk"),
        (looked_at(0.0), "collectives advanced between the looks"),
        (looked_at(41.0, phase="eval"), "an announced phase"),
        (looked_at(41.0, paused=True), "an announced pause"),
        (looked_at(41.0, history=((0, 1), (10**10, 2), (2 * 10**10, 3))), "steps of 10 s"),
    ],
)
def test_what_is_no_stand(evidence: Evidence, why: str) -> None:
    assert told(evidence).cause == "slow-not-stuck", why


def test_a_hang_and_a_dump_in_which_nothing_computes_stay_as_sure() -> None:
    still = told(looked_at(41.0, moving=False, computes=False))
    assert (still.cause, still.confidence) == ("stuck-in-user-code", "high")
    assert still.summary.startswith("Rank 1 is asleep")
    hang = told(msgspec.structs.replace(looked_at(41.0), outcome="hang"))
    assert hang.summary.startswith("Rank 1 spins")


def test_a_job_that_has_made_no_step() -> None:
    evidence = looked_at(60.0, step=None, history=(), first_step_ns=0, last_step_ns=0)
    assert told(evidence).summary.startswith("No step yet, 60 s on: rank 1 spins in train.py:7")


def test_a_pause_as_long_as_earlier_ones_is_told_beside_them() -> None:
    """An evaluation of a minute, earlier: the longest step is told, and who reads it decides."""
    marks = (*((number * STEP_NS, number) for number in range(1, 30)), (10**11, 30), (10**11 + STEP_NS, 31))
    verdict = told(looked_at(41.0, history=marks))
    assert verdict.summary.startswith("No step for 41 s (usual 0.1 s, longest 97 s): rank 1 spins")


def test_the_usual_step_without_a_history() -> None:
    page = {"history": (), "optimizer_steps": (60,), "first_step_ns": STEP_NS, "last_step_ns": 60 * STEP_NS}
    assert rhythm_of(looked_at(41.0, **page)).usual_s == pytest.approx(0.1)
    resumed = {**page, "optimizer_steps": (), "step": 10_060}
    assert rhythm_of(looked_at(41.0, **resumed)).usual_s == 0.0, "the script's count says nothing of this run's"
    assert is_stalled(looked_at(41.0, **resumed)), "and then the time alone counts"


def test_no_page_at_all() -> None:
    evidence = Evidence("dump", 1, (), moving=True, stall_s=0.0)
    assert (is_stalled(evidence), rhythm_of(evidence).words) == (False, "")
    assert Progress(0, 0, 1, 0, 1, 1, "torch").history == ()


def test_a_rank_that_stands_while_others_step_is_told_and_not_accused() -> None:
    ranks = [rank(n, in_user(7), "run" if n != 1 else "sleep") for n in range(3)]
    steps = [9 if n == 1 else 600 for n in range(3)]
    pages = [
        msgspec.structs.replace(one.progress, step=step, last_step_ns=step * STEP_NS, first_step_ns=STEP_NS)
        for one, step in zip(ranks, steps, strict=True)
        if one.progress is not None
    ]
    seen = [msgspec.structs.replace(one, progress=page) for one, page in zip(ranks, pages, strict=True)]
    verdict = told(job(*seen, outcome="dump", moving=True, stall_s=0.1))
    assert (verdict.cause, verdict.culprits, verdict.confidence) == ("slow-not-stuck", (), "medium")
    assert verdict.summary.endswith("but rank 1 has made no step for 59 s: rank 1 is asleep in train.py:7 (train).")
    announced = [msgspec.structs.replace(one, phase="eval") for one in pages]
    ranks = [msgspec.structs.replace(one, progress=page) for one, page in zip(ranks, announced, strict=True)]
    assert told(job(*ranks, outcome="dump", moving=True, stall_s=0.1)).summary.endswith("nothing is stuck.")
