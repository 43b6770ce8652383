"""What slows a run down, by the samples of all ranks; or that nothing stands out.

A rank that others wait for is the one that itself waits least in collectives while they wait long: the last to arrive.
A difference counts if it is larger than the samples' own scatter.
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
    mean,
    place_share,
    share_of,
    times_of,
    workers_of,
)
from safelaunch.model import Frame, rank_words
from safelaunch.stacks.frames import at, basename, place
from safelaunch.verdict.phrases import capital

Slow = Literal["late-rank", "data-loading", "gil", "communication", "checkpoint", "script"]

LATE, APART = 0.10, 0.05  # of the time: others wait so much longer; between the groups
SIGMAS = 4.0
LOADING, HELD, WAITING, SAVING, OWN_CODE = 0.15, 0.25, 0.30, 0.15, 0.25
SCARCE = 0.6  # of the time the GIL is held: less than that, and nobody waits long for it
OTHER_THREAD = "Move that thread's work to a separate process, or to code that releases the GIL."
NAMED = 0.4  # of a difference that one function explains
MOSTLY = 0.9  # of a function's time, in one of its lines


@dataclass(frozen=True, slots=True)
class TimeFinding:
    """``share``: of the time of ``ranks``, 0 to 1. ``text``: a sentence. ``advice``: what to do; may be empty."""

    kind: Slow
    share: float
    ranks: tuple[int, ...]
    text: str
    frame: Frame | None = None
    advice: str = ""


@dataclass(frozen=True)
class Slowness:
    """``headline``: the verdict in one sentence. ``findings``: the largest first; empty: nothing stands out."""

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
    found = [
        late,
        _loading(times, workers),
        _gil(times, late),
        _waiting(times, late, missing),
        _saving(times),
        _own_code(times, late),
    ]
    return sorted(filter(None, found), key=lambda one: -_of_the_job(one, times))


def _of_the_job(finding: TimeFinding, times: Sequence[RankTime]) -> float:
    """Its share of the job's time. All others wait for a late rank, so its delay is theirs."""
    return finding.share if finding.kind == "late-rank" else finding.share * len(finding.ranks) / len(times)


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _ranks(times: Sequence[RankTime]) -> str:
    return rank_words(time.rank for time in times)


def _do(times: Sequence[RankTime], one: str, many: str) -> str:
    return one if len(times) == 1 else many


# --- who arrives last -------------------------------------------------------------------------------------------------


def _late(times: Sequence[RankTime]) -> TimeFinding | None:
    groups = split(times)
    if groups is None:
        return None
    late, rest = groups
    difference = mean([one.waits for one in rest]) - mean([one.waits for one in late])
    where = _waits_most_in(rest)
    held = f"{_ranks(rest)} {_do(rest, 'waits', 'wait')} {percent(mean([one.waits for one in rest]))} of the time"
    waiting = f"{capital(held)}{_waited_in(where, rest)} for {_ranks(late)}"
    own = f"which {_do(late, 'waits', 'wait')} {percent(mean([one.waits for one in late]))}"
    reason, frame, advice = _reason(late, rest, difference)
    return TimeFinding(
        "late-rank", difference, tuple(one.rank for one in late), f"{waiting}, {own}{reason}.", frame, advice
    )


def split(times: Sequence[RankTime]) -> tuple[list[RankTime], list[RankTime]] | None:
    """The few that arrive last, and those that wait for them; None where all wait alike."""
    order = sorted(times, key=lambda one: (one.waits, one.rank))
    most = len(order) // 2 if len(order) == 2 else (len(order) - 1) // 2
    cuts = [(order[at].waits - order[at - 1].waits, at) for at in range(1, most + 1)]
    if not cuts:
        return None
    gap, cut = max(cuts)
    late, rest = order[:cut], order[cut:]
    difference = mean([one.waits for one in rest]) - mean([one.waits for one in late])
    scatter = sqrt(_variance(late) + _variance(rest))
    return (late, rest) if gap >= APART and difference >= max(LATE, SIGMAS * scatter) else None


def _variance(times: Sequence[RankTime]) -> float:
    """Of the mean share of waits, if each sample were drawn on its own; never as if a share were certain."""
    shares = [min(max(time.waits, 0.02), 0.98) for time in times]
    return sum(w * (1 - w) / one.samples for w, one in zip(shares, times, strict=True)) / len(times) ** 2


def _waited_in(where: CodeLocation | None, times: Sequence[RankTime]) -> str:
    if where is None:
        return ""
    call = where.what or ("backward" if where.kind == "backward" else "a collective")
    return f", mostly in {call}{at(frame_of(times, where))},"


def _waits_most_in(times: Sequence[RankTime]) -> CodeLocation | None:
    shares: dict[CodeLocation, float] = defaultdict(float)
    for time in times:
        for each, share in time.places.items():
            if each.waits:
                shares[each] += share
    return max(shares, key=lambda one: shares[one]) if shares and any(time.waits > 0 for time in times) else None


