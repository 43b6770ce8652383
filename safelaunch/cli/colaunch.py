"""``safelaunch colaunch``: many jobs on one node, each on GPUs or cores of its own, each an ordinary safelaunch run."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safelaunch.cli.colaunch_check import check_jobs, make_pool
from safelaunch.cli.colaunch_options import Options, parse
from safelaunch.cli.colaunch_rows import describe, many, summary_lines
from safelaunch.cli.colaunch_screen import open_screen
from safelaunch.colaunch import summary
from safelaunch.colaunch.expand import Places, expand
from safelaunch.colaunch.grid import Matrix
from safelaunch.colaunch.jobs import Job
from safelaunch.colaunch.journal import Attempt, Journal, attempts
from safelaunch.colaunch.paths import DEFAULT_PARENT, SweepPaths
from safelaunch.colaunch.placeholders import Text
from safelaunch.colaunch.pool import Pool
from safelaunch.colaunch.resume import History, history, recovered, wait_for_remains
from safelaunch.colaunch.runner import Place, Runner
from safelaunch.colaunch.signals import Signals
from safelaunch.colaunch.spec import Extra, templates_of
from safelaunch.colaunch.sweep import Rules, Sweep
from safelaunch.colaunch.templates import Template
from safelaunch.console import say
from safelaunch.errors import PresetError, SpecError, UsageError
from safelaunch.launch.paths import working_directory
from safelaunch.leases.store import store_of
from safelaunch.settings.yamlfile import read_yaml

INTERRUPTED = 130
YAML_HINT = "within {...} and [...], text that holds a {placeholder} needs quotes"


def main(argv: list[str]) -> int:
    """0 when every job succeeded, 1 when not, 2 when nothing was started; 128 + N when signal N stopped it."""
    options = parse(argv)
    cwd, environ = working_directory(), dict(os.environ)
    templates = _templates(options, cwd)
    paths = SweepPaths(cwd / (options.sweep_dir or f"{DEFAULT_PARENT}/{_sweep_name(options)}"))
    jobs = expand(templates, Places(os.fspath(paths.root), os.fspath(paths.jobs), os.fspath(cwd)))
    pool = make_pool(jobs, options.slots, options.max_parallel, environ)
    check_jobs(jobs, pool, environ)
    if options.dry_run:
        print("\n".join(describe(jobs, paths, pool)))
        return 0
    try:
        return _run(options, jobs, pool, paths, environ)
    except KeyboardInterrupt:
        return INTERRUPTED


def _templates(options: Options, cwd: Path) -> tuple[Template, ...]:
    metric_file = Text(options.metric_file, "--metric-file") if options.metric_file else None
    if options.spec is not None:
        try:
            root = read_yaml(cwd / Path(options.spec).expanduser(), options.spec)
        except PresetError as error:
            hint = (
                "within {...} and [...] text that holds a {placeholder} needs quotes" if "YAML" in error.message else ""
            )
            raise SpecError(error.message, error.fix or hint) from error
        return templates_of(root, Extra(options.metrics, metric_file))
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
        metric_file=metric_file,
    )
    return (template,)


def _sweep_name(options: Options) -> str:
    """The file's name; for a grid one made from what it says, so that the same line finds the same sweep again."""
    if options.spec is not None:
        return Path(options.spec).stem
    said = repr([(axis.name, axis.values) for axis in options.grid] + [*options.command])
    return f"grid-{hashlib.sha256(said.encode()).hexdigest()[:8]}"


def _run(options: Options, jobs: Sequence[Job], pool: Pool, paths: SweepPaths, environ: dict[str, str]) -> int:
    pool.free()  # where no lease can be taken, that is said before anything is kept of the sweep
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
    program = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "safelaunch"]
    with Signals() as signals, open_screen() as screen:
        runner = Runner(sweep, Place(paths, pool, store_of(environ), journal, environ, program), screen)
        runner.run(signals)
        problem = _write_summary(sweep, paths)  # before the last word to a terminal that may have stopped reading
    return _finish(sweep, paths, problem, runner.stopped_by)


def _history(options: Options, journal: Journal, jobs: Sequence[Job], paths: SweepPaths) -> History:
    """What was before, of which nothing lives any more. Raises UsageError where nobody said that the sweep goes on."""
    found = attempts(journal.records)
    known = history(found, jobs)
    if found and not options.resume:
        raise UsageError(
            f"{paths.root} holds a sweep that was run before ({known.done} of {len(jobs)} jobs have succeeded).",
            "--resume runs what has not; --sweep-dir names another directory for a new sweep",
        )
    if not found:
        return known
    wait_for_remains(known.unfinished, paths, say)
    found = tuple(_with_word(attempt, journal, jobs, paths) for attempt in found)
    known = history(found, jobs)
    left = "running the others" if known.done < len(jobs) else "there is nothing left to run"
    say(f"{known.done} of {len(jobs)} jobs have succeeded before; {left}")
    if known.changed:
        say(f"not what they were when they succeeded, so they run again: {', '.join(known.changed)}")
    return known


def _with_word(attempt: Attempt, journal: Journal, jobs: Sequence[Job], paths: SweepPaths) -> Attempt:
    """The attempt with the outcome that only its own safelaunch had noted, which the journal learns now."""
    ended = recovered(attempt, jobs, paths) if attempt.outcome is None else None
    if ended is None:
        return attempt
    journal.ended(attempt.job, attempt.number, ended)
    return replace(attempt, outcome=ended)


def _write_summary(sweep: Sweep, paths: SweepPaths) -> str:
    """Returns why it could not be written, or an empty string."""
    try:
        summary.write(tuple(sweep.tracks.values()), paths)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _finish(sweep: Sweep, paths: SweepPaths, problem: str, stopped_by: int) -> int:
    tracks = tuple(sweep.tracks.values())
    print("\n".join(summary_lines(tracks)), flush=True)
    if problem:
        say(f"the summary cannot be written to {paths.root}: {problem}")
    else:
        say(f"summary: {paths.summary_json}, {paths.summary_csv.name}")
    if all(track.state == "succeeded" for track in tracks):
        return 0
    return 128 + stopped_by if stopped_by else 1
