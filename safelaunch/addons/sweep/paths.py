"""Defines the paths of a sweep's files, and reads the bundles of its jobs."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safelaunch.system.files import modified_ns

DEFAULT_PARENT = "safelaunch-sweeps"


@dataclass(frozen=True, slots=True)
class SweepPaths:
    root: Path

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def summary_json(self) -> Path:
        return self.root / "summary.json"

    @property
    def summary_csv(self) -> Path:
        return self.root / "summary.csv"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    def batch_script(self, name: str) -> Path:
        return self.batches / f"{name}.sbatch"

    def batch_output(self, name: str) -> Path:
        return self.batches / f"{name}.out"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def job(self, name: str) -> Path:
        """A job's own directory, which is ``{job_dir}`` in its command and to which the job can write, too."""
        return self.jobs / name

    def log(self, name: str, attempt: int) -> Path:
        return self.job(name) / f"attempt-{attempt}.log"

    def exit_file(self, name: str, attempt: int) -> Path:
        return self.job(name) / f"attempt-{attempt}.exit"

    def bundles(self, name: str) -> Path:
        return self.job(name) / "bundles"

    def bundles_of(self, name: str) -> set[str]:
        try:
            with os.scandir(self.bundles(name)) as entries:
                folders = [e.path for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
        except OSError:
            return set()
        return {path for path in folders if os.path.exists(os.path.join(path, "verdict.json"))}  # noqa: PTH110, PTH118


def newest(bundles: Collection[str]) -> str:
    """Returns the path of the latest bundle, or "". A complete one is preferred: only one of a job's nodes has it."""
    return max(bundles, key=lambda path: (_is_whole(path), modified_ns(path), path), default="")


def verdict_of(bundle: str) -> tuple[str, str]:
    """Returns the outcome (``hang``, ``crash`` or ``dump``) and cause; both are empty without a readable verdict."""
    document = _verdict(bundle) if bundle else None
    if document is None or "outcome" not in document:
        return "", ""
    return str(document["outcome"]), str(document.get("cause", ""))


def summary_of(bundle: str) -> str:
    document = _verdict(bundle) if bundle else None
    return str(document.get("summary", "")) if document is not None else ""


def _is_whole(bundle: str) -> bool:
    document = _verdict(bundle)
    place = document.get("bundle") if document is not None else None
    return document is not None and (not isinstance(place, dict) or bool(place.get("whole", True)))


def _verdict(bundle: str) -> dict[str, Any] | None:
    try:
        document = json.loads((Path(bundle) / "verdict.json").read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