def _reason(late: Sequence[RankTime], rest: Sequence[RankTime], difference: float) -> tuple[str, Frame | None, str]:
    """What those that arrive last do in the time that others wait: words, a line, advice."""
    holder = _holder(late)
    if holder is not None and (_holder(rest) is None):
        return f": {_holds(holder)}", holder.frame, OTHER_THREAD
    excess = {
        place: place_share(late, place) - place_share(rest, place)
        for time in late
        for place in time.places
        if not place.waits
    }
    most = max(excess, key=lambda one: excess[one], default=None)
    if most is not None and excess[most] >= NAMED * difference:
        theirs, frame = place_share(rest, most), frame_of(late, most)
        spends = f": {_do(late, 'it spends', 'they spend')} {percent(place_share(late, most))} {_in(most, frame)}"
        others = f", where the others spend {percent(theirs)}"
        return spends + others, frame, ""
    kinds = {kind: share_of(late, kind) - share_of(rest, kind) for kind in KINDS}
    kind = max(kinds, key=lambda one: kinds[one])
    return f": {_do(late, 'it spends', 'they spend')} more in {KIND_WORDS[kind]}, spread over many lines", None, ""


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


def _in(one: CodeLocation, frame: Frame | None) -> str:
    if one.kind == "data loading":
        return f"waiting for data{at(frame)}" if one.what == "DataLoader" else f"loading data{at(frame)}"
    if one.kind == "script":
        return f"in {place(frame)}" if frame is not None else "in the script's own code"
    return f"in {KIND_WORDS[one.kind]}{at(frame)}"


# --- what all ranks do ------------------------------------------------------------------------------------------------


def _loading(times: Sequence[RankTime], workers: WorkerTime | None) -> TimeFinding | None:
    share = share_of(times, "data loading")
    if share < LOADING:
        return None
    most = max(
        (place for time in times for place in time.places if place.kind == "data loading"),
        key=lambda one: place_share(times, one),
    )
    here = [time for time in times if time.kinds.get("data loading", 0.0) >= LOADING / 2]
    share, frame = share_of(here, "data loading"), frame_of(times, most)
    text = f"{capital(_ranks(here))} {_do(here, 'spends', 'spend')} {percent(share)} of the time {_in(most, frame)}"
    advice = "Load with worker processes (num_workers), or make the dataset cheaper."
    if workers is not None:
        busy = 1 - workers.idle
        text += f", whose workers are busy {percent(busy)}{f', mostly{at(workers.frame)}' if workers.frame else ''}"
        advice = (
            "Make that line cheaper, or give the loader more workers (num_workers)."
            if busy > 0.5
            else "The workers are mostly idle: look at collate_fn, at the size of what they send, and at pin_memory."
        )
    return TimeFinding("data-loading", share, tuple(one.rank for one in here), f"{text}.", frame, advice)


def _holder(times: Sequence[RankTime]) -> GilHolder | None:
    """The thread that keeps the main threads of all these ranks from the GIL."""
    held = [time.holders[0] for time in times if time.holders and is_scarce(time)]
    return max(held, key=lambda one: one.share) if times and len(held) == len(times) else None


def is_scarce(time: RankTime) -> bool:
    others = sum(holder.share for holder in time.holders)
    return others >= HELD and others + time.gil >= SCARCE


def _holds(one: GilHolder) -> str:
    return (
        f"its thread {one.thread or 'without a name'!r} holds the GIL {percent(one.share)} of the time{at(one.frame)}"
    )


def _gil(times: Sequence[RankTime], late: TimeFinding | None) -> TimeFinding | None:
    short = [time for time in times if is_scarce(time)]
    if late is not None and late.advice == OTHER_THREAD:  # said there
        short = [one for one in short if one.rank not in late.ranks]
    if not short:
        return None
    holder = max((one.holders[0] for one in short), key=lambda one: one.share)
    main = mean([one.gil for one in short])
    text = (
        f"On {_ranks(short)}, the thread {holder.thread!r} holds the GIL {percent(holder.share)} of the "
        f"time{at(holder.frame)}; the main thread has it {percent(main)}."
    )
    return TimeFinding("gil", holder.share, tuple(one.rank for one in short), text, holder.frame, OTHER_THREAD)


def _waiting(times: Sequence[RankTime], late: TimeFinding | None, missing: Sequence[str]) -> TimeFinding | None:
    share = mean([time.waits for time in times])
    if share < WAITING or late is not None:
        return None
    where = _waits_most_in(times)
    text = f"{capital(_ranks(times))} {_do(times, 'waits', 'all wait')} {percent(share)} of the time"
    text += _waited_in(where, times).removesuffix(",")
    if missing:
        text += f", while other ranks were not seen ({missing[0]})"
    elif len(times) > 1:
        text += ", and none less than the others"
    if where is not None and where.kind == "backward":
        text += ": for gradients, or for the device"
    advice = "The communication itself takes the time, or another rank is late each time."
    if where is not None and where.kind == "send or receive":
        advice = "The transfers take the time, or the stages of a pipeline wait for each other: try more micro-batches."
    advice = "They may wait for those that were not seen." if missing else advice
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


