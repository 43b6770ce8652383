"""The source at each side of where ranks part: the lines, and the conditions and loops that lead to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from safelaunch.diagnose.guarding import whereabouts
from safelaunch.diagnose.rank_state import Facts, user_stack_of
from safelaunch.model import Culprit, Evidence, Frame, Verdict, format_ranks
from safelaunch.reading.frames import stack_of
from safelaunch.reading.guards import Step, way_to
from safelaunch.reading.source import ReadSource
from safelaunch.report.overview import frames_at_fault

MOST_SIDES = 6
MOST_PLACES = 3  # of one side, with source: its line and the callers that lead to it
BEFORE, AFTER, GAP = 5, 3, 3
MOST_COLUMNS = 240


@dataclass(frozen=True)
class Line:
    """One line of source. ``mark``: ``here`` where the ranks are, ``guard`` where ranks may part, ``way`` for other
    conditions and loops on the way, else empty. ``note``: what the condition does. ``gap``: lines are left out before.
    """

    number: int
    text: str
    mark: str = ""
    note: str = ""
    gap: bool = False


@dataclass(frozen=True)
class Place:
    """A frame with its source; no ``lines`` where that cannot be read."""

    frame: Frame
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Side:
    """``ranks`` are at ``places``, innermost first; ``callers`` are the user's frames without source. ``does``: what
    they do there. ``more``: places of ranks at fault that are left out.
    """

    ranks: tuple[int, ...]
    culprit: bool
    does: str
    places: tuple[Place, ...]
    callers: tuple[Frame, ...]


def sides(facts: Facts, verdict: Verdict, read_source: ReadSource, said: Callable[[str], str]) -> list[Side]:
    """The sides: those at fault first, then who waits in the same group, the largest first.

    ``said`` takes secrets out of a line of source.
    """
    named = {one.rank: one for one in verdict.culprits}
    grouped: dict[tuple[bool, tuple[Frame, ...]], list[int]] = {}
    for rank in facts.ranks:
        stack = _stack_of_culprit(facts, named[rank]) if rank in named else _stack(facts, rank)
        if stack or rank in named:
            grouped.setdefault((rank in named, stack), []).append(rank)
    waits = {rank: one.wait.group for rank, one in facts.ranks.items() if one.wait is not None}
    theirs = {waits[rank] for rank in named if rank in waits}

    def order(item: tuple[tuple[bool, tuple[Frame, ...]], list[int]]) -> tuple[bool, bool, int, int]:
        (culprit, _), ranks = item
        return not culprit, waits.get(ranks[0]) not in theirs, -len(ranks), ranks[0]

    ordered = sorted(grouped.items(), key=order)
    at_fault = [item for item in ordered if item[0][0]][: MOST_SIDES - 2]
    others = [item for item in ordered if not item[0][0]][: MOST_SIDES - len(at_fault)]
    shown = [*at_fault, *others]
    found = []
    for (culprit, stack), ranks in shown:
        elsewhere = [other for (_, other), _ in shown if other != stack]
        does = named[ranks[0]].reason if culprit else _does(facts, ranks)
        does = " ".join([does, *_handled(facts, ranks[0])])
        found.append(_side(facts, tuple(ranks), culprit, does, stack, elsewhere, read_source, said))
    return found


def _stack(facts: Facts, rank: int) -> tuple[Frame, ...]:
    """The user's frames of a rank, where it waits, raised, or is."""
    one = facts.ranks[rank]
    stack = user_stack_of(one.evidence)
    frame = one.wait.frame if one.wait is not None else one.frame
    return stack if frame is None or frame in stack else (frame,)


def _stack_of_culprit(facts: Facts, culprit: Culprit) -> tuple[Frame, ...]:
    """The user's frames from the culprit's line outwards; that line alone where it lies in the past."""
    evidence = facts.ranks[culprit.rank].evidence
    stack = stack_of(evidence, frames_at_fault(culprit, evidence)).user_frames
    if culprit.frame is None:
        return stack or _recorded(facts, culprit)
    if culprit.frame in stack:
        return stack[stack.index(culprit.frame) :]
    return _recorded(facts, culprit) or (culprit.frame,)


def _recorded(facts: Facts, culprit: Culprit) -> tuple[Frame, ...]:
    """The user's frames of the newest recorded call from the culprit's line, or of its newest call."""
    evidence = facts.ranks[culprit.rank].evidence
    record = evidence.flight_record
    for entry in reversed(record.entries if record is not None else ()):
        stack = stack_of(evidence, entry.frames).user_frames
        if stack and (culprit.frame is None or stack[0] == culprit.frame):
            return stack
    return ()


