"""Shows the ranks' main threads as a tree of shared frames, with branches where their stacks diverge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.model import Frame, format_ranks, rank_words

_DEEPEST = 60  # enough for a runaway recursion, at another depth in each rank


@dataclass(frozen=True)
class StackBranch:
    """Frames that ranks share, and the branches into which their stacks continue. Without frames, they end here."""

    frames: tuple[Frame, ...]  # outermost first
    ranks: str  # ranges: ``0-2,5``
    missing: str  # ranks in the parent, but not here; empty if most ranks are here
    count: int
    branches: tuple[StackBranch, ...] = ()  # the largest first


def stack_tree(stacks: Mapping[int, Sequence[Frame]], everybody: Iterable[int]) -> tuple[StackBranch, ...]:
    """Returns the tree of all ``stacks``, in which the innermost frame comes first."""
    groups: dict[tuple[Frame, ...], int] = {}
    for rank, frames in stacks.items():
        key = tuple(frames)
        groups[key] = groups.get(key, 0) | 1 << rank
    whole = sum(1 << rank for rank in set(everybody) | set(stacks))
    return _branches([(frames[::-1], ranks) for frames, ranks in groups.items() if frames], 0, whole, 0)


def _branches(
    stacks: Sequence[tuple[tuple[Frame, ...], int]], depth: int, whole: int, nesting: int
) -> tuple[StackBranch, ...]:
    """Returns the branches of ``stacks``, whose first ``depth`` frames all ranks of the bit set ``whole`` share."""
    sides: dict[Frame | None, list[tuple[tuple[Frame, ...], int]]] = {}
    for frames, ranks in stacks:
        sides.setdefault(frames[depth] if depth < len(frames) else None, []).append((frames, ranks))
    made = []
    for frame, members in sides.items():
        ranks = 0
        for _, theirs in members:
            ranks |= theirs
        count, others = ranks.bit_count(), whole & ~ranks
        missing = ranges(others) if others.bit_count() < count else ""
        end = depth if frame is None else _common_end([frames for frames, _ in members], depth)
        further = len(members) > 1 and nesting < _DEEPEST
        branches = _branches(members, end, ranks, nesting + 1) if further else ()
        made.append((ranks, StackBranch(members[0][0][depth:end], ranges(ranks), missing, count, branches)))
    made.sort(key=lambda item: (-item[1].count, item[0] & -item[0]))
    return tuple(branch for _, branch in made)


def _common_end(stacks: Sequence[tuple[Frame, ...]], begin: int) -> int:
    first = stacks[0]
    end = min(map(len, stacks))
    for frames in stacks[1:]:
        end = next((at for at in range(begin, end) if frames[at] != first[at]), end)
    return end


def tree_lines(branches: Sequence[StackBranch], *, frames: int = 40, lines: int = 240) -> list[str]:
    """Returns the tree as text. Leaves out the middle of a long run of frames, and the end of a large tree."""
    made: list[str] = []
    for branch in branches:
        _lines_of(branch, "", frames, made)
    left = len(made) - lines
    return [*made[:lines], f"... {left} more lines"] if left > 0 else made


def _lines_of(branch: StackBranch, indent: str, most: int, made: list[str]) -> None:
    made.append(f"{indent}{_who(branch)}")
    shown = list(branch.frames)
    if len(shown) > most:
        shown[most // 2 : len(shown) - most // 2] = []
    for number, frame in enumerate(shown):
        if number == most // 2 and len(branch.frames) > most:
            made.append(f"{indent}  ... {len(branch.frames) - len(shown)} more")
        made.append(f"{indent}  {frame.file}:{frame.line} {frame.function}")
    for further in branch.branches:
        _lines_of(further, f"{indent}    ", most, made)


def _who(branch: StackBranch) -> str:
    # ``ranks 0-2,5 | missing 3-4``
    missing = f" | missing {branch.missing}" if branch.missing else ""
    return f"{rank_words(branch.ranks)}{'' if branch.frames else ': here'}{missing}"


def ranges(ranks: int) -> str:
    found = []
    while ranks:
        lowest = ranks & -ranks
        found.append(lowest.bit_length() - 1)
        ranks ^= lowest
    return format_ranks(found)
