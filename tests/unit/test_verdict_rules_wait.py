"""Ranks that wait for each other beside c10d: at a connection, for a file that one was to make, for polled work."""

from __future__ import annotations

from textwrap import dedent

import pytest
from evidence import (
    MODULE,
    SCRIPT,
    SITE,
    STDLIB,
    at,
    behind,
    entry,
    in_c10d,
    in_user,
    job,
    past,
    process,
    rank,
    record,
    waiting,
)
from msgspec import structs

from safelaunch.model import Evidence, GilTest, OtherEnd, RankEvidence, RankException, RankExit, Verdict
from safelaunch.verdict.diagnose import diagnose

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
    assert "; the other end is rank 2's, while rank 2 waits in all_reduce at train.py:50 (train)" in verdict.summary
    assert verdict.victims == "1-3"
    assert any("Compare the two ends" in advice for advice in verdict.suggestions)


def test_the_children_of_a_peer_have_only_inherited_the_connection() -> None:
    peer = waiting(1, children=[process(77, in_user(3), "sleep", role="child")])
    verdict = diagnose(job(receives(0, 77, 1010), peer))
    assert decided(verdict) == ("blocking-io", [(0, 9)], "medium")
    assert "the other end is rank 1's, while rank 1 waits in all_reduce" in verdict.summary


@pytest.mark.parametrize("world", [3, 4])
def test_a_message_that_a_peer_owes_who_is_stuck(world: int) -> None:
    asleep = rank(1, in_user(7, "load"), "sleep", flight=behind())
    verdict = diagnose(job(receives(0, 1010), asleep, *(waiting(n) for n in range(2, world))))
    assert decided(verdict) == ("stuck-in-user-code", [(1, 7)], "high")
    assert "at the other end of the connection at which rank 0 waits" in verdict.summary
    assert verdict.victims == ("0,2" if world == 3 else "0,2-3")


HANDLER = (at(9, "answer", f"{STDLIB}/socketserver.py"), at(14, "run", f"{STDLIB}/threading.py"))
LOOP = at(1922, "BaseEventLoop._run_once", f"{STDLIB}/asyncio/base_events.py")


@pytest.mark.parametrize("clients", [1, 2])
def test_a_server_thread_that_wants_a_lock_of_its_own_rank(clients: int) -> None:
    threads = [(f"Thread-{n}", (at(33, "do_GET"), *HANDLER), "futex") for n in range(clients)]
    server = waiting(3, threads=[("Thread-9", HANDLER, "poll"), *threads])
    verdict = diagnose(
        job(*(receives(n, 1030) for n in range(clients)), *(waiting(n) for n in range(clients, 3)), server)
    )
    assert decided(verdict)[:2] == ("lock-deadlock", [(3, 50)])
    assert "its thread 'Thread-0', which should answer, waits for a lock at train.py:33 (do_GET)" in verdict.summary
    assert any("never call a collective" in advice for advice in verdict.suggestions)


def test_an_event_loop_that_stands_in_a_barrier() -> None:
    frames = (*in_c10d("barrier", 50)[:3], at(31, "serve"), LOOP, at(9, "main"), MODULE)
    server = rank(2, frames, flight=record(*past(3), entry("barrier", 4, line=50)))
    verdict = diagnose(job(receives(0, 1020), receives(1, 1020), server))
    assert decided(verdict)[:2] == ("lock-deadlock", [(2, 50)])
    assert "its event loop, which should answer, is blocked" in verdict.summary
    assert verdict.victims == "0-1"


def test_a_thread_that_waits_for_work_was_not_to_answer() -> None:
    waiter = (at(355, "Condition.wait", f"{STDLIB}/threading.py"), at(171, "Queue.get", f"{STDLIB}/queue.py"))
    peer = waiting(2, threads=[("Thread-1", (*waiter, at(33, "log"), *HANDLER[1:]), "futex")])
    verdict = diagnose(job(receives(0, 1020), waiting(1), peer))
    assert decided(verdict) == ("blocking-io", [(0, 9)], "medium")


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
        f"Each of ranks 1-{world - 1} polls at train.py:6 (wait_for): `while not os.path.exists(path)` (train.py:5),"
        " while rank 0 waits in all_reduce at train.py:50 (train). `else of if rank == 0 (train.py:9)` keeps rank 0"
        " from there."
    )
    assert verdict.victims == f"1-{world - 1}"
    assert any("broadcast" in advice for advice in verdict.suggestions)


