"""``safelaunch [safelaunch options] [torchrun options] script.py [script args...]``: torchrun, watched."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence

from safelaunch.console import say
from safelaunch.errors import UsageError
from safelaunch.launch import torchrun
from safelaunch.launch.argv import split
from safelaunch.launch.paths import run_root, working_directory
from safelaunch.launch.plan import Plan, Surroundings, build
from safelaunch.session import resources
from safelaunch.session.resources import Resources
from safelaunch.settings.config import OWN_OPTIONS, Settings, resolve


def main(words: list[str]) -> int:
    """Runs one job; returns its exit code, 124 when it was hung, 2 for an error in our own options."""
    if words == ["--version"]:
        from safelaunch import __version__

        print(f"safelaunch {__version__}")
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
        say(f"{option} stands after {command.script[0]}, so it is the script's; safelaunch's own options go before it")
    given = resources.gather(command, settings, environ, torch)

    def planned(given: Resources) -> Plan:
        return build(given.command, settings, torch, surroundings(environ, given))

    def again(given: Resources) -> tuple[Plan, Resources]:
        other = resources.with_another_port(given, settings, environ)
        return planned(other), other

    return start(planned(given), given, again)


def misplaced(script: Sequence[str]) -> list[str]:
    """Options behind the script that hardly a script has: its author meant them for safelaunch."""
    ours = {option.flag for option in OWN_OPTIONS if re.search("stall|bundle|startup-timeout|no-watch", option.name)}
    return sorted({word.partition("=")[0] for word in script[1:]} & ours)


def surroundings(environ: dict[str, str], given: Resources) -> Surroundings:
    """What the plan depends on besides the command line: what the job was given, run directory named (not made)."""
    run_dir = run_root(environ, os.getuid()) / f"r{os.getpid()}"
    return Surroundings(environ, run_dir, os.getpid(), given.visible_gpus, given.rank_locks, given.note)


def start(plan: Plan, given: Resources, again: Callable[[Resources], tuple[Plan, Resources]] | None = None) -> int:
    """Starts the job of ``plan`` and sees it to its end; with ``--dry-run`` only says what it would do.

    ``again``: see ``session.run``.
    """
    if plan.settings.dry_run:
        from safelaunch.launch.dryrun import describe

        print(describe(plan))
        return 0
    from safelaunch.session import session

    try:
        return session.run(plan, given, again)
    except OSError as error:
        raise UsageError(f"{plan.argv[0]} could not be started: {error.strerror or error}") from error


def check(settings: Settings) -> None:
    """Raises UsageError for what could be seen to fail before anything is started."""
    if settings.is_explicit("bundle-dir"):
        from safelaunch.bundle.publishing import check_directory

        problem = check_directory(settings.bundle_dir)
        if problem:
            raise UsageError(
                f"--bundle-dir {settings.bundle_dir}: {problem}, so no bundle could be kept.",
                "Name a directory that you can write, on any disk; it need not exist yet.",
            )


def _print_help() -> None:
    from safelaunch.settings.config import help_text

    print("usage: safelaunch [safelaunch options] [torchrun options] script [script args...]")
    print("       safelaunch exec | colaunch | status | dump | diagnose | gpus | doctor | presets | demo  (--help)")
    print()
    print(help_text("run"))
    print("torchrun options (as the installed torchrun describes them):")
    sys.stdout.flush()
