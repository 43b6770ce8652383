"""Translates the keyword arguments of ``safelaunch.launch`` into command-line options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from safelaunch.beacon.durations import seconds_of
from safelaunch.settings.options import BY_FLAG, Option
from safelaunch.system.errors import DurationError

if TYPE_CHECKING:
    pass


def flags_of(options: Mapping[str, object]) -> tuple[tuple[str, str | None], ...]:
    """Converts options to command-line flags and values, without checking names and most values.

    Raises DurationError for an invalid duration. The command line's parser reports other errors.
    """
    flags: list[tuple[str, str | None]] = []
    for name, value in options.items():
        flag = "--config" if name == "config_file" else f"--{name.replace('_', '-')}"
        option = BY_FLAG.get(flag)
        if option is not None and option.is_duration and value is not None and not _is_switch(option, value):
            flags.append((flag, _duration(name, option, value)))
        elif name == "watch":
            flags += [] if value else [("--no-watch", None)]
        elif isinstance(value, bool):
            flags += [(flag, None)] if value else []
        elif isinstance(value, (list, tuple)):
            flags += [(flag, os.fspath(item)) for item in value]
        elif value is not None:
            flags.append((flag, str(value)))
    return tuple(flags)


def _is_switch(option: Option, value: object) -> bool:
    return option.value_is_optional and isinstance(value, bool)


def _duration(name: str, option: Option, value: object) -> str:
    try:
        text = value if isinstance(value, str) else f"{seconds_of(value):.15g}"
        option.parse(text)
    except ValueError:
        raise DurationError(f"{name}: {value!r} is not {option.expects}, or a timedelta") from None
    return text
