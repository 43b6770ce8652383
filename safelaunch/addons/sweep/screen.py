"""Shows ``safelaunch colaunch`` on the screen: the live table, the dry run and the summary."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import PurePath
from statistics import median
from typing import Any

from safelaunch.addons.sweep.batch_script import SweepPrograms, script, work_name
from safelaunch.addons.sweep.engine import RunningAttempt
from safelaunch.addons.sweep.jobs import SweepJob, Track, port_names
from safelaunch.addons.sweep.paths import SweepPaths, summary_of
from safelaunch.addons.sweep.pool import SharePool
from safelaunch.addons.sweep.scheduler import Scheduler, SubmittedWork
from safelaunch.addons.sweep.view import JobStatus, Screen, Snapshot
from safelaunch.cli.table import TextTable
from safelaunch.job.paths import seen_from_here, working_directory
from safelaunch.model.words import rate, since
from safelaunch.system.console import PREFIX, command_lines, redact, say
from safelaunch.system.printable import clean, clean_text
from safelaunch.system.redaction.redact import redact_env
from safelaunch.system.time_limit import at_most

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
# Columns to drop first if the terminal is too narrow.
_LESS_WANTED = ("parameters", "port", "estimate", "rate", "step", "on", "elapsed", "metric", "age")
# Jobs to show first if not all fit.
_ORDER = ("running", "hung", "failed", "timed-out", "waiting", "skipped", "cancelled", "succeeded")
REFRESH_S = 0.5
WRITE_DEADLINE_S = 0.3
STUCK_RETRY_S = 5.0
PLAIN_REFRESH_S = 60.0
_RIGHT = frozenset({"step", "rate", "age", "elapsed", "estimate"})
MOST_BUNDLE_LINES = 9  # at most below the table; at most a third of the screen
_STYLES = {"running": "bold", "succeeded": "green", "failed": "red", "hung": "red", "timed-out": "red"}


def headline(snapshot: Snapshot) -> str:
    """Summarizes the sweep: ``12 of 30 done, 4 running, 1 failed, 14 waiting; about 3m20s left``."""
    counts = Counter[str](job.state for job in snapshot.jobs)
    done = sum(count for state, count in counts.items() if state not in ("running", "waiting"))
    parts = [f"{done} of {len(snapshot.jobs)} done"]
    quiet = sum(job.live is not None and job.live.pace.quiet for job in snapshot.jobs)
    notes = {"running": f" ({quiet} quiet)" if quiet else ""}
    parts += [f"{counts[state]} {state}{notes.get(state, '')}" for state in _ORDER[:-1] if counts[state]]
    left_s = time_left_s(snapshot)
    tail = f"; {snapshot.stopped}" if snapshot.stopped else f"; about {since(left_s)} left" if left_s else ""
    return ", ".join(parts) + tail


def choose(snapshot: Snapshot, room: int) -> tuple[JobStatus, ...]:
    """Returns the ``room`` most important jobs, in the sweep's order."""
    ranked = sorted(range(len(snapshot.jobs)), key=lambda index: (_ORDER.index(snapshot.jobs[index].state), index))
    return tuple(snapshot.jobs[index] for index in sorted(ranked[: max(0, room)]))


def cells(job: JobStatus, typical_s: float | None) -> tuple[str, ...]:
    """Returns a job's row in the table of ``COLUMNS``. A job without recent steps has no rate and no estimate.

    Args:
        typical_s: Seconds that similar jobs took.
    """
    live, ended = (job.live or RunningAttempt(), None) if job.state == "running" else (RunningAttempt(), job.outcome)
    pace = live.pace
    step = ended.last_step if ended else pace.step
    elapsed_s = ended.duration_s if ended else live.elapsed_s or None
    left_s = typical_s - live.elapsed_s if typical_s is not None and job.state == "running" else 0.0
    state = job.why if job.state == "running" and job.why else "quiet" if pace.quiet else job.state
    attempt = f" (attempt {job.attempts})" if job.attempts > 1 and job.state == "running" else ""
    return (
        job.job.name,
        parameters(job.job),
        state + attempt,
        live.on or "-",
        live.ports or "-",
        cause(job),
        "-" if step is None else str(step),
        "0/s" if pace.quiet else "-" if pace.steps_per_s is None else rate(pace.steps_per_s),
        "-" if pace.age_s is None else since(pace.age_s),
        ", ".join(f"{clean(name)}={_metric(value)}" for name, value in (ended.metrics if ended else {}).items()) or "-",
        "-" if elapsed_s is None else since(elapsed_s),
        "-" if left_s <= 0 or pace.quiet else since(left_s),
    )


