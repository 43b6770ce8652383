"""Reads a bundle back: the evidence for its verdict, that of several bundles of one job, and what reports show."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from safelaunch.bundle.reading.dumps import parse_some
from safelaunch.bundle.reading.guard import (
    LINK,
    FoundEvidence,
    Unreadable,
    evidence_of,
    parse_all,
    read_limited,
    within,
)
from safelaunch.capture.flight_dump import MAX_RANKS
from safelaunch.capture.flight_recorder import NCCL_ONLY
from safelaunch.capture.kernel_log import since
from safelaunch.capture.user_source import SOURCE_FILE
from safelaunch.model import (
    OWN_RECORDS,
    WRONG_RESULTS_FILE,
    Answer,
    BundlePlace,
    EarlyLook,
    FlightRecord,
    Gpus,
    GpuUse,
    Launched,
    Manifest,
    NcclWitness,
    NodeEvidence,
    NodeFiles,
    Outcome,
    Processes,
    Progress,
    RankEvidence,
    RankFile,
    Rendezvous,
    Resources,
    WrongResult,
    node_file,
)
from safelaunch.model.evidence import all_nodes, software
from safelaunch.report.about import LaunchFacts, Link, NodeSummary, ReportHeader
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import CaptureError
from safelaunch.system.files import exists, is_dir, is_file
from safelaunch.verdict.exceptions import has_lost_a_peer
from safelaunch.verdict.exits import failed_by_itself
from safelaunch.verdict.rhythm import is_foreign_job

_T = TypeVar("_T")
MAX_RECORD_BYTES = 64 << 20
MAX_LOG_BYTES = 8 << 20
MAX_NODES = 65_536
MAX_EARLY = 64
APART_S = 120.0  # the clocks of nodes differ
_RANK = re.compile(r"0|[1-9][0-9]{0,5}")


class _EarlierVerdict(msgspec.Struct):
    """The relevant part of an earlier verdict."""

    outcome: Outcome | None = None
    bundle: BundlePlace | None = None
    time: str = ""
    versions: dict[str, str] = msgspec.field(default_factory=dict)


class _Bundle:
    """One bundle while it is read; ``problems`` grows. It may be a stranger's, or half written."""

    def __init__(self, root: Path, most_bytes: int = MAX_RECORD_BYTES) -> None:
        self.root = root
        self._most_bytes = most_bytes
        self.problems: list[str] = []

    def json(self, name: str, kind: type[_T]) -> _T | None:
        """The record in file ``name``; None if it is missing or damaged (then it adds a problem)."""
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
        """The ranks that have a folder in the bundle."""
        found = []
        for path in sorted((self.root / "ranks").iterdir()):
            if not path.name[:1].isdigit() or not is_dir(path):
                continue
            if not _RANK.fullmatch(path.name) or int(path.name) >= MAX_RANKS:
                self.problems.append(f"ranks/{path.name}: the name is not a rank number")
            elif path.is_symlink():
                self.problems.append(f"ranks/{path.name}: {LINK}")
            else:
                found.append(int(path.name))
        return sorted(found)

    def hosts(self) -> list[str]:
        """The nodes that have a folder in the bundle."""
        try:
            paths = sorted((self.root / "node").iterdir())[:MAX_NODES]
        except OSError:
            return []
        return [path.name for path in paths if not path.is_symlink() and is_dir(path)]

    def flight_records(self, numbers: Sequence[int], manifest: Manifest) -> dict[int, FlightRecord]:
        """The record of each rank: from the pickle, which has frames, else from the JSON; none from a recorder that
        doesn't record this job's backend.
        """
        blind = {artifact.path for artifact in manifest.artifacts if artifact.note == NCCL_ONLY}
        found: dict[int, FlightRecord] = {}
        for ending in (".pickle", ".json"):
            paths = {n: self.root / f"ranks/{n}/flight_recorder{ending}" for n in numbers if n not in found}
            paths = {n: path for n, path in paths.items() if exists(path) and f"ranks/{n}/{path.name}" not in blind}
            for number, record in zip(paths, parse_all(list(paths.values()), parse_some), strict=True):
                if isinstance(record, str):
                    self.problems.append(f"ranks/{number}/flight_recorder{ending}: {record}")
                else:
                    found[number] = record
        return found


def is_bundle(path: Path) -> bool:
    # Unlike pathlib, os.path does not raise for a link to a forbidden or missing place.
    return is_file(path / "manifest.json") and is_dir(path / "ranks")


