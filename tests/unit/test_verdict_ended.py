"""A rank waits for peers that have ended: had they fewer batches, or did it make a call that they never make?"""

from __future__ import annotations

from typing import Any

import pytest
from evidence import C10D, LOGGER, MODULE, at, calls, in_c10d, job, rank, record
from msgspec.structs import replace

from safelaunch.model import ExitCall, Frame, RankEvidence, RankException, RankExit, Verdict
from safelaunch.verdict.diagnose import diagnose

RESET = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:55972"
GROUPS = {"0": (0, 1, 2, 3)}


def lost(number: int, text: str, line: int, step: int | None = 20) -> RankEvidence:
    """Its peers' ends made its newest call fail. gloo has it as completed since."""
    frames = (Frame(C10D, 3252, "all_reduce"), Frame(LOGGER, 83, "wrapper"), at(line), MODULE)
    more = {"exception": RankException("RuntimeError", RESET, 100.0, frames), "exit": RankExit(1, 100.5)}
    return rank(number, seen=False, flight=record(*calls(text)) if text else None, step=step, more=more)


def stuck(number: int, text: str, line: int, step: int | None = 20) -> RankEvidence:
    return rank(number, in_c10d("all_reduce", line), flight=record(*calls(text)) if text else None, step=step)


def ended(number: int, text: str, step: int | None = 20, **more: Any) -> RankEvidence:
    flight = record(*calls(text)) if text else None
    fields = {"exit": RankExit(0, 99.0), **more}
    return rank(number, seen=False, flight=flight, step=step, page="exited", more=fields)


def verdict_of(first: RankEvidence, *others: RankEvidence) -> Verdict:
    return diagnose(job(first, *others, outcome="crash" if first.exception is not None else "hang"))


def named(verdict: Verdict) -> tuple[str, list[int], list[int | None]]:
    lines = [one.frame.line if one.frame else None for one in verdict.culprits]
    return verdict.cause, [one.rank for one in verdict.culprits], lines


WAITS = pytest.mark.parametrize("waits", [lost, stuck], ids=["crash", "hang"])


@WAITS
@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_extra_call_is_not_laid_on_those_that_ended(waits: Any, world: int) -> None:
    mine = "0@14x2 0@20 0@23x2" if waits is lost else "0@14x2 0@20 0@23 0@23*"
    verdict = verdict_of(waits(0, mine, 23), *(ended(n, "0@14x2 0@23x2") for n in range(1, world)))
    assert named(verdict) == ("collective-mismatch", [0], [20])
    assert verdict.confidence == "high"


@WAITS
@pytest.mark.parametrize("world", [2, 4])
def test_a_call_that_the_ended_ranks_never_make(waits: Any, world: int) -> None:
    mine = "0@14x20 barrier:0@40" + ("" if waits is lost else "*")
    verdict = verdict_of(waits(0, mine, 40), *(ended(n, "0@14x20") for n in range(1, world)))
    assert named(verdict) == ("collective-mismatch", [0], [40])
    assert verdict.confidence == ("high" if world > 2 else "medium")


def test_a_ring_that_wrapped_leaves_a_doubt() -> None:
    mine = calls("0@14x20 barrier:0@40*", first=500)
    late = [replace(one, record_id=one.record_id + 500) for one in mine]
    ranks = [replace(ended(n, ""), flight_record=record(*late[:-1])) for n in range(1, 4)]
    verdict = verdict_of(replace(stuck(0, "", 40), flight_record=record(*late)), *ranks)
    assert named(verdict) == ("collective-mismatch", [0], [40])
    assert any("ring buffers" in doubt for doubt in verdict.doubts)


@WAITS
def test_fewer_batches_are_still_that(waits: Any) -> None:
    mine = "0@14x21" if waits is lost else "0@14x20 0@14*"
    verdict = verdict_of(waits(0, mine, 14), *(ended(n, "0@14x20") for n in range(1, 4)))
    assert named(verdict)[:2] == ("uneven-batches", [1, 2, 3])


