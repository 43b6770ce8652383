"""Finds the causes of a slow run in samples of all ranks.

The rank that the others wait for arrives last, so it spends the least time in collectives, while the others spend much.
A difference counts only if it exceeds the scatter of the samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.shares import (
    KINDS,
    CodeLocation,
    GilHolder,
    RankTime,
    StackIndex,
    TimeKind,
    WorkerTime,
    frame_of,
    line_share,
    mean,
    place_share,
    share_of,
    times_of,
    workers_of,
)
from safelaunch.model import Frame, rank_words
from safelaunch.stacks.frames import at, place
from safelaunch.verdict.phrases import capital

Slow = Literal["late-rank", "data-loading", "gil", "communication", "checkpoint", "script"]

LATE, APART = 0.10, 0.05  # shares of time: the others' extra waiting; the gap between the two groups
SIGMAS = 4.0
LOADING, HELD, WAITING, SAVING, OWN_CODE = 0.15, 0.25, 0.30, 0.15, 0.25
SCARCE = 0.6  # share of time for which the GIL is held; below it, threads hardly wait for it
OTHER_THREAD = "Move that thread's work to a separate process, or to code that releases the GIL."
NAMED = 0.4  # share of a difference that a function must explain to be named
MOST_OF_IT = 0.5  # share of a function's difference in one line, for the line's shares to be given
MOSTLY = 0.9  # share of a function's time in one of its lines


@dataclass(frozen=True, slots=True)
class TimeFinding:
    """A cause of slowness: its share of the time of ``ranks`` (0 to 1), a sentence about it, and advice, if any."""

    kind: Slow
    share: float
    ranks: tuple[int, ...]
    text: str
    frame: Frame | None = None
    advice: str = ""


@dataclass(frozen=True)
class Slowness:
    headline: str
    findings: tuple[TimeFinding, ...]
    times: tuple[RankTime, ...]
    workers: WorkerTime | None
    missing: tuple[str, ...]


def verdict_of(recording: Recording) -> Slowness:
    stacks = StackIndex(recording)
    times = times_of(recording, stacks)
    workers = workers_of(recording, stacks)
    missing = tuple(_missing(recording))
    findings = tuple(_findings(times, workers, missing)) if times else ()
    headline = findings[0].text if findings else _nothing(times)
    return Slowness(headline, findings, tuple(times), workers, missing)


def _findings(times: Sequence[RankTime], workers: WorkerTime | None, missing: Sequence[str]) -> list[TimeFinding]:
    late = _late(times)
    findings = [
        late,
        _loading(times, workers),
        _gil(times, late),
        _waiting(times, late, missing),
        _saving(times),
        _script_line(times, late),
    ]
    return sorted(filter(None, findings), key=lambda finding: -_job_share(finding, times))


def _job_share(finding: TimeFinding, times: Sequence[RankTime]) -> float:
    # All other ranks wait for a late rank, so its delay is theirs.
    return finding.share if finding.kind == "late-rank" else finding.share * len(finding.ranks) / len(times)


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _ranks(times: Sequence[RankTime]) -> str:
    return rank_words(time.rank for time in times)


def _verb(times: Sequence[RankTime], singular: str, plural: str) -> str:
    return singular if len(times) == 1 else plural


# --- late ranks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LateRanks:
    """The ranks that the others wait for, and what they do in that time. Shares are of recorded time (0 to 1)."""

    ranks: tuple[int, ...]
    difference: float
    """how much more the others wait"""
    location: CodeLocation | None
    """place in which the late ranks spend most of the difference; None if no place explains it"""
    frame: Frame | None
    share: float
    """share of the late ranks' time at that line, or in its function if the difference is spread over its lines"""
    share_of_others: float


def late_ranks(times: Sequence[RankTime]) -> LateRanks | None:
    groups = split(times)
    return _late_ranks(*groups) if groups is not None else None


def _late_ranks(late: Sequence[RankTime], rest: Sequence[RankTime]) -> LateRanks:
    difference = mean([time.waits for time in rest]) - mean([time.waits for time in late])
    excess = {
        place: place_share(late, place) - place_share(rest, place)
        for time in late
        for place in time.places
        if not place.waits
    }
    most = max(excess, key=lambda location: excess[location], default=None)
    ranks = tuple(time.rank for time in late)
    if most is None or excess[most] < NAMED * difference:
        return LateRanks(ranks, difference, None, None, 0.0, 0.0)
    frame, shares = frame_of(late, most, rest), (place_share(late, most), place_share(rest, most))
    line = (line_share(late, most, frame), line_share(rest, most, frame))
    if line[0] - line[1] >= MOST_OF_IT * excess[most]:
        shares = line
    return LateRanks(ranks, difference, most, frame, *shares)


