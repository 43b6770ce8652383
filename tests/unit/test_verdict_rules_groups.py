"""Process groups that not all ranks have made, and what the ranks themselves tell of groups."""

from __future__ import annotations

import pytest

from safelaunch.model import GilTest, HandledException, RankEvidence
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    NEW_GROUP,
    at,
    in_c10d,
    in_user,
    job,
    past,
    rank,
    record,
)
from tests.support.verdict_cases import calls_in


def making(number: int, made: int | None) -> RankEvidence:
    return rank(number, NEW_GROUP, flight=record(*past(3)), gil=GilTest(True, True, groups_made=made))


def elsewhere(number: int, made: int) -> RankEvidence:
    return rank(number, in_user(7), "sleep", flight=record(*past(3)), gil=GilTest(True, True, groups_made=made))


@pytest.mark.parametrize(
    ("made", "named", "confidence"),
    [
        ((3, 3, 2, 2, 2), [0, 1], "high"),
        ((2, 3, 2, 2), [1], "high"),
        ((3, 2), [1], "medium"),
        ((3, 3, 2, 2), [2, 3], "medium"),
    ],
)
def test_ranks_that_made_different_groups(made: tuple[int, ...], named: list[int], confidence: str) -> None:
    verdict = diagnose(job(*(making(n, count) for n, count in enumerate(made))))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", named)
    assert verdict.confidence == confidence
    assert "not all ranks have made the same groups" in verdict.summary
    assert "`new_group()` on every rank" in verdict.suggestions[0]


def test_who_has_not_come_to_new_group_yet_is_victim_by_something_else() -> None:
    verdict = diagnose(job(making(0, 3), making(1, 3), elsewhere(2, 2)))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [2])


ALONE, GATE, ORDER = "One of these ranks might use the wrong group", "Every rank must make this call", "Use the groups in"


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("if rank == 0:\n    save()\n", GATE),
        ("if rank == 0:\n    tp()\nelse:\n" + "    dp()\n" * 10, ALONE),  # in its branch, each may call the other next
        ("", ALONE),
    ],
)
def test_what_to_do_about_ranks_that_wait_in_two_groups(source: str, first: str) -> None:
    two = {"0": (0, 1), "1": (0, 1)}
    ranks = [
        rank(n, in_c10d("all_reduce", line), flight=record(*calls_in(f"1@30 0@30 1@30 0@30 {last}*"), groups=two))
        for n, (line, last) in enumerate([(41, "0@41"), (50, "1@50")])
    ]
    text = "\n" * 39 + source if source else None
    verdict = diagnose(job(*ranks), read_source=lambda path: text)
    assert verdict.cause == "group-order"
    assert verdict.suggestions[0].startswith(first)
    order = [one.startswith(ORDER) for one in verdict.suggestions]
    assert order.index(True) == 1


def test_where_a_rank_does_not_tell() -> None:
    verdict = diagnose(job(making(0, 3), making(1, None), making(2, 2)))
    assert "not all ranks have made the same groups" not in verdict.summary


@pytest.mark.parametrize(
    ("each", "last", "cause", "says"),
    [
        ("0@41 1@41", "1@41*", "group-order", "rank 0 entered the groups in another order than before"),
        ("0@41 1@42", "1@41*", "group-order", "rank 0 entered the groups in another order than before"),
        (
            "0@41 1@41",
            "1@42*",
            "collective-mismatch",
            "for the first time; until then it had always called all_reduce of group '0'",
        ),
    ],
)
def test_who_calls_otherwise_than_ever_is_named_alone(each: str, last: str, cause: str, says: str) -> None:
    two = {"0": (0, 1), "1": (0, 1)}
    odd = rank(
        0, in_c10d("all_reduce", int(last[2:4])), flight=record(*calls_in(f"{f'{each} ' * 5}{last}"), groups=two)
    )
    usual = rank(1, in_c10d("all_reduce", 41), flight=record(*calls_in(f"{each} " * 5 + "0@41*"), groups=two))
    verdict = diagnose(job(odd, usual))
    assert (verdict.cause, [culprit.rank for culprit in verdict.culprits]) == (cause, [0])
    assert verdict.confidence != "high"
    assert says in verdict.summary


