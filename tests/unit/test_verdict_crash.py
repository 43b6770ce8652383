"""Crashes: the first failure in time is named, its consequences are not."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import (
    C10D,
    MODULE,
    SITE,
    at,
    behind,
    calls,
    entry,
    in_c10d,
    in_init,
    in_user,
    job,
    past,
    rank,
    record,
    waiting,
)
from msgspec.structs import replace

from safelaunch.model import (
    ExitCall,
    FatalError,
    Frame,
    GilTest,
    Launched,
    MemoryKills,
    NcclLog,
    Progress,
    RankEvidence,
    RankException,
    RankExit,
    Verdict,
)
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.exits import remote_error

OLD_TORCH = Launched(torch="2.9.1")  # in which DETAIL works with DDP
RESET = "[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def raised(number: int, kind: str, message: str, when: float, line: int = 41, **fields: Any) -> RankEvidence:
    frames = (at(line, "step"), at(100, "<module>"))
    if "peer" in message or "imed out" in message:
        frames = (Frame(C10D, 3252, "all_reduce"), *frames)
    exception = RankException(kind, message, when, frames)
    more = {"exception": exception, "exit": RankExit(1, when + 0.2)}
    return rank(number, seen=False, more=more, **fields)


def ended(number: int, code: int, when: float = 100.0, *, first: bool = True, log: str = "") -> RankEvidence:
    return rank(number, seen=False, more={"exit": RankExit(code, when, before_close=first), "log_tail": log})


def terminated(number: int) -> RankEvidence:
    return ended(number, -15, 105.0, first=False)


def named(*ranks: RankEvidence, **fields: Any) -> tuple[str, list[int]]:
    verdict = diagnose(job(*ranks, outcome="crash", **fields))
    return verdict.cause, [c.rank for c in verdict.culprits]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_first_exception_is_named(world: int, culprit: int) -> None:
    ranks = [raised(n, "RuntimeError", RESET, 101.0 + n) for n in range(world)]
    ranks[culprit] = raised(culprit, "ValueError", "bad sample", 100.0)
    verdict = diagnose(job(*ranks, outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("rank-exception", [culprit])
    assert verdict.culprits[0].frame == at(41, "step")
    assert "ValueError: bad sample" in verdict.summary
    assert verdict.confidence == "high"
    assert any(claim.file == f"ranks/{culprit}/exception.json" for claim in verdict.evidence)


def test_time_decides_not_rank() -> None:
    first, second = raised(2, "ValueError", "a", 100.0, 41), raised(0, "KeyError", "b", 100.5, 60)
    assert named(second, terminated(1), first) == ("rank-exception", [2])


def test_equal_exceptions_are_equally_at_fault() -> None:
    assert named(*(raised(n, "ImportError", "x", 100.0 + n) for n in range(3))) == ("rank-exception", [0, 1, 2])


def test_a_reset_connection_of_the_users_own_is_a_cause() -> None:
    own = raised(1, "ConnectionResetError", "[Errno 104] Connection reset by server", 100.0)
    assert named(terminated(0), own) == ("rank-exception", [1])


@pytest.mark.parametrize(("code", "name"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-6, "SIGABRT")])
def test_killed_by_a_signal(code: int, name: str) -> None:
    verdict = diagnose(job(raised(0, "RuntimeError", RESET, 101.0), ended(1, code), terminated(2), outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("rank-killed", [1])
    assert name in verdict.summary


def test_the_last_words_of_an_abort_are_told() -> None:
    log = "step 3\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  sizes differ\n"
    verdict = diagnose(job(ended(0, -6, log=log), terminated(1), outcome="crash"))
    assert "sizes differ" in verdict.culprits[0].reason


@pytest.mark.parametrize("state", ["exited", "torch"])
def test_an_abort_after_the_script_had_ended_is_told_as_such(state: str) -> None:
    log = "trained\nterminate called without an active exception\n"
    page = Progress(1, 1, 2, 0, 1001, 1, state)
    verdict = diagnose(job(terminated(0), replace(ended(1, -6, log=log), progress=page), outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("rank-killed", [1])
    ended_before = state == "exited"
    assert ("after its script had ended" in verdict.summary) == ended_before
    assert any("190489" in advice for advice in verdict.suggestions) == ended_before


def test_an_exit_code_without_an_exception() -> None:
    assert named(raised(0, "RuntimeError", RESET, 101.0), ended(1, 3)) == ("rank-exited", [1])


def test_an_early_clean_exit_explains_closed_connections() -> None:
    assert named(raised(0, "RuntimeError", RESET, 101.0), ended(1, 0)) == ("uneven-batches", [1])


def test_several_that_have_left_are_named_together() -> None:
    verdict = diagnose(job(ended(0, 0), ended(1, 0), raised(2, "RuntimeError", RESET, 101.0), outcome="crash"))
    assert verdict.summary.startswith("Each of ranks 0-1 has left the training loop: it exited cleanly")


@pytest.mark.parametrize(
    ("inner", "fits"),
    [((), False), ((Frame(C10D, 2500, "recv"),), False), ((Frame(C10D, 3252, "all_reduce"),), True)],
)
def test_a_clean_exit_may_have_left_out_a_send(inner: tuple[Frame, ...], fits: bool) -> None:
    """Sends and receives are met by one peer, not by all: that it is gone says nothing about its batches."""
    left = raised(0, "RuntimeError", RESET, 101.0)
    assert left.exception is not None
    error = replace(left.exception, frames=(*inner, at(41, "step"), at(100, "<module>")))
    verdict = diagnose(job(replace(left, exception=error), ended(1, 0), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("uneven-batches", "medium" if fits else "low"), verdict.summary
    assert any("send or receive" in text for text in verdict.ruled_out) != fits


@pytest.mark.parametrize("recorded", [False, True])
def test_without_a_record_one_that_waits_for_one_that_ended_may_have_called_too_often(recorded: bool) -> None:
    """``if rank == 0: all_reduce(x)`` as the last act: the peer's end looks as one of fewer batches."""
    wait = (Frame(C10D, 3252, "all_reduce"), at(41), MODULE)
    flights = [record(*calls(text)) if recorded else None for text in ("0@41x3", "0@41x2")]
    first = raised(0, "RuntimeError", RESET, 101.0)
    assert first.exception is not None
    first = replace(first, exception=replace(first.exception, frames=wait), flight_record=flights[0])
    verdict = diagnose(job(first, replace(ended(1, 0), flight_record=flights[1]), outcome="crash"))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("uneven-batches", [1])
    assert (verdict.confidence == "high") is recorded
    assert any("either may be at fault" in doubt for doubt in verdict.doubts) is not recorded


