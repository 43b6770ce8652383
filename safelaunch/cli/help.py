"""``safelaunch --help`` and ``safelaunch help [SUBCOMMAND]``: print help without loading torch or a parser.

``scripts/build/generate.py`` generates man page and completions from the same source.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress

from safelaunch.cli import COMMANDS, module_of
from safelaunch.settings.options import HELP_OPTIONS, entries, help_text, wrapped
from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.system.console import show
from safelaunch.system.errors import UsageError

ABOUT = (
    "torchrun that watches the job. When it hangs or crashes, safelaunch collects every rank's stacks, calls and "
    "state, names the rank and line at fault, and writes one bundle. Then it ends a hung job, restarts it, or lets it "
    "run."
)
USAGE = (
    "safelaunch [options] [torchrun options] script.py [script args...]",
    "safelaunch SUBCOMMAND ...",
)
TORCHRUN = (
    "Every option of the installed torchrun works, in both spellings (--nproc-per-node, --nproc_per_node), and so do "
    "-m, --no-python, --run-path and the PET_* variables. Put safelaunch's options and torchrun's in any order before "
    "the script: what follows the script belongs to it. To list torchrun's options: safelaunch --help-torchrun"
)
EXIT_CODES = {
    "the job's own": "The job ended by itself, exactly as under torchrun.",
    "123": "Ranks computed different results, and --on-inconsistent stop ended the job.",
    "124": "The watchdog ended a hung job.",
    "125": "safelaunch gave up restarting the job, because the same failure recurred at the same step and place.",
    "2": "An error in safelaunch's own options, presets, configuration, GPUs or bundle directory, a script that "
    "does not exist, or --standalone with several nodes. Nothing was started.",
}
EXAMPLES = {
    "safelaunch --nproc-per-node=8 train.py --lr 1e-3": "Run 8 ranks under the watchdog.",
    "safelaunch --preset hang-debug --stall-timeout 5m --nproc-per-node=8 train.py": "Track down a recurring hang.",
    "safelaunch exec -- accelerate launch train.py": "Watch another launcher.",
    "safelaunch status --watch": "Watch live runs from another terminal.",
    "safelaunch diagnose safelaunch-bundles/latest": "Read the newest verdict again.",
}


def main(words: list[str]) -> int:
    """Prints the help of a subcommand, or else of safelaunch itself."""
    name = words[0] if words else ""
    if name in ("torchrun", "--help-torchrun"):
        return _torchrun()
    if not name or name.startswith("-") or name == "help":
        show(text(width()))
        return 0
    if name not in COMMANDS:
        raise UsageError(f"help: there is no subcommand {name!r}{did_you_mean(name, COMMANDS)}")
    return module_of(name).main(["--help"])


def _torchrun() -> int:
    import os
    import subprocess

    from safelaunch.job import torchrun

    python = torchrun.find(os.environ).python
    return subprocess.call([python, os.fspath(torchrun.launcher(python)), "--help"])


def width() -> int:
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def short_text(width: int) -> str:
    usage = "\n".join(f"{'usage:' if not at else '':<7}{line}" for at, line in enumerate(USAGE))
    return "\n\n".join(
        [
            wrapped(f"safelaunch: {ABOUT}", width, ""),
            usage,
            f"Subcommands (safelaunch help SUBCOMMAND shows more):\n{entries(COMMANDS.items(), width, 14)}",
        ]
    )


def text(width: int) -> str:
    return "\n\n".join(
        [
            short_text(width),
            help_text("run", width),
            f"Help:\n{entries(HELP_OPTIONS.items(), width)}",
            f"Options of torchrun:\n{wrapped(TORCHRUN, width)}",
            f"Exit codes:\n{entries(EXIT_CODES.items(), width, 18)}",
            "Examples:\n" + "\n".join(f"  {line}\n      {why}" for line, why in EXAMPLES.items()),
        ]
    )


def show_usage() -> int:
    """Prints a short help on stderr, and returns an exit code for failure, as torchrun does.

    A script that accidentally runs an empty command must not mistake it for a successful job.
    """
    with suppress(OSError):
        print(f"{short_text(width())}\n\nAll options, exit codes and examples: safelaunch --help", file=sys.stderr)
    return 2
