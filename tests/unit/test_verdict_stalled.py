"""A look at a job that stands, while one of its ranks computes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from safelaunch.model import Evidence, Progress, Verdict
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rules_live import is_stalled, rhythm_of
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
