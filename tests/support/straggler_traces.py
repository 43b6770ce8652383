"""Traces of ByteDance's straggler study, as the watch for slow ranks would see the jobs: arrivals at calls, and waits.

The traces belong to "Understanding Stragglers in Large Model Training Using What-if Analysis",
https://github.com/ByteDance-Seed/StragglerAnalysis, Apache License 2.0, Copyright (c) 2025 Bytedance Ltd. and/or its
affiliates. Changed: ``tests/data/straggler_traces`` has the arrivals of a few steps, in milliseconds, without sizes.

An operation's start is the arrival. The traces have some of each job's steps; they are joined as if there were no
others. One call is inferred: after the last backward pass, the ranks of the last stage begin the next operation
together, once the last of them has finished (4 to 152 ms later; in the first pipeline, which then waits for more, up to
3 s). It is probably the average of the loss, as in Megatron-LM.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "straggler_traces"
KEPT_STEPS = {"AR": slice(0, 8), "ST": slice(0, 32), "SE": slice(0, 22)}  # in ``tests/data``
RING = 2000  # entries of a Flight Recorder
AVERAGE = "loss-all-reduce"
RECORDED_IN = {
    "params-all-gather": "data-parallel {stage}",
    "grads-reduce-scatter": "data-parallel {stage}",
    AVERAGE: "data-parallel {stage}",
    "embedding-grads-all-reduce": "embedding {dp}",
    "optimizer-clip-main-grad": "world",
    "forward-send": "pipeline {dp} {stage}->{after}",
    "forward-recv": "pipeline {dp} {before}->{stage}",
    "backward-send": "pipeline {dp} {stage}->{before}",
    "backward-recv": "pipeline {dp} {after}->{stage}",
}
COMPUTES = ("forward-compute", "backward-compute", "optimizer")
AFTER_BACKWARD = "layernorm-grads-all-reduce"


@dataclass(frozen=True)
class TracedStep:
    length_ms: int
    arrivals: Mapping[int, Mapping[str, Sequence[int]]]
    """rank → group → times since the step's begin in milliseconds"""
    computes: Mapping[int, float]
    """rank → share of the step"""


@dataclass(frozen=True)
class StragglerTrace:
    name: str
    stages: Mapping[int, int]
    steps: Sequence[TracedStep]

    def arrivals(self, first: int, last: int, *, ring: int = RING) -> dict[int, dict[tuple[str, int], int]]:
        """Returns what the ranks' Flight Recorders contain after these steps, without gaps between the steps."""
        begins = list(accumulate((step.length_ms for step in self.steps[first:last]), initial=0))
        return {
            rank: _recorded(
                [(begin, step.arrivals[rank]) for begin, step in zip(begins, self.steps[first:last], strict=False)],
                ring,
            )
            for rank in self.stages
        }

    def waits(self, first: int, last: int) -> dict[int, float]:
        """Returns the share of the time in which each rank doesn't compute."""
        length = sum(step.length_ms for step in self.steps[first:last])
        return {
            rank: 1 - sum(step.computes[rank] * step.length_ms for step in self.steps[first:last]) / length
            for rank in self.stages
        }

    def windows(self, seconds: float, steps: int = 1) -> Iterator[tuple[int, int]]:
        """Yields the shortest ranges of steps that have this length and this many steps, one after another."""
        first, length = 0, 0
        for at, step in enumerate(self.steps):
            length += step.length_ms
            if length >= 1000 * seconds and at + 1 - first >= steps:
                yield first, at + 1
                first, length = at + 1, 0

    def save(self, path: Path, steps: slice) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = asdict(StragglerTrace(self.name, self.stages, self.steps[steps]))
        for step in kept["steps"]:
            step["computes"] = {rank: round(share, 3) for rank, share in step["computes"].items()}
            for calls in step["arrivals"].values():
                calls.update({group: _differences(times) for group, times in calls.items()})
        path.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0))


def _recorded(steps: Sequence[tuple[int, Mapping[str, Sequence[int]]]], ring: int) -> dict[tuple[str, int], int]:
    numbers: dict[str, int] = {}
    entries: list[tuple[int, str, int]] = []
    for begin, calls in steps:
        for group, times in calls.items():
            for at in times:
                numbers[group] = numbers.get(group, 0) + 1
                entries.append((begin + at, group, numbers[group]))
    return {(group, number): at * 1_000_000 for at, group, number in sorted(entries)[-ring:]}


def _differences(times: Sequence[int]) -> list[int]:
    return [at - before for before, at in zip([0, *times], times, strict=False)]


def saved(name: str) -> StragglerTrace:
    document = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    steps = [
        TracedStep(
            step["length_ms"],
            {
                int(rank): {group: list(accumulate(times)) for group, times in calls.items()}
                for rank, calls in step["arrivals"].items()
            },
            {int(rank): share for rank, share in step["computes"].items()},
        )
        for step in document["steps"]
    ]
    return StragglerTrace(name, {int(rank): stage for rank, stage in document["stages"].items()}, steps)


def original(directory: Path, name: str) -> StragglerTrace:
    """Reads ``trace-NAME.parquet``. Needs pyarrow."""
    import pyarrow.parquet as parquet  # type: ignore[import-not-found,unused-ignore]

    rows = parquet.read_table(directory / f"trace-{name}.parquet").to_pylist()
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    stages = {row["rank"]: row["stage"] for row in rows}
    return StragglerTrace(name, stages, [_step(steps[number]) for number in sorted(steps)])


def _step(rows: Sequence[Mapping[str, Any]]) -> TracedStep:
    length = max(row["start_ts"] + row["duration"] for row in rows)
    arrivals: dict[int, dict[str, list[int]]] = {row["rank"]: {} for row in rows}
    computes = dict.fromkeys(arrivals, 0.0)
    for row in sorted([*rows, *_averages(rows)], key=lambda row: row["start_ts"]):
        if row["optype"] in COMPUTES:
            computes[row["rank"]] += row["duration"] / length
        if (group := _group(row)) is not None:
            arrivals[row["rank"]].setdefault(group, []).append(round(1000 * row["start_ts"]))
    return TracedStep(round(1000 * length), arrivals, computes)


def _group(row: Mapping[str, Any]) -> str | None:
    stage = row["stage"]
    name = RECORDED_IN.get(row["optype"])
    return name and name.format(dp=row["dp_rank"], stage=stage, before=stage - 1, after=stage + 1)


def _averages(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    last = max(row["stage"] for row in rows)
    after = {row["rank"]: row for row in rows if row["optype"] == AFTER_BACKWARD and row["stage"] == last}
    for rank, next_row in after.items():
        before = [row for row in rows if row["rank"] == rank and row["start_ts"] < next_row["start_ts"]]
        end = max(row["start_ts"] + row["duration"] for row in before)
        yield {**next_row, "optype": AVERAGE, "start_ts": min(end, next_row["start_ts"])}
