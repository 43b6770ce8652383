"""First message about a quiet job: one clause on what its ranks do. It never says that the job hangs."""

from __future__ import annotations

from collections.abc import Collection

from safelaunch.model import Evidence, FirstWord, Place
from safelaunch.stacks import frames as fr
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.blame import conditions
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.phrases import (
    apart,
    by_place,
    clause_of,
    first_sentence,
    ranks_do,
    wait_words,
)
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.thread_view import view_of

_MOST_CHARACTERS = 400
_IMPORTING = "<frozen importlib"


def first_word(evidence: Evidence, read_source: ReadSource | None = None) -> FirstWord:
    """Returns the first sentence of a verdict, for ranks that don't move."""
    verdict = diagnose(evidence, read_source)
    if evidence.missing_ranks and not verdict.culprits:
        return _first_word_of_seen(evidence)
    words = first_sentence(verdict.summary).rstrip(".")
    places = tuple(Place(culprit.rank, culprit.frame) for culprit in verdict.culprits)
    common = not places or any(_imports(evidence, place.rank) for place in places)
    return FirstWord(_clause(words), verdict.cause, places, common)


def _first_word_of_seen(evidence: Evidence) -> FirstWord:
    """Describes seen ranks that don't wait for peers; unseen ranks might wait for them."""
    facts = CaseFacts.of(evidence)
    own = conditions(facts)
    if not own:
        return FirstWord(_clause(apart(facts, wait_words(facts, facts.waiting))), common=True)
    words, first = clause_of(own, facts, facts.waiting), next(iter(own.values()))
    places = tuple(Place(rank, condition.frame) for rank, condition in own.items())
    return FirstWord(_clause(words), first.cause, places, any(_imports(evidence, rank) for rank in own))


def first_word_of_active(evidence: Evidence, ranks: Collection[int]) -> FirstWord:
    """Describes where active ranks compute, read or write, and which ranks wait for them."""
    facts = CaseFacts.of(evidence)
    frames = {rank: facts.ranks[rank].frame for rank in sorted(ranks) if rank in facts.ranks}
    places = {rank: fr.place(frame) for rank, frame in frames.items() if frame is not None}
    if not places:
        return FirstWord(common=True)
    parts = [f"{ranks_do(members, 'is', 'are')} active at {place}" for place, members in by_place(places)[:3]]
    waiting = apart(facts, wait_words(facts, [rank for rank in facts.ranks if rank not in places]))
    words = ", ".join(parts) + (f", while {waiting}" if waiting else "")
    return FirstWord(_clause(words), "", tuple(Place(rank, frames[rank]) for rank in places), common=True)


def _imports(evidence: Evidence, rank: int) -> bool:
    rank_evidence = next((candidate for candidate in evidence.ranks if candidate.rank == rank), None)
    view = view_of(rank_evidence) if rank_evidence is not None else None
    frames = view.thread.frames if view is not None and view.thread is not None else ()
    return any(frame.file.startswith(_IMPORTING) for frame in frames)


def _clause(words: str) -> str:
    first, _, rest = words.partition(" ")
    words = f"{first.lower()} {rest}" if first in ("Rank", "Ranks", "Each", "All", "Every") else words
    return words if len(words) <= _MOST_CHARACTERS else words[: _MOST_CHARACTERS - 1] + "…"
