"""From the evidence of an incident to the published bundle: verdict, reports, and what is shown of them.

Everything here runs in threads of the supervisor, so it keeps handling signals and the job's end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from safelaunch.bundle.copier import BUNDLE
from safelaunch.bundle.staging import (
    OURS,
    PUBLISH_DEADLINE_S,
    Published,
    Staging,
    name_of,
    publish,
    rewrite,
)
from safelaunch.capture import collect, user_source
from safelaunch.capture.excerpts import Excerpts
from safelaunch.capture.user_source import SOURCE_FILE
from safelaunch.job.paths import working_directory
from safelaunch.model import (
    WRONG_RESULTS_FILE,
    Answer,
    Artifact,
    BundlePlace,
    Evidence,
    GroupMembers,
    JobShape,
    Manifest,
    NodeEvidence,
    NodeFiles,
    Outcome,
    RankEvidence,
    Rendezvous,
    Verdict,
    Watched,
    format_ranks,
)
from safelaunch.supervise.cluster.evidence import Others
from safelaunch.supervise.cluster.messages import Action, PeerStatus
from safelaunch.supervise.collecting import Collected, JobSnapshot, Timeline, add_rank, take_evidence
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.kinds import RENDEZVOUS
from safelaunch.supervise.looks import Looks
from safelaunch.system.console import display, say
from safelaunch.system.decoding import from_builtins, from_json
from safelaunch.system.redaction.redactor import Redactor
from safelaunch.system.task import BackgroundTask

if TYPE_CHECKING:
    from safelaunch.report.about import ReportHeader


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an incident. ``without_stacks``: why no stack could be read, if one reason explains all.

    ``action``: what all nodes do about the job, if they have agreed; ``step``: the lowest of all ranks then.
    ``repeats``: the whole message about a failure that an earlier attempt had as well, and whose bundle this is.
    """

    verdict: Verdict
    evidence: Evidence
    published: Published
    without_stacks: str = ""
    action: Action | Literal[""] = ""
    step: int | None = None
    repeats: str = ""


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


def prepare() -> None:
    """Imports what verdict and reports need while the job is given time to move: most runs never stall."""
    from safelaunch.bundle.reading import bundles  # noqa: F401 - for the imports
    from safelaunch.report import exports, markdown, page, template  # noqa: F401

    template.prepare()


def of_rendezvous(rendezvous: Rendezvous, error: str, nodes: tuple[NodeEvidence, ...], context: JobContext) -> Report:
    """The bundle of a job that never began, because not all nodes came to the rendezvous. ``error``: torchrun's."""
    found = take_evidence(RENDEZVOUS, Looks(()), JobSnapshot({}, 0, ()), context)
    rendezvous = context.cleaned(msgspec.structs.replace(rendezvous, error=error))
    return finish(found.knowing(nodes=nodes, rendezvous=rendezvous))


def mark_recovered(report: Report) -> BackgroundTask[None]:
    """Notes in the verdict of a bundle that the job went on. In a thread: its disk may not answer."""

    def note() -> None:
        path = report.published.path / "verdict.json"
        try:
            rewrite(path, msgspec.structs.replace(report.verdict, recovered=True))
        except OSError as error:
            say(f"{path} could not be marked as recovered: {error.strerror or error}")

    return BackgroundTask("recovered", note)


def judged(evidence: Evidence, context: JobContext, source: Excerpts | None = None) -> Verdict:
    """The verdict, without secrets. Never raises. ``source`` has what it reads of the user's files."""
    source = source or Excerpts(evidence, context.redactor)
    return context.cleaned(_verdict(recalled(evidence, context.bundle_dir), source))


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
        add_rank(side, staging)
    _add_files(agreed.others.files, others, staging)
    evidence = recalled(evidence, context.bundle_dir)
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


def recall(result: Report) -> None:
    """Repeats the verdict in short, as the last lines on the screen."""
    say(f"the verdict again: {result.verdict.summary}")
    say(f"bundle: {result.published.shown}")


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
        staging.root,
        context.bundle_dir,
        name,
        context.fallback_dir,
        context.keeping,
        owner=context.owner,
        deadline_s=PUBLISH_DEADLINE_S,
    )


def _verdict(evidence: Evidence, source: Excerpts) -> Verdict:
    """The diagnosis. A failing rule costs the verdict, but neither the bundle nor the action on the job."""
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
        ).on_record(evidence)


def _finish(
    staging: Staging, verdict: Verdict, evidence: Evidence, context: JobContext, timeline: Timeline, node: NodeFiles
) -> None:
    """Writes verdict, reports, launch and, last, the manifest that lists all other files."""
    from safelaunch.bundle.reading import bundles  # late: a run that never stalls does not pay for it
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


# --- which hardware the last bundles blame ----------------------------------------------------------------------------


RECALLED = 5
RECALL_DEADLINE_S = 3.0  # the disk of the bundle directory may not answer
_MOST_READ = 64
_LARGEST_VERDICT = 4 << 20


class _Blamed(msgspec.Struct):
    gpu: str = ""


class _NodeShape(msgspec.Struct):
    host: str = ""


class _Earlier(msgspec.Struct):
    outcome: str = ""
    culprits: tuple[_Blamed, ...] = ()
    nodes: tuple[_NodeShape, ...] = ()
    bundle: BundlePlace | None = None


