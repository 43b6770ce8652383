from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from safelaunch.bundle.reading.dumps import parse_some
from safelaunch.bundle.reading.evidence import EvidenceSource, evidence_on
from safelaunch.bundle.reading.files import LINK, Unreadable, read_limited, within
from safelaunch.bundle.reading.parallel import parse_all
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.capture.flight_recorder import NCCL_ONLY
from safelaunch.capture.user_source import SOURCE_FILE
from safelaunch.model import (
    OWN_RECORDS,
    WRONG_RESULTS_FILE,
    BundlePlace,
    EarlyLook,
    FlightRecord,
    Gpus,
    GpuUse,
    Launched,
    LinkErrors,
    Manifest,
    NcclWitness,
    NodeEvidence,
    Outcome,
    Processes,
    Progress,
    RankEvidence,
    RankFile,
    Rendezvous,
    Resources,
    Verdict,
    WrongResult,
)
from safelaunch.model.evidence import software
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import exists, is_dir, is_file

_T = TypeVar("_T")
MAX_RECORD_BYTES = 64 << 20
MAX_LOG_BYTES = 8 << 20
MAX_NODES = 65_536
MAX_EARLY = 64
_RANK = re.compile(r"0|[1-9][0-9]{0,5}")


class EarlierVerdict(msgspec.Struct):
    outcome: Outcome | None = None
    bundle: BundlePlace | None = None
    time: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)


class BundleFolder:
    """An untrusted, possibly incomplete bundle. Reading adds to ``problems``."""

    def __init__(self, root: Path, most_bytes: int = MAX_RECORD_BYTES) -> None:
        self.root = root
        self._most_bytes = most_bytes
        self.problems: list[str] = []

    def json(self, name: str, kind: type[_T]) -> _T | None:
        """Returns the record in a file; None if the file is missing or damaged. Damage is added to ``problems``."""
        data = self._bytes(name, self._most_bytes)
        if data is None:
            return None
        try:
            return from_json(data, kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            self.problems.append(f"{name} is damaged: {error}")
        except MemoryError:
            self.problems.append(f"{name} needs more memory than safelaunch allows for one file")
        return None

    def text(self, name: str) -> str:
        return (self._bytes(name, min(MAX_LOG_BYTES, self._most_bytes)) or b"").decode(errors="replace")

    def _bytes(self, name: str, limit_bytes: int) -> bytes | None:
        path = self.root / name
        try:
            return read_limited(path, limit_bytes) if exists(path) else None
        except Unreadable as error:
            self.problems.append(f"{name}: {error.message}")
            return None

    def numbers(self) -> list[int]:
        ranks = []
        for path in sorted((self.root / "ranks").iterdir()):
            if not path.name[:1].isdigit() or not is_dir(path):
                continue
            if not _RANK.fullmatch(path.name) or int(path.name) >= MAX_RANKS:
                self.problems.append(f"ranks/{path.name}: the name is not a rank number")
            elif path.is_symlink():
                self.problems.append(f"ranks/{path.name}: {LINK}")
            else:
                ranks.append(int(path.name))
        return sorted(ranks)

    def hosts(self) -> list[str]:
        try:
            paths = sorted((self.root / "node").iterdir())[:MAX_NODES]
        except OSError:
            return []
        return [path.name for path in paths if not path.is_symlink() and is_dir(path)]

    def flight_records(self, numbers: Sequence[int], manifest: Manifest) -> dict[int, FlightRecord]:
        """Returns each rank's record from its pickle, which has frames, or else from its JSON.

        Skips recorders of backends that this job doesn't use.
        """
        blind = {artifact.path for artifact in manifest.artifacts if artifact.note == NCCL_ONLY}
        records: dict[int, FlightRecord] = {}
        for ending in (".pickle", ".json"):
            paths = {n: self.root / f"ranks/{n}/flight_recorder{ending}" for n in numbers if n not in records}
            paths = {n: path for n, path in paths.items() if exists(path) and f"ranks/{n}/{path.name}" not in blind}
            for number, record in zip(paths, parse_all(list(paths.values()), parse_some), strict=True):
                if isinstance(record, str):
                    self.problems.append(f"ranks/{number}/flight_recorder{ending}: {record}")
                else:
                    records[number] = record
        return records


def is_bundle(path: Path) -> bool:
    # Unlike pathlib, os.path doesn't raise for a link to a forbidden or missing place.
    return is_file(path / "manifest.json") and is_dir(path / "ranks")


def is_slow_bundle(path: Path) -> bool:
    """Returns whether this is the bundle of a slow rank. It has a recording instead of ranks."""
    return is_file(path / "manifest.json") and is_file(path / "readings.json") and not exists(path / "ranks")


def complete_bundle(roots: Sequence[Path]) -> Path | None:
    """Returns the bundle that has every rank, if all other bundles are parts of it; else None."""
    verdicts = [BundleFolder(root).json("verdict.json", EarlierVerdict) for root in roots]
    places = [verdict.bundle if verdict is not None else None for verdict in verdicts]
    whole = [root for root, place in zip(roots, places, strict=True) if place is not None and place.whole]
    same = {(place.host, place.path) if place is not None else None for place in places}
    return whole[0] if len(whole) == len(same) == 1 else None


def read_bundle(root: Path) -> EvidenceSource:
    """Returns a bundle's evidence. Never raises because of the bundle's contents."""
    bundle = BundleFolder(root)
    if is_slow_bundle(root):
        return _slow_bundle(bundle)
    within(root, root / "ranks")
    manifest = bundle.json("manifest.json", Manifest) or Manifest()
    verdict = bundle.json("verdict.json", EarlierVerdict) or EarlierVerdict()
    numbers = bundle.numbers()
    records = bundle.flight_records(numbers, manifest)
    ranks = tuple(_rank(bundle, number, manifest.host, records) for number in numbers)
    job = manifest.job
    worlds = {"manifest.json": job.world_size}
    worlds |= {f"ranks/{r.rank}/progress.json": r.progress.world_size for r in ranks if r.progress is not None}
    for name, size in worlds.items():
        if not 0 <= size <= MAX_RANKS:
            bundle.problems.append(f"{name}: ignored, because it claims a job of {size} ranks")
    sizes = [size for size in worlds.values() if 0 <= size <= MAX_RANKS]
    outcome = job.outcome
    if not job.world_size and verdict.outcome is not None:
        outcome = verdict.outcome  # older versions don't have it in the manifest
    evidence = msgspec.structs.replace(
        evidence_on(outcome, ranks, max([0, *sizes])),
        stall_s=manifest.watch.stalled_s,
        threshold_s=manifest.watch.threshold_s,
        threshold_why=manifest.watch.why,
        answer=manifest.watch.answer,
        work=manifest.watch.work,
        moving=job.moving,
        for_finding=job.for_finding,
        notes=manifest.notes,
        nodes=_nodes(bundle),
        nccl=_nccl(bundle),
        early=(bundle.json("early.json", tuple[EarlyLook, ...]) or ())[:MAX_EARLY],
        wrong_results=(bundle.json(WRONG_RESULTS_FILE, tuple[WrongResult, ...]) or ())[:MAX_EARLY],
        rendezvous=bundle.json("rendezvous.json", Rendezvous),
        launched=bundle.json("launch.json", Launched),
        time=verdict.time or _utc(manifest.written_unix_s),
        versions=verdict.versions or _versions(bundle, manifest.host),
        gpus=_gpus(bundle),
        links=_links(bundle),
        earlier=manifest.earlier,
    )
    source = bundle.json(SOURCE_FILE, dict[str, str])
    return EvidenceSource("a bundle", evidence, tuple(bundle.problems), taken=manifest.taken, source=source)


def _slow_bundle(bundle: BundleFolder) -> EvidenceSource:
    stored = bundle.json("verdict.json", Verdict)
    if stored is None or stored.outcome != "slow":
        problems = "; ".join(bundle.problems) or "verdict.json has no such verdict"
        raise Unreadable(f"the verdict of this slow rank is missing or damaged: {problems}")
    return EvidenceSource("a bundle of a slow rank", evidence_on("slow", (), 0), stored=stored)


def _versions(bundle: BundleFolder, host: str) -> dict[str, str]:
    # ``host`` comes from the bundle, so it can be any text.
    versions = bundle.json(f"node/{host}/versions.json", dict[str, str]) if host in bundle.hosts() else None
    return software(versions or {})


def _utc(unix_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s)) if unix_s else ""
    except (OverflowError, ValueError, OSError):
        return ""


