"""Ranks that do not meet in a collective, by Flight Recorder and by stacks alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from evidence import (
    MODULE,
    SCRIPT,
    at,
    behind,
    calls,
    entry,
    in_backward,
    in_c10d,
    in_user,
    job,
    past,
    rank,
    record,
    waiting,
    with_culprit,
)

from safelaunch.model import Collective, Evidence, FlightRecord, RankEvidence, Verdict
from safelaunch.verdict.collectives import Alignment, mismatch_at, signature
from safelaunch.verdict.diagnose import diagnose

MAJORITY = [(3, 0), (3, 2), (4, 0), (4, 1), (8, 7)]


def named(evidence: Evidence) -> tuple[str, list[int]]:
    verdict = diagnose(evidence)
    return verdict.cause, [c.rank for c in verdict.culprits]


ODD: list[dict[str, Any]] = [
    {"op": "all_gather"},
    {"op": "barrier"},
    {"op": "broadcast"},
    {"size": (8,)},
    {"dtype": "Half"},
]


@pytest.mark.parametrize(("world", "culprit"), MAJORITY)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: "-".join(map(str, odd.values())))
def test_the_minority_is_at_fault(odd: dict[str, Any], world: int, culprit: int) -> None:
    op = odd.get("op", "all_reduce")
    flight = record(*past(3), entry(op, 4, line=41, **{k: v for k, v in odd.items() if k != "op"}))
    verdict = diagnose(with_culprit(rank(culprit, in_c10d(op, 41, "log"), flight=flight), world))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "high")
    assert [c.rank for c in verdict.culprits] == [culprit]
    assert verdict.culprits[0].frame is not None
    assert (verdict.culprits[0].frame.file, verdict.culprits[0].frame.line) == (SCRIPT, 41)
    assert f"ank {culprit} waits in {op}" in verdict.summary
    assert any(claim.file.endswith("flight_recorder.json") for claim in verdict.evidence)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: "-".join(map(str, odd.values())))
def test_one_against_one_names_both(odd: dict[str, Any]) -> None:
    op = odd.get("op", "all_reduce")
    flight = record(*past(3), entry(op, 4, line=41, **{k: v for k, v in odd.items() if k != "op"}))
    verdict = diagnose(job(rank(0, in_c10d(op, 41), flight=flight), waiting(1)))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [(c.rank, c.frame.line if c.frame else 0) for c in verdict.culprits] == [(0, 41), (1, 50)]
    assert "train.py:41" in verdict.summary
    assert "train.py:50" in verdict.summary


def test_two_against_two_names_all() -> None:
    half = [rank(n, in_c10d("barrier", 41), flight=record(*past(3), entry("barrier", 4, line=41))) for n in (0, 3)]
    assert named(job(half[0], waiting(1), waiting(2), half[1])) == ("collective-mismatch", [0, 1, 2, 3])


def test_a_rank_that_got_past_the_wrong_pair_still_votes() -> None:
    """gloo let rank 2 through: it waits one further on, but recorded the majority's operation."""
    ahead = rank(2, in_c10d("all_reduce", 50), flight=record(*past(4), entry("all_reduce", 5, line=50)))
    odd = rank(0, in_c10d("all_gather", 41), flight=record(*past(3), entry("all_gather", 4, line=41)))
    assert named(job(odd, waiting(1), ahead)) == ("collective-mismatch", [0])


def test_the_same_number_of_elements_matches() -> None:
    assert signature(entry("all_reduce", 1, size=(4, 1))) == signature(entry("all_reduce", 1, size=(4,)))
    assert signature(entry("all_reduce", 1, size=(4, 2))) != signature(entry("all_reduce", 1, size=(4,)))
    assert signature(entry("gather", 1, size=(4,))) != signature(entry("gather", 1, size=(8,)))
    assert signature(entry("scatter", 1, size=(4,))) == signature(entry("scatter", 1, size=(8,)))  # the root's input
    assert signature(entry("all_to_all", 1, size=(4,))) == signature(entry("all_to_all", 1, size=(8,)))


def test_a_window_that_wrapped_does_not_mismatch() -> None:
    long, short = record(*past(3), entry("all_reduce", 4)), record(entry("all_reduce", 4))
    ranks = [rank(0, flight=long), rank(1, flight=short)]
    assert mismatch_at(Alignment(ranks, 2), "0", 4) is None


