"""Writes the parts of the documentation that the code defines into the pages, between two comments.

python -m scripts.build.docs_tables [--write]  # writes each page whose tables are out of date
python -m scripts.build.docs_tables --check    # writes nothing; exit code 1 if a page is out of date

=========================== ============================================================================
``<!-- table: rules -->``   the decision rules, in their order
``<!-- table: doubts -->``  what lowers a verdict's confidence
``<!-- table: exit codes -->`` safelaunch's exit codes
``<!-- table: variables -->`` the environment variable of each option
``<!-- options: GROUP -->`` the options of one group of ``safelaunch --help``
``<!-- fields: RECORD -->`` the fields of a record of ``safelaunch.model.evidence``
``<!-- presets -->``        the shipped presets, with a section for each
``<!-- commands -->``       the subcommands, with a section for each
``<!-- causes -->``         the causes of verdicts, by one template, each with all advice that it can give
=========================== ============================================================================

Each part ends with the first word of its beginning: ``<!-- /table -->``.

Commands on the pages that fetch safelaunch (``git clone URL``, ``git+URL``) get the address of the repository that
``[project.urls]`` of pyproject.toml names, so that it is set in one place.
"""

from __future__ import annotations

import argparse
import html
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

import yaml

from safelaunch.cli import COMMANDS
from safelaunch.cli.help import EXIT_CODES
from safelaunch.settings.options import OPTION_GROUPS, OWN_OPTIONS
from safelaunch.verdict.causes import CAUSES, Cause
from safelaunch.verdict.doubts import Doubt, DoubtSubject
from safelaunch.verdict.rules import OWN, QUESTIONS
from safelaunch.verdict.suggestions import Advice
from scripts.build.generate import parser_of
from scripts.build.schemas import meanings

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
_ALWAYS = Advice("").when
_ABOUT: dict[DoubtSubject, str] = {
    "state": "what the rank does",
    "calls": "where calls diverge",
    "others": "other possible culprits",
    "rival": "another explanation",
    "proof": "the proof",
    "share": "how many are named",
    "evidence": "the evidence",
}


def documents(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="write each page that is out of date (the default)")
    mode.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    pages = {path: path.read_text("utf-8") for path in documents(ROOT)}
    stale = {path: after for path, text in pages.items() if (after := filled(text)) != text}
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date; run python -m scripts.build.docs_tables", file=sys.stderr)
        else:
            path.write_text(text, "utf-8")
    return 1 if check and stale else 0


def filled(markdown: str) -> str:
    """Returns the page with each generated part and each address of the repository replaced.

    Raises ``KeyError`` for a table, group or record that does not exist, and ``ValueError`` for a part without an end.
    """
    if len(_MARK.findall(markdown)) != len(_PART.findall(markdown)):
        raise ValueError("a generated part has no end")
    return _ADDRESS.sub(lambda command: command["fetch"] + address(), _PART.sub(_refilled, markdown))


def address() -> str:
    """Returns the address of the repository, as pyproject.toml names it."""
    project = toml.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["urls"]["Source"])


def _refilled(part: re.Match[str]) -> str:
    text = _MAKERS[part["kind"]](part["name"] or "")
    return f"{part['begin']}\n\n{text.strip()}\n\n{part['end']}"


def _causes(_: str) -> str:
    return "\n\n".join(_cause(name, cause) for name, cause in CAUSES.items())


def _cause(name: str, cause: type[Cause]) -> str:
    """One section, by the template that all causes share."""
    meaning, fence, example = (inspect.getdoc(cause) or "").partition("```text\n")
    parts = (
        (f"## `{name}`", meaning),
        ("**How safelaunch knows**", cause.evidence),
        ("**Example**", f"{fence}{example}"),
        ("**What to do**", _what_to_do(cause)),
        ("**Not to be confused with**", "\n".join(f"- [`{other}`](#{other}): {how}." for other, how in cause.unlike)),
    )
    return "\n\n".join(f"{title}\n\n{text.strip()}" for title, text in parts)


def _what_to_do(cause: type[Cause]) -> str:
    """The advice that fits every case, followed by the advice for some cases."""
    texts = cause.all_advice()
    always = [text for text in texts if any(text.startswith(one.shown) and one.when is _ALWAYS for one in cause.advice)]
    special = [text for text in texts if text not in always]
    intro = f"{'In special cases' if always else 'Depending on the case'} (a verdict prints what fits):"
    parts = [f"- {text}" for text in always]
    parts += ["", intro, "", *(f"- {text}" for text in special)] if special else []
    return "\n".join(parts)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a Markdown table; cells can contain ``|`` and line breaks."""
    columns = tuple(head)
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (columns, ("---",) * len(columns), *rows))


def _cell(text: str) -> str:
    # GitHub and MkDocs must render it identically: in backticks, MkDocs prints the backslash of an escaped ``|``.
    code = re.sub(r"`([^`]*\|[^`]*)`", lambda span: f"<code>{html.escape(span[1], quote=False)}</code>", text)
    return " ".join(code.split()).replace("|", "&#124;")


def _rules() -> str:
    rows = (
        (
            question.text if rule is question.rules[0] else "",
            f"`{rule.name}`",
            rule.summary.replace("``", "`"),
            ", ".join(rule.needs),
            "*its own*" if rule.concludes == OWN else ", ".join(f"`{cause}`" for cause in rule.concludes),
        )
        for question in QUESTIONS
        for rule in question.rules
    )
    return table(("question", "rule", "finds", "needs", "causes"), rows)


def _doubts() -> str:
    return table(("about", "doubt", "levels"), ((_ABOUT[one.about], one.why, str(one.levels)) for one in Doubt))


def _exit_codes() -> str:
    return table(("code", "meaning"), EXIT_CODES.items())


def _variables() -> str:
    rows = ((f"`{option.variable}`", f"`{option.usage}`") for option in OWN_OPTIONS)
    return table(("variable", "option"), rows)


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
    parts = [f"### `{name}`", preset["description"].strip()]
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
    parts = [f"## `safelaunch {name}`", " ".join((parser.description or "").split())]
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


_TABLES: dict[str, Callable[[], str]] = {
    "rules": _rules,
    "doubts": _doubts,
    "exit codes": _exit_codes,
    "variables": _variables,
}
_MAKERS: dict[str, Callable[[str], str]] = {
    "table": lambda name: _TABLES[name](),
    "options": _options,
    "fields": _fields,
    "presets": _presets,
    "commands": _commands,
    "causes": _causes,
}
_ADDRESS = re.compile(r"(?P<fetch>\bgit clone |\bgit\+)https?://[^\s`@'\"]+")
_KIND = rf"(?P<kind>{'|'.join(_MAKERS)})"
_MARK = re.compile(rf"^<!-- {_KIND}(?:: .+)? -->", re.MULTILINE)
# A part contains no comments, so that one without an end doesn't extend to the end of the next.
_PART = re.compile(
    rf"^(?P<begin><!-- {_KIND}(?:: (?P<name>.+?))? -->)\n(?:(?!<!--).)*^(?P<end><!-- /(?P=kind) -->)$",
    re.MULTILINE | re.DOTALL,
)


if __name__ == "__main__":
    sys.exit(main())
