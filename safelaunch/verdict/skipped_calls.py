"""Explanations for skipped calls: exceptions that a rank caught, and what it alone printed.

``except Exception: continue`` around a training step skips the step's collectives: the rank continues one call behind,
and the job stops at some later, innocent line. Other rules find that; this explains it. The same holds for ``if not
torch.isfinite(loss): print("skipping batch"); continue``: the printed line and its source show where the rank left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from safelaunch.model import CaughtException, Claim, Frame
from safelaunch.stacks import frames as fr
from safelaunch.stacks.tracebacks import lines_of
from safelaunch.stacks.ways_out import WayOut, ways_out
from safelaunch.verdict.conflict import Conflict
from safelaunch.verdict.doubts import Doubt, doubts_if
from safelaunch.verdict.exceptions import one_line
from safelaunch.verdict.findings import Annotation, Finding, Reason
from safelaunch.verdict.phrases import capital, ranks_word
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.suggestions import BROKEN_OFF, LEFT_OUT

_MOST_LOOKED_AT = 4  # ranks at fault, and as many peers, whose functions are searched for what they print


@dataclass(frozen=True)
class _SkippedCalls:
    """Explanation for calls that a rank skipped and its peers made."""

    reason: str  # a sentence
    frame: Frame
    claim: Claim
    sure: bool  # the records show that the ranks diverged here; else they only agree with it
    what: str  # the exception or the printed line


def _explanation(
    finding: Finding, skips: Mapping[int, _SkippedCalls], reason: Reason, words: str, what: str
) -> Annotation:
    culprits = (culprit for culprit in finding.culprits if culprit.rank in skips)
    return Annotation(
        words,
        tuple(skip.claim for skip in skips.values()),
        doubts_if({Doubt.SEVERAL_PLACES_FIT: not all(skip.sure for skip in skips.values())}),
        tuple(
            structs.replace(culprit, frame=skips[culprit.rank].frame, reason=skips[culprit.rank].reason)
            for culprit in culprits
        ),
        cause="swallowed-exception",
        explains=reason,
        ruled_out=(f"{finding.cause} alone: {what} says why",),
    )


def skipped_calls(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Blames an exception that ranks caught, or a printed line at which they skipped calls."""
    yield from _caught_exception(facts, finding)
    yield from _skipped_batch(facts, finding)


