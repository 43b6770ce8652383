"""Evidence laid out for reading: a line for each rank, and the stacks merged over ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.model import Culprit, Evidence, Frame, RankEvidence, format_ranks, rank_words
from safelaunch.report.tables import hosts_word
from safelaunch.stacks.frames import is_ours, own_part
from safelaunch.verdict.conditions import View
from safelaunch.verdict.rank_state import CaseFacts, RankFacts, child_views, view_of

# --- The main threads of all ranks as one tree: where the calls of a job begin together, and where ranks part ---------


_DEEPEST = 60  # branches within branches: a runaway recursion, caught by each rank at another depth


@dataclass(frozen=True)
class StackBranch:
    """``frames``, outermost first, that all of ``ranks`` share, and how they go on: ``branches``, the largest first.

    ``missing``: who had come as far as where this branch begins and is not in it; empty where they are the majority.
    Ranges, as ``"0-2,5"``; ``count`` is how many ``ranks`` are. A branch without frames: the innermost frame of these
    ranks is the one before.
    """

    frames: tuple[Frame, ...]
    ranks: str
    missing: str
    count: int
    branches: tuple[StackBranch, ...] = ()


def stack_tree(stacks: Mapping[int, Sequence[Frame]], everybody: Iterable[int]) -> tuple[StackBranch, ...]:
    """The branches of the job's tree. ``stacks``: rank → frames, innermost first; ``everybody``: all ranks of it."""
    groups: dict[tuple[Frame, ...], int] = {}
    for rank, frames in stacks.items():
        key = tuple(frames)
        groups[key] = groups.get(key, 0) | 1 << rank
    whole = sum(1 << rank for rank in set(everybody) | set(stacks))
    return _branches([(frames[::-1], ranks) for frames, ranks in groups.items() if frames], 0, whole, 0)


def _branches(
    stacks: Sequence[tuple[tuple[Frame, ...], int]], depth: int, whole: int, nesting: int
) -> tuple[StackBranch, ...]:
    """``depth``: how many frames the stacks have in common; ``whole``: the ranks that have come so far."""
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
    """The tree as text. Of a long run of frames the middle is left out, of a large tree the end."""
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
    """``ranks 0-2,5 | missing 3-4``."""
    missing = f" | missing {branch.missing}" if branch.missing else ""
    return f"{rank_words(branch.ranks)}{'' if branch.frames else ': here'}{missing}"


def ranges(ranks: int) -> str:
    """Of ranks as bits."""
    found = []
    while ranks:
        lowest = ranks & -ranks
        found.append(lowest.bit_length() - 1)
        ranks ^= lowest
    return format_ranks(found)


# --- The environment contract of a job: which device each local rank has, and how large the batch of a rank is --------


MOST = 8
NO_SUCH_DEVICE = "invalid device ordinal"


def world(size: int, mesh: Sequence[tuple[str, int]] = ()) -> str:
    """``8 ranks = dp 2 x tp 4``. ``mesh``: dimensions and sizes."""
    shape = " x ".join(f"{name} {length}" for name, length in mesh)
    count = "1 rank" if size == 1 else f"{size} ranks"
    return f"{count}{f' = {shape}' if shape else ''}" if size else ""


def devices(evidence: Evidence) -> str:
    """``local rank 0: GPU 0, 1: GPU 1``, by ``CUDA_VISIBLE_DEVICES``; and who asked for a device that is not there."""
    chosen: dict[int, dict[str, None]] = {}
    for rank in evidence.ranks:
        if rank.gpu and rank.local_rank >= 0:
            chosen.setdefault(rank.local_rank, {})[_name(rank.gpu)] = None
    pairs = [f"{local}: {' or '.join(names)}" for local, names in sorted(chosen.items())]
    more = f" and {len(pairs) - MOST} more" if len(pairs) > MOST else ""
    parts = [f"local rank {', '.join(pairs[:MOST])}{more}"] if pairs else []
    for rank in [rank for rank in evidence.ranks if rank.device not in (None, rank.local_rank)][:MOST]:
        parts.append(f"rank {rank.rank} computed on cuda:{rank.device}")
    raised = {rank.rank: rank.exception.message for rank in evidence.ranks if rank.exception is not None}
    wrong = [rank for rank in evidence.ranks if NO_SUCH_DEVICE in raised.get(rank.rank, "")]
    if wrong:
        who = rank_words(rank.rank for rank in wrong)
        parts.append(f"{who} requested a device that does not exist{_why(wrong)}")
    return "; ".join(parts)


