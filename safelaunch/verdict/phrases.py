"""Words and clauses that summaries share: ranks, and what they wait in."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeVar

from safelaunch.model import rank_words
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.majority import sides_of
from safelaunch.verdict.peers import PeerWait
from safelaunch.verdict.rank_state import CaseFacts


def ranks_word(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2,5``."""
    return rank_words(ranks)


def each_of(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``each of ranks 0-2,5``, before a clause in the singular."""
    return f"{'' if len(set(ranks)) == 1 else 'each of '}{ranks_word(ranks)}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_SENTENCE = re.compile(r"(?<=[.)`])\s+(?=[A-Z`])")


def first_sentence(text: str) -> str:
    return _SENTENCE.split(text, maxsplit=1)[0]


def ranks_do(ranks: Collection[int], singular: str, plural: str) -> str:
    """``rank 3 waits``, ``ranks 0-2 wait``, inside a sentence."""
    return f"{ranks_word(ranks)} {singular if len(ranks) == 1 else plural}"


def ranks_wait(facts: CaseFacts, ranks: Collection[int]) -> str:
    """``rank 3 waits``, ``ranks 0-2 wait``, or ``ranks 0-2 waited`` once all of them have ended."""
    return ranks_do(ranks, "waited", "waited") if facts.gone.issuperset(ranks) else ranks_do(ranks, "waits", "wait")


def wait_verb(facts: CaseFacts, rank: int) -> str:
    return "waited" if rank in facts.gone else "waits"


def unseen_words(facts: CaseFacts) -> str:
    """``ranks 4-7 were not seen``."""
    return f"{ranks_do(facts.unseen, 'was', 'were')} not seen"


def wait_words(facts: CaseFacts, ranks: Iterable[int]) -> dict[int, str]:
    """Returns what each waiting rank waits in.

    If only some ranks at a line know which call it is, or the function's class, that description is used for all.
    """
    waits = {rank: facts.waiting[rank] for rank in ranks if rank in facts.waiting}
    by_line: dict[tuple[str, int], dict[tuple[str, str], str]] = {}
    for wait in sorted(waits.values(), key=lambda wait: len(wait.words)):
        by_line.setdefault(_line(wait), {})[wait.call, wait.detail] = wait.words
    return {rank: _most_specific(wait, by_line[_line(wait)]) for rank, wait in waits.items()}


_UNKNOWN_CALL = calls.UNNAMED[""]


def _line(wait: PeerWait) -> tuple[str, int]:
    return (fr.basename(wait.frame.file), wait.frame.line) if wait.frame is not None else (wait.place, 0)


def _most_specific(wait: PeerWait, at_that_line: Mapping[tuple[str, str], str]) -> str:
    named = [words for (call, _), words in at_that_line.items() if call != _UNKNOWN_CALL]
    return named[0] if wait.call == _UNKNOWN_CALL and len(named) == 1 else at_that_line[wait.call, wait.detail]


P = TypeVar("P", bound=Hashable)


def by_place(words: Mapping[int, P]) -> list[tuple[P, list[int]]]:
    """Returns each place with its ranks, in the order of their first ranks."""
    return list(sides_of(words).items())


def apart(facts: CaseFacts, words: Mapping[int, str], limit: int = 3) -> str:
    """Joins what ranks wait in; three or more places become a list.

    Example: ``rank 0 waits in all_gather at train.py:41 while ranks 1-3 wait in all_reduce at train.py:9``.
    """
    places = by_place(words)
    parts = [f"{ranks_wait(facts, ranks)} in {place}" for place, ranks in places[:2]]
    if len(places) < 3:
        return " while ".join(parts)
    parts = [parts[0], *(f"{ranks_word(ranks)} in {place}" for place, ranks in places[1:limit])]
    if len(places) > limit:
        parts.append(f"others in {len(places) - limit} more {'place' if len(places) == limit + 1 else 'places'}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def waits_words(facts: CaseFacts, ranks: Iterable[int], limit: int = 3) -> str:
    """``ranks 1-3 wait in all_reduce at train.py:9 and rank 4 in barrier at train.py:30``."""
    places = sorted(by_place(wait_words(facts, ranks)), key=lambda item: (-len(item[1]), item[1]))
    parts = [f"{ranks_word(members)} in {place}" for place, members in places[:limit]]
    if places:
        parts[0] = f"{ranks_wait(facts, places[0][1])} in {places[0][0]}"
    if len(places) > limit:
        parts.append(f"others in {len(places) - limit} more places")
    return " and ".join(parts)


def summary_of(named: Mapping[int, Condition], facts: CaseFacts, waiters: Iterable[int]) -> str:
    return f"{capital(clause_of(named, facts, waiters))}."


def clause_of(named: Mapping[int, Condition], facts: CaseFacts, waiters: Iterable[int]) -> str:
    """Returns, for example, ``rank 1 is asleep in train.py:7, while ranks 0,2-3 wait in all_reduce at train.py:9``."""
    groups = by_place({rank: condition.reason for rank, condition in named.items()})
    parts = [f"{each_of(ranks)} {reason}" for reason, ranks in groups[:2]]
    text = "; ".join(parts)
    if len(groups) > 2:
        text += f"; {ranks_word(r for _, ranks in groups[2:] for r in ranks)} likewise"
    waits = waits_words(facts, waiters)
    return f"{text}, while {waits}" if waits else text
