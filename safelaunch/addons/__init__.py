"""Connects the core and its add-ons.

An add-on is a directory of this package. It can import the core, but the core imports only this module, which loads an
add-on by name when a command, bundle or job needs it. If an add-on's directory is missing, only its commands are
missing. Installed packages can't add entries to the tables here, so they can't change what ``safelaunch WORD`` means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Command, Monitor, Reader, Service
    from safelaunch.settings.options import Settings
    from safelaunch.supervise.monitors import MonitoredJob

# Subcommand -> (add-on with a module ``command`` that is a ``protocols.Command``, line in the help, previous subcommand
# of the core in the help).
COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "colaunch": ("sweep", "run many jobs, each on its own GPUs or CPU cores", "exec"),
    "record": ("record", "report where a running job spends its time, by rank and line", "dump"),
    "reproduce": ("reproduce", "write a small script that hangs in the same way", "explain"),
}
# Name in the public package -> module that defines it.
PUBLIC: Mapping[str, str] = {
    "HangError": "embed.launching",
    "Launch": "embed.launching",
    "launch": "embed.launching",
}
# JSON document -> add-on with its schema.
SCHEMAS: Mapping[str, str] = {"summary.json": "sweep", "record.json": "record"}
# Hook -> add-ons whose packages have a function of that name, in call order.
HOOKS: Mapping[str, tuple[str, ...]] = {
    "monitors": ("consistency", "slow"),
    "probe_values": ("consistency",),
    "readers": ("logs",),
    "services": ("record", "slow"),
}


def folder(addon: str) -> str:
    return os.path.join(os.path.dirname(__file__), addon)  # noqa: PTH118, PTH120 - runs at every start, without pathlib


def is_present(addon: str) -> bool:
    return os.path.isdir(folder(addon))  # noqa: PTH112


def missing(hook: str) -> list[str]:
    return [addon for addon in HOOKS[hook] if not is_present(addon)]


def has_command(name: str) -> bool:
    return name in COMMANDS and is_present(COMMANDS[name][0])


def with_commands(core: Mapping[str, str]) -> dict[str, str]:
    """Returns the help line of each subcommand of the core and of the installed add-ons."""
    lines = dict(core)
    for name, (_, line, previous) in COMMANDS.items():
        if has_command(name):
            entries = list(lines.items())
            place = list(lines).index(previous) + 1
            lines = dict([*entries[:place], (name, line), *entries[place:]])
    return lines


def command(name: str) -> Command:
    return cast("Command", import_module(f"{__name__}.{COMMANDS[name][0]}.command"))


def public(name: str) -> Any:
    """Returns the object ``safelaunch.NAME``. Raises AttributeError if the add-on that defines it is missing."""
    module = PUBLIC[name]
    addon = module.partition(".")[0]
    if not is_present(addon):
        raise AttributeError(f"safelaunch.{name} is part of the add-on {addon!r}, which isn't installed")
    return getattr(import_module(f"{__name__}.{module}"), name)


def hooks(name: str) -> Iterator[Callable[..., Any]]:
    yield from _hooks_by_addon(name).values()


def _hooks_by_addon(name: str) -> dict[str, Callable[..., Any]]:
    return {addon: getattr(import_module(f"{__name__}.{addon}"), name) for addon in HOOKS[name] if is_present(addon)}


def readers() -> Iterator[Reader]:
    for readers_of in hooks("readers"):
        yield from readers_of()


def service(name: str) -> Service[Any, Any] | None:
    return next(
        (candidate for services_of in hooks("services") for candidate in services_of() if candidate.name == name), None
    )


def monitors(job: MonitoredJob) -> list[Monitor]:
    return [monitor for monitors_of in hooks("monitors") for monitor in monitors_of(job)]


def probe_values(settings: Settings) -> dict[str, Mapping[str, str]]:
    """Returns the environment variables that each add-on's probe needs, by add-on (see ``protocols.Probe``)."""
    values = {addon: values_of(settings) for addon, values_of in _hooks_by_addon("probe_values").items()}
    return {addon: variables for addon, variables in values.items() if variables}