def _name(gpu: str) -> str:
    return f"GPU {gpu}" if gpu.isdecimal() else gpu[:12]


def _why(wrong: list[RankEvidence]) -> str:
    """Where the number of the rank is not that of the local rank, the script has most likely taken the wrong one."""
    mixed_up = all(rank.local_rank not in (-1, rank.rank) for rank in wrong)
    return ": a device is numbered by LOCAL_RANK, not by RANK" if mixed_up else ""


def batches(evidence: Evidence) -> str:
    """``32 a rank (loader), 512 over 16 data-parallel ranks``, as far as the ranks' DataLoaders tell."""
    fed = {rank.batch for rank in evidence.ranks}
    batch = fed.pop() if len(fed) == 1 else None
    if batch is not None:
        return f"{batch} a rank{_step(batch, evidence.world_size)}"
    told = [rank.gil.batches for rank in evidence.ranks if rank.gil.batches]
    if not told:
        return ""
    if any(one != told[0] for one in told):
        return f"not the same on all ranks: {_sizes(told[0])} or {_sizes(next(o for o in told if o != told[0]))}"
    sizes = set(told[0].values())
    return f"{_sizes(told[0])} a rank{_step(sizes.pop(), evidence.world_size) if len(sizes) == 1 else ''}"


def _step(batch: int, world: int) -> str:
    return f", {batch * world} a step if all {world} ranks are data-parallel"


def _sizes(loaders: Mapping[str, int]) -> str:
    return ", ".join(f"{size} ({name})" for name, size in list(loaders.items())[:MOST])


ReadLine = Callable[[str, int], "str | None"]  # (file, line number from 1) → that line of the source, if readable

MAX_FRAMES = 40
MOST_ROWS = 60  # before ranks that are alike but for their step share a row
_OF_ONE_RANK = re.compile(r"\b(pid|worker|process|thread) \d+|\b\d+(?:\.\d+)?(?= s\b)")


@dataclass(frozen=True)
class RankRow:
    """``state``: the kernel's letter and call. ``doing``: what it waits in, or does, in words."""

    rank: int
    host: str
    pid: int
    step: int | None
    state: str
    doing: str
    frame: Frame | None


@dataclass(frozen=True)
class Alike:
    """Ranks that do the same at the same line. ``first``: the row of the first of them; the texts hold for all."""

    ranks: tuple[int, ...]
    culprit: bool
    first: RankRow
    step: str
    state: str
    doing: str
    hosts: str


@dataclass(frozen=True)
class StackGroup:
    """One stack (innermost first) and all who have it. ``who``: ``ranks 0-2,5``, ``dataloader workers of rank 1``."""

    who: str
    frames: tuple[Frame, ...]
    user_frame: Frame | None
    count: int


def merged_stacks(facts: CaseFacts) -> tuple[StackBranch, ...]:
    """The main threads of all ranks as a tree; empty where only one rank's was seen."""
    found = {rank: main_frames(one.evidence) for rank, one in facts.ranks.items()}
    mains = {rank: frames for rank, frames in found.items() if frames}
    return stack_tree(mains, {*facts.ranks, *facts.unseen}) if len(mains) > 1 else ()


def main_frames(rank: RankEvidence) -> tuple[Frame, ...]:
    """Where the main thread of a rank is, innermost first; where it raised, if it has: what it does since is ours."""
    if rank.exception is not None and rank.exception.frames:
        return rank.exception.frames
    view = view_of(rank)
    return without_ours(view.frames) if view is not None else ()


