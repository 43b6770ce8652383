"""``safelaunch dump [RUN]``: writes a bundle of a live run, which continues. Only the bundle's path goes to stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from safelaunch.cli.parsing import Parser
from safelaunch.job.paths import RunPaths, working_directory
from safelaunch.supervise.control.discover import Run, describe, look, one_of_each_job, our_roots, select
from safelaunch.supervise.control.protocol import DumpAnswer, Request, ask
from safelaunch.system.console import say, show, show_json
from safelaunch.system.decoding import from_json
from safelaunch.system.errors import SafelaunchError, UsageError
from safelaunch.system.printable import clean

# Two looks (6 s each at most), the evidence (20 s), and the copy to a slow disk (60 s).
DUMP_DEADLINE_S = 150.0
INTERRUPTED = 130
T = TypeVar("T")


class Document(DumpAnswer, frozen=True, kw_only=True):
    """The --json document: the run's id and name, and what it has answered."""

    run: str
    name: str


def main(argv: list[str]) -> int:
    """Prints the bundle's path; returns 0 with a bundle, 1 without, 2 if RUN does not name exactly one live run."""
    words = parser().parse_args(argv)
    run = choose(look(our_roots()), words.run)
    try:
        answer = _dump(run, words.bundle_dir)
    except KeyboardInterrupt:
        say("not waiting any longer; the run still writes the bundle")
        return INTERRUPTED
    return _show(run, answer, as_json=words.json)


def parser() -> Parser:
    """The command line of ``safelaunch dump``."""
    found = Parser(
        "dump",
        description=(
            "Writes a bundle of a live run, with a verdict: what each rank is doing right now, on every node that "
            "this one can reach. The job continues. Only the bundle's path goes to stdout: cd $(safelaunch dump)"
        ),
    )
    found.add_argument("run", nargs="?", metavar="RUN", help="run id (r4711), name or pid [the run started here]")
    found.add_argument("--bundle-dir", metavar="DIR", help="where to write the bundle [the run's own directory]")
    found.add_argument("--json", action="store_true", help="print run, bundle, summary and problem as JSON")
    return found


def choose(runs: Sequence[Run], word: str | None, command: str = "dump") -> Run:
    """The run that is meant: without a ``word``, the one that was started in this directory.

    Raises UsageError if several may be meant, or none; SafelaunchError if it can't be reached.
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
    """Else those that do not say where they were started."""
    here = os.fspath(working_directory())
    silent = [run for run in runs if run.status is None]
    return [run for run in runs if run.status is not None and run.status.cwd == here] or silent


def _dump(run: Run, bundle_dir: str | None) -> DumpAnswer:
    say(f"collecting evidence from {run.label}, which continues")
    request = Request("dump", os.fspath(working_directory() / bundle_dir) if bundle_dir else "")
    data = ask(RunPaths(run.found.directory).control, request, deadline_s=DUMP_DEADLINE_S)
    return answer_of(run, data, DumpAnswer, "dump")


def answer_of(run: Run, data: bytes, kind: type[T], command: str) -> T:
    """What the run's supervisor has answered. Raises SafelaunchError if it is of another version."""
    try:
        return from_json(data, kind)
    except msgspec.DecodeError as error:
        raise SafelaunchError(
            f"{command}: {run.id} runs under another version of safelaunch: {error}.",
            f"Use that version to {command} it.",
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
