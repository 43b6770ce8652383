"""The command line of ``safelaunch colaunch``, parsed into one record."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from safelaunch.cli.parsing import Parser
from safelaunch.job.torchrun import KNOWN
from safelaunch.settings.options import BY_FLAG
from safelaunch.settings.values import parse_count, parse_seconds
from safelaunch.sweep.grid import Axis, parse_grid
from safelaunch.sweep.metrics import check_pattern
from safelaunch.system.errors import UsageError

T = TypeVar("T")

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
killed, its jobs end too (those in Slurm go on); --resume runs the jobs that have not succeeded. Exit code: 0 if every \
job succeeded, 1 if not, 2 for an error in the sweep (nothing started), 128+N if signal N stopped it.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """Either ``spec``, or ``grid`` (which may be empty) and ``command``."""

    spec: str | None
    grid: tuple[Axis, ...]
    command: tuple[str, ...]
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


def parse(argv: list[str]) -> Options:
    """Parses the command line. Raises UsageError; argparse itself exits for ``--help`` and its own errors (code 2)."""
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
    return Options(
        spec=words.spec,
        grid=axes,
        command=command,
        gpus_per_job=1 if words.gpus_per_job is None else words.gpus_per_job,
        ports_per_job=words.ports_per_job or 0,
        timeout_s=words.timeout,
        retries=words.retries or 0,
        slots=words.slots,
        max_parallel=words.max_parallel,
        fail_fast=words.fail_fast,
        resume=words.resume,
        sweep_dir=words.sweep_dir or "",
        metrics=tuple(words.metric),
        dry_run=words.dry_run,
        engine=words.engine,
    )


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
    """The command line of ``safelaunch colaunch`` up to ``--``."""
    found = Parser(
        "colaunch",
        after_dashes={*BY_FLAG, *KNOWN},
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
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
        choices=("local", "slurm"),
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
    return found


def _positive(text: str) -> int:
    number = parse_count(text)
    if number < 1:
        raise ValueError(text)
    return number


def _number(read: Callable[[str], T]) -> Callable[[str], T]:
    def convert(text: str) -> T:
        return read(text)

    convert.__name__ = "value"  # argparse: "invalid value: 'x'"
    return convert
