"""Process groups that not all ranks created, and groups as the ranks report them."""

from __future__ import annotations

import pytest

from safelaunch.model import GilTest, RankEvidence
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    NEW_GROUP,
    in_c10d,
    job,
    past,
    rank,
    record,
)
from tests.support.verdict_cases import calls_in


def making(number: int, made: int | None) -> RankEvidence:
    return rank(number, NEW_GROUP, flight=record(*past(3)), gil=GilTest(True, True, groups_made=made))


@pytest.mark.parametrize(
    ("made", "named", "confidence"),
    [
        ((3, 3, 2, 2, 2), [0, 1], "high"),
        ((2, 3, 2, 2), [1], "high"),
        ((3, 2), [1], "medium"),
        ((3, 3, 2, 2), [2, 3], "medium"),
    ],
)
def test_differing_group_counts_are_a_collective_mismatch(
    made: tuple[int, ...], named: list[int], confidence: str
) -> None:
    verdict = diagnose(job(*(making(n, count) for n, count in enumerate(made))))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", named)
    assert verdict.confidence == confidence
    assert "not all ranks have made the same groups" in verdict.summary
    assert "`new_group()` on every rank" in verdict.suggestions[0]


ALONE, GATE, ORDER = (
    "One of these ranks might use the wrong group",
    "Every rank must make this call",
    "Use the groups in",
)


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("if rank == 0:\n    save()\n", GATE),
        ("if rank == 0:\n    tp()\nelse:\n" + "    dp()\n" * 10, ALONE),  # in its branch, each can call the other next
        ("", ALONE),
    ],
)
def test_group_order_advice_depends_on_the_source(source: str, first: str) -> None:
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
