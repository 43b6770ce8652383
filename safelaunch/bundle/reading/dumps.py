"""Reads a plain folder of Flight Recorder dumps, from any job and any launcher, as evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safelaunch.bundle.reading.guard import FoundEvidence, Unreadable, evidence_of, parse_all, read_limited, within
from safelaunch.capture import flight_dump, flight_records
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.model import FlightRecord, RankEvidence
from safelaunch.model.entries import Entries
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import is_dir, modified_ns

MAX_FILES = 2 * MAX_RANKS
# nccl_trace_rank_3, comm_lib_trace_rank_3, myjob-3.json, dump_rank3.pickle: any prefix, the rank, an ending.
_NAME = re.compile(
    r"(?P<prefix>.*?)(?P<rank>[0-9]{1,6})(?:\.(?:json|pickle|pkl|bin|dump|txt))?", re.IGNORECASE | re.DOTALL
)


def read_dumps(folder: Path, root: Path) -> FoundEvidence | None:
    """The dumps in ``folder``, below ``root``; None if no file in it is a Flight Recorder dump.

    Other files are skipped silently, except those with a dump's name, which are problems.
    """
    failed: dict[str, str] = {}
    jobs: dict[str, dict[int, _DumpFile]] = {}  # by prefix
    paths = [path for path in folder.iterdir() if 0 <= _rank_of(path.name) < MAX_RANKS and not is_dir(path)]
    if len(paths) > MAX_FILES:
        raise Unreadable(f"it holds {len(paths)} files with the names of dumps; the limit is {MAX_FILES}")
    paths.sort(key=lambda path: (_rank_of(path.name), path.name))
    for path, record in zip(paths, parse_all([_real(path, root) for path in paths], parse_some), strict=True):
        if isinstance(record, str):
            failed[path.name] = record
            continue
        mine = jobs.setdefault(_prefix(path.name), {})
        one = _DumpFile(path.name, record, modified_ns(path) / 1e9)
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
    ranks = [RankEvidence(rank=rank, host="", pid=0, flight_record=one, beacon=False) for rank, one in records.items()]
    evidence = evidence_of("hang", ranks, _world(records, [_rank_of(name) for name in broken]))
    named = {f"ranks/{rank}/flight_recorder.json": name for rank, name in files.items()}
    return FoundEvidence(f"{len(records)} Flight Recorder dumps", evidence, tuple(problems), named)


def _real(path: Path, root: Path) -> Path:
    """The target of a link within ``root``; a link that leads out of it stays a link, which is never read."""
    try:
        return within(root, path) if path.is_symlink() else path
    except Unreadable:
        return path


def parse_some(paths: Sequence[Path]) -> Iterator[FlightRecord | str]:
    """The records in these files, or what is wrong with each. The content decides, not the name."""
    shared = flight_dump.DumpParts()
    for path in paths:
        try:
            data = read_limited(path)
            parse = flight_dump.parse_json if data[:1] == b"{" else flight_dump.parse_pickle
            record = parse(data, shared)
            yield CONTRADICTS if flight_records.contradicts_itself(record) else record
        except (Unreadable, CaptureError) as error:
            yield error.message


@dataclass(frozen=True)
class _DumpFile:
    name: str
    record: FlightRecord
    modified: float

    @property
    def quality(self) -> tuple[bool, int]:
        entries = Entries.of(self.record.entries)
        return any(kind.frames for kind in entries.used().values()), len(entries)

    @property
    def backends(self) -> frozenset[str]:
        kinds = Entries.of(self.record.entries).used().values()
        return frozenset(flight_records.backend_of(kind.op) for kind in kinds) - {""}


CONTRADICTS = "its collectives are not numbered as torch does: some have no number, or that of an earlier one"
TOGETHER_S = 600.0  # between the dumps of one rank's recorders


def _of_one_job(
    jobs: dict[str, dict[int, _DumpFile]], failed: Mapping[str, int]
) -> tuple[dict[int, _DumpFile], list[str]]:
    """The dumps by rank, and those that were skipped: another job's, or an earlier attempt's, with the same ranks.

    The prefix with the most files counts (``failed``: unreadable files per prefix), or the newest of several. Prefixes
    with other ranks (one name per node) join it, and so do those of other backends, which have recorders of their own.
    """

    def weight(prefix: str) -> tuple[int, float]:
        here = jobs[prefix]
        return len(here) + failed.get(prefix, 0), max(one.modified for one in here.values())

    order = sorted(jobs, key=weight, reverse=True)
    chosen: dict[int, _DumpFile] = {}
    passed_over = []
    for prefix in order:
        here = jobs[prefix]
        both = chosen.keys() & here.keys()
        if both and all(_of_other_backends(chosen[rank], here[rank]) for rank in both):
            chosen.update({rank: _together(chosen[rank], one) if rank in both else one for rank, one in here.items()})
        elif both:
            names = sorted(one.name for one in here.values())
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            passed_over.append(f"{names[0]}{more}: ignored, because other dumps here have the same ranks")
        else:
            chosen.update(here)
    return dict(sorted(chosen.items())), passed_over


def _of_other_backends(one: _DumpFile, other: _DumpFile) -> bool:
    """Dumps of one rank from about one moment, of which none holds an operation of the other's backends."""
    backends = one.backends & other.backends
    return not backends and bool(one.backends and other.backends) and abs(one.modified - other.modified) < TOGETHER_S


def _together(one: _DumpFile, other: _DumpFile) -> _DumpFile:
    return _DumpFile(one.name, flight_records.merged([one.record, other.record]), one.modified)


def _rank_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found["rank"]) if found else -1


def _prefix(name: str) -> str:
    found = _NAME.fullmatch(name)
    return found["prefix"] if found else name


def _world(records: dict[int, FlightRecord], broken: list[int]) -> int:
    """The number of ranks according to the dumps: their own, their groups', and those of unreadable files."""
    named = [rank for record in records.values() for ranks in record.groups.values() for rank in ranks]
    return max([*records, *broken, *(rank for rank in named if 0 <= rank < MAX_RANKS)]) + 1
