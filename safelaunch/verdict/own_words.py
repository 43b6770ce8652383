"""What a rank at fault says itself of the reason: an exception that it handles where it waits, a thread that has ended.

Neither changes a cause or makes it surer: both say which line to look at first.
"""

from __future__ import annotations

from dataclasses import replace

from safelaunch.model import Claim, HandledException, RankEvidence
from safelaunch.verdict.exits import one_line
from safelaunch.verdict.findings import Finding
from safelaunch.verdict.rank_state import Facts, view_of
from safelaunch.verdict.reading import frames as fr
from safelaunch.verdict.reading import tracebacks

_MOST = 2  # ranks of which it is said


def with_own_words(facts: Facts, finding: Finding) -> Finding:
    """The finding with what its culprits say themselves, where they have not failed by it."""
    told = [words for one in finding.culprits if (words := _of_rank(facts, one.rank)) is not None]
    if not told:
        return finding
    summary = " ".join([finding.summary, *(text for text, _ in told[:_MOST])])
    return replace(finding, summary=summary, claims=(*finding.claims[:1], *(c for _, c in told), *finding.claims[1:]))


def says_why(facts: Facts, rank: int) -> bool:
    """Whether the rank says itself why it is where it is."""
    return _of_rank(facts, rank) is not None


def _of_rank(facts: Facts, number: int) -> tuple[str, Claim] | None:
    rank = facts.ranks[number].evidence
    if rank.exception is not None or rank.exit is not None:
        return None
    return _handles(rank) or _lost_a_thread(facts, rank)


def _handles(rank: RankEvidence) -> tuple[str, Claim] | None:
    """Its main thread is in a ``finally``, or an ``except``: what it waits for there, it would not else."""
    view = view_of(rank)
    ident = view.thread.ident if view is not None and view.thread is not None else 0
    for one in rank.gil.handling:
        if ident and one.thread == ident:
            words = _words(rank, one)
            text = f"Rank {rank.rank} does so while it handles {words}."
            return text, Claim(f"rank {rank.rank}: handles {words}", f"ranks/{rank.rank}/rank.json")
    return None


def _words(rank: RankEvidence, one: HandledException) -> str:
    message = f": {one_line(one.message)}" if one.message else ""
    return f"{one.type}{message}, raised{fr.at(fr.stack_of(rank, one.frames).user_frame)}"


def _lost_a_thread(facts: Facts, rank: RankEvidence) -> tuple[str, Claim] | None:
    """It waits for its own threads, and its output ends with the exception of one."""
    condition = facts.ranks[rank.rank].condition
    if condition is None or condition.lock is None:
        return None
    found = next(tracebacks.of_threads(rank.log_tail), None)
    if found is None:
        return None
    where = fr.at(fr.stack_of(rank, found.frames).user_frame)
    words = f"thread {found.thread!r} has ended by {one_line(found.message)}{where}"
    return f"Its {words}.", Claim(f"rank {rank.rank}: its {words}", f"ranks/{rank.rank}/log_tail.txt")