def test_a_clean_exit_does_not_explain_an_exception() -> None:
    assert named(raised(0, "ValueError", "own", 101.0), ended(1, 0)) == ("rank-exception", [0])


def test_those_terminated_by_the_launcher_are_no_cause() -> None:
    verdict = diagnose(job(terminated(0), raised(1, "ValueError", "x", 100.0), terminated(2), outcome="crash"))
    assert [c.rank for c in verdict.culprits] == [1]
    assert verdict.victims == "0,2"


def test_a_rank_looked_at_in_its_own_code_is_a_victim_all_the_same() -> None:
    """The first failure found it between two collectives; the launcher ended it."""
    computing = rank(1, in_user(7), "sleep", more={"exit": RankExit(-15, 105.0, before_close=False)})
    verdict = diagnose(job(ended(0, 0), computing, raised(2, "RuntimeError", RESET, 101.0), outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [0])
    assert verdict.victims == "1-2"


def test_a_timeout_is_diagnosed_as_the_hang_it_was() -> None:
    """All that is left is the timeout of the ranks that waited; the rank they waited for was asleep."""
    late = "Timed out waiting 30000ms for recv operation to complete"
    victims = [raised(n, "RuntimeError", late, 130.0 + n) for n in (0, 2)]
    asleep = rank(
        1, in_user(7, "load"), "sleep", flight=behind(), more={"exit": RankExit(-15, 131.0, before_close=False)}
    )
    verdict = diagnose(job(victims[0], asleep, victims[1], outcome="crash"))
    assert (verdict.outcome, verdict.cause, [c.rank for c in verdict.culprits]) == ("hang", "stuck-in-user-code", [1])
    assert verdict.culprits[0].frame == at(7, "load")


def test_a_timeout_after_a_failure_is_a_crash() -> None:
    late = "Timed out waiting 30000ms for recv operation to complete"
    verdict = diagnose(
        job(raised(0, "RuntimeError", late, 130.0), raised(1, "ValueError", "x", 100.0), outcome="crash")
    )
    assert (verdict.outcome, verdict.cause, [c.rank for c in verdict.culprits]) == ("crash", "rank-exception", [1])


def test_only_consequences_single_nobody_out() -> None:
    verdict = diagnose(job(*(raised(n, "RuntimeError", RESET, 100.0) for n in range(3)), outcome="crash"))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failure_that_its_peers_outlived_is_named_in_a_hang(culprit: int) -> None:
    ranks = [waiting(n) for n in range(3)]
    ranks[culprit] = raised(culprit, "ValueError", "bad sample", 100.0)
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("rank-exception", [culprit])
    ranks[culprit] = ended(culprit, 0)
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [culprit])
    ranks[culprit] = ended(culprit, -9)
    assert diagnose(job(*ranks)).cause == "rank-killed"


