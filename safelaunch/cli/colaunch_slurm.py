"""``safelaunch colaunch --engine slurm``: what is still there from before, and what the dry run shows."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from safelaunch.cli import program
from safelaunch.cli.colaunch_options import Options
from safelaunch.cli.colaunch_rows import many
from safelaunch.sweep.jobs import Job
from safelaunch.sweep.journal import Attempt, Handed, Journal
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.resume import History
from safelaunch.sweep.slurm import script, strays
from safelaunch.sweep.slurm.engine import Site
from safelaunch.sweep.slurm.queue import Slurm, SlurmError
from safelaunch.sweep.sweep import Before, Rules, Sweep
from safelaunch.system.console import say
from safelaunch.system.errors import UsageError
from safelaunch.system.redaction.redact import redact_env

WITHOUT_END = 1 << 30  # Slurm decides how many run at a time
TASK = "safelaunch.sweep.slurm.task"


def programs() -> script.Programs:
    call = f"from {TASK} import main; sys.exit(main())"
    return script.Programs(program(), program(TASK, call))


def connect(environ: Mapping[str, str]) -> tuple[Slurm, int]:
    """Slurm, and how large its arrays may be. Raises UsageError if it does not answer."""
    slurm = Slurm(environ)
    try:
        return slurm, slurm.largest_array()
    except SlurmError as error:
        raise UsageError(f"--engine slurm: {error.message}", error.fix or "nothing was started") from error


def adopted(known: History, jobs: Sequence[Job]) -> tuple[dict[str, Before], dict[str, Attempt], list[Attempt]]:
    """What is known of each job; by job, the attempt that may still be with Slurm; and what must not go on there.

    Pure. An attempt goes on if it is a job's last, has not ended, and does the work that the job does now.
    """
    works = {job.name: job.fingerprint for job in jobs}
    left = [attempt for attempt in known.unfinished if attempt.handed]
    going_on = {
        attempt.job: attempt
        for attempt in left
        if works.get(attempt.job) == attempt.fingerprint
        and known.before[attempt.job].attempts == attempt.number
        and known.before[attempt.job].outcome is None
    }
    before = {
        name: replace(each, with_engine=True) if name in going_on else each for name, each in known.before.items()
    }
    return before, going_on, [attempt for attempt in left if going_on.get(attempt.job) is not attempt]


def begin(
    options: Options,
    jobs: Sequence[Job],
    paths: SweepPaths,
    journal: Journal,
    known: History,
    environ: Mapping[str, str],
) -> tuple[Sweep, Site, dict[str, tuple[int, Sequence[Handed]]]]:
    """The sweep, where it runs, and what is still with Slurm."""
    slurm, largest = connect(environ)
    before, going_on, others = adopted(known, jobs)
    strays.end(others, slurm, journal, paths, say)
    marks = [str(record["sweep_id"]) for record in journal.records if record.get("sweep_id")]
    sweep_id = marks[0] if marks else secrets.token_hex(5)
    try:
        journal.begun(len(jobs), sweep_id)
    except OSError as error:
        raise UsageError(f"{paths.journal} cannot be written: {error.strerror or error}", "free some space") from error
    rules = Rules(WITHOUT_END, options.max_parallel or WITHOUT_END, options.fail_fast, ahead=True)
    names = {str(record.get("batch")) for record in journal.records if record.get("event") == "handed"}
    numbers = [int(tail) for name in names if (tail := name.rpartition("-")[2]).isdecimal()]
    site = Site(paths, journal, slurm, programs(), sweep_id, max(numbers, default=0), largest)
    there = f"; {many(len(going_on), 'job')} may still be there" if going_on else ""
    say(f"{many(len(jobs), 'job')} through Slurm, in {paths.root}{there}")
    return (
        Sweep(jobs, rules, before),
        site,
        {name: (attempt.number, attempt.handed) for name, attempt in going_on.items()},
    )


def describe(jobs: Sequence[Job], paths: SweepPaths) -> list[str]:
    """For --dry-run: every script, and the command that submits it."""
    numbers: dict[str, str] = {}
    lines = [f"{many(len(jobs), 'job')} through Slurm, in {paths.root}"]
    lines += [
        "<sweep> stands for an id that colaunch makes, <NAME> for a job's number, @{...} for what only the job knows."
    ]
    groups = script.alike([script.Attempt(job, 1) for job in jobs])
    for number, group in enumerate(groups, start=1):
        needs = tuple(dict.fromkeys(numbers.get(need, f"<{need}>") for need in group[0].job.needs))
        batch = script.Batch(script.batch_name(group[0].job.group, "<sweep>", number), group, needs)
        shown = [script.Attempt(_hidden(each.job), each.number) for each in group]
        words = script.command(batch, os.fspath(paths.batch_script(batch.name)))
        lines += ["", f"# {' '.join(words)}"]
        lines += script.script(replace(batch, attempts=tuple(shown)), paths, programs()).rstrip("\n").split("\n")
        for task, each in enumerate(group):
            numbers[each.job.name] = f"<{batch.name}>_{task}" if batch.is_array else f"<{batch.name}>"
    return lines


def _hidden(job: Job) -> Job:
    """The job as it may be shown: without secret values."""
    return replace(job, env=tuple(redact_env(dict(job.env)).items()))
