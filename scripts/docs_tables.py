"""Hook of MkDocs: puts what the code says by itself into the pages, so that no page repeats it.

=========================== ============================================================================
``<!-- table: rules -->``   the decision rules, in their order
``<!-- table: doubts -->``  what lowers a verdict's confidence
``<!-- table: exit codes -->`` safelaunch's exit codes
``<!-- options: GROUP -->`` the options of one group of ``safelaunch --help``
``<!-- fields: RECORD -->`` the fields of a record of ``safelaunch.model.evidence``
``<!-- presets -->``        the shipped presets, with a section for each
``<!-- commands -->``       the subcommands, with a section for each
``<!-- causes -->``         the causes of verdicts, each with all advice that it can give
=========================== ============================================================================
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from generate import parser_of
from schemas import meanings

from safelaunch.cli import COMMANDS
from safelaunch.cli.help import EXIT_CODES
from safelaunch.settings.options import OPTION_GROUPS
from safelaunch.verdict.causes import CAUSES, Cause
from safelaunch.verdict.doubts import About, Doubt
from safelaunch.verdict.rules import OWN, RULES

CONFIGS = Path(__file__).parents[1] / "configs"
_ABOUT: dict[About, str] = {
    "state": "what the rank does",
    "calls": "where calls diverge",
    "others": "who else may be at fault",
    "rival": "another explanation",
    "proof": "the proof",
    "share": "how many are named",
    "evidence": "the evidence",
}
# What stands behind a mark in italics is for who reads the page without the site.
_MARK = re.compile(r"<!-- (table|options|fields|presets|commands|causes)(?:: (.+?))? -->(?: \*.*\*$)?", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)


def filled(markdown: str) -> str:
    """Raises ``KeyError`` for a table, group or record that does not exist."""
    return _MARK.sub(lambda mark: _MAKERS[mark[1]](mark[2] or ""), markdown)


def _causes(_: str) -> str:
    return "\n\n".join(_cause(name, cause) for name, cause in CAUSES.items())


def _cause(name: str, cause: type[Cause]) -> str:
    advice = "\n".join(f"- {one}" for one in cause.all_advice())
    parts = (f"### `{name}`", inspect.getdoc(cause) or "", "**How safelaunch knows**", cause.evidence)
    return "\n\n".join((*parts, "**What to do**", advice))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown; cells may hold ``|`` and line breaks."""
    columns = tuple(head)
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )


def _rules() -> str:
    rows = (
        (
            rule.asks if kind is rule.kinds[0] else "",
            f"`{kind.name}`",
            kind.says.replace("``", "`"),
            ", ".join(kind.needs),
            "*its own*" if kind.concludes == OWN else ", ".join(f"`{cause}`" for cause in kind.concludes),
        )
        for rule in RULES
        for kind in rule.kinds
    )
    return table(("rule", "kind", "finds", "needs", "causes"), rows)


def _doubts() -> str:
    return table(("about", "doubt", "levels"), ((_ABOUT[one.about], one.why, str(one.levels)) for one in Doubt))


def _exit_codes() -> str:
    return table(("code", "meaning"), EXIT_CODES.items())


def _options(group: str) -> str:
    return table(("option", "meaning [default]"), ((f"`{one.usage}`", one.help) for one in OPTION_GROUPS[group]))


def _fields(record: str) -> str:
    return table(("key", "meaning"), ((f"`{name}`", text) for name, text in meanings(record).items()))


# --- presets ----------------------------------------------------------------------------------------------------------


def _presets(_: str) -> str:
    files = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted(CONFIGS.glob("*.yaml"))}
    rows = ((f"[`{name}`](#{name})", preset["description"].splitlines()[0]) for name, preset in files.items())
    return "\n\n".join([table(("preset", "what it does"), rows), *(_preset(*one) for one in files.items())])


def _preset(name: str, preset: dict[str, Any]) -> str:
    parts = [f"### `{name}` {{ #{name} }}", preset["description"].strip()]
    if "extends" in preset:
        parts.append(f"It extends [`{preset['extends']}`](#{preset['extends']}).")
    rows = [(f"`{key}: {value}`", "", "") for key, value in preset.get("watchdog", {}).items()]
    rows += [
        (f"`{variable}={setting['value']}`", setting.get("torch", "any"), setting["why"])
        for variable, setting in preset.get("env", {}).items()
    ]
    return "\n\n".join([*parts, table(("setting", "torch", "why"), rows)])


# --- subcommands ------------------------------------------------------------------------------------------------------


def _commands(_: str) -> str:
    return "\n\n".join(_command(name) for name in COMMANDS if name != "help")


def _command(name: str) -> str:
    parser = parser_of(name)
    own = {option.flag for group in OPTION_GROUPS.values() for option in group} if name == "exec" else set()
    rows = [
        (f"`{_usage(action)}`", (action.help or "").replace("%%", "%"))
        for action in parser._actions
        if action.help is not argparse.SUPPRESS and not {"-h", *own}.intersection(action.option_strings)
    ]
    parts = [f"## `safelaunch {name}` {{ #{name} }}", " ".join((parser.description or "").split())]
    parts += [table(("argument", "meaning [default]"), rows)] if rows else []
    return "\n\n".join([*parts, *_epilog(parser.epilog or "")])


def _usage(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else ",".join(action.choices or ())
    return " ".join(
        [*([", ".join(action.option_strings)] if action.option_strings else []), *([value] if value else [])]
    )


def _epilog(text: str) -> Iterator[str]:
    if "\n  " in text:
        yield f"```text\n{text.strip()}\n```"
    elif text:
        yield " ".join(text.split())


_TABLES: dict[str, Callable[[], str]] = {"rules": _rules, "doubts": _doubts, "exit codes": _exit_codes}
_MAKERS: dict[str, Callable[[str], str]] = {
    "table": lambda name: _TABLES[name](),
    "options": _options,
    "fields": _fields,
    "presets": _presets,
    "commands": _commands,
    "causes": _causes,
}
