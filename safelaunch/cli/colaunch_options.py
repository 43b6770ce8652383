"""The command line of ``safelaunch colaunch``, parsed into one record."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from safelaunch.colaunch.grid import Axis, parse_grid
from safelaunch.colaunch.metrics import check_pattern
from safelaunch.errors import UsageError
from safelaunch.settings.values import parse_count, parse_seconds

T = TypeVar("T")

USAGE = """safelaunch colaunch SPEC.yaml [options]
       safelaunch colaunch --grid NAME=VALUES ... [options] -- [safelaunch and torchrun options] script.py [args]"""
DESCRIPTION = """Runs many jobs on this node, each on GPUs of its own (on a node without GPUs: on CPU cores of its own),
as many at a time as there is room for. Each job is an ordinary safelaunch run: watched, with its bundle if it hangs or
crashes. A job that fails disturbs no other."""
EPILOG = """\
the one-liner: after -- stands what one would give safelaunch for a single run
  safelaunch colaunch --grid lr=1e-3,3e-4 --grid seed=0..4 --gpus-per-job 1 \\
      -- --nproc-per-node=1 train.py --lr {lr} --seed {seed}

the same as a file, with more to say
  defaults:                      # for all jobs; a job's own keys win, env variable by variable
    command: --nproc-per-node=1 train.py --lr {lr} --seed {seed} --out {job_dir}
    gpus: 1                      # on a node without GPUs: slots
    preset: hang-debug           # also stall-timeout, startup-timeout, max-stall, on-stall
    env: {WANDB_NAME: "{name}"}
    timeout: 2h                  # in all; a job that takes longer is ended (timed-out)
    retries: 1
    metric: val_loss=([0-9.]+)
  matrix:                        # every combination is a job, called e.g. train_lr-1e-3_seed-0
    lr: [1e-3, 3e-4]
    seed: 0..4
    exclude: [{lr: 1e-3, seed: 4}]
    include: [{lr: 1e-2, seed: 0}]
  jobs:                          # optional: several kinds of jobs, with that matrix or one of their own
    prepare: {command: exec -- bash prepare.sh, matrix: {}, gpus: 0}
    train: {needs: prepare}      # all of prepare must have succeeded; else train is skipped
  more keys of a job: name (with placeholders), cwd, metric-file, and ports: 2, which leases two for it, to be used as
  {port} and {port2} in its command and env

placeholders, in command, env, cwd, needs, name and metric-file: {PARAMETER}; {name}, {job_dir}, {sweep_dir} are the
job's name, its own directory, the sweep's; in command and env also {port}, {port2}, ..., its ports. {{ and }} stand for
braces. One that is unknown, or a parameter or port that nothing uses, is an error, and nothing is started.

the sweep directory: journal.jsonl (what --resume goes by), summary.json, summary.csv, and for each job jobs/NAME/ with
attempt-1.log (all that it wrote) and bundles/.

Ctrl-C once: nothing more is started, running jobs are asked to end; twice: they are killed. When colaunch itself is
killed, its jobs end, too; --resume runs what has not succeeded. Exit code: 0 when every job has succeeded, 1 when not,
2 for an error in the sweep (nothing started), 128+N when signal N stopped it.
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
    metric_file: str = ""
    dry_run: bool = False


def parse(argv: list[str]) -> Options:
    """Raises UsageError; ends the process for ``--help`` and for what argparse rejects (exit code 2)."""
    split = argv.index("--") if "--" in argv else len(argv)
    command = tuple(argv[split + 1 :])
    words = _parser().parse_args(argv[:split])
    _check_kind(words, command, has_command=split < len(argv))
    axes = tuple(parse_grid(word) for word in words.grid)
    names = [axis.name for axis in axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--grid {twice} is given twice.", "Give all its values in one: --grid NAME=1,2,3")
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
        metric_file=words.metric_file or "",
        dry_run=words.dry_run,
    )


def _check_kind(words: argparse.Namespace, command: tuple[str, ...], *, has_command: bool) -> None:
    if words.spec is None and not command:
        what = "nothing stands behind --" if has_command else "neither a file nor a command was given"
        raise UsageError(f"colaunch: {what}.", "safelaunch colaunch SPEC.yaml, or --grid ... -- script.py {lr}")
    if words.spec is None:
        return
    if has_command or words.grid:
        raise UsageError("colaunch: a file and a grid with a command exclude each other.", "See --help.")
    for name in ("gpus_per_job", "ports_per_job", "timeout", "retries"):
        if getattr(words, name) is not None:
            flag = "--" + name.replace("_", "-")
            key = name.removesuffix("_per_job")
            raise UsageError(
                f"colaunch: {flag} goes with --grid.", f"In a file, say '{key}' in 'defaults' or in a job."
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="safelaunch colaunch",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("spec", nargs="?", metavar="SPEC.yaml", help="the sweep as a file")
    add("--grid", action="append", default=[], metavar="NAME=VALUES", help="a parameter: lr=1e-3,3e-4 or seed=0..4")
    add("--gpus-per-job", type=_number(parse_count), metavar="N", help="GPUs (else slots) for each job of a grid [1]")
    add(
        "--ports-per-job",
        type=_number(parse_count),
        metavar="N",
        help="ports for each job of a grid: {port}, {port2}",
    )
    add("--timeout", type=_number(parse_seconds), metavar="SECONDS", help="end a job of a grid after so long (90s, 2h)")
    add("--retries", type=_number(parse_count), metavar="N", help="try a job of a grid again, so often [0]")
    add("--slots", type=_number(_positive), metavar="N", help="give out N shares of the CPU cores instead of GPUs")
    add("--max-parallel", type=_number(_positive), metavar="N", help="never run more than N jobs at a time")
    add("--fail-fast", action="store_true", help="stop everything when a job has failed")
    add("--resume", action="store_true", help="go on with this sweep: run what has not succeeded")
    add("--sweep-dir", metavar="DIR", help="where it is kept [./safelaunch-sweeps/NAME]")
    add("--metric", action="append", default=[], metavar="REGEX", help="a column from each job's output (its last)")
    add("--metric-file", metavar="FILE", help="columns from a JSON file that each job writes, e.g. {job_dir}/m.json")
    add("--dry-run", action="store_true", help="show the jobs, start nothing")
    return parser


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