def test_a_finished_rank_is_not_blamed_for_one_that_nobody_waits_for() -> None:
    verdict = diagnose(job(ended(0, 0), rank(1, in_user(7), "sleep"), rank(2, in_user(7), "sleep")))
    assert verdict.culprits == ()
    verdict = diagnose(job(ended(0, 0), rank(1, in_user(7), "sleep")))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])


def test_a_rank_behind_its_peers_with_their_stacks_taken_before_the_end() -> None:
    peers = [
        rank(n, in_c10d("all_reduce", 50), more={"exit": RankExit(-15, 105.0, before_close=False)}) for n in (0, 1)
    ]
    verdict = diagnose(job(*peers, raised(2, "ValueError", "x", 100.0), outcome="crash"))
    assert ([c.rank for c in verdict.culprits], verdict.victims) == ([2], "0-1")


def _at_six(number: int, size: tuple[int, ...], dtype: str = "Float") -> RankEvidence:
    flight = record(*past(5), entry("all_reduce", 6, line=50, size=size, dtype=dtype))
    return rank(number, in_c10d("all_reduce", 50), flight=flight, more={"exit": RankExit(-15, 105.0, False)})


def _aborted(number: int) -> RankEvidence:
    fatal = FatalError("Aborted", in_c10d("all_reduce", 50))
    return rank(number, seen=False, more={"exit": RankExit(-6, 100.0), "fatal": fatal})


