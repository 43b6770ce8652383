"""A rank that its communication library aborted: it is often the one that received what a peer should not have sent."""

from __future__ import annotations

import signal
from dataclasses import replace

from safelaunch.diagnose import calls
from safelaunch.diagnose.collectives import first_mismatch
from safelaunch.diagnose.facts import Facts
from safelaunch.diagnose.findings import Ruling, lower, ranks_word, small
from safelaunch.diagnose.gone import FAILURES, failed_at
from safelaunch.diagnose.rules_mismatch import mismatch_finding
from safelaunch.model import Claim, RankEvidence


def aborted_by_a_peer(facts: Facts) -> Ruling:
    """The first failure is an abort inside a collective, and the survivors' records disagree about that collective.

    gloo aborts the rank that *receives* another number of bytes than it expects, whoever is wrong. What the aborted
    rank itself had called died with it: so the survivors' disagreement is never more than medium evidence, and where
    they agree the aborted rank stays the one to look at (:func:`.rules_state.first_failure`).
    """
    if facts.evidence.outcome != "crash":
        return ""
    failed = [f for f in facts.ranks.values() if f.condition is not None and f.condition.cause in FAILURES]
    if not failed or not in_communication(min(failed, key=lambda f: failed_at(f.evidence)).evidence):
        return ""
    aborted = [f.rank for f in failed if in_communication(f.evidence)]
    found = first_mismatch(facts.alignment)
    if found is None:
        return f"{ranks_word(aborted)} was aborted in a collective, about which the surviving ranks' records agree"
    finding = mismatch_finding(facts, found)
    text = f"{finding.summary} {ranks_word(aborted)} was aborted in it: what reached it was not what it expected."
    claims = tuple(Claim(f"rank {r}: aborted in a collective", f"ranks/{r}/fault.txt") for r in aborted)
    ruled = f"{small(ranks_word(aborted))} failed first, but an abort in a collective is done to the receiver"
    return replace(
        finding,
        summary=text,
        confidence=lower(finding.confidence),
        claims=claims + finding.claims,
        ruled_out=(*finding.ruled_out, ruled),
    )


def in_communication(rank: RankEvidence) -> bool:
    """Aborted (SIGABRT) while its main thread was in a collective, or in torch with collectives in its hooks."""
    if rank.exit is None or rank.exit.returncode != -signal.SIGABRT or rank.fatal is None:
        return False
    frames = rank.fatal.frames
    wait = calls.torch_wait(frames, rank.code_roots)
    return wait is not None or calls.in_torch(frames, rank.code_roots)
