"""Conditions on the rank in the source, and what they add to a verdict."""

from __future__ import annotations

import pytest
from evidence import C10D, SCRIPT, at, entry, in_c10d, in_user, job, past, rank, record, waiting
from msgspec import structs

from safelaunch.model import Frame, HandledException, RankEvidence, RankException, RankExit, Verdict
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding, annotated, waiting_culprits
from safelaunch.verdict.guarding import guards
from safelaunch.verdict.rank_state import Facts


def verdict_of(source: str, *ranks: int, odd: int = 41, op: str = "all_gather", world: int = 2) -> Verdict:
    """``ranks`` wait in ``op`` at line ``odd``, the others in all_reduce at line 50. ``source`` begins at line 40."""
    sides = [rank(n, in_c10d(op, odd)) if n in ranks else waiting(n, flight=None) for n in range(world)]
    text = "\n" * 39 + source
    return diagnose(job(*sides), lambda path: text if path == SCRIPT else None)


def test_one_against_one_the_call_that_a_condition_keeps_the_other_from_is_at_fault() -> None:
    verdict = verdict_of("if rank == 1:\n    gather()\n", 1)
    assert [c.rank for c in verdict.culprits] == [1] and "either side" not in verdict.summary
    assert verdict.confidence != "high"  # the other may have left out what was to meet it
    assert "Rank 0 never reaches train.py:41 (train) because of `if rank == 1 (train.py:40)`." in verdict.summary
    assert any(claim.file == "ranks/1/stack.txt" and "never reach" in claim.claim for claim in verdict.evidence)


def test_one_against_one_behind_either_side_of_a_condition() -> None:
    source = "if rank == 1:\n    gather()\nelse:\n" + "    step()\n" * 8
    verdict = verdict_of(source, 1)
    assert [c.rank for c in verdict.culprits] == [0, 1] and "either side" in verdict.summary


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "if rank in (1, 2):\n    gather()\n",
            "Ranks 0,3 never reach train.py:41 (train) because of `if rank in (1, 2) (train.py:40)`",
        ),
        (
            "if rank and flag:\n    gather()\n",
            "Rank 0 never reaches train.py:41 (train) because of `if rank and flag (train.py:40)`",
        ),
    ],
)
def test_a_condition_that_several_ranks_share(source: str, says: str) -> None:
    verdict = verdict_of(source, 1, 2, world=4)
    assert says in verdict.summary


def test_a_condition_that_asks_for_more_than_the_rank_is_evidence_alone() -> None:
    verdict = verdict_of("if mesh.get_local_rank() == 1:\n    gather()\n", 1, 2, world=4)
    claim = "Ranks 1-2 come to train.py:41 (train) under `if mesh.get_local_rank() == 1 (train.py:40)`"
    assert claim in [one.claim for one in verdict.evidence]
    assert "mesh" not in verdict.summary


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("g = seeded(rank)\nloss = f(g)\nif loss < best:\n    gather()\n", "Make all ranks take the same decision"),
        ("main = is_main_process(group)\nif main and late:\n    gather()\n", "Gate the side effect"),
        ("if int(os.environ['RANK']) % pick() == 0:\n    gather()\n", "Gate the side effect"),
    ],
)
def test_a_condition_on_data_is_no_condition_on_the_rank(source: str, advice: str) -> None:
    """The rank may be the seed of what decides: advice on who logs would be beside the point."""
    lines = source.count("\n")
    verdict = verdict_of("\n" * (2 - lines) + source, 3, world=4, odd=39 + lines)
    assert [c.rank for c in verdict.culprits] == [3]
    assert verdict.suggestions[0].startswith(advice)


def test_nobody_expects_the_other_end_of_a_receive_at_its_line() -> None:
    frames = (Frame(C10D, 2600, "recv"), at(41), Frame(SCRIPT, 60, "<module>"))
    text = "\n" * 39 + "if rank > 0:\n    recv()\n"
    receives = rank(1, frames, "poll", flight=record(*past(3)))
    evidence = job(waiting(0), receives, waiting(2))
    verdict = diagnose(evidence, lambda path: text)
    assert verdict.cause == "collective-mismatch" and "recv" in verdict.summary
    assert "never reach" not in verdict.summary


