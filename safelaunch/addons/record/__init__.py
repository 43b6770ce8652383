"""Implements ``safelaunch record``: reports where a running job spends its time, by rank and line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Command, Service
    from safelaunch.addons.record import command

    _COMMAND: Command = command


def services() -> tuple[Service[Any, Any], ...]:
    from safelaunch.addons.record.service import Recorder

    return (Recorder(),)
