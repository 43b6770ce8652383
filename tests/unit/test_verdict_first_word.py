"""The words of early looks: what ranks do, and never that the job hangs."""

from __future__ import annotations

from safelaunch.model import Place
from safelaunch.verdict.first_word import first_word, first_word_of_active
from tests.support.evidence import Frame, at, behind, in_user, job, rank, waiting, with_culprit

BLOCKED = rank(1, in_user(41, "load"), "pipe", flight=behind())


def test_first_word_from_one_node_reports_its_own_ranks() -> None:
    """One node sees what its ranks do, but not if other ranks wait for them."""
    found = first_word(job(waiting(0), BLOCKED, world=4, missing_ranks=(2, 3)))
    assert found.words.startswith("rank 1 is blocked in I/O at train.py:41 (load)")
    assert (found.cause, found.places, found.common) == ("blocking-io", (Place(1, at(41, "load")),), False)
    victims = first_word(job(waiting(0), waiting(1), world=4, missing_ranks=(2, 3)))
    assert (victims.words, victims.places) == ("ranks 0-1 wait in all_reduce at train.py:50 (train)", ())


def test_first_word_about_importing_rank_is_common() -> None:
    importing = (Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"), *in_user(3))
    assert first_word(with_culprit(rank(1, importing, "pipe"), 2)).common


def test_first_word_about_computing_ranks_names_their_lines() -> None:
    evidence = job(rank(0, in_user(33, "evaluate"), "run"), waiting(1), waiting(2))
    found = first_word_of_active(evidence, [0])
    assert (
        found.words
        == "rank 0 is active at train.py:33 (evaluate), while ranks 1-2 wait in all_reduce at train.py:50 (train)"
    )
    assert (found.cause, found.places) == ("", (Place(0, at(33, "evaluate")),))
    both = first_word_of_active(job(rank(0, in_user(33), "run"), rank(1, in_user(33), "run")), [0, 1])
    assert both.words == "ranks 0-1 are active at train.py:33 (train)"
    assert not first_word_of_active(job(rank(0, (), "run")), [0]).words
