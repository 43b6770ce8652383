"""Frames of frameworks, and callers of a helper, that distinguish ranks at the same line of the user's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from safelaunch.model import (
    Claim,
    Frame,
)
from safelaunch.stacks import frames as fr
from safelaunch.verdict.findings import Annotation, Finding
from safelaunch.verdict.phrases import by_place, capital, ranks_do
from safelaunch.verdict.rank_state import CaseFacts

_MOST_SIDES = 3


def frames_apart(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Yields the frames that distinguish ranks at one line of the user's code: the framework's below it, or callers."""
    yield from _frames_below(facts, finding)
    if finding.cause in ("collective-mismatch", "group-order", "p2p-cycle"):  # no rank is known to be behind
        yield from _frames_above(facts, finding)


def _frames_below(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Yields framework frames that differ between ranks at the same user line, such as ``trainer.fit(model)``."""
    named = {culprit.rank for culprit in finding.culprits}
    ways: dict[int, tuple[Frame, ...]] = {}
    for rank in sorted(named | {rank for rank, state in facts.ranks.items() if state.wait is not None}):
        stack = _stack_of(facts, rank)
        if stack is not None and stack.user_frame is not None:
            below = (frame for frame in reversed(stack.called) if fr.is_of_framework(frame.file))
            ways[rank] = (stack.user_frame, *below)
    sides = dict(by_place(ways))
    lines = {side[0] for side, ranks in sides.items() if named.intersection(ranks)}
    if len(lines) != 1 or len(sides) < 2 or any(side[0] not in lines for side in sides):
        return
    shared = len(list(takewhile(lambda level: len({(f.file, f.line) for f in level}) == 1, zip(*sides, strict=False))))
    if any(len(side) == shared for side in sides):
        return
    pairs = [(_telling(side, sides, shared), ranks) for side, ranks in list(sides.items())[:_MOST_SIDES]]
    parts = [f"{ranks_do(ranks, 'is', 'are')} at {fr.place(frame)}" for frame, ranks in pairs]
    text = f"below {fr.place(lines.pop())}, {', '.join(parts)}"
    claim = Claim(text, f"ranks/{next(iter(sides.values()))[0]}/stack.txt")
    yield Annotation(f"{capital(text)}.", (claim,))


def _frames_above(facts: CaseFacts, finding: Finding) -> Iterator[Annotation]:
    """Yields the callers from which ranks came to the same line, as in a helper, if these differ."""
    stacks = {rank: stack for rank, state in facts.ranks.items() if (stack := state.user_stack)}
    for line in dict.fromkeys(
        fr.spot(stacks[culprit.rank][0]) for culprit in finding.culprits if culprit.rank in stacks
    ):
        at_line = {rank: stack for rank, stack in stacks.items() if fr.spot(stack[0]) == line}
        helper, *levels = zip(*at_line.values(), strict=False)
        frames_apart = next((level for level in levels if len({*map(fr.spot, level)}) > 1), ())
        ways = by_place({rank: fr.place(frame) for rank, frame in zip(at_line, frames_apart, strict=False)})
        if ways:
            parts = [f"{ranks_do(ranks, 'comes', 'come')} from {way}" for way, ranks in ways[:_MOST_SIDES]]
            yield Annotation(f"To {fr.place(helper[0])}, {' and '.join(parts)}.")


def _telling(side: tuple[Frame, ...], sides: Iterable[tuple[Frame, ...]], shared: int) -> Frame:
    peer_files = {frame.file for peer_side in sides if peer_side is not side for frame in peer_side[shared:]}
    return next((frame for frame in side[shared:] if frame.file not in peer_files), side[-1])


def _stack_of(facts: CaseFacts, rank: int) -> fr.Stack | None:
    state = facts.ranks[rank]
    if state.wait is not None and state.wait.group is not None and state.wait.seq is not None:
        entry = facts.alignment.entry(rank, state.wait.group, state.wait.seq)
        if entry is not None and entry.frames:
            return facts.alignment.stack(rank, entry)
    return state.view.stack if state.view is not None else None
