"""``safelaunch [safelaunch options] [torchrun options] script.py [script args...]``: torchrun, watched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from safelaunch import torchrun
from safelaunch.argv import CommandLine, split
from safelaunch.config import OWN_OPTIONS, Settings, resolve
from safelaunch.errors import UsageError
from safelaunch.paths import run_root
from safelaunch.plan import Plan, build


def main(words: list[str]) -> int:
    """Runs one job; returns its exit code, 124 when it was hung, 2 for an error in our own options."""
    if words == ["--version"]:
        from safelaunch import __version__

        print(f"safelaunch {__version__}")
        return 0
    environ = dict(os.environ)
    torch = torchrun.find(environ)
    own = {option.flag: option.metavar is not None for option in OWN_OPTIONS}
    command = split(words, own, torchrun.options(torch.package))
    if command.has_flag("-h", "--help"):
        _print_help()
    settings = resolve(command.own, environ, Path.cwd(), lambda: torch.version)
    _check(settings)
    plan = prepare(command, settings, torch, environ)
    if settings.dry_run:
        from safelaunch.dryrun import describe

        print(describe(plan))
        return 0
    return start(plan)


def prepare(command: CommandLine, settings: Settings, torch: torchrun.Torch, environ: dict[str, str]) -> Plan:
    """The plan of a job: GPUs chosen, environment merged, run directory named (not made)."""
    visible = None
    if settings.gpus is not None:
        from safelaunch import gpus

        found = gpus.inventory() if settings.gpus not in ("none", "all") else gpus.Inventory(())
        visible = gpus.choose(settings.gpus, environ.get("CUDA_VISIBLE_DEVICES"), found)
    return build(
        command,
        settings,
        torch,
        environ=environ,
        run_dir=run_root(environ, os.getuid()) / f"r{os.getpid()}",
        supervisor_pid=os.getpid(),
        visible_gpus=visible,
    )


def start(plan: Plan) -> int:
    """Starts the job of ``plan`` and sees it to its end."""
    from safelaunch import session

    try:
        return session.run(plan)
    except OSError as error:
        raise UsageError(f"{plan.argv[0]} could not be started: {error.strerror or error}") from error


def _check(settings: Settings) -> None:
    if settings.on_stall == "restart":
        raise UsageError("--on-stall restart is not there yet.", "Use kill (the default) or dump.")
    if settings.is_explicit("bundle-dir"):
        from safelaunch.bundle import check_directory

        problem = check_directory(settings.bundle_dir)
        if problem:
            raise UsageError(
                f"--bundle-dir {settings.bundle_dir}: {problem}, so no bundle could be kept.",
                "Name a directory that you can write, on any disk; it need not exist yet.",
            )


def _print_help() -> None:
    from safelaunch.config import help_text

    print("usage: safelaunch [safelaunch options] [torchrun options] script [script args...]")
    print("       safelaunch demo | presets   (see 'safelaunch demo --help')")
    print()
    print(help_text("run"))
    print("torchrun options (as the installed torchrun describes them):")
    sys.stdout.flush()
