"""One incident, from the first closer look to the published bundle: looks → evidence → verdict → bundle.

Everything here runs in threads of the supervisor, so that signals and the job's end are still handled meanwhile.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from . import sources
from .beacon import layout
from .bundle import PUBLISH_DEADLINE_S, Keeping, Published, name_of, publish
from .capture import collect
from .capture.job_secrets import Redactor
from .capture.look import Look, RankLook, Target, take
from .capture.parallel import gather
from .console import say
from .model import Artifact, Evidence, Outcome, RankEvidence, RankExit, Verdict
from .node_evidence import collect_node
from .onbundle import Notifier
from .progress import read_exception, read_meta
from .staging import LIMIT_BYTES, OURS, Staging, roomier
from .timeline import Timeline
from .watch import Watch

LOOK_DEADLINE_S = 6.0
NATIVE_DEADLINE_S = 5.0
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Looks:
    """The ranks that were looked at, and each look at them, oldest first."""

    targets: tuple[Target, ...]
    taken: tuple[Look, ...] = ()

    def plus(self, look: Look) -> Looks:
        return replace(self, taken=(*self.taken, look)[-4:])


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
    artifact_limit_bytes: int = LIMIT_BYTES
    keeping: Keeping = field(default_factory=Keeping)
    notifier: Notifier = field(default_factory=Notifier)


def look_at(targets: Sequence[Target], looks: Looks | None, *, native: bool = False) -> Looks:
    """One more look at the ranks; the first with ``looks`` None."""
    earlier = looks.taken[-1] if looks is not None and looks.taken else None
    with _one_at_a_time:  # two py-spies on one process: the second is refused
        look = take(targets, deadline_s=LOOK_DEADLINE_S, earlier=earlier, native=native)
    return (looks or Looks(tuple(targets))).plus(look)


def _native_where_it_tells(looks: Looks) -> Looks:
    """One native look at the ranks that rest in a futex called from a line that is not c10d's.

    ``with lock:`` and ``work.wait()`` look alike from Python, and the C frames tell them apart. They cost the job a
    pause and us a few hundred megabytes for each process, so they are taken only here, after a hang is confirmed.
    """
    last = looks.taken[-1] if looks.taken else None
    if last is None:
        return looks
    unclear = [target for target in looks.targets if _is_unclear(last.ranks.get(target.rank))]
    if not unclear:
        return looks
    native = take(unclear, deadline_s=NATIVE_DEADLINE_S, earlier=last, native=True)
    return replace(looks, taken=(*looks.taken, native))


def _is_unclear(look: RankLook | None) -> bool:
    from .diagnose.calls import torch_wait

    main = look.main if look is not None else None
    if main is None or main.state is None or main.stack.value is None:
        return False
    kernel, thread = main.state.main_thread, main.stack.value.main_thread
    rests = kernel is not None and kernel.state == "S" and kernel.syscall_name in ("futex", "")
    return rests and thread is not None and torch_wait(thread.frames) is None


@dataclass(frozen=True, slots=True)
class Known:
    """The supervisor's knowledge of the ranks at the moment of an incident."""

    ranks: Mapping[int, collect.Known]
    world_size: int

    def without_secrets(self, redactor: Redactor) -> Known:
        """An exception may quote what it was given."""
        clean = {rank: replace(item, exception=redactor.exception(item.exception)) for rank, item in self.ranks.items()}
        return replace(self, ranks=clean)


def known_of(watch: Watch, exits: Mapping[int, RankExit]) -> Known:
    """Pages, exceptions and exits as they are now."""
    pages = watch.roster.pages()
    found: dict[int, collect.Known] = {}
    for rank in sorted(set(pages) | set(watch.roster.workers)):
        page = pages.get(rank)
        if page is None:
            found[rank] = collect.Known(exit=exits.get(rank))
            continue
        meta = read_meta(watch.roster.companion(page, layout.META_SUFFIX))
        found[rank] = collect.Known(
            progress=page.read(),
            exception=read_exception(watch.roster.companion(page, layout.EXCEPTION_SUFFIX)),
            exit=exits.get(rank),
            code_roots=meta.code_roots,
        )
    return Known(found, watch.world_size)


