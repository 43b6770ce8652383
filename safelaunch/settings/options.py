"""Defines safelaunch's options in one table for command line, environment, configuration files, presets and help."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

from safelaunch import addons
from safelaunch.beacon.durations import seconds_of
from safelaunch.settings.yamlfile import YamlNode, did_you_mean, texts_of
from safelaunch.system.errors import PresetError, UsageError

# --- values -----------------------------------------------------------------------------------------------------------

ON_STALL = ("kill", "restart", "dump")
ON_INCONSISTENT = ("report", "dump", "stop")
AUTO = "auto"

_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_GPU_ID = re.compile(r"[0-9]+|(?:GPU|MIG)-[A-Za-z0-9/-]+")
_STORE = re.compile(r"(?:(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):)?([0-9]{1,5})", re.ASCII)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def parse_seconds(text: str) -> float:
    """Parses ``600``, ``1.5``, ``90s``, ``10m`` or ``2h``. Raises ValueError unless it is positive and finite."""
    return seconds_of(text)


class GroupTimeoutSetting(NamedTuple):
    seconds: float
    everywhere: bool = False  # even for groups with a timeout from the script

    def __str__(self) -> str:
        return f"{self.seconds:g} s{'!' if self.everywhere else ''}"


def parse_group_timeout(text: str) -> GroupTimeoutSetting:
    """Parses a duration such as ``30s``; ``30s!`` applies it to all process groups."""
    text = text.strip()
    seconds = parse_seconds(text.removesuffix("!"))
    if not 1e-3 <= seconds <= 1e8:  # in milliseconds, and for a datetime.timedelta
        raise ValueError(text)
    return GroupTimeoutSetting(seconds, text.endswith("!"))


def parse_count(text: str) -> int:
    """Parses a number of at most 6 digits."""
    if not re.fullmatch(r"[0-9]{1,6}", text.strip(), re.ASCII):
        raise ValueError(text)
    return int(text)


def parse_stall_timeout(text: str) -> float | None:
    """Parses a duration; returns None for ``auto``."""
    return None if text.strip() == AUTO else parse_seconds(text)


def one_of(words: Sequence[str]) -> Callable[[str], str]:

    def parse(text: str) -> str:
        if text.strip() not in words:
            raise ValueError(text)
        return text.strip()

    return parse


def parse_run_name(text: str) -> str:
    """Checks a run name: 1-64 of ``A-Z a-z 0-9 . _ -``, not starting with ``.`` or ``-``, so safe in a file name."""
    if not _RUN_NAME.fullmatch(text):
        raise ValueError(text)
    return text


def parse_gpus(text: str) -> str:
    """Parses ``all``, ``none``, a number of GPUs, or a list of ids; removes blanks.

    Digits alone are a number of GPUs. Ids contain a comma (``0,2`` or ``3,``), or are UUIDs starting with ``GPU-`` or
    ``MIG-``. Raises ValueError for duplicate ids and for 0 GPUs.
    """
    text = re.sub(r"\s*,\s*", ",", text.strip())
    if text in ("all", "none"):
        return text
    if re.fullmatch(r"[0-9]+", text):
        if int(text) == 0:
            raise ValueError(text)
        return str(int(text))
    ids = text.removesuffix(",").split(",")
    if len(set(ids)) != len(ids) or not all(_GPU_ID.fullmatch(gpu_id) for gpu_id in ids):
        raise ValueError(text)
    return text


def parse_store(text: str) -> str:
    """Checks the address of a store: ``HOST:PORT``, ``[IPv6]:PORT``, or only a port."""
    match = _STORE.fullmatch(text.strip())
    if match is None or not 0 < int(match[1]) < 65536:
        raise ValueError(text)
    return text.strip()


def parse_flag(text: str) -> bool:
    """Parses a switch: 1/true/yes/on or 0/false/no/off."""
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def parse_wait(text: str) -> bool | float:
    """Parses a wait setting: on, off, or the longest wait in seconds."""
    return parse_flag(text) if text.strip().lower() in _TRUE + _FALSE else parse_seconds(text)


def parse_nonblank(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError(text)
    return text


def parse_path(text: str) -> Path:
    return Path(parse_nonblank(text)).expanduser()


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    metavar: str | None  # None: a switch
    parse: Callable[[str], object]
    expects: str  # completes "X is not ..."
    help: str
    commands: frozenset[str] = frozenset({"run", "exec"})  # subcommands that take it
    repeatable: bool = False
    in_file: bool = True
    value_is_optional: bool = False  # switch that also accepts ``=VALUE``
    addon: str = ""  # add-on that implements it
    unset: str = ""  # shown by ``--dry-run`` without a value; empty: not listed

    @property
    def flag(self) -> str:
        """The option as written on the command line: ``--stall-timeout``."""
        return f"--{self.name}"

    @property
    def takes_value(self) -> bool | None:
        """True if the option takes a value; None if it takes one only after an equals sign."""
        return None if self.value_is_optional else self.metavar is not None

    @property
    def usage(self) -> str:
        """The option as shown in the help: ``--gpus N``, ``--wait[=DURATION]``."""
        if self.value_is_optional:
            return f"{self.flag}[={self.metavar}]"
        return f"{self.flag} {self.metavar or ''}".rstrip()

    @property
    def attribute(self) -> str:
        """Name of the field in :class:`Settings`: ``stall_timeout_s``, ``presets``, ``watch``."""
        name = self.name.removeprefix("no-").replace("-", "_")
        return f"{name}_s" if self.parse in (parse_seconds, parse_stall_timeout) else name + "s" * self.repeatable

    @property
    def is_duration(self) -> bool:
        return self.parse in (parse_seconds, parse_stall_timeout, parse_group_timeout, parse_wait)

    @property
    def is_available(self) -> bool:
        return not self.addon or addons.is_present(self.addon)

    def setting(self, value: object) -> object:
        """Returns the value to store in the field; for an option named ``no-...``, the opposite."""
        return not value if self.name.startswith("no-") else value

    @property
    def variable(self) -> str:
        """Name of the environment variable: ``SAFELAUNCH_STALL_TIMEOUT``."""
        return "SAFELAUNCH_" + self.name.upper().replace("-", "_")

    def parse_text(self, text: str, where: str) -> object:
        """Parses ``text``. Raises UsageError that says ``where`` the wrong value is."""
        try:
            return self.parse(text)
        except ValueError:
            hint = did_you_mean(text, _WORDS.get(self.name, ()))
            raise UsageError(f"{where}: {text!r} is not {self.expects}{hint}") from None

    def parse_node(self, node: YamlNode) -> object:
        """Parses a value in a file.

        A repeatable option accepts one value or a list; the result is a tuple. Raises PresetError that names file and
        line.
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


