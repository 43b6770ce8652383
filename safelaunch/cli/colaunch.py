"""``safelaunch colaunch``: many jobs on one node, each with its own GPUs or cores, each an ordinary safelaunch run."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from safelaunch.cli import program
from safelaunch.cli.colaunch_options import Options, parse
from safelaunch.cli.colaunch_rows import (
    COLUMNS,
    GAP,
    bundles,
    cells,
    choose,
    columns,
    describe,
    headline,
    many,
    summary_lines,
    typical_s,
)
from safelaunch.cli.run import understood
from safelaunch.job import torchrun
from safelaunch.job.argv import CommandLine, split
from safelaunch.job.paths import seen_from_here, working_directory
from safelaunch.leases.gpus import NodeGpus
from safelaunch.leases.store import store_of
from safelaunch.settings.config import options_of, resolve
from safelaunch.settings.yamlfile import read_yaml
from safelaunch.sweep import summary
from safelaunch.sweep.expand import Places, expand
from safelaunch.sweep.grid import Matrix
from safelaunch.sweep.jobs import Job
from safelaunch.sweep.journal import Attempt, Journal, attempts
from safelaunch.sweep.local import Local, Place
from safelaunch.sweep.paths import DEFAULT_PARENT, SweepPaths
from safelaunch.sweep.placeholders import Text
from safelaunch.sweep.pool import Gpus, Pool, Slots, check_fits, default_slots
from safelaunch.sweep.resume import History, history, recovered, wait_for_remains
from safelaunch.sweep.runner import Runner
from safelaunch.sweep.signals import Signals
from safelaunch.sweep.slurm.engine import SlurmEngine
from safelaunch.sweep.spec import Template, templates_of
from safelaunch.sweep.sweep import Rules, Sweep
from safelaunch.sweep.view import Screen, Snapshot
from safelaunch.system.console import PREFIX, redact, room, say, show
from safelaunch.system.deadline import at_most
from safelaunch.system.errors import PresetError, SpecError, UsageError
from safelaunch.system.printable import clean_text
from safelaunch.system.redaction.job_secrets import secret_values
from safelaunch.system.redaction.redactor import Redactor

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Returns 0 if every job succeeded, 1 if not, 2 if nothing was started, 128 + N if signal N stopped it."""
    options = parse(argv)
    cwd, environ = working_directory(), dict(os.environ)
    redact.use(Redactor(secret_values(environ, argv, [os.fspath(cwd)])).text)
    templates = _templates(options, cwd)
    paths = SweepPaths(cwd / (options.sweep_dir or f"{DEFAULT_PARENT}/{_sweep_name(options)}"))
    jobs = expand(templates, Places(os.fspath(paths.root), os.fspath(paths.jobs), os.fspath(cwd)))
    if options.engine == "slurm":
        check_jobs(jobs, "Slurm", environ)
        return _on_slurm(options, jobs, paths, environ)
    pool = make_pool(jobs, options.slots, options.max_parallel, environ)
    check_jobs(jobs, pool.kind, environ)
    if options.dry_run:
        show("\n".join(describe(jobs, paths, pool, room())), fold=True)
        return 0
    try:
        return _run(options, jobs, pool, paths, environ)
    except KeyboardInterrupt:
        return INTERRUPTED


def _on_slurm(options: Options, jobs: Sequence[Job], paths: SweepPaths, environ: dict[str, str]) -> int:
    from safelaunch.cli import colaunch_slurm

    if options.dry_run:
        show("\n".join(colaunch_slurm.describe(jobs, paths)))
        return 0
    with suppress(KeyboardInterrupt):
        colaunch_slurm.connect(environ)  # raises if there is none, before the sweep writes anything
        journal = Journal(paths.journal)
        known = _history(options, journal, jobs, paths)
        sweep, site, before = colaunch_slurm.begin(options, jobs, paths, journal, known, environ)
        with Signals() as signals, open_screen() as screen:
            runner = Runner(sweep, SlurmEngine(sweep, site, screen.note, before), site.journal, paths, screen)
            runner.run(signals)
            problem = _write_summary(sweep, paths)
        return _finish(sweep, paths, problem, runner.stopped_by)
    return INTERRUPTED