def test_the_missing_rank_is_the_cause_and_a_mismatch_the_runner_up() -> None:
    odd = rank(0, in_c10d("all_gather", 41), flight=record(*past(3), entry("all_gather", 4, line=41)))
    verdict = diagnose(job(odd, waiting(1), waiting(2), rank(3, in_user(7), "sleep", flight=behind())))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [3])
    assert any("runner-up" in text for text in verdict.ruled_out)
    assert verdict.confidence != "high"


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_backward_and_work_wait_count_as_waiting(culprit: int) -> None:
    """DDP's all_reduce and ``work.wait()`` leave no c10d frame: the pending entry tells."""
    flight = record(*past(3), entry("all_reduce", 4, line=50))
    peers = [rank(0, in_backward(50), flight=flight), rank(1, in_user(50), flight=flight), waiting(2)]
    peers[culprit] = rank(culprit, in_user(7), "sleep", flight=behind())
    assert named(job(*peers)) == ("stuck-in-user-code", [culprit])


@pytest.mark.parametrize("flight", [None, record()], ids=["no recorder", "a recorder that knows nothing of gloo"])
def test_backward_without_a_recorder(flight: FlightRecord | None) -> None:
    """torch 2.6 and 2.9 with gloo, where C frames could not be read either: a resting backward pass waits for peers."""
    peers = [rank(n, in_backward(50), flight=flight) for n in (0, 2)]
    asleep = diagnose(job(peers[0], rank(1, in_user(7), "sleep", flight=flight), peers[1]))
    assert (asleep.cause, [c.rank for c in asleep.culprits]) == ("stuck-in-user-code", [1])
    apart = diagnose(job(peers[0], rank(1, in_c10d("all_gather", 41), flight=flight), peers[1]))
    assert (apart.cause, [c.rank for c in apart.culprits]) == ("collective-mismatch", [1])
    computing = diagnose(job(peers[0], rank(1, in_backward(50), "run", flight=flight), peers[1]))
    assert "rank 1 waits" not in computing.summary


def test_a_pending_operation_does_not_excuse_a_sleeping_rank() -> None:
    """Rank 0 started an asynchronous all_reduce and sleeps; its peers have joined it and wait in the next one."""
    ahead = [
        rank(n, in_c10d("all_reduce", 50), flight=record(*past(4), entry("all_reduce", 5, line=50))) for n in (1, 2)
    ]
    sleeper = rank(0, in_user(7), "sleep", flight=record(*past(3), entry("all_reduce", 4, line=50)))
    assert named(job(sleeper, *ahead)) == ("stuck-in-user-code", [0])


# --- without stacks, without a recorder, without some ranks -----------------------------------------------------------


def dump_only(number: int, *entries: Any) -> RankEvidence:
    return rank(number, flight=record(*entries), seen=False, step=None)


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_dumps_alone_name_the_rank_that_never_entered(culprit: int) -> None:
    ranks = [dump_only(n, *past(3), entry("all_reduce", 4, line=50)) for n in range(4)]
    ranks[culprit] = dump_only(culprit, *past(3, line=44))
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("missing-from-collective", [culprit])
    assert verdict.culprits[0].frame is not None
    assert verdict.culprits[0].frame.line == 44


def test_dumps_alone_name_the_mismatch() -> None:
    ranks = [dump_only(n, *past(3), entry("all_reduce", 4, line=50)) for n in range(4)]
    ranks[2] = dump_only(2, *past(3), entry("all_gather", 4, line=41))
    assert named(job(*ranks)) == ("collective-mismatch", [2])


def test_stacks_alone_name_the_mismatch_with_less_confidence() -> None:
    ranks = [rank(n, in_c10d("all_reduce", 50)) for n in range(4)]
    ranks[1] = rank(1, in_c10d("barrier", 41))
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence) == (
        "collective-mismatch",
        [1],
        "medium",
    )
    ranks[1] = rank(1, in_c10d("all_reduce", 41))
    by_line = diagnose(job(*ranks))
    assert ([c.rank for c in by_line.culprits], by_line.confidence) == ([1], "low")


