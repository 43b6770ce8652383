"""Turns an incident's evidence into a verdict and a published bundle, in threads, and prints the result."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from safelaunch.bundle.publication import PUBLISH_DEADLINE_S, Publication, name_of, publish
from safelaunch.bundle.staging import OURS, Staging, rewrite
from safelaunch.capture import collect
from safelaunch.capture.excerpts import Excerpts
from safelaunch.capture.user_source import SOURCE_FILE
from safelaunch.job.paths import working_directory
from safelaunch.model import (
    WRONG_RESULTS_FILE,
    Answer,
    Artifact,
    Evidence,
    Manifest,
    NodeFiles,
    Outcome,
    RankEvidence,
    Verdict,
    Watched,
)
from safelaunch.supervise.cluster.exchange import PeerStatus
from safelaunch.supervise.cluster.merge import PeerEvidence
from safelaunch.supervise.cluster.messages import Action
from safelaunch.supervise.collecting import DraftBundle, Timeline, add_rank
from safelaunch.supervise.earlier_bundles import with_earlier_bundles
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.job_shape import job_entry
from safelaunch.supervise.reports import add_reports
from safelaunch.system.console import display, say
from safelaunch.system.decoding import from_builtins
from safelaunch.system.task import BackgroundTask

if TYPE_CHECKING:
    from safelaunch.report.about import ReportHeader


@dataclass(frozen=True, slots=True)
class Report:
    verdict: Verdict
    evidence: Evidence
    published: Publication
    without_stacks: str = ""
    """reason why no stack could be read"""
    action: Action | Literal[""] = ""
    step: int | None = None
    """lowest step of all ranks, agreed by all nodes"""
    repeats: str = ""
    """message about the same failure in an earlier attempt"""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The decision of all nodes; empty if there is only one node."""

    verdict: Verdict | None = None
    """None: this node judges alone"""
    name: str = ""
    """name of this node's bundle; empty: the usual one"""
    others: PeerEvidence = field(default_factory=PeerEvidence)
    """other nodes' evidence, if this node judged for all"""
    answer: Answer | None = None
    """answer for all nodes, if this node judged"""
    action: Action | Literal[""] = ""
    step: int | None = None
    outcome: Outcome | None = None
    """None: the evidence's outcome"""
    status: PeerStatus = field(default_factory=PeerStatus)


def prepare() -> None:
    """Imports the modules that verdict and reports need, while a suspicion waits for its second look."""
    from safelaunch.bundle.reading import bundles  # noqa: F401 - for the imports
    from safelaunch.report import exports, markdown, page, template  # noqa: F401

    template.prepare()


def mark_recovered(report: Report) -> BackgroundTask[None]:
    """Marks the bundle's verdict as recovered, in a thread, because the disk might not respond."""

    def note() -> None:
        path = report.published.path / "verdict.json"
        try:
            rewrite(path, msgspec.structs.replace(report.verdict, recovered=True))
        except OSError as error:
            say(f"{path} could not be marked as recovered: {error.strerror or error}")

    return BackgroundTask("recovered", note)


def verdict_of(evidence: Evidence, context: JobContext, source: Excerpts | None = None) -> Verdict:
    """Returns the verdict, with secrets removed. Never raises.

    Args:
        source: Reads the user's files, and records which lines it read.
    """
    source = source or Excerpts(evidence, context.redactor)
    return context.cleaned(_verdict(with_earlier_bundles(evidence, context.bundle_dir), source))


def finish(collected: DraftBundle, agreement: Agreement | None = None) -> Report:
    """Writes the verdict and reports, and publishes the bundle."""
    staging, context = collected.staging, collected.context
    agreed = agreement or Agreement()
    evidence = agreed.others.with_own(collected.evidence)
    evidence = msgspec.structs.replace(
        evidence, outcome=agreed.outcome or evidence.outcome, answer=agreed.answer or evidence.answer
    )
    own_ranks = {rank.rank for rank in collected.evidence.ranks}
    remote = [rank for rank in evidence.ranks if rank.rank not in own_ranks]
    for side in remote:
        collect.of_another_node(side, staging)
        add_rank(side, staging)
    _add_files(agreed.others.files, remote, staging)
    evidence = with_earlier_bundles(evidence, context.bundle_dir)
    source = Excerpts(evidence, context.redactor)
    own = verdict_of(evidence, context, source)  # even if the nodes agreed on one: records which source lines to save
    verdict = agreed.verdict or own
    if source.read:
        staging.add_json(Artifact(SOURCE_FILE, OURS, 0.0), source.read)
    timeline = collected.timeline.plus("verdict")
    name = agreed.name or name_of(context.run_name, time.time(), verdict.outcome)
    place = verdict.bundle or None
    if place is not None and not place.whole:
        whole = Path(place.path).name  # accepts only a plain name from another node
        context = replace(context, keeping=replace(context.keeping, whole="" if whole.startswith(".") else whole))
    published = _publish(collected, verdict, evidence, context, timeline, name)
    if published.lost:  # a cleaner removed the files
        published = _publish(collected, verdict, evidence, context, timeline, name)
    context.unfinished.let_go(staging.root)
    if published.note:
        say(published.note)
    if not published.lost:
        context.notifier.notify(verdict, published.path, context.run_name)
    return Report(verdict, evidence, published, collected.without_stacks, agreed.action, agreed.step)