def _does(facts: Facts, ranks: Sequence[int]) -> str:
    one = facts.ranks[ranks[0]]
    if one.wait is not None:
        return f"{'Waits' if len(ranks) == 1 else 'Wait'} in {one.wait.words}."
    if one.condition is not None:
        return f"{one.condition.reason[:1].upper()}{one.condition.reason[1:]}."
    return ""


def _handled(facts: Facts, rank: int) -> list[str]:
    """The exceptions that a rank is handling there: in an ``except``, or on its way through a ``finally``."""
    handled = facts.ranks[rank].evidence.gil.handling[:2]
    return [f"It is handling {one.type}{f': {one.message[:200]}' if one.message else ''}." for one in handled]


def _side(
    facts: Facts,
    ranks: tuple[int, ...],
    culprit: bool,
    does: str,
    stack: tuple[Frame, ...],
    elsewhere: Sequence[Sequence[Frame]],
    read_source: ReadSource,
    said: Callable[[str], str],
) -> Side:
    places: list[Place] = []
    callers: list[Frame] = []
    for number, frame in enumerate(stack):
        steps = way_to(frame, read_source)
        # A caller tells something where the other sides did not come by it, or where ranks may part there.
        tells = any(step.asks_for_rank for step in steps) or any(frame not in other for other in elsewhere)
        if len(places) < MOST_PLACES and (number == 0 or tells):
            places.append(Place(frame, _lines(facts, frame, steps, read_source, said)))
        else:
            callers.append(frame)
    return Side(ranks, culprit, does, tuple(places), tuple(callers))


def _lines(
    facts: Facts, frame: Frame, steps: Sequence[Step], read_source: ReadSource, said: Callable[[str], str]
) -> tuple[Line, ...]:
    text = read_source(frame.file)
    source = text.splitlines() if text else []
    if not 0 < frame.line <= len(source):
        return ()
    marked = {step.guard.line: step for step in steps if "__name__" not in step.guard.text}
    wanted = set(range(max(1, frame.line - BEFORE), min(len(source), frame.line + AFTER) + 1)) | set(marked)
    wanted |= set(_headed(source, steps))
    for number in sorted(wanted):  # a few lines more instead of a gap of a few lines
        following = next((other for other in range(number + 1, number + GAP + 2) if other in wanted), number)
        wanted |= set(range(number, following))
    made: list[Line] = []
    for number in sorted(wanted):
        if not 0 < number <= len(source):
            continue
        mark, note = "", ""
        if number in marked:
            mark, note = ("guard" if marked[number].asks_for_rank else "way"), _note(facts, marked[number])
        if number == frame.line:
            mark = "here"
        shown = said(source[number - 1].expandtabs(4).rstrip())[:MOST_COLUMNS]
        made.append(Line(number, shown, mark, note, gap=bool(made) and made[-1].number != number - 1))
    while made and not made[-1].text and not made[-1].mark:
        made.pop()
    return tuple(made)


def _headed(source: Sequence[str], steps: Sequence[Step]) -> list[int]:
    """The ``else`` lines of conditions that were not met: that is where the ranks went."""
    found = []
    for step in steps:
        if step.guard.text.startswith("else of "):
            indent = _indent(source[step.guard.line - 1]) if step.guard.line <= len(source) else -1
            below = range(step.guard.line, min(len(source), step.guard.line + 200))
            found += [
                number + 1
                for number in below
                if _indent(source[number]) == indent and source[number].lstrip().startswith(("else:", "elif "))
            ][:1]
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1


def _note(facts: Facts, step: Step) -> str:
    """``leads rank 0 here; keeps ranks 1-3 from here`` where the rank decides."""
    if step.loop or not step.asks_for_rank:
        return ""
    admitted: dict[bool | None, list[int]] = {}
    for rank in facts.ranks:
        admitted.setdefault(step.guard.admits(whereabouts(facts, rank)), []).append(rank)
    if not admitted.get(True) and not admitted.get(False):
        return "asks for the rank"
    parts = [f"leads {_ranks(admitted[True])} here"] if admitted.get(True) else []
    parts += [f"keeps {_ranks(admitted[False])} from here"] if admitted.get(False) else []
    parts += [f"asks for more than the rank on {_ranks(admitted[None])}"] if admitted.get(None) else []
    return "; ".join(parts)


def _ranks(ranks: Collection[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(set(ranks))}"


def all_frames(evidence: Evidence, verdict: Verdict) -> list[Frame]:
    """The outermost user frames of the ranks, and the lines at fault: where the user's code is."""
    found = {one.frame for one in verdict.culprits if one.frame is not None}
    for rank in evidence.ranks[:64]:
        found |= set(user_stack_of(rank)[-1:])
    return list(found)
