"""Shows a recording as a web page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from safelaunch.addons.record.comparison import StepTimeChange
from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.rows import (
    RecordingReport,
    activity_name,
    places,
    rank_rows,
)
from safelaunch.addons.record.shares import (
    KINDS,
    RankTime,
    StackIndex,
    mean,
)
from safelaunch.addons.record.slowness import percent
from safelaunch.model import format_ranks
from safelaunch.report.stack_tree import ranges
from safelaunch.report.tables import Frames, Paths

MOST_BRANCHES = 3000
LEAST_SHARE = 0.001  # smallest share of time that gets a box


def script() -> str:
    return resources.files("safelaunch.addons.record").joinpath("record.js").read_text(encoding="utf-8")


def content(recorded: RecordingReport) -> dict[str, Any]:
    recording, slowness = recorded.recording, recorded.slowness
    frames = Frames(Paths(projects=_projects(recording)))
    late = next((set(finding.ranks) for finding in slowness.findings if finding.kind == "late-rank"), set[int]())
    slow = slowness.findings[0] if slowness.findings else None
    return {
        "schema": 1,
        "head": {
            "words": "where the time goes",
            "cause": slow.kind if slow is not None else "nothing stands out",
            "summary": slowness.headline,
            "advice": slow.advice if slow is not None else "",
            "findings": [[finding.text, finding.advice] for finding in slowness.findings[1:]],
            "notes": list(recording.notes),
            "facts": _facts(recorded),
            "command": " ".join(recording.command)[:4000],
            "compared": recorded.compared.text if recorded.compared is not None else "",
            "bundle": "record",
        },
        "kinds": list(KINDS),
        "times": [_row(members, late) for members in rank_rows(slowness.times)],
        "rows": [{"r": format_ranks(late), "c": 1}] if late else [],
        "waits": _lines(slowness.times, frames, waits=True),
        "work": _lines(slowness.times, frames, waits=False),
        "compared": _changes(recorded.compared, frames),
        "tree": tree(recording, frames),
        "missing": list(slowness.missing),
        "frames": frames.rows,
    }


def _facts(recorded: RecordingReport) -> list[list[str]]:
    recording, times = recorded.recording, recorded.slowness.times
    hosts = list(dict.fromkeys(rank.host for rank in recording.ranks if rank.host))
    steps = [time.steps for time in times if time.steps is not None]
    elapsed_s = recording.elapsed_s or recording.duration_s
    facts = {
        "run": recording.name,
        "when": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(recording.at_unix_s)),
        "sampled": f"{recording.duration_s:g} s, {recording.rate_hz:g} times a second",
        "ranks": f"{len(times)} of {recording.world_size}",
        "steps": f"{mean(steps) / elapsed_s:.2f} a second" if steps and elapsed_s else "",
        "margin of error": f"{percent(times[0].margin)} of the time, for one rank" if times else "",
        "hosts" if len(hosts) > 1 else "host": ", ".join(hosts[:8]) + (" …" if len(hosts) > 8 else ""),
        "compared": recorded.compared.text if recorded.compared is not None else "",
        **recorded.facts,
    }
    return [[label, value] for label, value in facts.items() if value]


def _projects(recording: Recording) -> tuple[str, ...]:
    outer = Counter(recording.frames[stack[0]].file.rpartition("/")[0] for stack in recording.stacks if stack)
    return tuple(path for path, _ in outer.most_common(3) if len(path) > 1)


def _row(members: list[RankTime], late: set[int]) -> dict[str, Any]:
    steps = [member.steps for member in members if member.steps is not None]
    return {
        "r": format_ranks([member.rank for member in members]),
        "n": len(members),
        "c": int(all(member.rank in late for member in members)),
        "waits": mean([member.waits for member in members]),
        "kinds": [mean([member.kinds.get(kind, 0.0) for member in members]) for kind in KINDS],
        "steps": str(max(steps)) if steps else "",
    }


def _lines(times: Sequence[RankTime], frames: Frames, *, waits: bool) -> list[dict[str, Any]]:
    return [
        {"f": frames.number(frame), "what": activity_name(location), "share": share, "ranks": ranks}
        for location, share, frame, ranks in places(times, waits=waits)[:40]
    ]


def _changes(compared: StepTimeChange | None, frames: Frames) -> list[dict[str, Any]]:
    return [
        {
            "f": frames.number(change.frame),
            "what": activity_name(change.place),
            "before": compared.amount(change.before),
            "now": compared.amount(change.now),
            "more": compared.signed(change.more),
        }
        for change in (compared.changes if compared is not None else ())
        if compared is not None
    ]


@dataclass
class _TreeNode:
    frame: int
    share: float
    ranks: int  # bit mask
    below: dict[int, _TreeNode]


def tree(recording: Recording, frames: Frames) -> list[dict[str, Any]]:
    """Returns the main threads of all ranks as one tree. Each node is a series of frames shared by the same ranks."""
    stacks, root = StackIndex(recording), _TreeNode(-1, 0.0, 0, {})
    mains = [
        (rank.rank, thread)
        for rank in recording.ranks
        for thread in (rank.main.threads if rank.main is not None else ())
        if thread.main and thread.stacks
    ]
    for rank, thread in mains:
        total_s = sum(seconds for _, seconds in thread.stacks)
        for number, seconds in thread.stacks if total_s else ():
            at, share = root, seconds / total_s / len(mains)
            for frame in reversed(stacks.frames(number)):
                key = frames.number(frame, recording.code_roots)
                at = at.below.setdefault(key, _TreeNode(key, 0.0, 0, {}))
                at.share += share
                at.ranks |= 1 << rank
    branches: list[dict[str, Any]] = []
    _branches(root, branches, [MOST_BRANCHES], len(mains))
    return branches


def _branches(node: _TreeNode, into: list[dict[str, Any]], left: list[int], many: int) -> None:
    """Adds at most ``left[0]`` branches to ``into``, widest first."""
    for below in sorted(node.below.values(), key=lambda child: -child.share):
        if left[0] <= 0 or below.share < LEAST_SHARE:
            return
        left[0] -= 1
        run, last = [below.frame], below
        while len(last.below) == 1 and (only := next(iter(last.below.values()))).ranks == last.ranks:
            if only.share < 0.999 * last.share:
                break
            run.append(only.frame)
            last = only
        ranks, many = ranges(below.ranks), below.ranks.bit_count()
        branch: dict[str, Any] = {"f": run, "r": ranks, "k": many, "n": round(below.share * 10_000)}
        branch |= {"t": f"{100 * below.share:.1f}% of the time", "m": "", "b": []}
        into.append(branch)
        _branches(last, branch["b"], left, many)
