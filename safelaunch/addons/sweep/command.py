"""Implements ``safelaunch colaunch``: runs many jobs, each a safelaunch run, on this node or through a scheduler."""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from safelaunch.addons.sweep.adopt import adopt, end_strays
from safelaunch.addons.sweep.batch import BatchEngine, Site
from safelaunch.addons.sweep.batch_script import SweepPrograms
from safelaunch.addons.sweep.engine import Engine
from safelaunch.addons.sweep.errors import SpecError
from safelaunch.addons.sweep.jobs import SweepJob
from safelaunch.addons.sweep.journal import Attempt, Journal, JournalHistory, attempts, history
from safelaunch.addons.sweep.local import Local, SweepPlace
from safelaunch.addons.sweep.metrics import check_pattern
from safelaunch.addons.sweep.paths import DEFAULT_PARENT, SweepPaths
from safelaunch.addons.sweep.pool import CpuSlots, GpuPool, SharePool, check_fits, default_slots
from safelaunch.addons.sweep.remains import recovered, wait_for_remains
from safelaunch.addons.sweep.runner import Runner
from safelaunch.addons.sweep.scheduler import QueueError, Scheduler
from safelaunch.addons.sweep.screen import describe, describe_batch, many, open_screen, summary_lines
from safelaunch.addons.sweep.spec import Axis, Template, TemplateText, expand, parse_grid, templates_of
from safelaunch.addons.sweep.stop_signals import Signals
from safelaunch.addons.sweep.summary import write_summary
from safelaunch.addons.sweep.sweep import Rules, Sweep
from safelaunch.cli import program
from safelaunch.cli.parsing import Parser
from safelaunch.cli.run import understood
from safelaunch.job import torchrun
from safelaunch.job.argv import CommandLine, split
from safelaunch.job.paths import seen_from_here, working_directory
from safelaunch.leases.store import store_of
from safelaunch.settings.config import resolve
from safelaunch.settings.options import BY_FLAG, options_of, parse_count, parse_seconds
from safelaunch.settings.yamlfile import read_yaml
from safelaunch.system.console import redact, room, say, show
from safelaunch.system.errors import PresetError, UsageError
from safelaunch.system.redaction.job_secrets import secret_values
from safelaunch.system.redaction.redactor import Redactor

T = TypeVar("T")
ENGINES = ("local", "slurm")  # all but "local" are modules of safelaunch.addons.sweep with a SCHEDULER
TASK = "safelaunch.addons.sweep.task"
ENDLESS = 1 << 30  # the scheduler limits the number of running jobs

USAGE = """safelaunch colaunch SPEC.yaml [options]
       safelaunch colaunch --grid NAME=VALUES ... [options] -- [safelaunch and torchrun options] script.py [args]"""
