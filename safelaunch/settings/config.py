"""The settings of one run, resolved from every place that can set them, each with its origin.

Precedence: command line > ``SAFELAUNCH_*`` environment > configuration file > presets > defaults. The
configuration file is ``--config FILE`` (TOML if its name ends in ``.toml``, else YAML), else ``./safelaunch.yaml``,
else ``[tool.safelaunch]`` of ``./pyproject.toml``. Only the highest level that names presets counts: ``--preset``
replaces the configuration file's list. Paths on the command line and in the environment, and ``bundle-dir``
everywhere, are relative to the working directory. Presets in a configuration file are relative to that file.

A configuration file can set variables such as LD_PRELOAD. One that safelaunch only finds in the working directory is
read if it belongs to this user or to root and nobody else may write it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from safelaunch.settings.options import BY_FLAG, BY_NAME, OWN_OPTIONS, Option, help_text, options_of
from safelaunch.settings.presetfile import EnvSetting, read_env, version_matches
from safelaunch.settings.presets import Composition, Sourced, load_presets
from safelaunch.settings.values import GroupTimeout
from safelaunch.settings.yamlfile import (
    Node,
    decode,
    did_you_mean,
    known_entries,
    mapping_entries,
    nearest,
    parse_toml_table,
    parse_yaml,
    read_bytes,
    read_with_owner,
    read_yaml,
)
from safelaunch.system import untrusted_paths
from safelaunch.system.console import say
from safelaunch.system.errors import PresetError, UsageError

__all__ = ["INTERNAL_ENV", "OWN_OPTIONS", "Option", "Settings", "help_text", "options_of", "resolve"]

# Set by safelaunch for the processes it starts; a run inside a run inherits them.
INTERNAL_ENV = frozenset(
    {
        "SAFELAUNCH_RUN_DIR",
        "SAFELAUNCH_SUPERVISOR_PID",
        "SAFELAUNCH_AGENT_PID",
        "SAFELAUNCH_PYTHONPATH",
        "SAFELAUNCH_MODE",
        "SAFELAUNCH_LEASES",
        "SAFELAUNCH_CHECKS",
        "SAFELAUNCH_HELD",
        "SAFELAUNCH_EXIT_FILE",
        "SAFELAUNCH_GROUP_TIMEOUT",
        "SAFELAUNCH_ALLOCATIONS",
    }
)
# The lease directory of a node, for tests and for nodes whose /tmp is not shared.
PLACES_ENV = ("SAFELAUNCH_LEASE_DIR",)
# Set for the commands of --on-bundle and --on-suspect; a run that they start inherits them. SAFELAUNCH_RUN_NAME is also
# an option's.
HOOK_ENV = tuple(
    f"SAFELAUNCH_{word}"
    for word in [
        "BUNDLE",
        "VERDICT",
        "OUTCOME",
        "CAUSE",
        "CONFIDENCE",
        "SUMMARY",
        "CULPRITS",
        "RANKS",
        "QUIET_S",
        "USUAL_S",
    ]
)
NOT_OPTIONS = INTERNAL_ENV | {*HOOK_ENV, *PLACES_ENV}
PREFIX = "SAFELAUNCH_"
CONFIG_FILE = "safelaunch.yaml"
PYPROJECT = "pyproject.toml"
TOML_TABLE = "tool.safelaunch"

DEFAULT_STALL_TIMEOUT_S = 600.0
DEFAULT_STARTUP_TIMEOUT_S = 1800.0
DEFAULT_MAX_STALL_S = 1800.0
MAX_STALL_FACTOR = 12
DEFAULT_BUNDLE_DIR = "safelaunch-bundles"
DEFAULT_STALL_FLOOR_S = 60.0
STALL_CEILING_S = 1800.0

_Values = dict[str, Sourced]


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option's value. ``origins`` maps option names (``stall-timeout``) to where the value came from.

    An origin is ``command line``, ``environment SAFELAUNCH_STALL_TIMEOUT``, ``safelaunch.yaml:3``, ``preset
    hang-debug`` or ``default``. ``stall_timeout_s`` None is ``auto``; ``max_stall_s`` None is not given.
    ``pg_timeout`` None leaves torch's own. ``gpus`` is a text from ``values.parse_gpus``, None if not given.
    ``keep_bundles`` 0 keeps all. ``wait_timeout_s`` None waits for ever, if ``wait``. ``bundle_dir`` is absolute if the
    working directory is. ``env`` holds the variables of presets and configuration file; exported variables win over
    them.
    ``idle_presets``: those that set nothing of their own for the installed torch.
    """

    presets: tuple[str, ...] = ()
    stall_timeout_s: float | None = None
    stall_floor_s: float = DEFAULT_STALL_FLOOR_S
    max_stall_s: float | None = None
    startup_timeout_s: float = DEFAULT_STARTUP_TIMEOUT_S
    on_stall: str = "kill"
    pg_timeout: GroupTimeout | None = None
    watch: bool = True
    bundle_dir: Path = Path(DEFAULT_BUNDLE_DIR)
    keep_bundles: int = 0
    on_bundle: str | None = None
    early_look: bool = True
    on_suspect: str | None = None
    check_every: int = 0
    on_inconsistent: str = "report"
    gpus: str | None = None
    wait: bool = False
    wait_timeout_s: float | None = None
    lease: bool = True
    run_name: str | None = None
    cluster_key_file: Path | None = None
    cluster_store: str | None = None
    config: str | None = None
    dry_run: bool = False
    env: tuple[EnvSetting, ...] = ()
    idle_presets: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Where an option's value came from; ``default`` if nothing sets it."""
        return self.origins.get(name, "default")

    def is_explicit(self, name: str) -> bool:
        """Whether anything sets an option, presets included."""
        return self.origin(name) != "default"

    @property
    def effective_stall_timeout_s(self) -> float:
        """The threshold in seconds; under ``auto`` the one that applies until the job's rhythm is known."""
        return DEFAULT_STALL_TIMEOUT_S if self.stall_timeout_s is None else self.stall_timeout_s

    @property
    def effective_max_stall_s(self) -> float:
        """The given value; else 12 times an explicit stall timeout; else 1800 seconds."""
        if self.max_stall_s is not None:
            return self.max_stall_s
        if self.stall_timeout_s is not None:
            return MAX_STALL_FACTOR * self.stall_timeout_s
        return DEFAULT_MAX_STALL_S

    @property
    def max_stall_origin(self) -> str:
        """Where ``effective_max_stall_s`` comes from."""
        if self.max_stall_s is None and self.stall_timeout_s is not None:
            return f"{MAX_STALL_FACTOR} x stall-timeout ({self.origin('stall-timeout')})"
        return self.origin("max-stall")


