"""Durations as people write them, wherever safelaunch takes one: ``300``, ``"5m"``, ``timedelta(minutes=5)``."""

from __future__ import annotations

import re
from math import isfinite

_SECONDS = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?(s|m|h)?", re.IGNORECASE)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(given: object) -> float:
    """Returns the seconds of a number, a text such as ``90s``, ``10m`` or ``2h``, or a ``timedelta``.

    Raises ValueError unless it is positive and finite.
    """
    if isinstance(given, str):
        match = _SECONDS.fullmatch(given.strip())
        seconds = float(match[1] + (match[2] or "")) * _UNITS[(match[3] or "").lower()] if match else 0.0
    elif hasattr(given, "total_seconds"):  # a timedelta, or what pandas has for one
        seconds = float(given.total_seconds())
    else:
        seconds = _number(given)
    if not isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{given!r} is not a duration: a positive number of seconds, 90s, 10m, 2h, or a timedelta")
    return seconds


def _number(given: object) -> float:
    try:
        return float(given) if hasattr(given, "__float__") and not isinstance(given, bool) else 0.0
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of a tensor that holds several
        return 0.0
