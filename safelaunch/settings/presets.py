"""Presets: named sets of watchdog settings and of environment variables, each variable with its reason.

A later preset overrides earlier ones, and a preset overrides those that it extends. A preset that is reached twice is
applied only once, at its first place, so that it doesn't undo changes by a preset that extends it.

A preset is a YAML file, shipped (``hang-debug``) or the user's own (``./my.yaml``):

    description: |                  # required; 'safelaunch presets' lists the first line
      One line.
      More lines.
    extends: hang-debug             # or a list; names, or paths relative to this file
    env:
      NCCL_DEBUG:
        value: INFO                 # text or number; {run_dir} is replaced, {{ and }} stand for braces
        why: One line that says why.
        torch: ">=2.9,<3"           # optional: only with these versions of torch
        yields-to: NCCL_DEBUG_FILE  # optional: left out if the user exported one of these (a name or a list)
    watchdog:
      stall-timeout: 120            # also startup-timeout, max-stall, on-stall, pg-timeout
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safelaunch.settings.options import BY_NAME, RUN_DIR, WATCHDOG_KEYS, EnvSetting
from safelaunch.settings.yamlfile import (
    YamlNode,
    did_you_mean,
    known_entries,
    not_boolean,
    read_yaml,
    text_of,
    texts_of,
    variables_of,
)
from safelaunch.system.errors import PresetError

# --- one file ---------------------------------------------------------------------------------------------------------

# Variables of safelaunch that a preset can set.
OF_THE_BEACON = ("SAFELAUNCH_ALLOCATIONS",)

_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9]+(?:\.[0-9]+)*)")
_RELEASE = re.compile(r"[0-9]+(?:\.[0-9]+)*")


@dataclass(frozen=True, slots=True)
class Preset:
    """Content of a preset file, without the presets that it extends.

    ``shown`` is its path in messages. ``extends`` lists names with the ``file:line`` of each. ``watchdog`` maps
    settings such as ``stall-timeout`` to their values (in seconds).
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
        return self.description.splitlines()[0]


def read_preset(name: str, path: Path, shown: str) -> Preset:
    """Reads a preset file. Raises PresetError that names the file (as ``shown``), line, and nearest valid name."""
    root = read_yaml(path, shown)
    if root.kind == "nothing":
        raise PresetError(f"{root.where}: the file is empty; a preset needs at least a 'description'")
    keys = ("description", "extends", "env", "watchdog")
    nodes = {key: value for key, _, value in known_entries(root, keys, "a preset")}
    if "description" not in nodes:
        raise PresetError(f"{root.where}: no 'description'", "add one that says in one line what the preset is for")
    extends = texts_of(nodes["extends"], "extends") if "extends" in nodes else ()
    watchdog = known_entries(nodes["watchdog"], WATCHDOG_KEYS, "watchdog") if "watchdog" in nodes else ()
    return Preset(
        name=name,
        path=path,
        shown=shown,
        description=text_of(nodes["description"], "description").strip(),
        extends=tuple((node.text, node.where) for node in extends),
        env=read_env(nodes["env"], f"preset {name}", reasons=True) if "env" in nodes else (),
        watchdog={key: BY_NAME[key].parse_node(value) for key, _, value in watchdog},
    )


def read_env(node: YamlNode, origin: str, *, reasons: bool) -> tuple[EnvSetting, ...]:
    """Returns the ``env`` section of a preset (``reasons`` True) or of a configuration file (False)."""
    settings = []
    fix = f"safelaunch's own settings go under 'watchdog' ({', '.join(WATCHDOG_KEYS)})"
    for key, value in variables_of(node, fix, OF_THE_BEACON):
        if value.kind == "mapping":
            settings.append(_read_setting(key, value, origin, reasons))
        elif reasons:
            raise PresetError(
                f"{value.where}: {key.text} must be a mapping with 'value' and 'why', not {value.describe()}"
            )
        else:
            settings.append(EnvSetting(key.text, _env_value(key.text, value), "", origin))
    return tuple(settings)


def _read_setting(key: YamlNode, node: YamlNode, origin: str, reasons: bool) -> EnvSetting:
    name = key.text
    nodes = {k: value for k, _, value in known_entries(node, ("value", "why", "torch", "yields-to"), name)}
    for needed in ("value", "why") if reasons else ("value",):
        if needed not in nodes:
            raise PresetError(f"{key.where}: {name} has no {needed!r}")
    why = text_of(nodes["why"], f"{name}: why").strip() if "why" in nodes else ""
    if "\n" in why:
        raise PresetError(f"{nodes['why'].where}: {name}: why must be one line")
    torch = ""
    if "torch" in nodes:
        torch = text_of(nodes["torch"], f"{name}: torch").strip()
        _clauses(torch, nodes["torch"].where)
    yields_to: tuple[str, ...] = ()
    if "yields-to" in nodes:
        yields_to = tuple(n.text for n in texts_of(nodes["yields-to"], f"{name}: yields-to"))
    return EnvSetting(name, _env_value(name, nodes["value"]), why, origin, torch, yields_to)


