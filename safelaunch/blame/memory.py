"""Remembers in the bundle directory who was blamed: one small private file per user.

It is a convenience: a disk that does not answer, a damaged file, or one that somebody else put there costs the memory,
never a bundle. Every call may block on a dead network disk, so callers give it a deadline (``within``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from safelaunch.model.blamed import Incident
from safelaunch.system.decoding import from_json
from safelaunch.system.private_file import NotOurs, PrivateFile
from safelaunch.system.task import Task

MOST_INCIDENTS = 256
MOST_BYTES = 1 << 20
LONGEST_S = 30 * 86_400.0  # what was blamed a month ago may have been repaired
LOCK_PATIENCE_S = 2.0
DEADLINE_S = 3.0
SCHEMA = 1
_T = TypeVar("_T")


class _File(msgspec.Struct, frozen=True):
    schema: int = SCHEMA
    incidents: tuple[Incident, ...] = ()


def path_in(directory: Path) -> Path:
    """Hidden, so that nothing takes it for a bundle; with the user's number, as people share a directory."""
    return directory / f".safelaunch-blamed-{os.geteuid()}.json"


def within(work: Callable[[], _T], otherwise: _T, deadline_s: float = DEADLINE_S) -> _T:
    """What ``work`` returns; ``otherwise``, while it goes on in its thread, if the disk does not answer in time."""
    task = Task("who was blamed", work)
    task.wait(deadline_s)
    try:
        return task.result() if task.done else otherwise
    except Exception:  # noqa: BLE001 - whatever it is, it costs the memory alone
        return otherwise


def read(directory: Path, now_unix_s: float) -> tuple[Incident, ...]:
    """The incidents of the last month, the oldest first; none if there is no file, or none that can be read."""
    try:
        return _recent(_file(directory).read(), now_unix_s)
    except OSError:
        return ()


def add(directory: Path, incident: Incident, now_unix_s: float) -> str:
    """Adds an incident, once whichever node of the job is first; returns what went wrong, or an empty string."""

    def change(known: tuple[Incident, ...]) -> tuple[Incident, ...]:
        recent = _recent(known, now_unix_s)
        return recent if any(one.id == incident.id for one in recent) else (*recent, incident)

    file = _file(directory)
    try:
        whole = file.update(change)
    except OSError as error:
        return f"whom this verdict blames could not be remembered: {file.path}: {error.strerror or error}"
    return "" if whole else f"{file.path} was damaged: whom earlier verdicts blamed is forgotten"


def _recent(incidents: tuple[Incident, ...], now_unix_s: float) -> tuple[Incident, ...]:
    return tuple(one for one in incidents if now_unix_s - one.unix_s < LONGEST_S)


def _file(directory: Path) -> PrivateFile[Incident]:
    return PrivateFile(path_in(directory), _decode, _encode, MOST_INCIDENTS, MOST_BYTES, LOCK_PATIENCE_S)


def _decode(data: bytes) -> tuple[Incident, ...]:
    found = from_json(data, _File)
    if found.schema != SCHEMA:
        raise NotOurs("a newer safelaunch wrote it")
    return found.incidents


def _encode(incidents: tuple[Incident, ...]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_File(incidents=incidents)), indent=1) + b"\n"
