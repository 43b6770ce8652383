"""Ranks that wait for each other beside c10d: at a connection, for a file that one was to make, for polled work."""

from __future__ import annotations

from textwrap import dedent

import pytest
from evidence import MODULE, SCRIPT, at, behind, entry, in_user, job, past, process, rank, record, waiting
from msgspec import structs

from safelaunch.diagnose import diagnose
from safelaunch.model import Evidence, OtherEnd, RankEvidence, Verdict

LINE = "tcp 127.0.0.1:4 -> 127.0.0.1:5 (established)"
POLLS = dedent(
    """\
    import os, time
    import torch.distributed as dist

    def wait_for(path):
        while not os.path.exists(path):
            time.sleep(0.2)

    def build(rank, path):
        if rank == 0:
            make(path)
        else:
            wait_for(path)

    def average(work):
        while not work.is_completed():
            time.sleep(0.1)

    def pause():
        time.sleep(0.1)

    def collect(rank, path):
        if rank == 0:
            wait_for(path)
    """
)


def decided(verdict: Verdict) -> tuple[str, list[tuple[int, int | None]], str]:
    culprits = [(one.rank, one.frame and one.frame.line) for one in verdict.culprits]
    return verdict.cause, culprits, verdict.confidence


def receives(number: int, *pids: int) -> RankEvidence:
    """At a connection whose other end these processes have."""
    one = rank(number, in_user(9, "exchange"), "pipe", flight=behind())
    assert one.main is not None
    states = []
    for state in one.main.states:
        ends = tuple(OtherEnd(pid, "python") for pid in pids)
        thread = structs.replace(state.threads[0], syscall_name="recvfrom", fd_target=LINE, inode=5, ends=ends)
        states.append(structs.replace(state, threads=(thread,)))
    return structs.replace(one, main=structs.replace(one.main, states=tuple(states)))


# --- connections ------------------------------------------------------------------------------------------------------


def test_a_message_that_a_peer_owes_which_has_gone_on() -> None:
    verdict = diagnose(job(receives(0, 1020), *(waiting(n) for n in (1, 2, 3))))
    assert decided(verdict) == ("blocking-io", [(0, 9)], "medium")
    assert (
        "; the other end is rank 2's, which waits in all_reduce at train.py:50 (train), while ranks 1,3"
        in verdict.summary
    )
    assert verdict.victims == "1-3"
    assert any("Compare the two ends" in advice for advice in verdict.suggestions)


def test_the_children_of_a_peer_have_only_inherited_the_connection() -> None:
    peer = waiting(1, children=[process(77, in_user(3), "sleep", role="child")])
    verdict = diagnose(job(receives(0, 77, 1010), peer))
    assert decided(verdict) == ("blocking-io", [(0, 9)], "medium")
    assert "the other end is rank 1's, which waits in all_reduce" in verdict.summary


@pytest.mark.parametrize("world", [3, 4])
def test_a_message_that_a_peer_owes_who_is_stuck(world: int) -> None:
    asleep = rank(1, in_user(7, "load"), "sleep", flight=behind())
    verdict = diagnose(job(receives(0, 1010), asleep, *(waiting(n) for n in range(2, world))))
    assert decided(verdict) == ("stuck-in-user-code", [(1, 7)], "high")
    assert "at the other end of the connection at which rank 0 waits" in verdict.summary
    assert verdict.victims == ("0,2" if world == 3 else "0,2-3")


def test_ranks_that_receive_from_each_other() -> None:
    verdict = diagnose(job(receives(0, 1010), receives(1, 1000), waiting(2), waiting(3), waiting(4)))
    assert decided(verdict) == ("blocking-io", [(0, 9), (1, 9)], "medium")


def test_a_connection_to_a_process_of_no_rank() -> None:
    verdict = diagnose(job(receives(0, 4711), waiting(1), waiting(2)))
    assert decided(verdict) == ("blocking-io", [(0, 9)], "high")
    assert "the other end is process 4711 (python), not one of this job's ranks" in verdict.summary


def test_where_the_other_end_is_not_known_nothing_is_said_of_it() -> None:
    verdict = diagnose(job(receives(0), waiting(1), waiting(2)))
    assert (decided(verdict)[1], "other end" in verdict.summary) == ([(0, 9)], False)


# --- polls ------------------------------------------------------------------------------------------------------------


