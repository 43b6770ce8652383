"""Why a rank is behind its peers, or has gone another way: its exceptions, its own words, the group that it called in.

``except Exception: continue`` around a training step leaves out the step's collectives: the rank goes on, one call
behind, and the job stops at some later, innocent line. What the other rules find then is true, and this says why.
The same holds for ``if not torch.isfinite(loss): print("skipping batch"); continue``: what the rank alone has printed,
and the source of the line that prints it, tell where it left its peers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from safelaunch.model import CaughtException, Claim, Frame
from safelaunch.stacks import frames as fr
from safelaunch.stacks.parting import Left, left_by
from safelaunch.stacks.tracebacks import lines_of
from safelaunch.verdict.doubts import Doubt, those
from safelaunch.verdict.exits import one_line
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.mismatch import Mismatch
from safelaunch.verdict.phrases import capital, ranks_word
from safelaunch.verdict.rank_state import CaseFacts, user_stack_of
from safelaunch.verdict.suggestions import BROKEN_OFF, DRAWN, LEFT_OUT, Advice

# Findings that say who is behind or went another way, and not why.
_EXPLAINED = frozenset({"collective-mismatch", "missing-from-collective", "uneven-batches", "rank-exited"})
_MOST_LOOKED_AT = 4  # ranks at fault, and peers, whose functions are read for what they print


@dataclass(frozen=True)
class _LeftOut:
    """Why a rank left out calls that its peers made: ``reason``, a sentence; ``frame``, where; ``claim``, its evidence.

    ``sure``: the records show that the ranks parted there; else they only agree with it. ``what``: in short.
    """

    reason: str
    frame: Frame
    claim: Claim
    sure: bool
    what: str


def _explained(
    finding: Finding, skips: Mapping[int, _LeftOut], cause: str, words: str, what: str, advice: frozenset[Advice]
) -> Annotation:
    """What these ranks did themselves as the cause, and no others at fault."""
    culprits = (culprit for culprit in finding.culprits if culprit.rank in skips)
    return Annotation(
        words,
        tuple(skip.claim for skip in skips.values()),
        those({Doubt.SEVERAL_PLACES_FIT: not all(skip.sure for skip in skips.values())}),
        tuple(
            structs.replace(culprit, frame=skips[culprit.rank].frame, reason=skips[culprit.rank].reason)
            for culprit in culprits
        ),
        advice,
        cause=cause,
        explains=True,
        ruled_out=(f"{finding.cause} alone: {what} says why",),
    )


def caught_exception(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """The exception as the cause, where one explains the finding.

    It has to lie between the last call that the rank made as its peers did and the first that it did not, or where a
    few calls more would make its record that of its peers to the end: not just somewhere before. Peers that caught the
    same one in the same place went on alike, so there it explains nothing. Where nobody is in the minority (one rank
    against one), the exception tells which side it was.
    """
    if finding.cause not in _EXPLAINED or not any(f.evidence.caught for f in facts.ranks.values()):
        return
    mismatch = facts.histories.first_mismatch
    fits = {c.rank: fit for c in finding.culprits if (fit := _fit(facts, c.rank, mismatch)) is not None}
    if not fits or (not finding.doubts and len(fits) < len(finding.culprits)):
        return
    types = " and ".join(sorted({fit.what for fit in fits.values()}))
    words = (
        f"{capital(ranks_word(fits))} raised {types} and continued, skipping the collectives that their peers called."
    )
    words = next(iter(fits.values())).reason if len(fits) == 1 else words
    yield _explained(finding, fits, "swallowed-exception", words, "the exception", frozenset())


def skipped_batch(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """What the ranks at fault alone have printed as they left out calls that their peers made, as the cause.

    Of the records only a call too many contradicts that; where they show a call left out, they agree with it. Who has
    left the loop by that (``break``, ``return``) has left it, whatever it printed.
    """
    printed_lines = (
        _said(facts, [culprit.rank for culprit in finding.culprits])
        if finding.cause in _EXPLAINED - {"rank-exited"}
        else {}
    )
    if not printed_lines or (not finding.doubts and len(printed_lines) < len(finding.culprits)):
        return
    shifts = [*facts.histories.shifts_in(facts.alignment.groups())]
    if any(shift.kind == "extra" and printed_lines.keys() & set(shift.ranks) for shift in shifts):
        return
    shown = all(any(rank in shift.ranks for shift in shifts) for rank in printed_lines)
    skips = {rank: _as_printed(rank, *printed, sure=shown) for rank, printed in printed_lines.items()}
    words = " ".join(skip.reason for skip in skips.values())
    if not all(left.swallows or left.goes == "continue" for left, _ in printed_lines.values()):
        yield Annotation(words, context=tuple(skip.claim for skip in skips.values()), advice=frozenset({BROKEN_OFF}))
        return
    swallows = any(left.swallows for left, _ in printed_lines.values())
    cause, advice = (
        ("swallowed-exception", frozenset[Advice]()) if swallows else ("collective-mismatch", DRAWN | {LEFT_OUT})
    )
    yield _explained(finding, skips, cause, words, "what the rank printed", advice)


def _said(facts: CaseFacts, named: Sequence[int]) -> dict[int, tuple[Left, str]]:
    """Rank → the newest of its lines that no peer has printed, and the statement behind which it left out calls."""
    printed = {rank: lines for rank in named if (lines := lines_of(facts.ranks[rank].evidence.log_tail))}
    others = [rank for rank in facts.ranks if rank not in named]
    some = [*list(printed)[:_MOST_LOOKED_AT], *others[:_MOST_LOOKED_AT]] if printed else []
    called = {(frame.file, frame.line): frame for rank in some for frame in _lines_called_from(facts, rank)}
    every = left_by(called.values(), facts.read_source)
    ways = [left for left in every if left.parts and any(left.leaves_out(frame) for frame in called.values())]
    own_lines: dict[int, tuple[Left, str]] = {}
    for rank, lines in printed.items() if ways else ():
        peer_tails = [facts.ranks[peer].evidence.log_tail for peer in others or named if peer != rank]
        matches = ((left, line) for line in reversed(lines) for left in ways if left.has_printed(line))
        own = next((match for match in matches if not any(match[0].is_in(text) for text in peer_tails)), None)
        if own is not None:
            own_lines[rank] = own
    return own_lines


def _lines_called_from(facts: CaseFacts, rank: int) -> Iterator[Frame]:
    """The user's frames where the rank is, and of the calls on its record."""
    yield from user_stack_of(facts.ranks[rank].evidence)
    for kind in facts.alignment.ring(rank).used().values():
        yield from facts.alignment.stack(rank, kind).user_frames


