"""``safelaunch dump``: writes a bundle of a running job, even of one that was started without safelaunch.

Prints only the bundle's path on stdout.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from safelaunch.cli.parsing import Parser
from safelaunch.job.paths import RunPaths, is_held, working_directory
from safelaunch.model import rank_words
from safelaunch.settings.config import bundle_dir_of
from safelaunch.settings.options import DEFAULT_BUNDLE_DIR
from safelaunch.supervise.control.discover import Run, describe, look, one_of_each_job, our_roots, select
from safelaunch.supervise.control.protocol import ControlRequest, DumpAnswer, ask
from safelaunch.system import commands
from safelaunch.system.console import say, show, show_json
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import AccessDenied, SafelaunchError, UsageError
from safelaunch.system.files import text_of
from safelaunch.system.printable import clean

if TYPE_CHECKING:
    from safelaunch.capture.jobs import RunningJob
    from safelaunch.supervise.publishing import Report

# Two looks (6 s each), the evidence (20 s), the copy to a slow disk (60 s).
DUMP_DEADLINE_S = 150.0
T = TypeVar("T")


class Document(DumpAnswer, frozen=True, kw_only=True):
    run: str
    name: str


def main(argv: list[str]) -> int:
    """Prints the bundle's path; returns 0, 1 if no bundle was written, 2 unless RUN or PID matches exactly one job."""
    words = parser().parse_args(argv)
    if words.pid is not None or words.all:
        return _dump_found(words)
    return _dump_run(choose(look(our_roots()), words.run), words)


def _dump_run(run: Run, words: Namespace) -> int:
    say(f"collecting evidence from {run.label}, which continues")
    request = ControlRequest("dump", os.fspath(working_directory() / words.bundle_dir) if words.bundle_dir else "")
    answer = answer_of(run, request, DumpAnswer, DUMP_DEADLINE_S, "the run still writes the bundle")
    return _show(run, answer, as_json=words.json)


def parser() -> Parser:
    command_line = Parser(
        "dump",
        description=(
            "Writes a bundle of a live run, with a verdict: what each rank is doing right now, on every node that "
            "this one can reach. The job continues. Only the bundle's path goes to stdout: cd $(safelaunch dump). "
            "With --pid or --all, of a job that was started without safelaunch: its ranks on this node."
        ),
    )
    which = command_line.add_mutually_exclusive_group()
    which.add_argument("run", nargs="?", metavar="RUN", help="run id (r4711), name or pid [the run started here]")
    which.add_argument("--pid", type=int, metavar="PID", help="the job of this process: a rank, its child, or torchrun")
    which.add_argument("--all", action="store_true", help="every job here that was started without safelaunch")
    command_line.add_argument("--bundle-dir", metavar="DIR", help="where to write the bundle [the run's own directory]")
    command_line.add_argument("--json", action="store_true", help="print run, bundle, summary and problem as JSON")
    return command_line


def choose(runs: Sequence[Run], word: str | None, command: str = "dump") -> Run:
    """Returns the run that ``word`` names; without ``word``, the run that was started in this directory.

    Raises UsageError unless exactly one run matches, and SafelaunchError if that run doesn't respond.
    """
    alive = [run for run in runs if run.alive]
    chosen = one_of_each_job(select(alive, word) if word is not None else _of_this_directory(alive))
    if word is not None and not chosen:
        raise UsageError(f"{command}: no live run is called {word!r}.", describe(alive))
    if not alive:
        raise SafelaunchError(
            f"{command}: you have no live run on this node.", f"Run {command} where the job runs, as its user."
        )
    if len(chosen) != 1:
        where = "several live runs were" if chosen else "no live run was"
        why = f"{where} started in this directory" if word is None else f"several live runs are called {word!r}"
        raise UsageError(f"{command}: {why}; name one by its id.", describe(chosen or alive))
    if chosen[0].status is None:
        raise SafelaunchError(f"{command}: {chosen[0].id} does not answer: {chosen[0].problem}.")
    return chosen[0]


def _of_this_directory(runs: Sequence[Run]) -> Sequence[Run]:
    # Otherwise, runs with an unknown directory.
    here = os.fspath(working_directory())
    silent = [run for run in runs if run.status is None]
    return [run for run in runs if run.status is not None and run.status.cwd == here] or silent


def answer_of(run: Run, request: ControlRequest, kind: type[T], deadline_s: float, meanwhile: str) -> T:
    """Returns the supervisor's answer. Raises SafelaunchError if the supervisor has another version.

    Args:
        meanwhile: What happens to the request if this process stops waiting, for the message.
    """
    try:
        data = ask(RunPaths(run.directory).control, request, deadline_s=deadline_s)
        return from_json(data, kind)
    except KeyboardInterrupt:
        say(f"not waiting any longer; {meanwhile}")
        raise
    except msgspec.DecodeError as error:
        raise SafelaunchError(
            f"{request.command}: {run.id} runs under another version of safelaunch: {error}.",
            f"Use that version to {request.command} it.",
        ) from error