def test_the_first_call_of_a_group_that_half_of_the_ranks_make() -> None:
    """Two pairs, and a call without ``group=`` in one of them."""
    groups = {"0": (0, 1, 2, 3), "1": (0, 2), "2": (1, 3)}
    usual = {rank: f"{1 + rank % 2}@41" for rank in range(4)}
    ranks = [
        rank(n, in_c10d("all_reduce", 50 if n in (2, 3) else 41), flight=record(*calls_in(line), groups=groups))
        for n in range(4)
        for line in [f"{f'{usual[n]} ' * 8}{'0@50*' if n in (2, 3) else f'{usual[n]}*'}"]
    ]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("collective-mismatch", [2, 3])
    assert "for the first time" in verdict.summary and "orders" not in verdict.summary
    assert verdict.confidence == "low"  # the others may have left it out


@pytest.mark.parametrize(
    ("odd", "named"), [([2], [2]), ([0, 3], [0, 3]), ([1, 3, 4, 5], [0, 2]), ([0, 1, 2], range(6))]
)
def test_the_fewer_have_entered_groups_of_the_same_members_in_another_order(odd: list[int], named: list[int]) -> None:
    world = 6
    two = {"0": tuple(range(world)), "1": tuple(range(world))}
    first, second = (in_c10d("all_reduce", line) for line in (41, 50))
    ranks = [
        rank(n, second if n in odd else first, flight=record(*calls_in("1@50*" if n in odd else "0@41*"), groups=two))
        for n in range(world)
    ]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [culprit.rank for culprit in verdict.culprits]) == ("group-order", list(named))


def test_who_waits_in_a_group_that_its_peers_have_without_it() -> None:
    """Ranks 0 and 1 made one more group by themselves, so by number rank 2's newest group is that one of theirs."""
    own = {"0": (0, 1, 2), "1": (0, 1)}
    ahead = [
        rank(n, NEW_GROUP, flight=record(*calls_in("0@30x3 1@40"), groups=own), gil=GilTest(True, True, groups_made=3))
        for n in (0, 1)
    ]
    flight = record(*calls_in("0@30x3 1@50*"), groups={"0": (0, 1, 2)})
    behind = rank(2, in_c10d("all_reduce", 50), flight=flight, gil=GilTest(True, True, groups_made=2))
    verdict = diagnose(job(*ahead, behind))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [2])
    assert "not all ranks have made the same groups" in verdict.summary
    assert "in a group that peers have without it" in verdict.summary


def test_a_round_without_calls_on_each_rank_in_turn_is_no_larger_shift() -> None:
    """Each leaves out the reduction of one step, at another time: with one of these in place of another, ten calls more
    of the rank that did so first agree with a peer's to the end.
    """
    step, skip = "{0}@27x2 {1}@64x2 ", "{0}@27x2 "
    after = {
        0: step * 7 + skip + step * 5 + "{0}@27x2 {1}@64*",
        1: step * 7 + skip + step * 5 + skip + "{0}@27*",
        2: skip + step * 11 + skip + step + "{0}@27*",
        3: step * 9 + skip + step * 3 + "{0}@27x2 {1}@64*",
    }
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    ranks = []
    for n, text in after.items():
        made = calls_in((step * 40 + text).format(1 + n // 2, 3 + n % 2))
        frames = in_c10d("all_reduce", 64 if "64*" in text else 27)
        ranks.append(rank(n, frames, flight=record(*made, groups=groups)))
    verdict = diagnose(job(*ranks))
    assert [one.rank for one in verdict.culprits] == [2]
    assert verdict.summary.startswith("Rank 2 skipped all_reduce at train.py:64"), verdict.summary


def test_of_two_orders_of_groups_that_of_a_rank_which_handles_an_exception_is_the_wrong_one() -> None:
    two = {"0": (0, 1), "1": (0, 1)}
    handled = HandledException(7001, "ValueError", "label 17", (at(14, "batch"),))
    ranks = [
        rank(
            n,
            in_c10d("all_reduce", line),
            flight=record(*calls_in(f"1@30 0@30 {last}*"), groups=two),
            ident=7001,
            gil=gil,
        )
        for n, (line, last, gil) in enumerate(
            [(41, "0@41", GilTest(True, True)), (50, "1@50", GilTest(True, True, (handled,)))]
        )
    ]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("group-order", [1])
    assert "Rank 1 does so while it handles ValueError: label 17" in verdict.summary
    assert "Fix that exception first" in verdict.suggestions[0]
