"""Shows a job's stacks in groups, and the stacks of processes at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safelaunch.model import Culprit, Evidence, Frame, RankEvidence, rank_words
from safelaunch.report.stack_tree import StackBranch, stack_tree
from safelaunch.stacks.frames import is_ours, own_part
from safelaunch.verdict.rank_state import CaseFacts
from safelaunch.verdict.thread_view import View, child_views, view_of

ReadLine = Callable[[str, int], "str | None"]  # (file, line number from 1) -> line of source
MAX_FRAMES = 40


@dataclass(frozen=True)
class StackGroup:
    who: str  # ``ranks 0-2,5``, ``dataloader workers of rank 1``
    frames: tuple[Frame, ...]  # innermost first
    user_frame: Frame | None
    count: int


def merged_stacks(facts: CaseFacts) -> tuple[StackBranch, ...]:
    """Returns the main threads of all ranks as a tree; empty if fewer than two ranks have stacks."""
    found = {rank: main_frames(one.evidence) for rank, one in facts.ranks.items()}
    mains = {rank: frames for rank, frames in found.items() if frames}
    return stack_tree(mains, {*facts.ranks, *facts.unseen}) if len(mains) > 1 else ()


def main_frames(rank: RankEvidence) -> tuple[Frame, ...]:
    """Returns the frames of a rank's exception, or else of its main thread, innermost first."""
    if rank.exception is not None and rank.exception.frames:
        return rank.exception.frames
    view = view_of(rank)
    return without_ours(view.frames) if view is not None else ()


def without_ours(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Removes the beacon's frames, in which a rank that is ending waits for the supervisor."""
    return (
        tuple(frame for frame in frames if not is_ours(frame.file)) if any(is_ours(f.file) for f in frames) else frames
    )


def stack_groups(facts: CaseFacts) -> tuple[list[StackGroup], set[int]]:
    """Returns groups of equal stacks (largest first, ranks before their children), and the ranks without stacks."""
    groups: dict[tuple[bool, str, tuple[Frame, ...]], list[tuple[int, View]]] = {}
    for rank, one in facts.ranks.items():
        for is_main, each in ((True, one.view), *((False, child) for child in one.children)):
            if each is not None and each.frames:
                frames = main_frames(one.evidence) if is_main else each.frames
                groups.setdefault((is_main, each.process.role, frames), []).append((rank, each))
    merged = []
    for (is_main, role, frames), members in groups.items():
        of = rank_words(rank for rank, _ in members)
        who = of if is_main else f"{len(members)} {role}{'s' * (len(members) > 1)} of {of}"
        merged.append((not is_main, -len(members), StackGroup(who, frames, members[0][1].user_frame, len(members))))
    merged.sort(key=lambda item: item[:2])
    seen = {rank for (is_main, _, _), members in groups.items() if is_main for rank, _ in members}
    return [group for _, _, group in merged], set(facts.ranks) - seen | set(facts.unseen)


def frame_text(frame: Frame | None) -> str:
    return f"{frame.file}:{frame.line} {frame.function}" if frame else ""


def stack_lines(group: StackGroup) -> list[str]:
    lines = [f"{'→' if f == group.user_frame else ' '} {frame_text(f)}" for f in group.frames[:MAX_FRAMES]]
    left = len(group.frames) - MAX_FRAMES
    return [*lines, f"  ... {left} more"] if left > 0 else lines


def culprit_lines(culprit: Culprit, evidence: Evidence, read_line: ReadLine | None) -> list[str]:
    rank = next((r for r in evidence.ranks if r.rank == culprit.rank), None)
    lines: list[str] = []
    marked = False
    for frame in frames_at_fault(culprit, rank)[:MAX_FRAMES]:
        mark = not marked and frame == culprit.frame
        marked = marked or mark
        lines.append(f"{'→' if mark else ' '} {frame_text(frame)}")
        text = read_line(frame.file, frame.line) if read_line and mark else None
        lines += [f"      {text}"] if text else []
    if culprit.frame is not None and not marked:
        # The rank has left the line at fault.
        lines = [f"→ {frame_text(culprit.frame)}", *(["", "now in:", *lines] if lines else [])]
    return lines


def frames_at_fault(culprit: Culprit, rank: RankEvidence | None) -> tuple[Frame, ...]:
    """Returns the frames of the exception that ended the process.

    Without an exception, returns the frames of the thread that contains the culprit's frame, or else of the main
    thread. If the process is dead, its last recorded frames count.
    """
    if rank is None:
        return ()
    raised = rank.exception.frames if rank.exception is not None else ()
    if raised and culprit.pid == rank.pid and (culprit.frame is None or culprit.frame in raised):
        return raised
    for view in (view_of(rank), *child_views(rank)):
        if view is not None and view.process.pid == culprit.pid and view.sample is not None:
            inside = next((t for t in view.sample.threads if culprit.frame in t.frames), view.thread)
            if inside is not None:
                return without_ours(own_part(inside.frames))
    return _last_frames(rank)


def _last_frames(rank: RankEvidence) -> tuple[Frame, ...]:
    if rank.exception is not None:
        return rank.exception.frames
    if rank.fatal is not None:
        return rank.fatal.frames
    return rank.exit_call.frames if rank.exit_call is not None else ()
