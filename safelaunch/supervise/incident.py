"""One incident, from the first closer look to the published bundle: looks → evidence → verdict → bundle.

Everything here runs in threads of the supervisor, so it keeps handling signals and the job's end.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Any, Literal

import msgspec

from safelaunch.beacon import layout
from safelaunch.bundle.onbundle import Notifier
from safelaunch.bundle.staging import (
    OURS,
    PUBLISH_DEADLINE_S,
    Keeping,
    Published,
    Staging,
    name_of,
    publish,
    rewrite,
    roomier,
)
from safelaunch.capture import collect, gpu
from safelaunch.capture.cgroups import KillCounts, deaths_between, kill_counts, kills_of
from safelaunch.capture.node import Subject, since
from safelaunch.capture.pages import read_meta
from safelaunch.capture.redaction import without_secrets
from safelaunch.capture.result import Gate, Sink, gather_into
from safelaunch.capture.user_source import SOURCE_FILE, Excerpts
from safelaunch.job.paths import Unfinished, may_be_ours, working_directory
from safelaunch.model import (
    Answer,
    Artifact,
    EarlyLook,
    Evidence,
    Inconsistency,
    Launched,
    Manifest,
    Moment,
    NodeEvidence,
    NodeFiles,
    Outcome,
    RankEvidence,
    RankExit,
    RankFile,
    Rendezvous,
    Verdict,
    Watched,
)
from safelaunch.supervise import recall
from safelaunch.supervise.cluster.evidence import Others
from safelaunch.supervise.cluster.messages import Action
from safelaunch.supervise.cluster.seen import PeerStatus
from safelaunch.supervise.documents import add_reports, job_of
from safelaunch.supervise.kinds import CRASH, RENDEZVOUS, Kind
from safelaunch.supervise.looks import Looks, native_where_it_tells, with_the_late
from safelaunch.supervise.node_evidence import collect_node, nccl_logs
from safelaunch.supervise.watch.job import Watch
from safelaunch.supervise.watch.rhythm import Threshold
from safelaunch.system.console import display, say
from safelaunch.system.decoding import from_builtins
from safelaunch.system.errors import CaptureError
from safelaunch.system.redaction.redactor import Redactor
from safelaunch.system.task import Task

EVIDENCE_DEADLINE_S = 34.0  # of ranks and node, which have shorter ones of their own

Exits = Callable[[], Mapping[int, RankExit]]
"""The ranks that have ended so far, and how."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an incident. ``without_stacks``: why no stack could be read, if one reason explains all.

    ``action``: what all nodes do about the job, if they have agreed; ``step``: the lowest of all ranks then.
    """

    verdict: Verdict
    evidence: Evidence
    published: Published
    without_stacks: str = ""
    action: Action | Literal[""] = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the nodes of the job have agreed on; of one node alone, nothing."""

    verdict: Verdict | None = None
    """None: they have not agreed on any, and this node judges alone"""
    name: str = ""
    """of the bundle that this node writes; empty: as ever"""
    others: Others = field(default_factory=Others)
    """of the other nodes, where this one has judged it all"""
    answer: Answer | None = None
    """of all nodes to whether the job is dead, where this one has judged it all"""
    action: Action | Literal[""] = ""
    """what every node does about the job"""
    step: int | None = None
    """the lowest that a rank of any node has marked"""
    outcome: Outcome | None = None
    """None: that of the evidence"""
    status: PeerStatus = field(default_factory=PeerStatus)
    """what the other nodes say of themselves"""


@dataclass(frozen=True, slots=True)
class JobContext:
    """What a bundle says about the job itself, and where the bundle goes. ``launch`` becomes ``launch.json``."""

    run_name: str
    run_dir: Path
    bundle_dir: Path
    fallback_dir: Path
    launch: Mapping[str, object]
    host: str = field(default_factory=socket.gethostname)
    redactor: Redactor = field(default_factory=Redactor)
    kills_at_start: KillCounts = field(default_factory=kill_counts)
    keeping: Keeping = field(default_factory=Keeping)
    notifier: Notifier = field(default_factory=Notifier)
    suspects: Notifier = field(default_factory=Notifier)
    unfinished: Unfinished = field(default_factory=Unfinished)


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The supervisor's knowledge of the ranks at the moment of an incident."""

    ranks: Mapping[int, collect.Known]
    world_size: int
    notes: tuple[str, ...]
    early: tuple[EarlyLook, ...] = ()
    inconsistent: tuple[Inconsistency, ...] = ()


