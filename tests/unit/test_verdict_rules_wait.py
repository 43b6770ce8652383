"""Ranks that wait for each other outside c10d: at a connection, for a missing file, for polled work."""

from __future__ import annotations

from textwrap import dedent

from msgspec import structs

from safelaunch.model import Evidence, RankEvidence, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    MODULE,
    SCRIPT,
    at,
    behind,
    decided,
    job,
    rank,
    waiting,
)

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


# --- polls ------------------------------------------------------------------------------------------------------------


def naps(number: int, *lines: tuple[int, str], flight: object = None) -> RankEvidence:
    """Returns a rank that naps in each of two looks."""
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


def test_file_wait_between_two_ranks_names_both() -> None:
    assert decided(told(job(waiting(0), for_file(1)))) == ("stuck-in-user-code", [(0, 50), (1, 6)], "medium")


def test_polling_rank_with_several_possible_writers_is_culprit() -> None:
    verdict = told(job(naps(0, (6, "wait_for"), (23, "collect")), waiting(1), waiting(2), waiting(3)))
    assert decided(verdict) == ("stuck-in-user-code", [(0, 6)], "medium")