def without_ours(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames without those of the beacon, which waits at the end of a rank for the supervisor."""
    return (
        tuple(frame for frame in frames if not is_ours(frame.file)) if any(is_ours(f.file) for f in frames) else frames
    )


def row_of(one: RankFacts) -> RankRow:
    doing = "ended by the launcher"
    if one.wait is not None:
        doing = f"{'waits' if one.evidence.exit is None else 'waited'} in {one.wait.words}"
    elif one.condition is not None:
        doing = one.condition.reason
    frame = one.frame or (one.condition.frame if one.condition else None)
    return RankRow(one.rank, one.evidence.host, one.evidence.pid, one.step, _state(one), doing, frame)


def alike(rows: Sequence[RankRow], culprits: Collection[int]) -> list[Alike]:
    """The rows folded: by what the ranks do, and where. Their steps tell them apart while that makes few rows."""
    folded: list[list[RankRow]] = []
    for by_step in (True, False):
        found: dict[tuple[object, ...], list[RankRow]] = {}
        for row in rows:
            key = (row.rank in culprits, _masked(row.doing), row.frame, row.step if by_step else None)
            found.setdefault(key, []).append(row)
        folded = list(found.values())
        if len(folded) <= MOST_ROWS:
            break
    return [_alike(members, members[0].rank in culprits) for members in folded]


def _alike(rows: list[RankRow], culprit: bool) -> Alike:
    first = rows[0]
    steps = [row.step for row in rows if row.step is not None]
    doing = first.doing if all(row.doing == first.doing for row in rows) else _masked(first.doing)
    hosts = hosts_word(list(dict.fromkeys(row.host for row in rows if row.host)))
    return Alike(tuple(row.rank for row in rows), culprit, first, range_of(steps), _states(rows), doing, hosts)


def _masked(doing: str) -> str:
    """What a rank does, without the numbers that only it has."""
    return _OF_ONE_RANK.sub(lambda found: f"{found[1]} …" if found[1] else "…", doing)


def _states(rows: Sequence[RankRow]) -> str:
    """``S futex``; ``S futex (7), R (1)`` where they were caught in several."""
    counts = Counter(row.state for row in rows).most_common()
    if len(counts) == 1:
        return counts[0][0]
    more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
    return ", ".join(f"{state} ({count})" for state, count in counts[:3]) + more


def range_of(steps: Collection[int]) -> str:
    if not steps:
        return ""
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"


def _state(one: RankFacts) -> str:
    if one.evidence.exit is not None:
        return f"exit {one.evidence.exit.returncode}"
    view = view_of(one.evidence)
    if view is None or not view.process.states:
        return "not seen" if one.evidence.pid else ""  # a Flight Recorder dump knows of no process
    return f"{view.process.states[-1].state} {view.wait.call or view.wait.kind}"


def stack_groups(facts: CaseFacts) -> tuple[list[StackGroup], set[int]]:
    """Groups of equal stacks, the largest first, ranks before their children; and the ranks without any."""
    groups: dict[tuple[bool, str, tuple[Frame, ...]], list[tuple[int, View]]] = {}
    for rank, one in facts.ranks.items():
        view = view_of(one.evidence)
        for is_main, each in ((True, view), *((False, child) for child in child_views(one.evidence))):
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
    """Innermost first; the user's own innermost frame is marked."""
    lines = [f"{'→' if f == group.user_frame else ' '} {frame_text(f)}" for f in group.frames[:MAX_FRAMES]]
    left = len(group.frames) - MAX_FRAMES
    return [*lines, f"  ... {left} more"] if left > 0 else lines


def culprit_lines(culprit: Culprit, evidence: Evidence, read_line: ReadLine | None) -> list[str]:
    """The stack of the process at fault, its user frame marked and shown with its source line."""
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
        # Where it went wrong earlier is no part of the stack that it has now.
        lines = [f"→ {frame_text(culprit.frame)}", *(["", "now in:", *lines] if lines else [])]
    return lines


def frames_at_fault(culprit: Culprit, rank: RankEvidence | None) -> tuple[Frame, ...]:
    """The frames of the exception that ended it; else the thread with the culprit's frame in it, else the main thread;
    for the dead, what they recorded last.
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
    """Where a rank that is gone was at its end."""
    if rank.exception is not None:
        return rank.exception.frames
    if rank.fatal is not None:
        return rank.fatal.frames
    return rank.exit_call.frames if rank.exit_call is not None else ()