def known_of(watch: Watch, exits: Mapping[int, RankExit]) -> JobSnapshot:
    """The ranks' pages and exits as they are now."""
    pages = watch.roster.pages()
    found: dict[int, collect.Known] = {}
    for rank in sorted(set(pages) | set(watch.roster.workers)):
        page = pages.get(rank)
        if page is None:
            found[rank] = collect.Known(pid=watch.roster.workers[rank].pid, exit=exits.get(rank))
            continue
        meta = read_meta(watch.roster.companion(page, layout.META_SUFFIX))
        found[rank] = collect.Known(
            progress=msgspec.structs.replace(page.read(), history=watch.steps_of(rank)),
            pid=page.pid,
            page_name=page.name,
            exit=exits.get(rank),
            code_roots=meta.code_roots,
            gpu=meta.gpu,
        )
    return JobSnapshot(found, watch.world_size, watch.notes, watch.early, watch.inconsistent)


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


def with_nodes(found: Collected, nodes: tuple[NodeEvidence, ...]) -> Collected:
    """The same with what is known of the job's nodes."""
    return replace(found, evidence=msgspec.structs.replace(found.evidence, nodes=nodes))


def take_evidence(
    kind: Kind,
    looks: Looks,
    known: JobSnapshot,
    context: JobContext,
    *,
    stall_s: float = 0.0,
    threshold: Threshold | None = None,
    moving: bool = False,
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
    known = without_secrets(known, context.redactor)

    def ranks(gate: Gate) -> None:
        try:
            better = native_where_it_tells(with_the_late(looks)) if kind.asks and kind.native else looks
            better = replace(better, taken=without_secrets(better.taken, context.redactor))
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
        folder = f"node/{context.host}"
        collect_node(
            folder,
            context.run_dir,
            gate,
            node_found,
            Subject(pid, roots, looks.env, {"at_start": asdict(context.kills_at_start), "now": asdict(kills)}),
            context.redactor,
        )

    gather_into(staging, {"ranks": ranks, f"node/{context.host}": node}, deadline_s=EVIDENCE_DEADLINE_S * patience)
    looks = newest[0] if newest else replace(looks, taken=without_secrets(looks.taken, context.redactor))
    for target in looks.targets:
        if target.rank not in seen:
            about_rank = known.ranks.get(target.rank, collect.Known())
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
            memory_kills=without_secrets(
                kills_of(side.pid, context.kills_at_start, kills, kernel_log), context.redactor
            ),
            deaths=without_secrets(_deaths_of(side, kernel_log), context.redactor),
            gpu_errors=without_secrets(gpu.errors_of(side.pid, side.gpu, of_this_run), context.redactor),
        )
        for side in seen.values()
    ]
    complete = _with_nccl_logs(complete, looks, context, staging)
    for side in complete:
        _add_rank(side, staging)
    evidence = _evidence(kind.outcome, complete, known.world_size)
    evidence = msgspec.structs.replace(
        evidence,
        stall_s=stall_s,
        moving=moving,
        notes=known.notes,
        early=known.early,
        inconsistent=known.inconsistent,
        launched=_launched(context),
        gpus=node_files.gpus.uses(context.host) if node_files.gpus is not None else (),
    )
    if threshold is not None:
        evidence = msgspec.structs.replace(evidence, threshold_s=threshold.seconds, threshold_why=threshold.why)
    return Collected(evidence, staging, timeline, context, _without_stacks(looks), node_files)


def _with_nccl_logs(
    sides: list[RankEvidence], looks: Looks, context: JobContext, staging: Staging | None = None
) -> list[RankEvidence]:
    logs = nccl_logs([side.pid for side in sides], context.run_dir, context.host, looks.env, staging)
    told = without_secrets(dict(logs), context.redactor)
    return [msgspec.structs.replace(side, nccl_log=told.get(side.pid)) for side in sides]


