"""One node of several: its ranks 2-3 of 4 are seen. Who of them is at fault, whatever the others may be doing?"""

from __future__ import annotations

from typing import Any

import pytest
from evidence import (
    C10D,
    SITE,
    STDLIB,
    WRAPPER,
    at,
    behind,
    entry,
    in_backward,
    in_c10d,
    in_init,
    in_loader,
    in_user,
    in_worker,
    job,
    past,
    process,
    rank,
    record,
    waiting,
)

from safelaunch.model import Evidence, Frame, RankEvidence, RankException
from safelaunch.verdict.diagnose import diagnose

LOCK = (Frame(f"{STDLIB}/threading.py", 168, "_RLock.acquire"), *in_user(7))
QUEUE = (
    Frame(f"{STDLIB}/threading.py", 320, "Condition.wait"),
    Frame(f"{STDLIB}/queue.py", 171, "Queue.get"),
    *in_user(7),
)


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
PERHAPS = {
    "polls": third(in_user(7), "nap"),
    "a socket or pipe": third(in_user(7), "pipe"),
    "a FIFO": third(in_user(7), "fifo"),
    "a file lock": third(in_user(7), "flock"),
    "a queue": third(QUEUE, "futex"),
    "a lock, while a thread waits for peers": third(
        LOCK, "futex", threads=[("saver", in_c10d("barrier", 80), "futex")]
    ),
    "a lock, while a thread polls": third(LOCK, "futex", threads=[("syncer", in_user(80), "nap")]),
    "a lock of a library's": third((LOCK[0], Frame(f"{SITE}/tqdm/std.py", 97, "acquire"), *in_user(7)), "futex"),
    "asleep, while a thread trains": third(
        in_user(7), "sleep", threads=[("trainer", in_c10d("all_reduce", 80), "futex")]
    ),
    "asleep, while a thread computes": third(in_user(7), "sleep", threads=[("trainer", in_user(80), "run")]),
    "a subprocess": third(in_user(7), "wait4"),
    "select": third(in_user(7), "select"),
    "standard input": third(in_user(7), "stdin"),
    "computes": third(in_user(7), "run"),
    "no stack": third((), "futex"),
    "a backward pass": third(in_backward(7), "futex"),
    "a loader worker that polls": third(in_loader(30), "poll", **stuck_worker("nap")),
}


@pytest.mark.parametrize("how", FOR_GOOD)
def test_who_will_not_go_on_is_named(how: str) -> None:
    evidence = node(waiting(2), FOR_GOOD[how])
    assert [culprit.rank for culprit in diagnose(evidence).culprits] == [3]


@pytest.mark.parametrize("how", PERHAPS)
@pytest.mark.parametrize("outcome", ["hang", "dump"])
def test_who_may_be_waiting_for_an_unseen_rank_is_not(how: str, outcome: str) -> None:
    evidence = node(waiting(2), PERHAPS[how], outcome=outcome)
    verdict = diagnose(evidence)
    assert (verdict.culprits, verdict.confidence) == ((), "low")
    assert "ranks 0-1 were not seen" in verdict.summary


def test_what_such_a_rank_does_is_told_all_the_same() -> None:
    summary = diagnose(node(waiting(2), PERHAPS["polls"])).summary
    assert "Rank 3 is asleep in train.py:7 (train), perhaps waiting for one of them." in summary


def test_one_rank_alone_is_no_reason_to_suspect_the_transport() -> None:
    verdict = diagnose(node(PERHAPS["select"]))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert "Ranks 0-2 were not seen and may be what keeps it there." in verdict.summary
    assert not any("transport" in advice for advice in verdict.suggestions)
    assert any("safelaunch diagnose FOLDER" in advice for advice in verdict.suggestions)


def test_with_every_rank_seen_the_same_ranks_are_named() -> None:
    for how in ("polls", "a socket or pipe", "a queue"):
        verdict = diagnose(job(waiting(0), waiting(1), waiting(2), PERHAPS[how]))
        assert [culprit.rank for culprit in verdict.culprits] == [3], how


def test_who_waits_for_unseen_peers_is_not_named() -> None:
    assert diagnose(node(waiting(2), waiting(3))).culprits == ()


def test_a_rank_that_nobody_needs_may_sleep() -> None:
    """An evaluator: no step of its own, and not of the group in which rank 2 waits."""
    entered = entry("all_reduce", 4, group="1", line=50)
    trainer = waiting(2, flight=record(*past(3), entered, groups={"1": (0, 1, 2)}))
    evaluator = third(in_user(7), "sleep", step=None)
    assert diagnose(node(trainer, evaluator)).culprits == ()
    member = waiting(2, flight=record(*past(3), entered, groups={"1": (0, 2, 3)}))
    assert [culprit.pid for culprit in diagnose(node(member, evaluator)).culprits] == [1030]


def test_a_rank_of_which_nobody_here_shows_that_it_is_needed() -> None:
    """The only one of its node; or one beside a peer without a Flight Recorder, which may wait in any group."""
    asleep = third(in_user(7), "sleep")
    for evidence in (node(asleep, world=5), node(rank(2, in_c10d("all_reduce", 50)), asleep)):
        assert diagnose(evidence).culprits == ()


def test_who_has_not_come_to_the_rendezvous_because_it_may_wait_elsewhere() -> None:
    inside = rank(2, in_init())
    for kernel, culprits in (("nap", []), ("sleep", [3])):
        verdict = diagnose(node(inside, rank(3, in_user(7), kernel)))
        assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("init-not-joined", culprits)


# --- a peer that ended first ------------------------------------------------------------------------------------------


def closed(number: int, message: str = "Connection closed by peer [127.0.0.1]:4711") -> RankEvidence:
    frames = (Frame(C10D, 3252, "all_reduce"), WRAPPER, at(50))
    exception = RankException("RuntimeError", message, 100.0 + number, frames)
    return rank(number, in_c10d("all_reduce", 50), more={"exception": exception})


def test_ranks_that_lost_an_unseen_peer_are_victims() -> None:
    verdict = diagnose(node(closed(2), closed(3), outcome="crash"))
    assert (verdict.outcome, verdict.cause, verdict.culprits, verdict.victims) == ("crash", "rank-exited", (), "2-3")
    assert verdict.summary.startswith(
        "One of ranks 0-1, on another node, ended first: ranks 2-3 lost the connection in"
    )
    assert "No step had been made here for 30 s: that node may have ended a hang." in verdict.summary
    assert [text for text in verdict.suggestions if "sys.exit" in text or "log_tail" in text] == []
    assert any("bundles of all nodes" in text for text in verdict.suggestions)


def test_a_time_out_is_no_lost_connection() -> None:
    evidence = node(closed(2, "Timed out waiting 1000ms for recv operation to complete"), outcome="crash")
    assert "ended first" not in diagnose(evidence).summary


def test_with_every_rank_seen_nobody_else_ended_first() -> None:
    assert "ended first" not in diagnose(job(closed(0), closed(1), outcome="crash")).summary


def test_an_error_of_its_own_comes_first() -> None:
    own = RankException("ValueError", "bad batch", 99.0, in_user(7))
    evidence = node(closed(2), rank(3, in_user(7), more={"exception": own}), outcome="crash")
    assert [culprit.rank for culprit in diagnose(evidence).culprits] == [3]