def test_unseen_members_leave_nobody_named_by_majority() -> None:
    odd = rank(0, in_c10d("all_gather", 41), flight=record(*past(3), entry("all_gather", 4, line=41)))
    verdict = diagnose(job(odd, waiting(1), waiting(2), missing_ranks=(3,)))
    assert (verdict.cause, verdict.culprits, verdict.confidence) == ("collective-mismatch", (), "low")
    assert any("3" in text for text in verdict.missing)
    verdict = diagnose(job(waiting(0), waiting(1), missing_ranks=(2,)))
    assert (verdict.cause, verdict.culprits) == ("missing-from-collective", ())


def test_a_sleeping_rank_is_named_though_others_are_unseen() -> None:
    verdict = diagnose(job(waiting(0), rank(1, in_user(7), "sleep", flight=behind()), missing_ranks=(2,)))
    assert ([c.rank for c in verdict.culprits], verdict.confidence) == ([1], "medium")


# --- groups and point to point ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_groups_entered_in_opposite_orders(culprit: int, known: bool) -> None:
    groups = {"1": (0, 1, 2), "2": (0, 1, 2)} if known else {}
    ranks = [
        rank(
            n,
            in_c10d("all_reduce", 60),
            flight=record(*past(3), entry("all_reduce", 1, group="2" if n == culprit else "1", line=60), groups=groups),
        )
        for n in range(3)
    ]
    innocent = [waiting(n) for n in (3, 4, 5)] if known else []  # else they may be members of those groups
    verdict = diagnose(job(*ranks, *innocent))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("group-order", [0, 1, 2])
    assert verdict.confidence == ("high" if known else "medium")


TWO = {"1": (0, 1), "2": (0, 1)}


def _two_groups(odd: int, rounds: str, usual: str, other: str) -> Verdict:
    """Two ranks after the same rounds: ``odd`` waits in the call ``other``, its peer in ``usual``."""
    ranks = []
    for n in range(2):
        pending = other if n == odd else usual
        flight = record(*calls(f"{rounds} {pending}*"), groups=TWO)
        ranks.append(rank(n, in_c10d("all_reduce", flight.entries[-1].frames[2].line), flight=flight))
    return diagnose(job(*ranks, *(waiting(n, seq=1) for n in (2, 3))))  # those wait for both


@pytest.mark.parametrize("odd", [0, 1])
def test_a_call_left_out_of_one_group_is_known_by_the_ranks_own_habit(odd: int) -> None:
    verdict = _two_groups(odd, "1@60 2@61 " * 4, "1@60", "2@61")
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [odd]), verdict.summary
    assert verdict.confidence == "medium" and any("different orders" in text for text in verdict.ruled_out)
    assert f"Rank {odd} skipped all_reduce at train.py:60 (train) (#5 of group '1')" in verdict.summary
    assert verdict.culprits[0].frame == at(60)


@pytest.mark.parametrize(
    ("rounds", "usual", "other", "sure"),
    [
        ("1@60 2@61 " * 4, "1@60", "2@71", True),
        ("1@60 2@60 " * 4, "1@60", "2@60", False),
        ("1@60 2@61 " * 2, "1@60", "2@61", False),
    ],
    ids=["from a line of its own", "from one line for both", "too few rounds"],
)
def test_where_no_habit_tells_it_is_an_order(rounds: str, usual: str, other: str, sure: bool) -> None:
    verdict = _two_groups(1, rounds, usual, other)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("group-order", [0, 1]), verdict.summary
    assert verdict.confidence == ("high" if sure else "medium")


@pytest.mark.parametrize(
    ("rounds", "other", "sure"),
    [("1@60 2@61 " * 5, "2@71", True), ("1@60 1@60 2@61 " * 5 + "1@60", "2@61", False)],
    ids=["in every round", "in one of two rounds"],
)
def test_calls_that_are_not_of_one_round_have_no_order(rounds: str, other: str, sure: bool) -> None:
    """A rank alone in group "2" may have left out a call where not every round has one, or made one more."""
    verdict = _two_groups(1, rounds, "1@60", other)
    assert verdict.confidence == ("high" if sure else "medium"), verdict.summary


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_calls_that_take_turns_the_one_left_out_long_ago_is_known(odd: int) -> None:
    """As if rank ``odd`` had made the other call once too often: then, however, the ends of both would not agree."""
    usual = calls("2@61 1@60 " * 7 + "2@61 1@60*")
    left_out = calls("2@61 1@60 " * 3 + "2@61 " + "2@61 1@60 " * 4 + "barrier:2@70*")
    ranks = [rank(1 - odd, in_c10d("all_reduce", 60), flight=record(*usual, groups=TWO))]
    ranks.insert(odd, rank(odd, in_c10d("barrier", 70), flight=record(*left_out, groups=TWO)))
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [odd]), verdict.summary
    assert f"Rank {odd} skipped all_reduce at train.py:60 (train), which its peer" in verdict.summary
    assert "#4 of group '1'" in verdict.summary


