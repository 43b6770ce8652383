"""Encodes the checks that nodes send to the node that compares them. The format is typed, and its sizes are limited."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from safelaunch.addons.consistency.capture import MOST_TENSORS, SeriesCheck, SeriesInfo
from safelaunch.model import WrongResult
from safelaunch.supervise.cluster.codec import BadMessage, pack, parse, unpack
from safelaunch.supervise.cluster.messages import MOST_RANKS, Message

# Bytes: at most of one node, at least of one node, at most of all nodes.
MOST_BYTES, LEAST_BYTES, MOST_OF_ALL = 256 << 10, 8 << 10, 16 << 20
MOST_POSITIONS = 32
MOST_FOUND = 16
_Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Since = Annotated[int, Meta(ge=-1, lt=1 << 48)]
_Name = Annotated[str, Meta(max_length=1000)]
_Indexes = Annotated[tuple[_Count, ...], Meta(max_length=MOST_TENSORS)]


class _WireSeriesInfo(Message, frozen=True):
    key: _Name
    kind: Literal["parameters", "buffers"]
    every: _Count
    groups: tuple[Annotated[tuple[_Rank, ...], Meta(max_length=MOST_RANKS)], ...]
    tensors: Annotated[tuple[tuple[_Name, _Count], ...], Meta(max_length=MOST_TENSORS)]


class _WireCheck(Message, frozen=True):
    rank: _Rank
    position: _Count
    about: _Count
    prints: _Count
    bad_values: _Indexes = ()
    bad_gradients: _Indexes = ()
    bad_since: _Since = -1  # step of the sentinel; -1 if its gradients were finite
    losses: Annotated[tuple[tuple[_Count, float], ...], Meta(max_length=64)] = ()
    rounds: _Count = 0


class _Shared(Message, frozen=True):
    abouts: tuple[_WireSeriesInfo, ...]
    prints: tuple[bytes, ...]
    checks: tuple[_WireCheck, ...]


class SharedFindings(Message, frozen=True):
    found: Annotated[tuple[WrongResult, ...], Meta(max_length=MOST_FOUND)] = ()
    stops: bool = False  # the findings end the job
    place: Annotated[str, Meta(max_length=4096)] = ""  # path of the bundle


def share_of(nodes: int) -> int:
    return max(LEAST_BYTES, min(MOST_BYTES, MOST_OF_ALL // max(nodes, 1)))


def encode(checks: Iterable[SeriesCheck], share: int) -> bytes:
    """Encodes the latest checks of a node's ranks, except those made under a rank number that isn't the job's.

    If there are too many tensors, neighbors with the same replicas share a fingerprint, and a name formed from the
    first and last name.
    """
    own_checks = [check for check in checks if check.about.rank in (check.rank, -1)]
    moments = sorted({check.moment for check in own_checks})[-MOST_POSITIONS:]
    width = 1
    while True:
        kept = set(moments)
        chunks = pack(_packed([check for check in own_checks if check.moment in kept], width), share)
        if chunks is not None:
            return b"".join(chunks)
        if len(moments) > 1:
            moments = moments[len(moments) // 2 :]
        elif width > MOST_TENSORS:
            return b""
        else:
            width *= 4


def decode(data: bytes) -> list[SeriesCheck]:
    """Decodes the result of ``encode``. Raises BadMessage for anything else."""
    message = parse(unpack([data]), _Shared)
    try:
        abouts = [
            SeriesInfo(about.key, about.kind, about.every, -1, about.groups, about.tensors) for about in message.abouts
        ]
        if any(group >= len(about.groups) for about in abouts for _, group in about.tensors):
            raise BadMessage("checks of an unknown group")
        return [_check(check, abouts[check.about], message.prints[check.prints]) for check in message.checks]
    except (IndexError, struct.error) as error:
        raise BadMessage(str(error)) from error


def _check(wire_check: _WireCheck, about: SeriesInfo, prints: bytes) -> SeriesCheck:
    count = len(about.tensors)
    return SeriesCheck(
        rank=wire_check.rank,
        about=about,
        position=wire_check.position,
        prints=struct.unpack(f"<{count}q", prints),
        sizes=_magnitudes(count, wire_check.bad_values),
        gradients=_magnitudes(count, wire_check.bad_gradients),
        sentinel=((wire_check.bad_since, math.nan),) if wire_check.bad_since >= 0 else (),
        losses=wire_check.losses,
        rounds=wire_check.rounds,
    )


def _magnitudes(count: int, bad: Sequence[int]) -> tuple[float, ...]:
    magnitudes = [0.0] * count
    for number in bad:
        magnitudes[number] = math.nan
    return tuple(magnitudes)


def _packed(checks: Sequence[SeriesCheck], width: int) -> bytes:
    abouts: dict[_WireSeriesInfo, int] = {}
    prints: dict[bytes, int] = {}
    travelling = []
    for check in checks:
        runs = _runs(check.about, width)
        values = [_mixed(check.prints[begin:end]) for begin, end in runs]
        data = struct.pack(f"<{len(values)}q", *values)
        travelling.append(
            _WireCheck(
                rank=check.rank,
                position=check.position,
                about=abouts.setdefault(_about(check.about, runs), len(abouts)),
                prints=prints.setdefault(data, len(prints)),
                bad_values=_bad(check.sizes, runs),
                bad_gradients=_bad(check.gradients, runs),
                bad_since=next((step for step, value in check.sentinel if not math.isfinite(value)), -1),
                losses=_losses_to_send(check.losses),
                rounds=check.rounds,
            )
        )
    return msgspec.msgpack.encode(_Shared(tuple(abouts), tuple(prints), tuple(travelling)))


def _losses_to_send(losses: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    bad = next((loss for loss in losses if not math.isfinite(loss[1])), None)
    newest = tuple(losses[-32:])
    return newest if bad is None or bad in newest else (bad, *newest)


def _runs(about: SeriesInfo, width: int) -> list[tuple[int, int]]:
    runs = []
    group: Callable[[int], int] = lambda number: about.tensors[number][1]  # noqa: E731
    for _, run in groupby(range(len(about.tensors)), group):
        numbers = list(run)
        runs += [(numbers[at], numbers[min(at + width, len(numbers)) - 1] + 1) for at in range(0, len(numbers), width)]
    return runs


def _about(about: SeriesInfo, runs: Sequence[tuple[int, int]]) -> _WireSeriesInfo:
    tensors = []
    for begin, end in runs:
        name, group = about.tensors[begin]
        last = about.tensors[end - 1][0]
        tensors.append((name[:400] if end == begin + 1 else f"{name[:400]} to {last[:400]}", group))
    kind: Literal["parameters", "buffers"] = "buffers" if about.kind == "buffers" else "parameters"
    return _WireSeriesInfo(about.key, kind, about.every, about.groups, tuple(tensors))


def _mixed(prints: Sequence[int]) -> int:
    if len(prints) == 1:
        return prints[0]
    mixed = 0
    for value in prints:
        mixed = (mixed * 0x9E3779B97F4A7C15 + value) & (1 << 64) - 1
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _bad(values: Sequence[float], runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(n for n, (begin, end) in enumerate(runs) if not all(map(math.isfinite, values[begin:end])))
