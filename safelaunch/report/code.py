"""Shows the source where ranks diverged: the lines of each side, and conditions and loops on the way there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from safelaunch.model import Culprit, Frame, Verdict, rank_words
from safelaunch.model.entries import Entries
from safelaunch.report.rank_rows import range_of
from safelaunch.report.stacks import frames_at_fault
from safelaunch.stacks.frames import place, same_line, stack_of
from safelaunch.stacks.guards import Guard, SourceLoop, way_to
from safelaunch.stacks.source import FUNCTIONS, Enclosing, context, end_of
from safelaunch.verdict.phrases import capital
from safelaunch.verdict.rank_state import CaseFacts

MOST_SIDES = 6
MOST_PLACES = 3  # of one side: its line and callers
BEFORE, AFTER, GAP = 5, 3, 3
MOST_COLUMNS = 240
MOST_BESIDE = 3


@dataclass(frozen=True)
class SourceLine:
    number: int
    text: str
    mark: str = ""  # ``here``: the ranks are at it; ``guard``: ranks can diverge there; ``way``: on the way there
    note: str = ""  # effect of the condition
    gap: bool = False  # lines are left out before it


@dataclass(frozen=True)
class FrameWithSource:
    frame: Frame
    lines: tuple[SourceLine, ...]  # empty if unreadable
    whose: str = ""  # thread or process, unless it is at fault


@dataclass(frozen=True)
class CallSide:
    ranks: tuple[int, ...]
    culprit: bool
    does: str
    places: tuple[FrameWithSource, ...]  # innermost first
    callers: tuple[Frame, ...]


def sides(facts: CaseFacts, verdict: Verdict, redact: Callable[[str], str]) -> list[CallSide]:
    """Returns the sides: first ranks at fault, then ranks that wait in the same group. Larger sides come first.

    Args:
        redact: Removes secrets from a line of source.
    """
    named = {culprit.rank: culprit for culprit in verdict.culprits}
    grouped: dict[tuple[bool, tuple[Frame, ...]], list[int]] = {}
    for rank in facts.ranks:
        stack = _stack_of_culprit(facts, named[rank]) if rank in named else _stack(facts, rank)
        if stack or rank in named:
            grouped.setdefault((rank in named, stack), []).append(rank)
    waits = {rank: state.wait.group for rank, state in facts.ranks.items() if state.wait is not None}
    awaited_groups = {waits[rank] for rank in named if rank in waits}

    def order(item: tuple[tuple[bool, tuple[Frame, ...]], list[int]]) -> tuple[bool, bool, int, int, int]:
        """Returns a key that sorts ranks at fault first, then ranks that wait in the same group."""
        (culprit, _), ranks = item
        members, complete = facts.alignment.members(waits.get(ranks[0]) or "")
        among = len(members) if complete and members & set(named) else len(facts.world)
        return not culprit, waits.get(ranks[0]) not in awaited_groups, among, -len(ranks), ranks[0]

    ordered = sorted(grouped.items(), key=order)
    at_fault = [item for item in ordered if item[0][0]][: MOST_SIDES - 2]
    waiting = [item for item in ordered if not item[0][0]][: MOST_SIDES - len(at_fault)]
    shown = [*at_fault, *waiting]
    reader = _SourceReader(facts, redact)
    result: list[CallSide] = []
    for (culprit, stack), ranks in shown:
        reasons = _reasons(ranks, named) if culprit else [_does(facts, ranks)]
        counted = _steps(facts, ranks) if verdict.cause == "uneven-batches" else []
        does = " ".join([*reasons, *_groups_waited_in(ranks, waits), *_handled(facts, ranks[0]), *counted])
        stacks = [other for (_, other), _ in shown]
        if stack in stacks[: len(result)]:  # its callers were shown
            places, callers = [reader.place(frame) for frame in stack[:1]], stack[1:]
        else:
            places, callers = reader.places(
                stack, [other for other in stacks if other != stack], stacks.count(stack) > 1
            )
        if culprit and facts.ranks[ranks[0]].evidence.exit is not None and verdict.cause == "uneven-batches":
            places = [reader.as_left(place) for place in places]
        beside = _beside(facts, named[ranks[0]], stack) if culprit else {}
        places += [replace(reader.place(frame), whose=whose) for frame, whose in beside.items()]
        result.append(CallSide(tuple(ranks), culprit, does, tuple(places), callers))
    return result


def _steps(facts: CaseFacts, ranks: Sequence[int]) -> list[str]:
    steps = [step for rank in ranks if (step := facts.ranks[rank].step) is not None]
    return [f"Steps: {range_of(steps)}."] if steps else []


def _beside(facts: CaseFacts, culprit: Culprit, stack: Sequence[Frame]) -> dict[Frame, str]:
    """Returns other frames of the rank, each with its thread: the main thread's, and those in the reason."""
    state = facts.ranks[culprit.rank]
    rank, view = state.evidence, state.view
    if view is None or view.sample is None or rank.exception is not None:
        return {}
    main = view.sample.main_thread
    everywhere = [frame for thread in view.sample.threads for frame in thread.frames]
    past = culprit.process == "main" and not any(same_line(frame, culprit.frame) for frame in everywhere)
    frames = [(view.stack_of(main).user_frame, "now" if past else "its main thread", True)]
    frames += [
        (view.stack_of(thread).user_frame, f"its thread '{thread.name}'" if thread.name else "its thread", False)
        for thread in view.sample.threads
        if thread is not main
    ]
    frames += [(view.user_frame, f"{view.process.role} {view.process.pid}", False) for view in state.children]
    frames[:0] = [(exception.caught, "caught", False) for exception in rank.caught]
    shown = {(frame.file, frame.line) for frame in stack}
    beside: dict[Frame, str] = {}
    for frame, whose, always in frames:
        is_told = always or place(frame) in culprit.reason
        if frame is not None and is_told and (frame.file, frame.line) not in shown:
            beside.setdefault(frame, whose)
    return dict(list(beside.items())[:MOST_BESIDE])


