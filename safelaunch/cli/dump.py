"""``safelaunch dump [RUN]``: a bundle of a live run, which goes on. The bundle's path is all that stdout gets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import msgspec

from safelaunch.bundle.report import clean
from safelaunch.console import say
from safelaunch.errors import SafelaunchError, UsageError
from safelaunch.launch.paths import RunPaths, working_directory
from safelaunch.session.control import DumpAnswer, Request, ask
from safelaunch.session.discover import Run, describe, look, our_roots, select

# Two looks (6 s each at most), the evidence (20 s), and the copy to a slow disk (60 s).
DUMP_DEADLINE_S = 150.0
INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Prints the bundle's path; 0 with a bundle, 1 without, 2 when it is not clear of which run."""
    parser = argparse.ArgumentParser(
        prog="safelaunch dump",
        description="Writes a bundle of a live run, with a verdict: what each rank is doing right now. The job goes "
        "on. The bundle's path alone goes to stdout: cd $(safelaunch dump)",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="run id (r4711), name or pid; needed where several run")
    parser.add_argument("--bundle-dir", metavar="DIR", help="where the bundle goes; else where the run's own go")
    parser.add_argument("--json", action="store_true", help="print run, bundle, summary and problem as JSON")
    words = parser.parse_args(argv)
    run = choose(look(our_roots()), words.run)
    try:
        answer = _dump(run, words.bundle_dir)
    except KeyboardInterrupt:
        say("not waiting for it; the bundle is being written all the same")
        return INTERRUPTED
    return _show(run, answer, as_json=words.json)


def choose(runs: Sequence[Run], word: str | None) -> Run:
    """The one run to look at. Raises UsageError where ``word`` does not settle it, SafelaunchError where none can be
    asked.
    """
    alive = [run for run in runs if run.alive]
    chosen = select(alive, word)
    if word is not None and not chosen:
        raise UsageError(f"dump: there is no live run {word!r}.", describe(alive))
    if not chosen:
        raise SafelaunchError("dump: no run of yours is live on this node.")
    if len(chosen) > 1:
        several = "several runs are live" if word is None else f"several live runs are called {word!r}"
        raise UsageError(f"dump: {several}; name one by its id.", describe(chosen))
    if chosen[0].status is None:
        raise SafelaunchError(f"dump: {chosen[0].id} cannot be asked: {chosen[0].problem}.")
    return chosen[0]


def _dump(run: Run, bundle_dir: str | None) -> DumpAnswer:
    say(f"taking a look at {run.label}; it goes on meanwhile")
    request = Request("dump", os.fspath(working_directory() / bundle_dir) if bundle_dir else "")
    data = ask(RunPaths(run.found.directory).control, request, deadline_s=DUMP_DEADLINE_S)
    try:
        return msgspec.json.decode(data, type=DumpAnswer)
    except msgspec.DecodeError as error:
        raise SafelaunchError(f"dump: {run.id} is of another version of safelaunch: {error}.") from error


def _show(run: Run, answer: DumpAnswer, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"run": run.id, "name": run.name, **msgspec.to_builtins(answer)}, indent=2))
        return 0 if answer.bundle else 1
    if not answer.bundle:
        raise SafelaunchError(f"dump: no bundle of {run.id}: {answer.problem or 'it gave no reason'}.")
    say(clean(answer.summary))
    if answer.problem:
        say(f"the bundle is not where it was wanted: {answer.problem}")
    say("bundle (report.md is the thing to read):")
    sys.stderr.flush()
    print(answer.bundle)
    return 0