def test_an_early_way_out_keeps_a_rank_from_its_peers_call() -> None:
    source = "for x in loader:\n    gather()\n    if rank == 3:\n        continue\n" + "    step()\n" * 10
    verdict = verdict_of(source, 3, world=4)
    assert [c.rank for c in verdict.culprits] == [3]
    assert (
        "Rank 3 never reaches train.py:50 (train) because of `if rank == 3: continue (train.py:42)`." in verdict.summary
    )


@pytest.mark.parametrize(
    "source",
    [
        "if rank == 0:\n    gather()\n",  # rank 1 is there all the same: the name means something else
        "if rank < 9:\n    gather()\n",  # keeps nobody away
        "if step:\n    gather()\n",
        "gather(\n  1)\n",
        "not python {",
    ],
)
def test_what_says_nothing(source: str) -> None:
    plain = verdict_of("", 1)
    verdict = verdict_of(source, 1)
    assert (verdict.summary, verdict.confidence) == (plain.summary, plain.confidence)


def test_the_confidence_stays_what_it_was() -> None:
    source = "if rank == 3:\n    gather()\n"
    assert verdict_of(source, 3, world=4).confidence == verdict_of("", 3, world=4).confidence
    assert verdict_of(source, 3, world=4).culprits == verdict_of("", 3, world=4).culprits


def test_a_clean_exit_is_less_sure_where_a_peer_waits_alone_under_a_condition() -> None:
    frames = (Frame(C10D, 3252, "all_reduce"), at(41), at(60, "<module>"))
    lost = RankException("RuntimeError", "Connection closed by peer", 5.0, frames, "Traceback")
    gone = rank(1, seen=False, more={"exit": RankExit(0, 4.0, before_close=True), "exit_call": None})
    raised = {"exception": lost, "exit": RankExit(1, 6.0, before_close=True)}
    peer = rank(0, in_c10d("all_reduce", 41), more=raised)
    evidence = job(peer, gone, outcome="crash")
    sure = diagnose(evidence)
    assert (sure.cause, [c.rank for c in sure.culprits]) == ("uneven-batches", [1])
    text = "\n" * 39 + "if rank == 0:\n    gather()\n"
    verdict = diagnose(evidence, lambda path: text)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [1])
    assert (sure.confidence, verdict.confidence) == ("medium", "low")
    assert any("if rank == 0 (train.py:40)" in text and "runner-up" in text for text in verdict.ruled_out)


# --- several ranks, and what sets them apart --------------------------------------------------------------------------


def verdict_of_odd(
    odd: set[int],
    world: int = 8,
    groups: dict[str, tuple[int, ...]] | None = None,
    handling: str = "",
    source: str = "",
) -> Verdict:
    """Of a job in which ``odd`` ranks wait in an all_gather, the others in an all_reduce.

    ``handling``: these do so in the handler of such an exception.
    """
    flights = [
        record(
            *past(3), entry("all_gather" if n in odd else "all_reduce", 4, line=41 if n in odd else 50), groups=groups
        )
        for n in range(world)
    ]
    ranks = [
        rank(n, in_c10d("all_gather" if n in odd else "all_reduce", 41 if n in odd else 50), flight=flight)
        for n, flight in enumerate(flights)
    ]
    if handling:
        ranks = [in_handler(one, handling) if n in odd else one for n, one in enumerate(ranks)]
    text = "\n" * 39 + source
    return diagnose(job(*ranks), lambda path: text if source and path == SCRIPT else None)


def in_handler(one: RankEvidence, exception: str) -> RankEvidence:
    assert one.main is not None
    stacks = tuple(
        structs.replace(sample, threads=tuple(structs.replace(t, ident=1) for t in sample.threads))
        for sample in one.main.stacks
    )
    handled = HandledException(1, exception, "a bad batch", (at(30),))
    return structs.replace(
        one, main=structs.replace(one.main, stacks=stacks), gil=structs.replace(one.gil, handling=(handled,))
    )


