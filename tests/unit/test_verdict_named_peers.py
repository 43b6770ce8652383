"""What the arguments of a call under way tell: whom a send or receive waits for, and the root of a broadcast.

gloo records neither. The stack reader sees them as local variables of c10d's own frames.
"""

from __future__ import annotations

import msgspec
import pytest
from evidence import SITE, calls, entry, in_c10d, in_user, job, past, rank, record, waiting

from safelaunch.model import CallArguments, Collective, Frame, GilTest, Posted, RankEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose


def sends(number: int, to: int, *, tag: int = 0, line: int = 30) -> RankEvidence:
    return _in_transfer(number, "send", line, CallArguments(dst=to, group_dst=to, tag=tag))


def receives(number: int, source: int, *, tag: int = 0, line: int = 31) -> RankEvidence:
    return _in_transfer(number, "recv", line, CallArguments(src=source, tag=tag))


def _in_transfer(number: int, op: str, line: int, call: CallArguments) -> RankEvidence:
    flight = record(*past(3), entry(op, 1, p2p=True, line=line))
    return rank(number, in_c10d(op, line), flight=flight, call=call)


def named(verdict: Verdict) -> tuple[str, list[int], str]:
    return verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence


def test_a_circle_of_named_peers_is_sure() -> None:
    verdict = diagnose(job(receives(0, 1), receives(1, 2), receives(2, 0), *(waiting(n) for n in (3, 4, 5))))
    assert named(verdict) == ("p2p-cycle", [0, 1, 2], "high")
    assert "rank 0 waits in recv from rank 1 at train.py:31" in verdict.summary.lower()


def test_only_those_in_the_circle_are_named() -> None:
    verdict = diagnose(job(receives(0, 1), receives(1, 0), receives(2, 0), waiting(3)))
    assert named(verdict) == ("p2p-cycle", [0, 1], "high")


def test_a_chain_is_followed_to_its_end() -> None:
    asleep = rank(3, in_user(7), "sleep", flight=record(*past(3)))
    verdict = diagnose(job(receives(0, 1), receives(1, 2), sends(2, 3), asleep))
    assert named(verdict) == ("stuck-in-user-code", [3], "high")


def test_tags_that_differ() -> None:
    verdict = diagnose(job(sends(0, 1, tag=3), receives(1, 0, tag=7), waiting(2), waiting(3)))
    assert named(verdict) == ("collective-mismatch", [0, 1], "medium")
    assert "the tags differ, 3 and 7" in verdict.summary
    assert verdict.suggestions[0] == "Give the send and its receive the same `tag`."


def test_a_send_and_its_receive_with_one_tag_are_no_mismatch_of_tags() -> None:
    assert diagnose(job(sends(0, 1, tag=3), receives(1, 0, tag=3))).cause == "p2p-cycle"


def test_a_peer_that_waits_elsewhere_made_no_call_or_the_rank_one_too_many() -> None:
    verdict = diagnose(job(receives(0, 1), waiting(1), waiting(2)))  # two are no majority: each may follow the other
    assert named(verdict) == ("collective-mismatch", [0, 1], "medium")
    assert "Rank 0 waits in recv from rank 1 at train.py:31 (train), and rank 1 in all_reduce" in verdict.summary


def test_a_transfer_of_one_rank_where_most_wait_in_a_collective() -> None:
    verdict = diagnose(job(receives(0, 1), *(waiting(n) for n in (1, 2, 3))))
    assert named(verdict) == ("collective-mismatch", [0], "medium")
    assert "in all_reduce at train.py:50 (train), a call that most ranks have made" in verdict.summary


def test_a_transfer_of_one_rank_where_a_broadcast_has_let_most_go_on() -> None:
    root = in_broadcast(0, 0)
    further = record(*past(3), entry("broadcast", 4, done=True, line=50), entry("barrier", 5, line=60))
    gone_on = [rank(n, in_c10d("barrier", 60), flight=further) for n in (1, 3)]
    verdict = diagnose(job(root, receives(2, 0), *gone_on))
    assert named(verdict) == ("collective-mismatch", [2], "medium")
    assert named(diagnose(job(root, receives(2, 0), *gone_on[:1])))[1] == [0, 2]  # two of three are no majority


def with_p2p(number: int, text: str, *now: int, call: CallArguments | None = None, op: str) -> RankEvidence:
    """Calls as in ``evidence.calls``; ``send`` and ``recv`` are numbered for themselves."""
    made, collectives, transfers = [], 0, 0
    for place, one in enumerate(calls(text)):
        is_p2p = one.op.endswith(("send", "recv"))
        collectives, transfers = collectives + (not is_p2p), transfers + is_p2p
        numbers = {"seq": collectives, "p2p_seq": transfers, "is_p2p": is_p2p, "record_id": place + 1}
        made.append(msgspec.structs.replace(one, **numbers))
    return rank(number, in_c10d(op, *now), flight=record(*made), call=call)