def _late(times: Sequence[RankTime]) -> TimeFinding | None:
    groups = split(times)
    if groups is None:
        return None
    late, rest = groups
    found = _late_ranks(late, rest)
    where = _longest_wait(rest)
    rest_waits = (
        f"{_ranks(rest)} {_verb(rest, 'waits', 'wait')} {percent(mean([time.waits for time in rest]))} of the time"
    )
    waiting = f"{capital(rest_waits)}{_in_call(where, rest)} for {_ranks(late)}"
    late_waits = f"which {_verb(late, 'waits', 'wait')} {percent(mean([time.waits for time in late]))}"
    reason, frame, advice = _reason(late, rest, found)
    text = f"{waiting}, {late_waits}{reason}."
    return TimeFinding("late-rank", found.difference, found.ranks, text, frame, advice)


def split(times: Sequence[RankTime]) -> tuple[list[RankTime], list[RankTime]] | None:
    """Splits the ranks into the few that arrive last and those that wait for them; None if all wait about equally."""
    order = sorted(times, key=lambda time: (time.waits, time.rank))
    most = len(order) // 2 if len(order) == 2 else (len(order) - 1) // 2
    cuts = [(order[at].waits - order[at - 1].waits, at) for at in range(1, most + 1)]
    if not cuts:
        return None
    gap, cut = max(cuts)
    late, rest = order[:cut], order[cut:]
    difference = mean([time.waits for time in rest]) - mean([time.waits for time in late])
    scatter = sqrt(_variance(late) + _variance(rest))
    return (late, rest) if gap >= APART and difference >= max(LATE, SIGMAS * scatter) else None


def _variance(times: Sequence[RankTime]) -> float:
    # Treats samples as independent, and no share as certain.
    shares = [min(max(time.waits, 0.02), 0.98) for time in times]
    return sum(w * (1 - w) / time.samples for w, time in zip(shares, times, strict=True)) / len(times) ** 2


def _in_call(where: CodeLocation | None, times: Sequence[RankTime]) -> str:
    if where is None:
        return ""
    call = where.what or ("backward" if where.kind == "backward" else "a collective")
    return f", mostly in {call}{at(frame_of(times, where))},"


def _longest_wait(times: Sequence[RankTime]) -> CodeLocation | None:
    shares: dict[CodeLocation, float] = defaultdict(float)
    for time in times:
        for each, share in time.places.items():
            if each.waits:
                shares[each] += share
    return (
        max(shares, key=lambda location: shares[location]) if shares and any(time.waits > 0 for time in times) else None
    )


def _reason(late: Sequence[RankTime], rest: Sequence[RankTime], found: LateRanks) -> tuple[str, Frame | None, str]:
    """Returns what the late ranks do while the others wait: a description, a frame, and advice."""
    holder = _holder(late)
    if holder is not None and (_holder(rest) is None):
        return f": {_holds(holder)}", holder.frame, OTHER_THREAD
    if found.location is not None:
        where = _in(found.location, found.frame)
        spends = f": {_verb(late, 'it spends', 'they spend')} {percent(found.share)} {where}"
        return f"{spends}; the others spend {percent(found.share_of_others)}", found.frame, ""
    kinds = {kind: share_of(late, kind) - share_of(rest, kind) for kind in KINDS}
    kind = max(kinds, key=lambda kind: kinds[kind])
    return f": {_verb(late, 'it spends', 'they spend')} more in {KIND_WORDS[kind]}, spread over many lines", None, ""


KIND_WORDS: dict[TimeKind, str] = {
    "collective": "collectives",
    "send or receive": "sends and receives",
    "data loading": "data loading",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "checkpoint": "checkpoints",
    "device": "waiting for its device",
    "script": "the script's own code",
}


def _in(location: CodeLocation, frame: Frame | None) -> str:
    if location.kind == "data loading":
        return f"waiting for data{at(frame)}" if location.what == "DataLoader" else f"loading data{at(frame)}"
    if location.kind == "script":
        return f"in {place(frame)}" if frame is not None else "in the script's own code"
    return f"in {KIND_WORDS[location.kind]}{at(frame)}"


# --- all ranks --------------------------------------------------------------------------------------------------------


def _loading(times: Sequence[RankTime], workers: WorkerTime | None) -> TimeFinding | None:
    share = share_of(times, "data loading")
    if share < LOADING:
        return None
    most = max(
        (place for time in times for place in time.places if place.kind == "data loading"),
        key=lambda location: place_share(times, location),
    )
    loading = [time for time in times if time.kinds.get("data loading", 0.0) >= LOADING / 2]
    share, frame = share_of(loading, "data loading"), frame_of(times, most)
    spend = _verb(loading, "spends", "spend")
    text = f"{capital(_ranks(loading))} {spend} {percent(share)} of the time {_in(most, frame)}"
    advice = "Load with worker processes (num_workers), or make the dataset cheaper."
    if workers is not None:
        busy = 1 - workers.idle
        text += f", whose workers are busy {percent(busy)}{f', mostly{at(workers.frame)}' if workers.frame else ''}"
        advice = (
            "Make that line cheaper, or give the loader more workers (num_workers)."
            if busy > 0.5
            else "The workers are mostly idle: look at collate_fn, at the size of what they send, and at pin_memory."
        )
    return TimeFinding("data-loading", share, tuple(time.rank for time in loading), f"{text}.", frame, advice)