def _as_printed(rank: int, left: Left, line: str, *, sure: bool) -> _LeftOut:
    text = one_line(line.strip(), 100)
    words = f"Rank {rank} printed {text!r} at {fr.place(left.frame)}, in `{left.after}`, and continued with {left.goes}"
    words += ", skipping the collectives that its peers called there"
    return _LeftOut(f"{words}.", left.frame, Claim(words, f"ranks/{rank}/log_tail.txt"), sure, text)


def _as_caught(rank: int, exception: CaughtException, group: str, number: int, later: bool, *, sure: bool) -> _LeftOut:
    """``number``: of ``group``, what the rank called next, or would have, if not ``later``."""
    reason = f"Rank {rank} raised {exception.type} at {fr.place(exception.raised)} and continued at {fr.place(exception.caught)}"
    reason += ", skipping the collectives that its peers called there."
    then = f" and before its #{number}" if later else "; it called no other since"
    text = f"{exception.type} at {fr.place(exception.raised)}, after #{number - 1} of group {group!r}{then}"
    return _LeftOut(reason, exception.raised, Claim(text, f"ranks/{rank}/caught.json"), sure, exception.type)


def _next_call(facts: CaseFacts, rank: int, group: str, time_unix_s: float) -> tuple[int, bool] | None:
    """The number in ``group`` that the rank's next call after that time has, or would have; and whether it was made.

    None for what is older than the record, or without a record.
    """
    window = facts.alignment.window(rank, group)
    if window is None:
        return None
    at = bisect_right(window.positions, time_unix_s * 1e9, key=lambda position: window.entries.created_ns[position])
    if at == 0 and window.numbers[0] > 1:
        return None
    later = at < len(window.positions)
    return (window.numbers[at] if later else window.numbers[-1] + 1), later


def _parted_at(facts: CaseFacts, rank: int, group: str, mismatch: Mismatch | None) -> tuple[int, bool]:
    """The first number of ``group`` that ``rank`` did not call as its peers did; and whether the histories show it.

    Where they do not, they may agree with several places.
    """
    shift = facts.histories.shift_in(group)
    if shift is not None and (rank in shift.ranks) == (shift.kind == "missing"):
        return shift.number, True
    if mismatch is not None and mismatch.group == group and rank in mismatch.odd:
        return mismatch.seq, shift is not None
    window = facts.alignment.window(rank, group)
    return window.numbers[-1] + 1 if window else 0, shift is not None


def _fit(facts: CaseFacts, rank: int, mismatch: Mismatch | None) -> _LeftOut | None:
    """The newest exception of ``rank`` at the point where it parted from its peers."""
    parted = {group: _parted_at(facts, rank, group, mismatch) for group in facts.alignment.groups()}
    tried: dict[tuple[str, int], bool] = {}
    for exception in reversed(facts.ranks[rank].evidence.caught):
        for group, (parted_at, shown) in parted.items():
            place = _next_call(facts, rank, group, exception.time_unix_s)
            if place is None:
                continue
            number, later = place
            sure = number == parted_at
            key = (group, number)
            if not sure and key not in tried:  # many exceptions may lie between the same two calls
                # Where all steps are alike the records do not show the place, but they may agree with this one.
                aligned = facts.histories.in_group(group)
                tried[key] = later and not shown and aligned.may_have_left_out(rank, number)
            if (sure or tried[key]) and not _peers_did_too(facts, rank, group, number, exception):
                return _as_caught(rank, exception, group, number, later, sure=sure and later)
    return None


def _peers_did_too(facts: CaseFacts, rank: int, group: str, number: int, exception: CaughtException) -> bool:
    exceptions = (
        (peer, other) for peer, state in facts.ranks.items() if peer != rank for other in state.evidence.caught
    )
    same = (
        peer_exception
        for peer_exception in exceptions
        if (peer_exception[1].type, peer_exception[1].raised) == (exception.type, exception.raised)
    )
    calls = (_next_call(facts, peer, group, other.time_unix_s) for peer, other in same)
    return any(call is not None and call[0] == number for call in calls)
