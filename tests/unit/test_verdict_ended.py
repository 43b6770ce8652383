"""A rank waits for peers that have ended: had they fewer batches, or did it make a call that they never make?"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from safelaunch.model import RankEvidence, RankExit, Verdict
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import in_c10d, job, rank, record
from tests.support.verdict_cases import calls_in


def stuck(number: int, text: str, line: int, step: int | None = 20) -> RankEvidence:
    return rank(number, in_c10d("all_reduce", line), flight=record(*calls_in(text)) if text else None, step=step)


def ended(number: int, text: str, step: int | None = 20, **more: Any) -> RankEvidence:
    flight = record(*calls_in(text)) if text else None
    fields = {"exit": RankExit(0, 99.0), **more}
    return rank(number, seen=False, flight=flight, step=step, page="exited", more=fields)


def verdict_of(first: RankEvidence, *others: RankEvidence) -> Verdict:
    return diagnose(job(first, *others, outcome="crash" if first.exception is not None else "hang"))


def named(verdict: Verdict) -> tuple[str, list[int], list[int | None]]:
    lines = [one.frame.line if one.frame else None for one in verdict.culprits]
    return verdict.cause, [one.rank for one in verdict.culprits], lines


def test_a_ring_that_wrapped_leaves_a_doubt() -> None:
    mine = calls_in("0@14#500x20 barrier:0@40*")
    late = [replace(one, record_id=one.record_id + 500) for one in mine]
    ranks = [replace(ended(n, ""), flight_record=record(*late[:-1])) for n in range(1, 4)]
    verdict = verdict_of(replace(stuck(0, "", 40), flight_record=record(*late)), *ranks)
    assert named(verdict) == ("collective-mismatch", [0], [40])
    assert any("ring buffers" in doubt for doubt in verdict.doubts)