def resolve(
    cli: Sequence[tuple[str, str | None]],
    environ: Mapping[str, str],
    cwd: Path,
    torch_version: Callable[[], str | None],
) -> Settings:
    """The settings of a run.

    ``cli`` holds safelaunch's own options in order, spelled as in the table, with their value (None for a
    switch). ``torch_version`` is called only if presets or an ``env`` section exist. Raises UsageError
    (PresetError for a file) that names the place of the wrong value.
    """
    above = {**_from_environment(environ), **_from_command_line(cli)}
    from_file, file_env, file_dir = _from_file(above.get("config"), cwd)
    given = {**from_file, **above}
    version = torch_version() if "preset" in given or file_env else None
    composition = _presets(given, from_file, cwd, file_dir, version)
    values = {**composition.watchdog, **given}
    _check(values)
    env = {s.name: s for s in composition.env}
    env.update({s.name: s for s in file_env if version_matches(s.torch, version)})
    return replace(_settings(values, tuple(env.values()), cwd), idle_presets=composition.idle)


def bundle_dir_of(own: Sequence[tuple[str, str | None]], environ: Mapping[str, str], cwd: Path) -> Path:
    """Where a run here with these options would write bundles. A broken configuration file is a run's to report."""
    try:
        return resolve(own, environ, cwd, lambda: None).bundle_dir
    except UsageError:
        return cwd / DEFAULT_BUNDLE_DIR


