"""Runs many jobs: expands, schedules, journals and summarizes a sweep. Each job is a safelaunch run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Command
    from safelaunch.addons.sweep import command

    _COMMAND: Command = command
