"""``safelaunch [safelaunch options] [torchrun options] script.py [script args...]``: torchrun, watched."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from safelaunch.errors import UsageError
from safelaunch.launch import torchrun
from safelaunch.launch.argv import split
from safelaunch.launch.paths import run_root, working_directory
from safelaunch.launch.plan import Plan, Surroundings, build
from safelaunch.settings.config import OWN_OPTIONS, resolve
from safelaunch.supervise import resources
from safelaunch.supervise.preflight import check
from safelaunch.supervise.resources import Resources
from safelaunch.system.console import say, show


def main(words: list[str]) -> int:
    """Runs one job; returns its exit code, 124 if it hung, 2 for an error in safelaunch's own options."""
    if words == ["--version"]:
        from safelaunch import __version__

        show(f"safelaunch {__version__}")
        return 0
    environ = dict(os.environ)
    torch = torchrun.find(environ)
    own = {option.flag: option.metavar is not None for option in OWN_OPTIONS}
    command = split(words, own, torchrun.LazyOptions(torch.package))
    if command.has_flag("-h", "--help"):
        _print_help()
    settings = resolve(command.own, environ, working_directory(), lambda: torch.version)
    check(settings)
    for option in misplaced(command.script):
        say(f"{option} comes after {command.script[0]}, so the script gets it; put safelaunch's options first")
    given = resources.gather(command, settings, environ, torch)

    def planned(given: Resources) -> Plan:
        return build(given.command, settings, torch, surroundings(environ, given))

    def again(given: Resources) -> tuple[Plan, Resources]:
        other = resources.with_another_port(given, settings, environ)
        return planned(other), other

    return start(planned(given), given, again)


def misplaced(script: Sequence[str]) -> list[str]:
    """Options after the script that hardly any script has: the user meant safelaunch."""
    ours = {option.flag for option in OWN_OPTIONS if re.search("stall|bundle|startup-timeout|no-watch", option.name)}
    return sorted({word.partition("=")[0] for word in script[1:]} & ours)


def surroundings(environ: dict[str, str], given: Resources) -> Surroundings:
    """The plan's inputs besides the command line: the job's resources, and the path of its run directory."""
    run_dir = run_root(environ, os.getuid()) / f"r{os.getpid()}"
    return Surroundings(environ, run_dir, os.getpid(), given.visible_gpus, given.rank_locks, given.note)


def start(plan: Plan, given: Resources, again: Callable[[Resources], tuple[Plan, Resources]] | None = None) -> int:
    """Starts the job of ``plan`` and waits for its end; with ``--dry-run`` only prints the plan.

    ``again``: see ``session.run``.
    """
    if plan.settings.dry_run:
        from safelaunch.launch.dryrun import describe

        show(describe(plan))
        return 0
    from safelaunch.supervise import session

    try:
        return session.run(plan, given, again)
    except OSError as error:
        raise UsageError(f"{plan.argv[0]} could not be started: {error.strerror or error}") from error


def _print_help() -> None:
    from safelaunch.cli import COMMANDS
    from safelaunch.settings.config import help_text

    show("usage: safelaunch [safelaunch options] [torchrun options] script [script args...]")
    show("       safelaunch COMMAND ...\n\ncommands (--help shows the options of each):")
    for name, meaning in COMMANDS.items():
        show(f"  {name:<10}{meaning}")
    show(f"\n{help_text('run')}")
    show("torchrun options (as the installed torchrun describes them):")
