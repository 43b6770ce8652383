"""A started job, and the exit codes that are safelaunch's own."""

from __future__ import annotations

from dataclasses import dataclass

from safelaunch.launch.paths import RunPaths
from safelaunch.launch.plan import Plan
from safelaunch.launch.process import ProcessId

EXIT_HUNG = 124
EXIT_GAVE_UP = 125


@dataclass(frozen=True, slots=True)
class Job:
    """A started job: its first process (torchrun's agent, mostly), its run directory (None: not watched)."""

    plan: Plan
    agent: ProcessId
    run: RunPaths | None
    started_unix_s: float
