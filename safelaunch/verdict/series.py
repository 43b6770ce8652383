"""Earlier looks at the same quiet as further witnesses: a rank that has been at its place ever since."""

from __future__ import annotations

from dataclasses import replace

from safelaunch.model import Claim, Culprit, EarlyLook
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.rank_state import Facts
from safelaunch.verdict.reading import frames as fr

FILE = "early.json"


def with_early_looks(facts: Facts, finding: Finding) -> Finding:
    """The finding with a claim for each culprit that early looks have seen at the same place, doing nothing else."""
    looks = [look for look in facts.evidence.early if look.movement == "still" and not look.lasted_s]
    seen = [(culprit, [look for look in looks if _is_there(culprit, look)]) for culprit in finding.culprits]
    claims = tuple(_claim(culprit, found) for culprit, found in seen if found)
    if not claims:
        return finding
    return replace(finding, claims=(*finding.claims[:1], *claims, *finding.claims[1:]))


def _is_there(culprit: Culprit, look: EarlyLook) -> bool:
    return culprit.frame is not None and any(
        (place.rank, place.frame) == (culprit.rank, culprit.frame) for place in look.places
    )


def _claim(culprit: Culprit, looks: list[EarlyLook]) -> Claim:
    times = [f"{look.quiet_s:.0f} s" for look in looks]
    when = " and ".join([", ".join(times[:-1]), times[-1]] if len(times) > 1 else times)
    return Claim(f"rank {culprit.rank} was at {fr.place(culprit.frame)} {when} after the last progress", FILE)