def test_who_receives_a_wrong_size_is_aborted_and_the_sender_is_named() -> None:
    verdict = diagnose(job(_aborted(0), _at_six(1, (16,)), _at_six(2, (16,)), _at_six(3, (24,)), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [c.rank for c in verdict.culprits] == [3]
    assert "Rank 0 was aborted" in verdict.summary


def test_of_several_sides_at_its_line_an_aborted_rank_may_be_of_any() -> None:
    verdict = diagnose(job(_aborted(0), _at_six(1, (24,)), _at_six(2, (8,)), outcome="crash"))
    assert ([c.rank for c in verdict.culprits], verdict.confidence) == ([1, 2], "low")
    three = diagnose(job(_aborted(0), _at_six(1, (24,)), _at_six(2, (8,)), _at_six(3, (9,)), outcome="crash"))
    assert three.culprits == ()  # of which of the others it is, nobody knows


def test_an_aborted_rank_counts_for_the_side_whose_line_it_was_at() -> None:
    """Two against two, as its stack shows, although only one of the two on its side has left a record."""
    other = rank(3, in_c10d("all_reduce", 60), flight=record(*past(5), entry("all_reduce", 6, line=60, size=(24,))))
    verdict = diagnose(job(_at_six(0, (16,)), _at_six(2, (16,)), _aborted_at(1, 60), other, outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "low")
    assert [c.rank for c in verdict.culprits] == [0, 2, 3]


def _aborted_at(number: int, line: int) -> RankEvidence:
    fatal = FatalError("Aborted", in_c10d("all_reduce", line))
    return rank(number, seen=False, more={"exit": RankExit(-6, 100.0), "fatal": fatal})


def aborted_in_a_thread(number: int, line: int = 9) -> RankEvidence:
    """gloo's thread has aborted it; the main thread sleeps, and another one is in the call."""
    metrics = (*in_c10d("all_reduce", line)[:3], at(100, "publish_metrics"))
    fatal = FatalError("Aborted", (at(16, "<module>"),), (metrics, (at(16, "<module>"),)))
    return rank(number, seen=False, more={"exit": RankExit(-6, 100.0), "fatal": fatal})


def test_a_size_that_does_not_fit_names_both_calls() -> None:
    verdict = diagnose(job(aborted_in_a_thread(0), _at_six(1, (16,)), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [(c.rank, c.frame and c.frame.line) for c in verdict.culprits] == [(0, 9), (1, 50)]
    assert "Rank 0 was aborted in a call at train.py:9 (train), as a peer sent more than it expected" in verdict.summary
    assert "room for less" not in verdict.summary, "rank 1's call was at another line"
    lost = RankException("RuntimeError", "Connection closed by peer", 5.0, (at(50), at(60, "<module>")), "Traceback")
    thrown_out = rank(2, seen=False, more={"exception": lost, "exit": RankExit(1, 101.0)})
    alone = diagnose(job(aborted_in_a_thread(0), _at_six(1, (16,)), thrown_out, outcome="crash"))
    assert [c.rank for c in alone.culprits] == [0], "the others are in one place, told in two ways"


def test_a_size_that_does_not_fit_where_the_survivors_agree() -> None:
    verdict = diagnose(job(aborted_in_a_thread(2), *(_at_six(n, (16,)) for n in (0, 1, 3)), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [c.rank for c in verdict.culprits] == [2]


def test_at_one_line_whoever_came_there_on_another_way_than_most_is_at_fault() -> None:
    """A rank that is in the forward pass of ``model(x).backward()``, where the others are in the backward one."""
    lost = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5: Connection reset by peer"
    forward, backward = (
        (*in_c10d("all_gather", 26)[:2], Frame(f"{SITE}/torch/{name}", 9, "f"), at(26)) for name in "ab"
    )

    def thrown_out(number: int, frames: tuple[Frame, ...]) -> RankEvidence:
        raised = RankException("RuntimeError", lost, 100.5, frames, "Traceback")
        page = GilTest(ping=True, python=False)
        return rank(number, (), "sleep", gil=page, more={"exception": raised, "exit": RankExit(-15, 105.0, False)})

    aborted = rank(1, seen=False, more={"exit": RankExit(-6, 100.0), "fatal": FatalError("Aborted", backward)})
    verdict = diagnose(job(thrown_out(0, forward), aborted, thrown_out(2, backward), outcome="crash"))
    assert ([c.rank for c in verdict.culprits], verdict.confidence) == ([0], "medium"), verdict.summary
    assert "Rank 0 came there through other frames than most." in verdict.summary
    alike = diagnose(job(thrown_out(0, backward), aborted, thrown_out(2, backward), outcome="crash"))
    assert [c.rank for c in alike.culprits] == [1]


def test_who_waits_in_a_group_without_the_aborted_rank_has_sent_it_nothing() -> None:
    """Its own group: which of the two is wrong stays open, but ranks 2 and 3 are neither."""
    groups = {"1": (0, 1), "2": (2, 3)}

    def of(number: int, text: str, line: int) -> RankEvidence:
        return rank(number, in_c10d("all_reduce", line), flight=record(*calls(text), groups=groups))

    peers = (of(2, "2@60x5 2@60*", 60), of(3, "2@60x5 2@70*", 70))
    verdict = diagnose(job(of(0, "1@50x5 1@50*", 50), _aborted_at(1, 55), *peers, outcome="crash"))
    assert verdict.cause == "collective-mismatch", verdict.summary
    assert [c.rank for c in verdict.culprits] == [0, 1] and "ranks 2" not in verdict.summary


def test_what_did_not_fit_came_from_the_rank_that_took_another_group() -> None:
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}

    def of(number: int, text: str, line: int) -> RankEvidence:
        return rank(number, in_c10d("all_reduce", line), flight=record(*calls(text), groups=groups))

    survivors = (of(0, "3@60x5 1@50*", 50), of(1, "4@60x5 4@60*", 60), of(3, "4@60x5 2@60*", 60))
    verdict = diagnose(job(*survivors[:2], _aborted_at(2, 50), survivors[2], outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [(c.rank, c.frame and c.frame.line) for c in verdict.culprits] == [(3, 60)]
    assert verdict.summary.startswith("Rank 3 made its 5 earlier calls at train.py:60 (train) in group '4': with group")
    assert verdict.suggestions[0].startswith("Check how this line selects its group")


def test_the_condition_that_sent_an_aborted_rank_to_its_call() -> None:
    source = "def train():\n    if epoch % 2 == 1 and rank == 0:\n        evaluate()\n" + "    pass\n" * 60
    read = {at(3).file: source}.get
    peers = (_at_six(n, (16,)) for n in (1, 2))
    verdict = diagnose(job(_aborted_at(0, 3), *peers, outcome="crash"), read_source=read)
    assert (
        "Ranks 1-2 never reach train.py:3 (train) because of `if epoch % 2 == 1 and rank == 0 (train.py:2)`"
        in verdict.summary
    )
    assert "Gate the side effect" in verdict.suggestions[0]


def test_one_survivor_against_one_after_an_abort_names_both() -> None:
    verdict = diagnose(job(_aborted(1), _at_six(0, (16,)), _at_six(2, (16,), "Double"), outcome="crash"))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "low")
    assert [c.rank for c in verdict.culprits] == [0, 2]


def test_an_abort_about_which_the_survivors_agree_stays_with_the_aborted_rank() -> None:
    verdict = diagnose(job(_at_six(0, (16,)), _aborted(1), _at_six(2, (16,)), outcome="crash", launched=OLD_TORCH))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert [c.rank for c in verdict.culprits] == [1]
    assert any("desync-detail" in text for text in verdict.suggestions)


def test_an_abort_in_the_operator_that_waits_for_a_collective_is_one_in_a_collective() -> None:
    """``DTensor.full_tensor()``: the wait is an operator of torch's, called by c10d's functional collectives."""
    inner = (
        Frame(f"{SITE}/torch/_ops.py", 882, "redispatch"),
        Frame(f"{SITE}/torch/distributed/_functional_collectives.py", 142, "wait_tensor"),
        Frame(f"{SITE}/torch/distributed/tensor/_api.py", 774, "full_tensor"),
    )
    aborted = died(1, -6, fatal=FatalError("Aborted", (*inner, at(41, "save"), at(100, "<module>"))))
    verdict = diagnose(job(_at_six(0, (16,)), aborted, _at_six(2, (16,)), outcome="crash", launched=OLD_TORCH))
    assert (verdict.cause, verdict.confidence) == ("collective-mismatch", "medium")
    assert verdict.culprits[0].frame == at(41, "save")
    assert any("desync-detail" in text for text in verdict.suggestions)


# --- where it ended, and why ----------------------------------------------------------------------------------------


def died(number: int, code: int, **fields: Any) -> RankEvidence:
    return rank(number, seen=False, more={"exit": RankExit(code, 100.0), **fields})


@pytest.mark.parametrize(("code", "message"), [(-11, "Segmentation fault"), (-6, "Aborted"), (-7, "Bus error")])
def test_a_fatal_signal_is_placed_by_faulthandler(code: int, message: str) -> None:
    fatal = FatalError(message, (Frame(C10D, 3252, "all_reduce"), at(41, "step"), at(100, "<module>")))
    verdict = diagnose(job(terminated(0), died(1, code, fatal=fatal), outcome="crash"))
    assert verdict.culprits[0].frame == at(41, "step")
    assert "train.py:41 (step)" in verdict.summary
    assert any(claim.file == "ranks/1/fault.txt" for claim in verdict.evidence)


def test_an_earlier_fault_does_not_explain_a_sigkill() -> None:
    fatal = FatalError("Segmentation fault", (at(41, "step"),))
    verdict = diagnose(job(terminated(0), died(1, -9, fatal=fatal), outcome="crash"))
    assert verdict.culprits[0].frame is None


@pytest.mark.parametrize("function", ["os._exit", "sys.exit"])
@pytest.mark.parametrize("code", [0, 4])
def test_the_line_that_called_exit(function: str, code: int) -> None:
    call = ExitCall(function, code, (at(41, "leave"), at(100, "<module>")))
    verdict = diagnose(job(terminated(0), died(1, code, exit_call=call), outcome="crash"))
    assert verdict.cause == ("rank-exited" if code else "uneven-batches")
    assert verdict.culprits[0].frame == at(41, "leave")
    assert f"{function}() at train.py:41 (leave)" in verdict.summary


def test_a_caught_exit_with_another_code_is_not_the_one() -> None:
    verdict = diagnose(job(terminated(0), died(1, 3, exit_call=ExitCall("sys.exit", 2, (at(41),))), outcome="crash"))
    assert verdict.culprits[0].frame is None


@pytest.mark.parametrize(
    ("kills", "said", "file"),
    [
        (MemoryKills("Out of memory: Killed process 1010 (python)", 0, 0), "killer took it", "kernel_log.txt"),
        (MemoryKills("", 1, 1), "took 1 process in the job's control group", "resources.json"),
        (MemoryKills("", None, 2), "took 2 processes on this node", "resources.json"),
        (MemoryKills("", 0, 0), "counts no out-of-memory kill", "resources.json"),
    ],
)
def test_a_sigkill_and_the_memory(kills: MemoryKills, said: str, file: str) -> None:
    verdict = diagnose(job(terminated(0), died(1, -9, memory_kills=kills), outcome="crash"))
    assert said in verdict.summary
    assert any(claim.file == f"node/node1/{file}" for claim in verdict.evidence)
    assert any("memory limit for the job" in text for text in verdict.suggestions) == ("took" in said)


def test_where_the_kernel_does_not_count_nothing_is_said_of_memory() -> None:
    verdict = diagnose(job(terminated(0), died(1, -9), outcome="crash"))
    assert "memory" not in verdict.summary


LOADER_TEXT = """Traceback (most recent call last):
  File "/home/me/train.py", line 100, in <module>
    for batch in loader:
  File "/opt/venv/lib/python3.11/site-packages/torch/_utils.py", line 775, in reraise
    raise exception
OSError: Caught OSError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 360, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/home/me/data.py", line 30, in __getitem__
    raise OSError("sample 40 is truncated")
OSError: sample 40 is truncated
"""
POOL_TEXT = '''multiprocessing.pool.RemoteTraceback:
"""
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 125, in worker
    result = (True, func(*args, **kwds))
  File "/home/me/data.py", line 12, in parse
    return int(text)
ValueError: invalid literal
"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/me/train.py", line 100, in <module>
ValueError: invalid literal
'''.replace('Traceback:\n"', 'Traceback: \n"')  # as it is printed


@pytest.mark.parametrize(
    ("text", "process", "place"),
    [
        (LOADER_TEXT, "dataloader worker 1", Frame("/home/me/data.py", 30, "__getitem__")),
        (POOL_TEXT, "worker process", Frame("/home/me/data.py", 12, "parse")),
    ],
)
def test_an_exception_from_a_worker_process_is_placed_in_the_worker(text: str, process: str, place: Frame) -> None:
    exception = RankException("OSError", "Caught OSError in DataLoader worker", 100.0, (at(100, "<module>"),), text)
    verdict = diagnose(job(terminated(0), died(1, 1, exception=exception), outcome="crash"))
    assert (verdict.culprits[0].process, verdict.culprits[0].frame) == (process, place)
    assert f"data.py:{place.line}" in verdict.summary


def test_an_ordinary_traceback_has_no_remote_part() -> None:
    assert remote_error("Traceback (most recent call last):\nValueError: x") is None


# --- errors of communication ------------------------------------------------------------------------------------------

NETWORK = "NCCL error: remote process exited or there was a network error, NCCL version 2.26.2\nLast error:\n"
COMPLETION = f"{NETWORK}NET/IB : Got completion from peer 10.5.0.34<33956> with error 12, opcode 0, len 1"
SHM = (
    "NCCL error in: x, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\nError while creating shared memory segment /dev/shm/nccl-abc, error: No space left on device (28)"
)


def in_nccl(number: int, message: str, when: float) -> RankEvidence:
    one = raised(number, "torch.distributed.DistBackendError", message, when)
    assert one.exception is not None
    frames = (Frame(C10D, 3252, "all_reduce"), *one.exception.frames)
    return replace(one, exception=replace(one.exception, frames=frames))


def test_an_error_of_nccl_that_is_the_ranks_own_is_no_consequence() -> None:
    verdict = diagnose(job(in_nccl(0, NETWORK, 101.0), in_nccl(1, SHM, 102.0), outcome="crash"))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-exception", [1])
    assert "Error while creating shared memory segment" in verdict.summary, "not NCCL's general words before it"
    assert "(NCCL could not get shared memory for the ranks of its node)" in verdict.summary
    assert "/dev/shm" in verdict.suggestions[0]


def test_where_all_lost_a_peer_the_verdict_says_with_whom_it_began() -> None:
    verdict = diagnose(job(in_nccl(0, NETWORK, 101.0), in_nccl(1, COMPLETION, 100.0), outcome="crash"))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())
    assert "It began on rank 1: an InfiniBand transfer with 10.5.0.34 failed with status 12" in verdict.summary
    assert any("ibstat" in one for one in verdict.suggestions)


def test_a_mesh_that_does_not_fit_the_world() -> None:
    message = "Mesh should not be bigger than default world size 2, but found 8 ranks!"
    verdict = diagnose(job(*(raised(n, "RuntimeError", message, 100.0) for n in (0, 1)), outcome="crash"))
    assert "the world size do not go together" in verdict.summary
    assert "WORLD_SIZE" in verdict.suggestions[0]


def test_a_users_own_connection_is_not_explained_as_the_jobs() -> None:
    verdict = diagnose(job(raised(0, "OSError", "socket: connection refused", 100.0), terminated(1), outcome="crash"))
    assert "could not be reached over the network" not in verdict.summary


def test_survivors_at_one_line_are_told_as_one_though_not_all_have_a_record() -> None:
    lost = RankException("RuntimeError", "Connection closed by peer", 5.0, (*in_c10d("all_reduce", 50),), "Traceback")
    thrown_out = rank(2, seen=False, more={"exception": lost, "exit": RankExit(1, 101.0)})
    verdict = diagnose(job(_aborted_at(0, 3), _at_six(1, (16,)), thrown_out, outcome="crash"))
    assert "ranks 1-2 wait in all_reduce at train.py:50" in verdict.summary


# --- NCCL's own log ---------------------------------------------------------------------------------------------------

GENERAL = "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
GENERAL += "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
LOST = "socketProgress: Connection closed by remote peer node2<42830>"
RETRIES = "NET/IB : Got completion from peer 10.5.0.34<33956> with status=12 opcode=129 len=0 vendor err 129 (Send)"
NO_SHM = "Error: failed to extend /dev/shm/nccl-H1dBqY to 9637892 bytes"
NOISE = "Failed to open libibverbs.so[.1]"


def warned(one: RankEvidence, *warnings: str) -> RankEvidence:
    return replace(one, nccl_log=NcclLog(f"node/node1/nccl.node1.{one.pid}.log", (NOISE, *warnings)))


def aborted_rank(number: int, when: float) -> RankEvidence:
    return rank(number, seen=False, more={"exit": RankExit(-6, when)})


def test_the_log_says_what_a_general_error_leaves_open() -> None:
    """Shared memory is a failure of the rank's own, though the exception alone reads as if a peer were gone."""
    verdict = diagnose(job(in_nccl(0, GENERAL, 101.0), warned(in_nccl(1, GENERAL, 102.0), NO_SHM), outcome="crash"))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-exception", [1])
    assert "NCCL could not get shared memory" in verdict.summary
    assert any(one.file == "node/node1/nccl.node1.1010.log" for one in verdict.evidence)
    assert any("/dev/shm" in one for one in verdict.suggestions)


def test_who_aborts_because_a_peer_has_gone_is_no_cause() -> None:
    failed = raised(1, "ValueError", "loss is not finite", 103.0)
    verdict = diagnose(job(warned(aborted_rank(0, 100.0), LOST), failed, outcome="crash"))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-exception", [1])


def test_an_abort_after_a_failure_of_its_own_says_which() -> None:
    illegal = "Cuda failure 700 'an illegal memory access was encountered'"
    verdict = diagnose(
        job(warned(aborted_rank(0, 100.0), illegal), warned(aborted_rank(1, 101.0), LOST), outcome="crash")
    )
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-killed", [0])
    assert "NCCL had failed (a CUDA call of NCCL failed" in verdict.summary


def test_ranks_that_all_abort_over_a_dead_link_are_told_of_the_link() -> None:
    verdict = diagnose(
        job(*(warned(aborted_rank(number, 100.0 + number), RETRIES) for number in range(2)), outcome="crash")
    )
    assert verdict.culprits == ()
    assert "transfer with 10.5.0.34 failed with status 12 (12: it did not answer" in verdict.summary
    assert any("`ibstat`" in one for one in verdict.suggestions)


@pytest.mark.parametrize(
    ("mine", "cause", "culprits"),
    [
        ("0@41 1@41 1@41 0@41", "uneven-batches", [1]),
        ("1@41 1@41 1@41 0@41", "missing-from-collective", [0]),
        ("1@41 0@41", "uneven-batches", [1]),
        ("1@41 1@41 1@41 1@41", "uneven-batches", [1]),
    ],
    ids=["it has been in both", "never before", "too few calls", "as ever"],
)
def test_peers_that_end_are_innocent_of_a_call_in_another_group(mine: str, cause: str, culprits: list[int]) -> None:
    """Rank 1 has ended its program, so the connections of rank 0's call break: the record counts that as completed."""
    lost = raised(0, "RuntimeError", RESET, 101.0, flight=record(*calls(mine), groups={"0": (0, 1), "1": (0,)}))
    assert lost.exception is not None
    error = replace(lost.exception, frames=(Frame(C10D, 3252, "all_reduce"), at(41), at(100, "<module>")))
    verdict = diagnose(job(replace(lost, exception=error), ended(1, 0), outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == (cause, culprits), verdict.summary
    if culprits == [0]:
        assert verdict.confidence == "medium"
        assert "Rank 0 made its 3 earlier calls at train.py:41" in verdict.summary
        assert "how this line selects its group" in verdict.suggestions[0]


# --- one process: a launcher's error, and no advice about other ranks -----------------------------

LAUNCH = f"{SITE}/accelerate/commands/launch.py"
BY_NAME = Frame("/opt/venv/bin/accelerate", 8, "<module>")
BY_MODULE = (Frame(LAUNCH, 1200, "<module>"), Frame("<frozen runpy>", 88, "_run_code"))


def of_exec(*frames: Frame, typed: tuple[str, ...] = ("exec", "--", "accelerate", "launch"), **more: Any) -> Verdict:
    failed = RankException("ValueError", "mpirun was not found", 100.0, frames)
    one = rank(0, seen=False, step=None, more={"exception": failed, "exit": RankExit(1, 100.5), **more})
    return diagnose(job(one, outcome="crash", launched=Launched(typed)))


@pytest.mark.parametrize(("outer", "name"), [((BY_NAME,), "accelerate"), (BY_MODULE, "accelerate")])
def test_an_error_of_the_launcher_is_no_ranks(outer: tuple[Frame, ...], name: str) -> None:
    verdict = of_exec(Frame(LAUNCH, 900, "simple_launcher"), *outer)
    assert (verdict.cause, verdict.culprits) == ("rank-exception", ())
    told = f"The launcher ({name}) raised ValueError: mpirun was not found at launch.py:900 (simple_launcher)"
    assert verdict.summary == f"{told}, in its own code: no rank was seen."
    assert verdict.suggestions[0].startswith("Fix what the launcher reports") and len(verdict.suggestions) == 1


def test_a_launcher_that_rejects_its_command_line_is_no_rank() -> None:
    parser = Frame("/usr/lib/python3.11/argparse.py", 2617, "exit")
    call = ExitCall("sys.exit", 2, (parser, Frame(LAUNCH, 43, "main"), BY_NAME))
    one = rank(0, seen=False, step=None, more={"exit": RankExit(2, 100.5), "exit_call": call})
    verdict = diagnose(job(one, outcome="crash", launched=Launched(("exec", "--", "accelerate", "launch"))))
    assert (verdict.cause, verdict.culprits) == ("rank-exited", ())
    assert verdict.summary == "The launcher (accelerate) called sys.exit(2): no rank was seen."
    assert verdict.suggestions[0].startswith("Fix what the launcher reports") and len(verdict.suggestions) == 1


@pytest.mark.parametrize(
    ("frames", "typed"),
    [
        ((at(7), at(100, "<module>")), ("exec", "--", "python", "train.py")),
        ((Frame(LAUNCH, 900, "f"), at(7), BY_NAME), ("exec", "--", "accelerate", "launch")),
        ((Frame(f"{SITE}/torch/nn/modules/module.py", 1, "forward"), at(7)), ("exec", "--", "python", "train.py")),
        ((Frame(LAUNCH, 900, "simple_launcher"), BY_NAME), ("train.py",)),
    ],
)
def test_an_error_of_the_users_code_is_the_ranks(frames: tuple[Frame, ...], typed: tuple[str, ...]) -> None:
    verdict = of_exec(*frames, typed=typed)
    assert [one.rank for one in verdict.culprits] == [0]
    assert verdict.suggestions == ("Fix the exception at this line.",)


@pytest.mark.parametrize("frames", [(), in_user(7)])
def test_where_the_only_rank_has_ended_nobody_is_sent_to_doctor_or_to_other_ranks(frames: tuple[Frame, ...]) -> None:
    for code in (-9, 3):
        one = rank(0, frames, "zombie", seen=bool(frames), more={"exit": RankExit(code, 100.0)})
        verdict = diagnose(job(one, outcome="crash", launched=Launched(("train.py",))))
        advice = " ".join(verdict.suggestions)
        assert verdict.suggestions and "doctor" not in advice and "ranks" not in advice


# --- a rank that looks for its peers at another address -----------------------------

NOT_REACHED = [
    "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29512).",
    "The client socket has failed to connect to [localhost]:29512 (errno: 111 - Connection refused).",
]
MAKES_STORE = Frame(f"{SITE}/torch/distributed/rendezvous.py", 189, "_create_c10d_store")


def astray(number: int, message: str) -> RankEvidence:
    frames = (MAKES_STORE, *in_init(12))
    failed = RankException("torch.distributed.DistNetworkError", message, 100.0, frames)
    return rank(number, seen=False, step=None, more={"exception": failed, "exit": RankExit(1, 100.5)})


@pytest.mark.parametrize("message", NOT_REACHED)
@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_failed_at_another_address_than_its_peers_wait_at(message: str, culprit: int) -> None:
    """As that of the attempt before: its peers have the new one."""
    ranks = [rank(n, in_init(12), "poll", step=None) for n in range(3)]
    ranks[culprit] = astray(culprit, message)
    verdict = diagnose(job(*ranks, outcome="crash"))
    assert (verdict.outcome, verdict.cause) == ("crash", "rank-exception")
    assert [one.rank for one in verdict.culprits] == [culprit] and "29512" in verdict.summary
    assert any(one.startswith("Print `MASTER_ADDR`") for one in verdict.suggestions)
    assert verdict.confidence == "high"
    looking = [rank(n, (MAKES_STORE, *in_init(12)), "poll", step=None) if n != culprit else ranks[n] for n in range(3)]
    assert diagnose(job(*looking, outcome="crash")).confidence == "medium"  # they may not reach a store either


def test_a_store_that_nobody_reaches_names_nobody() -> None:
    verdict = diagnose(job(*(astray(n, NOT_REACHED[1]) for n in range(3)), outcome="crash"))
    assert not verdict.culprits