def _env_value(name: str, node: YamlNode) -> str:
    if not_boolean(node, name).kind not in ("text", "number"):
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
    """Returns whether a version satisfies a specifier such as ``>=2.9,<3``; None counts as the newest version."""
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


# --- several ----------------------------------------------------------------------------------------------------------

MAX_DEPTH = 16

_SUFFIXES = (".yaml", ".yml")


class Sourced(NamedTuple):
    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Composition:
    """Result of merging presets. The presets in ``idle`` set nothing for this version of torch."""

    env: tuple[EnvSetting, ...] = ()
    watchdog: Mapping[str, Sourced] = field(default_factory=dict)
    idle: tuple[str, ...] = ()


def find_builtin_dir() -> Path:
    """Returns the directory of the shipped presets, in the package or in the source checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def builtin_names(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in directory.glob("*.yaml")))


def list_presets() -> tuple[Preset, ...]:
    """Returns all shipped presets, sorted. Raises PresetError if one is damaged."""
    directory = find_builtin_dir()
    paths = [directory / f"{name}.yaml" for name in builtin_names(directory)]
    return tuple(read_preset(path.stem, path, str(path)) for path in paths)


def load_presets(refs: Sequence[str], *, cwd: Path, torch_version: str | None, asked_by: str = "") -> Composition:
    """Merges presets, given by name or by path relative to ``cwd``. Later presets override earlier ones.

    Leaves out variables for other versions of torch; None counts as the newest version. Raises PresetError that names
    the file, the line, and the nearest valid name.

    Args:
        asked_by: Place that lists ``refs`` (``safelaunch.yaml:3``), for messages.
    """
    env: dict[str, EnvSetting] = {}
    watchdog: dict[str, Sourced] = {}
    idle = []
    for preset in preset_chain(refs, cwd=cwd, asked_by=asked_by):
        fitting = {s.name: s for s in preset.env if version_matches(s.torch, torch_version)}
        env.update(fitting)
        watchdog.update({key: Sourced(value, f"preset {preset.name}") for key, value in preset.watchdog.items()})
        if preset.env and not fitting and not preset.watchdog:
            idle.append(preset.name)
    return Composition(tuple(env.values()), watchdog, tuple(idle))


def preset_chain(refs: Sequence[str], *, cwd: Path, asked_by: str = "") -> tuple[Preset, ...]:
    """Returns the presets and all presets that they extend, each after those that it extends."""
    walk = _Walk(cwd)
    order: dict[Path, Preset] = {}
    for ref in refs:
        _apply(order, walk.expand(ref, cwd, asked_by, ()))
    return tuple(order.values())


def _apply(order: dict[Path, Preset], expanded: tuple[Preset, ...]) -> None:
    *inherited, asked = expanded
    for preset in inherited:
        order.setdefault(preset.path, preset)
    order.pop(asked.path, None)
    order[asked.path] = asked


class _Walk:
    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.builtin_dir = find_builtin_dir()
        self.done: dict[Path, tuple[Preset, ...]] = {}

    def expand(self, ref: str, base: Path, asked_by: str, ancestors: tuple[Path, ...]) -> tuple[Preset, ...]:
        """Returns the presets that ``ref`` extends, then itself. Relative paths start at ``base``."""
        prefix = f"{asked_by}: " if asked_by else ""
        path = self._locate(ref, base, prefix).resolve()
        if path in ancestors:
            circle = " -> ".join(p.stem for p in (*ancestors[ancestors.index(path) :], path))
            raise PresetError(f"{prefix}presets extend each other in a cycle: {circle}", "remove one 'extends'")
        if len(ancestors) >= MAX_DEPTH:
            raise PresetError(f"{prefix}presets extend each other more than {MAX_DEPTH} deep")
        if path not in self.done:
            preset = read_preset(ref, path, self._shown(path))
            order: dict[Path, Preset] = {}
            for parent, where in preset.extends:
                _apply(order, self.expand(parent, path.parent, where, (*ancestors, path)))
            self.done[path] = (*order.values(), preset)
        return self.done[path]

    def _locate(self, ref: str, base: Path, prefix: str) -> Path:
        names = builtin_names(self.builtin_dir)
        if "/" in ref or ref.endswith(_SUFFIXES):
            path = base / Path(ref).expanduser()
            if not path.exists():
                fix = f"the shipped preset is called {path.stem}" if path.stem in names else "check the path"
                raise PresetError(f"{prefix}preset file {ref} does not exist", fix)
            return path
        if ref not in names:
            listed = ", ".join(names) if names else f"none found in {self.builtin_dir}"
            raise PresetError(
                f"{prefix}unknown preset {ref!r}{did_you_mean(ref, names)}",
                f"shipped presets: {listed}; for your own file, give its path, e.g. ./my.yaml",
            )
        return self.builtin_dir / f"{ref}.yaml"

    def _shown(self, path: Path) -> str:
        cwd = self.cwd.resolve()
        return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
