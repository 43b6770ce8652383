"""Ranks that show one line of the user's, ``trainer.fit(model)``, and are in different parts of what it calls.

The line is where to look in the script; what sets the ranks apart are frames of the framework: callbacks, metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from safelaunch.model import Claim, Frame
from safelaunch.verdict.findings import Finding, capital, ranks_do
from safelaunch.verdict.rank_state import Facts, view_of
from safelaunch.verdict.reading import frames as fr

_MOST = 3  # sides


def with_frames_below(facts: Facts, finding: Finding) -> Finding:
    """The finding with the frames of a framework in which ranks part that are at one line of the user's."""
    named = {one.rank for one in finding.culprits}
    sides: dict[tuple[Frame, ...], list[int]] = {}
    for rank in sorted(named | {rank for rank, one in facts.ranks.items() if one.wait is not None}):
        stack = _stack_of(facts, rank)
        if stack is not None and stack.user_frame is not None:
            below = (frame for frame in reversed(stack.called) if fr.is_of_framework(frame.file))
            sides.setdefault((stack.user_frame, *below), []).append(rank)
    lines = {side[0] for side, ranks in sides.items() if named.intersection(ranks)}
    if len(lines) != 1 or len(sides) < 2 or any(side[0] not in lines for side in sides):
        return finding
    told = _apart(list(sides))
    if None in told:
        return finding
    pairs = list(zip(told, sides.values(), strict=True))[:_MOST]
    parts = [f"{ranks_do(ranks, 'is', 'are')} at {fr.place(frame)}" for frame, ranks in pairs]
    text = f"below {fr.place(lines.pop())}, {', '.join(parts)}"
    claim = Claim(text, f"ranks/{next(iter(sides.values()))[0]}/stack.txt")
    return replace(
        finding, summary=f"{finding.summary} {capital(text)}.", claims=(*finding.claims[:1], claim, *finding.claims[1:])
    )


def _stack_of(facts: Facts, rank: int) -> fr.Stack | None:
    """Of the call that it waits in, as recorded; else of its main thread."""
    one = facts.ranks[rank]
    if one.wait is not None and one.wait.group is not None and one.wait.seq is not None:
        entry = facts.alignment.entry(rank, one.wait.group, one.wait.seq)
        if entry is not None and entry.frames:
            return facts.alignment.stack(rank, entry)
    view = view_of(one.evidence)
    return view.stack if view is not None else None


def _apart(sides: Sequence[tuple[Frame, ...]]) -> list[Frame | None]:
    """Of each side the outermost frame that tells it from the others: in a file of its own, else in a function of its
    own behind their last common call. None where there is none.
    """
    shared = len(list(takewhile(lambda level: len({(f.file, f.line) for f in level}) == 1, zip(*sides, strict=False))))
    rest = [side[shared:] for side in sides]
    return [_telling(side, [f for other in rest if other is not side for f in other]) for side in rest]


def _telling(side: Sequence[Frame], others: Sequence[Frame]) -> Frame | None:
    files = {frame.file for frame in others}
    functions = {(frame.file, frame.function) for frame in others}
    own_file = (frame for frame in side if frame.file not in files)
    own_function = (frame for frame in side if (frame.file, frame.function) not in functions)
    return next(own_file, None) or next(own_function, None)