def show(result: Report, environ: Mapping[str, str], place: str = "bundle") -> None:
    from safelaunch.capture import user_source
    from safelaunch.report import HTML, screen

    on, published = display(2, environ), result.published
    shown = screen.screen(
        result.verdict,
        bundle_path=published.shown,
        place=place,
        page=HTML if (published.path / HTML).is_file() else "",
        width=on.width,
        color=on.color,
        read_line=user_source.line,
        cwd=os.fspath(working_directory()) if on.terminal else "",
        evidence=result.evidence,
    )
    say(shown, color=on.color, laid_out=True)
    if published.lost:
        say(f"the bundle is lost: {published.problem}")
    elif published.problem:
        say(f"the bundle could not be written to the requested directory: {published.problem}")


def repeat_summary(result: Report) -> None:
    say(f"the verdict again: {result.verdict.summary}")
    say(f"bundle: {result.published.shown}")


def _add_files(files: Mapping[str, bytes], remote: Sequence[RankEvidence], staging: Staging) -> None:
    here = {artifact.path for artifact in staging.artifacts if not artifact.missing}
    hosts = {f"ranks/{side.rank}/": side.host for side in remote}
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
    collected: DraftBundle, verdict: Verdict, evidence: Evidence, context: JobContext, timeline: Timeline, name: str
) -> Publication:
    staging = collected.staging
    _finish(staging, verdict, evidence, context, timeline, collected.node)
    context.unfinished.hold(staging.root)
    return publish(
        staging.root,
        context.bundle_dir,
        name,
        context.fallback_dir,
        context.keeping,
        owner=context.owner,
        deadline_s=PUBLISH_DEADLINE_S,
    )


def _verdict(evidence: Evidence, source: Excerpts) -> Verdict:
    """Returns the diagnosis. If a rule fails, the verdict says so, and is otherwise unaffected."""
    from safelaunch.verdict.diagnose import diagnose

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
        ).with_job(evidence)


def _finish(
    staging: Staging, verdict: Verdict, evidence: Evidence, context: JobContext, timeline: Timeline, node: NodeFiles
) -> None:
    from safelaunch.bundle.reading import report_header  # late: only an incident needs it
    from safelaunch.report.about import LaunchFacts

    staging.add_json(Artifact("verdict.json", OURS, 0.0), verdict)
    staging.add_json(Artifact("launch.json", OURS, 0.0), context.launch)
    if evidence.nodes:
        staging.add_json(Artifact("nodes.json", OURS, 0.0), evidence.nodes)
    if evidence.early:
        staging.add_json(Artifact("early.json", OURS, 0.0), evidence.early)
    if evidence.wrong_results:
        staging.add_json(Artifact(WRONG_RESULTS_FILE, OURS, 0.0), evidence.wrong_results)
    if evidence.rendezvous is not None:
        staging.add_json(Artifact("rendezvous.json", OURS, 0.0), evidence.rendezvous)

    def what_is_known() -> ReportHeader:
        launch = from_builtins(context.redactor.tree(dict(context.launch)), LaunchFacts)
        header = report_header.about(staging.root, launch, {context.host: node})
        return replace(header, at_unix_s=timeline.moments[-1].unix_s)

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
        job=job_entry(evidence, shape),
        notes=evidence.notes,
        earlier=evidence.earlier,
        timeline=timeline.plus("written").moments,
        artifacts=listed,
        missing=tuple(artifact.path for artifact in listed if artifact.missing),
    )
    staging.finish(manifest)
