"""Composes presets: finds the files, follows ``extends``, and merges the values.

Later presets win, and a preset wins over those that it extends. A preset that ``extends`` reaches twice applies once,
at its first place, so that it never undoes a change of a preset built on it. ``safelaunch.settings.presetfile``
describes the format of one file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safelaunch.settings.presetfile import EnvSetting, Preset, read_preset, version_matches
from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.system.errors import PresetError

__all__ = [
    "Composition",
    "EnvSetting",
    "Preset",
    "Sourced",
    "find_builtin_dir",
    "list_presets",
    "load_presets",
]

MAX_DEPTH = 16

_SUFFIXES = (".yaml", ".yml")


class Sourced(NamedTuple):
    """A value and where it came from."""

    value: object
    origin: str


@dataclass(frozen=True, slots=True)
class Composition:
    """Several presets merged. ``names``: the requested ones; ``watchdog`` maps e.g. ``stall-timeout`` to its value.

    ``chain`` holds every preset that takes part, extended ones included, in the order of application. ``idle``: those
    of them that set nothing of their own for this version of torch.
    """

    names: tuple[str, ...] = ()
    env: tuple[EnvSetting, ...] = ()
    watchdog: Mapping[str, Sourced] = field(default_factory=dict)
    chain: tuple[Preset, ...] = ()
    idle: tuple[str, ...] = ()


def find_builtin_dir() -> Path:
    """The directory of the shipped presets: in the installed package, else in the source checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def builtin_names(directory: Path) -> tuple[str, ...]:
    """The names of the presets in a directory, sorted."""
    return tuple(sorted(path.stem for path in directory.glob("*.yaml")))


def list_presets(builtin_dir: Path | None = None) -> tuple[Preset, ...]:
    """Every shipped preset, sorted by name. Raises PresetError for a damaged one."""
    directory = builtin_dir or find_builtin_dir()
    paths = [directory / f"{name}.yaml" for name in builtin_names(directory)]
    return tuple(read_preset(path.stem, path, str(path)) for path in paths)


def load_presets(
    refs: Sequence[str],
    *,
    cwd: Path,
    torch_version: str | None,
    builtin_dir: Path | None = None,
    asked_by: str = "",
) -> Composition:
    """Reads presets, named or by path relative to ``cwd``, and composes them: later wins.

    Variables for other versions of torch are left out; ``torch_version`` None (unknown) counts as the newest.
    ``asked_by`` (e.g. ``safelaunch.yaml:3``) begins the message about an unknown name in ``refs``. Raises
    PresetError, naming file, line and the nearest known name.
    """
    chain = preset_chain(refs, cwd=cwd, builtin_dir=builtin_dir, asked_by=asked_by)
    env: dict[str, EnvSetting] = {}
    watchdog: dict[str, Sourced] = {}
    for preset in chain:
        env.update({s.name: s for s in preset.env if version_matches(s.torch, torch_version)})
        watchdog.update({key: Sourced(value, f"preset {preset.name}") for key, value in preset.watchdog.items()})
    fitting = {preset.name: [s for s in preset.env if version_matches(s.torch, torch_version)] for preset in chain}
    idle = tuple(p.name for p in chain if p.env and not fitting[p.name] and not p.watchdog)
    return Composition(tuple(refs), tuple(env.values()), watchdog, chain, idle)


def preset_chain(
    refs: Sequence[str], *, cwd: Path, builtin_dir: Path | None = None, asked_by: str = ""
) -> tuple[Preset, ...]:
    """The presets and all that they extend, in the order of application (depth first, extended ones before)."""
    walk = _Walk(cwd, builtin_dir or find_builtin_dir())
    order: dict[Path, Preset] = {}
    for ref in refs:
        _apply(order, walk.expand(ref, cwd, asked_by, ()))
    return tuple(order.values())


def _apply(order: dict[Path, Preset], expanded: tuple[Preset, ...]) -> None:
    """Appends a preset (the last of ``expanded``) and those it extends, unless they are in the chain already."""
    *inherited, asked = expanded
    for preset in inherited:
        order.setdefault(preset.path, preset)
    order.pop(asked.path, None)
    order[asked.path] = asked


class _Walk:
    """A depth-first walk along ``extends`` that reads each file once."""

    def __init__(self, cwd: Path, builtin_dir: Path) -> None:
        self.cwd = cwd
        self.builtin_dir = builtin_dir
        self.done: dict[Path, tuple[Preset, ...]] = {}

    def expand(self, ref: str, base: Path, asked_by: str, ancestors: tuple[Path, ...]) -> tuple[Preset, ...]:
        """The presets that one extends, then the preset itself. ``base``: the directory of relative paths."""
        prefix = f"{asked_by}: " if asked_by else ""
        path = self._locate(ref, base, prefix).resolve()
        if path in ancestors:
            circle = " -> ".join(p.stem for p in (*ancestors[ancestors.index(path) :], path))
            raise PresetError(f"{prefix}presets extend each other in a circle: {circle}", "remove one 'extends'")
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
            known = ", ".join(names) if names else f"none found in {self.builtin_dir}"
            raise PresetError(
                f"{prefix}unknown preset {ref!r}{did_you_mean(ref, names)}",
                f"shipped presets: {known}; for a file of your own, give its path, e.g. ./my.yaml",
            )
        return self.builtin_dir / f"{ref}.yaml"

    def _shown(self, path: Path) -> str:
        cwd = self.cwd.resolve()
        return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)