def _settings(values: _Values, env: tuple[EnvSetting, ...], cwd: Path) -> Settings:
    def value(name: str, default: Any) -> Any:
        return values[name].value if name in values else default

    key_file, wait = value("cluster-key-file", None), value("wait", False)
    return Settings(
        presets=value("preset", ()),
        stall_timeout_s=value("stall-timeout", None),
        stall_floor_s=value("stall-floor", DEFAULT_STALL_FLOOR_S),
        max_stall_s=value("max-stall", None),
        startup_timeout_s=value("startup-timeout", DEFAULT_STARTUP_TIMEOUT_S),
        on_stall=value("on-stall", "kill"),
        pg_timeout=value("pg-timeout", None),
        watch=not value("no-watch", False),
        bundle_dir=cwd / Path(value("bundle-dir", DEFAULT_BUNDLE_DIR)).expanduser(),
        keep_bundles=value("keep-bundles", 0),
        on_bundle=value("on-bundle", None),
        early_look=not value("no-early-look", False),
        on_suspect=value("on-suspect", None),
        check_every=value("check-every", 0),
        on_inconsistent=value("on-inconsistent", "report"),
        gpus=value("gpus", None),
        wait=bool(wait),
        wait_timeout_s=None if isinstance(wait, bool) else wait,
        lease=not value("no-lease", False),
        run_name=value("run-name", None),
        cluster_key_file=cwd / Path(key_file).expanduser() if key_file is not None else None,
        cluster_store=value("cluster-store", None),
        config=value("config", None),
        dry_run=value("dry-run", False),
        env=env,
        origins={
            option.name: values[option.name].origin if option.name in values else "default" for option in OWN_OPTIONS
        },
    )


def _check(values: _Values) -> None:
    """Raises UsageError for a --max-stall below the stall timeout: it would end the job before any suspicion."""
    stall, limit = values.get("stall-timeout"), values.get("max-stall")
    if stall is None or limit is None or stall.value is None:
        return
    stall_s, limit_s = stall.value, limit.value
    if isinstance(stall_s, float) and isinstance(limit_s, float) and limit_s < stall_s:
        raise UsageError(
            f"max-stall ({limit_s:g} s, {limit.origin}) is shorter than stall-timeout ({stall_s:g} s, {stall.origin})",
            "max-stall limits the wait while the job still computes; set it to at least the stall timeout",
        )


# --- one level each -----------------------------------------------------------------------------------------


def _from_command_line(cli: Sequence[tuple[str, str | None]]) -> _Values:
    values: _Values = {}
    for flag, text in cli:
        option = BY_FLAG.get(flag)
        if option is None:
            raise UsageError(f"unknown option {flag}{did_you_mean(flag, BY_FLAG)}", "safelaunch --help lists them")
        if option.takes_value not in (None, text is not None):
            raise UsageError(f"{flag} {'needs a' if option.takes_value else 'takes no'} value")
        value = True if text is None else option.parse_text(text, flag)
        if option.repeatable:
            before = values.get(option.name)
            value = (*(before.value if before and isinstance(before.value, tuple) else ()), value)
        values[option.name] = Sourced(value, "command line")
    return values


def _from_environment(environ: Mapping[str, str]) -> _Values:
    by_variable = {option.variable: option for option in OWN_OPTIONS}
    values: _Values = {}
    for name in sorted(n for n in environ if n.startswith(PREFIX)):
        text = environ[name]
        if name in INTERNAL_ENV or name in HOOK_ENV or name in PLACES_ENV or (name in by_variable and not text.strip()):
            continue
        if name not in by_variable:
            match = nearest(name, by_variable)
            raise UsageError(
                f"environment variable {name} is not one of safelaunch's{did_you_mean(name, by_variable)}",
                f"rename it to {match}, or unset it" if match else f"known: {', '.join(by_variable)}",
            )
        option = by_variable[name]
        if option.repeatable:
            parts = [part.strip() for part in text.split(",") if part.strip()]
            value: object = tuple(option.parse_text(part, name) for part in parts)
        else:
            value = option.parse_text(text, name)
        values[option.name] = Sourced(value, f"environment {name}")
    return values