def _show(run: Run, answer: DumpAnswer, *, as_json: bool) -> int:
    if as_json:
        show_json(msgspec.to_builtins(Document(run=run.id, name=run.name, **msgspec.structs.asdict(answer))))
        return 0 if answer.bundle else 1
    if not answer.bundle:
        raise SafelaunchError(f"dump: no bundle of {run.id}: {answer.problem or 'its supervisor gave no reason'}.")
    say(clean(answer.summary))
    if answer.problem:
        say(f"the bundle could not be written to the requested directory: {answer.problem}")
    say("bundle (start with report.html):")
    sys.stderr.flush()
    show(answer.bundle)
    return 0


# --- a job that safelaunch didn't start -------------------------------------------------------------------------------


def _dump_found(words: Namespace) -> int:
    from safelaunch.capture import jobs

    table = jobs.processes()
    found_jobs = jobs.jobs_in(table, jobs.packages_of)
    if not words.all:
        try:
            job = jobs.job_of(words.pid, table, found_jobs, jobs.described)
        except AccessDenied as error:
            raise _with_way_in(error, words) from error
        return _dump_run(_run_of(job), words) if _is_watched(job) else _attach(job, words)
    unwatched = [job for job in found_jobs if not _is_watched(job) and any(map(jobs.packages_of, _pids(job)))]
    if not unwatched:
        raise _no_job(words, hidden=any(process.env is None for process in table.values()))
    return max([_attach_one_of(job, words) for job in unwatched])


def _no_job(words: Namespace, hidden: bool) -> SafelaunchError:
    """Returns the error to raise if there is no job on this node.

    Args:
        hidden: True if the environment of some processes is unreadable, perhaps even for root.
    """
    from safelaunch.cli import doctor_node

    what = "dump: no job was found here that was started without safelaunch."
    how = "Run it where the ranks run. Ranks are known by RANK and WORLD_SIZE."
    if not hidden or doctor_node.rights(os.environ).capable:
        return SafelaunchError(what, how)
    return _with_way_in(AccessDenied(f"{what}\n  {how}\n  Processes of other users were not searched."), words)


def _attach_one_of(job: RunningJob, words: Namespace) -> int:
    try:
        return _attach(job, words)
    except SafelaunchError as error:
        say(str(error))
        return error.exit_code


def _with_way_in(error: AccessDenied, words: Namespace) -> AccessDenied:
    """Adds to the error a command that can read the process to which access was denied."""
    from safelaunch.cli import doctor_node, doctor_rules

    again = ["dump", *(["--all"] if words.all else ["--pid", str(words.pid)]), *(["--json"] if words.json else [])]
    place = _bundle_dir(words)
    is_usual = place == working_directory() / DEFAULT_BUNDLE_DIR
    # This user's variables and files don't apply to root.
    as_root = commands.as_root([*again, *([] if is_usual else ["--bundle-dir", words.bundle_dir or os.fspath(place)])])
    own = commands.own([*again, "--bundle-dir", os.fspath(place)])
    rights = doctor_node.rights(os.environ)
    container = doctor_node.container(rights.place, text_of("/proc/self/mountinfo"))
    way = doctor_rules.way_in(rights, shlex.join(own), shlex.join(as_root), container)
    return AccessDenied(error.message, way)


def _bundle_dir(words: Namespace) -> Path:
    here = working_directory()
    return here / words.bundle_dir if words.bundle_dir else bundle_dir_of((), os.environ, here)


def _pids(job: RunningJob) -> list[int]:
    return [rank.process.pid for rank in job.ranks.values()]


def _is_watched(job: RunningJob) -> bool:
    directory = job.env.get("SAFELAUNCH_RUN_DIR", "")
    return bool(directory) and is_held(Path(directory))


def _run_of(job: RunningJob) -> Run:
    """Returns the live run that the job belongs to. Raises SafelaunchError if it is another user's."""
    directory = Path(job.env["SAFELAUNCH_RUN_DIR"])
    run = next((run for run in look(our_roots()) if run.directory == directory and run.alive), None)
    if run is None:
        name = clean(directory.name)
        raise SafelaunchError(
            f"dump: that job runs under safelaunch, as {name} of another user.", f"As that user: safelaunch dump {name}"
        )
    return run


def _attach(job: RunningJob, words: Namespace) -> int:
    from safelaunch.capture import user_source
    from safelaunch.supervise.attach import attach

    ranks = f"{rank_words(job.ranks)} of {job.world_size} (pid {', '.join(map(str, _pids(job)[:8]))})"
    say(f"collecting evidence from {ranks}, which {'continues' if len(job.ranks) == 1 else 'continue'}")
    with user_source.seen_by(_pids(job)[0]):
        try:
            report = attach(job, _bundle_dir(words))
        except AccessDenied as error:
            raise _with_way_in(error, words) from error
        return _show_found(report, as_json=words.json)


def _show_found(report: Report, *, as_json: bool) -> int:
    from safelaunch.supervise import publishing

    published = report.published
    bundle = "" if published.lost else os.fspath(published.path)
    if as_json:
        name, summary = published.path.name, report.verdict.summary
        show_json(
            msgspec.to_builtins(Document(run="", name=name, bundle=bundle, summary=summary, problem=published.problem))
        )
    else:
        publishing.show(report, os.environ)
        sys.stderr.flush()
        show(bundle)
    return 0 if bundle else 1
