"""``safelaunch presets`` lists the shipped presets; ``safelaunch presets show NAME|FILE`` shows one, with reasons."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from safelaunch.cli.parsing import Parser
from safelaunch.settings.options import EnvSetting
from safelaunch.settings.presets import Preset, builtin_names, find_builtin_dir, list_presets, preset_chain
from safelaunch.system.console import display, show, show_json, wrapped
from safelaunch.system.errors import UsageError

_USAGE = "safelaunch presets [list] [--json] | safelaunch presets show NAME|FILE [--json]"


def main(argv: list[str]) -> int:
    """Prints the table of presets, or one preset; returns 0. Raises UsageError or PresetError."""
    arguments = _parse(argv)
    if arguments.ref is None:
        presets = list_presets()
        if arguments.json:
            show_json([SummaryDocument(name=preset.name, description=preset.summary) for preset in presets])
        else:
            show(render_table(presets).rstrip("\n"), fold=True)
        return 0
    chain = preset_chain([arguments.ref], cwd=Path.cwd())
    if arguments.json:
        show_json(_document(chain))
    else:
        show(render_preset(chain, min(120, display(1, os.environ).width)).rstrip("\n"))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    arguments = parser().parse_intermixed_args(argv)
    words = [] if arguments.words == ["list"] else arguments.words
    if words and words[0] != "show":
        is_builtin = words[0] in builtin_names(find_builtin_dir())
        fix = f"to see it: safelaunch presets show {words[0]}" if is_builtin else f"usage: {_USAGE}"
        raise UsageError(f"presets: unexpected {words[0]!r}", fix)
    if words and len(words) != 2:
        raise UsageError("presets show takes one name or file.", f"usage: {_USAGE}")
    arguments.ref = words[1] if words else None
    return arguments


def parser() -> Parser:
    command_line = Parser(
        "presets", usage=_USAGE, description="Lists the presets, or shows what one of them sets and why."
    )
    command_line.add_argument(
        "words", nargs="*", metavar="show NAME|FILE", help="a shipped preset, or a file of your own"
    )
    command_line.add_argument("--json", action="store_true", help="print JSON")
    return command_line


# --- text -------------------------------------------------------------------------------------------------------------


def render_table(presets: tuple[Preset, ...]) -> str:
    column = max((len(preset.name) for preset in presets), default=0) + 2
    lines = [f"{preset.name:<{column}}{preset.summary}" for preset in presets]
    lines += ["", "Show one: safelaunch presets show NAME", "Use one: safelaunch --preset NAME ... train.py"]
    return "\n".join(lines)


def render_preset(chain: tuple[Preset, ...], width: int) -> str:
    """Returns the description of a preset, the last one of ``chain``, and of the presets that it extends."""
    preset = chain[-1]
    rest = preset.description.removeprefix(preset.summary).strip()
    lines = [preset.name, *wrapped(preset.summary, width, "  ", "  "), *wrapped(rest, width, "  ", "  "), ""]
    if preset.extends:
        lines += [f"extends {', '.join(name for name, _ in preset.extends)}", ""]
    lines += [f"file {preset.path}", ""]
    settings = _settings(chain)
    if settings:
        lines.append("environment (a variable that you export keeps your value):")
    for setting in settings.values():
        lines += _setting_lines(setting, preset, width)
    watchdog = _watchdog(chain)
    if watchdog:
        lines += ["", "watchdog:", *(f"  {key} {_shown(value)}" for key, value in watchdog.items())]
    if not settings and not watchdog:
        lines.append("It sets nothing.")
    return "\n".join(lines)


def _setting_lines(setting: EnvSetting, preset: Preset, width: int) -> list[str]:
    notes = [f"torch {setting.torch}"] if setting.torch else []
    if setting.yields_to:
        notes.append(f"not if you export {' or '.join(setting.yields_to)}")
    if setting.origin != f"preset {preset.name}":
        notes.append(f"from {setting.origin.removeprefix('preset ')}")
    lines = [f"  {setting.name}={setting.value}", *wrapped(setting.why, width, " " * 6, " " * 6)]
    return [*lines, *wrapped(f"({'; '.join(notes)})", width, " " * 6, " " * 6)] if notes else lines


def _shown(value: object) -> str:
    return "auto" if value is None else f"{value:g} s" if isinstance(value, float) else str(value)


def _settings(chain: tuple[Preset, ...]) -> Mapping[str, EnvSetting]:
    # later ones win
    return {setting.name: setting for preset in chain for setting in preset.env}


def _watchdog(chain: tuple[Preset, ...]) -> Mapping[str, object]:
    return {key: value for preset in chain for key, value in preset.watchdog.items()}


# --- JSON -------------------------------------------------------------------------------------------------------------


class SummaryDocument(TypedDict):
    name: str
    description: str


SettingDocument = TypedDict(
    "SettingDocument",
    {"name": str, "value": str, "why": str, "torch": str, "yields-to": list[str], "from": str},
)


class PresetDocument(TypedDict):
    name: str
    file: str
    description: str
    extends: list[str]
    env: list[SettingDocument]
    watchdog: dict[str, str | float | bool | int]  # safelaunch's options


def _document(chain: tuple[Preset, ...]) -> PresetDocument:
    preset = chain[-1]
    return {
        "name": preset.name,
        "file": str(preset.path),
        "description": preset.description,
        "extends": [name for name, _ in preset.extends],
        "env": [_setting_document(setting) for setting in _settings(chain).values()],
        "watchdog": {key: "auto" if value is None else _plain(value) for key, value in _watchdog(chain).items()},
    }


def _plain(value: object) -> str | float | bool | int:
    return value if isinstance(value, (int, float)) else str(value)


def _setting_document(setting: EnvSetting) -> SettingDocument:
    return {
        "name": setting.name,
        "value": setting.value,
        "why": setting.why,
        "torch": setting.torch,
        "yields-to": list(setting.yields_to),
        "from": setting.origin,
    }