def _own_code(times: Sequence[RankTime], late: TimeFinding | None) -> TimeFinding | None:
    """One function of the script, outside of the model, on all ranks."""
    least = {
        one: min(time.places.get(one, 0.0) for time in times)
        for one in {place for time in times for place in time.places if place.kind == "script" and place.file}
    }
    most = max(least, key=lambda one: least[one], default=None)
    if most is None or least[most] < OWN_CODE or late is not None:
        return None
    share, frame = place_share(times, most), frame_of(times, most)
    there = mean([time.lines.get(most, {}).get(frame.line, 0.0) for time in times]) if frame is not None else 0.0
    where = f"{'' if there >= MOSTLY * share else 'lines around '}{place(frame)}"
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


# --- Two recordings of one job: what takes longer now, by line --------------------------------------------------------


LEAST = 0.05  # of the earlier time of a step
GROWTH_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Change:
    """``before``, ``now``: seconds of a step, or shares of the time if a recording has no steps."""

    place: CodeLocation
    frame: Frame | None
    before: float
    now: float

    @property
    def more(self) -> float:
        return self.now - self.before


@dataclass(frozen=True)
class StepTimeChange:
    """``before_s``, ``now_s``: a step's seconds; 0.0 if not known, then changes are of shares. The largest first.

    ``ranks``: those that arrive last, of which the changes are; empty: of all.
    """

    before_s: float
    now_s: float
    changes: tuple[Change, ...]
    ranks: tuple[int, ...] = ()

    @property
    def by_step(self) -> bool:
        return self.before_s > 0.0

    def amount(self, value: float) -> str:
        return f"{1000 * value:.1f} ms" if self.by_step else f"{100 * value:.0f}%"

    @property
    def text(self) -> str:
        """The comparison in one sentence."""
        if self.by_step:
            words = f"A step takes {self.amount(self.now_s)} (was {self.amount(self.before_s)})"
        else:
            words = "The recordings have no steps to compare by"
        grown = [change for change in self.changes if change.more > 0]
        if not grown:
            return f"{words}; no line takes noticeably longer{self.on}."
        return f"{words}; what grew most{self.on}: {where(grown[0])}, {self.amount(grown[0].more)} more."

    @property
    def on(self) -> str:
        """The ranks in words, if not all."""
        return f" on {rank_words(self.ranks)}" if self.ranks else ""


_LOADING_WORDS = {"DataLoader": "waiting for data", "dataset": "loading data"}


def where(change: Change) -> str:
    one = change.place
    line = f" at {basename(change.frame.file)}:{change.frame.line}" if change.frame is not None else ""
    what = _LOADING_WORDS.get(one.what) or one.what or one.kind
    return f"{'waiting in ' if one.waits else ''}{what}{line}{f' ({one.function})' if one.function else ''}"


def compare(earlier: Recording, now: Recording) -> StepTimeChange:
    times, before = times_of(now), times_of(earlier)
    step_s, was_s = _step_s(now, times), _step_s(earlier, before)
    if not (step_s and was_s):
        step_s = was_s = 0.0
    groups = split(times)
    ranks = tuple(one.rank for one in groups[0]) if groups is not None else ()
    if ranks:
        times, before = _of(times, ranks), _of(before, ranks) or before
    theirs = {_key(place): place for one in before for place in one.places}
    ours = {_key(place): place for time in times for place in time.places}
    changes = []
    for key in {**ours, **theirs}:
        mine, other = ours.get(key), theirs.get(key)
        share = place_share(times, mine) if mine is not None else 0.0
        was = place_share(before, other) if other is not None else 0.0
        scale, was_scale = (step_s, was_s) if was_s else (1.0, 1.0)
        noise = sqrt((_error(share, times) * scale) ** 2 + (_error(was, before) * was_scale) ** 2)
        more = share * scale - was * was_scale
        if abs(more) >= max(LEAST * was_scale, GROWTH_SIGMAS * noise):
            place = mine or other
            assert place is not None
            frame = frame_of(times if mine is not None else before, place)
            changes.append(Change(place, frame, was * was_scale, share * scale))
    changes.sort(key=lambda one: -one.more)
    return StepTimeChange(was_s, step_s, tuple(changes), ranks)


def _of(times: Sequence[RankTime], ranks: tuple[int, ...]) -> list[RankTime]:
    return [time for time in times if time.rank in ranks]


def _key(place: CodeLocation) -> tuple[str, str, str, str, bool]:
    """The same place in another checkout."""
    return place.kind, place.what, basename(place.file) if place.file else "", place.function, place.waits


def _step_s(recording: Recording, times: Sequence[RankTime]) -> float:
    steps = mean([time.steps for time in times if time.steps])
    return (recording.elapsed_s or recording.duration_s) / steps if steps else 0.0


def _error(share: float, times: Sequence[RankTime]) -> float:
    samples = sum(time.samples for time in times)
    return sqrt(max(share, 0.01) * (1 - min(share, 0.99)) / samples) if samples else 1.0
