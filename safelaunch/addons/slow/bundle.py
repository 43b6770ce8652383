"""Writes the bundle of a slow rank: verdict, recording, readings and report page."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

from safelaunch.addons.record.files import files_of
from safelaunch.addons.record.rows import RecordingReport
from safelaunch.addons.record.slowness import Slowness, TimeFinding, verdict_of
from safelaunch.addons.slow.late_rank import SlowRanks
from safelaunch.addons.slow.service import Examination
from safelaunch.addons.slow.step_times import Onset
from safelaunch.bundle.publication import PUBLISH_DEADLINE_S, Publication, name_of, publish
from safelaunch.bundle.staging import OURS, Staging
from safelaunch.model import (
    Artifact,
    Claim,
    Culprit,
    JobShape,
    Manifest,
    Moment,
    Slowdown,
    Verdict,
    format_ranks,
    rank_words,
)
from safelaunch.stacks.frames import place
from safelaunch.supervise.respond import JobView
from safelaunch.verdict.phrases import capital

CAUSE = "late-rank"


@dataclass(frozen=True, slots=True)
class FoundSlow:
    """A slow rank, with the evidence. ``onset`` is None if it is slow from the start."""

    slow: SlowRanks
    onset: Onset | None
    examination: Examination
    now_s: float
    """median duration of a step"""
    unit: str
    """``step``, or ``collective`` in a job without steps"""
    onset_unix_s: float = 0.0


def verdict(found: FoundSlow, job: JobView) -> Verdict:
    slow, recording = found.slow, found.examination.recording
    claims = [Claim(capital(slow.waits), "recording.json")]
    if slow.reason is not None:
        claims.append(Claim(f"{rank_words(slow.ranks)}: {slow.reason.words}", "readings.json"))
    for readings in found.examination.readings:
        if readings.rank in slow.ranks:
            grown = (f"{name.replace('_', ' ')} +{count}" for name, count in readings.gpu_errors.items())
            claims += [Claim(f"rank {readings.rank}: errors of its GPU: {words}", "readings.json") for words in grown]
    launch = job.context.launch
    typed = launch.get("typed")
    return Verdict(
        schema=1,
        outcome="slow",
        cause=CAUSE,
        confidence="high" if slow.reason is not None and slow.link is None else "medium",
        summary=f"{headline(found)}.",
        culprits=tuple(_culprit(rank, found, job) for rank in slow.ranks),
        victims=format_ranks(
            [rank.rank for rank in recording.ranks if rank.rank not in slow.ranks and not rank.missing]
        ),
        evidence=tuple(claims),
        ruled_out=(),
        missing=tuple(rank.missing for rank in recording.ranks if rank.missing),
        suggestions=advice(slow),
        doubts=_doubts(slow),
        run=job.context.run_name,
        host=job.context.host,
        time=_utc(time.time()),
        world_size=job.watch.world_size,
        versions={name: str(launch[name]) for name in ("torch", "safelaunch") if launch.get(name)},
        command=("safelaunch", *map(str, typed)) if isinstance(typed, list) and typed else (),
        slow=_slowdown(found),
    )


def _doubts(slow: SlowRanks) -> tuple[str, ...]:
    if slow.link is not None:
        return ("All ranks wait equally, so only the connections show the node.",)
    return () if slow.reason is not None else ("No counter explains most of the loss.",)


def _culprit(rank: int, found: FoundSlow, job: JobView) -> Culprit:
    slow, recording = found.slow, found.examination.recording
    record = next((each for each in recording.ranks if each.rank == rank), None)
    progress = job.watch.last_progress.get(rank)
    where = f"spends its extra time in {place(slow.frame)}" if slow.frame is not None else "is slow in many lines"
    where = "has a slow network link" if slow.link is not None else f"{where}{slow.why}"
    return Culprit(
        rank=rank,
        host=record.host if record is not None else "",
        pid=record.main.pid if record is not None and record.main is not None else -1,
        process="main",
        frame=slow.frame,
        step=progress.step if progress is not None else None,
        reason=f"Rank {rank} {where}",
    )


def _slowdown(found: FoundSlow) -> Slowdown:
    slow, onset = found.slow, found.onset
    return Slowdown(
        step=onset.step if onset is not None else None,
        since=_utc(found.onset_unix_s) if onset is not None else "",
        before_s=round(onset.before_s, 4) if onset is not None else 0.0,
        now_s=round(found.now_s, 4),
        lost=round(slow.lost, 4),
        spent=round(slow.spent, 4),
        spent_by_others=round(slow.spent_by_others, 4),
        reason=slow.reason.kind if slow.reason is not None else "",
        explains=round(slow.reason.share, 4) if slow.reason is not None else 0.0,
    )


def headline(found: FoundSlow) -> str:
    onset, unit = found.onset, found.unit
    words = found.slow.words
    if onset is None:
        return capital(words)
    clock = time.strftime("%H:%M", time.localtime(found.onset_unix_s))
    times = f"{seconds(onset.before_s)} -> {seconds(found.now_s)} a {unit}"
    return f"Slower since {unit} {onset.step:,} ({clock}): {times}; {words}"


def seconds(value: float) -> str:
    if value < 1e-4:
        return f"{1e6 * value:.3g} µs"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def advice(slow: SlowRanks) -> tuple[str, ...]:
    if slow.reason is not None and slow.reason.kind in _ADVICE:
        return (_ADVICE[slow.reason.kind],)
    return ("Compare this rank's data and device with the others'.",)


_ADVICE = {
    "cpu-queue": "Give each rank its own CPU cores, and move other processes off them.",
    "cpu-quota": "Raise the CPU limit of the rank's cgroup or container.",
    "cpu-steal": "Move the job to a node that doesn't share its CPUs.",
    "stopped": "Find what sends this rank SIGSTOP: a debugger, a job scheduler, a freezer.",
    "disk": "Read the data from a faster disk, or prefetch it in DataLoader workers.",
    "memory": "Give the node more memory, so that files stay in its cache, or read less.",
    "garbage-collection": "Call gc.freeze() after the setup, or gc.disable() and gc.collect() every N steps.",
    "gil": "Move that thread's work to a separate process, or to code that releases the GIL.",
    "network": "Check the node's network card, cable and switch port, and what else uses the link.",
    "gpu-clock": "Check the GPU's temperature, power limit and clocks (nvidia-smi -q -d PERFORMANCE,CLOCK).",
}


def write_bundle(found: FoundSlow, job: JobView) -> tuple[Verdict, Publication]:
    """Writes the bundle and publishes it. Never raises because of a disk."""
    context, recording = job.context, found.examination.recording
    judged = context.cleaned(verdict(found, job))
    begin = found.onset_unix_s or recording.at_unix_s
    root = context.unfinished.name(context.run_dir, context.run_dir, "slow")
    staging = Staging(root, context.redactor)
    context.unfinished.hold(root)
    facts = {"reason": found.slow.reason.words if found.slow.reason is not None else ""}
    if found.onset is not None:
        facts[f"slower since {found.unit}"] = f"{found.onset.step:,}, {_utc(begin)}"
        facts[f"{found.unit}, before and now"] = f"{seconds(found.onset.before_s)}, {seconds(found.now_s)}"
    report = RecordingReport(recording, _slowness(found, judged), facts=facts)
    for path, text in files_of(report).items():
        staging.add_report(Artifact(path, OURS, 0.0), text)
    staging.add_json(Artifact("readings.json", OURS, 0.0), found.examination.readings)
    staging.add_json(Artifact("verdict.json", OURS, 0.0), judged)
    staging.add_json(Artifact("launch.json", OURS, 0.0), context.launch)
    _finish(staging, job, begin)
    name = name_of(context.run_name, time.time(), "slow")
    published = publish(
        root,
        context.bundle_dir,
        name,
        context.fallback_dir,
        context.keeping,
        owner=context.owner,
        deadline_s=PUBLISH_DEADLINE_S,
    )
    context.unfinished.let_go(root)
    return judged, published


def _slowness(found: FoundSlow, judged: Verdict) -> Slowness:
    slow, slowness = found.slow, verdict_of(found.examination.recording)
    first = TimeFinding("late-rank", slow.lost, slow.ranks, judged.summary, slow.frame, judged.suggestions[0])
    besides = (finding for finding in slowness.findings if finding.kind != "late-rank")
    return replace(slowness, headline=judged.summary, findings=(first, *besides))


def _finish(staging: Staging, job: JobView, begin_unix_s: float) -> None:
    listed = staging.close()
    written_unix_s = round(time.time(), 3)
    staging.finish(
        Manifest(
            host=job.context.host,
            written_unix_s=written_unix_s,
            user=os.getuid(),
            job=JobShape(outcome="slow", world_size=job.watch.world_size),
            timeline=(Moment("slow", begin_unix_s), Moment("written", written_unix_s)),
            artifacts=listed,
            missing=tuple(artifact.path for artifact in listed if artifact.missing),
        )
    )


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
