"""Two recordings of one job: what takes longer now, by line.

Where both marked steps, in seconds of a step, so that one place that grew does not make all others look smaller.
Of the ranks that arrive last, if some do: a step takes as long as theirs, and the others only wait more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from safelaunch.model import Frame, format_ranks
from safelaunch.model.recording import Recording
from safelaunch.report.profiling.shares import Place, RankTime, frame_of, mean, place_share, times_of
from safelaunch.report.profiling.verdict import split
from safelaunch.verdict.reading.frames import basename

LEAST = 0.05  # of the earlier time of a step
SIGMAS = 3.0


@dataclass(frozen=True, slots=True)
class Change:
    """``before``, ``now``: seconds of a step, or shares of the time if a recording has no steps."""

    place: Place
    frame: Frame | None
    before: float
    now: float

    @property
    def more(self) -> float:
        return self.now - self.before


@dataclass(frozen=True)
class Comparison:
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
        grown = [one for one in self.changes if one.more > 0]
        if not grown:
            return f"{words}; no line takes noticeably longer{self.on}."
        return f"{words}; what grew most{self.on}: {where(grown[0])}, {self.amount(grown[0].more)} more."

    @property
    def on(self) -> str:
        """The ranks in words, if not all."""
        return f" on {'rank' if len(self.ranks) == 1 else 'ranks'} {format_ranks(self.ranks)}" if self.ranks else ""


LOADING = {"DataLoader": "waiting for data", "dataset": "loading data"}


def where(change: Change) -> str:
    one = change.place
    line = f" at {basename(change.frame.file)}:{change.frame.line}" if change.frame is not None else ""
    what = LOADING.get(one.what) or one.what or one.kind
    return f"{'waiting in ' if one.waits else ''}{what}{line}{f' ({one.function})' if one.function else ''}"


def compare(earlier: Recording, now: Recording) -> Comparison:
    times, before = times_of(now), times_of(earlier)
    step_s, was_s = _step_s(now, times), _step_s(earlier, before)
    if not (step_s and was_s):
        step_s = was_s = 0.0
    groups = split(times)
    ranks = tuple(one.rank for one in groups[0]) if groups is not None else ()
    if ranks:
        times, before = _of(times, ranks), _of(before, ranks) or before
    theirs = {_key(place): place for one in before for place in one.places}
    ours = {_key(place): place for one in times for place in one.places}
    changes = []
    for key in {**ours, **theirs}:
        mine, other = ours.get(key), theirs.get(key)
        share = place_share(times, mine) if mine is not None else 0.0
        was = place_share(before, other) if other is not None else 0.0
        scale, was_scale = (step_s, was_s) if was_s else (1.0, 1.0)
        noise = sqrt((_error(share, times) * scale) ** 2 + (_error(was, before) * was_scale) ** 2)
        more = share * scale - was * was_scale
        if abs(more) >= max(LEAST * was_scale, SIGMAS * noise):
            place = mine or other
            assert place is not None
            frame = frame_of(times if mine is not None else before, place)
            changes.append(Change(place, frame, was * was_scale, share * scale))
    changes.sort(key=lambda one: -one.more)
    return Comparison(was_s, step_s, tuple(changes), ranks)


def _of(times: Sequence[RankTime], ranks: tuple[int, ...]) -> list[RankTime]:
    return [one for one in times if one.rank in ranks]


def _key(place: Place) -> tuple[str, str, str, str, bool]:
    """The same place in another checkout."""
    return place.kind, place.what, basename(place.file) if place.file else "", place.function, place.waits


def _step_s(recording: Recording, times: Sequence[RankTime]) -> float:
    steps = mean([one.steps for one in times if one.steps])
    return (recording.elapsed_s or recording.duration_s) / steps if steps else 0.0


def _error(share: float, times: Sequence[RankTime]) -> float:
    samples = sum(one.samples for one in times)
    return sqrt(max(share, 0.01) * (1 - min(share, 0.99)) / samples) if samples else 1.0