def write(
    outcome: Outcome,
    looks: Looks,
    known: Known,
    about: Circumstances,
    *,
    stall_s: float = 0.0,
    moving: bool = False,
    ask: bool = True,
    timeline: Timeline | None = None,
) -> Report:
    """Collects the rest, reaches a verdict and publishes the bundle. ``ask`` False: the ranks are gone."""
    timeline = timeline or Timeline()
    # A small or full $XDG_RUNTIME_DIR is no place to assemble a bundle in.
    place = roomier(about.run_dir, about.fallback_dir)
    root = place / f".{about.run_dir.name}-{outcome}-{time.time_ns()}"
    staging = Staging(root, about.redactor, limit_bytes=about.artifact_limit_bytes)
    known = known.without_secrets(about.redactor)
    sides: list[tuple[RankEvidence, ...]] = []

    def ranks() -> None:
        nonlocal looks
        looks = _native_where_it_tells(looks) if ask else looks
        pages = about.run_dir / "pages"
        sides.append(collect.ranks(looks.targets, looks.taken, known.ranks, pages, about.host, staging, ask=ask))

    roots = next((item.code_roots for item in known.ranks.values() if item.code_roots), ())

    def node() -> None:
        pid = looks.targets[0].pid if looks.targets else None
        collect_node(f"node/{about.host}", about.run_dir, staging, pid=pid, code_roots=roots)

    gather([ranks, node], deadline_s=20.0)
    for rank in sorted(known.ranks.keys() - {target.rank for target in looks.targets}):
        collect.of_ended(rank, known.ranks[rank], staging)
    timeline = timeline.plus("evidence complete")
    clean = about.redactor.text
    seen = tuple(msgspec.structs.replace(side, log_tail=clean(side.log_tail)) for side in (sides[0] if sides else ()))
    evidence = _evidence(outcome, seen, known, about.host)
    evidence = msgspec.structs.replace(evidence, stall_s=stall_s, moving=moving)
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
    found = [process.stack for rank in ranks for process in (rank.main, *rank.children) if process and process.state]
    reasons = {stack.missing for stack in found}
    return next(iter(reasons)) if len(reasons) == 1 and not any(stack.value for stack in found) else ""


def _verdict(evidence: Evidence) -> Verdict:
    """The diagnosis. A fault in a rule costs the verdict, not the bundle and not what is done about the job."""
    from .diagnose import diagnose  # late: a run that never stalls does not pay for it

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


def _evidence(outcome: Outcome, ranks: tuple[RankEvidence, ...], known: Known, host: str) -> Evidence:
    """Ranks that were seen, those that had ended before anybody could look, and those nobody knows of."""
    seen = {rank.rank for rank in ranks}
    ended = tuple(
        RankEvidence(
            rank=rank,
            host=host,
            pid=item.progress.pid if item.progress else 0,
            local_rank=item.progress.local_rank if item.progress else -1,
            progress=item.progress,
            exception=item.exception,
            exit=item.exit,
            code_roots=item.code_roots,
            beacon=item.progress is not None,
        )
        for rank, item in known.ranks.items()
        if rank not in seen
    )
    everybody = tuple(sorted((*ranks, *ended), key=lambda evidence: evidence.rank))
    there = {rank.rank for rank in everybody}
    missing = tuple(rank for rank in range(known.world_size) if rank not in there)
    return Evidence(outcome=outcome, world_size=known.world_size, ranks=everybody, missing_ranks=missing)


def _finish(staging: Staging, verdict: Verdict, evidence: Evidence, about: Circumstances, timeline: Timeline) -> None:
    """verdict, reports, launch and, last, the manifest that lists all the others."""
    staging.add_json(Artifact("verdict.json", OURS, 0.0), verdict)
    staging.add_json(Artifact("launch.json", OURS, 0.0), about.launch)
    from . import report

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
        "timeline": timeline.plus("written").moments,
        "artifacts": listed,
        "missing": [artifact.path for artifact in listed if artifact.missing],
    }
    problem = staging.write("manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    if problem:
        staging.artifacts.append(Artifact("manifest.json", OURS, 0.0, problem))