def _from_file(chosen: Sourced | None, cwd: Path) -> tuple[_Values, tuple[EnvSetting, ...], Path]:
    """Values and ``env`` of the configuration file, and the directory it is in."""
    root, path = _config_root(chosen, cwd)
    if root.kind == "nothing":
        return {}, (), path.parent
    values: _Values = {}
    env: tuple[EnvSetting, ...] = ()
    known = [*(option.name for option in OWN_OPTIONS if option.in_file), "env"]
    for name, key, node in known_entries(root, known, "the configuration"):
        if name == "env":
            for one in mapping_entries(node, "env"):
                single = Node(node.where, "mapping", entries=(one,))
                env += read_env(single, one[0].where, reasons=False)
        else:
            values[name] = Sourced(BY_NAME[name].parse_node(node), key.where)
    return values, env, path.parent


def _config_root(chosen: Sourced | None, cwd: Path) -> tuple[Node, Path]:
    if chosen is not None:
        name = str(chosen.value)
        path = cwd / Path(name).expanduser()
        if not path.exists():
            raise PresetError(f"configuration file {name} does not exist ({chosen.origin})", "check the path")
        return (_toml(path, name) if path.suffix == ".toml" else read_yaml(path, name)), path
    path = cwd / CONFIG_FILE
    if untrusted_paths.exists(path) and (data := _found(path)) is not None:  # which, unlike pathlib, raises nothing
        return parse_yaml(decode(data, CONFIG_FILE), CONFIG_FILE), path
    path = cwd / PYPROJECT
    if untrusted_paths.is_file(path) and (data := _found(path, b"[" + TOML_TABLE.encode())) is not None:
        return parse_toml_table(decode(data, PYPROJECT), PYPROJECT, TOML_TABLE), path
    return Node(CONFIG_FILE, "nothing"), path


def _toml(path: Path, name: str) -> Node:
    """The table ``[tool.safelaunch]``; without one, all of the file, unless it is a ``pyproject.toml``."""
    text = decode(read_bytes(path, name), name)
    table = parse_toml_table(text, name, TOML_TABLE)
    whole = table.kind == "nothing" and path.name != PYPROJECT
    return parse_toml_table(text, name, "") if whole else table


# --- a file that was found --------------------------------------------------------------------------------------------


def _found(path: Path, only_with: bytes = b"") -> bytes | None:
    """The content of a file that no option names; None if it is untrusted, or has no settings for safelaunch.

    Raises PresetError for a trusted file that cannot be read.
    """
    try:
        link = path.lstat()
        data, info = read_with_owner(path, path.name)
    except OSError:
        return None  # it is gone
    except PresetError:
        if reason := _why_not_trusted(link) or _why_not_trusted(_owner(path)):
            _ignored(path, reason)
            return None
        raise
    if only_with not in data:
        return None
    if reason := (stat.S_ISLNK(link.st_mode) and _why_not_trusted(link)) or _why_not_trusted(info):
        _ignored(path, reason)
        return None
    return data


def _owner(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _why_not_trusted(info: os.stat_result | None) -> str:
    """Who else owns or may write a file, besides this user and root; empty if nobody."""
    if info is None:
        return ""
    if info.st_uid not in (0, os.getuid()):
        return f"it belongs to user {info.st_uid}"
    if stat.S_ISLNK(info.st_mode):
        return ""  # a link's mode means nothing
    if info.st_mode & stat.S_IWOTH:
        return "everybody may write it"
    if info.st_mode & stat.S_IWGRP and not _is_private_group(info.st_gid, info.st_uid):
        return f"group {info.st_gid} may write it"
    return ""


def _is_private_group(gid: int, uid: int) -> bool:
    """Whether it is the user's private group, as many systems create; there, umask 002 is usual."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return gid == uid
    own = user.pw_gid == gid and (gid == uid or group.gr_name == user.pw_name)
    return own and set(group.gr_mem) <= {user.pw_name}


@cache  # a sweep calls this for every job
def _ignored(path: Path, reason: str) -> None:
    say(f"ignoring {path.name}, because {reason}. If you trust it, pass --config {path.name}.")


def _presets(given: _Values, from_file: _Values, cwd: Path, file_dir: Path, version: str | None) -> Composition:
    asked = given.get("preset")
    if asked is None or not isinstance(asked.value, tuple):
        return Composition()
    in_file = asked is from_file.get("preset")
    return load_presets(
        asked.value,
        cwd=file_dir if in_file else cwd,
        torch_version=version,
        asked_by="" if asked.origin == "command line" else asked.origin,
    )