def test_of_two_ranks_either_may_be_at_fault() -> None:
    assert decided(told(job(waiting(0), for_file(1)))) == ("stuck-in-user-code", [(0, 50), (1, 6)], "medium")


def test_the_rank_that_was_to_make_the_file_is_stuck_itself() -> None:
    verdict = told(job(rank(0, in_user(7), "sleep", flight=behind()), for_file(1), for_file(2), waiting(3)))
    assert decided(verdict)[:2] == ("stuck-in-user-code", [(0, 7)])
    assert verdict.victims == "1-3"


FLAG = """
def prepare(rank, flag):
    if rank == 0:
        download()
        if late:
            dist.barrier()
        open(flag, "w").close()
    while not os.path.exists(flag):
        time.sleep(1)
    load(flag)
"""


@pytest.mark.parametrize(
    ("opens", "culprits"),
    [("open(flag", [(0, 6)]), ("open(other", [(1, 9), (2, 9)]), ("if rank < 2: open(flag", [(1, 9), (2, 9)])],
)
def test_the_file_is_made_behind_a_condition_on_the_rank(opens: str, culprits: list[tuple[int, int]]) -> None:
    """All ranks come to the loop; rank 0 alone comes to the line that ends it, and waits for the others before."""
    text = FLAG.replace("if rank == 0", "if rank < 2" if "rank < 2" in opens else "if rank == 0")
    text = text.replace("open(flag", opens.rpartition(": ")[2])
    inside = rank(0, in_c10d("barrier", 6, "prepare"), flight=record(*past(3), entry("barrier", 4, line=6)))
    evidence = job(inside, *(naps(n, (9, "prepare")) for n in (1, 2)))
    verdict = diagnose(evidence, lambda path: text if path == SCRIPT else None)
    assert decided(verdict)[:2] == ("stuck-in-user-code", culprits), verdict.summary
    if culprits == [(0, 6)]:
        assert "Rank 0 alone comes to train.py:7, which names that file, behind `if rank == 0" in verdict.summary
        assert "while rank 0 waits in barrier at train.py:6 (prepare)." in verdict.summary


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


RPC = f"{SITE}/torch/distributed/rpc"


def asks(number: int) -> RankEvidence:
    inner = (at(820, "_invoke_rpc", f"{RPC}/api.py"), at(775, "rpc_sync", f"{RPC}/api.py"))
    return rank(number, (*inner, at(24, "fetch"), MODULE), flight=behind(), gil=GilTest(ping=True, python=True))


def test_a_remote_call_whose_handler_wants_a_lock_of_its_own_rank() -> None:
    handler = (at(12, "get_weights"), at(207, "_run_function", f"{RPC}/internal.py"))
    server = waiting(3, threads=[("Thread-4", handler, "futex")])
    verdict = diagnose(job(waiting(0), waiting(1), asks(2), server), lambda path: "value = call()\n" * 60)
    assert decided(verdict)[:2] == ("lock-deadlock", [(3, 50)])
    assert "its thread 'Thread-4', which should answer" in verdict.summary
    assert verdict.victims == "0-2"


def test_a_remote_call_that_nobody_is_seen_to_handle() -> None:
    verdict = diagnose(job(waiting(0), waiting(1), asks(2), waiting(3)))
    assert decided(verdict)[1] == [(2, 24)]
    assert "for another rank to answer a remote call" in verdict.summary


def test_a_remote_call_whose_time_ran_out_is_no_fault_of_who_made_it() -> None:
    text = "RPCErr:1:RPC ran for more than set timeout (60000 ms) and will now be marked with an error"
    frames = (at(820, "_invoke_rpc", f"{RPC}/api.py"), at(775, "rpc_sync", f"{RPC}/api.py"), at(24, "fetch"), MODULE)
    error = RankException("RuntimeError", text, 100.0, frames)
    asleep = rank(1, in_user(7, "load"), "sleep", flight=behind())
    clients = [rank(n, seen=False, more={"exception": error, "exit": RankExit(1, 100.5)}) for n in (0, 2)]
    verdict = diagnose(job(*clients, asleep, outcome="crash"))
    assert decided(verdict)[:2] == ("stuck-in-user-code", [(1, 7)])
    assert "ranks 0,2 wait in a remote call" in verdict.summary
