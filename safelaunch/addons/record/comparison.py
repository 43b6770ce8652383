"""Compares two recordings of a job to show which lines take longer now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from safelaunch.addons.record.recording import Recording
from safelaunch.addons.record.shares import (
    CodeLocation,
    RankTime,
    frame_of,
    mean,
    place_share,
    times_of,
)
from safelaunch.addons.record.slowness import split
from safelaunch.model import Frame, rank_words
from safelaunch.stacks.frames import basename

LEAST = 0.05  # smallest change that counts, as a share of the earlier step
GROWTH_SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Change:
    """Time that a line took before and takes now, in seconds per step; in shares if a recording has no steps."""

    place: CodeLocation
    frame: Frame | None
    before: float
    now: float

    @property
    def more(self) -> float:
        return self.now - self.before


@dataclass(frozen=True)
class StepTimeChange:
    before_s: float  # seconds per step; 0.0 if unknown, so changes are shares
    now_s: float
    changes: tuple[Change, ...]
    ranks: tuple[int, ...] = ()  # compared ranks, which arrive last; empty: all ranks

    @property
    def by_step(self) -> bool:
        return self.before_s > 0.0

    def amount(self, value: float) -> str:
        return f"{1000 * value:.1f} ms" if self.by_step else f"{100 * value:.0f}%"

    def signed(self, value: float) -> str:
        return f"{'+' if value > 0 else '-'}{self.amount(abs(value))}"

    @property
    def text(self) -> str:
        if self.by_step:
            sentence = f"A step takes {self.amount(self.now_s)} (was {self.amount(self.before_s)})"
        else:
            sentence = "The recordings have no steps to compare by"
        grown = [change for change in self.changes if change.more > 0]
        if not grown:
            return f"{sentence}; no line takes noticeably longer{self.on}."
        return f"{sentence}; what grew most{self.on}: {describe(grown[0])}, {self.amount(grown[0].more)} more."

    @property
    def on(self) -> str:
        return f" on {rank_words(self.ranks)}" if self.ranks else ""


_LOADING_WORDS = {"DataLoader": "waiting for data", "dataset": "loading data"}


def describe(change: Change) -> str:
    location = change.place
    line = f" at {basename(change.frame.file)}:{change.frame.line}" if change.frame is not None else ""
    what = _LOADING_WORDS.get(location.what) or location.what or location.kind
    return (
        f"{'waiting in ' if location.waits else ''}{what}{line}{f' ({location.function})' if location.function else ''}"
    )


def compare(earlier: Recording, now: Recording) -> StepTimeChange:
    times, before = times_of(now), times_of(earlier)
    step_s, was_s = _step_s(now, times), _step_s(earlier, before)
    if not (step_s and was_s):
        step_s = was_s = 0.0
    groups = split(times)
    ranks = tuple(time.rank for time in groups[0]) if groups is not None else ()
    if ranks:
        times, before = _of(times, ranks), _of(before, ranks) or before
    earlier_places = {_key(place): place for time in before for place in time.places}
    ours = {_key(place): place for time in times for place in time.places}
    changes = []
    for key in {**ours, **earlier_places}:
        place_now, place_before = ours.get(key), earlier_places.get(key)
        share = place_share(times, place_now) if place_now is not None else 0.0
        was = place_share(before, place_before) if place_before is not None else 0.0
        scale, was_scale = (step_s, was_s) if was_s else (1.0, 1.0)
        noise = sqrt((_error(share, times) * scale) ** 2 + (_error(was, before) * was_scale) ** 2)
        more = share * scale - was * was_scale
        if abs(more) >= max(LEAST * was_scale, GROWTH_SIGMAS * noise):
            place = place_now or place_before
            assert place is not None
            frame = frame_of(times if place_now is not None else before, place)
            changes.append(Change(place, frame, was * was_scale, share * scale))
    changes.sort(key=lambda change: -change.more)
    return StepTimeChange(was_s, step_s, tuple(changes), ranks)


def _of(times: Sequence[RankTime], ranks: tuple[int, ...]) -> list[RankTime]:
    return [time for time in times if time.rank in ranks]


def _key(place: CodeLocation) -> tuple[str, str, str, str, bool]:
    # Equal for the same place in another checkout.
    return place.kind, place.what, basename(place.file) if place.file else "", place.function, place.waits


def _step_s(recording: Recording, times: Sequence[RankTime]) -> float:
    steps = mean([time.steps for time in times if time.steps])
    return (recording.elapsed_s or recording.duration_s) / steps if steps else 0.0


def _error(share: float, times: Sequence[RankTime]) -> float:
    samples = sum(time.samples for time in times)
    return sqrt(max(share, 0.01) * (1 - min(share, 0.99)) / samples) if samples else 1.0
