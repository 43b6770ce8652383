"""A recording for people: the screen, ``report.md`` and the page. The file for speedscope."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

from safelaunch import __version__
from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.shares import (
    KINDS,
    CodeLocation,
    RankTime,
    StackIndex,
    frame_of,
    mean,
    place_share,
    share_of,
)
from safelaunch.addons.record.slowness import Slowness, StepTimeChange, TimeFinding, percent
from safelaunch.addons.record.slowness import where as change_words
from safelaunch.model import Frame, format_ranks
from safelaunch.report.stack_tree import ranges
from safelaunch.report.tables import Frames, ItemNumbers, Paths
from safelaunch.stacks.frames import place
from safelaunch.system.console import cut, wrapped
from safelaunch.system.printable import clean

MOST_LINES, MOST_ROWS, MOST_BRANCHES = 8, 60, 3000
LEAST_SHARE = 0.001  # of the time, for a box


@dataclass(frozen=True)
class RecordingReport:
    """A recording with what it tells. ``compared``: with an earlier one, which is called ``earlier``."""

    recording: Recording
    slowness: Slowness
    compared: StepTimeChange | None = None
    earlier: str = ""


# --- rows -------------------------------------------------------------------------------------------------------------


def places(times: Sequence[RankTime], *, waits: bool) -> list[tuple[CodeLocation, float, Frame | None, str]]:
    """The lines by their mean share, the largest first, each with the ranks that were seen there."""
    every = {place for time in times for place in time.places if place.waits == waits}
    found = [row for one in every for row in (_by_function if waits else _by_line)(times, one)]
    return sorted((row for row in found if row[1] >= 0.005), key=lambda row: (-row[1], row[0].function))


def _by_function(times: Sequence[RankTime], one: CodeLocation) -> list[tuple[CodeLocation, float, Frame | None, str]]:
    ranks = format_ranks([time.rank for time in times if time.places.get(one, 0.0) > 0])
    return [(one, place_share(times, one), frame_of(times, one), ranks)]


def _by_line(times: Sequence[RankTime], one: CodeLocation) -> list[tuple[CodeLocation, float, Frame | None, str]]:
    """What is not waiting, of the lines of a function: of a backward's samples at a line, some may be waits."""
    seen = [time.lines.get(one, {}) for time in times]
    lines = {line: mean([here.get(line, 0.0) for here in seen]) for line in {line for here in seen for line in here}}
    if not one.file or not any(lines.values()):
        return _by_function(times, one)
    part = place_share(times, one) / sum(lines.values())
    ranks = {
        line: format_ranks([t.rank for t, here in zip(times, seen, strict=True) if line in here]) for line in lines
    }
    return [(one, share * part, Frame(one.file, line, one.function), ranks[line]) for line, share in lines.items()]


def alike(times: Sequence[RankTime]) -> list[list[RankTime]]:
    """The ranks in rows: all on their own while they are few, then those whose shares round to the same."""
    if len(times) <= MOST_ROWS:
        return [[time] for time in times]
    rows: dict[tuple[int, ...], list[RankTime]] = {}
    for one in times:
        key = tuple(round(one.kinds.get(kind, 0.0) / 0.1) for kind in KINDS)
        rows.setdefault((*key, round(one.waits / 0.1)), []).append(one)
    return list(rows.values())


def what_of(one: CodeLocation) -> str:
    """What a line is about, in words."""
    if one.kind == "backward" and one.waits:
        return "waiting in backward"
    return one.what if one.waits and one.what else one.kind


# --- the screen -------------------------------------------------------------------------------------------------------


