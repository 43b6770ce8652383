"""Collects the evidence of an incident, in threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from shutil import rmtree
from typing import Any

import msgspec

from safelaunch.beacon import layout
from safelaunch.bundle.publication import roomier_directory
from safelaunch.bundle.staging import OURS, Staging
from safelaunch.capture import collect, gpu, inside, nccl_logs, nccl_ras
from safelaunch.capture.gather import gather_into
from safelaunch.capture.kernel_log import since
from safelaunch.capture.memory_kills import deaths_between, kill_counts, kills_of
from safelaunch.capture.node import Links, NodeSubject
from safelaunch.capture.pages import read_meta
from safelaunch.capture.sink import Gate, Sink
from safelaunch.job.paths import may_be_ours
from safelaunch.model import (
    Artifact,
    EarlyLook,
    Evidence,
    Gpu,
    Launched,
    Moment,
    NodeFiles,
    Outcome,
    RankEvidence,
    RankExit,
    RankFile,
    WrongResult,
    rank_words,
)
from safelaunch.model.evidence import software
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.kinds import CRASH, IncidentKind
from safelaunch.supervise.looks import Looks, with_late_processes, with_native_frames
from safelaunch.supervise.node_files import collect_node
from safelaunch.supervise.watch.progress import Watch
from safelaunch.system.decoding import from_builtins
from safelaunch.system.errors import CaptureError

EVIDENCE_DEADLINE_S = 34.0  # backstop: ranks and node have shorter ones

Exits = Callable[[], Mapping[int, RankExit]]


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    ranks: Mapping[int, collect.RankBasics]
    world_size: int
    notes: tuple[str, ...]
    early: tuple[EarlyLook, ...] = ()
    wrong_results: tuple[WrongResult, ...] = ()
    usual_gpus: tuple[Gpu, ...] = ()
    links: Links | None = None


def snapshot_of(watch: Watch, exits: Mapping[int, RankExit]) -> JobSnapshot:
    pages = watch.roster.pages()
    ranks: dict[int, collect.RankBasics] = {}
    for rank in sorted(set(pages) | set(watch.roster.workers)):
        page = pages.get(rank)
        if page is None:
            ranks[rank] = collect.RankBasics(pid=watch.roster.workers[rank].pid, exit=exits.get(rank))
            continue
        meta = read_meta(watch.roster.companion(page, layout.META_SUFFIX))
        ranks[rank] = collect.RankBasics(
            progress=msgspec.structs.replace(page.read(), history=watch.steps_of(rank)),
            pid=page.pid,
            page_name=page.name,
            exit=exits.get(rank),
            code_roots=meta.code_roots,
            gpu=meta.gpu,
        )
    return JobSnapshot(
        ranks, watch.world_size, watch.notes, watch.early, watch.wrong_results, watch.usual_gpus, watch.quiet_links
    )


@dataclass(frozen=True, slots=True)
class Timeline:
    moments: tuple[Moment, ...] = ()

    def plus(self, stage: str, at_s: float | None = None) -> Timeline:
        now = time.monotonic()
        then = now if at_s is None else at_s
        moment = Moment(stage, round(time.time() - (now - then), 4), round(then, 4))
        return Timeline((*self.moments, moment))


@dataclass(frozen=True, slots=True)
class DraftBundle:
    """The evidence of an incident, in an unpublished bundle. Pass it to ``publishing.finish``, or call ``discard``."""

    evidence: Evidence
    staging: Staging
    timeline: Timeline
    context: JobContext
    without_stacks: str = ""
    node: NodeFiles = field(default_factory=NodeFiles)

    def with_facts(self, **facts: Any) -> DraftBundle:
        return replace(self, evidence=msgspec.structs.replace(self.evidence, **facts))

    def discard(self) -> None:
        rmtree(self.staging.root, ignore_errors=True)
        self.context.unfinished.let_go(self.staging.root)


def take_evidence(
    kind: IncidentKind,
    looks: Looks,
    snapshot: JobSnapshot,
    context: JobContext,
    *,
    on_ranks_done: Callable[[], object] = lambda: None,
    timeline: Timeline | None = None,
    patience: float = 1.0,
) -> DraftBundle:
    """Collects the evidence that isn't in ``looks`` yet.

    Args:
        on_ranks_done: Called once the ranks are no longer needed.
    """
    timeline = timeline or Timeline()
    # Prefer a place outside the run directory: a cleaner could remove that, and $XDG_RUNTIME_DIR might be small.
    safe = may_be_ours(context.fallback_dir.parent)
    place = roomier_directory(context.fallback_dir, context.run_dir) if safe else context.run_dir
    root = context.unfinished.name(place, context.run_dir, kind.outcome)
    staging = Staging(root, context.redactor)
    context.unfinished.hold(root)
    pages = context.run_dir / "pages"
    sides: dict[int, RankEvidence] = {}
    newest: list[Looks] = []
    node_found: dict[str, Any] = {}
    kills = kill_counts()

    # From here on, nothing contains secrets of the job's output.
    snapshot = context.cleaned(snapshot)

    def ranks(gate: Gate) -> None:
        try:
            better = with_native_frames(with_late_processes(looks)) if kind.asks and kind.native else looks
            better = replace(better, taken=context.cleaned(better.taken))
            gate.put_all([], lambda: newest.append(better))
            collect.ranks(
                better.targets,
                better.taken,
                snapshot.ranks,
                pages,
                context.host,
                gate,
                sides,
                ask=kind.asks,
                patience=patience,
            )
        finally:
            on_ranks_done()

    roots = next((item.code_roots for item in snapshot.ranks.values() if item.code_roots), ())

    def node(gate: Gate) -> None:
        pid = looks.targets[0].pid if looks.targets else None
        killed = {"at_start": asdict(context.kills_at_start), "now": asdict(kills)}
        subject = NodeSubject(pid, roots, looks.env, killed, snapshot.usual_gpus, snapshot.links)
        collect_node(context, gate, node_found, subject)

    gather_into(staging, {"ranks": ranks, f"node/{context.host}": node}, deadline_s=EVIDENCE_DEADLINE_S * patience)
    looks = newest[0] if newest else replace(looks, taken=context.cleaned(looks.taken))
    for target in looks.targets:
        if target.rank not in sides:
            about_rank = snapshot.ranks.get(target.rank, collect.RankBasics())
            sides[target.rank] = collect.at_hand(target, looks.taken, about_rank, context.host, staging)
    for rank in sorted(snapshot.ranks.keys() - sides.keys()):
        sides[rank] = collect.of_ended(rank, snapshot.ranks[rank], pages, context.host, staging)
    timeline = timeline.plus("evidence complete")
    node_files = NodeFiles(**node_found)
    kernel_log = node_files.kernel_log
    of_this_run = since(str(context.launch.get("started", "")), kernel_log.splitlines())
    complete = [
        msgspec.structs.replace(
            side,
            memory_kills=context.cleaned(kills_of(side.pid, context.kills_at_start, kills, kernel_log)),
            deaths=context.cleaned(_deaths_of(side, kernel_log)),
            gpu_errors=context.cleaned(gpu.errors_of(side.pid, side.gpu, of_this_run)),
        )
        for side in sides.values()
    ]
    complete = _with_nccl_logs(complete, looks, context, staging)
    for side in complete:
        add_rank(side, staging)
    evidence = _evidence(kind.outcome, complete, snapshot.world_size)
    evidence = msgspec.structs.replace(
        evidence,
        notes=(*snapshot.notes, *_read_from_inside(looks)),
        early=snapshot.early,
        wrong_results=snapshot.wrong_results,
        launched=_launched(context),
        time=_now(),
        versions=software(node_files.versions),
        gpus=node_files.gpus.uses(context.host) if node_files.gpus is not None else (),
        links=node_files.resources.links(context.host) if node_files.resources is not None else (),
    )
    return DraftBundle(evidence, staging, timeline, context, _without_stacks(looks), node_files)


def _deaths_of(rank: RankEvidence, kernel_log: str) -> tuple[str, ...]:
    living = {state.pid for child in rank.children for state in child.states}
    return deaths_between(rank.pid, max(living), living, kernel_log) if living else ()


def with_nccl(collected: DraftBundle, *, spare: str) -> DraftBundle:
    """Adds the report of NCCL's RAS service, if a rank has loaded NCCL.

    Call it last, because it takes up to ``nccl_ras.DEADLINE_S``.
    """
    ranks, context = collected.evidence.ranks, collected.context
    libraries = dict.fromkeys(rank.flight_record.library for rank in ranks if rank.flight_record is not None)
    pids = [rank.pid for rank in ranks if rank.pid and rank.exit is None]
    answer = nccl_ras.ask(pids, libraries, spare=spare)
    if answer is None:
        return collected
    path, text = f"node/{context.host}/{nccl_ras.FILE}", context.cleaned(answer.value)
    artifact = answer.artifact(path)
    try:
        witness = nccl_ras.parse(text, path) if text else None
    except CaptureError as error:
        witness, artifact = None, msgspec.structs.replace(artifact, note=f"{artifact.note}; {error}".strip("; "))
    collected.staging.add(artifact, text)
    timeline = collected.timeline.plus("NCCL asked")
    return replace(collected.with_facts(nccl=witness), timeline=timeline)


def add_rank(side: RankEvidence, staging: Staging) -> None:
    staging.add_json(Artifact(f"ranks/{side.rank}/rank.json", OURS, 0.0), RankFile.of(side))


def local_evidence(looks: Looks, snapshot: JobSnapshot, context: JobContext) -> Evidence:
    evidence, counts = evidence_of(CRASH, looks, snapshot, context), kill_counts()
    complete = [
        msgspec.structs.replace(side, memory_kills=kills_of(side.pid, context.kills_at_start, counts, ""))
        for side in evidence.ranks
    ]
    return msgspec.structs.replace(evidence, ranks=tuple(_with_nccl_logs(complete, looks, context)))


def evidence_of(
    kind: IncidentKind, looks: Looks, snapshot: JobSnapshot, context: JobContext, *, patience: float = 1.0
) -> Evidence:
    """Returns evidence without writing a bundle."""
    nowhere, pages = Sink(context.redactor), context.run_dir / "pages"
    snapshot = replace(snapshot, ranks=context.cleaned(snapshot.ranks))
    taken = context.cleaned(looks.taken)
    sides = list(
        collect.ranks(
            looks.targets, taken, snapshot.ranks, pages, context.host, nowhere, ask=kind.asks, patience=patience
        )
    )
    for rank in sorted(snapshot.ranks.keys() - {target.rank for target in looks.targets}):
        sides.append(collect.of_ended(rank, snapshot.ranks[rank], pages, context.host, nowhere))
    evidence = _evidence(kind.outcome, sides, snapshot.world_size)
    return msgspec.structs.replace(evidence, launched=_launched(context), time=_now())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _launched(context: JobContext) -> Launched:
    return from_builtins(context.launch, Launched)


def _without_stacks(looks: Looks) -> str:
    ranks = [rank for look in looks.taken for rank in look.ranks.values()]
    stacks = [
        process.stack
        for rank in ranks
        for process in (rank.main, *rank.children)
        if process and process.state and process.state.state not in "ZX"  # an ended process has no stack
    ]
    reasons = {stack.missing for stack in stacks}
    return next(iter(reasons)) if len(reasons) == 1 and not any(stack.value for stack in stacks) else ""


def _read_from_inside(looks: Looks) -> tuple[str, ...]:
    by_note: dict[str, set[int]] = {}
    ranks: dict[int, str] = {}
    for look in looks.taken:
        for number, rank in look.ranks.items():
            stack = rank.main.stack if rank.main is not None else None
            if stack is not None and stack.value is not None and stack.value.how == inside.HOW:
                ranks.setdefault(number, stack.note)
    for number, note in ranks.items():
        by_note.setdefault(note, set()).add(number)
    return tuple(f"stacks of {rank_words(numbers)}: {note}" for note, numbers in by_note.items())


def _evidence(outcome: Outcome, ranks: Sequence[RankEvidence], world_size: int) -> Evidence:
    present = {rank.rank for rank in ranks}
    missing = tuple(rank for rank in range(world_size) if rank not in present)
    in_order = tuple(sorted(ranks, key=lambda evidence: evidence.rank))
    return Evidence(outcome=outcome, world_size=world_size, ranks=in_order, missing_ranks=missing)


def _with_nccl_logs(
    sides: Sequence[RankEvidence], looks: Looks, context: JobContext, staging: Staging | None = None
) -> list[RankEvidence]:
    """Adds NCCL's warnings to the ranks' evidence.

    Reads them from the run directory, or else from ``NCCL_DEBUG_FILE``, which is copied to ``staging``.
    """
    folder, pids = f"node/{context.host}", [side.pid for side in sides]
    logs = nccl_logs.logs_of(sorted((context.run_dir / "flight_recorder").glob("*nccl*")), folder, pids)
    pattern = looks.env.value.get("NCCL_DEBUG_FILE", "") if looks.env is not None and looks.env.value else ""
    if pattern and not logs:
        paths = list(dict.fromkeys(nccl_logs.path_of(pattern, context.host, pid) for pid in pids))
        for path in paths:
            if staging is not None and path.is_file():
                staging.add_file(Artifact(f"{folder}/{path.name}", "NCCL_DEBUG_FILE", 0.0), path)
        logs = nccl_logs.logs_of(paths, folder, pids)
    cleaned = context.cleaned(dict(logs))
    return [msgspec.structs.replace(side, nccl_log=cleaned.get(side.pid)) for side in sides]