def _templates(options: Options, cwd: Path) -> tuple[Template, ...]:
    if options.spec is not None:
        try:
            root = read_yaml(cwd / Path(options.spec).expanduser(), options.spec)
        except PresetError as error:
            hint = (
                "within {...} and [...] text that holds a {placeholder} needs quotes" if "YAML" in error.message else ""
            )
            raise SpecError(error.message, error.fix or hint) from error
        return templates_of(root, options.metrics)
    template = Template(
        group="",
        where="the command line",
        command=tuple(Text(word, "the command line") for word in options.command),
        matrix=Matrix(options.grid),
        gpus=options.gpus_per_job,
        ports=options.ports_per_job,
        timeout_s=options.timeout_s,
        retries=options.retries,
        metrics=options.metrics,
    )
    return (template,)


def _sweep_name(options: Options) -> str:
    """The file's name; for a grid, a name derived from its command line, so the same line finds its sweep again."""
    if options.spec is not None:
        return Path(options.spec).stem
    said = repr([(axis.name, axis.values) for axis in options.grid] + [*options.command])
    return f"grid-{hashlib.sha256(said.encode()).hexdigest()[:8]}"


def _run(options: Options, jobs: Sequence[Job], pool: Pool, paths: SweepPaths, environ: dict[str, str]) -> int:
    pool.free()  # raises if nothing can be leased, before the sweep writes anything
    journal = Journal(paths.journal)
    known = _history(options, journal, jobs, paths)
    try:
        journal.begun(len(jobs))
    except OSError as error:
        raise UsageError(f"{paths.journal} cannot be written: {error.strerror or error}", "free some space") from error
    at_most = options.max_parallel or pool.capacity + (os.cpu_count() or 1)  # jobs without any GPU are limited by cores
    units = {job.name: pool.units(job.gpus) for job in jobs}
    sweep = Sweep(jobs, Rules(pool.capacity, at_most, options.fail_fast, units), known.before)
    say(f"{many(len(jobs), 'job')} on {many(pool.capacity, pool.kind)}, in {paths.root}")
    with Signals() as signals, open_screen() as screen:
        place = Place(paths, pool, store_of(environ), journal, environ, program())
        runner = Runner(sweep, Local(sweep, place, screen.note), journal, paths, screen)
        runner.run(signals)
        problem = _write_summary(sweep, paths)  # before the last update: the terminal may have stopped reading
    return _finish(sweep, paths, problem, runner.stopped_by)


def _history(options: Options, journal: Journal, jobs: Sequence[Job], paths: SweepPaths) -> History:
    """The earlier attempts, once all their processes have ended. Without --resume, raises UsageError if any exist."""
    found = attempts(journal.records)
    known = history(found, jobs)
    if found and not options.resume:
        raise UsageError(
            f"{paths.root} holds an earlier sweep ({known.done} of {len(jobs)} jobs have succeeded).",
            "--resume runs the remaining jobs; --sweep-dir puts a new sweep elsewhere",
        )
    if not found:
        return known
    with_slurm = [attempt.job for attempt in known.unfinished if attempt.handed]
    if with_slurm and options.engine != "slurm":
        raise UsageError(
            f"jobs of this sweep may still be in Slurm: {', '.join(with_slurm[:5])}",
            "use --engine slurm again, or choose another directory with --sweep-dir",
        )
    wait_for_remains([attempt for attempt in known.unfinished if not attempt.handed], paths, say)
    found = tuple(_with_word(attempt, journal, jobs, paths) for attempt in found)
    known = history(found, jobs)
    left = "running the others" if known.done < len(jobs) else "there is nothing left to run"
    say(f"{known.done} of {len(jobs)} jobs have already succeeded; {left}")
    if known.changed:
        say(f"these jobs changed since they succeeded and run again: {', '.join(known.changed)}")
    return known


def _with_word(attempt: Attempt, journal: Journal, jobs: Sequence[Job], paths: SweepPaths) -> Attempt:
    """The attempt with the outcome that its own safelaunch wrote down; adds it to the journal."""
    ended = recovered(attempt, jobs, paths) if attempt.outcome is None and not attempt.handed else None
    if ended is None:
        return attempt
    journal.ended(attempt.job, attempt.number, ended)
    return replace(attempt, outcome=ended)