def _nodes(bundle: BundleFolder) -> tuple[NodeEvidence, ...]:
    nodes = bundle.json("nodes.json", tuple[NodeEvidence, ...]) or ()
    if any(not 0 <= rank < MAX_RANKS for node in nodes for rank in node.ranks):
        bundle.problems.append("nodes.json: ignored, because it lists impossible ranks")
        return ()
    return nodes[:MAX_NODES]


def _nccl(bundle: BundleFolder) -> NcclWitness | None:
    from safelaunch.capture import nccl_ras

    for name in bundle.hosts():
        path = f"node/{name}/{nccl_ras.FILE}"
        if text := bundle.text(path):
            try:
                return nccl_ras.parse(text, path)
            except CaptureError as error:
                bundle.problems.append(f"{path}: {error.message}")
    return None


def _gpus(bundle: BundleFolder) -> tuple[GpuUse, ...]:
    uses: list[GpuUse] = []
    for name in bundle.hosts():
        with suppress(msgspec.DecodeError, RecursionError):
            uses += from_json(bundle.text(f"node/{name}/gpus.json") or "{}", Gpus).uses(name)
    return tuple(uses)


def _links(bundle: BundleFolder) -> tuple[LinkErrors, ...]:
    links: list[LinkErrors] = []
    for name in bundle.hosts():
        with suppress(msgspec.MsgspecError, RecursionError):
            links += from_json(bundle.text(f"node/{name}/resources.json") or "{}", Resources).links(name)
    return tuple(links)


def _rank(bundle: BundleFolder, number: int, host: str, records: Mapping[int, FlightRecord]) -> RankEvidence:
    folder = f"ranks/{number}"
    identity = bundle.json(f"{folder}/rank.json", RankFile)
    progress = bundle.json(f"{folder}/progress.json", Progress)
    processes = bundle.json(f"{folder}/proc.json", Processes) or Processes()
    if identity is None:  # older versions don't write it
        pid = progress.pid if progress else processes.main.pid if processes.main else 0
        identity = RankFile(host=host, pid=pid, local_rank=progress.local_rank if progress else -1)
    rank_records = {name: bundle.json(f"{folder}/{name}.json", kind) for name, kind in OWN_RECORDS.items()}
    return RankEvidence(
        rank=number,
        **identity.fields,
        progress=progress,
        main=processes.main,
        children=processes.children,
        flight_record=records.get(number),
        **{name: record for name, record in rank_records.items() if record is not None},
        log_tail=bundle.text(f"{folder}/log_tail.txt"),
    )
