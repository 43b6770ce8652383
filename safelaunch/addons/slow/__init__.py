"""Reports which rank slows a running job down, since which step, and the line in which that rank spends the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safelaunch import addons

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Monitor, Service
    from safelaunch.supervise.monitors import MonitoredJob


def monitors(job: MonitoredJob) -> tuple[Monitor, ...]:
    if not addons.is_present("record"):  # its samples show the line
        return ()
    from safelaunch.addons.slow.monitor import SlowMonitor

    return (SlowMonitor(job),)


def services() -> tuple[Service[Any, Any], ...]:
    if not addons.is_present("record"):
        return ()
    from safelaunch.addons.slow.service import Examiner

    return (Examiner(),)