def _reasons(ranks: Sequence[int], named: Mapping[int, Culprit]) -> list[str]:
    alike = {named[rank].does for rank in ranks}
    if len(ranks) > 1 and len(alike) == 1 and named[ranks[0]].reason not in alike:
        return [f"Each of {rank_words(ranks)} {alike.pop()}"]
    return list(dict.fromkeys(named[rank].reason for rank in ranks[:3]))


def _groups_waited_in(ranks: Sequence[int], waits: Mapping[int, str | None]) -> list[str]:
    """Returns the groups in which ranks at the same line wait; empty if it is the same group for all."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if waits.get(rank) is not None:
            groups.setdefault(waits[rank] or "", []).append(rank)
    if len(groups) < 2:
        return []
    words = [f"in group {group!r} {rank_words(members)}" for group, members in list(groups.items())[:4]]
    text = f"{'; '.join(words)}{'; and more' * (len(groups) > 4)}."
    return [capital(text)]


def _stack(facts: CaseFacts, rank: int) -> tuple[Frame, ...]:
    state = facts.ranks[rank]
    stack = state.user_stack
    frame = state.wait.frame if state.wait is not None else state.frame
    return stack if frame is None or frame in stack else _recorded(facts, rank, frame) or (frame,)


def _stack_of_culprit(facts: CaseFacts, culprit: Culprit) -> tuple[Frame, ...]:
    """Returns the user's frames from the culprit's frame outwards; only that frame if the rank has already left it."""
    evidence = facts.ranks[culprit.rank].evidence
    stack = stack_of(evidence, frames_at_fault(culprit, evidence)).user_frames
    if culprit.frame is None:
        return stack or _recorded(facts, culprit.rank, None)
    at = next((number for number, frame in enumerate(stack) if same_line(frame, culprit.frame)), None)
    if at is not None:
        return stack[at:]
    return _recorded(facts, culprit.rank, culprit.frame) or (culprit.frame,)


def _recorded(facts: CaseFacts, rank: int, frame: Frame | None) -> tuple[Frame, ...]:
    """Returns the user's frames of the newest recorded call; prefers a call made from ``frame``."""
    evidence = facts.ranks[rank].evidence
    record = evidence.flight_record
    ring = Entries.of(record.entries if record is not None else ())
    for kind in dict.fromkeys(reversed(ring.kind_of)):
        stack = stack_of(evidence, ring.kinds.all[kind].frames).user_frames
        if stack and (frame is None or same_line(stack[0], frame)):
            return stack
    return ()


def _does(facts: CaseFacts, ranks: Sequence[int]) -> str:
    state = facts.ranks[ranks[0]]
    if state.wait is not None:
        waits = "Waited" if state.evidence.exit is not None else "Waits" if len(ranks) == 1 else "Wait"
        return f"{waits} in {state.wait.words}."
    if state.condition is not None:
        return f"{capital(state.condition.reason)}."
    return ""


def _handled(facts: CaseFacts, rank: int) -> list[str]:
    handled = facts.ranks[rank].evidence.gil.handling[:2]
    return [
        f"It is handling {exception.type}{f': {exception.message[:200]}' if exception.message else ''}."
        for exception in handled
    ]


