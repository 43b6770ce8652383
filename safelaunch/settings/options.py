"""safelaunch's own options as one table: names, values, help, and which subcommands take them.

The command line splitter, the environment, the configuration file, the presets' ``watchdog`` section and the
help text all read this table. ``safelaunch.settings.values`` parses the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from safelaunch.settings.values import (
    AUTO,
    ON_INCONSISTENT,
    ON_STALL,
    parse_command,
    parse_count,
    parse_flag,
    parse_gpus,
    parse_group_timeout,
    parse_on_inconsistent,
    parse_on_stall,
    parse_path,
    parse_run_name,
    parse_seconds,
    parse_stall_timeout,
    parse_store,
    parse_wait,
)
from safelaunch.settings.yamlfile import Node, did_you_mean, texts_of
from safelaunch.system.errors import PresetError, UsageError


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``expects`` completes the sentence "X is not ..."; ``metavar`` is None for a switch.

    ``value_is_optional``: a switch to which ``=VALUE`` may be added.
    """

    name: str
    metavar: str | None
    parse: Callable[[str], object]
    expects: str
    help: str
    commands: frozenset[str]
    repeatable: bool = False
    in_file: bool = True
    value_is_optional: bool = False

    @property
    def flag(self) -> str:
        """Its form on the command line: ``--stall-timeout``."""
        return f"--{self.name}"

    @property
    def takes_value(self) -> bool | None:
        """None: it may have one, after an equals sign."""
        return None if self.value_is_optional else self.metavar is not None

    @property
    def usage(self) -> str:
        """Its flag and value, as the help shows them: ``--gpus N``, ``--wait[=DURATION]``."""
        if self.value_is_optional:
            return f"{self.flag}[={self.metavar}]"
        return f"{self.flag} {self.metavar or ''}".rstrip()

    @property
    def variable(self) -> str:
        """Its form in the environment: ``SAFELAUNCH_STALL_TIMEOUT``."""
        return "SAFELAUNCH_" + self.name.upper().replace("-", "_")

    def parse_text(self, text: str, where: str) -> object:
        """The value of ``text``. Raises UsageError, naming ``where`` it was given, if it is not valid."""
        try:
            return self.parse(text)
        except ValueError:
            hint = did_you_mean(text, _WORDS.get(self.name, ()))
            raise UsageError(f"{where}: {text!r} is not {self.expects}{hint}") from None

    def parse_node(self, node: Node) -> object:
        """The value in a file. Raises PresetError, naming file and line, if it is not valid.

        A repeatable option takes one value or a list, and gives a tuple.
        """
        where = f"{node.where}: {self.name}"
        try:
            if self.repeatable:
                return tuple(self.parse_text(item.text, where) for item in texts_of(node, self.name))
            if self.takes_value is False and node.kind != "boolean":
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


_RUNS = frozenset({"run", "exec"})
_WORDS = {"on-stall": ON_STALL, "on-inconsistent": ON_INCONSISTENT}
_A_DURATION = "a positive number of seconds (also 90s, 10m, 2h)"

