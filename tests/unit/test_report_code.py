"""Source lines in a report: the places of each side, and the lines around them."""

from __future__ import annotations

from msgspec.structs import replace

from safelaunch.model import CaughtException, Culprit, Evidence, RankException, Verdict
from safelaunch.report import code
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.evidence import (
    SCRIPT,
    at,
    entry,
    in_c10d,
    in_loader,
    in_user,
    in_worker,
    job,
    process,
    rank,
    record,
    waiting,
)

SOURCE = {
    SCRIPT: """\
import dist


def broadcast_from(root):

    dist.broadcast(x, src=root)


class Trainer:
    def close(self):
        flush()
        dist.barrier()

    def other(self):
        pass

def main(rank):
    model = make()

    for batch in loader:
        broadcast_from(rank % 2)
        step(batch)
    finish()


try:
    main(rank)
finally:
    close()
"""
}


def sides(evidence: Evidence, *culprits: Culprit) -> list[code.CallSide]:
    verdict = diagnose(evidence)
    if culprits:
        verdict = replace(verdict, culprits=culprits)
    return code.sides(CaseFacts.of(evidence, SOURCE.get), verdict, str)


def culprit(number: int, line: int, function: str = "train", reason: str = "") -> Culprit:
    return Culprit(number, "node1", 1000 + 10 * number, "main", at(line, function), 60, reason or f"Rank {number} is.")


def shown(place: code.FrameWithSource) -> list[int]:
    return [line.number for line in place.lines]


def test_source_excerpt_stops_at_function_bounds() -> None:
    stuck = rank(0, (at(6, "broadcast_from"), at(21, "main"), at(27, "<module>")), "sleep")
    first, second = sides(job(stuck, waiting(1)), culprit(0, 6, "broadcast_from"))[0].places[:2]
    assert shown(first) == [4, 5, 6]
    assert shown(second) == [17, 18, 19, 20, 21, 22, 23]
    in_method = rank(0, (at(12, "Trainer.close"),), "sleep")
    assert shown(sides(job(in_method, waiting(1)), culprit(0, 12))[0].places[0]) == [10, 11, 12]


def test_source_sides_with_same_stack_show_callers_once() -> None:
    stack = (at(6, "broadcast_from"), at(21, "main"), at(27, "<module>"))
    ranks = [rank(n, (*in_c10d("broadcast", 6)[:2], *stack), flight=record(entry("broadcast", 1))) for n in range(3)]
    at_fault, peers = sides(job(*ranks), culprit(0, 6, "broadcast_from"))
    assert [place.frame.line for place in at_fault.places] == [6, 21, 27]
    assert [place.frame.line for place in peers.places] == [6]
    assert [frame.line for frame in peers.callers] == [21, 27]


def test_source_side_shows_script_line_that_differs_from_peers() -> None:
    stopped = rank(0, (at(29, "<module>"),), "sleep")
    inside = rank(0, (at(6, "broadcast_from"), at(29, "<module>")), "sleep")
    other = rank(1, (at(22, "main"), at(27, "<module>")), "sleep")
    assert [place.frame.line for place in sides(job(stopped, other), culprit(0, 29, "<module>"))[0].places] == [29]
    assert [place.frame.line for place in sides(job(inside, other), culprit(0, 6))[0].places] == [6, 29]


def test_source_side_shows_worker_thread_or_child_with_rank() -> None:
    worker = process(91, in_worker(12), "sleep", role="dataloader worker")
    evidence = job(waiting(0), rank(1, in_loader(30), "poll", children=[worker]), waiting(2))
    side = sides(evidence)[0]
    assert [(place.frame.line, place.whose) for place in side.places] == [(12, ""), (30, "its main thread")]
    threads = [("stats", (at(5, "publish"),), "futex"), ("quiet", (at(6, "wait"),), "futex")]
    evidence = job(rank(0, in_user(7), threads=threads), waiting(1))
    reason = "Rank 0 waits while thread 'stats' waits at train.py:5 (publish)."
    side = sides(evidence, culprit(0, 7, reason=reason))[0]
    assert [(place.frame.line, place.whose) for place in side.places] == [(7, ""), (5, "its thread 'stats'")]
    child = process(92, (at(9, "serve"),), "pipe", role="child")
    evidence = job(rank(0, in_user(7), children=[child]), waiting(1))
    side = sides(evidence, culprit(0, 7, reason="Rank 0 waits; child process 92 waits at train.py:9 (serve)."))[0]
    assert [(place.frame.line, place.whose) for place in side.places] == [(7, ""), (9, "child 92")]


def test_source_side_of_past_line_shows_current_line() -> None:
    evidence = job(waiting(0, line=50), waiting(1, line=60))
    side = sides(evidence, culprit(0, 40))[0]
    assert [(place.frame.line, place.whose) for place in side.places] == [(40, ""), (50, "now")]


def test_source_side_of_caught_exception_shows_its_handler() -> None:
    caught = CaughtException("ValueError", "", 1.0, at(40, "decode"), at(62))
    other = replace(caught, caught=at(66))  # not mentioned in the reason
    evidence = job(waiting(0, line=50, more={"caught": (other, caught)}), waiting(1, line=60))
    reason = "Rank 0 raised ValueError at train.py:40 (decode) and continued at train.py:62 (train)."
    side = sides(evidence, culprit(0, 40, reason=reason))[0]
    assert [(place.frame.line, place.whose) for place in side.places] == [(40, ""), (62, "caught"), (50, "now")]


def test_source_side_matches_recorded_frame_to_stack() -> None:
    """The record has ``close``, the stack has ``Trainer.close``."""
    evidence = job(rank(0, (at(12, "Trainer.close"), at(29, "<module>")), "futex"), waiting(1))
    side = sides(evidence, culprit(0, 12, "close"))[0]
    assert [(place.frame.function, place.whose) for place in side.places] == [("Trainer.close", ""), ("<module>", "")]


def test_source_side_states_shared_reason_once() -> None:
    evidence = job(*(rank(n, in_user(7), "sleep") for n in range(3)), waiting(3))
    both = [culprit(n, 7, reason=f"Rank {n} polls at train.py:7.") for n in range(3)]
    assert sides(evidence, *both)[0].does == "Each of ranks 0-2 polls at train.py:7."
    culprits = [replace(item, reason=f"Rank {item.rank} polls {item.rank}.") for item in both]
    assert sides(evidence, *culprits)[0].does == "Rank 0 polls 0. Rank 1 polls 1. Rank 2 polls 2."


def test_source_side_separates_ranks_by_group() -> None:
    groups = {"1": (0, 1), "2": (0, 1)}
    ranks = [
        waiting(n, flight=record(entry("all_reduce", 1, done=False, group=str(n + 1)), groups=groups)) for n in (0, 1)
    ]
    (side,) = sides(job(*ranks), culprit(0, 50), culprit(1, 50))
    assert side.does.endswith("In group '1' rank 0; in group '2' rank 1.")


def test_culprit_without_frame_has_source_side() -> None:
    error = RankException("ValueError", "no frames", 1.0)
    evidence = job(rank(0, more={"exception": error}), waiting(1), outcome="crash")
    verdict: Verdict = diagnose(evidence)
    side = code.sides(CaseFacts.of(evidence), verdict, str)[0]
    assert side.culprit and side.places == ()
