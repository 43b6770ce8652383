"""The lines and cells that show a sweep in ``safelaunch colaunch``. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from statistics import median

from safelaunch.cli.status_rows import rate, since
from safelaunch.job.paths import seen_from_here
from safelaunch.sweep.jobs import Job, Metric, Track, port_names
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.pool import Pool
from safelaunch.sweep.view import JobView, Snapshot
from safelaunch.system.console import command_lines
from safelaunch.system.printable import clean

GAP = "  "
COLUMNS = (
    "job",
    "parameters",
    "state",
    "on",
    "port",
    "cause",
    "step",
    "rate",
    "age",
    "metric",
    "elapsed",
    "estimate",
)
# The columns to drop first if the terminal is too narrow.
_LESS_WANTED = ("parameters", "port", "estimate", "rate", "step", "on", "elapsed", "metric", "age")
# The jobs to show first if not all fit.
_ORDER = ("running", "hung", "failed", "timed-out", "waiting", "skipped", "cancelled", "succeeded")


# --- while it runs ----------------------------------------------------------------------------------------------------


def headline(snapshot: Snapshot) -> str:
    """``12 of 30 done, 4 running, 1 failed, 14 waiting; about 3m20s left``."""
    counts = Counter[str](job.state for job in snapshot.jobs)
    done = sum(count for state, count in counts.items() if state not in ("running", "waiting"))
    parts = [f"{done} of {len(snapshot.jobs)} done"]
    quiet = sum(job.quiet for job in snapshot.jobs)
    notes = {"running": f" ({quiet} quiet)" if quiet else ""}
    parts += [f"{counts[state]} {state}{notes.get(state, '')}" for state in _ORDER[:-1] if counts[state]]
    left_s = time_left_s(snapshot)
    tail = f"; {snapshot.stopped}" if snapshot.stopped else f"; about {since(left_s)} left" if left_s else ""
    return ", ".join(parts) + tail


def choose(snapshot: Snapshot, room: int) -> tuple[JobView, ...]:
    """At most ``room`` jobs: those that matter most, in their order."""
    ranked = sorted(range(len(snapshot.jobs)), key=lambda index: (_ORDER.index(snapshot.jobs[index].state), index))
    return tuple(snapshot.jobs[index] for index in sorted(ranked[: max(0, room)]))


def cells(job: JobView, typical_s: float | None) -> tuple[str, ...]:
    """One row, in the order of ``COLUMNS``. ``typical_s``: the time that similar jobs took, in seconds.

    Of a job that is quiet, a rate and an estimate from before would mislead.
    """
    ended = job.outcome if job.state != "running" else None
    step = job.step if job.state == "running" else ended.last_step if ended else None
    elapsed_s = job.elapsed_s if job.state == "running" else ended.duration_s if ended else None
    left_s = typical_s - (job.elapsed_s or 0.0) if typical_s is not None and job.state == "running" else None
    state = job.why if job.state == "running" and job.why else "quiet" if job.quiet else job.state
    pace = "-" if job.steps_per_s is None else rate(job.steps_per_s)
    attempt = f" (attempt {job.attempts})" if job.attempts > 1 and job.state == "running" else ""
    return (
        job.job.name,
        parameters(job.job),
        state + attempt,
        job.on or "-",
        job.ports or "-",
        cause(job),
        "-" if step is None else str(step),
        "0/s" if job.quiet else pace,
        "-" if job.age_s is None else since(job.age_s),
        ", ".join(f"{clean(name)}={_metric(value)}" for name, value in _metrics(job).items()) or "-",
        "-" if elapsed_s is None else since(elapsed_s),
        "-" if left_s is None or left_s <= 0 or job.quiet else since(left_s),
    )


def cause(job: JobView) -> str:
    """By the verdict of an attempt that ended; with a question mark, what an early look at a running one suggests.

    Without one, what --check-every has found there.
    """
    if job.state == "running":
        return f"{clean(job.cause)}?" if job.cause else clean(job.wrong) or "-"
    if job.state == "waiting" and job.cause:
        return clean(job.cause)
    return clean(job.outcome.cause) if job.outcome is not None and job.outcome.cause else "-"


def _metrics(job: JobView) -> Mapping[str, Metric]:
    return job.metrics if job.state == "running" else job.outcome.metrics if job.outcome is not None else {}


def bundles(jobs: Sequence[JobView], most: int, here: PurePath) -> list[str]:
    """The paths of the newest bundles, whole, each below its job's name; from the present directory where that is less.

    At most ``most`` lines.
    """
    found = [job for job in jobs if job.outcome is not None and job.outcome.bundle]
    shown = found[-max(0, (most - (len(found) * 2 > most)) // 2) :] if most > 2 else []
    lines = []
    for job in shown:
        assert job.outcome is not None
        path = PurePath(job.outcome.bundle)
        near = path.relative_to(here) if path.is_relative_to(here) else path
        lines += [f"{job.job.name}: {clean(job.outcome.cause) or job.outcome.state}", f"  {clean(str(near))}"]
    more = len(found) - len(shown)
    return [*lines, *([f"and {many(more, 'more bundle')}: see summary.csv"] if more else [])]


def columns(rows: Sequence[Sequence[str]], width: int) -> tuple[str, ...]:
    """The columns that fit into ``width`` with these rows; empty ones are dropped first."""
    kept = {name: [name, *(row[index] for row in rows)] for index, name in enumerate(COLUMNS)}
    silent = [name for name in (*_LESS_WANTED, "cause") if set(kept[name][1:]) <= {"-"}]
    for name in dict.fromkeys((*silent, *_LESS_WANTED)):
        if sum(max(map(len, cells)) for cells in kept.values()) + len(GAP) * (len(kept) - 1) <= width:
            break
        del kept[name]
    return tuple(kept)


def parameters(job: Job) -> str:
    return clean(" ".join(f"{name}={value}" for name, value in job.params)) or "-"


def typical_s(snapshot: Snapshot) -> dict[str, float]:
    """By group: the median time that succeeded jobs took."""
    took: dict[str, list[float]] = {}
    for job in snapshot.jobs:
        if job.state == "succeeded" and job.outcome is not None:
            took.setdefault(job.job.group, []).append(job.outcome.duration_s)
    return {group: median(times) for group, times in took.items()}


def time_left_s(snapshot: Snapshot) -> float | None:
    """Estimated time until all jobs have ended, with as many at a time as now; None if no job has ended yet."""
    typical = typical_s(snapshot)
    left = []
    for job in snapshot.jobs:
        if job.state in ("running", "waiting"):
            if job.job.group not in typical:
                return None
            left.append(max(0.0, typical[job.job.group] - (job.elapsed_s or 0.0)))
    at_once = max(1, sum(job.state == "running" for job in snapshot.jobs))
    return max(sum(left) / at_once, max(left)) if left else None


# --- before and after -------------------------------------------------------------------------------------------------


def many(number: int, what: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {what}{'s' * (number != 1)}"


def describe(jobs: Sequence[Job], paths: SweepPaths, pool: Pool, width: int) -> list[str]:
    """For --dry-run: every job as colaunch would start it."""
    lines = [f"{many(len(jobs), 'job')} on {many(pool.capacity, pool.kind)}, in {paths.root}", ""]
    for one in jobs:
        job = one.with_ports([f"{{{name}}}" for name in port_names(one.ports)])
        env = [f"{name}={value}" for name, value in job.env]
        lines.append(f"{job.name}  ({job.where})")
        lines += command_lines([clean(shlex.quote(word)) for word in (*env, "safelaunch", *job.words)], "  ", width)
        about = [many(pool.units(job.gpus), pool.kind), f"in {job.cwd}"]
        about += [many(job.ports, "port")] if job.ports else []
        about += [f"needs {', '.join(job.needs)}"] if job.needs else []
        about += [f"at most {job.timeout_s:g} s"] if job.timeout_s is not None else []
        about += [f"retries {job.retries}"] if job.retries else []
        lines.append(f"  {'; '.join(about)}")
    return lines


def summary_lines(tracks: Sequence[Track]) -> list[str]:
    """The table at the end: one line per job, then the totals."""
    metrics = list(dict.fromkeys(name for track in tracks if track.outcome for name in track.outcome.metrics))
    causes = ["cause"] if any(track.outcome and track.outcome.cause for track in tracks) else []
    rows = [("job", "parameters", "state", *causes, "exit", "took", "attempts", "step", *metrics)]
    rows += [_summary_row(track, metrics, with_cause=bool(causes)) for track in tracks]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = Counter[str](track.state for track in tracks)
    total = ", ".join(f"{counts[state]} {state}" for state in reversed(_ORDER) if counts[state])
    return [*lines, *_remarks(tracks), "", f"{many(len(tracks), 'job')}: {total}"]


def _remarks(tracks: Sequence[Track]) -> list[str]:
    """Bundles, and why jobs did not run: both are too long for a column."""
    found = []
    for track in tracks:
        bundle = track.outcome.bundle if track.outcome is not None else ""
        if bundle or track.why:
            found.append(f"{track.job.name}: {clean(seen_from_here(bundle) if bundle else track.why)}")
    return ["", *found] if found else []


def _summary_row(track: Track, metrics: Sequence[str], *, with_cause: bool) -> tuple[str, ...]:
    ended = track.outcome
    found = ended.metrics if ended is not None else {}
    return (
        track.job.name,
        parameters(track.job),
        track.state,
        *([clean(ended.cause) if ended is not None and ended.cause else "-"] if with_cause else []),
        "-" if ended is None or ended.exit_code is None else str(ended.exit_code),
        "-" if ended is None else since(ended.duration_s),
        str(track.attempts),
        "-" if ended is None or ended.last_step is None else str(ended.last_step),
        *(_metric(found.get(name)) for name in metrics),
    )


def _metric(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else clean(str(value))