@pytest.mark.parametrize("others", [0, 2])
def test_the_habit_of_the_peer_shows_what_it_left_out(others: int) -> None:
    receiver = with_p2p(0, "recv:0@31 0@50 " * 4 + "recv:0@31*", 31, call=CallArguments(src=1, tag=0), op="recv")
    sender = with_p2p(1, "send:0@30 0@50 " * 4 + "0@50*", 50, op="all_reduce")
    rest = [with_p2p(n, "0@50 " * 4 + "0@50*", 50, op="all_reduce") for n in range(2, 2 + others)]
    verdict = diagnose(job(receiver, sender, *rest))
    assert named(verdict) == ("collective-mismatch", [1], "medium")
    assert "rank 1 skipped send at train.py:30 (train), which it had always called" in verdict.summary
    assert verdict.culprits[0].frame is not None and verdict.culprits[0].frame.line == 30


def in_broadcast(number: int, root: int) -> RankEvidence:
    flight = record(*past(3), entry("broadcast", 4, line=50))
    return rank(number, in_c10d("broadcast", 50), flight=flight, call=CallArguments(src=root, group_src=root))


def test_two_roots_of_one_broadcast() -> None:
    verdict = diagnose(job(*(in_broadcast(n, 2 if n == 2 else 0) for n in range(4))))
    assert named(verdict) == ("collective-mismatch", [2], "high")
    assert "rank 0 on ranks 0-1,3 and rank 2 on rank 2" in verdict.summary
    even = diagnose(job(in_broadcast(0, 0), in_broadcast(1, 1)))
    assert named(even) == ("collective-mismatch", [0, 1], "medium")


def test_one_root_is_no_mismatch() -> None:
    assert diagnose(job(*(in_broadcast(n, 0) for n in range(3)))).cause == "no-rank-stands-out"


def test_a_source_that_is_not_given_may_be_anybody() -> None:
    anyone = _in_transfer(0, "recv", 31, CallArguments(tag=0))
    asleep = rank(1, in_user(7), "sleep", flight=record(*past(3)))
    assert diagnose(job(anyone, asleep)).culprits[0].rank == 1


def test_ranks_of_a_group_whose_members_are_known() -> None:
    groups = {"3": (1, 3)}
    flight = record(entry("recv", 1, p2p=True, line=31, group="3"), groups=groups)
    receiver = rank(1, in_c10d("recv", 31), flight=flight, call=CallArguments(group_src=1, tag=0))
    asleep = rank(3, in_user(7), "sleep", flight=record(*past(3), groups=groups))
    busy = rank(0, in_user(8), "sleep", flight=record(*past(3)))
    verdict = diagnose(job(busy, receiver, rank(2, in_user(8), "sleep", flight=record(*past(3))), asleep))
    assert [c.rank for c in verdict.culprits] == [3]


@pytest.mark.parametrize("peer", [9, -1])
def test_a_peer_that_is_no_rank_of_the_job(peer: int) -> None:
    assert diagnose(job(receives(0, peer), waiting(1))).cause in ("p2p-cycle", "collective-mismatch")


def in_objects(number: int, seq: int, root: int) -> RankEvidence:
    """The first broadcast of ``broadcast_object_list`` is that of the sizes."""
    made = tuple(entry("broadcast", n, done=n < seq, line=50) for n in range(4, seq + 1))
    frames = (*in_c10d("broadcast", 50)[:2], *in_c10d("broadcast_object_list", 50))
    return rank(number, frames, flight=record(*past(3), *made), call=CallArguments(src=root, group_src=root))


@pytest.mark.parametrize(("others", "confidence"), [(1, "medium"), (0, "high")])
def test_two_roots_of_which_each_waits(others: int, confidence: str) -> None:
    """Rank 0 has sent its sizes and waits in the next broadcast, rank 1 waits for them, rank 3 is another root."""
    gone = [rank(2, in_c10d("all_reduce", 60), flight=record(*past(3), *past_broadcasts(), entry("all_reduce", 6)))]
    ranks = [in_objects(0, 5, 0), in_objects(1, 4, 0), *gone[:others], in_objects(3 if others else 2, 4, 3)]
    verdict = diagnose(job(*ranks))
    assert named(verdict) == ("collective-mismatch", [3 if others else 2], confidence), verdict.summary


def past_broadcasts() -> tuple[Collective, ...]:
    return tuple(entry("broadcast", n, done=True, line=50) for n in (4, 5))


RECV, SEND = (Frame("libtorch_cpu.so", 0, f"c10d::ProcessGroupGloo::{name}::wait") for name in ("RecvWork", "SendWork"))


def in_batch(number: int, native: Frame | None, *posted: Posted) -> RankEvidence:
    """In ``work.wait()`` on the user's own line. No recorder of gloo's tells of the batch."""
    gil = GilTest(ping=True, python=True, posted=posted)
    one = rank(
        number, in_user(33, "exchange"), "futex", flight=record(*past(3)), gil=gil, native=[native] if native else []
    )
    assert one.main is not None
    stacks = tuple(
        msgspec.structs.replace(s, threads=tuple(msgspec.structs.replace(t, ident=77) for t in s.threads))
        for s in one.main.stacks
    )
    return msgspec.structs.replace(one, main=msgspec.structs.replace(one.main, stacks=stacks))