def _deaths_of(rank: RankEvidence, kernel_log: str) -> tuple[str, ...]:
    living = {state.pid for child in rank.children for state in child.states}
    return deaths_between(rank.pid, max(living), living, kernel_log) if living else ()


def prepare() -> None:
    """Imports what verdict and reports need while the job is given time to move: most runs never stall."""
    from safelaunch.bundle.reading import bundles  # noqa: F401 - for the imports
    from safelaunch.report import exports, page, report  # noqa: F401

    page.prepare()


def of_rendezvous(rendezvous: Rendezvous, error: str, nodes: tuple[NodeEvidence, ...], context: JobContext) -> Report:
    """The bundle of a job that never began, because not all nodes came to the rendezvous. ``error``: torchrun's."""
    found = take_evidence(RENDEZVOUS, Looks(()), JobSnapshot({}, 0, ()), context)
    rendezvous = without_secrets(msgspec.structs.replace(rendezvous, error=error), context.redactor)
    evidence = msgspec.structs.replace(found.evidence, nodes=nodes, rendezvous=rendezvous)
    return finish(replace(found, evidence=evidence))


def with_nccl(found: Collected, *, spare: str) -> Collected:
    """The same with what NCCL's RAS service says; ``spare``: see ``nccl.ask``. Last, lest it costs other evidence.

    Takes ``nccl.DEADLINE_S`` at most; nothing where no rank has loaded NCCL.
    """
    from safelaunch.capture import nccl  # late: only at a hang

    ranks, context = found.evidence.ranks, found.context
    libraries = dict.fromkeys(rank.flight_record.library for rank in ranks if rank.flight_record is not None)
    pids = [rank.pid for rank in ranks if rank.pid and rank.exit is None]
    answer = nccl.ask(pids, libraries, spare=spare)
    if answer is None:
        return found
    path, text = f"node/{context.host}/{nccl.FILE}", without_secrets(answer.value, context.redactor)
    artifact = answer.artifact(path)
    try:
        witness = nccl.parse(text, path) if text else None
    except CaptureError as error:
        witness, artifact = None, msgspec.structs.replace(artifact, note=f"{artifact.note}; {error}".strip("; "))
    found.staging.add(artifact, text)
    timeline = found.timeline.plus("NCCL asked")
    return replace(found, evidence=msgspec.structs.replace(found.evidence, nccl=witness), timeline=timeline)


def _add_rank(side: RankEvidence, staging: Staging) -> None:
    staging.add_json(Artifact(f"ranks/{side.rank}/rank.json", OURS, 0.0), RankFile.of(side))


def local_evidence(looks: Looks, known: JobSnapshot, context: JobContext) -> Evidence:
    """This node's evidence of a crash as it is known at once: for the other nodes, who wait for it."""
    found, counts = evidence_of(CRASH, looks, known, context), kill_counts()
    complete = tuple(
        msgspec.structs.replace(side, memory_kills=kills_of(side.pid, context.kills_at_start, counts, ""))
        for side in found.ranks
    )
    complete = tuple(_with_nccl_logs(list(complete), looks, context))
    return msgspec.structs.replace(found, ranks=complete)


def evidence_of(
    kind: Kind, looks: Looks, known: JobSnapshot, context: JobContext, *, patience: float = 1.0
) -> Evidence:
    """What the looks and the ranks themselves tell, without a bundle. ``patience``: as in ``take_evidence``."""
    nowhere, pages = Sink(context.redactor), context.run_dir / "pages"
    known = replace(known, ranks=without_secrets(known.ranks, context.redactor))
    taken = without_secrets(looks.taken, context.redactor)
    seen = list(
        collect.ranks(looks.targets, taken, known.ranks, pages, context.host, nowhere, ask=kind.asks, patience=patience)
    )
    for rank in sorted(known.ranks.keys() - {target.rank for target in looks.targets}):
        seen.append(collect.of_ended(rank, known.ranks[rank], pages, context.host, nowhere))
    return msgspec.structs.replace(_evidence(kind.outcome, seen, known.world_size), launched=_launched(context))


def _launched(context: JobContext) -> Launched:
    return from_builtins(context.launch, Launched)