def _quote_hint(node: YamlNode) -> str:
    return f'to mean the word {node.text}, write "{node.text}"' if node.kind == "boolean" else ""


_WORDS = {"on-stall": ON_STALL, "on-inconsistent": ON_INCONSISTENT}
_A_DURATION = "a positive number of seconds (also 90s, 10m, 2h)"

# metavar, parser and expectation
_DURATION = ("SECONDS", parse_seconds, _A_DURATION)
_SWITCH = (None, parse_flag, "1 or 0")
_COMMAND = ("COMMAND", parse_nonblank, "a command")

_WATCHING = (
    Option(
        "preset",
        "NAME|FILE",
        parse_nonblank,
        "a preset's name or file",
        "Run under a preset's environment (see 'safelaunch presets'). Repeat to combine presets; later ones win.",
        frozenset({"run", "exec", "demo"}),
        repeatable=True,
    ),
    Option(
        "stall-timeout",
        "SECONDS|auto",
        parse_stall_timeout,
        f"{AUTO} or {_A_DURATION}",
        "Suspect a hang after this long without a step, and end the job unless it is working; auto learns the "
        "threshold from the job's steps, and ends only a job that is proved dead [auto].",
    ),
    Option("stall-floor", *_DURATION, "auto never suspects a hang sooner than this [60s]."),
    Option(
        "max-stall",
        *_DURATION,
        "End the job after this long without a step, even if it is working [12 x an explicit --stall-timeout; 30m "
        "before the first step with an explicit --startup-timeout; else never: a job is ended only if it is proved "
        "dead, or if torch is about to end it].",
    ),
    Option(
        "startup-timeout",
        *_DURATION,
        "Suspect a hang after this long without a first step; a value that you set is treated like an "
        "explicit --stall-timeout [30m].",
    ),
    Option(
        "on-stall",
        "kill|restart|dump",
        one_of(ON_STALL),
        "kill, restart or dump",
        "What to do about a hang after its bundle is written: end the job (kill), restart its ranks (restart), or "
        "let it run (dump) [kill].",
    ),
    Option(
        "no-early-look",
        *_SWITCH,
        "Turn off early reports of a job that is quiet for longer than usual.",
    ),
    Option(
        "on-suspect",
        *_COMMAND,
        "Run COMMAND in /bin/sh (for at most 30 s) when an early look finds blocked ranks, or a rank slows the job "
        "down, with the finding in SAFELAUNCH_SUMMARY, _CAUSE, _RANKS and others.",
    ),
    Option(
        "check-every",
        "N",
        parse_count,
        "a number of steps (0: never)",
        "Every N optimizer steps, compare the ranks' replicas and look for gradients that are not finite [0: never].",
        addon="consistency",
        unset="never",
    ),
    Option(
        "on-inconsistent",
        "report|dump|stop",
        one_of(ON_INCONSISTENT),
        "report, dump or stop",
        "What to do about a finding of --check-every: print it (report), also write a bundle (dump), also end the "
        "job (stop) [report].",
        addon="consistency",
    ),
    Option(
        "pg-timeout",
        "DURATION[!]",
        parse_group_timeout,
        f"{_A_DURATION}, optionally followed by !",
        "The timeout of process groups that the script creates without one; with a !, of all groups [torch's: 10m "
        "for NCCL, else 30m].",
    ),
    Option("no-watch", *_SWITCH, "Launch only: no beacon, no watchdog, no bundle."),
)
_BUNDLES = (
    Option(
        "bundle-dir",
        "DIR",
        parse_path,
        "a directory",
        "Where bundles go [./safelaunch-bundles].",
        frozenset({"run", "exec", "demo", "dump"}),
    ),
    Option(
        "keep-bundles",
        "N",
        parse_count,
        "a number of bundles (0: all of them)",
        "Keep the N newest bundles of the bundle directory, and remove older ones when one is added [0: keep all].",
    ),
    Option(
        "on-bundle",
        *_COMMAND,
        "Run COMMAND in /bin/sh (for at most 30 s) for each bundle, with its path and verdict in SAFELAUNCH_BUNDLE, "
        "_VERDICT, _OUTCOME, _CAUSE, _CONFIDENCE, _SUMMARY, _CULPRITS and _RUN_NAME.",
    ),
    Option(
        "run-name",
        "NAME",
        parse_run_name,
        "a name of 1 to 64 letters, digits, '.', '_' and '-' that starts with neither '.' nor '-'",
        "Name of this run in bundles and in 'safelaunch status' [the script's name].",
    ),
)
_GPUS = (
    Option(
        "gpus",
        "N|all|none|IDS",
        parse_gpus,
        "a number of GPUs, all, none, or ids such as 0,2 (a single one: 3,)",
        "Lease this many GPUs, or these (0,2; a single one: 3,) [CUDA_VISIBLE_DEVICES, else one for each rank].",
    ),
    Option(
        "wait",
        "DURATION",
        parse_wait,
        "1, 0 or a duration (90s, 10m, 2h)",
        "Wait until the GPUs are free, first come, first served; give up after DURATION [forever].",
        value_is_optional=True,
    ),
    Option("no-lease", *_SWITCH, "Lease no GPUs: share them, as under torchrun."),
)
_OTHER = (
    Option(
        "cluster-key-file",
        "FILE",
        parse_path,
        "a file",
        "On several nodes: a file with the same secret on each. Supervisors ignore messages that are not signed "
        "with it.",
    ),
    Option(
        "cluster-store",
        "[HOST:]PORT",
        parse_store,
        "a port, or a host and a port (node1:29700)",
        "On several nodes without torchrun's store (exec, etcd): where the supervisors meet. The supervisor on "
        "HOST [the job's first node] starts a store there.",
    ),
    Option(
        "config",
        "FILE",
        parse_nonblank,
        "a file",
        "Configuration file of the project, YAML or TOML "
        "[./safelaunch.yaml, else [tool.safelaunch] in ./pyproject.toml].",
        in_file=False,
    ),
    Option(
        "dry-run",
        *_SWITCH,
        "Print the resolved command, environment, GPUs and timeouts; start nothing.",
        frozenset({"run", "exec", "colaunch"}),
        in_file=False,
    ),
)

