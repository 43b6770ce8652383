"""Table of calls: ranks that share a row, order of rows, and omitted calls."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from safelaunch.model import Evidence, RankEvidence
from safelaunch.report.calls import NOT_CALLED, Selection, document, in_order, lines, table
from safelaunch.verdict.rank_state import CaseFacts
from tests.support import incidents
from tests.support.evidence import entry, job, rank, record


def of(number: int, *what: tuple[str, int, str], first: int = 0) -> RankEvidence:
    """Returns one of two ranks with these calls (op, number, group), the oldest with record id ``first``."""
    made = tuple(
        replace(entry(op, seq, done=True, group=group), created_ns=1000 * (at + 1), record_id=at)
        for at, (op, seq, group) in enumerate(what, first)
    )
    return rank(number, flight=record(*made, groups=dict.fromkeys(("0", "tp"), (0, 1))))


def slots(evidence: Evidence, **chosen: Any) -> list[tuple[str, int]]:
    return [(row.slot[0], row.slot[2]) for row in table(CaseFacts.of(evidence), Selection(**chosen)).rows]


def test_calls_table_ranks_with_same_call_share_row() -> None:
    evidence = incidents.hang(8).evidence
    text = lines(table(CaseFacts.of(evidence), Selection(last=2)))
    assert [" ".join(line.split()) for line in text] == [
        "group number call ranks state at",
        "0 default_pg 74 all_reduce of float32[4096] 0-7 completed train.py:27 (train)",
        "0 default_pg 75 all_gather of float32[1] 0 pending train.py:12 (evaluate)",
        "0 default_pg 75 all_reduce of float32[1] 1-7 pending train.py:27 (train)",
    ]
    assert len({line.index("all_") for line in text[1:]}) == 1, "aligned"


def test_calls_table_selects_ranks_and_groups() -> None:
    evidence = job(of(0, ("all_reduce", 1, "0"), ("all_reduce", 1, "tp")), of(1, ("all_reduce", 1, "0")))
    assert slots(evidence, groups=frozenset({"tp"})) == [("tp", 1)]
    assert slots(evidence, ranks=frozenset({1})) == [("0", 1)]
    calls_table = table(CaseFacts.of(evidence), Selection(ranks=frozenset({1, 5})))
    assert (calls_table.unrecorded, calls_table.more) == ((5,), False)


def test_calls_table_shows_last_calls_of_each_rank() -> None:
    evidence = job(of(0, *(("all_reduce", n, "0") for n in range(1, 6))), of(1, ("all_reduce", 1, "0")))
    calls_table = table(CaseFacts.of(evidence), Selection(last=2))
    assert [row.slot[2] for row in calls_table.rows] == [1, 4, 5] and calls_table.more
    assert not table(CaseFacts.of(evidence), Selection(last=5)).more
    assert len(table(CaseFacts.of(evidence), Selection()).rows) == 5


def test_calls_table_names_absent_ranks() -> None:
    evidence = job(of(0, ("all_reduce", 1, "0"), ("all_reduce", 2, "0")), of(1, ("all_reduce", 1, "0")), rank(2))
    calls_table = table(CaseFacts.of(evidence), Selection())
    assert [row.absent for row in calls_table.rows] == [(), (1,)]
    assert lines(calls_table)[-1].split("  ")[-1].split() == ["1"] and NOT_CALLED in lines(calls_table)[-1]


def test_calls_table_of_wrapped_record_names_no_absent_rank() -> None:
    caller = of(0, ("all_reduce", 1, "tp"))
    for first, absent in ((0, (1,)), (899, ())):
        evidence = job(caller, of(1, ("all_reduce", 900, "0"), first=first))
        assert [row.absent for row in table(CaseFacts.of(evidence), Selection(groups=frozenset({"tp"}))).rows] == [
            absent
        ]


def test_calls_table_keeps_order_of_each_rank() -> None:
    a, b, c, d = (("0", False, n, 0) for n in range(4))
    time = {a: 4, b: 3, c: 2, d: 1}
    assert in_order([[a, b, c]], {slot: time[slot] for slot in (a, b, c)}) == [a, b, c]
    assert in_order([[a, c], [b, c], [a, d, b]], time) == [a, d, b, c]


def test_calls_table_with_conflicting_orders_loses_no_call() -> None:
    a, b, c = (("0", False, n, 0) for n in range(3))
    assert in_order([[a, b, c], [b, a, c]], {a: 1, b: 2, c: 3}) == [a, b, c]
    evidence = job(
        of(0, ("all_reduce", 1, "0"), ("all_reduce", 1, "tp")), of(1, ("all_reduce", 1, "tp"), ("all_reduce", 1, "0"))
    )
    assert sorted(slots(evidence)) == [("0", 1), ("tp", 1)]


def test_calls_table_has_row_for_each_coalesced_call() -> None:
    same = (("all_reduce", 1, "0"), ("all_reduce", 1, "0"))
    calls_table = table(CaseFacts.of(job(of(0, *same), of(1, *same))), Selection())
    assert [row.slot for row in calls_table.rows] == [("0", False, 1, 0), ("0", False, 1, 1)]


def test_calls_table_json_has_ranks_and_state() -> None:
    evidence = incidents.hang(4).evidence
    last = document(table(CaseFacts.of(evidence), Selection(last=1)))
    assert [(row["op"], row["number"], row["ranks"], row["state"]) for row in last] == [
        ("all_gather", 75, [0], "pending"),
        ("all_reduce", 75, [1, 2, 3], "pending"),
    ]


def test_calls_table_hostile_name_stays_on_its_line() -> None:
    evidence = job(rank(0, flight=record(entry("a\nb\x1b[2J", 1))))
    text = lines(table(CaseFacts.of(evidence), Selection()))
    assert len(text) == 2 and all(line.isprintable() for line in text)