def _caught_exception(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Blames a caught exception if it explains the finding.

    The exception must lie between the rank's last call in common with its peers and its first different one, or where a
    few more calls would make the records agree to the end. An exception that peers caught at the same place explains
    nothing. Without a minority (one rank against one), the exception shows which side is at fault.
    """
    if not any(f.evidence.caught for f in facts.ranks.values()):
        return
    mismatch = facts.histories.first_mismatch
    fits = {c.rank: fit for c in finding.culprits if (fit := _matching_exception(facts, c.rank, mismatch)) is not None}
    if not fits or (not finding.all_doubts and len(fits) < len(finding.culprits)):
        return
    types = " and ".join(sorted({fit.what for fit in fits.values()}))
    words = (
        f"{capital(ranks_word(fits))} raised {types} and continued, skipping the collectives that their peers called."
    )
    words = next(iter(fits.values())).reason if len(fits) == 1 else words
    yield _explanation(finding, fits, Reason.CAUGHT, words, "the exception")


def _skipped_batch(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Blames a skipped batch if only the ranks at fault printed something as they skipped calls.

    A record with an extra call contradicts that; one with a missing call confirms it. A rank that has left the loop
    (``break``, ``return``) is judged by that, whatever it printed.
    """
    printed_lines = _printed_lines(facts, [culprit.rank for culprit in finding.culprits])
    if not printed_lines or (not finding.all_doubts and len(printed_lines) < len(finding.culprits)):
        return
    shifts = facts.histories.shifts(facts.alignment.groups())
    if any(shift.kind == "extra" and printed_lines.keys() & set(shift.ranks) for shift in shifts):
        return
    shown = all(any(rank in shift.ranks for shift in shifts) for rank in printed_lines)
    skips = {rank: _printed_skip(rank, *printed, sure=shown) for rank, printed in printed_lines.items()}
    words = " ".join(skip.reason for skip in skips.values())
    if not all(left.swallows or left.goes == "continue" for left, _ in printed_lines.values()):
        yield Annotation(words, context=tuple(skip.claim for skip in skips.values()), advice=frozenset({BROKEN_OFF}))
        return
    printed = _explanation(finding, skips, Reason.PRINTED, words, "what the rank printed")
    if not any(left.swallows for left, _ in printed_lines.values()):
        printed = replace(printed, cause="collective-mismatch", advice=frozenset({LEFT_OUT}), of="own choice")
    yield printed


def _printed_lines(facts: CaseFacts, named: Sequence[int]) -> dict[int, tuple[WayOut, str]]:
    """Returns each rank's newest line that no peer printed, and the statement after which it skipped calls."""
    printed = {rank: lines for rank in named if (lines := lines_of(facts.ranks[rank].evidence.log_tail))}
    not_named = [rank for rank in facts.ranks if rank not in named]
    some = [*list(printed)[:_MOST_LOOKED_AT], *not_named[:_MOST_LOOKED_AT]] if printed else []
    called = {(frame.file, frame.line): frame for rank in some for frame in _lines_called_from(facts, rank)}
    every = ways_out(called.values(), facts.read_source)
    ways = [left for left in every if left.parts and any(left.leaves_out(frame) for frame in called.values())]
    own_lines: dict[int, tuple[WayOut, str]] = {}
    for rank, lines in printed.items() if ways else ():
        peer_tails = [facts.ranks[peer].evidence.log_tail for peer in not_named or named if peer != rank]
        matches = ((left, line) for line in reversed(lines) for left in ways if left.has_printed(line))
        own = next((match for match in matches if not any(match[0].is_in(text) for text in peer_tails)), None)
        if own is not None:
            own_lines[rank] = own
    return own_lines


def _lines_called_from(facts: CaseFacts, rank: int) -> Iterator[Frame]:
    yield from facts.ranks[rank].user_stack
    for kind in facts.alignment.ring(rank).used().values():
        yield from facts.alignment.stack(rank, kind).user_frames


def _printed_skip(rank: int, left: WayOut, line: str, *, sure: bool) -> _SkippedCalls:
    text = one_line(line.strip(), 100)
    words = f"Rank {rank} printed {text!r} at {fr.place(left.frame)}, in `{left.after}`, and continued with {left.goes}"
    words += ", skipping the collectives that its peers called there"
    return _SkippedCalls(f"{words}.", left.frame, Claim(words, f"ranks/{rank}/log_tail.txt"), sure, text)


def _caught_skip(
    rank: int, exception: CaughtException, group: str, number: int, later: bool, *, sure: bool
) -> _SkippedCalls:
    reason = f"Rank {rank} raised {exception.type} at {fr.place(exception.raised)} and continued at"
    reason += f" {fr.place(exception.caught)}, skipping the collectives that its peers called there."
    then = f" and before its #{number}" if later else "; it called no other since"
    text = f"{exception.type} at {fr.place(exception.raised)}, after #{number - 1} of {group}{then}"
    return _SkippedCalls(reason, exception.raised, Claim(text, f"ranks/{rank}/caught.json"), sure, exception.type)


def _next_call(facts: CaseFacts, rank: int, group: str, time_unix_s: float) -> tuple[int, bool] | None:
    """Returns the number in ``group`` of the rank's next call after that time, and whether it was made.

    None if the time is before the record, or without a record.
    """
    window = facts.alignment.window(rank, group)
    if window is None:
        return None
    at = bisect_right(window.positions, time_unix_s * 1e9, key=lambda position: window.entries.created_ns[position])
    if at == 0 and window.numbers[0] > 1:
        return None
    later = at < len(window.positions)
    return (window.numbers[at] if later else window.numbers[-1] + 1), later


def _diverged_at(facts: CaseFacts, rank: int, group: str, mismatch: Conflict | None) -> tuple[int, bool]:
    """Returns the first number of ``group`` at which ``rank`` differs from its peers, and if the histories show it.

    Otherwise they might agree with several places.
    """
    shift = facts.histories.in_group(group).shift
    if shift is not None and (rank in shift.ranks) == (shift.kind == "missing"):
        return shift.number, True
    if mismatch is not None and mismatch.group == group and rank in mismatch.odd:
        return mismatch.seq, shift is not None
    window = facts.alignment.window(rank, group)
    return window.numbers[-1] + 1 if window else 0, shift is not None


def _matching_exception(facts: CaseFacts, rank: int, mismatch: Conflict | None) -> _SkippedCalls | None:
    parted = {group: _diverged_at(facts, rank, group, mismatch) for group in facts.alignment.groups()}
    tried: dict[tuple[str, int], bool] = {}
    for exception in reversed(facts.ranks[rank].evidence.caught):
        for group, (parted_at, shown) in parted.items():
            place = _next_call(facts, rank, group, exception.time_unix_s)
            if place is None:
                continue
            number, later = place
            sure = number == parted_at
            key = (group, number)
            if not sure and key not in tried:  # many exceptions might lie between the same two calls
                # If all steps are the same, records can't show the place, but they can agree with this one.
                aligned = facts.histories.in_group(group)
                tried[key] = later and not shown and aligned.may_have_left_out(rank, number)
            if (sure or tried[key]) and not _peers_did_too(facts, rank, group, number, exception):
                return _caught_skip(rank, exception, facts.group(group), number, later, sure=sure and later)
    return None


def _peers_did_too(facts: CaseFacts, rank: int, group: str, number: int, exception: CaughtException) -> bool:
    return any(
        (other.type, other.raised) == (exception.type, exception.raised)
        and (_next_call(facts, peer, group, other.time_unix_s) or (None,))[0] == number
        for peer, state in facts.ranks.items()
        for other in state.evidence.caught
        if peer != rank
    )
