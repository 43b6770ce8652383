"""A plain folder of Flight Recorder dumps, from any job and any launcher → evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safelaunch.capture import flight_dump
from safelaunch.errors import CaptureError
from safelaunch.model import Evidence, FlightRecord, RankEvidence
from safelaunch.postmortem.cores import parse_all
from safelaunch.postmortem.found import Found, Unreadable, read_limited

MAX_RANKS = 65_536
# nccl_trace_rank_3, comm_lib_trace_rank_3, myjob-3.json, dump_rank3.pickle: a prefix of any kind, the rank, an ending.
_NAME = re.compile(
    r"(?P<prefix>.*?)(?P<rank>\d{1,6})(?:\.(?:json|pickle|pkl|bin|dump|txt))?", re.IGNORECASE | re.DOTALL
)


def read_dumps(folder: Path) -> Found | None:
    """The dumps that lie in ``folder``; None when not one file in it is a Flight Recorder dump.

    Other files are passed over in silence, except those that are called as the dumps are: they were meant to be some.
    """
    failed: dict[str, str] = {}
    jobs: dict[str, dict[int, _Dump]] = {}  # by prefix
    paths = [path for path in folder.iterdir() if 0 <= _rank_of(path.name) < MAX_RANKS and not path.is_dir()]
    paths.sort(key=lambda path: (_rank_of(path.name), path.name))
    for path, record in zip(paths, parse_all(paths, _parse_some), strict=True):
        if isinstance(record, str):
            failed[path.name] = record
            continue
        mine = jobs.setdefault(_prefix(path.name), {})
        one = _Dump(path.name, record, _modified(path))
        rank = _rank_of(path.name)
        if rank not in mine or one.quality > mine[rank].quality:
            mine[rank] = one
    if not jobs:
        return None
    chosen, problems = _of_one_job(jobs, Counter(map(_prefix, failed)))
    records = {rank: one.record for rank, one in chosen.items()}
    files = {rank: one.name for rank, one in chosen.items()}
    prefixes = {_prefix(name) for name in files.values()}
    broken = [name for name in failed if _prefix(name) in prefixes and _rank_of(name) not in records]
    problems += [f"{name}: {failed[name]}" for name in broken]
    world = _world(records, [_rank_of(name) for name in broken])
    evidence = Evidence(
        outcome="hang",
        world_size=world,
        ranks=tuple(
            RankEvidence(rank, host="", pid=0, flight_record=record, beacon=False)
            for rank, record in sorted(records.items())
        ),
        missing_ranks=tuple(sorted(set(range(world)) - set(records))),
    )
    named = {f"ranks/{rank}/flight_recorder.json": name for rank, name in files.items()}
    return Found(f"{len(records)} Flight Recorder dumps", evidence, tuple(problems), named)


def _parse_some(paths: Sequence[Path]) -> list[FlightRecord | str]:
    """The records in these files, or what is wrong with them."""
    shared = flight_dump.Shared()
    found: list[FlightRecord | str] = []
    for path in paths:
        try:
            found.append(_parse(read_limited(path), shared))
        except (Unreadable, CaptureError) as error:
            found.append(error.message)
    return found


def _parse(data: bytes, shared: flight_dump.Shared) -> FlightRecord:
    """By its content, whatever the file is called."""
    if data[:1] == b"{":
        return flight_dump.parse_json(data, shared)
    return flight_dump.parse_pickle(data, shared)


@dataclass(frozen=True)
class _Dump:
    name: str
    record: FlightRecord
    modified: float

    @property
    def quality(self) -> tuple[bool, int]:
        return any(entry.frames for entry in self.record.entries), len(self.record.entries)


def _of_one_job(jobs: dict[str, dict[int, _Dump]], failed: Mapping[str, int]) -> tuple[dict[int, _Dump], list[str]]:
    """The dumps by rank, and what was passed over: another job's, or an earlier attempt's, which has the same ranks.

    The prefix with the most files counts (``failed``: how many of a prefix could not be read), the newest of those;
    with it those that have other ranks (a name for each node).
    """

    def weight(prefix: str) -> tuple[int, float]:
        here = jobs[prefix]
        return len(here) + failed.get(prefix, 0), max(one.modified for one in here.values())

    order = sorted(jobs, key=weight, reverse=True)
    chosen: dict[int, _Dump] = {}
    passed_over = []
    for prefix in order:
        here = jobs[prefix]
        if chosen.keys() & here.keys():
            names = sorted(one.name for one in here.values())
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            passed_over.append(f"{names[0]}{more}: passed over, for there are other dumps of the same ranks here")
        else:
            chosen.update(here)
    return dict(sorted(chosen.items())), passed_over


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # it has gone since


def _rank_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found["rank"]) if found else -1


def _prefix(name: str) -> str:
    found = _NAME.fullmatch(name)
    return found["prefix"] if found else name


def _world(records: dict[int, FlightRecord], broken: list[int]) -> int:
    """Ranks that the dumps tell of: their own, those of their groups, and those whose file could not be read."""
    named = [rank for record in records.values() for ranks in record.groups.values() for rank in ranks]
    return max([*records, *broken, *(rank for rank in named if 0 <= rank < MAX_RANKS)]) + 1