@pytest.mark.parametrize(
    ("odd", "world", "expected"),
    [
        ({3}, 8, "high"),
        ({0, 1}, 8, "medium"),
        (set(range(8)), 64, "high"),
        (set(range(3, 64, 4)), 64, "high"),
    ],
)
def test_several_ranks_are_surely_at_fault_only_in_a_pattern(odd: set[int], world: int, expected: str) -> None:
    """Ranks that draw for themselves, or decide by data of their own, seldom make one."""
    verdict = verdict_of_odd(odd, world)
    assert [one.rank for one in verdict.culprits] == sorted(odd)
    assert verdict.confidence == expected


@pytest.mark.parametrize(("odd", "world"), [({1, 4, 6}, 8), ({0, 1, 4}, 6), ({1, 4, 6, 9}, 64), ({5, 6, 7, 8}, 64)])
def test_nobody_is_named_where_each_rank_decides_for_itself(odd: set[int], world: int) -> None:
    verdict = verdict_of_odd(odd, world)
    assert (verdict.cause, verdict.culprits) == ("collective-mismatch", ())
    assert verdict.confidence == "medium"
    assert "train.py:41" in verdict.summary and "decide for itself" in verdict.summary
    assert "take the same decision" in verdict.suggestions[0]


@pytest.mark.parametrize(("op", "named"), [("recv", [1, 4, 6]), ("send", [1, 4, 6]), ("all_gather", [])])
def test_who_waits_in_a_send_or_receive_has_decided_nothing(op: str, named: list[int]) -> None:
    """A send or receive has its peer: that its ranks are no pattern says nothing."""
    ranks = [rank(n, in_c10d(op, 41)) if n in (1, 4, 6) else waiting(n, flight=None) for n in range(8)]
    facts = Facts.of(job(*ranks))
    culprits = waiting_culprits(facts, (1, 4, 6))
    finding = Finding("collective-mismatch", (Doubt.STACKS_ALONE,), "They do not meet.", culprits)
    finding = annotated(finding, guards(facts, finding))
    assert [one.rank for one in finding.culprits] == named
    assert (Doubt.MAY_BE_OWED in finding.doubts) is bool(named)


def test_where_no_condition_parts_the_ranks_nobody_has_decided_anything() -> None:
    """``if step % 10 == 0`` is passed by both sides; without the source, nothing excludes a decision."""
    source = "if step % 10 == 0:\n    gather()\n" + "    more()\n" * 9
    verdict = verdict_of_odd({1, 4, 6}, source=source)
    assert [one.rank for one in verdict.culprits] == [1, 4, 6] and verdict.confidence == "medium"
    assert not any("drawn for itself" in why for why in verdict.doubts)
    assert not verdict_of_odd({1, 4, 6}).culprits


def test_the_members_of_a_group_are_a_pattern() -> None:
    ranks = {5, 22, 40, 61}
    assert not verdict_of_odd(ranks, 64).culprits
    groups = {"0": tuple(range(64)), "7": tuple(sorted(ranks))}
    assert verdict_of_odd(ranks, 64, groups).confidence == "high"


def test_ranks_that_say_themselves_why_are_named_without_a_pattern() -> None:
    verdict = verdict_of_odd({1, 4, 6}, handling="ValueError")
    assert [one.rank for one in verdict.culprits] == [1, 4, 6]
    assert "ValueError: a bad batch" in verdict.summary


def test_ranks_that_a_condition_on_the_rank_lets_through_are_named_without_a_pattern() -> None:
    """Also where it asks for more, and so cannot be evaluated: but not surely."""
    verdict = verdict_of_odd({1, 4, 6}, source="if due and rank in those:\n    gather()\n")
    assert ([one.rank for one in verdict.culprits], verdict.confidence) == ([1, 4, 6], "low")
    assert not verdict_of_odd({1, 4, 6}, source="if random() < 0.1:\n    gather()\n").culprits


@pytest.mark.parametrize(("odd", "named"), [({3}, [3]), ({0, 1}, [0, 1]), ({1, 4, 6}, [])])
def test_of_ranks_that_rest_in_two_places_several_are_named_only_in_a_pattern(odd: set[int], named: list[int]) -> None:
    """No peer waits for them, as far as anything shows."""
    ranks = [rank(n, in_user(41 if n in odd else 50), "sleep", flight=None) for n in range(8)]
    verdict = diagnose(job(*ranks))
    assert [one.rank for one in verdict.culprits] == named
    assert verdict.confidence == "low"
