"""One incident, from the first closer look to the published bundle: looks → evidence → verdict → bundle.

Everything here runs in threads of the supervisor, so that signals and the job's end are still handled meanwhile.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from safelaunch.beacon import layout
from safelaunch.bundle.onbundle import Notifier
from safelaunch.bundle.publishing import PUBLISH_DEADLINE_S, Keeping, Published, name_of, publish
from safelaunch.bundle.staging import LIMIT_BYTES, OURS, Staging, roomier
from safelaunch.bundle.timeline import Timeline
from safelaunch.capture import collect
from safelaunch.capture.job_secrets import Redactor
from safelaunch.capture.memory import KillCounts, kill_counts, kills_of
from safelaunch.capture.parallel import gather
from safelaunch.console import say
from safelaunch.launch.paths import may_be_ours, new_unfinished_bundle
from safelaunch.model import Artifact, Evidence, Outcome, RankEvidence, RankExit, RankFile, Verdict
from safelaunch.session import sources
from safelaunch.session.looks import Looks, native_where_it_tells
from safelaunch.session.node_evidence import collect_node
from safelaunch.watch.progress import read_meta
from safelaunch.watch.rhythm import Threshold
from safelaunch.watch.watch import Watch


@dataclass(frozen=True, slots=True)
class Report:
    """What came of an incident. ``without_stacks``: why none could be read, where one reason kept us from all."""

    verdict: Verdict
    evidence: Evidence
    published: Published
    without_stacks: str = ""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a bundle says about the job itself, and what becomes of it. ``launch`` goes to ``launch.json``."""

    run_name: str
    run_dir: Path
    bundle_dir: Path
    fallback_dir: Path
    launch: Mapping[str, object]
    host: str = field(default_factory=socket.gethostname)
    redactor: Redactor = field(default_factory=Redactor)
    kills_at_start: KillCounts = field(default_factory=kill_counts)
    artifact_limit_bytes: int = LIMIT_BYTES
    keeping: Keeping = field(default_factory=Keeping)
    notifier: Notifier = field(default_factory=Notifier)


@dataclass(frozen=True, slots=True)
class Known:
    """The supervisor's knowledge of the ranks at the moment of an incident."""

    ranks: Mapping[int, collect.Known]
    world_size: int
    notes: tuple[str, ...]


def known_of(watch: Watch, exits: Mapping[int, RankExit]) -> Known:
    """Pages and exits as they are now."""
    pages = watch.roster.pages()
    found: dict[int, collect.Known] = {}
    for rank in sorted(set(pages) | set(watch.roster.workers)):
        page = pages.get(rank)
        if page is None:
            found[rank] = collect.Known(pid=watch.roster.workers[rank].pid, exit=exits.get(rank))
            continue
        meta = read_meta(watch.roster.companion(page, layout.META_SUFFIX))
        found[rank] = collect.Known(
            progress=page.read(),
            pid=page.pid,
            page_name=page.name,
            exit=exits.get(rank),
            code_roots=meta.code_roots,
        )
    return Known(found, watch.world_size, watch.notes)


def write(
    outcome: Outcome,
    looks: Looks,
    known: Known,
    about: Circumstances,
    *,
    stall_s: float = 0.0,
    threshold: Threshold | None = None,
    moving: bool = False,
    ask: bool = True,
    timeline: Timeline | None = None,
) -> Report:
    """Collects the rest, reaches a verdict and publishes the bundle. ``ask`` False: the ranks are gone."""
    timeline = timeline or Timeline()
    # Not in the run directory, where there is room elsewhere: a cleaner that removes that must not take the bundle
    # along, and $XDG_RUNTIME_DIR may be small.
    safe = may_be_ours(about.fallback_dir.parent)
    place = roomier(about.fallback_dir, about.run_dir) if safe else about.run_dir
    root = new_unfinished_bundle(place, about.run_dir, outcome)
    staging = Staging(root, about.redactor, limit_bytes=about.artifact_limit_bytes)
    pages = about.run_dir / "pages"
    seen: list[RankEvidence] = []
    node_said = ("", KillCounts())

    def ranks() -> None:
        nonlocal looks
        looks = native_where_it_tells(looks) if ask else looks
        seen.extend(collect.ranks(looks.targets, looks.taken, known.ranks, pages, about.host, staging, ask=ask))

    roots = next((item.code_roots for item in known.ranks.values() if item.code_roots), ())

    def node() -> None:
        nonlocal node_said
        pid = looks.targets[0].pid if looks.targets else None
        folder = f"node/{about.host}"
        node_said = collect_node(
            folder,
            about.run_dir,
            staging,
            pid=pid,
            code_roots=roots,
            env=looks.env,
            kills_at_start=about.kills_at_start,
        )

    gather([ranks, node], deadline_s=20.0)
    for rank in sorted(known.ranks.keys() - {target.rank for target in looks.targets}):
        seen.append(collect.of_ended(rank, known.ranks[rank], pages, about.host, staging))
    timeline = timeline.plus("evidence complete")
    kernel_log, kills = node_said
    complete = [
        msgspec.structs.replace(
            side,
            log_tail=about.redactor.text(side.log_tail),
            exception=about.redactor.exception(side.exception),
            memory_kills=kills_of(side.pid, about.kills_at_start, kills, kernel_log),
        )
        for side in seen
    ]
    for side in complete:
        staging.add_json(Artifact(f"ranks/{side.rank}/rank.json", OURS, 0.0), RankFile.of(side))
    evidence = _evidence(outcome, complete, known.world_size)
    evidence = msgspec.structs.replace(evidence, stall_s=stall_s, moving=moving, notes=known.notes)
    if threshold is not None:
        evidence = msgspec.structs.replace(evidence, threshold_s=threshold.seconds, threshold_why=threshold.why)
    verdict = _verdict(evidence)
    _finish(staging, verdict, evidence, about, timeline.plus("verdict"))
    name = name_of(about.run_name, time.time(), verdict.outcome)
    published = publish(
        staging.root, about.bundle_dir, name, about.fallback_dir, about.keeping, deadline_s=PUBLISH_DEADLINE_S
    )
    if published.note:
        say(published.note)
    about.notifier.tell(verdict, published.path, about.run_name)
    return Report(verdict, evidence, published, _without_stacks(looks))


