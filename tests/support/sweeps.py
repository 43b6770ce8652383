"""Sweeps of small programs, run by ``safelaunch colaunch``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from safelaunch import schemas
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

SWEPT = f"exec -- {sys.executable} {PROGRAMS / 'swept.py'}"


class Sweep(Job):
    """``safelaunch colaunch`` with its sweep in ``scratch/s`` and what its jobs mark in ``scratch/marks``."""

    def __init__(self, scratch: Path, spec: str, *words: str, **more: Any) -> None:
        (scratch / "sweep.yaml").write_text(spec)
        super().__init__(["colaunch", "sweep.yaml", "--sweep-dir", "s", *words], scratch, **more)

    def marks(self, what: str) -> dict[str, int]:
        """Job → how often it has marked ``what``."""
        found = (self.scratch / "marks").glob(f"*.{what}")
        return {path.name.rpartition(".")[0]: len(path.read_text().split()) for path in found}

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        document = json.loads((self.scratch / "s" / "summary.json").read_text())
        Draft202012Validator(json.loads(schemas.path("summary.json").read_text())).validate(document)
        entries = document["jobs"]
        return {entry["name"]: entry for entry in entries}

    def states(self) -> dict[str, str]:
        return {name: entry["state"] for name, entry in self.jobs.items()}

    def log(self, name: str, attempt: int = 1) -> str:
        return (self.scratch / "s" / "jobs" / name / f"attempt-{attempt}.log").read_text()

    def records(self) -> list[dict[str, Any]]:
        """The journal."""
        journal = self.scratch / "s" / "journal.jsonl"
        lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
        return [json.loads(line) for line in lines]

    def recorded(self) -> set[str]:
        """The jobs whose success is in the journal."""
        return {each["job"] for each in self.records() if each["event"] == "ended" and each["state"] == "succeeded"}


def several(how: str, limit: float | str, count: int = 6) -> str:
    return f"""
defaults: {{command: "{SWEPT} {{name}} {how} {limit}"}}
matrix: {{n: 0..{count - 1}}}
jobs: {{j: {{name: "j{{n}}", env: {{N: "{{n}}"}}}}}}
"""
