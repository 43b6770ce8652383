"""The words of early looks: what ranks do, and never that the job hangs."""

from __future__ import annotations

import re

import msgspec
import pytest
from evidence import Frame, at, behind, in_user, job, rank, waiting, with_culprit

from safelaunch.model import EarlyLook, Evidence, Place, RankEvidence
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.first_word import of_active, of_still

ACCUSES = re.compile(r"\b(hangs?|hung|stuck|fault|culprit|blame)\b")
ASLEEP = rank(1, in_user(7, "load"), "sleep", flight=behind())
BLOCKED = rank(1, in_user(41, "load"), "pipe", flight=behind())


@pytest.mark.parametrize(
    ("evidence", "words", "ranks"),
    [
        (
            with_culprit(ASLEEP, 3),
            "rank 1 is asleep in train.py:7 (load), while ranks 0,2 wait in all_reduce at train.py:50 (train)",
            [1],
        ),
        (
            with_culprit(BLOCKED, 2),
            "rank 1 is blocked in I/O at train.py:41 (load) (read on pipe:[1]), while rank 0 waits in all_reduce at",
            [1],
        ),
        (job(waiting(0), waiting(1)), "", []),
    ],
)
def test_of_ranks_that_stand_still(evidence: Evidence, words: str, ranks: list[int]) -> None:
    found = of_still(evidence)
    assert found.words.startswith(words) and found.words
    assert [place.rank for place in found.places] == ranks
    assert found.common is not bool(ranks)
    assert not ACCUSES.search(found.words) and not found.words.endswith(".")


def test_of_one_node_of_several() -> None:
    """Whether anybody waits for what a rank does is not seen from here; what it does is."""
    found = of_still(job(waiting(0), BLOCKED, world=4, missing_ranks=(2, 3)))
    assert found.words.startswith("rank 1 is blocked in I/O at train.py:41 (load)")
    assert (found.cause, found.places, found.common) == ("blocking-io", (Place(1, at(41, "load")),), False)
    victims = of_still(job(waiting(0), waiting(1), world=4, missing_ranks=(2, 3)))
    assert (victims.words, victims.places) == ("ranks 0-1 wait in all_reduce at train.py:50 (train)", ())


def test_a_start_that_imports_is_as_common_as_any() -> None:
    importing = (Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"), *in_user(3))
    assert of_still(with_culprit(rank(1, importing, "pipe"), 2)).common


def test_of_ranks_that_compute() -> None:
    evidence = job(rank(0, in_user(33, "evaluate"), "run"), waiting(1), waiting(2))
    found = of_active(evidence, [0])
    assert (
        found.words
        == "rank 0 is active at train.py:33 (evaluate), while ranks 1-2 wait in all_reduce at train.py:50 (train)"
    )
    assert (found.cause, found.places) == ("", (Place(0, at(33, "evaluate")),))
    both = of_active(job(rank(0, in_user(33), "run"), rank(1, in_user(33), "run")), [0, 1])
    assert both.words == "ranks 0-1 are active at train.py:33 (train)"
    assert not of_active(job(rank(0, (), "run")), [0]).words


# --- in the verdict ---------------------------------------------------------------------------------------------------


def early(quiet_s: float, one: RankEvidence, line: int, **fields: object) -> EarlyLook:
    return EarlyLook(1e9, quiet_s, places=(Place(one.rank, at(line, "load")),), **fields)  # type: ignore[arg-type]


def claims(evidence: Evidence, *looks: EarlyLook) -> list[str]:
    verdict = diagnose(msgspec.structs.replace(evidence, early=looks))
    return [claim.claim for claim in verdict.evidence if claim.file == "early.json"]


@pytest.mark.parametrize(
    "look",
    [
        early(7, ASLEEP, 8),
        early(7, rank(2), 7),
        early(7, ASLEEP, 7, movement="active"),
        early(7, ASLEEP, 7, lasted_s=30.0),
    ],
)
def test_another_place_another_rank_and_other_quiet_are_no_witness(look: EarlyLook) -> None:
    assert claims(with_culprit(ASLEEP, 3), look) == []
