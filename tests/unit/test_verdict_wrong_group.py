"""Ranks that call a collective on a group that they are not in: torch only warns, and their own group waits."""

from __future__ import annotations

import msgspec
from evidence import at, calls, in_c10d, job, rank, record

from safelaunch.model import Evidence, RankEvidence
from safelaunch.verdict.diagnose import diagnose

GROUPS = {"1": (0, 1), "2": (2, 3)}


def warning(number: int, op: str = "all_reduce") -> str:
    return (
        f"13:00:49.591 err| UserWarning: Running {op} on global rank {number} which does not belong to the given group."
    )


def one(number: int, text: str, line: int, log: str = "") -> RankEvidence:
    found = rank(number, in_c10d("all_reduce", line), flight=record(*calls(text), groups=GROUPS))
    return msgspec.structs.replace(found, log_tail=log)


def halves(**logs: str) -> Evidence:
    """Ranks 1 and 2 are past line 60 and in the next call of all; 0 and 3 wait at line 60 in their halves."""
    return job(
        one(0, "0@50x3 1@60*", 60),
        one(1, "0@50x3 0@70*", 70, logs.get("first", "")),
        one(2, "0@50x3 0@70*", 70, logs.get("second", "")),
        one(3, "0@50x3 2@60*", 60),
    )


def test_who_took_the_wrong_group_is_named_with_the_call() -> None:
    verdict = diagnose(halves(first=warning(1), second=warning(2)))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("missing-from-collective", [1, 2])
    assert {c.frame and (c.frame.file, c.frame.line) for c in verdict.culprits} == {(at(60).file, 60)}
    assert "Ranks 1-2 called all_reduce on a group that they are not in" in verdict.summary
    assert "ranks 0,3 wait in all_reduce at train.py:60 (train) in their own groups" in verdict.summary
    assert {"ranks/1/log_tail.txt", "ranks/2/log_tail.txt"} <= {claim.file for claim in verdict.evidence}
    assert "Use only groups that the rank is in" in verdict.suggestions[0]
    assert not any("caught exception" in text for text in verdict.suggestions)


def test_who_calls_from_a_line_in_another_group_than_before_has_left_its_habit() -> None:
    """Frames of stacks have the names of classes, and those of records have none."""
    waits = in_c10d("broadcast", 70), in_c10d("all_reduce", 60, "Exchange.train")
    made = [calls("0@50x3 1@60x3 broadcast:0@70*"), calls("0@50x3 2@60x3 0@60*")]
    ranks = [rank(n, waits[n // 2], flight=record(*made[n // 2], groups=GROUPS)) for n in range(4)]
    verdict = diagnose(job(*ranks))
    assert [c.rank for c in verdict.culprits] == [2, 3]
    assert verdict.summary.startswith(
        "Rank 2 made its 3 earlier calls at train.py:60 (Exchange.train) in group '2': with group '0' it may have "
        "taken the wrong one. The same holds for rank 3. Ranks 0-1 wait in broadcast at train.py:70 (train)."
    )
    assert "Check how this line selects its group" in verdict.suggestions[0]


def test_the_call_at_which_a_rank_diverged_tells_its_habit_though_it_has_gone_on() -> None:
    """Rank 3 has met rank 1's later call, in the group of replicas, and waits in it for the next."""
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    made = {0: ("1 3", "1@50 3@60*", 60), 1: ("1 4", "1@50 4@60 1@50*", 50)}
    made |= {2: ("2 3", "2@50*", 50), 3: ("2 4", "4@50 4@60*", 60)}
    ranks = []
    for n, (own, rest, line) in made.items():
        tensor, replicas = own.split()
        flight = record(*calls(f"{tensor}@50 {replicas}@60 " * 4 + rest), groups=groups)
        ranks.append(rank(n, in_c10d("all_reduce", line), flight=flight))
    verdict = diagnose(job(*ranks))
    assert [one.rank for one in verdict.culprits] == [3]
    words = "Rank 3 made its 4 earlier calls at train.py:50 (train) in group '2': with group '4' it may have taken the"
    assert verdict.summary.startswith(words), verdict.summary


def test_groups_entered_in_another_order_are_no_wrong_group() -> None:
    groups = {"1": (1, 2), "2": (1, 2)}
    made = ["0@50x3 0@70*", "0@50x3 1@60 2@61 1@60 2@61 1@60*", "0@50x3 1@60 2@61 1@60 2@61 2@60*"]
    ranks = [
        rank(n, in_c10d("all_reduce", 70 if n == 0 else 60), flight=record(*calls(one), groups=groups))
        for n, one in enumerate(made)
    ]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("group-order", [1, 2])
