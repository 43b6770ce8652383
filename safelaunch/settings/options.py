"""safelaunch's own options as one table: names, values, help, and which subcommands take them.

The command line splitter, the environment, the configuration file, the presets' ``watchdog`` section and the
help text all read this table; ``safelaunch.settings.values`` says what each value may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from safelaunch.errors import PresetError, UsageError
from safelaunch.settings.values import (
    AUTO,
    ON_STALL,
    parse_command,
    parse_count,
    parse_flag,
    parse_gpus,
    parse_on_stall,
    parse_path,
    parse_run_name,
    parse_seconds,
    parse_size,
    parse_stall_timeout,
)
from safelaunch.settings.yamlfile import Node, did_you_mean, texts_of


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``expects`` completes the sentence "X is not ..."; ``metavar`` is None for a switch."""

    name: str
    metavar: str | None
    parse: Callable[[str], object]
    expects: str
    help: str
    commands: frozenset[str]
    repeatable: bool = False
    in_file: bool = True

    @property
    def flag(self) -> str:
        """As on the command line: ``--stall-timeout``."""
        return f"--{self.name}"

    @property
    def takes_value(self) -> bool:
        return self.metavar is not None

    @property
    def variable(self) -> str:
        """As in the environment: ``SAFELAUNCH_STALL_TIMEOUT``."""
        return "SAFELAUNCH_" + self.name.upper().replace("-", "_")

    def parse_text(self, text: str, where: str) -> object:
        """The value of ``text``; UsageError, naming ``where`` it was given, when it is none."""
        try:
            return self.parse(text)
        except ValueError:
            hint = did_you_mean(text, ON_STALL) if self.parse is parse_on_stall else ""
            raise UsageError(f"{where}: {text!r} is not {self.expects}{hint}") from None

    def parse_node(self, node: Node) -> object:
        """The value written in a file; PresetError, naming file and line, when it is none.

        A repeatable option takes one value or a list and gives a tuple.
        """
        where = f"{node.where}: {self.name}"
        try:
            if self.repeatable:
                return tuple(self.parse_text(item.text, where) for item in texts_of(node, self.name))
            if not self.takes_value and node.kind != "boolean":
                raise PresetError(f"{where} must be true or false, not {node.text or node.describe()}")
            if self.takes_value and node.kind not in ("text", "number"):
                raise PresetError(f"{where} must be {self.expects}; this is {node.describe()}", _quote_hint(node))
            return self.parse_text(node.text, where)
        except PresetError:
            raise
        except UsageError as error:
            raise PresetError(error.message, error.fix) from error


def _quote_hint(node: Node) -> str:
    return f'to mean the word {node.text}, write "{node.text}"' if node.kind == "boolean" else ""


_JOBS = frozenset({"run", "exec", "colaunch"})
_JOBS_AND_DEMO = _JOBS | {"demo"}
_ALL = _JOBS_AND_DEMO | {"dump"}
_A_DURATION = "a positive number of seconds (also 90s, 10m, 2h)"