DESCRIPTION = """\
Runs many jobs on this node, each on its own GPUs (on a node without GPUs: its own CPU cores), as many at a time as \
fit; with --engine slurm, as jobs of Slurm. Each job is an ordinary safelaunch run: watched, with a bundle if it hangs \
or crashes. A job that fails does not disturb the others."""
EPILOG = """\
on one line: after --, write what you would give safelaunch for a single run
  safelaunch colaunch --grid lr=1e-3,3e-4 --grid seed=0..4 \\
      --gpus-per-job 1 \\
      -- --nproc-per-node=1 train.py --lr {lr} --seed {seed}

the same sweep as a file, which has more keys
  defaults:               # for all jobs; a job's own keys win
    command: train.py --lr {lr} --seed {seed} --out {job_dir}
    gpus: 1               # on a node without GPUs: slots
    preset: hang-debug    # also stall-timeout, max-stall, on-stall
    env: {WANDB_NAME: "{name}"}
    timeout: 2h           # of each job; then it is timed-out
    retries: 1
    metric: val_loss=([0-9.]+)
  matrix:                 # each combination is a job
    lr: [1e-3, 3e-4]
    seed: 0..4
  jobs:                   # optional: several kinds of jobs
    prepare: {command: exec -- bash prepare.sh, gpus: 0}
    train: {needs: prepare}  # after all of prepare succeeded
  more keys of a job: name (with placeholders), cwd, and ports. 'ports: 2' leases two ports for the job; use them as \
{port} and {port2} in its command and env
  with --engine slurm also: nodes, and slurm: {partition, account, qos, time, sbatch: [--cpus-per-task=8]}

placeholders, in command, env, cwd, needs and name: {PARAMETER}; {name}, {job_dir} and {sweep_dir} are the job's name, \
its directory and the sweep's. In command and env, {port}, {port2}, ... are the job's ports. For braces, write {{ and \
}}. An unknown placeholder, or a parameter or port that nothing uses, is an error: nothing starts.

the sweep directory: journal.jsonl (read by --resume), summary.json, summary.csv, and for each job jobs/NAME/ with \
attempt-1.log (the job's output) and bundles/.

Ctrl-C once: colaunch starts no more jobs, and asks running jobs to end. Twice: it kills them. If colaunch itself is \
killed, its jobs end too (those in Slurm continue); --resume runs the jobs that have not succeeded. Exit code: 0 if \
every job succeeded, 1 if not, 2 for an error in the sweep (nothing started), 128+N if signal N stopped it.
"""


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of a sweep. Either ``spec`` is given, or ``command`` and ``grid`` (which can be empty)."""

    grid: tuple[Axis, ...]
    command: tuple[str, ...]
    spec: str | None = None
    gpus_per_job: int = 1
    ports_per_job: int = 0
    timeout_s: float | None = None
    retries: int = 0
    slots: int | None = None
    max_parallel: int | None = None
    fail_fast: bool = False
    resume: bool = False
    sweep_dir: str = ""
    metrics: tuple[str, ...] = ()
    dry_run: bool = False
    engine: str = "local"


def main(argv: list[str]) -> int:
    """Runs a sweep.

    Returns 0 if every job succeeded, 1 if not, 2 if nothing started, or 128 + N if signal N stopped the sweep.
    """
    options = parse(argv)
    cwd, environ = working_directory(), dict(os.environ)
    redact.use(Redactor(secret_values(environ, argv, [os.fspath(cwd)])).text)
    templates = _templates(options, cwd)
    paths = SweepPaths(cwd / (options.sweep_dir or f"{DEFAULT_PARENT}/{_sweep_name(options)}"))
    jobs = expand(templates, paths, os.fspath(cwd))
    if options.engine == "local":
        pool = make_pool(jobs, options.slots, options.max_parallel, environ)
        check_jobs(jobs, pool.kind, environ)
        if not options.dry_run:
            return _on_this_node(options, jobs, pool, paths, environ)
        show("\n".join(describe(jobs, paths, pool, room())), fold=True)
    else:
        queue = import_module(f"safelaunch.addons.sweep.{options.engine}").SCHEDULER(environ)
        check_jobs(jobs, queue, environ)
        if not options.dry_run:
            return _through(queue, options, jobs, paths)
        show("\n".join(describe_batch(jobs, paths, _programs(queue), queue)))
    return 0


def _programs(queue: Scheduler) -> SweepPrograms:
    return SweepPrograms(
        program(), [*program(TASK, f"from {TASK} import main; sys.exit(main())"), type(queue).__module__]
    )


def _on_this_node(
    options: SweepOptions, jobs: Sequence[SweepJob], pool: SharePool, paths: SweepPaths, environ: dict[str, str]
) -> int:
    pool.free()  # raises if leasing is impossible, before the sweep writes anything
    journal = Journal(paths.journal)
    past = _history(options, journal, jobs, paths)
    _begin(journal, jobs)
    at_most = options.max_parallel or pool.capacity + (os.cpu_count() or 1)  # cores limit jobs without GPUs
    units = {job.name: pool.units(job.gpus) for job in jobs}
    sweep = Sweep(jobs, Rules(pool.capacity, at_most, options.fail_fast, units), past.before)
    say(f"{many(len(jobs), 'job')} on {many(pool.capacity, pool.kind)}, in {paths.root}")
    place = SweepPlace(paths, pool, store_of(environ), journal, environ, program())
    return _run(sweep, lambda note: Local(sweep, place, note), journal, paths)


def _through(queue: Scheduler, options: SweepOptions, jobs: Sequence[SweepJob], paths: SweepPaths) -> int:
    try:
        queue.list()  # before the sweep writes anything
    except QueueError as error:
        raise UsageError(f"--engine {options.engine}: {error.message}", error.fix or "nothing was started") from error
    journal = Journal(paths.journal)
    before, going_on, strays = adopt(_history(options, journal, jobs, paths), jobs)
    end_strays(strays, queue, journal, paths, say)
    marks = [str(record["sweep_id"]) for record in journal.records if record.get("sweep_id")]
    sweep_id = marks[0] if marks else secrets.token_hex(5)
    _begin(journal, jobs, sweep_id)
    rules = Rules(ENDLESS, options.max_parallel or ENDLESS, options.fail_fast, ahead=queue.keeps_order)
    sweep = Sweep(jobs, rules, before)
    names = [str(record.get("batch")) for record in journal.records if record.get("event") == "handed"]
    numbers = [int(tail) for name in names if (tail := name.rpartition("-")[2]).isdecimal()]
    site = Site(paths, journal, _programs(queue), sweep_id, max(numbers, default=0))
    submitted = f"; {many(len(going_on), 'job')} might still be there" if going_on else ""
    say(f"{many(len(jobs), 'job')} through {queue.name}, in {paths.root}{submitted}")
    return _run(sweep, lambda note: BatchEngine(sweep, queue, site, note, going_on), journal, paths)


def _begin(journal: Journal, jobs: Sequence[SweepJob], sweep_id: str = "") -> None:
    try:
        journal.record_launch(len(jobs), sweep_id)
    except OSError as error:
        raise UsageError(f"{journal.path} can't be written: {error.strerror or error}", "free some space") from error


def _run(sweep: Sweep, engine: Callable[[Callable[[str], None]], Engine], journal: Journal, paths: SweepPaths) -> int:
    with Signals() as signals, open_screen() as screen:
        runner = Runner(sweep, engine(screen.note), journal, paths, screen)
        runner.run(signals)
        problem = _write_summary(sweep, paths)  # before the last update: the terminal might have stopped reading
    return _finish(sweep, paths, problem, runner.stopped_by)


def _templates(options: SweepOptions, cwd: Path) -> tuple[Template, ...]:
    if options.spec is not None:
        try:
            root = read_yaml(cwd / Path(options.spec).expanduser(), options.spec)
        except PresetError as error:
            hint = (
                "within {...} and [...] text that holds a {placeholder} needs quotes" if "YAML" in error.message else ""
            )
            raise SpecError(error.message, error.fix or hint) from error
        return templates_of(root, options.metrics)
    where = "the command line"
    job = SweepJob(
        name="",
        words=(),
        where=where,
        gpus=options.gpus_per_job,
        ports=options.ports_per_job,
        timeout_s=options.timeout_s,
        retries=options.retries,
        metrics=options.metrics,
    )
    return (Template(job, tuple(TemplateText(word, where) for word in options.command), options.grid),)


def _sweep_name(options: SweepOptions) -> str:
    if options.spec is not None:
        return Path(options.spec).stem
    identity = repr([(axis.name, axis.values) for axis in options.grid] + [*options.command])
    return f"grid-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def _history(options: SweepOptions, journal: Journal, jobs: Sequence[SweepJob], paths: SweepPaths) -> JournalHistory:
    """Returns earlier attempts, after their processes have ended. Raises UsageError if any exist without --resume."""
    recorded = attempts(journal.records)
    past = history(recorded, jobs)
    if recorded and not options.resume:
        raise UsageError(
            f"{paths.root} holds an earlier sweep ({past.done} of {len(jobs)} jobs have succeeded).",
            "--resume runs the remaining jobs; --sweep-dir puts a new sweep elsewhere",
        )
    if not recorded:
        return past
    elsewhere = [attempt.job for attempt in past.unfinished if attempt.handed]
    if elsewhere and options.engine == "local":
        raise UsageError(
            f"jobs of this sweep might still be in a scheduler: {', '.join(elsewhere[:5])}",
            "use the same --engine again, or choose another directory with --sweep-dir",
        )
    wait_for_remains([attempt for attempt in past.unfinished if not attempt.handed], paths, say)
    recorded = tuple(_recover_outcome(attempt, journal, jobs, paths) for attempt in recorded)
    past = history(recorded, jobs)
    left = "running the others" if past.done < len(jobs) else "there is nothing left to run"
    say(f"{past.done} of {len(jobs)} jobs have already succeeded; {left}")
    if past.changed:
        say(f"these jobs changed since they succeeded and run again: {', '.join(past.changed)}")
    return past


def _recover_outcome(attempt: Attempt, journal: Journal, jobs: Sequence[SweepJob], paths: SweepPaths) -> Attempt:
    ended = recovered(attempt, jobs, paths) if attempt.outcome is None and not attempt.handed else None
    if ended is None:
        return attempt
    journal.record_end(attempt.job, attempt.number, ended)
    return replace(attempt, outcome=ended)


def _write_summary(sweep: Sweep, paths: SweepPaths) -> str:
    try:
        write_summary(tuple(sweep.tracks.values()), paths)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _finish(sweep: Sweep, paths: SweepPaths, problem: str, stopped_by: int) -> int:
    tracks = tuple(sweep.tracks.values())
    show("\n".join(summary_lines(tracks, paths)), fold=True)
    if problem:
        say(f"the summary can't be written to {paths.root}: {problem}")
    else:
        say(f"summary: {seen_from_here(os.fspath(paths.summary_json))}, {paths.summary_csv.name}")
    if all(track.state == "succeeded" for track in tracks):
        return 0
    if stopped_by:
        say("continue with --resume: the same command with this option runs the jobs that have not succeeded")
    return 128 + stopped_by if stopped_by else 1


# Options that colaunch sets itself, and alternatives.
OURS = {
    "--run-name": "the run has the job's name; use the key 'name'",
    "--bundle-dir": "bundles go into the job's directory in the sweep",
    "--gpus": "colaunch assigns the GPUs: use 'gpus: N' or --gpus-per-job N",
    "--wait": "colaunch does the waiting",
    "--no-lease": "colaunch leases the GPUs it assigns",
    "--dry-run": "give it to colaunch",
}


def make_pool(
    jobs: Sequence[SweepJob], slots: int | None, at_most: int | None, environ: Mapping[str, str]
) -> SharePool:
    """Returns the node's GPUs (only those in CUDA_VISIBLE_DEVICES, if set), or else slots. Raises ResourceError."""
    pool: SharePool | None = None
    if slots is None:
        gpus = GpuPool(environ)
        pool = gpus if gpus.capacity else None
        if pool is None:
            say(f"no GPUs to assign ({gpus.missing}): each job gets a share of the CPU cores")
    if pool is None:
        cores = len(os.sched_getaffinity(0))
        units = [max(1, job.gpus) for job in jobs]
        pool = CpuSlots(slots or default_slots(cores, units, at_most), cores)
    check_fits({job.name: pool.units(job.gpus) for job in jobs}, pool)
    return pool


