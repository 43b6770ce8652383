"""Resolves the settings of a run from all places that can set them, each with its origin.

Precedence: command line > ``SAFELAUNCH_*`` environment > the project's configuration file > the user's
(``~/.config/safelaunch/config.yaml``) > the machine's (``/etc/safelaunch.yaml``) > presets > defaults. The project's
file is ``--config FILE`` (TOML if its name ends in ``.toml``, else YAML), else ``./safelaunch.yaml``, else the table
``[tool.safelaunch]`` of ``./pyproject.toml``. Options from several files are merged one by one, but of the places that
name presets, only the one with the highest precedence counts. Paths are relative to the working directory. Only the
paths of presets in a configuration file are relative to that file.

A configuration file can set variables such as LD_PRELOAD. Unless ``--config`` names it, it is therefore read only if it
belongs to this user or to root and no other user can write to it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from safelaunch.settings.options import (
    BY_FLAG,
    BY_NAME,
    DEFAULT_BUNDLE_DIR,
    OWN_OPTIONS,
    EnvSetting,
    Settings,
    addon_options,
)
from safelaunch.settings.presets import Composition, Sourced, load_presets, read_env, version_matches
from safelaunch.settings.yamlfile import (
    YamlNode,
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
from safelaunch.system.console import say
from safelaunch.system.errors import PresetError, UsageError
from safelaunch.system.files import exists, is_file

# Set by safelaunch, and inherited by a run inside a run.
INTERNAL_ENV = frozenset(
    {
        "SAFELAUNCH_RUN_DIR",
        "SAFELAUNCH_SUPERVISOR_PID",
        "SAFELAUNCH_AGENT_PID",
        "SAFELAUNCH_PYTHONPATH",
        "SAFELAUNCH_MODE",
        "SAFELAUNCH_LEASES",
        "SAFELAUNCH_PROBES",
        "SAFELAUNCH_CHECKS",
        "SAFELAUNCH_HELD",
        "SAFELAUNCH_EXIT_FILE",
        "SAFELAUNCH_GROUP_TIMEOUT",
        "SAFELAUNCH_ALLOCATIONS",
    }
)
# For tests, and for nodes that don't share /tmp.
PLACES_ENV = ("SAFELAUNCH_LEASE_DIR",)
# Set for --on-bundle's and --on-suspect's commands, and inherited by runs in them. SAFELAUNCH_RUN_NAME is also an
# option's.
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
MACHINE_FILE = "/etc/safelaunch.yaml"
USER_FILE = "safelaunch/config.yaml"  # below $XDG_CONFIG_HOME or ~/.config
PYPROJECT = "pyproject.toml"
TOML_TABLE = "tool.safelaunch"

_Values = dict[str, Sourced]


@dataclass(frozen=True)
class _File:
    """Settings from one configuration file. Paths of presets in it are relative to ``directory``."""

    directory: Path
    values: _Values = field(default_factory=dict)
    env: tuple[EnvSetting, ...] = ()


def resolve(
    cli: Sequence[tuple[str, str | None]],
    environ: Mapping[str, str],
    cwd: Path,
    torch_version: Callable[[], str | None],
) -> Settings:
    """Returns the settings of a run.

    Raises UsageError (PresetError if a file is wrong) that says where the wrong value is.

    Args:
        cli: safelaunch's options in order, with their values (None for an option without a value).
        torch_version: Called only if there are presets or an ``env`` section.
    """
    above = {**_from_environment(environ), **_from_command_line(cli)}
    files = [*_shared_files(environ), _file(*_project_root(above.get("config"), cwd))]
    given = {name: value for values in (*(file.values for file in files), above) for name, value in values.items()}
    file_env = [setting for file in files for setting in file.env]
    version = torch_version() if "preset" in given or file_env else None
    composition = _presets(given, files, cwd, version)
    values = {**composition.watchdog, **given}
    _check(values)
    env = {setting.name: setting for setting in composition.env}
    env.update({setting.name: setting for setting in file_env if version_matches(setting.torch, version)})
    return replace(_settings(values, tuple(env.values()), cwd), idle_presets=composition.idle)


def bundle_dir_of(own: Sequence[tuple[str, str | None]], environ: Mapping[str, str], cwd: Path) -> Path:
    """Returns the bundle directory that a run would use; the default one if the configuration is invalid."""
    try:
        return resolve(own, environ, cwd, lambda: None).bundle_dir
    except UsageError:
        return cwd / DEFAULT_BUNDLE_DIR


def _settings(values: _Values, env: tuple[EnvSetting, ...], cwd: Path) -> Settings:
    given = [option for option in OWN_OPTIONS if option.name in values]
    fields: dict[str, Any] = {option.attribute: option.setting(values[option.name].value) for option in given}
    wait = fields.get("wait", False)
    fields |= {"wait": bool(wait), "wait_timeout_s": None if isinstance(wait, bool) else wait}
    fields.setdefault("bundle_dir", Path(DEFAULT_BUNDLE_DIR))
    paths = {name: cwd / value for name, value in fields.items() if isinstance(value, Path)}
    origins = {option.name: "default" for option in OWN_OPTIONS} | {
        option.name: values[option.name].origin for option in given
    }
    return Settings(**{**fields, **paths}, env=env, origins=origins)


def _check(values: _Values) -> None:
    """Raises UsageError for an option of a missing add-on, or if --max-stall is shorter than --stall-timeout."""
    for option in addon_options(present=False):
        if option.name in values:
            origin = values[option.name].origin
            raise UsageError(f"{option.flag} ({origin}) is part of the add-on {option.addon!r}, which isn't installed")
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
        if name in NOT_OPTIONS or (name in by_variable and not text.strip()):
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


def _shared_files(environ: Mapping[str, str]) -> list[_File]:
    """Returns the machine's and the user's configuration files, if they exist and can be trusted."""
    config_home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "~", ".config")  # noqa: PTH118
    files = []
    for path in (Path(MACHINE_FILE), Path(config_home).expanduser() / USER_FILE):
        if exists(path) and (data := _found(path, shown := _shown(path, environ))) is not None:
            files.append(_file(parse_yaml(decode(data, shown), shown), path))
    return files


def _shown(path: Path, environ: Mapping[str, str]) -> str:
    home = environ.get("HOME")
    return f"~/{path.relative_to(home)}" if home and path.is_relative_to(home) else str(path)


def _file(root: YamlNode, path: Path) -> _File:
    if root.kind == "nothing":
        return _File(path.parent)
    values: _Values = {}
    env: tuple[EnvSetting, ...] = ()
    names = [*(option.name for option in OWN_OPTIONS if option.in_file), "env"]
    for name, key, node in known_entries(root, names, "the configuration"):
        if name == "env":
            for entry in mapping_entries(node, "env"):
                single = YamlNode(node.where, "mapping", entries=(entry,))
                env += read_env(single, entry[0].where, reasons=False)
        else:
            values[name] = Sourced(BY_NAME[name].parse_node(node), key.where)
    return _File(path.parent, values, env)


def _project_root(chosen: Sourced | None, cwd: Path) -> tuple[YamlNode, Path]:
    """Returns the content and path of the project's configuration file; ``chosen`` is the value of ``--config``."""
    if chosen is not None:
        name = str(chosen.value)
        path = cwd / Path(name).expanduser()
        if not path.exists():
            raise PresetError(f"configuration file {name} does not exist ({chosen.origin})", "check the path")
        return (_toml(path, name) if path.suffix == ".toml" else read_yaml(path, name)), path
    path = cwd / CONFIG_FILE
    if exists(path) and (data := _found(path, CONFIG_FILE)) is not None:  # exists(), unlike pathlib's, never raises
        return parse_yaml(decode(data, CONFIG_FILE), CONFIG_FILE), path
    path = cwd / PYPROJECT
    if is_file(path) and (data := _found(path, PYPROJECT, b"[" + TOML_TABLE.encode())) is not None:
        return parse_toml_table(decode(data, PYPROJECT), PYPROJECT, TOML_TABLE), path
    return YamlNode(CONFIG_FILE, "nothing"), path


