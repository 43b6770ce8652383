"""``safelaunch exec [safelaunch options] -- COMMAND``: watches any launcher, script or rank."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from safelaunch.cli.help import width
from safelaunch.cli.run import start, surroundings
from safelaunch.job import torchrun
from safelaunch.job.argv import split
from safelaunch.job.paths import working_directory
from safelaunch.job.plan import build_exec
from safelaunch.leases.resources import gather
from safelaunch.settings.config import resolve
from safelaunch.settings.options import help_text, options_of, wrapped
from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.supervise.preflight import check, misplaced, mistakes_of_exec, without_effect
from safelaunch.system.console import say, show
from safelaunch.system.errors import UsageError

ABOUT = (
    "Watches any command whose processes are ranks: another launcher, a shell script that starts torchrun, or a "
    "single training script. Put safelaunch's options before --, and the command after it."
)
USAGE = "usage: safelaunch exec [safelaunch options] -- COMMAND [ARGUMENTS...]"


def main(words: list[str]) -> int:
    """Runs a command; returns its exit code, 124 if it hung, or 2 for wrong safelaunch options."""
    own = {option.flag: option.takes_value for option in options_of("exec")}
    command = split(words, own, {"-h": False, "--help": False})
    if command.has_flag("-h", "--help"):
        show(f"{USAGE}\n\n{wrapped(ABOUT, width(), '')}\n\n{help_text('exec', width())}")
        return 0
    unknown = [word for word in command.torchrun if word != "--"]
    if unknown:
        name = unknown[0].partition("=")[0]
        raise UsageError(f"exec: unknown option {name}{did_you_mean(name.replace('_', '-'), own)}", USAGE)
    if not command.script:
        raise UsageError("exec: the command is missing.", USAGE)
    environ = dict(os.environ)
    program = shutil.which(command.script[0], path=environ.get("PATH"))
    if program is None:
        remedy = "Check the name, or PATH."
        if Path(command.script[0]).is_file():
            remedy = f"It is a file here: `safelaunch exec -- python {command.script[0]}` runs a Python script."
        raise UsageError(f"exec: {command.script[0]}: command not found.", remedy)
    try:
        torch = torchrun.find(environ)
    except UsageError:
        torch = None  # the command might have its own
    settings = resolve(command.own, environ, working_directory(), lambda: torch.version if torch else None)
    check(settings)
    scripts = [place for place, word in enumerate(command.script) if word.endswith(".py")]
    late = misplaced(command.script[scripts[0] :]) if scripts else []
    for note in (*without_effect(settings), *mistakes_of_exec(command.script, environ), *late):
        say(note)
    resources_held = gather(replace(command, program=program), settings, environ, None)
    return start(
        build_exec(command.script, program, settings, torch, surroundings(environ, resources_held, ["exec", *words])),
        resources_held,
    )