def test_a_rank_outside_the_stuck_group_is_not_blamed() -> None:
    groups = {"0": (0, 1, 2, 3), "5": (0, 1)}
    pending = record(*past(3), entry("all_reduce", 1, group="5", line=60), groups=groups)
    ranks = [
        rank(0, in_c10d("all_reduce", 60), flight=pending),
        rank(1, in_user(7), "sleep", flight=record(*past(3), groups=groups)),
        rank(2, in_user(9), "pipe", flight=record(*past(3), groups=groups)),
        rank(3, in_user(9), "pipe", flight=record(*past(3), groups=groups)),
    ]
    assert named(job(*ranks)) == ("stuck-in-user-code", [1])


def test_only_members_of_both_groups_can_have_entered_them_in_another_order() -> None:
    groups = {"0": (0, 1, 2), "1": (0, 1)}
    ranks = [
        rank(
            n,
            in_c10d("all_reduce", 60),
            flight=record(*past(3), entry("all_reduce", number, group=group, line=60), groups=groups),
        )
        for n, (group, number) in enumerate((("1", 1), ("0", 4), ("0", 4)))
    ]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("group-order", [0, 1]), verdict.summary
    assert verdict.victims == "2"


@pytest.mark.parametrize(("ops", "facing"), [(("send", "recv"), True), (("recv", "recv"), False)])
def test_a_send_that_faces_a_receive_is_told_to_compare_the_two(ops: tuple[str, ...], facing: bool) -> None:
    verdict = diagnose(job(*(rank(n, in_c10d(op, 30 + n), flight=behind()) for n, op in enumerate(ops))))
    assert verdict.cause == "p2p-cycle"
    assert any("compare peer, tag and group" in s for s in verdict.suggestions) == facing


@pytest.mark.parametrize("ops", [("recv", "recv"), ("send", "send"), ("send", "recv", "recv")])
def test_sends_and_receives_in_a_circle(ops: tuple[str, ...]) -> None:
    ranks = [rank(n, in_c10d(op, 30 + n), flight=behind()) for n, op in enumerate(ops)]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("p2p-cycle", list(range(len(ops))))


def test_where_no_peers_are_recorded_one_that_went_on_may_have_left_out_its_send() -> None:
    receiving = [rank(n, in_c10d("recv", 30), flight=behind()) for n in (1, 2)]
    verdict = diagnose(job(waiting(0, "barrier", line=70), *receiving))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("p2p-cycle", [1, 2])
    assert verdict.summary.endswith("gone on without it: rank 0 waits in barrier at train.py:70 (train).")


def test_a_receive_from_a_sleeping_rank_is_no_circle() -> None:
    ranks = [rank(0, in_c10d("recv", 30)), rank(1, in_c10d("recv", 30)), rank(2, in_user(7), "sleep")]
    assert named(job(*ranks)) == ("stuck-in-user-code", [2])


def test_nccl_names_the_peers_of_a_receive() -> None:
    def recv(n: int, peer: int) -> RankEvidence:
        pending = entry(f"nccl:recv {n}<-{peer}", 1, p2p=True, line=30)
        return rank(n, in_c10d("recv", 30), flight=record(*past(3), pending))

    asleep = rank(3, in_user(7), "sleep", flight=behind())
    verdict = diagnose(job(recv(0, 1), recv(1, 0), waiting(2), asleep))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [3])
    chain = diagnose(job(recv(0, 1), recv(1, 2), recv(2, 0), *(waiting(n) for n in (3, 4, 5))))
    assert (chain.cause, chain.confidence, len(chain.culprits)) == ("p2p-cycle", "high", 3)


def test_one_receive_among_collectives_is_the_odd_one() -> None:
    odd = rank(1, in_c10d("recv", 41), flight=behind())
    assert named(with_culprit(odd, 4)) == ("collective-mismatch", [1])
    verdict = diagnose(with_culprit(odd, 4))
    assert verdict.confidence != "high" and verdict.suggestions[0].startswith("The matching send or receive")
    assert any("a peer that skipped the other end of what rank 1 waits in" in text for text in verdict.ruled_out)