def whole_of(roots: Sequence[Path]) -> Path | None:
    """The one of these bundles that holds every rank, where the others are halves of it; else None."""
    told = [_Bundle(root).json("verdict.json", _EarlierVerdict) for root in roots]
    places = [one.bundle if one is not None else None for one in told]
    whole = [root for root, place in zip(roots, places, strict=True) if place is not None and place.whole]
    same = {(place.host, place.path) if place is not None else None for place in places}
    return whole[0] if len(whole) == len(same) == 1 else None


def read_bundle(root: Path) -> FoundEvidence:
    """Everything in a bundle about its ranks. Never raises for its contents."""
    within(root, root / "ranks")
    bundle = _Bundle(root)
    manifest = bundle.json("manifest.json", Manifest) or Manifest()
    told = bundle.json("verdict.json", _EarlierVerdict) or _EarlierVerdict()
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
    if not job.world_size and told.outcome is not None:
        outcome = told.outcome  # a bundle of an older version, whose manifest lacks it
    evidence = msgspec.structs.replace(
        evidence_of(outcome, ranks, max([0, *sizes])),
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
        time=told.time or _utc(manifest.written_unix_s),
        versions=told.versions or _versions(bundle, manifest.host),
        gpus=_gpus(bundle),
        earlier=manifest.earlier,
    )
    source = bundle.json(SOURCE_FILE, dict[str, str])
    return FoundEvidence("a bundle", evidence, tuple(bundle.problems), taken=manifest.taken, source=source)


def _versions(bundle: _Bundle, host: str) -> dict[str, str]:
    """``host``: as the bundle says, which may be any text."""
    known = bundle.json(f"node/{host}/versions.json", dict[str, str]) if host in bundle.hosts() else None
    return software(known or {})


def _utc(unix_s: float) -> str:
    """ISO 8601; empty for what can't be a time."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s)) if unix_s else ""
    except (OverflowError, ValueError, OSError):
        return ""


def _nodes(bundle: _Bundle) -> tuple[NodeEvidence, ...]:
    nodes = bundle.json("nodes.json", tuple[NodeEvidence, ...]) or ()
    if any(not 0 <= rank < MAX_RANKS for node in nodes for rank in node.ranks):
        bundle.problems.append("nodes.json: ignored, because it lists impossible ranks")
        return ()
    return nodes[:MAX_NODES]


def _nccl(bundle: _Bundle) -> NcclWitness | None:
    """The answer of NCCL's RAS service: of the one node that asked."""
    from safelaunch.capture import nccl_ras

    for name in bundle.hosts():
        path = f"node/{name}/{nccl_ras.FILE}"
        if text := bundle.text(path):
            try:
                return nccl_ras.parse(text, path)
            except CaptureError as error:
                bundle.problems.append(f"{path}: {error.message}")
    return None


def _gpus(bundle: _Bundle) -> tuple[GpuUse, ...]:
    found: list[GpuUse] = []
    for name in bundle.hosts():
        with suppress(msgspec.DecodeError, RecursionError):
            found += from_json(bundle.text(f"node/{name}/gpus.json") or "{}", Gpus).uses(name)
    return tuple(found)


