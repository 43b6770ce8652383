"""What a verdict makes of wrong results that --check-every has found."""

from __future__ import annotations

import pytest
from evidence import in_user, rank
from msgspec.structs import replace

from safelaunch.model import Evidence, Inconsistency, Verdict
from safelaunch.verdict.diagnose import diagnose

APART = Inconsistency(
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
NAN = Inconsistency(
    "non-finite-gradient",
    2.0,
    step=7,
    parameter="4.bias",
    count=6,
    total=6,
    ranks=(1,),
    words="gradients are not finite on rank 1 since step 7, the first is that of 4.bias (6 of 6): one rank diverged",
)
LOSS = Inconsistency("loss", 3.0, step=20, ranks=(0,), words="loss: rank 0 diverged")


def told(*found: Inconsistency, **job: object) -> Verdict:
    evidence = Evidence(
        "dump", 3, tuple(rank(number, in_user(7)) for number in range(3)), inconsistent=found, moving=True
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
def test_each_finding_has_its_cause_ranks_and_first_step(
    found: Inconsistency, cause: str, culprits: list[int], step: int | None
) -> None:
    verdict = told(found)
    assert (verdict.outcome, verdict.cause) == ("dump", cause)
    assert [one.rank for one in verdict.culprits] == culprits and {one.step for one in verdict.culprits} <= {step}
    assert verdict.confidence == ("high" if culprits else "medium")
    assert found.words.lower() in verdict.summary.lower() and not verdict.victims
    assert all(claim.file == "inconsistent.json" for claim in verdict.evidence) and verdict.suggestions


def test_what_one_rank_does_later_may_be_its_device_and_what_was_so_at_first_is_not() -> None:
    later, first = told(APART), told(replace(APART, step=1, since_step=0))
    assert any("device" in one for one in later.suggestions) and not any("device" in one for one in first.suggestions)
    assert any("checkpoint" in one for one in first.suggestions)


def test_a_rank_that_was_not_seen_is_named_in_words() -> None:
    verdict = told(replace(APART, ranks=(7,)), world_size=8)
    assert not verdict.culprits and verdict.cause == "replicas-diverged"
