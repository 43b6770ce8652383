"""A bundle → the evidence that its verdict was reached from; several bundles of one job → one evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from safelaunch.capture import flight_dump
from safelaunch.errors import CaptureError
from safelaunch.model import (
    CaughtException,
    Evidence,
    ExitCall,
    FlightRecord,
    Outcome,
    ProcessEvidence,
    Progress,
    RankEvidence,
    RankException,
    RankFile,
)
from safelaunch.postmortem.found import Found, Unreadable, read_limited

_T = TypeVar("_T")


class _Processes(msgspec.Struct):
    main: ProcessEvidence | None = None
    children: tuple[ProcessEvidence, ...] = ()


class _Watch(msgspec.Struct):
    stalled_s: float = 0.0
    threshold_s: float = 0.0
    why: str = ""


class _Job(msgspec.Struct):
    outcome: Outcome = "hang"
    world_size: int = 0
    moving: bool = False


class _Manifest(msgspec.Struct):
    host: str = ""
    watch: _Watch = msgspec.field(default_factory=_Watch)
    job: _Job = msgspec.field(default_factory=_Job)
    notes: tuple[str, ...] = ()


class _Bundle:
    """One bundle while it is read; ``problems`` grows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self._shared = flight_dump.Shared()

    def json(self, name: str, kind: type[_T]) -> _T | None:
        """The record in file ``name``; None where there is none, or where it is damaged (then a problem)."""
        path = self.root / name
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(read_limited(path), type=kind)
        except Unreadable as error:
            self.problems.append(f"{name}: {error.message}")
        except (msgspec.DecodeError, RecursionError) as error:
            self.problems.append(f"{name} is damaged: {error}")
        return None

    def text(self, name: str) -> str:
        path = self.root / name
        if not path.exists():
            return ""
        try:
            return read_limited(path).decode(errors="replace")
        except Unreadable as error:
            self.problems.append(f"{name}: {error.message}")
            return ""

    def flight_record(self, folder: str) -> FlightRecord | None:
        """The pickle, which has frames, else the JSON."""
        for name, parse in (
            (f"{folder}/flight_recorder.pickle", flight_dump.parse_pickle),
            (f"{folder}/flight_recorder.json", flight_dump.parse_json),
        ):
            if not (self.root / name).exists():
                continue
            try:
                return parse(read_limited(self.root / name), self._shared)
            except (Unreadable, CaptureError) as error:
                self.problems.append(f"{name}: {error.message}")
        return None


def is_bundle(path: Path) -> bool:
    return (path / "manifest.json").is_file() and (path / "ranks").is_dir()


def read_bundle(root: Path) -> Found:
    """Everything that a bundle holds of its ranks. Never raises for what is in it."""
    bundle = _Bundle(root)
    manifest = bundle.json("manifest.json", _Manifest) or _Manifest()
    verdict = bundle.json("verdict.json", dict[str, Any]) or {}
    numbers = sorted(int(path.name) for path in (root / "ranks").iterdir() if path.name.isdigit() and path.is_dir())
    ranks = tuple(_rank(bundle, number, manifest.host) for number in numbers)
    job = manifest.job
    world = max([job.world_size, *(number + 1 for number in numbers), *(_world(rank) for rank in ranks)])
    outcome = job.outcome
    if not job.world_size and verdict.get("outcome") in ("hang", "crash", "dump"):
        outcome = verdict["outcome"]  # one of before the manifest said it
    evidence = Evidence(
        outcome=outcome,
        world_size=world,
        ranks=ranks,
        missing_ranks=tuple(sorted(set(range(world)) - set(numbers))),
        stall_s=manifest.watch.stalled_s,
        threshold_s=manifest.watch.threshold_s,
        threshold_why=manifest.watch.why,
        moving=job.moving,
        notes=manifest.notes,
    )
    return Found("a bundle", evidence, tuple(bundle.problems))


def merge(bundles: Sequence[Found], names: Sequence[str]) -> Found:
    """The bundles of one job's nodes as one evidence; ``names`` are their directories.

    Raises Unreadable where they cannot be of one job: the same rank in two of them, or worlds of different size.
    """
    seen: dict[int, str] = {}
    for found, name in zip(bundles, names, strict=True):
        for rank in found.evidence.ranks:
            if rank.rank in seen:
                raise Unreadable(f"rank {rank.rank} is in {seen[rank.rank]} and in {name}: name one of them")
            seen[rank.rank] = name
    worlds = {found.evidence.world_size for found in bundles}
    if len(worlds) > 1:
        raise Unreadable(f"jobs of {' and '.join(map(str, sorted(worlds)))} ranks: name one of the bundles")
    world = worlds.pop()
    first = bundles[0].evidence
    outcome: Outcome = next(
        (kind for kind in ("crash", "hang") if any(found.evidence.outcome == kind for found in bundles)), "dump"
    )
    ranks = sorted((rank for found in bundles for rank in found.evidence.ranks), key=lambda rank: rank.rank)
    evidence = msgspec.structs.replace(
        first,
        outcome=outcome,
        ranks=tuple(ranks),
        missing_ranks=tuple(sorted(set(range(world)) - set(seen))),
        stall_s=max(found.evidence.stall_s for found in bundles),
        moving=any(found.evidence.moving for found in bundles),
    )
    problems = [f"{name}/{text}" for found, name in zip(bundles, names, strict=True) for text in found.problems]
    files = {
        f"ranks/{rank.rank}/": f"{name}/ranks/{rank.rank}/"
        for found, name in zip(bundles, names, strict=True)
        for rank in found.evidence.ranks
    }
    return Found(f"{len(bundles)} bundles of one job", evidence, tuple(problems), files)


def _rank(bundle: _Bundle, number: int, host: str) -> RankEvidence:
    folder = f"ranks/{number}"
    known = bundle.json(f"{folder}/rank.json", RankFile)
    progress = bundle.json(f"{folder}/progress.json", Progress)
    processes = bundle.json(f"{folder}/proc.json", _Processes) or _Processes()
    if known is None:  # one of before there was such a file
        pid = progress.pid if progress else processes.main.pid if processes.main else 0
        known = RankFile(host=host, pid=pid, local_rank=progress.local_rank if progress else -1)
    return RankEvidence(
        rank=number,
        host=known.host,
        pid=known.pid,
        local_rank=known.local_rank,
        progress=progress,
        main=processes.main,
        children=processes.children,
        flight_record=bundle.flight_record(folder),
        gil=known.gil,
        exception=bundle.json(f"{folder}/exception.json", RankException),
        exit=known.exit,
        fatal=known.fatal,
        exit_call=bundle.json(f"{folder}/exit_call.json", ExitCall),
        caught=bundle.json(f"{folder}/caught.json", tuple[CaughtException, ...]) or (),
        memory_kills=known.memory_kills,
        beacon=known.beacon,
        code_roots=known.code_roots,
        log_tail=bundle.text(f"{folder}/log_tail.txt"),
    )


def _world(rank: RankEvidence) -> int:
    return rank.progress.world_size if rank.progress is not None else 0