@pytest.mark.parametrize("culprit", [1, 2])
def test_two_roots_of_one_gather(culprit: int) -> None:
    """Rank 0 was the root each time; now ``culprit`` is one, too. The third rank has sent its part, and is past it."""

    def gather(number: int, seq: int, *, done: bool) -> Collective:
        root = number == 0 or (number == culprit and seq == 4)
        one = entry("gather", seq, done=done, line=8)
        return msgspec.structs.replace(one, output_sizes=((3, 4),) if root else ())

    ranks = []
    for n in range(3):
        earlier = [gather(n, seq, done=True) for seq in range(1, 4)]
        past_it = n not in (0, culprit)
        after = [entry("barrier", 5, line=18)] if past_it else []
        flight = record(*earlier, gather(n, 4, done=past_it), *after)
        ranks.append(rank(n, in_c10d("barrier", 18) if past_it else in_c10d("gather", 8), flight=flight))
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium"), verdict.summary
    assert [c.rank for c in verdict.culprits] == [0, culprit]
    assert verdict.culprits[0].frame == at(8)
    assert f"is rank 0 on rank 0 and rank {culprit} on rank {culprit}." in verdict.summary
    assert "the same `src` or `dst` on every rank" in verdict.suggestions[0]


# --- loops and history ------------------------------------------------------------------------------------------------

SOURCE = "\n" * 39 + "for batch in loader:\n" + "    pass\n" * 20 + "dist.barrier()\n"  # the loop: 40-60


