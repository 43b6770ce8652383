"""Verdicts on wrong results found by --check-every."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from safelaunch.model import Evidence, Progress, Verdict, WrongResult
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rhythm import is_stalled, rhythm_of
from tests.support.evidence import behind, in_user, job, rank, waiting

APART = WrongResult(
    "replicas-diverged",
    1.0,
    step=9,
    since_step=6,
    parameter="2.weight",
    count=1,
    total=6,
    ranks=(2,),
    sides=((0, 1), (2,)),
    words="parameters diverged between steps 6 and 9: rank 2 differs from the others in 2.weight",
)
NAN = WrongResult(
    "non-finite-gradient",
    2.0,
    step=7,
    parameter="4.bias",
    count=6,
    total=6,
    ranks=(1,),
    words="gradients are not finite on rank 1 since step 7, the first is that of 4.bias (6 of 6): one rank diverged",
)
LOSS = WrongResult("loss", 3.0, step=20, ranks=(0,), words="loss: rank 0 diverged")


def told(*found: WrongResult, **job: object) -> Verdict:
    evidence = Evidence(
        "dump", 3, tuple(rank(number, in_user(7)) for number in range(3)), wrong_results=found, moving=True
    )
    return diagnose(replace(evidence, **job))


@pytest.mark.parametrize(
    ("found", "cause", "culprits", "step"),
    [
        (APART, "replicas-diverged", [2], 9),
        (NAN, "non-finite-gradient", [1], 7),
        (LOSS, "loss-diverged", [0], 20),
        (replace(APART, ranks=(), sides=((0,), (1,), (2,))), "replicas-diverged", [], None),
        (replace(NAN, ranks=(0, 1, 2)), "non-finite-gradient", [], None),
    ],
)
def test_wrong_result_gives_cause_ranks_and_first_step(
    found: WrongResult, cause: str, culprits: list[int], step: int | None
) -> None:
    verdict = told(found)
    assert (verdict.outcome, verdict.cause) == ("dump", cause)
    assert [one.rank for one in verdict.culprits] == culprits and {one.step for one in verdict.culprits} <= {step}
    assert verdict.confidence == ("high" if culprits else "medium")
    assert found.words.lower() in verdict.summary.lower() and not verdict.victims
    assert all(claim.file == "inconsistent.json" for claim in verdict.evidence) and verdict.suggestions


# --- a look at a job that stands, while one of its ranks computes -----------------------------------------------------

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


def test_usual_step_without_history_comes_from_step_counts() -> None:
    page = {"history": (), "optimizer_steps": (60,), "first_step_ns": STEP_NS, "last_step_ns": 60 * STEP_NS}
    assert rhythm_of(looked_at(41.0, **page)).usual_s == pytest.approx(0.1)
    resumed = {**page, "optimizer_steps": (), "step": 10_060}
    assert rhythm_of(looked_at(41.0, **resumed)).usual_s == 0.0, "the script's count says nothing of this run's"
    assert is_stalled(looked_at(41.0, **resumed)), "and then the time alone counts"


def test_rhythm_without_a_beacon_page_is_empty() -> None:
    evidence = Evidence("dump", 1, (), moving=True, stall_s=0.0)
    assert (is_stalled(evidence), rhythm_of(evidence).words) == (False, "")
    assert Progress(0, 0, 1, 0, 1, 1, "torch").history == ()