def cause(job: JobStatus) -> str:
    """Returns the cause in the job's verdict, or the cause in an early look, with a question mark.

    If there is neither, returns the first wrong result, or the scheduler's reason why the job is waiting.
    """
    if job.live is None:
        return clean(job.outcome.cause) if job.outcome is not None and job.outcome.cause else "-"
    if job.state == "waiting":
        return clean(job.live.queued_for or "") or "-"
    return f"{clean(job.live.pace.cause)}?" if job.live.pace.cause else clean(job.live.pace.wrong) or "-"


def bundles(jobs: Sequence[JobStatus], most: int, here: PurePath) -> list[str]:
    """Returns the paths of the latest bundles, each below its job's name, in at most ``most`` lines.

    Paths are shown relative to ``here`` if that is shorter.
    """
    with_bundle = [job for job in jobs if job.outcome is not None and job.outcome.bundle]
    shown = with_bundle[-max(0, (most - (len(with_bundle) * 2 > most)) // 2) :] if most > 2 else []
    lines = []
    for job in shown:
        assert job.outcome is not None
        path = PurePath(job.outcome.bundle)
        near = path.relative_to(here) if path.is_relative_to(here) else path
        lines += [f"{job.job.name}: {clean(job.outcome.cause) or job.outcome.state}", f"  {clean(str(near))}"]
    more = len(with_bundle) - len(shown)
    return [*lines, *([f"and {many(more, 'more bundle')}: see summary.csv"] if more else [])]


def parameters(job: SweepJob) -> str:
    return clean(" ".join(f"{name}={value}" for name, value in job.params)) or "-"


def typical_s(snapshot: Snapshot) -> dict[str, float]:
    took: dict[str, list[float]] = {}
    for job in snapshot.jobs:
        if job.state == "succeeded" and job.outcome is not None:
            took.setdefault(job.job.group, []).append(job.outcome.duration_s)
    return {group: median(times) for group, times in took.items()}


def time_left_s(snapshot: Snapshot) -> float | None:
    """Estimates the seconds until all jobs have ended; None if no job has ended yet."""
    typical = typical_s(snapshot)
    left = []
    for job in snapshot.jobs:
        if job.state in ("running", "waiting"):
            if job.job.group not in typical:
                return None
            left.append(max(0.0, typical[job.job.group] - (job.live.elapsed_s if job.live is not None else 0.0)))
    at_once = max(1, sum(job.state == "running" for job in snapshot.jobs))
    return max(sum(left) / at_once, max(left)) if left else None


def many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def describe(jobs: Sequence[SweepJob], paths: SweepPaths, pool: SharePool, width: int) -> list[str]:
    lines = [f"{many(len(jobs), 'job')} on {many(pool.capacity, pool.kind)}, in {paths.root}", ""]
    for sweep_job in jobs:
        job = sweep_job.with_ports([f"{{{name}}}" for name in port_names(sweep_job.ports)])
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


def describe_batch(jobs: Sequence[SweepJob], paths: SweepPaths, programs: SweepPrograms, queue: Scheduler) -> list[str]:
    lines = [f"{many(len(jobs), 'job')} through {queue.name}, in {paths.root}"]
    lines += [
        "<sweep> stands for an id that colaunch makes, <NAME> for a job's number, @{...} for what only the job knows."
    ]
    names = {job.name: work_name(job.group, "<sweep>", number) for number, job in enumerate(jobs, start=1)}
    for job in jobs:
        name = names[job.name]
        after = tuple(f"<{names[need]}>" for need in job.needs)
        shown = replace(job, env=tuple(redact_env(dict(job.env)).items()))
        work = SubmittedWork(name, job, paths.batch_script(name), paths.batch_output(name), after)
        lines += ["", f"# {' '.join(queue.submit_command(work))}"]
        lines += script(name, shown, 1, paths, programs, queue).rstrip("\n").split("\n")
    return lines


def summary_lines(tracks: Sequence[Track], paths: SweepPaths | None = None) -> list[str]:
    """Returns the final table, with one line per job, then why jobs failed, and the totals. ``paths`` locates logs."""
    metrics = list(dict.fromkeys(name for track in tracks if track.outcome for name in track.outcome.metrics))
    columns = ("job", "parameters", "state", "cause", "exit", "took", "attempts", "step", *metrics)
    table = TextTable(columns, [_summary_row(track, metrics) for track in tracks])
    if not any(track.outcome and track.outcome.cause for track in tracks):
        table = table.without("cause")
    counts = Counter[str](track.state for track in tracks)
    total = ", ".join(f"{counts[state]} {state}" for state in reversed(_ORDER) if counts[state])
    return [*table.lines(), *_remarks(tracks, paths), "", f"{many(len(tracks), 'job')}: {total}"]


def _remarks(tracks: Sequence[Track], paths: SweepPaths | None) -> list[str]:
    """Returns lines that say why jobs failed or didn't run, and where the evidence is."""
    columns = []
    for track in tracks:
        ended = track.outcome
        if track.state in ("succeeded", "cancelled"):
            continue
        bundle = ended.bundle if ended is not None else ""
        log = os.fspath(paths.log(track.job.name, track.attempts)) if paths is not None and track.attempts else ""
        reason = track.why or summary_of(bundle) or _exit_words(track)
        if reason:
            columns.append(f"{track.job.name}: {clean(reason)}")
            columns += [f"  {clean(seen_from_here(place))}" for place in (bundle or log,) if place]
    cancelled = Counter(track.why for track in tracks if track.state == "cancelled")
    columns += [f"{many(count, 'cancelled job')}: {clean(why)}" for why, count in cancelled.items() if why]
    return ["", *columns] if columns else []


def _exit_words(track: Track) -> str:
    if track.outcome is None or track.state not in ("failed", "hung", "timed-out"):
        return ""
    code = track.outcome.exit_code
    return f"{track.state}{f' with exit code {code}' if code is not None else ''}; the end of its log may say why"


def _summary_row(track: Track, metrics: Sequence[str]) -> tuple[str, ...]:
    ended = track.outcome
    values = ended.metrics if ended is not None else {}
    return (
        track.job.name,
        parameters(track.job),
        track.state,
        clean(ended.cause) if ended is not None and ended.cause else "-",
        "-" if ended is None or ended.exit_code is None else str(ended.exit_code),
        "-" if ended is None else since(ended.duration_s),
        str(track.attempts),
        "-" if ended is None or ended.last_step is None else str(ended.last_step),
        *(_metric(values.get(name)) for name in metrics),
    )


def _metric(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else clean(str(value))


@contextmanager
def open_screen() -> Iterator[Screen]:
    """Opens the kind of screen that suits stdout; restores the terminal at the end."""
    if not sys.stdout.isatty():
        yield PlainScreen()
        return
    from rich.live import Live

    live = Live(auto_refresh=False, vertical_overflow="crop", transient=True)  # the summary replaces it
    live.start()
    screen = TerminalScreen(live)
    try:
        yield screen
    finally:
        with suppress(OSError):  # the terminal might be gone
            live.stop()
        for text in screen.notes:
            say(text)


class PlainScreen:
    """Prints one line per event on stderr, and the overall progress once a minute."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + PLAIN_REFRESH_S

    def note(self, text: str) -> None:
        say(text)

    show_end = note

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PLAIN_REFRESH_S
            say(headline(snapshot()))


class TerminalScreen:
    """Shows a live table below the events.

    If the terminal stops reading (Ctrl-S, a dead connection), the sweep continues, and the screen retries only briefly.
    """

    def __init__(self, live: Any) -> None:
        self._live = live
        self._next_s = 0.0
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def show_end(self, text: str) -> None:
        """Does nothing, because the table and the summary show it."""

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + REFRESH_S
        from rich.text import Text

        try:
            with at_most(WRITE_DEADLINE_S):
                for text in self.notes:
                    self._live.console.print(Text(PREFIX + clean_text(redact(text))))
                self.notes.clear()
                size = self._live.console.size
                self._live.update(picture(snapshot(), size.height, size.width), refresh=True)
        except OSError:  # the terminal is gone, or doesn't read
            self._next_s = time.monotonic() + STUCK_RETRY_S


def picture(snapshot: Snapshot, height: int, width: int) -> Any:
    from rich.console import Group
    from rich.text import Text

    bundle_lines = bundles(snapshot.jobs, min(MOST_BUNDLE_LINES, height // 3), working_directory())
    lines_of_bundles = sum(1 + (len(line) - 1) // max(1, width) for line in bundle_lines)
    shown = choose(snapshot, max(3, height - 5 - lines_of_bundles))
    typical = typical_s(snapshot)
    quiet = [job.live is not None and job.live.pace.quiet for job in shown]
    styles = ["yellow" if still else _STYLES.get(job.state, "dim") for job, still in zip(shown, quiet, strict=True)]
    rows = [cells(job, typical.get(job.job.group)) for job in shown]
    table = TextTable(COLUMNS, rows, _RIGHT, styles, _LESS_WANTED).fitted(width)
    more = len(snapshot.jobs) - len(shown)
    rest = [Text(f"... and {more} more", style="dim")] if more else []
    paths = [Text(redact(line), overflow="fold", style="red") for line in bundle_lines]
    return Group(
        table.drawn(cut={"job": table.width_of("job")}), *rest, *paths, Text(redact(headline(snapshot)), style="bold")
    )