# in the order of the help and ``docs/options.md``
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


# --- the settings of a run --------------------------------------------------------------------------------------------

DEFAULT_STALL_TIMEOUT_S = 600.0
DEFAULT_STARTUP_TIMEOUT_S = 1800.0
STARTUP_MAX_STALL_S = 1800.0  # before the first step, with an explicit startup timeout
MAX_STALL_FACTOR = 12
DEFAULT_BUNDLE_DIR = "safelaunch-bundles"
DEFAULT_STALL_FLOOR_S = 60.0
STALL_CEILING_S = 1800.0


RUN_DIR = "run_dir"


@dataclass(frozen=True, slots=True)
class EnvSetting:
    name: str
    value: str  # template, see ``expand``
    why: str
    origin: str  # ``preset hang-debug`` or ``safelaunch.yaml:7``
    torch: str = ""
    yields_to: tuple[str, ...] = ()  # left out if one of these, with the same effect, is exported

    def expand(self, run_dir: str) -> str:
        """Returns the value with ``{run_dir}`` filled in and doubled braces made single."""
        return self.value.format_map({RUN_DIR: run_dir})


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of all options, and where each value comes from.

    An origin is ``command line``, ``environment SAFELAUNCH_STALL_TIMEOUT``, ``safelaunch.yaml:3``, ``preset
    hang-debug`` or ``default``.
    """

    presets: tuple[str, ...] = ()
    stall_timeout_s: float | None = None  # None: auto
    stall_floor_s: float = DEFAULT_STALL_FLOOR_S
    max_stall_s: float | None = None  # None: not given
    startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S
    on_stall: str = "kill"
    pg_timeout: GroupTimeoutSetting | None = None  # None: torch's own
    watch: bool = True
    bundle_dir: Path = Path(DEFAULT_BUNDLE_DIR)  # absolute if the working directory is
    keep_bundles: int = 0  # 0: all
    on_bundle: str | None = None
    early_look: bool = True
    on_suspect: str | None = None
    check_every: int = 0
    on_inconsistent: str = "report"
    gpus: str | None = None  # from ``parse_gpus``
    wait: bool = False
    wait_timeout_s: float | None = None  # with ``wait``; None: forever
    lease: bool = True
    run_name: str | None = None
    cluster_key_file: Path | None = None
    cluster_store: str | None = None
    config: str | None = None
    dry_run: bool = False
    env: tuple[EnvSetting, ...] = ()  # of presets and files; exported variables win
    idle_presets: tuple[str, ...] = ()  # without effect for the installed torch
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")

    def is_explicit(self, name: str) -> bool:
        """True if the option was set anywhere, even by a preset."""
        return self.origin(name) != "default"

    @property
    def effective_stall_timeout_s(self) -> float:
        """Stall timeout in seconds; for ``auto``, the one that applies before the job's rhythm is known."""
        return DEFAULT_STALL_TIMEOUT_S if self.stall_timeout_s is None else self.stall_timeout_s

    @property
    def effective_max_stall_s(self) -> float | None:
        """Given value, else 12 times an explicit stall timeout, else None: by default, a job isn't ended."""
        if self.max_stall_s is not None:
            return self.max_stall_s
        if self.stall_timeout_s is not None:
            return MAX_STALL_FACTOR * self.stall_timeout_s
        return None

    @property
    def max_stall_origin(self) -> str:
        if self.max_stall_s is None and self.stall_timeout_s is not None:
            return f"{MAX_STALL_FACTOR} x stall-timeout ({self.origin('stall-timeout')})"
        return self.origin("max-stall")