def merge(bundles: Sequence[FoundEvidence], names: Sequence[str]) -> FoundEvidence:
    """Merges the bundles of one job's nodes into one evidence; ``names`` are their directories.

    Raises Unreadable if they belong to different jobs: the same rank in two of them, or different world sizes; and to
    different incidents: the job went on between them.
    """
    seen: dict[int, str] = {}
    for found, name in zip(bundles, names, strict=True):
        for rank in found.evidence.ranks:
            if rank.rank in seen:
                raise Unreadable(f"rank {rank.rank} is in {seen[rank.rank]} and in {name}: name one of these bundles")
            seen[rank.rank] = name
    worlds = {bundle.evidence.world_size for bundle in bundles}
    if len(worlds) > 1:
        raise Unreadable(f"it holds jobs of {' and '.join(map(str, sorted(worlds)))} ranks: name one of the bundles")
    _check_moments(bundles, names)
    world = worlds.pop()
    first = bundles[0].evidence
    outcomes = {bundle.evidence.outcome for bundle in bundles}
    outcome: Outcome = next((kind for kind in _WORST if kind in outcomes), "dump")
    # One supervisor has stopped its ranks for a hang, and those of the others lost their connections to them.
    stopped = _stopped_first(bundles) if outcomes >= {"hang", "crash"} else ()
    outcome = "hang" if stopped else outcome
    ranks = sorted((rank for bundle in bundles for rank in bundle.evidence.ranks), key=lambda rank: rank.rank)
    named = list(zip(names, bundles, strict=True))
    asked, witness = next(((name, f.evidence.nccl) for name, f in named if f.evidence.nccl is not None), ("", None))
    evidence = msgspec.structs.replace(
        first,
        outcome=outcome,
        ranks=tuple(ranks),
        missing_ranks=tuple(sorted(set(range(world)) - set(seen))),
        stall_s=max(bundle.evidence.stall_s for bundle in bundles),
        moving=any(bundle.evidence.moving for bundle in bundles),
        for_finding=any(bundle.evidence.for_finding for bundle in bundles),
        nodes=all_nodes([bundle.evidence for bundle in bundles]),
        nccl=witness,
        answer=next((one for one in _ANSWERS if any(f.evidence.answer == one for f in bundles)), None),
        wrong_results=tuple(dict.fromkeys(one for bundle in bundles for one in bundle.evidence.wrong_results)),
        launched=next((bundle.evidence.launched for bundle in bundles if bundle.evidence.launched is not None), None),
        stopped=stopped,
        gpus=tuple(one for bundle in bundles for one in bundle.evidence.gpus),
    )
    problems = [f"{name}/{text}" for name, found in named for text in found.problems]
    told = next((name for name, found in named if found.evidence.nodes), "")
    files = {"nodes.json": f"{told}/nodes.json"} if told else {}
    files |= {"early.json": f"{names[0]}/early.json"} if first.early else {}
    wrong = next((name for name, found in named if found.evidence.wrong_results), "")
    files |= {WRONG_RESULTS_FILE: f"{wrong}/{WRONG_RESULTS_FILE}"} if wrong else {}
    files |= {witness.file: f"{asked}/{witness.file}"} if witness is not None else {}
    files |= {f"ranks/{number}/": f"{name}/ranks/{number}/" for number, name in seen.items()}
    return FoundEvidence(f"{len(bundles)} bundles of one job", evidence, tuple(problems), files)


def _check_moments(bundles: Sequence[FoundEvidence], names: Sequence[str]) -> None:
    """Of one incident, every node has its last progress before the others have written what they saw. Where nobody
    counts steps, that is not known: the nodes may be looked at one after another.
    """
    counted = [(one, name) for one, name in zip(bundles, names, strict=True) if not is_foreign_job(one.evidence)]
    known = [(found.taken, name) for found, name in counted if all(found.taken)]
    if not known:
        return
    (_, written_s), earlier = min(known, key=lambda one: one[0][1])
    (progress_s, _), later = max(known, key=lambda one: one[0][0])
    if progress_s - written_s > APART_S:
        minutes = (progress_s - written_s) / 60
        raise Unreadable(
            f"these bundles are of different incidents: the job still made progress in {later} {minutes:.0f} minutes "
            f"after {earlier} was written. Name one of them"
        )


_ANSWERS: tuple[Answer, ...] = ("dead", "alive", "unseen", "unknown")  # a proof is of the evidence of all nodes
_WORST: tuple[Outcome, ...] = ("crash", "hang", "suspect")


def _stopped_first(bundles: Sequence[FoundEvidence]) -> tuple[int, ...]:
    """The ranks of the bundles of a hang, where all that failed elsewhere is that connections to peers were lost."""
    failed = [rank for bundle in bundles if bundle.evidence.outcome == "crash" for rank in bundle.evidence.ranks]
    if not failed or not any(map(has_lost_a_peer, failed)) or any(map(failed_by_itself, failed)):
        return ()
    return tuple(rank.rank for bundle in bundles if bundle.evidence.outcome == "hang" for rank in bundle.evidence.ranks)


