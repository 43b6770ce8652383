"""Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares calls itself, and all ranks raise: which one was odd?"""

from __future__ import annotations

from typing import Any

from safelaunch.model import Frame, RankEvidence, RankException, RankExit
from safelaunch.stacks.failures import fingerprints
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import C10D, LOGGER, MODULE, at, job, rank

OPTIONS = (
    "TensorOptions(dtype=float (default), device=cpu, layout=Strided (default), requires_grad=false (default),"
    " pinned_memory=false (default), memory_format=(nullopt))"
)


def fingerprint(op: str, sizes: str = "[4]") -> str:
    more = f", TensorShape={sizes}, TensorDtypes=Float, TensorDeviceTypes={OPTIONS})" if op != "BARRIER" else ""
    return f"CollectiveFingerPrint(SequenceNumber=11{', ' if more else ''}OpType={op}{more or ')'}"


def message(mine: tuple[int, str], theirs: tuple[int, str]) -> str:
    """Returns the error as torch 2.13 words it, from the rank and call ``mine``."""
    return (
        f"Detected mismatch between collectives on ranks. Rank {mine[0]} is running collective: {mine[1]}, but Rank"
        f" {theirs[0]} is running collective: {theirs[1]}.Collectives differ in the following aspects:   Op type"
    )


def raised(number: int, text: str, line: int, **fields: Any) -> RankEvidence:
    frames = (Frame(C10D, 3252, "all_reduce"), Frame(LOGGER, 83, "wrapper"), at(line), MODULE)
    error = RankException("RuntimeError", text, 100.0 + number, frames)
    return rank(number, seen=False, more={"exception": error, "exit": RankExit(1, 101.0)}, **fields)


def ranks_that(made: dict[int, str], line: dict[int, int], among: dict[int, int] | None = None) -> list[RankEvidence]:
    """Returns ranks whose errors name their own call and the first one that differs.

    Args:
        made: The call of each rank.
        among: The number of each rank in the group.
    """
    number = among or {n: n for n in made}
    other = {n: next(m for m in made if made[m] != made[n]) for n in made}
    texts = {n: message((number[n], made[n]), (number[other[n]], made[other[n]])) for n in made}
    return [raised(n, text, line.get(n, 50)) for n, text in texts.items()]


def test_unrelated_errors_yield_no_fingerprints() -> None:
    assert fingerprints("Connection closed by peer") == {}
    assert fingerprints("Detected mismatch between collectives on ranks.") == {}
    old = "Detected mismatch between collectives on ranks. Rank 2 is running inconsistent collective: "
    assert list(fingerprints(old + "CollectiveFingerPrint(OpType=BROADCAST)")) == [2]


# --- the crash of DETAIL itself ---------------------------------------------------------------------------------------


def test_peer_known_only_from_errors_is_reported_not_blamed() -> None:
    """With only some logs, the odd rank might be an unseen one."""
    made = {0: fingerprint("ALLREDUCE"), 1: fingerprint("BROADCAST"), 2: fingerprint("ALLREDUCE")}
    every = ranks_that(made, {})
    for seen, words in (([0], "Rank 0 called ALLREDUCE [4] at"), ([0, 2], "Rank 1 called BROADCAST [4] while ranks")):
        verdict = diagnose(job(*(every[rank] for rank in seen), outcome="crash", world=3))
        assert (verdict.cause, verdict.culprits) == ("collective-mismatch", ()), seen
        assert verdict.summary.startswith(words) and "rank 1" in verdict.summary.lower()
        assert "compared these calls" in verdict.summary and "lost the connection" not in verdict.summary
