"""Parses durations as users write them in all options and arguments: ``300``, ``"5m"``, ``timedelta(minutes=5)``."""

from __future__ import annotations

import re
from math import isfinite

_SECONDS = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?(s|m|h)?", re.IGNORECASE)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(duration: object) -> float:
    """Converts a number, a string such as ``90s``, ``10m`` or ``2h``, or a ``timedelta`` to seconds.

    Raises ValueError unless the duration is positive and finite.
    """
    if isinstance(duration, str):
        match = _SECONDS.fullmatch(duration.strip())
        seconds = float(match[1] + (match[2] or "")) * _UNITS[(match[3] or "").lower()] if match else 0.0
    elif hasattr(duration, "total_seconds"):  # a timedelta, or pandas' equivalent
        seconds = float(duration.total_seconds())
    else:
        seconds = _number(duration)
    if not isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{duration!r} is not a duration: a positive number of seconds, 90s, 10m, 2h, or a timedelta")
    return seconds


def _number(duration: object) -> float:
    try:
        return float(duration) if hasattr(duration, "__float__") and not isinstance(duration, bool) else 0.0
    except (TypeError, ValueError, OverflowError, RuntimeError):  # for example, a tensor with several values
        return 0.0