_WATCHING = (
    Option(
        "preset",
        "NAME|FILE",
        parse_path,
        "a preset's name or file",
        "Run under a preset's environment (see 'safelaunch presets'). Repeat to combine presets; later ones win.",
        _RUNS | {"demo"},
        repeatable=True,
    ),
    Option(
        "stall-timeout",
        "SECONDS|auto",
        parse_stall_timeout,
        f"{AUTO} or {_A_DURATION}",
        "Suspect a hang after this long without a step, and end the job unless it works; auto learns this from the "
        "job's own steps, and at that time ends only a job that is proved dead [auto].",
        _RUNS,
    ),
    Option(
        "stall-floor",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "auto never suspects a hang sooner than this [60s].",
        _RUNS,
    ),
    Option(
        "max-stall",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "End the job after this long without a step, even if it works; under --stall-timeout auto, the default does "
        "not end a job that works [12 x an explicit --stall-timeout, else 30m].",
        _RUNS,
    ),
    Option(
        "startup-timeout",
        "SECONDS",
        parse_seconds,
        _A_DURATION,
        "Suspect a hang after this long without a first step; a value that you set counts like an explicit "
        "--stall-timeout [30m].",
        _RUNS,
    ),
    Option(
        "on-stall",
        "kill|restart|dump",
        parse_on_stall,
        "kill, restart or dump",
        "What to do about a hang after its bundle is written: end the job (kill), start its ranks again, or let it run "
        "(dump) [kill].",
        _RUNS,
    ),
    Option(
        "no-early-look",
        None,
        parse_flag,
        "1 or 0",
        "Say nothing about a job that is quiet for longer than usual until the stall timeout.",
        _RUNS,
    ),
    Option(
        "on-suspect",
        "COMMAND",
        parse_command,
        "a command",
        "Run COMMAND in /bin/sh when an early look finds ranks that stand still, for at most 30 s, with what they do "
        "in SAFELAUNCH_SUMMARY, _CAUSE, _RANKS, _QUIET_S, _USUAL_S and _RUN_NAME.",
        _RUNS,
    ),
    Option(
        "check-every",
        "N",
        parse_count,
        "a number of steps (0: never)",
        "Every N optimizer steps, compare the ranks' replicas and look for gradients that are not finite [0: never].",
        _RUNS,
    ),
    Option(
        "on-inconsistent",
        "report|dump|stop",
        parse_on_inconsistent,
        "report, dump or stop",
        "When --check-every finds something: say so (report), also write a bundle (dump), also end the job (stop) "
        "[report].",
        _RUNS,
    ),
    Option(
        "pg-timeout",
        "DURATION[!]",
        parse_group_timeout,
        f"{_A_DURATION}, and perhaps a ! behind it",
        "The timeout of process groups to which the script gives none; with a !, of all [torch's: 10m for NCCL, else "
        "30m].",
        _RUNS,
    ),
    Option("no-watch", None, parse_flag, "1 or 0", "Only launch: no beacon, no watchdog, no bundle.", _RUNS),
)
_BUNDLES = (
    Option(
        "bundle-dir",
        "DIR",
        parse_path,
        "a directory",
        "Where bundles go [./safelaunch-bundles].",
        _RUNS | {"demo", "dump"},
    ),
    Option(
        "keep-bundles",
        "N",
        parse_count,
        "a number of bundles (0: all of them)",
        "Keep the N newest bundles of the bundle directory, and remove older ones when one is added [0: keep all].",
        _RUNS,
    ),
    Option(
        "on-bundle",
        "COMMAND",
        parse_command,
        "a command",
        "Run COMMAND in /bin/sh for each bundle, for at most 30 s, with its path and verdict in SAFELAUNCH_BUNDLE, "
        "_VERDICT, _OUTCOME, _CAUSE, _CONFIDENCE, _SUMMARY, _CULPRITS and _RUN_NAME.",
        _RUNS,
    ),
    Option(
        "run-name",
        "NAME",
        parse_run_name,
        "a name of 1 to 64 letters, digits, '.', '_' and '-' that starts with neither '.' nor '-'",
        "Name of this run in bundles and in 'safelaunch status' [the script's name].",
        _RUNS,
    ),
)
_GPUS = (
    Option(
        "gpus",
        "N|all|none|IDS",
        parse_gpus,
        "a number of GPUs, all, none, or ids such as 0,2 (a single one: 3,)",
        "Lease this many GPUs, or these (0,2; a single one: 3,) [CUDA_VISIBLE_DEVICES, else one for each rank].",
        _RUNS,
    ),
    Option(
        "wait",
        "DURATION",
        parse_wait,
        "1, 0 or a duration (90s, 10m, 2h)",
        "Wait until the GPUs are free, first come, first served; give up after DURATION [for ever].",
        _RUNS,
        value_is_optional=True,
    ),
    Option("no-lease", None, parse_flag, "1 or 0", "Lease no GPUs: share them, as under torchrun.", _RUNS),
)
_OTHER = (
    Option(
        "cluster-key-file",
        "FILE",
        parse_path,
        "a file",
        "On several nodes: a file with the same secret on each. Messages of supervisors without it are ignored.",
        _RUNS,
    ),
    Option(
        "cluster-store",
        "[HOST:]PORT",
        parse_store,
        "a port, or a host and a port (node1:29700)",
        "On several nodes without a store of torchrun's (exec, etcd): where the supervisors meet. The one on HOST [the "
        "job's first] starts a store there.",
        _RUNS,
    ),
    Option(
        "config",
        "FILE",
        parse_path,
        "a file",
        "Configuration file, YAML or TOML [./safelaunch.yaml, else [tool.safelaunch] in ./pyproject.toml].",
        _RUNS,
        in_file=False,
    ),
    Option(
        "dry-run",
        None,
        parse_flag,
        "1 or 0",
        "Print the resolved command, environment, GPUs and timeouts; start nothing.",
        _RUNS | {"colaunch"},
        in_file=False,
    ),
)

