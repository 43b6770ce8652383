"""Defines the files in a lease directory. Sizes and values are bounded, because any user can write these files."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from safelaunch.system.decoding import from_json

NAME_CHARACTERS = 64
COMMAND_CHARACTERS = 1000
MOST_THINGS = 1024

_Thing = Annotated[str, Meta(max_length=256)]


class HolderRecord(msgspec.Struct, frozen=True):
    """Content of a lock file. Times are seconds since 1970, up to the year 5138."""

    pid: Annotated[int, Meta(ge=0, le=1 << 22)]
    start_ticks: Annotated[int, Meta(ge=0, le=1 << 62)]
    name: Annotated[str, Meta(max_length=NAME_CHARACTERS)]
    command: Annotated[str, Meta(max_length=COMMAND_CHARACTERS)]
    since_unix_s: Annotated[float, Meta(ge=0, le=1e11)]


class SaidTicket(HolderRecord, frozen=True):
    """Content of a ticket: the waiter, the GPUs that it could use, and how many of them it needs."""

    candidates: Annotated[list[_Thing], Meta(max_length=MOST_THINGS)]
    count: Annotated[int, Meta(ge=0, le=MOST_THINGS)]


_AnySaid = TypeVar("_AnySaid", bound=HolderRecord)


def read(data: bytes, kind: type[_AnySaid]) -> _AnySaid | None:
    """Decodes a file; returns None if its content isn't valid."""
    try:
        return from_json(data, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