@pytest.mark.parametrize(("world", "culprit"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_past_the_loop_of_its_peers(world: int, culprit: int) -> None:
    stack = (in_c10d("barrier", 61)[0], in_c10d("barrier", 61)[1], at(61, "<module>"))
    peer_stack = (*in_c10d("all_reduce", 50)[:2], at(50, "<module>"))
    flight = record(*past(3), entry("barrier", 4))
    left = rank(culprit, stack, flight=flight)
    peers = [rank(n, peer_stack, flight=record(*past(3), entry("all_reduce", 4))) for n in range(world)]
    peers[culprit] = left
    verdict = diagnose(job(*peers), lambda path: SOURCE)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [culprit])
    assert "left the loop at line 40" in verdict.summary
    assert diagnose(job(*peers)).cause == "collective-mismatch"  # without the source


EPOCHS = (
    "\n" * 38 + "for epoch in epochs:\n    for batch in loader:\n" + "        pass\n" * 20 + "    dist.barrier()\n" * 2
)


def in_epochs(ahead: list[int], behind: list[int], text: str) -> Verdict:
    """``ahead`` wait in the barrier at line 61, which ends a round of the loop at line 40; ``behind`` in the loop."""
    before = calls(text)
    number = len(before) + 1
    sides = []
    for ranks, op, line in ((ahead, "barrier", 61), (behind, "all_reduce", 50)):
        last = msgspec.structs.replace(entry(op, number, line=line), record_id=number)
        stack = (*in_c10d(op, line)[:2], at(line, "<module>"))
        sides += [rank(n, stack, flight=record(*before, last)) for n in ranks]
    return diagnose(job(*sides), lambda path: EPOCHS)


ROUND = "0@50x4 barrier:0@61 "


@pytest.mark.parametrize(
    ("ahead", "behind", "text", "cause", "named", "confidence"),
    [
        ([1], [0, 2, 3], ROUND * 3 + "0@50x2", "uneven-batches", [1], "high"),  # fewer than in each round before
        ([0, 2, 3], [1], ROUND * 3 + "0@50x2", "uneven-batches", [1], "high"),  # it had more than its peers
        ([0, 2, 3], [1], ROUND * 3 + "0@50x4", "collective-mismatch", [1], "medium"),  # the barrier was due
        ([1], [0], ROUND * 3 + "0@50x4", "collective-mismatch", [0], "medium"),
        ([1], [0, 2, 3], "0@50x4", "uneven-batches", [1], "medium"),  # the first round: nobody knows how many are usual
        ([0, 2, 3], [1], "0@50x4", "collective-mismatch", [1], "medium"),
        ([1], [0], "0@50x4", "collective-mismatch", [0, 1], "low"),
        ([1], [0, 2, 3], "0@50x200", "collective-mismatch", [1], "medium"),  # 60 steps: no loop over batches
        ([1], [0, 2, 3], ROUND + "0@50x3 barrier:0@61 0@50x3", "uneven-batches", [1], "medium"),  # rounds differ
        ([1], [0, 2, 3], ROUND * 3 + "0@50x4 barrier:0@62", "collective-mismatch", [1], "high"),  # all were past it
        ([1], [0], ROUND * 3 + "0@50x4 barrier:0@62", "collective-mismatch", [0, 1], "medium"),
    ],
)
def test_a_loop_within_a_loop(
    ahead: list[int], behind: list[int], text: str, cause: str, named: list[int], confidence: str
) -> None:
    verdict = in_epochs(ahead, behind, text)
    assert (verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence) == (cause, named, confidence)


def test_who_alone_leaves_the_role_of_all_is_named_across_groups() -> None:
    """Pairs share a group (a, b, c), columns another (x, y). Rank 4 leaves out its pair's call and goes on."""
    rounds = 8
    ranks = []
    for n in range(6):
        pair, column = "abc"[n // 2], "xy"[n % 2]
        whole = f"{pair}@24 {column}@34 " * rounds
        if n == 4:
            text, line = whole + f"{column}@34 {column}@34*", 34
        elif n == 5 or n % 2 == 0:  # rank 5 waits for rank 4 in their pair, ranks 0 and 2 for theirs in the next round
            text, line = whole + (f"{pair}@24*" if n == 5 else f"{pair}@24 {column}@34 {pair}@24*"), 24
        else:
            text, line = whole + f"{pair}@24 {column}@34*", 34
        groups = {"a": (0, 1), "b": (2, 3), "c": (4, 5), "x": (0, 2, 4), "y": (1, 3, 5)}
        mine = {g: m for g, m in groups.items() if n in m}
        ranks.append(rank(n, in_c10d("all_reduce", line), flight=record(*calls(text), groups=mine)))
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [4])
    assert "Rank 4 skipped all_reduce at train.py:24" in verdict.summary
    assert verdict.confidence == "medium"
    assert "Look around the skipped call" in verdict.suggestions[0]


def test_who_is_still_in_the_loop_is_named_where_all_others_have_left_it() -> None:
    peers = [rank(n, in_c10d("barrier", 61), flight=record(*past(3), entry("barrier", 4))) for n in (0, 2, 3)]
    odd = rank(1, in_c10d("all_reduce", 50), flight=record(*past(3), entry("all_reduce", 4)))
    verdict = diagnose(job(odd, *peers), lambda path: SOURCE)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [1])
    assert "is still in the loop at line 40" in verdict.culprits[0].reason


def test_a_call_left_out_long_ago_is_the_fault() -> None:
    """Rank 0 skipped one all_reduce at line 50 long ago; all operations look alike until the barrier."""
    usual, skipped = calls("0@50 0@60 " * 3 + "0@50*"), calls("0@50 0@60 " + "0@60 0@50 " * 2 + "barrier:0@70*")
    ranks = [rank(n, in_c10d("all_reduce", 50), flight=record(*usual)) for n in (1, 2)]
    odd = rank(0, in_c10d("barrier", 70), flight=record(*skipped))
    verdict = diagnose(job(odd, *ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [0])
    assert "Rank 0 skipped all_reduce at train.py:50 (train), which its peers called (collective #3" in verdict.summary
    assert verdict.culprits[0].frame == at(50)  # where its peers called it
    assert verdict.confidence == "high"


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_call_too_many_long_ago_beats_the_sleep_at_the_end(culprit: int) -> None:
    """All sizes agree, so nothing complains: at the end one waits, and the other is done and rests in its own code."""
    ahead = rank(culprit, in_c10d("all_reduce", 50), flight=record(*calls("0@50x3 0@41 0@50x3 0@50*")))
    done = rank(1 - culprit, in_user(90), "sleep", flight=record(*calls("0@50x7")))
    verdict = diagnose(job(ahead, done))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "high")
    assert [(c.rank, c.frame.line if c.frame else 0) for c in verdict.culprits] == [(culprit, 41)]
    assert f"Rank {culprit} called all_reduce at train.py:41 (train), which its peers did not" in verdict.summary
    assert any(f"rank {1 - culprit} is asleep" in text for text in verdict.ruled_out)


