"""What a rule returns, and the words that are common to all verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.diagnose.conditions import Condition
from safelaunch.diagnose.facts import Facts, RankFacts
from safelaunch.model import Claim, Confidence, Culprit, Frame, format_ranks


@dataclass(frozen=True)
class Finding:
    """A rule's answer. ``culprits`` may be empty: the cause is known, who is at fault is not.

    ``held_up``: victims beside those that wait in a collective.
    """

    cause: str
    confidence: Confidence
    summary: str
    culprits: tuple[Culprit, ...] = ()
    claims: tuple[Claim, ...] = ()
    ruled_out: tuple[str, ...] = ()
    held_up: tuple[int, ...] = ()


Ruling = Finding | str  # a finding, or why there is none ("" where that is not worth saying)

_LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")


def lower(confidence: Confidence, by: int = 1) -> Confidence:
    return _LEVELS[max(0, _LEVELS.index(confidence) - by)]


def least(values: Iterable[Confidence]) -> Confidence:
    return min(values, key=_LEVELS.index)


def ranks_word(ranks: Iterable[int]) -> str:
    """``Rank 3`` or ``Ranks 0-2,5``."""
    listed = sorted(set(ranks))
    return f"{'Rank' if len(listed) == 1 else 'Ranks'} {format_ranks(listed)}"


def small(text: str) -> str:
    """For the middle of a sentence."""
    return text[:1].lower() + text[1:]


def culprit(facts: RankFacts, condition: Condition, reason: str = "") -> Culprit:
    return Culprit(
        rank=facts.rank,
        host=facts.evidence.host,
        pid=condition.pid or facts.evidence.pid,
        process=condition.process,
        frame=condition.frame or (facts.frame if condition.process == "main" else None),
        step=facts.step,
        reason=reason or f"Rank {facts.rank} {condition.reason}.",
    )


def waiting_culprit(facts: RankFacts, reason: str, site: Frame | None = None) -> Culprit:
    """A culprit that waits for peers itself; ``site`` is the line to show where that is not the line of its wait."""
    frame = site or (facts.wait.frame if facts.wait else facts.frame)
    return Culprit(facts.rank, facts.evidence.host, facts.evidence.pid, "main", frame, facts.step, reason)


def waits_words(facts: Facts, ranks: Iterable[int], limit: int = 3) -> str:
    """``ranks 1-3 wait in all_reduce at train.py:9 and rank 4 in barrier at train.py:30``."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        wait = facts.ranks[rank].wait
        if wait is not None:
            places.setdefault(wait.words, []).append(rank)
    groups = sorted(places.items(), key=lambda item: (-len(item[1]), item[1]))
    parts: list[str] = []
    for words, members in groups[:limit]:
        verb = "" if parts else (" waits" if len(members) == 1 else " wait")
        parts.append(f"{small(ranks_word(members))}{verb} in {words}")
    if len(groups) > limit:
        parts.append(f"others in {len(groups) - limit} more places")
    return " and ".join(parts)


def summary_of(named: Mapping[int, Condition], facts: Facts, waiters: Sequence[int]) -> str:
    """``Rank 1 is asleep in train.py:7, while ranks 0,2-3 wait in all_reduce at train.py:9.``"""
    groups: dict[str, list[int]] = {}
    for rank, condition in named.items():
        groups.setdefault(condition.reason, []).append(rank)
    parts = []
    for reason, ranks in list(groups.items())[:2]:
        parts.append(f"{ranks_word(ranks)} {plural(reason) if len(ranks) > 1 else reason}")
    text = "; ".join([parts[0], *map(small, parts[1:])])
    if len(groups) > 2:
        text += f"; {small(ranks_word(r for ranks in list(groups.values())[2:] for r in ranks))} likewise"
    waits = waits_words(facts, waiters)
    return f"{text}, while {waits}." if waits else f"{text}."


_PLURALS = {"is": "are", "was": "were", "has": "have", "does": "do", "waits": "wait", "spins": "spin",
            "computes": "compute", "holds": "hold", "raised": "raised", "exited": "exited", "did": "did",
            "runs": "run", "sleeps": "sleep", "never": "never"}  # fmt: skip


def plural(clause: str) -> str:
    """The clause said of several ranks; what they raised is quoted, and stays."""
    verb, _, rest = clause.partition(" ")
    if verb != "raised":
        rest = re.sub(r"\bits\b", "their", rest)
        rest = re.sub(r"\bit (\w+)", lambda found: f"they {_PLURALS.get(found[1], found[1])}", rest)
    return f"{_PLURALS.get(verb, verb)} {rest}"


def wait_claims(facts: Facts, ranks: Iterable[int], limit: int = 4) -> tuple[Claim, ...]:
    """One claim for each place in which peers wait, with its first rank as the example."""
    seen: set[str] = set()
    claims: list[Claim] = []
    for rank in sorted(ranks):
        wait = facts.ranks[rank].wait
        if wait is None or wait.words in seen or len(seen) >= limit:
            continue
        seen.add(wait.words)
        claims += [Claim(f"rank {rank}: {claim.claim}", claim.file) for claim in wait.claims[:2]]
    return tuple(claims)


def condition_claims(named: Mapping[int, Condition]) -> tuple[Claim, ...]:
    return tuple(
        Claim(f"rank {rank}: {claim.claim}", claim.file)
        for rank, condition in list(named.items())[:8]
        for claim in condition.claims[:6]
    )
