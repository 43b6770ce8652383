"""Comparing how the script and the job hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from safelaunch.addons.reproduce.hang import Hang, WaitPosition, differences, hang_of
from tests.support.evidence import in_c10d, job, rank, waiting

WORLD = (0, 1, 2)
JOB = Hang(
    "hang",
    "collective-mismatch",
    (1,),
    {0: WaitPosition("all_reduce", WORLD), 1: WaitPosition("recv", None, 2), 2: WaitPosition("")},
)


def test_equal_hangs_have_no_differences() -> None:
    assert differences(JOB, JOB) == []


def test_unknown_group_or_peer_is_no_difference() -> None:
    assert (
        differences(JOB, replace(JOB, ranks={**JOB.ranks, 0: WaitPosition("all_reduce"), 1: WaitPosition("recv")}))
        == []
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ({0: WaitPosition("barrier", WORLD)}, "rank 0 was in all_reduce of ranks 0-2, and is in barrier of ranks 0-2"),
        ({0: WaitPosition("all_reduce", (0, 2))}, "and is in all_reduce of ranks 0,2"),
        ({1: WaitPosition("recv", None, 0)}, "rank 1 was in recv"),
        ({2: WaitPosition("recv", None, 0)}, "rank 2 was in no call"),
    ],
)
def test_other_call_is_a_difference(ranks: dict[int, WaitPosition], words: str) -> None:
    (told,) = differences(JOB, replace(JOB, ranks={**JOB.ranks, **ranks}))
    assert words in told


def test_unobserved_rank_is_a_difference() -> None:
    ranks = {rank: one for rank, one in JOB.ranks.items() if rank != 1}
    assert differences(JOB, replace(JOB, ranks=ranks)) == ["rank 1 was not seen in the run"]


def test_other_verdict_is_a_difference() -> None:
    (told,) = differences(JOB, replace(JOB, culprits=(0, 1)))
    assert told == "the verdict on the run is collective-mismatch (ranks 0-1), and was collective-mismatch (rank 1)"
    assert len(differences(JOB, replace(JOB, cause="group-order"))) == 1


@pytest.mark.parametrize(
    ("recorded", "run", "alike"),
    [
        ({0, 1}, {0, 1}, True),  # calls alone don't distinguish them: a condition in each source chose
        ({1}, {0, 1}, False),
        ({1}, {1}, False),
        ({0, 1}, None, False),
        (None, None, False),
    ],
)
def test_culprits_indistinguishable_by_calls_are_equal(
    recorded: set[int] | None, run: set[int] | None, alike: bool
) -> None:
    tied = [None if one is None else frozenset(one) for one in (recorded, run)]
    other = replace(JOB, culprits=(0,), by_calls=tied[1])
    assert (differences(replace(JOB, by_calls=tied[0]), other) == []) is alike


def test_rank_chosen_by_other_condition_is_no_difference() -> None:
    """The job's condition let rank 0 alone into its call, the script's lets rank 1 alone into the other one."""
    both = job(rank(0, in_c10d("barrier", 41)), waiting(1, flight=None))
    hangs = [
        hang_of(both, (0, 1), lambda path, line=line, n=n: "\n" * (line - 2) + f"if rank == {n}:\n    call()\n")
        for n, line in ((0, 41), (1, 50))
    ]
    assert [one.culprits for one in hangs] == [(0,), (1,)]
    assert differences(*hangs) == []


def test_crash_is_a_difference_from_hang() -> None:
    assert "ends in a crash" in differences(JOB, replace(JOB, outcome="crash", ranks={}))[0]


def test_dump_of_hang_counts_as_hang() -> None:
    assert differences(replace(JOB, outcome="dump"), JOB) == []