OptionText = str | os.PathLike[str]
Seconds = float | str | timedelta  # 90, "90s", "10m", timedelta(minutes=10)


class LaunchOptions(TypedDict, total=False):
    """Keyword arguments of ``safelaunch.launch``: ``stall_timeout=90`` means ``--stall-timeout 90``.

    Two names differ from the options: ``config_file`` means ``--config``, and ``watch=False`` means ``--no-watch``.
    """

    preset: OptionText | Sequence[OptionText]
    stall_timeout: Seconds
    stall_floor: Seconds
    max_stall: Seconds
    startup_timeout: Seconds
    on_stall: Literal["kill", "restart", "dump"]
    no_early_look: bool
    on_suspect: str
    check_every: int
    on_inconsistent: Literal["report", "dump", "stop"]
    pg_timeout: Seconds  # "10m!" for all groups
    watch: bool
    bundle_dir: OptionText
    keep_bundles: int
    on_bundle: str
    gpus: int | str
    wait: bool | Seconds
    no_lease: bool
    run_name: str
    cluster_key_file: OptionText
    cluster_store: str
    config_file: OptionText


# --- help -------------------------------------------------------------------------------------------------------------


def options_of(command: str) -> tuple[Option, ...]:
    """Returns the options of a subcommand: ``run``, ``exec``, ``colaunch``, ``demo`` or ``dump``.

    The jobs of a colaunch sweep accept the options of ``run`` or ``exec``.
    """
    return tuple(option for option in OWN_OPTIONS if command in option.commands)


def addon_options(*, present: bool = True) -> tuple[Option, ...]:
    """Returns the options of installed add-ons; if ``present`` is False, the options of missing ones."""
    return tuple(option for option in OWN_OPTIONS if option.addon and option.is_available == present)


# these print something and exit
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
    parts = []
    for title, options in OPTION_GROUPS.items():
        rows = [(o.usage, o.help) for o in options if command in o.commands and o.is_available]
        parts += [f"{title}:\n{entries(rows, width)}\n"] if rows else []
    return "\n".join([*parts, wrapped(ELSEWHERE, width)])


def entries(rows: Iterable[tuple[str, str]], width: int, column: int = 28) -> str:
    """Formats names and descriptions in two columns; a name that is too long gets its own line."""
    lines = []
    for name, text in rows:
        fits = len(name) + 4 <= column
        body = wrapped(text, width, " " * column)
        lines += [f"  {name:<{column - 2}}{body.lstrip()}"] if fits else [f"  {name}", body]
    return "\n".join(lines)


def wrapped(text: str, width: int, indent: str = "  ") -> str:
    import textwrap  # late: only help needs it

    return textwrap.fill(
        text,
        max(40, width),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