def mark_recovered(report: Report) -> Task[None]:
    """Notes in the verdict of a bundle that the job went on. In a thread: its disk may not answer."""

    def note() -> None:
        path = report.published.path / "verdict.json"
        try:
            rewrite(path, msgspec.structs.replace(report.verdict, recovered=True))
        except OSError as error:
            say(f"{path} could not be marked as recovered: {error.strerror or error}")

    return Task("recovered", note)


def discard(found: Collected) -> None:
    """Removes everything collected: it was no incident."""
    rmtree(found.staging.root, ignore_errors=True)
    found.context.unfinished.let_go(found.staging.root)


def judged(evidence: Evidence, context: JobContext, source: Excerpts | None = None) -> Verdict:
    """The verdict, without secrets. Never raises. ``source`` has what it reads of the user's files."""
    source = source or Excerpts(evidence, context.redactor)
    return without_secrets(_verdict(recall.recalled(evidence, context), source), context.redactor)


def finish(found: Collected, agreement: Agreement | None = None) -> Report:
    """Writes verdict and reports, and publishes the bundle; of several nodes, as they have agreed."""
    staging, context = found.staging, found.context
    agreed = agreement or Agreement()
    evidence = agreed.others.with_own(found.evidence)
    evidence = msgspec.structs.replace(
        evidence, outcome=agreed.outcome or evidence.outcome, answer=agreed.answer or evidence.answer
    )
    mine = {rank.rank for rank in found.evidence.ranks}
    others = [rank for rank in evidence.ranks if rank.rank not in mine]
    for side in others:
        collect.of_another_node(side, staging)
        _add_rank(side, staging)
    _add_files(agreed.others.files, others, staging)
    evidence = recall.recalled(evidence, context)
    source = Excerpts(evidence, context.redactor)
    own = judged(evidence, context, source)  # also where all nodes have one already: for what it reads
    verdict = agreed.verdict or own
    if source.read:
        staging.add_json(Artifact(SOURCE_FILE, OURS, 0.0), source.read)
    timeline = found.timeline.plus("verdict")
    name = agreed.name or name_of(context.run_name, time.time(), verdict.outcome)
    place = verdict.bundle or None
    if place is not None and not place.whole:
        whole = Path(place.path).name  # as another node says: a plain name, or none
        context = replace(context, keeping=replace(context.keeping, whole="" if whole.startswith(".") else whole))
    published = _publish(found, verdict, evidence, context, timeline, name)
    if published.lost:  # a cleaner has removed it all: what is known is written once more
        published = _publish(found, verdict, evidence, context, timeline, name)
    context.unfinished.let_go(staging.root)
    if published.note:
        say(published.note)
    if not published.lost:
        context.notifier.tell(verdict, published.path, context.run_name)
    return Report(verdict, evidence, published, found.without_stacks, agreed.action, agreed.step)


def show(result: Report, environ: Mapping[str, str], place: str = "bundle") -> None:
    """Prints the verdict on stderr, and where the bundle is. ``place``: what it is called there."""
    from safelaunch.capture import user_source
    from safelaunch.report import HTML, report

    on, published = display(2, environ), result.published
    shown = report.screen(
        result.verdict,
        bundle_path=published.shown,
        place=place,
        page=HTML if (published.path / HTML).is_file() else "",
        width=on.width,
        color=on.color,
        read_line=user_source.line,
        cwd=os.fspath(working_directory()) if on.terminal else "",
    )
    say(shown, color=on.color, laid_out=True)
    if published.lost:
        say(f"the bundle is lost: {published.problem}")
    elif published.problem:
        say(f"the bundle could not be written to the requested directory: {published.problem}")


def _add_files(files: Mapping[str, bytes], others: Sequence[RankEvidence], staging: Staging) -> None:
    """Files of other nodes. What is here already stays as it is."""
    here = {artifact.path for artifact in staging.artifacts if not artifact.missing}
    hosts = {f"ranks/{side.rank}/": side.host for side in others}
    for path, content in sorted(files.items()):
        folder, _, name = path.rpartition("/")
        host = hosts.get(f"{folder}/", folder.rpartition("/")[2])
        if path in here or (folder.startswith("ranks/") and f"{folder}/" not in hosts):
            continue
        data: str | bytes = content if name.endswith(".pickle") else content.decode("utf-8", "replace")
        staging.add(Artifact(path, f"from {host}", 0.0), data)
        if name.endswith(".pickle"):
            rank = folder.rpartition("/")[2]
            staging.add(Artifact(f"flight_recorder/nccl_trace_rank_{rank}", f"from {host}", 0.0), data)