def screen(recorded: RecordingReport, width: int) -> str:
    """The verdict first, then the ranks, the lines, and what was not seen; no line is longer than ``width``."""
    found, lines = recorded.slowness, list[str]()
    lines += wrapped(clean(found.headline), width)
    if found.findings and found.findings[0].advice:
        lines += wrapped(clean(found.findings[0].advice), width, "  ", "  ")
    for finding in found.findings[1:]:
        lines += wrapped(clean(f"also: {finding.text}"), width, "  ", "  ")
    if recorded.compared is not None:
        lines += wrapped(clean(f"against {recorded.earlier}: {recorded.compared.text}"), width)
        changed = [change for change in recorded.compared.changes if change.more][:MOST_LINES]
        lines += [cut(f"  {_signed(recorded.compared, one.more):>10}  {change_words(one)}", width) for one in changed]
    if found.times:
        lines += ["", *_table(found, width)]
        for title, waits in (("waits by line", True), ("everything else by line", False)):
            rows = places(found.times, waits=waits)[:MOST_LINES]
            lines += [f"{title}:"] if rows else []
            lines += [cut(f"  {percent(share):>5}  {_at(one, frame)}", width) for one, share, frame, _ in rows]
    for text in (*found.missing, *recorded.recording.notes):
        lines += wrapped(clean(f"not seen: {text}" if text in found.missing else text), width, "  ", "  ")
    return "\n".join(clean(line).rstrip() for line in lines)


def _at(one: CodeLocation, frame: Frame | None) -> str:
    return f"{what_of(one)}{f' at {place(frame)}' if frame is not None else ''}"


def _signed(compared: StepTimeChange, value: float) -> str:
    return f"{'+' if value > 0 else '-'}{compared.amount(abs(value))}"


