"""The evidence of an incident: what the looks at the ranks have, the ranks' own records, their logs, and their node.

Everything here runs in threads of the supervisor, so it keeps handling signals and the job's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec

from safelaunch.beacon import layout
from safelaunch.bundle.staging import (
    OURS,
    Staging,
    roomier,
)
from safelaunch.capture import collect, gpu, inside, nccl_logs, nccl_ras, node
from safelaunch.capture.gather import gather_into
from safelaunch.capture.kernel_log import since
from safelaunch.capture.memory_kills import deaths_between, kill_counts, kills_of
from safelaunch.capture.node import NodeSubject
from safelaunch.capture.pages import read_meta
from safelaunch.capture.result import Result
from safelaunch.capture.sink import FileGroup, Gate, Sink
from safelaunch.job.paths import may_be_ours
from safelaunch.model import (
    Artifact,
    EarlyLook,
    Evidence,
    Launched,
    Moment,
    NodeFiles,
    Outcome,
    RankEvidence,
    RankExit,
    RankFile,
    WrongResult,
    node_file,
    rank_words,
)
from safelaunch.model.evidence import software
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.kinds import CRASH, IncidentKind
from safelaunch.supervise.looks import Looks, native_where_it_tells, with_the_late
from safelaunch.supervise.watch.progress import Watch
from safelaunch.system.decoding import from_builtins
from safelaunch.system.errors import CaptureError

EVIDENCE_DEADLINE_S = 34.0  # of ranks and node, which have shorter ones of their own

Exits = Callable[[], Mapping[int, RankExit]]
"""The ranks that have ended so far, and how."""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The supervisor's knowledge of the ranks at the moment of an incident."""

    ranks: Mapping[int, collect.RankBasics]
    world_size: int
    notes: tuple[str, ...]
    early: tuple[EarlyLook, ...] = ()
    wrong_results: tuple[WrongResult, ...] = ()