def _without_stacks(looks: Looks) -> str:
    """Why no stack of any process could be read: no py-spy, no permission. Empty where one was, or reasons differ."""
    ranks = [rank for look in looks.taken for rank in look.ranks.values()]
    found = [
        process.stack
        for rank in ranks
        for process in (rank.main, *rank.children)
        if process and process.state and process.state.state not in "ZX"  # one that has ended has no stack
    ]
    reasons = {stack.missing for stack in found}
    return next(iter(reasons)) if len(reasons) == 1 and not any(stack.value for stack in found) else ""


def _verdict(evidence: Evidence) -> Verdict:
    """The diagnosis. A fault in a rule costs the verdict, not the bundle and not what is done about the job."""
    from safelaunch.diagnose import diagnose  # late: a run that never stalls does not pay for it

    try:
        return diagnose(evidence, read_source=sources.text)
    except Exception as error:  # noqa: BLE001 - whatever a rule stumbles over
        return Verdict(
            schema=1,
            outcome=evidence.outcome,
            cause="no-rank-stands-out",
            confidence="low",
            summary=f"The diagnosis itself failed ({type(error).__name__}: {error}); the evidence is in the bundle.",
            culprits=(),
            victims="",
            evidence=(),
            ruled_out=(),
            missing=("the diagnosis",),
            suggestions=("Run 'safelaunch diagnose' on the bundle with a newer safelaunch, and report this.",),
        )


def _evidence(outcome: Outcome, ranks: Sequence[RankEvidence], world_size: int) -> Evidence:
    """Ranks that left anything, by number, and those nobody knows of."""
    there = {rank.rank for rank in ranks}
    missing = tuple(rank for rank in range(world_size) if rank not in there)
    everybody = tuple(sorted(ranks, key=lambda evidence: evidence.rank))
    return Evidence(outcome=outcome, world_size=world_size, ranks=everybody, missing_ranks=missing)


def _finish(staging: Staging, verdict: Verdict, evidence: Evidence, about: Circumstances, timeline: Timeline) -> None:
    """verdict, reports, launch and, last, the manifest that lists all the others."""
    staging.add_json(Artifact("verdict.json", OURS, 0.0), verdict)
    staging.add_json(Artifact("launch.json", OURS, 0.0), about.launch)
    from safelaunch.bundle import report

    def read_line(path: str, number: int) -> str | None:
        line = sources.line(path, number)
        return about.redactor.text(line) if line else line

    begin = time.monotonic()
    artifacts = tuple(sorted(staging.artifacts, key=lambda artifact: artifact.path))
    for path, render in (("report.md", report.markdown), ("report.html", report.html)):
        try:
            text: str | None = render(verdict, evidence, artifacts, read_line=read_line)
            missing = ""
        except Exception as error:  # noqa: BLE001 - a report costs nothing but itself
            text, missing = None, f"the report could not be rendered: {type(error).__name__}: {error}"
        staging.add_report(Artifact(path, OURS, round(time.monotonic() - begin, 3), missing), text)
    listed = sorted(staging.artifacts, key=lambda artifact: artifact.path)
    manifest = {
        "schema": 1,
        "host": about.host,
        "written_unix_s": round(time.time(), 3),
        "user": os.getuid(),
        "watch": {
            "stalled_s": round(evidence.stall_s, 3),
            "threshold_s": round(evidence.threshold_s, 3),
            "why": evidence.threshold_why,
        },
        "job": {"outcome": evidence.outcome, "world_size": evidence.world_size, "moving": evidence.moving},
        "notes": evidence.notes,
        "timeline": timeline.plus("written").moments,
        "artifacts": listed,
        "missing": [artifact.path for artifact in listed if artifact.missing],
    }
    problem = staging.write("manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    if problem:
        staging.artifacts.append(Artifact("manifest.json", OURS, 0.0, problem))