OWN_OPTIONS: tuple[Option, ...] = (
    Option(
        "preset",
        "NAME|FILE",
        parse_path,
        "a preset's name or file",
        "Environment from a preset (see 'safelaunch presets'); may be repeated, later wins.",
        _JOBS_AND_DEMO,
        repeatable=True,
    ),
    Option(
        "stall-timeout",
        "SECONDS|auto",
        parse_stall_timeout,
        f"{AUTO} or {_A_DURATION}",
        "Suspect a hang after this long without a step; auto (default) learns it from the job's own steps.",
        _JOBS_AND_DEMO,
    ),
    Option(
        "stall-floor",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "auto never suspects sooner than this [60s].",
        _JOBS_AND_DEMO,
    ),
    Option(
        "stall-ceiling",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "auto never waits longer than this [30m].",
        _JOBS_AND_DEMO,
    ),
    Option(
        "max-stall",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "Give up on a job that computes but makes no step [12 x an explicit --stall-timeout, else 30m].",
        _JOBS_AND_DEMO,
    ),
    Option(
        "startup-timeout",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "Allow this long until the first step [30m].",
        _JOBS_AND_DEMO,
    ),
    Option(
        "on-stall",
        "kill|restart|dump",
        parse_on_stall,
        "kill, restart or dump",
        "After the evidence is collected: stop the job [kill], start it again, or leave it running (dump).",
        _JOBS_AND_DEMO,
    ),
    Option("no-watch", None, parse_flag, "1 or 0", "Only launch: no watchdog, no bundle.", _JOBS),
    Option(
        "bundle-dir",
        "DIR",
        parse_path,
        "a directory",
        "Where bundles of evidence are written [./safelaunch-bundles].",
        _ALL,
    ),
    Option(
        "bundle-archive",
        None,
        parse_flag,
        "1 or 0",
        "Write each bundle as NAME.tar.gz as well, beside its directory.",
        _JOBS,
    ),
    Option(
        "keep-bundles",
        "N",
        parse_count,
        "a number of bundles (0: all of them)",
        "Keep the N newest bundles of the bundle directory; older ones are removed when one is added [0: keep all].",
        _JOBS,
    ),
    Option(
        "artifact-limit",
        "SIZE",
        parse_size,
        "a size such as 64MB, 500k or 2G",
        "Largest file of a bundle: longer text is cut, other files are left out, and the manifest says so [64MB].",
        _JOBS,
    ),
    Option(
        "on-bundle",
        "COMMAND",
        parse_command,
        "a command",
        "Run COMMAND in /bin/sh for each bundle, for at most 30 s, with its path and verdict in SAFELAUNCH_BUNDLE, "
        "_VERDICT, _OUTCOME, _CAUSE, _CONFIDENCE, _SUMMARY, _CULPRITS and _RUN_NAME.",
        _JOBS,
    ),
    Option(
        "gpus",
        "N|all|none|IDS",
        parse_gpus,
        "a number of GPUs, all, none, or ids such as 0,2 (a single one: 3,)",
        "GPUs for this job: how many, or which (0,2; a single one: 3,) [CUDA_VISIBLE_DEVICES, else one a rank].",
        _JOBS,
    ),
    Option(
        "wait", None, parse_flag, "1 or 0", "Wait until the GPUs asked for are free, first come first served.", _JOBS
    ),
    Option(
        "wait-timeout",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "As --wait, but give up after this long.",
        _JOBS,
    ),
    Option(
        "gpu-busy-memory",
        "SIZE",
        parse_size,
        "a size such as 64MB, 500k or 2G",
        "A GPU without a lease counts as used when more memory than this is in use on it [256MB].",
        _JOBS,
    ),
    Option("no-lease", None, parse_flag, "1 or 0", "Lease no GPUs: the job shares them as under torchrun.", _JOBS),
    Option(
        "run-name",
        "NAME",
        parse_run_name,
        "a name of 1 to 64 letters, digits, '.', '_' and '-' that starts with neither '.' nor '-'",
        "Name of this run in bundles and in 'safelaunch status'.",
        _JOBS_AND_DEMO,
    ),
    Option(
        "config",
        "FILE",
        parse_path,
        "a file",
        "Configuration file [./safelaunch.yaml, else [tool.safelaunch] in ./pyproject.toml].",
        _ALL,
        in_file=False,
    ),
    Option(
        "dry-run",
        None,
        parse_flag,
        "1 or 0",
        "Print the resolved command, environment, GPUs and timeouts; start nothing.",
        _JOBS,
        in_file=False,
    ),
)

BY_NAME = {option.name: option for option in OWN_OPTIONS}
BY_FLAG = {option.flag: option for option in OWN_OPTIONS}
WATCHDOG_KEYS = ("stall-timeout", "startup-timeout", "max-stall", "on-stall")


def options_of(command: str) -> tuple[Option, ...]:
    """The options that a subcommand takes: ``run``, ``exec``, ``colaunch``, ``demo`` or ``dump``."""
    return tuple(option for option in OWN_OPTIONS if command in option.commands)


def help_text(command: str = "run", width: int = 100) -> str:
    """The own options of a subcommand, one aligned entry each, as shown above torchrun's own help."""
    import textwrap  # needed for help only

    rows = [(f"  {o.flag} {o.metavar or ''}".rstrip(), o.help) for o in options_of(command)]
    column = max((len(left) for left, _ in rows), default=0) + 2
    lines = ["safelaunch options:"]
    for left, text in rows:
        wrapped = textwrap.wrap(text, max(20, width - column))
        lines.append(f"{left:<{column}}{wrapped[0]}")
        lines += [" " * column + line for line in wrapped[1:]]
    note = (
        "Each can also be set in the environment (SAFELAUNCH_STALL_TIMEOUT=90s) or in the configuration file "
        "(stall-timeout: 90s). The command line wins over the environment, that over the configuration file, that over "
        "presets. Presets named in several of these are not merged: the one that wins replaces the others' list."
    )
    return "\n".join([*lines, "", *textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="  ")]) + "\n"