def _write_summary(sweep: Sweep, paths: SweepPaths) -> str:
    """Writes the summary; returns why that failed, or an empty string."""
    try:
        summary.write(tuple(sweep.tracks.values()), paths)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _finish(sweep: Sweep, paths: SweepPaths, problem: str, stopped_by: int) -> int:
    tracks = tuple(sweep.tracks.values())
    show("\n".join(summary_lines(tracks)), fold=True)
    if problem:
        say(f"the summary cannot be written to {paths.root}: {problem}")
    else:
        say(f"summary: {seen_from_here(os.fspath(paths.summary_json))}, {paths.summary_csv.name}")
    if all(track.state == "succeeded" for track in tracks):
        return 0
    return 128 + stopped_by if stopped_by else 1


# Options that colaunch sets itself, and what to use instead.
OURS = {
    "--run-name": "the run has the job's name; use the key 'name'",
    "--bundle-dir": "bundles go into the job's directory in the sweep",
    "--gpus": "colaunch assigns the GPUs: use 'gpus: N' or --gpus-per-job N",
    "--wait": "colaunch waits by itself",
    "--no-lease": "colaunch leases the GPUs it assigns",
    "--dry-run": "give it to colaunch",
}


# --- before anything starts -------------------------------------------------------------------------------------------


def make_pool(jobs: Sequence[Job], slots: int | None, at_most: int | None, environ: Mapping[str, str]) -> Pool:
    """The node's GPUs (those in CUDA_VISIBLE_DEVICES if that is set), else slots. Raises ResourceError."""
    pool: Pool | None = None
    if slots is None:
        node = NodeGpus(environ)
        pool = Gpus(node) if node.pool.gpus else None
        if pool is None:
            say(f"no GPUs to assign ({node.missing or node.pool.origin}): each job gets a share of the CPU cores")
    if pool is None:
        cores = sorted(os.sched_getaffinity(0))
        units = [max(1, job.gpus) for job in jobs]
        pool = Slots(slots or default_slots(len(cores), units, at_most), cores)
    check_fits({job.name: pool.units(job.gpus) for job in jobs}, pool)
    return pool


def check_jobs(jobs: Sequence[Job], kind: str, environ: Mapping[str, str]) -> None:
    """Raises SpecError for a job that safelaunch would reject, or whose working directory does not exist."""
    try:
        torch: torchrun.Torch | None = torchrun.find(environ)
    except UsageError:
        if not all(job.words[:1] == ("exec",) for job in jobs):
            raise
        torch = None  # an exec may have its own
    table = torchrun.LazyOptions(torch.package) if torch is not None else {}
    seen: set[object] = set()
    for job in jobs:
        try:
            _check(job.with_ports(range(20000, 20000 + job.ports)), kind, table, torch, environ, seen)
        except UsageError as error:
            raise SpecError(f"{job.where}: job {job.name}: {error.message}", error.fix) from error


def _check(
    job: Job,
    kind: str,
    table: Mapping[str, bool],
    torch: torchrun.Torch | None,
    environ: Mapping[str, str],
    seen: set[object],
) -> None:
    form, words = ("exec", job.words[1:]) if job.words[0] == "exec" else ("run", job.words)
    own = {option.flag: option.takes_value for option in options_of(form)}
    command = split(words, own, table if form == "run" else {})
    for flag, _ in command.own:
        if flag in OURS:
            raise UsageError(f"{flag} cannot be given here", OURS[flag])
    if isinstance(table, torchrun.LazyOptions) and form == "run":
        understood(command, table)
    if not command.script:
        raise UsageError("the command names no script", "write the command as you would for safelaunch")
    _check_nodes(job, kind, command)
    if kind in ("GPU", "Slurm") and "CUDA_VISIBLE_DEVICES" in dict(job.env):
        raise UsageError("env: CUDA_VISIBLE_DEVICES cannot be set here", OURS["--gpus"])
    if not Path(job.cwd).is_dir():
        raise UsageError(f"cwd: directory {job.cwd} does not exist", "it is relative to colaunch's working directory")
    key = (command.own, job.env, job.cwd)
    if key not in seen:
        seen.add(key)
        version = torch.version if torch else None
        settings = resolve(command.own, {**environ, **dict(job.env)}, Path(job.cwd), lambda: version)
        for name in ("gpus", "wait", "dry-run"):
            if settings.is_explicit(name):
                raise UsageError(f"{name} is set ({settings.origin(name)})", OURS[f"--{name}"])


