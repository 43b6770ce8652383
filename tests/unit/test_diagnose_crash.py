"""Crashes: the first failure in time is named, its consequences are not."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import C10D, at, behind, in_c10d, in_user, job, rank, waiting

from safelaunch.diagnose import diagnose
from safelaunch.model import Frame, RankEvidence, RankException, RankExit

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


def test_an_exit_code_without_an_exception() -> None:
    assert named(raised(0, "RuntimeError", RESET, 101.0), ended(1, 3)) == ("rank-exited", [1])


def test_an_early_clean_exit_explains_closed_connections() -> None:
    assert named(raised(0, "RuntimeError", RESET, 101.0), ended(1, 0)) == ("uneven-batches", [1])


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
    """All that is left is the time-out of the ranks that waited; the rank they waited for was asleep."""
    late = "Timed out waiting 30000ms for recv operation to complete"
    victims = [raised(n, "RuntimeError", late, 130.0 + n) for n in (0, 2)]
    asleep = rank(
        1, in_user(7, "load"), "sleep", flight=behind(), more={"exit": RankExit(-15, 131.0, before_close=False)}
    )
    verdict = diagnose(job(victims[0], asleep, victims[1], outcome="crash"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [1])
    assert verdict.culprits[0].frame == at(7, "load")


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