# By subject, in the order of the help; ``docs/options.md`` has the same.
OPTION_GROUPS: Mapping[str, tuple[Option, ...]] = {
    "Watching": _WATCHING,
    "Bundles": _BUNDLES,
    "GPUs": _GPUS,
    "Other": _OTHER,
}
OWN_OPTIONS = tuple(option for group in OPTION_GROUPS.values() for option in group)
BY_NAME = {option.name: option for option in OWN_OPTIONS}
BY_FLAG = {option.flag: option for option in OWN_OPTIONS}
WATCHDOG_KEYS = (
    "stall-timeout",
    "startup-timeout",
    "max-stall",
    "on-stall",
    "check-every",
    "on-inconsistent",
    "pg-timeout",
)


def options_of(command: str) -> tuple[Option, ...]:
    """The options that a subcommand takes itself: ``run``, ``exec``, ``colaunch``, ``demo`` or ``dump``.

    A job of a colaunch sweep takes those of ``run`` or ``exec``.
    """
    return tuple(option for option in OWN_OPTIONS if command in option.commands)


# Options that belong to no run: they print something and exit.
HELP_OPTIONS = {
    "-h, --help": "Print this help.",
    "--help-torchrun": "Print the help of the installed torchrun.",
    "--version": "Print the version.",
}
ELSEWHERE = (
    "You can also set each option in the environment (SAFELAUNCH_STALL_TIMEOUT=90s) or in the configuration file "
    "(stall-timeout: 90s). Precedence: command line, environment, configuration file, presets. Lists of presets "
    "are not merged: the list with the highest precedence replaces the others."
)


def help_text(command: str = "run", width: int = 100) -> str:
    """The help on the own options of a subcommand, by subject."""
    parts = []
    for title, options in OPTION_GROUPS.items():
        rows = [(o.usage, o.help) for o in options if command in o.commands]
        parts += [f"{title}:\n{entries(rows, width)}\n"] if rows else []
    return "\n".join([*parts, wrapped(ELSEWHERE, width)])


def entries(rows: Iterable[tuple[str, str]], width: int, column: int = 28) -> str:
    """Names and their meanings in two columns. A name that is too long for its column has a line of its own."""
    lines = []
    for name, text in rows:
        fits = len(name) + 4 <= column
        body = wrapped(text, width, " " * column)
        lines += [f"  {name:<{column - 2}}{body.lstrip()}"] if fits else [f"  {name}", body]
    return "\n".join(lines)


def wrapped(text: str, width: int, indent: str = "  ") -> str:
    """One paragraph, without breaking a word."""
    import textwrap  # needed for help only

    return textwrap.fill(
        text,
        max(40, width),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