def known_of(watch: Watch, exits: Mapping[int, RankExit]) -> JobSnapshot:
    """The ranks' pages and exits as they are now."""
    pages = watch.roster.pages()
    found: dict[int, collect.RankBasics] = {}
    for rank in sorted(set(pages) | set(watch.roster.workers)):
        page = pages.get(rank)
        if page is None:
            found[rank] = collect.RankBasics(pid=watch.roster.workers[rank].pid, exit=exits.get(rank))
            continue
        meta = read_meta(watch.roster.companion(page, layout.META_SUFFIX))
        found[rank] = collect.RankBasics(
            progress=msgspec.structs.replace(page.read(), history=watch.steps_of(rank)),
            pid=page.pid,
            page_name=page.name,
            exit=exits.get(rank),
            code_roots=meta.code_roots,
            gpu=meta.gpu,
        )
    return JobSnapshot(found, watch.world_size, watch.notes, watch.early, watch.wrong_results)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The stages of an incident in their order, for ``manifest.json``: how long it took us, and where that went."""

    moments: tuple[Moment, ...] = ()

    def plus(self, stage: str, at_s: float | None = None) -> Timeline:
        """One stage more, reached at ``at_s`` seconds of CLOCK_MONOTONIC (None: now)."""
        now = time.monotonic()
        then = now if at_s is None else at_s
        moment = Moment(stage, round(time.time() - (now - then), 4), round(then, 4))
        return Timeline((*self.moments, moment))


@dataclass(frozen=True, slots=True)
class Collected:
    """All evidence of an incident, in an unpublished bundle: call ``finish`` to publish it or ``discard``."""

    evidence: Evidence
    staging: Staging
    timeline: Timeline
    context: JobContext
    without_stacks: str = ""
    node: NodeFiles = field(default_factory=NodeFiles)

    def knowing(self, **facts: Any) -> Collected:
        """The same with other fields of the evidence."""
        return replace(self, evidence=msgspec.structs.replace(self.evidence, **facts))

    def discard(self) -> None:
        """Removes everything collected: it was no incident."""
        rmtree(self.staging.root, ignore_errors=True)
        self.context.unfinished.let_go(self.staging.root)


def take_evidence(
    kind: IncidentKind,
    looks: Looks,
    known: JobSnapshot,
    context: JobContext,
    *,
    ranks_seen: Callable[[], object] = lambda: None,
    timeline: Timeline | None = None,
    patience: float = 1.0,
) -> Collected:
    """Collects what the looks don't have yet. ``ranks_seen`` is called once the ranks may end; ``patience``: see
    ``collect.ranks``.
    """
    timeline = timeline or Timeline()
    # Outside the run directory if there is room elsewhere: a cleaner that removes that directory must not remove the
    # bundle with it, and $XDG_RUNTIME_DIR may be small.
    safe = may_be_ours(context.fallback_dir.parent)
    place = roomier(context.fallback_dir, context.run_dir) if safe else context.run_dir
    root = context.unfinished.name(place, context.run_dir, kind.outcome)
    staging = Staging(root, context.redactor)
    context.unfinished.hold(root)
    pages = context.run_dir / "pages"
    seen: dict[int, RankEvidence] = {}
    newest: list[Looks] = []
    node_found: dict[str, Any] = {}
    kills = kill_counts()

    # From here on, the job's output is free of its secrets. Verdict, bundle and screen are made of this.
    known = context.cleaned(known)

    def ranks(gate: Gate) -> None:
        try:
            better = native_where_it_tells(with_the_late(looks)) if kind.asks and kind.native else looks
            better = replace(better, taken=context.cleaned(better.taken))
            gate.put_all([], lambda: newest.append(better))
            collect.ranks(
                better.targets,
                better.taken,
                known.ranks,
                pages,
                context.host,
                gate,
                seen,
                ask=kind.asks,
                patience=patience,
            )
        finally:
            ranks_seen()

    roots = next((item.code_roots for item in known.ranks.values() if item.code_roots), ())

    def node(gate: Gate) -> None:
        pid = looks.targets[0].pid if looks.targets else None
        killed = {"at_start": asdict(context.kills_at_start), "now": asdict(kills)}
        _collect_node(context, gate, node_found, NodeSubject(pid, roots, looks.env, killed))

    gather_into(staging, {"ranks": ranks, f"node/{context.host}": node}, deadline_s=EVIDENCE_DEADLINE_S * patience)
    looks = newest[0] if newest else replace(looks, taken=context.cleaned(looks.taken))
    for target in looks.targets:
        if target.rank not in seen:
            about_rank = known.ranks.get(target.rank, collect.RankBasics())
            seen[target.rank] = collect.at_hand(target, looks.taken, about_rank, context.host, staging)
    for rank in sorted(known.ranks.keys() - seen.keys()):
        seen[rank] = collect.of_ended(rank, known.ranks[rank], pages, context.host, staging)
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
        for side in seen.values()
    ]
    complete = _with_nccl_logs(complete, looks, context, staging)
    for side in complete:
        add_rank(side, staging)
    evidence = _evidence(kind.outcome, complete, known.world_size)
    evidence = msgspec.structs.replace(
        evidence,
        notes=(*known.notes, *_read_from_inside(looks)),
        early=known.early,
        wrong_results=known.wrong_results,
        launched=_launched(context),
        time=_now(),
        versions=software(node_files.versions),
        gpus=node_files.gpus.uses(context.host) if node_files.gpus is not None else (),
    )
    return Collected(evidence, staging, timeline, context, _without_stacks(looks), node_files)


def _deaths_of(rank: RankEvidence, kernel_log: str) -> tuple[str, ...]:
    living = {state.pid for child in rank.children for state in child.states}
    return deaths_between(rank.pid, max(living), living, kernel_log) if living else ()


def with_nccl(found: Collected, *, spare: str) -> Collected:
    """The same with what NCCL's RAS service says; ``spare``: see ``nccl_ras.ask``. Last, lest it costs other evidence.

    Takes ``nccl_ras.DEADLINE_S`` at most; nothing where no rank has loaded NCCL.
    """
    ranks, context = found.evidence.ranks, found.context
    libraries = dict.fromkeys(rank.flight_record.library for rank in ranks if rank.flight_record is not None)
    pids = [rank.pid for rank in ranks if rank.pid and rank.exit is None]
    answer = nccl_ras.ask(pids, libraries, spare=spare)
    if answer is None:
        return found
    path, text = f"node/{context.host}/{nccl_ras.FILE}", context.cleaned(answer.value)
    artifact = answer.artifact(path)
    try:
        witness = nccl_ras.parse(text, path) if text else None
    except CaptureError as error:
        witness, artifact = None, msgspec.structs.replace(artifact, note=f"{artifact.note}; {error}".strip("; "))
    found.staging.add(artifact, text)
    timeline = found.timeline.plus("NCCL asked")
    return replace(found.knowing(nccl=witness), timeline=timeline)


def add_rank(side: RankEvidence, staging: Staging) -> None:
    staging.add_json(Artifact(f"ranks/{side.rank}/rank.json", OURS, 0.0), RankFile.of(side))


def local_evidence(looks: Looks, known: JobSnapshot, context: JobContext) -> Evidence:
    """This node's evidence of a crash as it is known at once: for the other nodes, who wait for it."""
    found, counts = evidence_of(CRASH, looks, known, context), kill_counts()
    complete = [
        msgspec.structs.replace(side, memory_kills=kills_of(side.pid, context.kills_at_start, counts, ""))
        for side in found.ranks
    ]
    return msgspec.structs.replace(found, ranks=tuple(_with_nccl_logs(complete, looks, context)))


