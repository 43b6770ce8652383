"""Writes ``summary.json`` for programs, and ``summary.csv`` for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, Metric, Track
from safelaunch.addons.sweep.paths import SweepPaths
from safelaunch.system.files import replace_file
from safelaunch.system.redaction.redact import redact_env

NOTHING_RUNS: Mapping[str, AttemptOutcome] = {}
FIXED = ("state", "exit_code", "duration_s", "attempts", "last_step", "gpus", "bundle", "cause")


class JobSummary(msgspec.Struct, frozen=True):
    """One job of a sweep. Unknown values are null.

    ``exit_code`` is the code that a shell would show, ``gpus`` contains UUIDs, and ``bundle`` is the path of the latest
    bundle. ``cause`` comes from its verdict, or from the scheduler (``time limit``, ``node failed``).
    """

    name: str
    params: dict[str, str]
    state: JobState
    exit_code: int | None
    duration_s: float | None
    attempts: int
    last_step: int | None
    gpus: tuple[str, ...]
    bundle: str | None
    metrics: dict[str, Metric]
    cause: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """The document ``summary.json``, which contains every job of a sweep, in the sweep's order."""

    jobs: tuple[JobSummary, ...]


def document(tracks: Iterable[Track]) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.to_builtins(Summary(tuple(_entry(track, track.outcome) for track in tracks)))
    return result


def _entry(track: Track, outcome: AttemptOutcome | None) -> JobSummary:
    shown = redact_env(dict(track.job.params))
    ended = outcome if outcome is not None else AttemptOutcome(track.state)
    return JobSummary(
        name=track.job.name,
        params={name: shown[name] for name, _ in track.job.params},
        state=outcome.state if track.state == "running" and outcome is not None else track.state,
        exit_code=ended.exit_code,
        duration_s=ended.duration_s if outcome is not None else None,
        attempts=track.attempts,
        last_step=ended.last_step,
        gpus=tuple(ended.gpus),
        bundle=ended.bundle or None,
        metrics=dict(ended.metrics),
        cause=ended.cause or None,
    )


def table(tracks: Sequence[Track], running: Mapping[str, AttemptOutcome] = NOTHING_RUNS) -> list[list[str]]:
    """Returns the rows of the CSV, header first. The columns are the name, parameters, the fixed columns, and metrics.

    If a parameter or metric has the name of another column, it gets the prefix ``param.`` or ``metric.``. ``running``
    contains the current state of jobs that are still running.
    """
    params = list(dict.fromkeys(name for track in tracks for name, _ in track.job.params))
    pairs = [(track, running.get(track.job.name, track.outcome)) for track in tracks]
    metrics = list(dict.fromkeys(name for _, outcome in pairs if outcome for name in outcome.metrics))
    taken = {"name", *FIXED}
    param_titles = [f"param.{name}" if name in taken else name for name in params]
    metric_titles = [f"metric.{name}" if name in taken | set(param_titles) else name for name in metrics]
    rows = [["name", *param_titles, *FIXED, *metric_titles]]
    for track, outcome in pairs:
        entry = msgspec.structs.asdict(_entry(track, outcome))
        entry["gpus"] = " ".join(entry["gpus"])
        cells = [entry["name"], *(entry["params"].get(name) for name in params), *(entry[name] for name in FIXED)]
        rows.append([_cell(cell) for cell in [*cells, *(entry["metrics"].get(name) for name in metrics)]])
    return rows


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)


def write_summary(tracks: Sequence[Track], paths: SweepPaths) -> None:
    replace_file(paths.summary_json, json.dumps(document(tracks), indent=2) + "\n")
    write_csv(tracks, paths)


def write_csv(tracks: Sequence[Track], paths: SweepPaths, running: Mapping[str, AttemptOutcome] = NOTHING_RUNS) -> None:
    """Writes ``summary.csv``, completely or not at all. Raises OSError.

    ``summary.json`` is written only when the sweep ends, so that programs can wait for it.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table(tracks, running))
    replace_file(paths.summary_csv, text.getvalue())
