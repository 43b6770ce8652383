"""Reads a folder of Flight Recorder dumps, from any job and launcher."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safelaunch.bundle.reading.evidence import EvidenceSource, evidence_on
from safelaunch.bundle.reading.files import Unreadable, read_limited, within
from safelaunch.bundle.reading.parallel import parse_all
from safelaunch.capture import flight_dump, flight_records
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.model import FlightRecord, RankEvidence
from safelaunch.model.entries import Entries
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import is_dir, modified_ns

MAX_FILES = 2 * MAX_RANKS
# Any prefix, the rank, an ending: nccl_trace_rank_3, comm_lib_trace_rank_3, myjob-3.json, dump_rank3.pickle.
_NAME = re.compile(
    r"(?P<prefix>.*?)(?P<rank>[0-9]{1,6})(?:\.(?:json|pickle|pkl|bin|dump|txt))?", re.IGNORECASE | re.DOTALL
)


def read_dumps(folder: Path, root: Path) -> EvidenceSource | None:
    """Returns the dumps in ``folder``, which is below ``root``; None if there are no dumps.

    Files with other names are skipped silently; unreadable files with a dump's name are reported as problems.
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
        job_files = jobs.setdefault(_prefix(path.name), {})
        dump = _DumpFile(path.name, record, modified_ns(path) / 1e9)
        rank = _rank_of(path.name)
        if rank not in job_files or dump.quality > job_files[rank].quality:
            job_files[rank] = dump
    if not jobs:
        return None
    chosen, problems = _choose_job(jobs, Counter(map(_prefix, failed)))
    records = {rank: dump.record for rank, dump in chosen.items()}
    files = {rank: dump.name for rank, dump in chosen.items()}
    prefixes = {_prefix(name) for name in files.values()}
    unreadable = [name for name in failed if _prefix(name) in prefixes and _rank_of(name) not in records]
    problems += [f"{name}: {failed[name]}" for name in unreadable]
    ranks = [
        RankEvidence(rank=rank, host="", pid=0, flight_record=record, beacon=False) for rank, record in records.items()
    ]
    evidence = evidence_on("hang", ranks, _world(records, [_rank_of(name) for name in unreadable]))
    sources = {f"ranks/{rank}/flight_recorder.json": name for rank, name in files.items()}
    return EvidenceSource(f"{len(records)} Flight Recorder dumps", evidence, tuple(problems), sources)


def _real(path: Path, root: Path) -> Path:
    # A link that leads out of ``root`` stays a link, which is never read.
    try:
        return within(root, path) if path.is_symlink() else path
    except Unreadable:
        return path


def parse_some(paths: Sequence[Path]) -> Iterator[FlightRecord | str]:
    """Yields each file's record, or its problem as a string.

    Files are recognized by their contents, not their names.
    """
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


CONTRADICTS = "its collectives aren't numbered as torch numbers them: some have no number or repeat an earlier one"
TOGETHER_S = 600.0  # between dumps of a rank's recorders, at most


def _choose_job(
    jobs: dict[str, dict[int, _DumpFile]], failed: Mapping[str, int]
) -> tuple[dict[int, _DumpFile], list[str]]:
    """Returns the dumps of one job by rank, and notes about skipped dumps of the same ranks.

    Chooses the file name prefix with the most files, including ``failed`` (unreadable) ones; among equals, the newest.
    Adds dumps with other prefixes if they are from other ranks (nodes can have different prefixes) or other backends.
    """

    def weight(prefix: str) -> tuple[int, float]:
        job_dumps = jobs[prefix]
        return len(job_dumps) + failed.get(prefix, 0), max(dump.modified for dump in job_dumps.values())

    order = sorted(jobs, key=weight, reverse=True)
    chosen: dict[int, _DumpFile] = {}
    skipped = []
    for prefix in order:
        job_dumps = jobs[prefix]
        common = chosen.keys() & job_dumps.keys()
        if common and all(_has_other_backends(chosen[rank], job_dumps[rank]) for rank in common):
            merged = {rank: _merge_recorders(chosen[rank], job_dumps[rank]) for rank in common}
            chosen.update(job_dumps | merged)
        elif common:
            names = sorted(dump.name for dump in job_dumps.values())
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            skipped.append(f"{names[0]}{more}: ignored, because other dumps here have the same ranks")
        else:
            chosen.update(job_dumps)
    return dict(sorted(chosen.items())), skipped


def _has_other_backends(first: _DumpFile, second: _DumpFile) -> bool:
    backends = first.backends & second.backends
    both_known = bool(first.backends and second.backends)
    return both_known and not backends and abs(first.modified - second.modified) < TOGETHER_S


def _merge_recorders(first: _DumpFile, second: _DumpFile) -> _DumpFile:
    return _DumpFile(first.name, flight_records.merged([first.record, second.record]), first.modified)


def _rank_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match["rank"]) if match else -1


def _prefix(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match["prefix"] if match else name


def _world(records: dict[int, FlightRecord], unreadable: list[int]) -> int:
    # Also counts members of groups, and unreadable files.
    members = [rank for record in records.values() for ranks in record.groups.values() for rank in ranks]
    return max([*records, *unreadable, *(rank for rank in members if 0 <= rank < MAX_RANKS)]) + 1
