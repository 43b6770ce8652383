"""Rules for a live job: it makes progress, or some ranks printed fewer steps."""

from __future__ import annotations

from safelaunch.model import Claim, duration
from safelaunch.verdict.blame import condition_claims, conditions
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding, Ruling
from safelaunch.verdict.phrases import (
    by_place,
    each_of,
    ranks_do,
    waits_words,
)
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.rhythm import silent_s


def slow_not_stuck(facts: CaseFacts) -> Ruling:
    """The job is making progress, so a dump names no rank.

    Steps or collectives advanced between two looks, or the last ones are no more than a few usual steps ago. Applies
    only to ``dump``: in a hang, the watchdog has confirmed that nothing moves.
    """
    steps = [f"rank {r.rank} at step {r.step}" for r in facts.ranks.values() if r.step is not None]
    where = f" ({', '.join(steps[:4])})" if steps else ""
    claims = tuple(
        Claim(f"rank {r.rank} is at step {r.step}", f"{r.folder}/progress.json")
        for r in list(facts.ranks.values())[:4]
        if r.step is not None
    )
    silent = silent_s(facts.evidence)
    if not silent:
        text = f"The job is making progress{where}; nothing is stuck."
        return Finding("slow-not-stuck", (), text, claims=claims)
    own = {rank: condition for rank, condition in conditions(facts).items() if rank in silent}
    does = [f"{each_of(ranks)} {reason}" for reason, ranks in by_place({r: c.reason for r, c in own.items()})[:2]]
    does += [waits] if (waits := waits_words(facts, silent)) else []
    least = duration(min(silent.values()))
    text = f"The job is making progress{where}, but {ranks_do(silent, 'has', 'have')} made no step for {least}"
    text += f": {'; '.join(does)}." if does else "."
    return Finding("slow-not-stuck", (Doubt.ONE_LOOK,), text, claims=(*condition_claims(own), *claims))
