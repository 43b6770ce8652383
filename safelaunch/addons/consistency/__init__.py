"""Compares values that must be equal on all ranks (weights, gradients, batches) while a job runs: ``--check-every``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Monitor
    from safelaunch.settings.options import Settings
    from safelaunch.supervise.monitors import MonitoredJob


def probe_values(settings: Settings) -> dict[str, str]:
    if not settings.check_every:
        return {}
    from safelaunch.addons.consistency.layout import VARIABLE

    return {VARIABLE: str(settings.check_every)}


def monitors(job: MonitoredJob) -> tuple[Monitor, ...]:
    if not job.settings.check_every:
        return ()
    from safelaunch.addons.consistency.monitor import ConsistencyMonitor

    return (ConsistencyMonitor(job),)