def test_a_send_that_a_batch_of_its_peer_left_out() -> None:
    ring = (Posted(77, sends=True, peer=2), Posted(77, sends=False, peer=0))
    verdict = diagnose(job(waiting(0), in_batch(1, SEND, *ring), waiting(2), waiting(3)))
    assert named(verdict) == ("collective-mismatch", [1, 2], "medium")
    assert "Rank 1 waits in isend to rank 2 at train.py:33 (exchange), and rank 2 in all_reduce" in verdict.summary
    receiving = diagnose(job(waiting(0), in_batch(1, RECV, *ring), waiting(2), waiting(3)))
    assert [c.rank for c in receiving.culprits] == [0, 1]


def test_a_batch_that_names_several_peers_says_nothing_of_one() -> None:
    ops = tuple(Posted(77, sends=True, peer=peer) for peer in (0, 2, 3))
    verdict = diagnose(job(waiting(0), in_batch(1, SEND, *ops), waiting(2), waiting(3)))
    assert "isend" not in verdict.summary


def test_a_batch_without_c_frames() -> None:
    """Which of its parts the rank waits for is not known then, but that it is one of them."""
    one, two = Posted(77, sends=True, peer=2), Posted(77, sends=False, peer=0)
    alone = diagnose(job(waiting(0), in_batch(1, None, one), waiting(2), waiting(3)))
    assert named(alone) == ("collective-mismatch", [1, 2], "medium")
    verdict = diagnose(job(waiting(0), in_batch(1, None, one, two), waiting(2), waiting(3)))
    assert verdict.cause == "collective-mismatch" and "Rank 1 waits in a send or receive" in verdict.summary


@pytest.mark.parametrize("native", [RECV, None])
def test_batches_that_wait_for_each_other(native: Frame | None) -> None:
    ranks = [in_batch(n, native, Posted(77, sends=False, peer=(n + 1) % 3)) for n in range(3)]
    assert named(diagnose(job(*ranks)))[:2] == ("p2p-cycle", [0, 1, 2])


def ring(number: int, to: int | None = None, source: int | None = None) -> RankEvidence:
    to, source = (number + 1) % 4 if to is None else to, (number - 1) % 4 if source is None else source
    return in_batch(number, SEND, Posted(77, sends=True, peer=to), Posted(77, sends=False, peer=source))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            ring(2, to=1),
            "Rank 2 sends to rank 1, which does not expect that, while rank 3 waits to receive from rank 2",
        ),
        (ring(2, source=3), "Rank 2 receives from rank 3, which does not expect that, while rank 1 waits to send to"),
    ],
)
def test_a_rank_of_a_ring_that_names_the_wrong_neighbour(odd: RankEvidence, words: str) -> None:
    verdict = diagnose(job(ring(0), ring(1), odd, ring(3)))
    assert named(verdict) == ("collective-mismatch", [2], "medium")
    assert words in verdict.summary and "computes its peers" in verdict.suggestions[0]


def test_a_ring_whose_batches_fit_or_that_is_turned_by_all_names_no_wrong_neighbour() -> None:
    assert named(diagnose(job(*map(ring, range(4)))))[0] == "p2p-cycle"
    turned = [ring(n, to=(n + 2) % 4) for n in range(4)]
    assert named(diagnose(job(*turned)))[0] == "p2p-cycle"


def test_advice_on_a_circle_fits_its_sends_and_receives() -> None:
    receive = diagnose(job(receives(0, 1), receives(1, 0))).suggestions
    send = diagnose(job(sends(0, 1), sends(1, 0))).suggestions
    assert "count the sends and receives" in receive[0] and not any("even ranks" in one for one in receive)
    assert "even ranks" in send[0] and not any("count the sends" in one for one in send)


SCHEDULE = Frame(f"{SITE}/torch/distributed/pipelining/schedules.py", 683, "_wait_batch_p2p")


@pytest.mark.parametrize(
    ("line", "cause"), [("    w.wait()", "collective-mismatch"), ("    lock.take()", "stuck-in-user-code")]
)
def test_a_wait_of_torchs_own_schedule_without_c_frames(line: str, cause: str) -> None:
    """The line there says that a wait is called, and collectives would have been recorded."""
    sources = {SCHEDULE.file: "\n" * 681 + f"for w in work:\n{line}\n"}
    one = rank(1, (SCHEDULE, *in_user(33)), "futex", flight=record())
    verdict = diagnose(job(waiting(0), one, waiting(2)), sources.get)
    assert verdict.cause == cause, verdict.summary
    assert ("a send or receive at train.py:33" in verdict.summary) == (cause == "collective-mismatch")
