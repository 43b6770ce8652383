"""One node of several: its ranks 2-3 of 4 are seen. Who of them is at fault, whatever the others may be doing?"""

from __future__ import annotations

from typing import Any

import pytest

from safelaunch.model import Evidence, Frame, RankEvidence, RankException
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    C10D,
    STDLIB,
    WRAPPER,
    at,
    behind,
    in_c10d,
    in_loader,
    in_user,
    in_worker,
    job,
    process,
    rank,
    waiting,
)

LOCK = (Frame(f"{STDLIB}/threading.py", 168, "_RLock.acquire"), *in_user(7))


def node(*ranks: RankEvidence, world: int = 4, **fields: Any) -> Evidence:
    seen = {each.rank for each in ranks}
    return job(*ranks, world=world, missing_ranks=tuple(set(range(world)) - seen), **fields)


def third(frames: tuple[Frame, ...], kernel: str, **fields: Any) -> RankEvidence:
    """Rank 3, which has not come to where rank 2 waits."""
    return rank(3, frames, kernel, flight=behind(), **fields)


def stuck_worker(kernel: str) -> dict[str, Any]:
    return {"children": [process(91, in_worker(12), kernel, role="dataloader worker")]}


FOR_GOOD = {
    "asleep for a day": third(in_user(7), "sleep"),
    "a lock": third(LOCK, "futex"),
    "D state": third(in_user(7), "disk"),
    "stopped": third(in_user(7), "stop"),
    "left the loop": third(in_user(7), "sleep", page="exited"),
    "a lock, beside a deadlocked thread": third(LOCK, "futex", threads=[("saver", LOCK, "futex")]),
    "asleep beside a thread that logs": third(in_user(7), "sleep", threads=[("logger", in_user(80), "nap")]),
    "a loader worker asleep": third(in_loader(30), "poll", **stuck_worker("sleep")),
}


@pytest.mark.parametrize("how", FOR_GOOD)
def test_who_will_not_go_on_is_named(how: str) -> None:
    evidence = node(waiting(2), FOR_GOOD[how])
    assert [culprit.rank for culprit in diagnose(evidence).culprits] == [3]


def test_what_such_a_rank_does_is_told_all_the_same() -> None:
    summary = diagnose(node(waiting(2), third(in_user(7), "nap"))).summary
    assert "Rank 3 is asleep in train.py:7 (train), perhaps waiting for one of them." in summary


def test_a_rank_of_which_nobody_here_shows_that_it_is_needed() -> None:
    """The only one of its node; or one beside a peer without a Flight Recorder, which may wait in any group."""
    asleep = third(in_user(7), "sleep")
    for evidence in (node(asleep, world=5), node(rank(2, in_c10d("all_reduce", 50)), asleep)):
        assert diagnose(evidence).culprits == ()


# --- a peer that ended first ------------------------------------------------------------------------------------------


def closed(number: int, message: str = "Connection closed by peer [127.0.0.1]:4711") -> RankEvidence:
    frames = (Frame(C10D, 3252, "all_reduce"), WRAPPER, at(50))
    exception = RankException("RuntimeError", message, 100.0 + number, frames)
    return rank(number, in_c10d("all_reduce", 50), more={"exception": exception})


def test_with_every_rank_seen_nobody_else_ended_first() -> None:
    assert "ended first" not in diagnose(job(closed(0), closed(1), outcome="crash")).summary