def check_jobs(jobs: Sequence[SweepJob], on: str | Scheduler, environ: Mapping[str, str]) -> None:
    """Raises SpecError for a job that safelaunch would reject, or whose working directory doesn't exist."""
    try:
        torch: torchrun.TorchInstallation | None = torchrun.find(environ)
    except UsageError:
        if not all(job.words[:1] == ("exec",) for job in jobs):
            raise
        torch = None  # an exec might use another one
    table = torchrun.LazyOptions(torch.package) if torch is not None else {}
    finished: set[object] = set()
    for job in jobs:
        try:
            _check(job.with_ports(range(20000, 20000 + job.ports)), on, table, torch, environ, finished)
        except UsageError as error:
            raise SpecError(f"{job.where}: job {job.name}: {error.message}", error.fix) from error


def _check(
    job: SweepJob,
    on: str | Scheduler,
    table: Mapping[str, bool],
    torch: torchrun.TorchInstallation | None,
    environ: Mapping[str, str],
    finished: set[object],
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
    _check_nodes(job, on, command)
    if on != "slot" and "CUDA_VISIBLE_DEVICES" in dict(job.env):
        raise UsageError("env: CUDA_VISIBLE_DEVICES cannot be set here", OURS["--gpus"])
    if not Path(job.cwd).is_dir():
        raise UsageError(f"cwd: directory {job.cwd} does not exist", "it is relative to colaunch's working directory")
    key = (command.own, job.env, job.cwd)
    if key not in finished:
        finished.add(key)
        version = torch.version if torch else None
        settings = resolve(command.own, {**environ, **dict(job.env)}, Path(job.cwd), lambda: version)
        for name in ("gpus", "wait", "dry-run"):
            if settings.is_explicit(name):
                raise UsageError(f"{name} is set ({settings.origin(name)})", OURS[f"--{name}"])


# Multi-node options, which the engine sets.
OF_SEVERAL_NODES = ("--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--rdzv-backend", "--master-addr")


def _check_nodes(job: SweepJob, on: str | Scheduler, command: CommandLine) -> None:
    if job.nodes == 1:
        return
    if isinstance(on, str) or on.across(job.nodes) is None:
        raise UsageError(f"nodes: {job.nodes} nodes, but this engine has one", "give --engine slurm")
    flags = [word.partition("=")[0].replace("_", "-") for word in command.torchrun]
    for word in flags:
        if word in OF_SEVERAL_NODES:
            raise UsageError(f"{word} cannot be given together with 'nodes'", "remove it: colaunch sets it")


def parse(argv: list[str]) -> SweepOptions:
    """Parses the command line. Raises UsageError; for ``--help`` and its own errors (code 2), argparse exits."""
    split = argv.index("--") if "--" in argv else len(argv)
    command = tuple(argv[split + 1 :])
    words = parser().parse_args(argv[:split])
    _check_kind(words, command, has_command=split < len(argv))
    if words.engine != "local" and words.slots is not None:
        raise UsageError(
            "colaunch: --slots works only on this node.",
            f"Leave it out, or leave out --engine {words.engine}.",
        )
    axes = tuple(parse_grid(word) for word in words.grid)
    names = [axis.name for axis in axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--grid {twice} occurs twice.", "Give all its values at once: --grid NAME=1,2,3")
    for pattern in words.metric:
        check_pattern(pattern)
    values = {name: value for name, value in vars(words).items() if value is not None}
    values |= {"grid": axes, "metrics": tuple(values.pop("metric")), "timeout_s": values.pop("timeout", None)}
    return SweepOptions(command=command, **values)


def _check_kind(words: argparse.Namespace, command: tuple[str, ...], *, has_command: bool) -> None:
    if words.spec is None and not command:
        what = "the command after -- is missing" if has_command else "a file or a command is missing"
        raise UsageError(f"colaunch: {what}.", "Use safelaunch colaunch SPEC.yaml, or --grid ... -- script.py {lr}")
    if words.spec is None:
        return
    if has_command or words.grid:
        raise UsageError("colaunch: give either a file or a grid with a command, not both.", "See --help.")
    for name in ("gpus_per_job", "ports_per_job", "timeout", "retries"):
        if getattr(words, name) is not None:
            flag = "--" + name.replace("_", "-")
            key = name.removesuffix("_per_job")
            raise UsageError(
                f"colaunch: {flag} works only with --grid.", f"In a file, set '{key}' in 'defaults' or in a job."
            )


def parser() -> Parser:
    result = Parser(
        "colaunch",
        after_dashes={*BY_FLAG, *torchrun.KNOWN},
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("spec", nargs="?", metavar="SPEC.yaml", help="the sweep as a file")
    add("--grid", action="append", default=[], metavar="NAME=VALUES", help="a parameter: lr=1e-3,3e-4 or seed=0..4")
    add("--gpus-per-job", type=_number(parse_count), metavar="N", help="GPUs (or slots) for each job of a grid [1]")
    add(
        "--ports-per-job",
        type=_number(parse_count),
        metavar="N",
        help="ports for each job of a grid: {port}, {port2}",
    )
    add("--timeout", type=_number(parse_seconds), metavar="SECONDS", help="time limit for each job of a grid (90s, 2h)")
    add("--retries", type=_number(parse_count), metavar="N", help="run a failed job of a grid again, up to N times [0]")
    add(
        "--engine",
        choices=ENGINES,
        default="local",
        help="where the jobs run: here, or as jobs of Slurm [local]",
    )
    add("--slots", type=_number(_positive), metavar="N", help="assign N shares of the CPU cores instead of GPUs")
    add("--max-parallel", type=_number(_positive), metavar="N", help="run at most N jobs at a time")
    add("--fail-fast", action="store_true", help="stop everything when a job fails")
    add("--resume", action="store_true", help="continue this sweep: run the jobs that have not succeeded")
    add("--sweep-dir", metavar="DIR", help="where the sweep's files go [./safelaunch-sweeps/NAME]")
    add("--metric", action="append", default=[], metavar="REGEX", help="a column: the last match in each job's output")
    add("--dry-run", action="store_true", help="show the jobs; start nothing")
    return result


def _positive(text: str) -> int:
    number = parse_count(text)
    if number < 1:
        raise ValueError(text)
    return number


def _number(read: Callable[[str], T]) -> Callable[[str], T]:
    def convert(text: str) -> T:
        return read(text)

    convert.__name__ = "value"  # for argparse's message: "invalid value: 'x'"
    return convert
