"""The command line: one file per subcommand. Code raises; only ``main`` prints errors."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NoReturn

# The first word selects a subcommand only if it is exactly one of these; anything else is torchrun's.
COMMANDS = {
    "demo": ".demo",
    "exec": ".exec",
    "colaunch": ".colaunch",
    "presets": ".presets",
    "status": ".status",
    "dump": ".dump",
    "diagnose": ".diagnose",
    "doctor": ".doctor",
    "gpus": ".gpus",
}


def main(argv: list[str] | None = None) -> int:
    """Runs safelaunch; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    from safelaunch.errors import SafelaunchError

    try:
        return _dispatch(words)
    except SafelaunchError as error:
        from safelaunch.console import say

        say(str(error))
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone; say nothing more to it, and end as other programs do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def entry() -> NoReturn:
    """The console script: as ``main``, but leaves at once, without taking the interpreter down module by module."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 1  # what was printed has not arrived
    _leave_word(code)
    os._exit(code)


def _leave_word(code: int) -> None:
    """Leaves the exit code where colaunch asked for it: when that has been killed, nobody else would know of it.

    The variable names the process that is meant: a run inside the job inherits it.
    """
    pid, _, path = os.environ.get("SAFELAUNCH_EXIT_FILE", "").partition(":")
    if pid != str(os.getpid()):
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, f"{code}\n".encode())
    except OSError:
        return  # colaunch hears of it in the usual way, or runs the job again


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in COMMANDS:
        code = import_module(COMMANDS[first], __name__).main(words[1:])
        return int(code)
    from .run import main as run

    return run(words)