def _toml(path: Path, name: str) -> YamlNode:
    # Other files than pyproject.toml can have the keys at top level.
    text = decode(read_bytes(path, name), name)
    table = parse_toml_table(text, name, TOML_TABLE)
    whole = table.kind == "nothing" and path.name != PYPROJECT
    return parse_toml_table(text, name, "") if whole else table


# --- a file that was found --------------------------------------------------------------------------------------------


def _found(path: Path, shown: str, only_with: bytes = b"") -> bytes | None:
    """Returns the content of a configuration file that wasn't named explicitly.

    Returns None if it doesn't exist, isn't trusted, or doesn't contain ``only_with``. Raises PresetError if it is
    trusted but can't be read. ``shown`` is its path in messages.
    """
    try:
        link = path.lstat()
        data, info = read_with_owner(path, shown)
    except OSError:
        return None
    except PresetError:
        if reason := _why_not_trusted(link) or _why_not_trusted(_owner(path)):
            _ignored(path, shown, reason)
            return None
        raise
    if only_with not in data:
        return None
    if reason := (stat.S_ISLNK(link.st_mode) and _why_not_trusted(link)) or _why_not_trusted(info):
        _ignored(path, shown, reason)
        return None
    return data


def _owner(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _why_not_trusted(info: os.stat_result | None) -> str:
    """Returns which other user owns the file or can write to it; "" if none does."""
    if info is None:
        return ""
    if info.st_uid not in (0, os.getuid()):
        return f"it belongs to user {info.st_uid}"
    if stat.S_ISLNK(info.st_mode):
        return ""  # links have no mode
    if info.st_mode & stat.S_IWOTH:
        return "every user can write it"
    if info.st_mode & stat.S_IWGRP and not _is_private_group(info.st_gid, info.st_uid):
        return f"group {info.st_gid} may write it"
    return ""


def _is_private_group(gid: int, uid: int) -> bool:
    """Returns whether ``gid`` is the private group of user ``uid``. With umask 002, such groups can usually write."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return gid == uid
    own = user.pw_gid == gid and (gid == uid or group.gr_name == user.pw_name)
    return own and set(group.gr_mem) <= {user.pw_name}


@cache  # a sweep calls this for every job
def _ignored(path: Path, shown: str, reason: str) -> None:
    say(f"ignoring {shown}, because {reason}. If you trust it, pass --config {shown}.")


def _presets(given: _Values, files: Sequence[_File], cwd: Path, version: str | None) -> Composition:
    names = given.get("preset")
    if names is None or not isinstance(names.value, tuple):
        return Composition()
    return load_presets(
        names.value,
        cwd=next((file.directory for file in files if file.values.get("preset") is names), cwd),
        torch_version=version,
        asked_by="" if names.origin == "command line" else names.origin,
    )