@dataclass(frozen=True)
class _SourceReader:
    facts: CaseFacts
    redact: Callable[[str], str]

    def places(
        self, stack: Sequence[Frame], elsewhere: Sequence[Sequence[Frame]], alike: bool
    ) -> tuple[list[FrameWithSource], tuple[Frame, ...]]:
        """Returns the frames of a stack whose source is worth showing, and the other callers.

        A caller's source is worth showing if ranks can diverge there, or if other sides came through other lines. If
        all sides came through the same lines (``alike``), every caller's is, because the values that they passed
        differ.
        """
        places: list[FrameWithSource] = []
        callers: list[Frame] = []
        for number, frame in enumerate(stack):
            asks = any(step.depends_on_rank for step in way_to(frame, self.facts.read_source))
            tells = alike or any(_went_elsewhere(frame, other) for other in elsewhere)
            if len(places) < MOST_PLACES and (number == 0 or asks or tells):
                places.append(self.place(frame))
            else:
                callers.append(frame)
        return places, tuple(callers)

    def as_left(self, place: FrameWithSource) -> FrameWithSource:
        """Returns ``place`` with marks for a rank that has left both this line and the loop around it."""
        loop = next((step.line for step in way_to(place.frame, self.facts.read_source) if step.loop), None)
        lines = []
        for line in place.lines:
            if line.number == loop:
                line = replace(line, mark="here", note="left this loop")
            elif line.mark == "here":
                line = replace(line, mark="", note="its last recorded call" if loop is not None else "")
            lines.append(line)
        return replace(place, lines=tuple(lines))

    def place(self, frame: Frame) -> FrameWithSource:
        text = self.facts.read_source(frame.file)
        source = text.splitlines() if text else []
        if not 0 < frame.line <= len(source):
            return FrameWithSource(frame, ())
        marked = {step.line: step for step in way_to(frame, self.facts.read_source) if "__name__" not in step.text}
        here = context(frame, self.facts.read_source)
        first, last = (here.scope.lineno, end_of(here.scope)) if isinstance(here.scope, FUNCTIONS) else (1, len(source))
        near = range(max(first, frame.line - BEFORE), min(last, frame.line + AFTER) + 1)
        wanted = _without_gaps(source, {*near, *marked, *_else_lines(source, here.around)})
        return FrameWithSource(frame, tuple(self._lines(source, frame.line, marked, wanted)))

    def _lines(
        self, source: Sequence[str], here: int, marked: Mapping[int, Guard | SourceLoop], wanted: Sequence[int]
    ) -> list[SourceLine]:
        made: list[SourceLine] = []
        for number in wanted:
            mark, note = "", ""
            if number in marked:
                mark, note = ("guard" if marked[number].depends_on_rank else "way"), _note(self.facts, marked[number])
            if number == here:
                mark = "here"
            shown = self.redact(source[number - 1].expandtabs(4).rstrip())[:MOST_COLUMNS]
            made.append(SourceLine(number, shown, mark, note, gap=bool(made) and made[-1].number != number - 1))
        return made


def _went_elsewhere(frame: Frame, other: Sequence[Frame]) -> bool:
    # In a script's top-level code, another line counts.
    if frame.function != "<module>":
        return frame not in other
    return frame not in other and any(caller.function == "<module>" for caller in other)


def _without_gaps(source: Sequence[str], wanted: Set[int]) -> list[int]:
    """Returns the numbers of the lines to show: the wanted ones, and others in small gaps between them."""
    for number in sorted(wanted):  # fill small gaps
        following = next((other for other in range(number + 1, number + GAP + 2) if other in wanted), number)
        wanted |= {*range(number, following)}
    numbers = [number for number in sorted(wanted) if 0 < number <= len(source)]
    filled = [number for number in numbers if source[number - 1].strip()]
    return [number for number in numbers if filled and filled[0] <= number <= filled[-1]]


def _else_lines(source: Sequence[str], around: Iterable[Enclosing]) -> Iterator[int]:
    # Lines with ``else`` or ``elif`` whose branch the ranks took.
    for each in around:
        if isinstance(each.statement, ast.If) and each.block and not each.in_body:
            between = range(end_of(each.statement.body[-1]), each.block[0].lineno + 1)
            yield from [line for line in between if source[line - 1].lstrip().startswith(("else:", "elif "))][:1]


def _note(facts: CaseFacts, step: Guard | SourceLoop) -> str:
    """Describes which ranks pass a condition on the rank: ``leads rank 0 here; keeps ranks 1-3 from here``.

    Returns "" if the condition doesn't depend on the rank.
    """
    if not isinstance(step, Guard) or not step.depends_on_rank:
        return ""
    admitted: dict[bool | None, list[int]] = {}
    for rank in facts.ranks:
        admitted.setdefault(step.admits(facts.whereabouts(rank)), []).append(rank)
    if not admitted.get(True) and not admitted.get(False):
        return "depends on the rank"
    parts = [f"leads {rank_words(admitted[True])} here"] if admitted.get(True) else []
    parts += [f"keeps {rank_words(admitted[False])} from here"] if admitted.get(False) else []
    parts += [f"lets {rank_words(admitted[None])} pass if the rest holds"] if admitted.get(None) else []
    return "; ".join(parts)


def all_frames(facts: CaseFacts, verdict: Verdict) -> list[Frame]:
    """Returns the ranks' outermost user frames, and the frames at fault."""
    frames = {culprit.frame for culprit in verdict.culprits if culprit.frame is not None}
    for state in list(facts.ranks.values())[:64]:
        frames |= set(state.user_stack[-1:])
    return list(frames)