def _holder(times: Sequence[RankTime]) -> GilHolder | None:
    # The thread that keeps the main threads of all these ranks from the GIL.
    holders = [time.holders[0] for time in times if time.holders and is_scarce(time)]
    return max(holders, key=lambda holder: holder.share) if times and len(holders) == len(times) else None


def is_scarce(time: RankTime) -> bool:
    other_threads = sum(holder.share for holder in time.holders)
    return other_threads >= HELD and other_threads + time.gil >= SCARCE


def _holds(holder: GilHolder) -> str:
    thread = repr(holder.thread or "without a name")
    return f"its thread {thread} holds the GIL {percent(holder.share)} of the time{at(holder.frame)}"


def _gil(times: Sequence[RankTime], late: TimeFinding | None) -> TimeFinding | None:
    short = [time for time in times if is_scarce(time)]
    if late is not None and late.advice == OTHER_THREAD:
        short = [time for time in short if time.rank not in late.ranks]
    if not short:
        return None
    holder = max((time.holders[0] for time in short), key=lambda holder: holder.share)
    main = mean([time.gil for time in short])
    text = (
        f"On {_ranks(short)}, the thread {holder.thread!r} holds the GIL {percent(holder.share)} of the "
        f"time{at(holder.frame)}; the main thread has it {percent(main)}."
    )
    return TimeFinding("gil", holder.share, tuple(time.rank for time in short), text, holder.frame, OTHER_THREAD)


def _waiting(times: Sequence[RankTime], late: TimeFinding | None, missing: Sequence[str]) -> TimeFinding | None:
    share = mean([sum(part for at, part in time.places.items() if at.waits and at.kind != "device") for time in times])
    if share < WAITING or late is not None:
        return None
    where = _longest_wait(times)
    text = f"{capital(_ranks(times))} {_verb(times, 'waits', 'all wait')} {percent(share)} of the time"
    text += _in_call(where, times).removesuffix(",")
    if missing:
        text += f", while other ranks weren't sampled ({missing[0]})"
    elif len(times) > 1:
        text += ", about equally"
    if where is not None and where.kind == "backward":
        text += ": for gradients, or for the device"
    advice = "The communication itself takes the time, or another rank is late each time."
    if where is not None and where.kind == "send or receive":
        advice = "The transfers take the time, or the stages of a pipeline wait for each other: try more micro-batches."
    advice = "They might be waiting for the ranks that weren't sampled." if missing else advice
    frame = frame_of(times, where) if where is not None else None
    return TimeFinding("communication", share, tuple(time.rank for time in times), f"{text}.", frame, advice)


def _saving(times: Sequence[RankTime]) -> TimeFinding | None:
    ranks = [time for time in times if time.kinds.get("checkpoint", 0.0) >= SAVING]
    if not ranks:
        return None
    most = max(
        (p for rank in ranks for p in rank.places if p.kind == "checkpoint"), key=lambda p: place_share(ranks, p)
    )
    share, frame = share_of(ranks, "checkpoint"), frame_of(ranks, most)
    text = f"Checkpoints take {percent(share)} of the time of {_ranks(ranks)}{at(frame)}."
    return TimeFinding(
        "checkpoint", share, tuple(rank.rank for rank in ranks), text, frame, "Save less often, or with async_save."
    )


def _script_line(times: Sequence[RankTime], late: TimeFinding | None) -> TimeFinding | None:
    """Reports a function of the script, outside the model, in which all ranks spend much time, if there is one."""
    least = {
        location: min(time.places.get(location, 0.0) for time in times)
        for location in {place for time in times for place in time.places if place.kind == "script" and place.file}
    }
    most = max(least, key=lambda location: least[location], default=None)
    if most is None or least[most] < OWN_CODE or late is not None:
        return None
    share, frame = place_share(times, most), frame_of(times, most)
    line_share = mean([time.lines.get(most, {}).get(frame.line, 0.0) for time in times]) if frame is not None else 0.0
    where = f"{'' if line_share >= MOSTLY * share else 'lines around '}{place(frame)}"
    text = f"{percent(share)} of the time goes to {where}, outside of forward, backward and optimizer."
    return TimeFinding("script", share, tuple(time.rank for time in times), text, frame)


def _nothing(times: Sequence[RankTime]) -> str:
    if not times:
        return "No rank could be sampled."
    shares = {kind: share_of(times, kind) for kind in KINDS}
    most = sorted((kind for kind in KINDS if shares[kind] >= 0.01), key=lambda kind: -shares[kind])[:4]
    parts = [f"{KIND_WORDS[kind].removeprefix('the ')} {percent(shares[kind])}" for kind in most]
    return f"Nothing stands out: {', '.join(parts)} of the time{', equally on all ranks' if len(times) > 1 else ''}."


def _missing(recording: Recording) -> list[str]:
    why: dict[str, list[int]] = {}
    for rank in recording.ranks:
        problem = rank.missing or (rank.main.problem if rank.main is not None else "")
        if problem:
            why.setdefault(problem, []).append(rank.rank)
    return [f"{rank_words(ranks)}: {problem}" for problem, ranks in why.items()]
