"""``safelaunch [safelaunch options] [torchrun options] script.py [script args...]``: runs torchrun and watches it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from shutil import which

from safelaunch.cli import COMMANDS
from safelaunch.job import torchrun
from safelaunch.job.argv import CommandLine, is_given, options_given, restarts, split
from safelaunch.job.dry_run import describe
from safelaunch.job.missing_script import why_missing
from safelaunch.job.mistakes import nodes_never_meet
from safelaunch.job.paths import run_root, working_directory
from safelaunch.job.plan import Plan, Surroundings, build
from safelaunch.job.torchrun import TorchInstallation
from safelaunch.leases import resources
from safelaunch.leases.resources import JobResources
from safelaunch.settings.config import resolve
from safelaunch.settings.options import BY_FLAG, OWN_OPTIONS, Settings
from safelaunch.settings.yamlfile import nearest
from safelaunch.supervise.preflight import check, misplaced, mistakes_of_torchrun, without_effect
from safelaunch.system.console import room, say, show
from safelaunch.system.errors import UsageError

HELP_TORCHRUN = "--help-torchrun"
NO_RESTARTS = (
    "on-stall restart: torchrun restarts no rank, because its --max-restarts is 0. A hang will end the job, as with "
    "--on-stall kill. To restart the ranks, add --max-restarts 3."
)


def main(words: list[str]) -> int:
    """Runs a job; returns its exit code, 124 if it hung, or 2 for wrong safelaunch options."""
    if words == ["--version"]:
        from safelaunch import __version__

        show(f"safelaunch {__version__}")
        return 0
    environ = dict(os.environ)
    torch = torchrun.find(environ)
    own = {option.flag: option.takes_value for option in OWN_OPTIONS} | {HELP_TORCHRUN: False}
    table = torchrun.LazyOptions(torch.package)
    command = split(words, own, table)
    options = understood(command, table)
    of_torchrun = (HELP_TORCHRUN, None) in command.own
    if of_torchrun or (options is not None and options & {"-h", "--help"}):
        from safelaunch.cli.help import main as show_help

        return show_help([HELP_TORCHRUN] if of_torchrun else [])
    settings = _settings(command, options, environ, torch)
    held_resources = resources.gather(command, settings, environ, torch)

    def planned(new_resources: JobResources) -> Plan:
        return build(new_resources.command, settings, torch, surroundings(environ, new_resources, words))

    def again(new_resources: JobResources) -> tuple[Plan, JobResources]:
        other = resources.with_another_port(new_resources, settings, environ)
        return planned(other), other

    return start(planned(held_resources), held_resources, again)


def _settings(
    command: CommandLine, options: Collection[str] | None, environ: Mapping[str, str], torch: TorchInstallation
) -> Settings:
    """Returns the settings of the run, and prints surprising ones. Raises UsageError if no job could start."""
    settings = resolve(command.own, environ, working_directory(), lambda: torch.version)
    check(settings)
    why, notes = "", []
    if options is not None:
        why = _why_no_script(command, options, environ, torch) or nodes_never_meet(command, options, environ)
        notes = mistakes_of_torchrun(command, options, environ, torch) if not why else []
    if why and not settings.dry_run:
        raise UsageError(why)
    notes = [*filter(None, (why, torch.note)), *notes, *without_effect(settings)]
    notes += misplaced(command.script, is_module=is_given(options or (), environ, "module", "-m"))
    if settings.on_stall == "restart" and not restarts(command, environ):
        notes.append(NO_RESTARTS)
        settings = replace(settings, on_stall="kill")
    for note in notes:
        say(note)
    return settings


def understood(command: CommandLine, table: torchrun.LazyOptions) -> set[str] | None:
    """Returns the unabbreviated names of the given torchrun options; None if torchrun will reject one of them.

    Raises UsageError if the rejected one resembles another option.
    """
    meanings = dict(options_given(command.torchrun, torchrun.KNOWN))
    if not all(meanings.values()):
        meanings = dict(options_given(command.torchrun, table))
    unknown = [word.partition("=")[0] for word, meant in meanings.items() if not meant]
    for name in unknown if unknown and table.is_certain else ():
        match = _nearest(name.replace("_", "-"), BY_FLAG) or _nearest(name, table)
        if match:
            whose = "safelaunch's" if match in BY_FLAG else "torchrun's"
            raise UsageError(f"there is no option {name}; did you mean {whose} {match}?")
    return None if unknown else {name for meant in meanings.values() for name in meant}


def _nearest(option: str, options: Iterable[str]) -> str:
    # Compare without the dashes, which all options have.
    match = nearest(option.lstrip("-"), [name[2:] for name in options if name.startswith("--")], 0.7)
    return f"--{match}" if match else ""


def _why_no_script(
    command: CommandLine, options: Collection[str], environ: Mapping[str, str], torch: TorchInstallation
) -> str:
    if not command.script:
        return "the script is missing (usage: safelaunch [options] script.py [script args...])"
    why = why_missing(command.script, options, environ, torch.python)
    word = command.script[0]
    match = nearest(word, COMMANDS) if why and not command.torchrun and not command.own and "." not in word else ""
    if match:
        return f"{word} is neither a script nor a subcommand; did you mean 'safelaunch {match}'?"
    if why and which(word, path=environ.get("PATH")) is not None:
        return f"{word} is a program, not a Python script; to watch what it starts: safelaunch exec -- {word} ..."
    return why


def surroundings(environ: dict[str, str], resources_of_job: JobResources, typed: Sequence[str]) -> Surroundings:
    """Returns the plan's other inputs: resources, run directory, and the words ``typed`` after ``safelaunch``."""
    run_dir = run_root(environ, os.getuid()) / f"r{os.getpid()}"
    return Surroundings(
        environ,
        run_dir,
        os.getpid(),
        resources_of_job.visible_gpus,
        resources_of_job.rank_locks,
        resources_of_job.note,
        tuple(typed),
    )


def start(
    plan: Plan, resources_of_job: JobResources, again: Callable[[JobResources], tuple[Plan, JobResources]] | None = None
) -> int:
    """Starts the job of ``plan`` and waits until it ends; with ``--dry-run``, only prints the plan.

    Args:
        again: See ``supervise.run.run``.
    """
    if plan.settings.dry_run:
        show(describe(plan, room()), fold=True)
        return 0
    from safelaunch.supervise import run as session

    try:
        return session.run(plan, resources_of_job, again)
    except OSError as error:
        raise UsageError(f"{plan.argv[0]} could not be started: {error.strerror or error}") from error