def _table(found: Slowness, width: int) -> list[str]:
    times, members = found.times, alike(found.times)
    kinds = [kind for kind in KINDS if any(time.kinds.get(kind, 0.0) >= 0.005 for time in times)]
    while True:
        rows = [["rank", "waits", *kinds]]
        for these in members:
            shares = [mean([one.waits for one in these]), *(share_of(these, kind) for kind in kinds)]
            rows.append([format_ranks([one.rank for one in these]), *map(percent, shares)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if not kinds or sum(widths) + 2 * len(widths) <= width:
            break
        kinds.remove(min(kinds, key=lambda kind: share_of(times, kind)))  # the narrowest share of time goes first
    return ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows[: MOST_ROWS + 1]]


def markdown(recorded: RecordingReport) -> str:
    """``report.md``: the screen, as it is."""
    title = f"# Where the time goes: {_safe(recorded.recording.name)}"
    body = screen(recorded, 120).replace("```", "'''")
    return f"{title}\n\n```\n{body}\n```\n"


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-. " else f"\\{c}" for c in clean(name))


# --- the page ---------------------------------------------------------------------------------------------------------


def script() -> str:
    """Returns the program that draws the page of a recording."""
    return resources.files("safelaunch.addons.record").joinpath("record.js").read_text(encoding="utf-8")


def content(recorded: RecordingReport) -> dict[str, Any]:
    """The page's data, for ``page.render`` with :func:`script`."""
    recording, found = recorded.recording, recorded.slowness
    frames = Frames(Paths(projects=_projects(recording)))
    late = next((set(finding.ranks) for finding in found.findings if finding.kind == "late-rank"), set[int]())
    slow = found.findings[0] if found.findings else None
    return {
        "schema": 1,
        "head": {
            "words": "where the time goes",
            "cause": slow.kind if slow is not None else "nothing stands out",
            "summary": found.headline,
            "advice": slow.advice if slow is not None else "",
            "findings": [[finding.text, finding.advice] for finding in found.findings[1:]],
            "notes": list(recording.notes),
            "facts": _facts(recorded),
            "command": " ".join(recording.command)[:4000],
            "compared": recorded.compared.text if recorded.compared is not None else "",
            "bundle": "record",
        },
        "kinds": list(KINDS),
        "times": [_row(members, late) for members in alike(found.times)],
        "rows": [{"r": format_ranks(late), "c": 1}] if late else [],
        "waits": _lines(found.times, frames, waits=True),
        "work": _lines(found.times, frames, waits=False),
        "compared": _changes(recorded.compared, frames),
        "tree": tree(recording, frames),
        "missing": list(found.missing),
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
        "a share may be off by": f"{percent(times[0].margin)} of the time, for one rank" if times else "",
        "hosts" if len(hosts) > 1 else "host": ", ".join(hosts[:8]) + (" …" if len(hosts) > 8 else ""),
        "compared": recorded.compared.text if recorded.compared is not None else "",
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
        {"f": frames.number(frame), "what": what_of(one), "share": share, "ranks": ranks}
        for one, share, frame, ranks in places(times, waits=waits)[:40]
    ]


def _changes(compared: StepTimeChange | None, frames: Frames) -> list[dict[str, Any]]:
    return [
        {
            "f": frames.number(one.frame),
            "what": what_of(one.place),
            "before": compared.amount(one.before),
            "now": compared.amount(one.now),
            "more": _signed(compared, one.more),
        }
        for one in (compared.changes if compared is not None else ())
        if compared is not None
    ]


@dataclass
class _TreeNode:
    frame: int
    share: float
    ranks: int  # as bits
    below: dict[int, _TreeNode]


def tree(recording: Recording, frames: Frames) -> list[dict[str, Any]]:
    """The main threads of all ranks as one tree, as the page draws it: runs of frames that the same ranks share."""
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
    made: list[dict[str, Any]] = []
    _branches(root, made, [MOST_BRANCHES], len(mains))
    return made


def _branches(node: _TreeNode, into: list[dict[str, Any]], left: list[int], many: int) -> None:
    """``left``: how many more branches there may be; the widest come first."""
    for below in sorted(node.below.values(), key=lambda one: -one.share):
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


class RankDocument(msgspec.Struct, frozen=True):
    """Shares of a rank's time, 0 to 1. ``waits``: for its peers; ``gil``: holding the interpreter's lock."""

    rank: int
    waits: float
    gil: float
    steps: int | None
    shares: dict[str, float]


class RecordDocument(msgspec.Struct, frozen=True):
    """The --json document: the verdict, what it rests on, and the folder with all samples."""

    run: str
    name: str
    folder: str
    summary: str
    findings: list[TimeFinding]
    ranks: list[RankDocument]
    missing: list[str]
    compared: str


def document(recorded: RecordingReport, run: str, folder: str) -> RecordDocument:
    """The --json document of a recording of ``run``, whose files are in ``folder``."""
    found, compared = recorded.slowness, recorded.compared
    ranks = [
        RankDocument(
            time.rank,
            round(time.waits, 4),
            round(time.gil, 4),
            time.steps,
            {kind: round(share, 4) for kind, share in time.kinds.items()},
        )
        for time in found.times
    ]
    text = compared.text if compared is not None else ""
    name = recorded.recording.name
    return RecordDocument(run, name, folder, found.headline, list(found.findings), ranks, list(found.missing), text)


# --- A recording's stacks for speedscope, in the format of its own schema ---------------------------------------------


SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(recording: Recording) -> dict[str, Any]:
    """The main threads of all ranks, and all their threads and children; weights are seconds."""
    frames: list[dict[str, Any]] = [
        {"name": frame.function or frame.file or "?", "file": frame.file, "line": frame.line}
        for frame in recording.frames
    ]
    titles = ItemNumbers[str]()
    mains: dict[tuple[int, ...], float] = {}
    everything: dict[tuple[int, ...], float] = {}
    for rank in recording.ranks:
        for process in (rank.main, *rank.children):
            for thread in process.threads if process is not None else ():
                who = thread.name if process is rank.main else f"{process.role} {process.pid}" if process else ""
                for number, seconds in thread.stacks:
                    stack = recording.stacks[number]
                    key = (*(len(frames) + titles[text] for text in (f"rank {rank.rank}", who or "thread")), *stack)
                    everything[key] = everything.get(key, 0.0) + seconds
                    if process is rank.main and thread.main:
                        own = (key[0], *key[2:])
                        mains[own] = mains.get(own, 0.0) + seconds
    return {
        "$schema": SPEEDSCOPE_SCHEMA,
        "name": recording.name or "ranks",
        "exporter": f"safelaunch@{__version__}",
        "activeProfileIndex": 0,
        "shared": {"frames": [*frames, *({"name": text} for text in titles)]},
        "profiles": [
            profile("main threads", mains),
            profile("all threads and processes", everything),
        ],
    }


def profile(name: str, stacks: Mapping[tuple[int, ...], float]) -> dict[str, Any]:
    """One profile: stacks of numbered frames, outermost first, and their weights."""
    return {
        "type": "sampled",
        "name": name,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(stacks.values()),
        "samples": [list(stack) for stack in stacks],
        "weights": list(stacks.values()),
    }
