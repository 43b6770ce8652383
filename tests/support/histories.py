"""Step histories of healthy jobs: the seconds before each step.

They are generated, each kind with a different rhythm, or recorded from real jobs
(``scripts/research/record_history.py``).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from safelaunch.supervise.watch.rhythm import StepRhythm, ThresholdBounds, learn, threshold
from tests.support.paths import DATA

TICK_S = 0.25


@dataclass(frozen=True)
class History:
    """The time before each step (``gaps``), and the name of the generator (``kind``)."""

    kind: str
    seed: int
    gaps: tuple[float, ...]

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(accumulate(self.gaps))


def _noise(dice: random.Random, sigma: float = 0.15) -> float:
    return dice.lognormvariate(0.0, sigma)


def steady(dice: random.Random, length: int) -> Iterator[float]:
    mean = 10 ** dice.uniform(-1.5, 1.3)
    for _ in range(length):
        yield mean * _noise(dice)


def compiled(dice: random.Random, length: int) -> Iterator[float]:
    mean = 10 ** dice.uniform(-1, 0.7)
    yield from (dice.uniform(60, 240), dice.uniform(5, 60))
    for _ in range(length):
        yield mean * _noise(dice)


def accumulated(dice: random.Random, length: int) -> Iterator[float]:
    """Yields steps of two lengths, in any pattern."""
    short, ratio, every = 10 ** dice.uniform(-1, 0.7), dice.uniform(3, 12), dice.randint(2, 16)
    for number in range(length):
        yield short * (ratio if number % every == 0 else 1) * _noise(dice)


def bimodal(dice: random.Random, length: int) -> Iterator[float]:
    short, ratio, part = 10 ** dice.uniform(-1, 0.5), dice.uniform(3, 15), dice.uniform(0.05, 0.5)
    for _ in range(length):
        yield short * (ratio if dice.random() < part else 1) * _noise(dice)


def evaluated(dice: random.Random, length: int) -> Iterator[float]:
    """An evaluation every so many steps, and a checkpoint every so many others."""
    mean = 10 ** dice.uniform(-1.3, 0.3)
    every, lasts = dice.randint(40, 300), dice.uniform(5, 50)
    saves, saving = every * dice.randint(2, 4), dice.uniform(2, 30)
    for number in range(length):
        more = lasts * _noise(dice) if number and number % every == 0 else 0.0
        more += saving * _noise(dice) if number and number % saves == 0 else 0.0
        yield mean * _noise(dice) + more


def long_evaluations(dice: random.Random, length: int) -> Iterator[float]:
    """Longer than any floor: only a rhythm can expect them. The first ones compute, and are looked at and let be."""
    mean, every, lasts = 10 ** dice.uniform(-1.3, 0), dice.randint(60, 250), dice.uniform(80, 400)
    for number in range(length):
        yield mean * _noise(dice) + (lasts * _noise(dice, 0.08) if number and number % every == 0 else 0.0)


def by_the_clock(dice: random.Random, length: int) -> Iterator[float]:
    """A checkpoint every ten minutes, say, whatever the steps."""
    mean, every, lasts, clock = 10 ** dice.uniform(-0.5, 0.7), dice.uniform(120, 600), dice.uniform(10, 50), 0.0
    for _ in range(length):
        gap = mean * _noise(dice)
        clock += gap
        if clock >= every:
            clock = 0.0
            gap += lasts * _noise(dice, 0.1)
        yield gap


def curriculum(dice: random.Random, length: int) -> Iterator[float]:
    """Sequences grow, in a few jumps or smoothly."""
    mean, stages = 10 ** dice.uniform(-1, 0.3), dice.randint(2, 6)
    smooth = dice.random() < 0.5
    for number in range(length):
        part = number / length
        yield mean * (1 + 7 * part if smooth else 1.8 ** int(part * stages)) * _noise(dice)


def hiccups(dice: random.Random, length: int) -> Iterator[float]:
    """A slow disk or network now and then, at no rhythm."""
    mean, part, lasts = 10 ** dice.uniform(-1, 0.3), dice.uniform(0.002, 0.02), dice.uniform(3, 35)
    for _ in range(length):
        yield mean * _noise(dice) + (lasts * _noise(dice, 0.3) if dice.random() < part else 0.0)


def one_accident(dice: random.Random, length: int) -> Iterator[float]:
    """One pause, long and never again: the threshold must not follow it."""
    mean, when = 10 ** dice.uniform(-1, 0), dice.randint(50, length - 50)
    for number in range(length):
        yield mean * _noise(dice) + (dice.uniform(200, 500) if number == when else 0.0)


KINDS: tuple[Callable[[random.Random, int], Iterator[float]], ...] = (
    steady, compiled, accumulated, bimodal, evaluated, long_evaluations, by_the_clock, curriculum, hiccups,
    one_accident,
)  # fmt: skip


def histories(each: int, length: int = 700) -> Iterator[History]:
    for make in KINDS:
        for seed in range(each):
            yield History(make.__name__, seed, tuple(make(random.Random(f"{make.__name__} {seed}"), length)))


def recorded() -> Iterator[History]:
    for number, path in enumerate(sorted((DATA / "histories").glob("*.json"))):
        yield History(f"recorded {path.stem}", number, tuple(json.loads(path.read_text())["gaps"]))


BOUNDS = ThresholdBounds(floor_s=5.0)


@dataclass
class Replay:
    """A watch with this rhythm on one history. ``suspected`` has (step, pause) pairs over the threshold."""

    history: History
    known: StepRhythm
    suspected: list[tuple[int, float]]


def replay(history: History, until: int | None = None) -> Replay:
    """Sees what the supervisor sees: the newest mark at each tick, and each long pause as it grows."""
    known, suspected = StepRhythm(), []
    tick_s, times = 0.0, history.times[:until]
    for step, mark_s in enumerate(times, 1):
        upcoming_s = times[step] if step < len(times) else mark_s
        if upcoming_s // TICK_S == mark_s // TICK_S and step < len(times):
            continue  # the next step comes before the next look
        tick_s = (mark_s // TICK_S + 1) * TICK_S
        known = learn(known, step, mark_s, tick_s)
        last_look_s = upcoming_s // TICK_S * TICK_S
        if last_look_s > tick_s:
            known = learn(known, step, mark_s, last_look_s)
            if last_look_s - mark_s > threshold(known, BOUNDS).seconds:
                suspected.append((step, upcoming_s - mark_s))
    return Replay(history, known, suspected)
