"""Writes the summary of a sweep: ``summary.json`` for programs, ``summary.csv`` for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from safelaunch.colaunch.jobs import Metric, Outcome, State, Track
from safelaunch.colaunch.paths import SweepPaths
from safelaunch.redaction.redact import redact_env

FIXED = ("state", "exit_code", "duration_s", "attempts", "last_step", "gpus", "bundle")


class JobSummary(msgspec.Struct, frozen=True):
    """One job of a sweep. ``exit_code`` as a shell shows it; ``gpus`` are UUIDs; ``bundle`` is the newest one's path.

    What is not known, or not yet, is null.
    """

    name: str
    params: dict[str, str]
    state: State
    exit_code: int | None
    duration_s: float | None
    attempts: int
    last_step: int | None
    gpus: tuple[str, ...]
    bundle: str | None
    metrics: dict[str, Metric]


class Summary(msgspec.Struct, frozen=True):
    """The document of ``summary.json``: every job of a sweep, in the sweep's order."""

    jobs: tuple[JobSummary, ...]


def document(tracks: Iterable[Track]) -> dict[str, Any]:
    """``{"jobs": [...]}``; missing values are null or empty."""
    found: dict[str, Any] = msgspec.to_builtins(Summary(tuple(_entry(track) for track in tracks)))
    return found


def _entry(track: Track) -> JobSummary:
    shown = redact_env(dict(track.job.params))
    ended = track.outcome if track.outcome is not None else Outcome(track.state)
    return JobSummary(
        name=track.job.name,
        params={name: shown[name] for name, _ in track.job.params},
        state=track.state,
        exit_code=ended.exit_code,
        duration_s=ended.duration_s if track.outcome is not None else None,
        attempts=track.attempts,
        last_step=ended.last_step,
        gpus=tuple(ended.gpus),
        bundle=ended.bundle or None,
        metrics=dict(ended.metrics),
    )


def table(tracks: Sequence[Track]) -> list[list[str]]:
    """Rows for CSV, the header first: the name, a column per parameter, the fixed columns, a column per metric.

    A parameter or metric with the name of another column gets the prefix ``param.`` or ``metric.``.
    """
    params = list(dict.fromkeys(name for track in tracks for name, _ in track.job.params))
    metrics = list(dict.fromkeys(name for track in tracks if track.outcome for name in track.outcome.metrics))
    taken = {"name", *FIXED}
    param_titles = [f"param.{name}" if name in taken else name for name in params]
    metric_titles = [f"metric.{name}" if name in taken | set(param_titles) else name for name in metrics]
    rows = [["name", *param_titles, *FIXED, *metric_titles]]
    for track in tracks:
        entry = msgspec.structs.asdict(_entry(track))
        entry["gpus"] = " ".join(entry["gpus"])
        cells = [entry["name"], *(entry["params"].get(name) for name in params), *(entry[name] for name in FIXED)]
        rows.append([_cell(cell) for cell in [*cells, *(entry["metrics"].get(name) for name in metrics)]])
    return rows


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)


def write(tracks: Sequence[Track], paths: SweepPaths) -> None:
    """Writes both files, each whole or not at all. Raises OSError."""
    _replace(paths.summary_json, json.dumps(document(tracks), indent=2) + "\n")
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table(tracks))
    _replace(paths.summary_csv, text.getvalue())


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, "utf-8")
    beside.replace(path)