def evidence_of(
    kind: IncidentKind, looks: Looks, known: JobSnapshot, context: JobContext, *, patience: float = 1.0
) -> Evidence:
    """What the looks and the ranks themselves tell, without a bundle. ``patience``: as in ``take_evidence``."""
    nowhere, pages = Sink(context.redactor), context.run_dir / "pages"
    known = replace(known, ranks=context.cleaned(known.ranks))
    taken = context.cleaned(looks.taken)
    seen = list(
        collect.ranks(looks.targets, taken, known.ranks, pages, context.host, nowhere, ask=kind.asks, patience=patience)
    )
    for rank in sorted(known.ranks.keys() - {target.rank for target in looks.targets}):
        seen.append(collect.of_ended(rank, known.ranks[rank], pages, context.host, nowhere))
    found = _evidence(kind.outcome, seen, known.world_size)
    return msgspec.structs.replace(found, launched=_launched(context), time=_now())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _launched(context: JobContext) -> Launched:
    return from_builtins(context.launch, Launched)


def _without_stacks(looks: Looks) -> str:
    """Why no process's stack could be read: no py-spy, no permission. Empty if one was read, or reasons differ."""
    ranks = [rank for look in looks.taken for rank in look.ranks.values()]
    found = [
        process.stack
        for rank in ranks
        for process in (rank.main, *rank.children)
        if process and process.state and process.state.state not in "ZX"  # an ended process has no stack
    ]
    reasons = {stack.missing for stack in found}
    return next(iter(reasons)) if len(reasons) == 1 and not any(stack.value for stack in found) else ""


def _read_from_inside(looks: Looks) -> tuple[str, ...]:
    """A line about the ranks that have sent their stacks themselves, as py-spy could not read them."""
    found: dict[str, set[int]] = {}
    ranks: dict[int, str] = {}
    for look in looks.taken:
        for number, rank in look.ranks.items():
            stack = rank.main.stack if rank.main is not None else None
            if stack is not None and stack.value is not None and stack.value.how == inside.HOW:
                ranks.setdefault(number, stack.note)
    for number, note in ranks.items():
        found.setdefault(note, set()).add(number)
    return tuple(f"stacks of {rank_words(numbers)}: {note}" for note, numbers in found.items())


def _evidence(outcome: Outcome, ranks: Sequence[RankEvidence], world_size: int) -> Evidence:
    """The evidence of all ranks that left any, by number; the others are unknown."""
    there = {rank.rank for rank in ranks}
    missing = tuple(rank for rank in range(world_size) if rank not in there)
    everybody = tuple(sorted(ranks, key=lambda evidence: evidence.rank))
    return Evidence(outcome=outcome, world_size=world_size, ranks=everybody, missing_ranks=missing)


# --- the node's part: GPUs, kernel log, versions, resources, environment, and the job's own files ---------------------


def _collect_node(context: JobContext, sink: Gate, found: dict[str, Any], asked: NodeSubject) -> None:
    """Collects the node's files, all at once; ``found`` gets their values by the fields of ``NodeFiles``."""
    folder = f"node/{context.host}"

    def ask(gate: Gate, name: str, source: Callable[[NodeSubject], Result[Any] | None]) -> None:
        result = source(asked)
        if result is None:
            return
        value, step = context.cleaned(result.value), FileGroup(gate)
        artifact = result.artifact(f"{folder}/{node_file(name)}")
        step.add(artifact, value) if isinstance(value, str) else step.add_json(artifact, value)
        step.done(lambda: found.update({name: value} if value is not None else {}))

    calls: dict[str, Callable[[Gate], object]] = {
        f"{folder}/{node_file(name)}": lambda gate, name=name, source=source: ask(gate, name, source)  # type: ignore[misc]
        for name, source in node.sources().items()
    }
    calls[folder] = lambda gate: _run_files(context.run_dir, folder, gate)
    gather_into(sink, calls, deadline_s=node.DEADLINE_S + 2.0)


def _with_nccl_logs(
    sides: Sequence[RankEvidence], looks: Looks, context: JobContext, staging: Staging | None = None
) -> list[RankEvidence]:
    """The ranks with what NCCL warned of: in the run directory, else where the user's ``NCCL_DEBUG_FILE`` says.

    Then ``staging`` gets these files as well; those of the run directory are there already.
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
    told = context.cleaned(dict(logs))
    return [msgspec.structs.replace(side, nccl_log=told.get(side.pid)) for side in sides]


def _run_files(run_dir: Path, folder: str, sink: Sink) -> None:
    """Collects the dumps and logs that torch, NCCL and the beacons left in the run directory."""
    for path in sorted((run_dir / "flight_recorder").glob("*")):  # a cleaner of /tmp may have removed it
        dump = "trace_rank" in path.name
        place = f"flight_recorder/{path.name}" if dump else f"{folder}/{path.name}"
        sink.add_file(Artifact(place, "written by the job", 0.0), path, dump=dump)
    log = run_dir / layout.LOG
    if log.exists():
        sink.add_file(Artifact(f"{folder}/beacon.log", "beacon", 0.0), log)
