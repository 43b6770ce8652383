"""The command line, with one module per subcommand. Errors are printed only by ``main``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from io import TextIOWrapper
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, cast

from safelaunch import addons

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Command

# The first word is a subcommand only if it is exactly one of these; otherwise it is torchrun's.
COMMANDS = addons.with_commands(
    {
        "demo": "run a bundled script that hangs, and check its verdict",
        "exec": "watch another launcher, a script or a single rank",
        "presets": "list the shipped presets, or show one with its reasons",
        "status": "show the runs on this node and their ranks",
        "dump": "write a bundle of a running job without stopping it",
        "diagnose": "give a verdict from a bundle, dumps or logs",
        "explain": "explain a cause that a verdict names, and how to fix it",
        "doctor": "check whether safelaunch can watch jobs here",
        "gpus": "show this node's GPUs, with their leases and users",
        "completion": "print the completion script of a shell: bash, zsh or fish",
        "help": "show this help, or a subcommand's",
    }
)


def module_of(command: str) -> Command:
    """Returns the module of a subcommand, which can belong to an add-on."""
    if command in addons.COMMANDS:
        return addons.command(command)
    return cast("Command", import_module(f".{command}", __name__))


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    from safelaunch.system.console import redact
    from safelaunch.system.errors import SafelaunchError

    redact.use(_without_secrets)
    _print_whatever_the_encoding()
    try:
        return _dispatch(words)
    except SafelaunchError as error:
        from safelaunch.system.console import say

        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Our output has no reader any more: exit as other programs do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _print_whatever_the_encoding() -> None:
    # Show characters escaped that the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _without_secrets(text: str) -> str:
    # Only general rules: a job's secrets are known later.
    from safelaunch.system.redaction.redact import redact_text

    return redact_text(text)


def program(module: str = "safelaunch", call: str = "from safelaunch.cli import entry; entry()") -> list[str]:
    """Returns the command that starts safelaunch, or one of its modules, in another process.

    Unlike ``python -m``, it doesn't put the working directory on the module path, because that might hold any user's
    modules.

    Args:
        call: Code to run if Python lacks the option ``-P``.
    """
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module]
    return [sys.executable, "-c", f"import sys; del sys.path[0]; {call}"]


def entry() -> NoReturn:
    """Runs the console script, then exits without the interpreter's slow shutdown."""
    _open_standard_streams()
    _import_own()
    try:
        code = main()
    except SystemExit as end:  # argparse, after printing its help
        code = end.code if isinstance(end.code, int) else 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 1
    _leave_word(code)
    os._exit(code)


def _open_standard_streams() -> None:
    """Reopens standard streams that are closed, because other files would get their numbers, and so the output."""
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _leave_word(code: int) -> None:
    """Writes the exit code to a file for a parent such as a sweep, or for the parent's next run if that is killed.

    The variable contains this process's pid, too, because a run inside the job inherits the variable and must ignore
    it.
    """
    pid, _, path = os.environ.get("SAFELAUNCH_EXIT_FILE", "").partition(":")
    if pid != str(os.getpid()):
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, f"{code}\n".encode())
    except OSError:
        return  # the parent gets it from us, or reruns the job


def _dispatch(words: list[str]) -> int:
    if not words:
        from .help import show_usage

        return show_usage()
    first = "help" if words[0] in ("-h", "--help", "--help-torchrun") else words[0]
    if first in COMMANDS:
        return module_of(first).main(words[1:] if first == words[0] else words)
    try:
        from .run import main as run

        return run(words)
    except ImportError as error:
        if "safelaunch.supervise.run" in sys.modules:  # it might have started the job
            raise
        return _run_plain(words, error)


def _run_plain(words: list[str], error: ImportError) -> int:
    """Replaces this process by plain torchrun, because a broken installation of safelaunch must not stop a job."""
    from safelaunch.job import torchrun
    from safelaunch.job.argv import split
    from safelaunch.settings.options import OWN_OPTIONS
    from safelaunch.system.console import say

    torch = torchrun.find(os.environ)
    own = {option.flag: option.takes_value for option in OWN_OPTIONS}
    command = split(words, own, torchrun.LazyOptions(torch.package))
    say(f"not watching this job, as safelaunch is not installed properly ({error}): running plain torchrun")
    argv = [torch.python, os.fspath(torchrun.launcher(torch.python)), *command.torchrun, *command.script]
    os.execv(argv[0], argv)


# --- safelaunch's dependencies, even if PYTHONPATH holds modules with their names -------------------------------------

_DEPENDENCIES = frozenset({"msgspec", "yaml", "_yaml", "pynvml", "rich", "pygments", "markdown_it", "mdurl", "tomli"})


class _OwnImports:
    """Import finder (for ``sys.meta_path``) that looks for safelaunch's dependencies only in ``directories``."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = list(directories)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or name not in _DEPENDENCIES:
            return None
        return PathFinder.find_spec(name, self._directories, target)


def _import_own() -> None:
    """Ensures that modules on PYTHONPATH don't replace safelaunch's dependencies; the job's imports aren't affected."""
    if not os.environ.get("PYTHONPATH"):
        return
    site = sys.modules.get("site")
    installed = [*site.getsitepackages(), site.getusersitepackages()] if site is not None else []
    beside = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    sys.meta_path.insert(0, _OwnImports([beside, *(path for path in installed if path in sys.path)]))