@WAITS
def test_one_that_ended_alone_is_at_fault(waits: Any) -> None:
    mine = "0@14x20 barrier:0@40" + ("" if waits is lost else "*")
    verdict = verdict_of(waits(0, mine, 40), ended(1, "0@14x20"), waits(2, mine, 40))
    assert named(verdict)[:2] == ("uneven-batches", [1])


@WAITS
def test_steps_refute_fewer_batches(waits: Any) -> None:
    verdict = verdict_of(waits(0, "", 40, step=58), *(ended(n, "", step=59) for n in range(1, 4)))
    assert named(verdict)[:2] == ("collective-mismatch", [0])
    assert verdict.confidence == "medium"


@pytest.mark.parametrize("step", [20, 19, None])
def test_steps_that_refute_nothing(step: int | None) -> None:
    verdict = verdict_of(lost(0, "", 40, step=20), *(ended(n, "", step=step) for n in range(1, 4)))
    assert named(verdict)[:2] == ("uneven-batches", [1, 2, 3])


@WAITS
def test_a_call_that_peers_have_met_from_a_line_of_their_own(waits: Any) -> None:
    """``if rank == 0: broadcast(batch) else: broadcast(empty)``, and one batch more on rank 0."""
    mine = "0@14 0@40 0@14 0@40" + ("" if waits is lost else "*")
    verdict = verdict_of(waits(0, mine, 40), *(ended(n, "0@14 0@42 0@14") for n in range(1, 4)))
    assert named(verdict)[:2] == ("uneven-batches", [1, 2, 3])


def test_calls_too_many_that_began_long_before_the_last_ones() -> None:
    mine = "0@14x9 0@40x2 0@14x9 0@40"
    verdict = verdict_of(lost(0, mine, 40), *(ended(n, "0@14x18") for n in range(1, 4)))
    assert named(verdict) == ("collective-mismatch", [0], [40])
    assert "2 collectives" in verdict.summary


def test_a_rank_that_calls_exit_inside_a_function_has_left() -> None:
    call = ExitCall("sys.exit", 0, (at(30, "main"), MODULE))
    mine = "0@14x20 barrier:0@40"
    verdict = verdict_of(lost(0, mine, 40), *(ended(n, "0@14x20", exit_call=call) for n in range(1, 4)))
    assert named(verdict)[:2] == ("uneven-batches", [1, 2, 3])


def test_a_member_of_another_group_has_nothing_to_do_with_it() -> None:
    groups = {"0": (0, 1, 2, 3), "2": (0, 1)}
    mine = rank(0, in_c10d("all_reduce", 40), flight=record(*calls("0@14x9 2@20 2@40*"), groups=groups))
    peer = replace(ended(1, ""), flight_record=record(*calls("0@14x9 2@20"), groups=groups))
    verdict = verdict_of(mine, peer, *(ended(n, "0@14x9") for n in (2, 3)))
    assert named(verdict) == ("collective-mismatch", [0], [40])
    assert "rank 1 never called" in verdict.summary
    assert verdict.confidence == "medium"


@pytest.mark.parametrize(("later", "is_sure"), [(1, False), (2, True), (3, True)])
def test_two_later_calls_that_agree_are_as_clear_as_three(later: int, is_sure: bool) -> None:
    """Dumps alone: nobody else ever makes that call, and all behind it agrees."""
    mine = record(*calls(f"0@14x2 0@20 {'0@23 ' * (later - 1)}0@23*"), groups=GROUPS)
    theirs = record(*calls(f"0@14x2 {'0@23 ' * later}"), groups=GROUPS)
    ranks = (rank(0, seen=False, flight=mine), *(rank(n, seen=False, flight=theirs) for n in range(1, 4)))
    verdict = diagnose(job(*(replace(one, progress=None) for one in ranks)))
    assert (named(verdict) == ("collective-mismatch", [0], [20])) is is_sure