def recalled(evidence: Evidence, bundle_dir: Path) -> Evidence:
    """The evidence with what the last bundles blame; as it is, if it has that already. Never raises."""
    if evidence.earlier is not None or evidence.outcome in ("dump", "suspect"):
        return evidence
    task = BackgroundTask("earlier bundles", lambda: blamed_in(bundle_dir))
    try:
        earlier = task.result() if task.wait(RECALL_DEADLINE_S) else ()
    except OSError:
        earlier = ()  # there is no such directory yet, or it cannot be read
    return msgspec.structs.replace(evidence, earlier=earlier)


def blamed_in(directory: Path) -> tuple[tuple[str, ...], ...]:
    """The GPUs and hosts that each of the last bundles of a hang or crash blames, the newest first. Raises OSError."""
    matches = (BUNDLE.fullmatch(path.name) for path in directory.iterdir())
    names = sorted(filter(None, matches), key=lambda name: name["time"])
    found: list[tuple[str, ...]] = []
    for name in reversed(names[-_MOST_READ:]):
        if len(found) < RECALLED:
            found += _blamed(directory / name[0] / "verdict.json")
    return tuple(found)


def _blamed(path: Path) -> Iterator[tuple[str, ...]]:
    from safelaunch.bundle.reading.guard import Unreadable, read_limited  # late: multiprocessing is 2 MB

    try:
        one = from_json(read_limited(path, _LARGEST_VERDICT), _Earlier)
    except (Unreadable, msgspec.DecodeError, RecursionError):
        return  # another user's, or damaged
    if one.outcome in ("hang", "crash") and (one.bundle is None or one.bundle.whole):
        yield tuple(filter(None, dict.fromkeys((*(c.gpu for c in one.culprits), *(n.host for n in one.nodes)))))


# --- what a bundle says of its job in other words ---------------------------------------------------------------------


MOST_GROUPS = 1024  # in the manifest


def job_of(evidence: Evidence, shape: dict[str, int]) -> JobShape:
    """The job's entry in the manifest. ``shape``: the dimensions of its mesh."""
    return JobShape(
        outcome=evidence.outcome,
        world_size=evidence.world_size,
        moving=evidence.moving,
        for_finding=evidence.for_finding,
        mesh=shape,
        groups=_groups(evidence),
        devices={str(rank.rank): rank.gpu for rank in evidence.ranks if rank.gpu},
        computes_on={str(rank.rank): rank.device for rank in evidence.ranks if rank.device is not None},
        batch={str(rank.rank): rank.batch for rank in evidence.ranks if rank.batch is not None},
        global_batch_if_data_parallel=_global_batch(evidence),
        batches={str(rank.rank): rank.gil.batches for rank in evidence.ranks if rank.gil.batches},
    )


def _global_batch(evidence: Evidence) -> int | None:
    """The samples of a step, where all ranks were seen with one batch: each rank's own, if all are data-parallel."""
    batches = [rank.batch for rank in evidence.ranks]
    alike = len(batches) == evidence.world_size and len(set(batches)) == 1
    return batches[0] * evidence.world_size if alike and batches[0] is not None else None


def _groups(evidence: Evidence) -> dict[str, GroupMembers]:
    """The process groups that the ranks told of, by their names: what they are called, and who is in them."""
    found: dict[str, GroupMembers] = {}
    for rank in evidence.ranks:
        for name, members in rank.gil.groups.items():
            if name not in found and len(found) < MOST_GROUPS:
                found[name] = GroupMembers(rank.gil.called.get(name, ""), format_ranks(members))
    return found


def add_reports(
    staging: Staging,
    verdict: Verdict,
    evidence: Evidence,
    redactor: Redactor,
    run_name: str,
    about: Callable[[], ReportHeader],
) -> dict[str, int]:
    """The reports, and the files for viewers, each of which costs only itself where it fails.

    ``about``: the job and its nodes. Returns the dimensions of the job's mesh, by name.
    """
    from safelaunch.report import HTML, PERFETTO, exports, markdown, page, template
    from safelaunch.verdict.device_mesh import mesh
    from safelaunch.verdict.rank_state import CaseFacts

    said = redactor.said

    def read_line(path: str, number: int) -> str | None:
        line = user_source.line(path, number)
        return said(line) if line else line

    @cache  # the reports read the same; an error is not kept, and costs each of them
    def facts() -> CaseFacts:
        return CaseFacts.of(evidence, user_source.text)

    def report_md() -> str:
        return markdown.markdown(verdict, evidence, staging.settle(), facts=facts(), read_line=read_line)

    def html() -> str:
        return template.render(
            page.content(verdict, evidence, staging.settle(), facts=facts(), said=said, about=about())
        )

    def perfetto() -> str:
        return exports.as_json(exports.perfetto(facts(), run_name))

    begin = time.monotonic()
    made = {PERFETTO: perfetto, "report.md": report_md, HTML: html}
    for path, make in made.items():
        try:
            text: str | None = make()
            missing = ""
        except Exception as error:  # noqa: BLE001 - a failed report costs only itself
            text, missing = None, f"the report could not be rendered: {type(error).__name__}: {error}"
        staging.add_report(Artifact(path, OURS, round(time.monotonic() - begin, 3), missing), text)
    with suppress(Exception):
        return dict(mesh(facts()))
    return {}
