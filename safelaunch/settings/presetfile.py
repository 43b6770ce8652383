"""Presets: named sets of environment variables, each with its reason, and watchdog settings.

A preset is a YAML file, shipped (``hang-debug``) or the user's own (``./my.yaml``):

    description: |                  # required; the first line is what 'safelaunch presets' lists
      One line.
      More lines.
    extends: hang-debug             # or a list; names, or paths relative to this file
    env:
      NCCL_DEBUG:
        value: INFO                 # text or number; {run_dir} is replaced, {{ and }} stand for braces
        why: One line that says why.
        torch: ">=2.9,<3"           # optional: only with these versions of torch
        yields-to: NCCL_DEBUG_FILE  # optional: left out when the user exported one of these (a name or a list)
    watchdog:
      stall-timeout: 120            # also startup-timeout, max-stall, on-stall, pg-timeout

This module reads one file; ``safelaunch.settings.presets`` composes several.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safelaunch.settings.options import BY_NAME, WATCHDOG_KEYS
from safelaunch.settings.yamlfile import (
    Node,
    did_you_mean,
    known_entries,
    mapping_entries,
    read_yaml,
    text_of,
    texts_of,
)
from safelaunch.system.errors import PresetError

RUN_DIR = "run_dir"

# What a preset may tell safelaunch in the ranks.
OF_THE_BEACON = ("SAFELAUNCH_ALLOCATIONS",)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9]+(?:\.[0-9]+)*)")
_RELEASE = re.compile(r"[0-9]+(?:\.[0-9]+)*")


@dataclass(frozen=True, slots=True)
class EnvSetting:
    """One environment variable to set. ``value`` is a template: call ``expand`` with the run directory.

    ``origin`` is ``preset hang-debug`` or ``safelaunch.yaml:7``. ``torch`` is a version specifier, empty for any.
    ``yields_to`` names variables with the same effect: if the user exported one of them, this one is left out.
    """

    name: str
    value: str
    why: str
    origin: str
    torch: str = ""
    yields_to: tuple[str, ...] = ()

    def expand(self, run_dir: str) -> str:
        """The value with ``{run_dir}`` replaced, and with doubled braces as single ones."""
        return self.value.format_map({RUN_DIR: run_dir})


@dataclass(frozen=True, slots=True)
class Preset:
    """One preset file as written, without the presets it extends.

    ``name`` is the user's name for it, ``shown`` its path in messages. ``extends`` pairs each name with its
    ``file:line``. ``watchdog`` maps e.g. ``stall-timeout`` to its parsed value (seconds).
    """

    name: str
    path: Path
    shown: str
    description: str
    extends: tuple[tuple[str, str], ...] = ()
    env: tuple[EnvSetting, ...] = ()
    watchdog: Mapping[str, object] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return self.description.splitlines()[0]


def read_preset(name: str, path: Path, shown: str) -> Preset:
    """Reads and checks one preset file. Raises PresetError with file (as ``shown``), line and nearest known name."""
    root = read_yaml(path, shown)
    if root.kind == "nothing":
        raise PresetError(f"{root.where}: the file is empty; a preset needs at least a 'description'")
    known = ("description", "extends", "env", "watchdog")
    found = {key: value for key, _, value in known_entries(root, known, "a preset")}
    if "description" not in found:
        raise PresetError(f"{root.where}: no 'description'", "add one that says in one line what the preset is for")
    extends = texts_of(found["extends"], "extends") if "extends" in found else ()
    return Preset(
        name=name,
        path=path,
        shown=shown,
        description=text_of(found["description"], "description").strip(),
        extends=tuple((node.text, node.where) for node in extends),
        env=read_env(found["env"], f"preset {name}", reasons=True) if "env" in found else (),
        watchdog=_read_watchdog(found["watchdog"]) if "watchdog" in found else {},
    )


def _read_watchdog(node: Node) -> dict[str, object]:
    return {key: BY_NAME[key].parse_node(value) for key, _, value in known_entries(node, WATCHDOG_KEYS, "watchdog")}


def read_env(node: Node, origin: str, *, reasons: bool) -> tuple[EnvSetting, ...]:
    """The ``env`` section of a preset, or of a configuration file (``reasons`` False: plain ``NAME: value``)."""
    settings = []
    for key, value in mapping_entries(node, "env"):
        if not _NAME.fullmatch(key.text):
            raise PresetError(f"{key.where}: {key.text!r} is not the name of an environment variable")
        if key.text.startswith("SAFELAUNCH_") and key.text not in OF_THE_BEACON:
            raise PresetError(
                f"{key.where}: {key.text} cannot be set here",
                f"safelaunch's own settings go under 'watchdog' ({', '.join(WATCHDOG_KEYS)})",
            )
        if value.kind == "mapping":
            settings.append(_read_setting(key, value, origin, reasons))
        elif reasons:
            raise PresetError(
                f"{value.where}: {key.text} must be a mapping with 'value' and 'why', not {value.describe()}"
            )
        else:
            settings.append(EnvSetting(key.text, _env_value(key.text, value), "", origin))
    return tuple(settings)


def _read_setting(key: Node, node: Node, origin: str, reasons: bool) -> EnvSetting:
    name = key.text
    found = {k: value for k, _, value in known_entries(node, ("value", "why", "torch", "yields-to"), name)}
    for needed in ("value", "why") if reasons else ("value",):
        if needed not in found:
            raise PresetError(f"{key.where}: {name} has no {needed!r}")
    why = text_of(found["why"], f"{name}: why").strip() if "why" in found else ""
    if "\n" in why:
        raise PresetError(f"{found['why'].where}: {name}: why must be one line")
    torch = ""
    if "torch" in found:
        torch = text_of(found["torch"], f"{name}: torch").strip()
        _clauses(torch, found["torch"].where)
    yields_to: tuple[str, ...] = ()
    if "yields-to" in found:
        yields_to = tuple(n.text for n in texts_of(found["yields-to"], f"{name}: yields-to"))
    return EnvSetting(name, _env_value(name, found["value"]), why, origin, torch, yields_to)


def _env_value(name: str, node: Node) -> str:
    if node.kind == "boolean":
        raise PresetError(
            f"{node.where}: {name}: {node.text} is a boolean, but a variable's value must be text",
            f'write "{node.text}" in quotes, or 1 or 0',
        )
    if node.kind not in ("text", "number"):
        raise PresetError(f"{node.where}: {name}: a value must be text or a number, not {node.describe()}", 'or ""')
    if "\0" in node.text:
        raise PresetError(f"{node.where}: {name}: a value cannot contain a NUL character")
    try:
        fields = list(string.Formatter().parse(node.text))
    except ValueError as error:
        raise PresetError(f"{node.where}: {name}: {error}", "write {{ and }} for braces") from error
    for _, placeholder, spec, conversion in fields:
        if placeholder is not None and (placeholder != RUN_DIR or spec or conversion):
            raise PresetError(
                f"{node.where}: {name}: unknown placeholder {{{placeholder}}}{did_you_mean(placeholder, [RUN_DIR])}",
                "{run_dir} is the only placeholder; write {{ and }} for braces",
            )
    return node.text


# --- versions -----------------------------------------------------------------------------------------------


def version_matches(specifier: str, version: str | None) -> bool:
    """Whether ``>=2.9,<3`` admits a version. Only the release counts (``2.9.0a0+cu13`` is 2.9); None is the newest."""
    release = _RELEASE.match(version or "")
    number = _padded(release.group()) if release else (1 << 30,) * 4
    return all(_compare(op, number, _padded(bound)) for op, bound in _clauses(specifier, "torch"))


def _clauses(specifier: str, where: str) -> list[tuple[str, str]]:
    clauses = []
    for part in specifier.split(",") if specifier else ():
        match = _CLAUSE.fullmatch(part.strip())
        if not match:
            raise PresetError(
                f"{where}: {part.strip()!r} is not a version condition", 'write e.g. ">=2.9" or ">=2.6,<2.9"'
            )
        clauses.append((match[1], match[2]))
    return clauses


def _padded(version: str) -> tuple[int, ...]:
    parts = tuple(int(part) for part in version.split(".")[:4])
    return parts + (0,) * (4 - len(parts))


def _compare(op: str, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return {
        ">=": left >= right,
        "<=": left <= right,
        ">": left > right,
        "<": left < right,
        "==": left == right,
        "!=": left != right,
    }[op]