def naps(number: int, *lines: tuple[int, str], flight: object = None) -> RankEvidence:
    """Asleep for a moment in each of two looks."""
    frames = (*(at(line, function) for line, function in lines), MODULE)
    one = rank(number, frames, "nap", flight=flight or behind())
    assert one.main is not None
    states = []
    for state in one.main.states:
        thread = structs.replace(state.threads[0], ends_s=state.at_s + 0.2)
        states.append(structs.replace(state, threads=(thread,)))
    return structs.replace(one, main=structs.replace(one.main, states=tuple(states)))


def told(evidence: Evidence) -> Verdict:
    return diagnose(evidence, lambda path: POLLS if path == SCRIPT else None)


def for_file(number: int) -> RankEvidence:
    return naps(number, (6, "wait_for"), (12, "build"))


@pytest.mark.parametrize("world", [3, 4])
def test_a_file_that_is_made_only_by_a_rank_that_has_gone_on(world: int) -> None:
    """The condition on the rank keeps it from the loop in which its peers look for the file."""
    verdict = told(job(waiting(0), *(for_file(n) for n in range(1, world))))
    assert decided(verdict) == ("stuck-in-user-code", [(0, 50)], "medium")
    assert verdict.summary == (
        f"Ranks 1-{world - 1} poll at train.py:6 (wait_for): `while not os.path.exists(path)` (train.py:5)."
        " `else of if rank == 0 (train.py:9)` keeps rank 0 from there, which has gone on to all_reduce at train.py:50"
        " (train) and may have been the one to make that come true."
    )
    assert verdict.victims == f"1-{world - 1}"
    assert any("broadcast" in advice for advice in verdict.suggestions)


def test_of_two_ranks_either_may_be_at_fault() -> None:
    assert decided(told(job(waiting(0), for_file(1)))) == ("stuck-in-user-code", [(0, 50), (1, 6)], "medium")


def test_the_rank_that_was_to_make_the_file_is_stuck_itself() -> None:
    verdict = told(job(rank(0, in_user(7), "sleep", flight=behind()), for_file(1), for_file(2), waiting(3)))
    assert decided(verdict)[:2] == ("stuck-in-user-code", [(0, 7)])
    assert verdict.victims == "1-3"


def test_without_a_condition_on_the_rank_those_who_poll_are_named() -> None:
    verdict = told(job(waiting(0), *(naps(n, (6, "wait_for")) for n in (1, 2, 3))))
    assert decided(verdict) == ("stuck-in-user-code", [(1, 6), (2, 6), (3, 6)], "medium")
    assert "polls at train.py:6 (wait_for): `while not os.path.exists(path)` (train.py:5)" in verdict.summary


def test_one_rank_that_polls_for_what_any_of_the_others_may_make() -> None:
    verdict = told(job(naps(0, (6, "wait_for")), waiting(1), waiting(2), waiting(3)))
    assert decided(verdict) == ("stuck-in-user-code", [(0, 6)], "medium")


def test_one_rank_that_polls_for_what_any_of_those_that_the_source_keeps_away_may_make() -> None:
    verdict = told(job(naps(0, (6, "wait_for"), (23, "collect")), waiting(1), waiting(2), waiting(3)))
    assert decided(verdict) == ("stuck-in-user-code", [(0, 6)], "medium")


def test_a_rank_that_is_asleep_for_good_does_not_poll() -> None:
    verdict = told(job(rank(0, (at(6, "wait_for"), MODULE), "sleep", flight=behind()), waiting(1), waiting(2)))
    assert (decided(verdict), "is asleep in" in verdict.summary) == (("stuck-in-user-code", [(0, 6)], "high"), True)


def for_work(number: int) -> RankEvidence:
    """It asks whether the collective is complete that rank 0 has not come to."""
    flight = record(*past(3), entry("all_reduce", 4, line=20))
    return naps(number, (16, "average"), (20, "train"), flight=flight)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_poll_a_collective_are_victims(world: int) -> None:
    asleep = rank(0, in_user(7), "sleep", flight=behind())
    verdict = told(job(asleep, *(for_work(n) for n in range(1, world))))
    assert decided(verdict) == ("stuck-in-user-code", [(0, 7)], "high")
    assert verdict.victims == ("1" if world == 2 else "1-3")


def test_a_rank_that_sleeps_with_a_collective_under_way_does_not_wait_for_it() -> None:
    flight = record(*past(3), entry("all_reduce", 4, line=20))
    busy = naps(1, (19, "pause"), (20, "train"), flight=flight)
    verdict = told(job(rank(0, in_user(7), "sleep", flight=behind()), busy))
    assert [one.rank for one in verdict.culprits] == [0] or verdict.confidence != "high"