# What makes one job of several nodes; the Slurm engine gives it.
OF_SEVERAL_NODES = ("--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--rdzv-backend", "--master-addr")


def _check_nodes(job: Job, kind: str, command: CommandLine) -> None:
    if job.nodes == 1:
        return
    if kind != "Slurm":
        raise UsageError(f"nodes: {job.nodes} nodes, but this engine has one", "give --engine slurm")
    given = [word.partition("=")[0].replace("_", "-") for word in command.torchrun]
    for word in given:
        if word in OF_SEVERAL_NODES:
            raise UsageError(f"{word} cannot be given together with 'nodes'", "leave it out: colaunch gives it")


REFRESH_S = 0.5
WRITE_DEADLINE_S = 0.3
STUCK_RETRY_S = 5.0
PLAIN_REFRESH_S = 60.0
_RIGHT = {"step", "rate", "age", "elapsed", "estimate"}
MOST_BUNDLE_LINES = 9  # below the table, and a third of the screen at most
_STYLES = {"running": "bold", "succeeded": "green", "failed": "red", "hung": "red", "timed-out": "red"}


# --- the screen -------------------------------------------------------------------------------------------------------


@contextmanager
def open_screen() -> Iterator[Screen]:
    """The screen that fits stdout. Restores the terminal at the end."""
    if not sys.stdout.isatty():
        yield PlainScreen()
        return
    from rich.live import Live

    live = Live(auto_refresh=False, vertical_overflow="crop", transient=True)  # the summary has it all
    live.start()
    screen = TerminalScreen(live)
    try:
        yield screen
    finally:
        with suppress(OSError):  # the terminal may be gone
            live.stop()
        for text in screen.notes:
            say(text)


class PlainScreen:
    """One line on stderr per event, and the overall progress once a minute."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + PLAIN_REFRESH_S

    def note(self, text: str) -> None:
        say(text)

    ended = note

    def show(self, snapshot: Callable[[], Snapshot]) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + PLAIN_REFRESH_S
            say(headline(snapshot()))


class TerminalScreen:
    """A live table below the events.

    If the terminal stops reading (Ctrl-S, a dead connection), the sweep continues, and the screen retries briefly.
    """

    def __init__(self, live: Any) -> None:
        self._live = live
        self._next_s = 0.0
        self.notes: list[str] = []  # not shown yet

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ended(self, text: str) -> None:
        """The table has it, and then the summary."""

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
        except OSError:  # the terminal is gone, or does not read
            self._next_s = time.monotonic() + STUCK_RETRY_S


def picture(snapshot: Snapshot, height: int, width: int) -> Any:
    """As much of the table as fits, and a summary line."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = bundles(snapshot.jobs, min(MOST_BUNDLE_LINES, height // 3), working_directory())
    lines_of_bundles = sum(1 + (len(line) - 1) // max(1, width) for line in found)
    shown = choose(snapshot, max(3, height - 5 - lines_of_bundles))
    typical = typical_s(snapshot)
    rows = [cells(job, typical.get(job.job.group)) for job in shown]
    kept = columns(rows, width)
    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), header_style="dim")
    for name in kept:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for job, row in zip(shown, rows, strict=True):
        said = dict(zip(COLUMNS, row, strict=True))
        style = "yellow" if job.quiet else _STYLES.get(job.state, "dim")
        table.add_row(*(Text(redact(said[name])) for name in kept), style=style)
    more = len(snapshot.jobs) - len(shown)
    rest = [Text(f"... and {more} more", style="dim")] if more else []
    paths = [Text(redact(line), overflow="fold", style="red") for line in found]
    return Group(table, *rest, *paths, Text(redact(headline(snapshot)), style="bold"))