def test_a_rank_that_is_behind_for_a_reason_of_its_own_stays_the_culprit() -> None:
    """The call too many explains one of the two numbers that it lacks."""
    ahead = rank(0, in_c10d("all_reduce", 50), flight=record(*calls("0@50x3 0@41 0@50x3 0@50*")))
    asleep = rank(1, in_user(7), "sleep", flight=record(*calls("0@50x6")))
    assert named(job(ahead, asleep)) == ("stuck-in-user-code", [1])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("0@50x3 0@41 0@42 0@41 0@42 0@41*", "0@50x3 0@42 0@41 0@42 0@41"),  # branches by turns
        ("0@50x2 0@41 0@60 0@61 0@62*", "0@50x5"),  # never the same again
    ],
)
def test_different_lines_alone_are_no_fault(mine: str, theirs: str) -> None:
    flight = record(*calls(mine))
    ahead = rank(0, in_c10d("all_reduce", flight.entries[-1].frames[2].line), flight=flight)
    asleep = rank(1, in_user(7), "sleep", flight=record(*calls(theirs)))
    assert named(job(ahead, asleep)) == ("stuck-in-user-code", [1])


def test_what_began_before_the_window_is_out_of_sight() -> None:
    ahead = rank(0, in_c10d("all_reduce", 50), flight=record(*calls("0@41 0@50x4 0@50*", first=20)))
    asleep = rank(1, in_user(7), "sleep", flight=record(*calls("0@50x5", first=20)))
    assert named(job(ahead, asleep)) == ("stuck-in-user-code", [1])


def test_several_calls_too_many_of_a_minority() -> None:
    """Two of five ranks evaluate by themselves: four calls each, and then the loop again."""
    extra = record(*calls("0@50x3 0@41 0@42 0@41 0@42 0@50x3 0@50*"))
    usual = record(*calls("0@50x7"))
    ranks = [rank(n, in_c10d("all_reduce", 50), flight=extra) for n in (1, 3)]
    ranks += [rank(n, in_user(90), "sleep", flight=usual) for n in (0, 2, 4)]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [1, 3])
    assert "Ranks 1,3 called 4 collectives from train.py:41 (train), which their peers did not" in verdict.summary


def test_a_wrong_pair_in_the_past_explains_a_wait_in_which_all_arrived() -> None:
    flights = [
        record(entry("all_reduce" if n else "broadcast", 1, done=True, line=41 if n else 44), entry("all_reduce", 2))
        for n in range(3)
    ]
    ranks = [rank(n, in_c10d("all_reduce", 50), flight=flight) for n, flight in enumerate(flights)]
    assert named(job(*ranks)) == ("collective-mismatch", [0])


def test_module_frames_are_the_users() -> None:
    assert diagnose(job(waiting(0), rank(1, (MODULE,), "sleep", flight=behind()))).culprits[0].frame == MODULE


FORMS = {
    "all_gather": ("all_gather", "_all_gather_base", "all_gather_into_tensor", "all_gather_single"),
    "reduce_scatter": ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
}


@pytest.mark.parametrize(("op", "forms"), FORMS.items())
def test_forms_of_one_operation_are_one_side_of_a_vote(op: str, forms: tuple[str, ...]) -> None:
    """A list of tensors on some ranks, one tensor on others: they meet. The one in a broadcast is the odd one."""
    ranks = [
        rank(n, in_c10d(form, 50), flight=record(*past(3), entry(form, 4, line=50))) for n, form in enumerate(forms)
    ]
    last = len(forms)
    odd = rank(last, in_c10d("broadcast", 41), flight=record(*past(3), entry("broadcast", 4, line=41)))
    verdict = diagnose(job(*ranks, odd))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [last])
    assert verdict.confidence == "high"


def test_a_list_of_tensors_has_as_many_elements_as_one() -> None:
    listed = msgspec.structs.replace(entry("reduce_scatter", 4), input_sizes=((4,),) * 3, input_dtypes=("Float",) * 3)
    single = entry("_reduce_scatter_base", 4, size=(12,))
    assert signature(listed) == signature(single)
    assert signature(entry("_reduce_scatter_base", 4, size=(9,))) != signature(single)