def _publish(
    found: Collected, verdict: Verdict, evidence: Evidence, context: JobContext, timeline: Timeline, name: str
) -> Published:
    staging = found.staging
    _finish(staging, verdict, evidence, context, timeline, found.node)
    context.unfinished.hold(staging.root)  # which may exist again
    return publish(
        staging.root, context.bundle_dir, name, context.fallback_dir, context.keeping, deadline_s=PUBLISH_DEADLINE_S
    )


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


def _verdict(evidence: Evidence, source: Excerpts) -> Verdict:
    """The diagnosis. A failing rule costs the verdict, but neither the bundle nor the action on the job."""
    from safelaunch.verdict.diagnose import diagnose  # late: a run that never stalls does not pay for it

    try:
        return diagnose(evidence, read_source=source.text)
    except Exception as error:  # noqa: BLE001 - whatever a rule fails on
        return Verdict(
            schema=1,
            outcome=evidence.outcome,
            cause="no-rank-stands-out",
            confidence="low",
            summary=f"The diagnosis itself failed ({type(error).__name__}: {error}). The evidence is in the bundle.",
            culprits=(),
            victims="",
            evidence=(),
            ruled_out=(),
            missing=("the diagnosis",),
            suggestions=("Run 'safelaunch diagnose' on the bundle with a newer safelaunch, and report this error.",),
        )


def _evidence(outcome: Outcome, ranks: Sequence[RankEvidence], world_size: int) -> Evidence:
    """The evidence of all ranks that left any, by number; the others are unknown."""
    there = {rank.rank for rank in ranks}
    missing = tuple(rank for rank in range(world_size) if rank not in there)
    everybody = tuple(sorted(ranks, key=lambda evidence: evidence.rank))
    return Evidence(outcome=outcome, world_size=world_size, ranks=everybody, missing_ranks=missing)


def _finish(
    staging: Staging, verdict: Verdict, evidence: Evidence, context: JobContext, timeline: Timeline, node: NodeFiles
) -> None:
    """Writes verdict, reports, launch and, last, the manifest that lists all other files."""
    from safelaunch.bundle.reading import bundles  # late: a run that never stalls does not pay for it
    from safelaunch.report.about import About, Launch

    staging.add_json(Artifact("verdict.json", OURS, 0.0), verdict)
    staging.add_json(Artifact("launch.json", OURS, 0.0), context.launch)
    if evidence.nodes:
        staging.add_json(Artifact("nodes.json", OURS, 0.0), evidence.nodes)
    if evidence.early:
        staging.add_json(Artifact("early.json", OURS, 0.0), evidence.early)
    if evidence.inconsistent:
        staging.add_json(Artifact("inconsistent.json", OURS, 0.0), evidence.inconsistent)
    if evidence.rendezvous is not None:
        staging.add_json(Artifact("rendezvous.json", OURS, 0.0), evidence.rendezvous)

    def what_is_known() -> About:
        launch = from_builtins(context.redactor.tree(dict(context.launch)), Launch)
        known = bundles.about(staging.root, launch, {context.host: node})
        return replace(known, at_unix_s=timeline.moments[-1].unix_s)

    shape = add_reports(staging, verdict, evidence, context.redactor, context.run_name, what_is_known)
    listed = staging.close()
    manifest = Manifest(
        host=context.host,
        written_unix_s=round(time.time(), 3),
        user=os.getuid(),
        watch=Watched(
            stalled_s=round(evidence.stall_s, 3),
            threshold_s=round(evidence.threshold_s, 3),
            why=evidence.threshold_why,
            answer=evidence.answer,
            work=evidence.work,
        ),
        job=job_of(evidence, shape),
        notes=evidence.notes,
        earlier=evidence.earlier,
        timeline=timeline.plus("written").moments,
        artifacts=listed,
        missing=tuple(artifact.path for artifact in listed if artifact.missing),
    )
    staging.finish(manifest)