def _rank(bundle: _Bundle, number: int, host: str, records: Mapping[int, FlightRecord]) -> RankEvidence:
    folder = f"ranks/{number}"
    known = bundle.json(f"{folder}/rank.json", RankFile)
    progress = bundle.json(f"{folder}/progress.json", Progress)
    processes = bundle.json(f"{folder}/proc.json", Processes) or Processes()
    if known is None:  # a bundle of an older version, without such a file
        pid = progress.pid if progress else processes.main.pid if processes.main else 0
        known = RankFile(host=host, pid=pid, local_rank=progress.local_rank if progress else -1)
    own = {name: bundle.json(f"{folder}/{name}.json", kind) for name, kind in OWN_RECORDS.items()}
    return RankEvidence(
        rank=number,
        **known.fields,
        progress=progress,
        main=processes.main,
        children=processes.children,
        flight_record=records.get(number),
        **{name: record for name, record in own.items() if record is not None},
        log_tail=bundle.text(f"{folder}/log_tail.txt"),
    )


# --- what it says of the job and its nodes, for reports ---------------------------------------------------------------

MOST_FOR_REPORTS = 4 << 20
MOST_NODES = 1024
MOST_LINES = 40
_MATTERS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "MASTER_", "UCX_", "FI_", "OMP_NUM_THREADS")
_NO_COUNTS = ("state", "rate", "speed_mbit", "mtu")
NOBODY: Mapping[str, NodeFiles] = {}


def about(root: Path, launch: LaunchFacts | None = None, own: Mapping[str, NodeFiles] = NOBODY) -> ReportHeader:
    """What the bundle in ``root`` says. Never raises for its contents: what is damaged is left out.

    ``launch``, and ``own`` by host: what is known without reading it.
    """
    bundle = _Bundle(root, MOST_FOR_REPORTS)
    launch = launch or bundle.json("launch.json", LaunchFacts) or LaunchFacts()
    written = bundle.json("manifest.json", Manifest) or Manifest()
    files = {host: own.get(host) or _files_of(bundle, host) for host in bundle.hosts()[:MOST_NODES]}
    nodes = tuple(_summary(host, known, launch.started) for host, known in files.items())
    return ReportHeader(root.name, written.written_unix_s, launch, nodes)


def about_all(roots: Sequence[Path]) -> ReportHeader:
    """What several bundles of one job say, those of its nodes: its start from the first, and all nodes."""
    each = [about(root) for root in roots]
    if not each:
        return ReportHeader()
    nodes = {node.host: node for one in each for node in one.nodes}
    latest = max(one.at_unix_s for one in each)
    return ReportHeader(each[0].bundle, latest, each[0].launch, tuple(nodes[host] for host in sorted(nodes)))


def _files_of(bundle: _Bundle, host: str) -> NodeFiles:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(NodeFiles):
        name = f"node/{host}/{node_file(field.name)}"
        value = bundle.text(name) if name.endswith(".txt") else bundle.json(name, field.type)
        found |= {field.name: value} if value else {}
    return NodeFiles(**found)


def _summary(host: str, files: NodeFiles, begun: str) -> NodeSummary:
    gpus, resources = files.gpus or Gpus(), files.resources or Resources()
    return NodeSummary(
        host=host,
        gpus=gpus.gpus,
        no_gpus=gpus.missing,
        cpus=resources.cpus or 0,
        load=resources.load,
        memory_total_bytes=resources.memory_bytes.get("MemTotal", 0),
        memory_available_bytes=resources.memory_bytes.get("MemAvailable", 0),
        disks=tuple(_used(place, disk) for place, disk in resources.disks.items() if "total_bytes" in disk),
        network=tuple(_link(name, link) for name, link in resources.network.items()),
        environment=tuple((name, text) for name, text in files.env.items() if name.startswith(_MATTERS)),
        versions=tuple(software(files.versions).items()),
        kernel_log=tuple(since(begun, files.kernel_log.splitlines())[-MOST_LINES:]),
    )


def _used(place: str, disk: Mapping[str, Any]) -> tuple[str, float]:
    total, free = disk.get("total_bytes"), disk.get("free_bytes")
    known = isinstance(total, (int, float)) and isinstance(free, (int, float)) and total > 0
    return place, 1 - free / total if known else 0.0  # type: ignore[operator]


def _link(name: str, link: Mapping[str, Any]) -> Link:
    speed = link.get("rate") or (f"{link['speed_mbit']} Mbit/s" if link.get("speed_mbit") else "")
    mtu = f"MTU {link['mtu']}" if link.get("mtu") else ""
    counted = [f"{count} {what.replace('_', ' ')}" for what, count in link.items() if what not in _NO_COUNTS and count]
    return Link(name, str(link.get("state", "")), ", ".join(filter(None, (str(speed), mtu))), ", ".join(counted))
