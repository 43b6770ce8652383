"""Parsers for the values of options. Each raises ValueError for text that is not valid."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

ON_STALL = ("kill", "restart", "dump")
ON_INCONSISTENT = ("report", "dump", "stop")
AUTO = "auto"

_SECONDS = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?(s|m|h)?", re.IGNORECASE)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_GPU_ID = re.compile(r"[0-9]+|(?:GPU|MIG)-[A-Za-z0-9/-]+")
_STORE = re.compile(r"(?:(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):)?([0-9]{1,5})", re.ASCII)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def parse_seconds(text: str) -> float:
    """Seconds from ``600``, ``1.5``, ``90s``, ``10m`` or ``2h``; ValueError unless positive and finite."""
    match = _SECONDS.fullmatch(text.strip())
    if not match:
        raise ValueError(text)
    seconds = float(match[1] + (match[2] or "")) * _UNITS[(match[3] or "").lower()]
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(text)
    return seconds


class GroupTimeout(NamedTuple):
    """The timeout of process groups. ``everywhere``: also of those to which the script gives one."""

    seconds: float
    everywhere: bool = False

    def __str__(self) -> str:
        return f"{self.seconds:g} s{'!' if self.everywhere else ''}"


def parse_group_timeout(text: str) -> GroupTimeout:
    """``30s``, or ``30s!`` for all groups."""
    text = text.strip()
    seconds = parse_seconds(text.removesuffix("!"))
    if not 1e-3 <= seconds <= 1e8:  # milliseconds, in a datetime.timedelta
        raise ValueError(text)
    return GroupTimeout(seconds, text.endswith("!"))


def parse_count(text: str) -> int:
    """A whole number of at most 6 digits, 0 included."""
    if not re.fullmatch(r"[0-9]{1,6}", text.strip(), re.ASCII):
        raise ValueError(text)
    return int(text)


def parse_stall_timeout(text: str) -> float | None:
    """Seconds, or None for ``auto``."""
    return None if text.strip() == AUTO else parse_seconds(text)


def parse_on_stall(text: str) -> str:
    """One of ``kill``, ``restart``, ``dump``."""
    if text.strip() not in ON_STALL:
        raise ValueError(text)
    return text.strip()


def parse_on_inconsistent(text: str) -> str:
    """One of ``report``, ``dump``, ``stop``."""
    if text.strip() not in ON_INCONSISTENT:
        raise ValueError(text)
    return text.strip()


def parse_run_name(text: str) -> str:
    """A name that is safe in a file name: 1-64 of ``A-Z a-z 0-9 . _ -``, not starting with ``.`` or ``-``."""
    if not _RUN_NAME.fullmatch(text):
        raise ValueError(text)
    return text


def parse_gpus(text: str) -> str:
    """``all``, ``none``, a count, or ids, without blanks.

    Digits alone are a count. Ids are separated by commas (``0,2``; a single one is ``3,``), or are UUIDs that
    begin with ``GPU-`` or ``MIG-``. Duplicate ids and a count of 0 are errors.
    """
    text = re.sub(r"\s*,\s*", ",", text.strip())
    if text in ("all", "none"):
        return text
    if re.fullmatch(r"[0-9]+", text):
        if int(text) == 0:
            raise ValueError(text)
        return str(int(text))
    ids = text.removesuffix(",").split(",")
    if len(set(ids)) != len(ids) or not all(_GPU_ID.fullmatch(one) for one in ids):
        raise ValueError(text)
    return text


def parse_store(text: str) -> str:
    """``HOST:PORT``, ``[IPv6]:PORT``, or a port alone."""
    match = _STORE.fullmatch(text.strip())
    if match is None or not 0 < int(match[1]) < 65536:
        raise ValueError(text)
    return text.strip()


def parse_flag(text: str) -> bool:
    """A switch in the environment or in YAML: 1/true/yes/on or 0/false/no/off."""
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def parse_wait(text: str) -> bool | float:
    """A switch, or for how many seconds it is on."""
    return parse_flag(text) if text.strip().lower() in _TRUE + _FALSE else parse_seconds(text)


def parse_command(text: str) -> str:
    """A command line for the shell, not empty."""
    return parse_path(text)


def parse_path(text: str) -> str:
    """A path, not empty."""
    if not text.strip() or "\0" in text:
        raise ValueError(text)
    return text
