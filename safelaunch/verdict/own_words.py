"""Explanations from a rank's own state: exceptions it handles, signal handlers, threads that ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from safelaunch.model import (
    Claim,
    Frame,
    HandledException,
    RankEvidence,
)
from safelaunch.stacks import calls, tracebacks
from safelaunch.stacks import frames as fr
from safelaunch.stacks.frames import short
from safelaunch.stacks.source import context, runs_aside
from safelaunch.verdict.exceptions import one_line
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.peers import CallPlace, begins_at
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import ASIDE, HANDLES, Advice
from safelaunch.verdict.thread_view import View

_MOST_QUOTED = 2  # ranks whose explanation is part of the summary


def own_words(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Yields what the ranks at fault themselves show about the reason, if they have not failed."""
    annotations = [words for culprit in finding.culprits if (words := _own_annotation(facts, culprit.rank)) is not None]
    for number, annotation in enumerate(annotations):
        yield replace(annotation, sentence=annotation.sentence if number < _MOST_QUOTED else "")


def explains_itself(facts: CaseFacts, rank: int) -> bool:
    """Returns whether the rank's own state explains its place."""
    return _own_annotation(facts, rank) is not None


def is_outside_normal_flow(facts: CaseFacts, rank: int) -> bool:
    """Returns whether the rank has left its program's normal flow: it is handling an exception or a signal."""
    handled = _exception_handled(facts, facts.ranks[rank].evidence)
    return is_interrupted(facts, rank) or (handled is not None and not _is_usual(facts, rank, handled))


def is_interrupted(facts: CaseFacts, rank: int) -> bool:
    return _interrupted(facts, facts.ranks[rank].evidence) is not None


def _own_annotation(facts: CaseFacts, number: int) -> Annotation | None:
    rank = facts.ranks[number].evidence
    if rank.exception is not None or rank.exit is not None:
        return None
    return _handled_exception(facts, rank) or _interrupted(facts, rank) or _ended_thread(facts, rank)


def _interrupted(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """Explains a rank that is in code which Python calls at any time, such as a signal handler."""
    for frame in facts.ranks[rank.rank].user_stack:
        if handler := runs_aside(frame, facts.read_source):
            words = f"in {handler}, {short(frame.function)}"
            claim = Claim(f"rank {rank.rank} is {words}", f"ranks/{rank.rank}/stack.txt")
            return Annotation(f"Rank {rank.rank} does so {words}.", (claim,), advice=frozenset({ASIDE}))
    return None


def _handled_exception(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """Explains a rank whose main thread is in a ``finally`` or ``except``, without which it would not wait there."""
    handled = _exception_handled(facts, rank)
    if handled is None:
        return None
    words = _exception_words(rank, handled)
    text = f"Rank {rank.rank} does so while it handles {words}."
    claim = Claim(f"rank {rank.rank}: handles {words}", f"ranks/{rank.rank}/rank.json")
    advice = frozenset[Advice]() if _is_usual(facts, rank.rank, handled) else frozenset({HANDLES})
    return Annotation(text, (claim,), advice=advice)


def _exception_handled(facts: CaseFacts, rank: RankEvidence) -> HandledException | None:
    view = facts.ranks[rank.rank].view
    ident = view.thread.ident if view is not None and view.thread is not None else 0
    return next((handled for handled in rank.gil.handling if ident and handled.thread == ident), None)


def _is_usual(facts: CaseFacts, rank: int, handled: HandledException) -> bool:
    """Returns whether the exception ends a loop, as by design, or the rank has called from that handler before."""
    if handled.type.startswith("Stop") and handled.type.endswith("Iteration"):
        return True
    wait = facts.ranks[rank].wait
    if wait is None or wait.group is None or wait.seq is None:
        return False
    before = len(facts.histories.in_group(wait.group).times_called(rank, wait.seq)) > 1
    return before and any(context(frame, facts.read_source).handlers for frame in facts.ranks[rank].user_stack)


def _exception_words(rank: RankEvidence, exception: HandledException) -> str:
    message = f": {one_line(exception.message)}" if exception.message else ""
    return f"{exception.type}{message}, raised{fr.at(fr.stack_of(rank, exception.frames).user_frame)}"


def _ended_thread(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """Explains a rank that waits for its own threads, if one has ended or is missing."""
    condition = facts.ranks[rank.rank].condition
    if condition is None or condition.lock is None:
        return None
    ended = ended_thread(rank)
    if ended is None:
        return _missing_thread(facts, rank)
    return Annotation(f"Its {ended.words}.", (log_claim(rank, ended.words),))


@dataclass(frozen=True)
class EndedThread:
    words: str
    frame: Frame | None  # the user's line that raised
    served: bool  # it was in a server of the standard library


def ended_thread(rank: RankEvidence) -> EndedThread | None:
    """Returns the thread that an exception ended last; None if none did."""
    ended = next(tracebacks.of_threads(rank.log_tail), None)
    if ended is None:
        return None
    frame = fr.stack_of(rank, ended.frames).user_frame
    words = f"thread {ended.thread!r} has ended by {one_line(ended.message)}{fr.at(frame)}"
    return EndedThread(words, frame, calls.SERVES.on(ended.frames))


def log_claim(rank: RankEvidence, words: str) -> Claim:
    return Claim(f"rank {rank.rank}: its {words}", f"ranks/{rank.rank}/log_tail.txt")


def _missing_thread(facts: CaseFacts, rank: RankEvidence) -> Annotation | None:
    """Explains a rank without a thread that all its peers have: the only trace of a swallowed exception."""
    own_threads = _threads_of(facts.ranks[rank.rank].view)
    if own_threads is None:
        return None
    peers = (_threads_of(state.view) for number, state in facts.ranks.items() if number != rank.rank)
    missing: dict[CallPlace | None, Frame] = {}
    for peer_threads in (threads for threads in peers if threads is not None):
        missing = {
            place: at
            for place, at in (missing or peer_threads).items()
            if place in peer_threads and place not in own_threads
        }
        if not missing:
            return None
    if not missing:
        return None
    words = f"has no thread in {fr.place(next(iter(missing.values())))}, as all its peers have"
    claim = Claim(f"rank {rank.rank} {words}", f"ranks/{rank.rank}/stack.txt")
    return Annotation(f"Rank {rank.rank} {words}: it has ended, or was never started.", (claim,))


def _threads_of(view: View | None) -> dict[CallPlace | None, Frame] | None:
    if view is None or view.sample is None:
        return None
    return {begins_at(thread_view.stack): thread_view.stack.user_frames[-1] for thread_view in view.beside()}
