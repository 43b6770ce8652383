"""Makes what has the same source as ``safelaunch --help``: the man page, and the shells' completions (with shtab).

``hatch_build.py`` calls it as the package is built; they are not in the repository. In an editable installation, run it
after a change of an option: ``python -m scripts.build.generate``.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import shtab

from safelaunch import __version__
from safelaunch.cli import COMMANDS, module_of
from safelaunch.cli.completion import SHELLS
from safelaunch.cli.exec import ABOUT as ABOUT_EXEC
from safelaunch.cli.help import ABOUT, EXAMPLES, EXIT_CODES, TORCHRUN, USAGE
from safelaunch.job.torchrun import KNOWN
from safelaunch.settings.options import ELSEWHERE, HELP_OPTIONS, OPTION_GROUPS, Option
from safelaunch.system.console import folded
from safelaunch.verdict.causes import CAUSES

ROOT = Path(__file__).parents[2]
MAN_PAGE = Path("man", "safelaunch.1")
COMPLETIONS = Path("safelaunch", "cli", "completions")
RUNS, PRESETS = "safelaunch completion --values runs 2>/dev/null", "safelaunch completion --values presets"

ZSH_PRESETS = f"""\
_safelaunch_presets() {{
  local -a names=($({PRESETS}))
  _alternative 'presets:preset:compadd -a names' 'files:file:_files'
}}

"""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a subcommand; for ``exec`` and ``help``, which split their words themselves, one of that kind."""
    if command == "exec":
        found = argparse.ArgumentParser("safelaunch exec", description=ABOUT_EXEC)
        _add(found, command)
        found.add_argument("command", metavar="-- COMMAND [ARGUMENTS...]", nargs=argparse.REMAINDER, help="the command")
        return found
    if command == "help":
        found = argparse.ArgumentParser("safelaunch help", description="Shows the help, or that on a subcommand.")
        found.add_argument("subcommand", nargs="?", choices=[*COMMANDS, "torchrun"], metavar="SUBCOMMAND", help="which")
        return found
    made: argparse.ArgumentParser = module_of(command).parser()
    return made


def _add(parser: argparse._ActionsContainer, command: str) -> None:
    for option in (option for group in OPTION_GROUPS.values() for option in group if command in option.commands):
        add_option(parser, option)


def add_option(parser: argparse._ActionsContainer, option: Option) -> None:
    """Adds one of safelaunch's own options."""
    text = option.help.replace("%", "%%")
    if option.value_is_optional:
        parser.add_argument(option.flag, nargs="?", metavar=option.metavar, help=text)
    elif option.takes_value:
        parser.add_argument(option.flag, metavar=option.metavar, help=text)
    else:
        parser.add_argument(option.flag, action="store_true", help=text)


# --- completion -------------------------------------------------------------------------------------------------------


def completions() -> Iterator[tuple[Path, str]]:
    """Each shell's script."""
    for shell, name in SHELLS.items():
        yield COMPLETIONS / name, _with_scripts(shtab.complete(_root(), shell), shell)


def _root() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser("safelaunch", description=ABOUT)
    _add(root, "run")
    root.add_argument("--help-torchrun", action="store_true", help=HELP_OPTIONS["--help-torchrun"])
    root.add_argument("--version", action="store_true", help=HELP_OPTIONS["--version"])
    for name, takes_value in KNOWN.items():
        if name not in ("-h", "--help") and "_" not in name:
            text = "torchrun's"
            root.add_argument(name, help=text) if takes_value else root.add_argument(
                name, action="store_true", help=text
            )
    commands = root.add_subparsers(dest="subcommand")
    for command, meaning in COMMANDS.items():
        parent = parser_of(command)
        made = commands.add_parser(command, parents=[parent], add_help=False, description=meaning, help=meaning)
        _complete(made)
    _complete(root)
    return root


def _complete(parser: argparse.ArgumentParser) -> None:
    """Says what completes the value of each option and positional: by what its metavar says that it is."""
    for action in parser._actions:
        kind = str(action.metavar or "")
        words = kind.split("|")
        if "NAME|FILE" in kind:
            action.complete = shtab.cmd(PRESETS)  # type: ignore[attr-defined]
        elif kind == "RUN":
            action.complete = shtab.cmd(RUNS)  # type: ignore[attr-defined]
        elif kind in ("FILE", "PATH", "SPEC.yaml") or action.dest == "command":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif kind == "CAUSE":
            action.choices = list(CAUSES)
        elif kind == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif len(words) > 1 and not action.choices:
            action.choices = [word for word in words if word.islower()]


def _with_scripts(text: str, shell: str) -> str:
    """Also completes a script as the first word, files after it, and files as presets.

    shtab knows only words or files. bash does that by itself: it completes files if the script offers nothing.
    """
    if shell == "zsh":
        text, one = re.subn(r"(_describe 'safelaunch commands' _commands)\n", r"\1\n  _files\n", text)
        text, other = re.subn(r"(case \$line\[1\] in\n(?:.*;;\n)+)", r"\1        *) _files ;;\n", text)
        assert (one, other) == (1, 1), "shtab writes another script"
        text, presets = re.subn(re.escape(f":($({PRESETS}))"), ":_safelaunch_presets", text)
        text, one = re.subn(r"(?m)^(_shtab_safelaunch_commands\(\))", f"{ZSH_PRESETS}\\1", text, count=1)
        assert presets and one == 1, "shtab writes another script"
    if shell == "fish":
        text, presets = re.subn(re.escape(f'-xka "({PRESETS})"'), f'-rFka "({PRESETS})"', text)
        assert presets, "shtab writes another script"
        text += "complete -c safelaunch -n '_shtab_safelaunch_using' -F\n"
    return text.rstrip() + "\n"


# --- the man page -----------------------------------------------------------------------------------------------------


def man_page() -> str:
    """``safelaunch(1)`` in the man macros."""
    parts = [
        f'.TH SAFELAUNCH 1 "" "safelaunch {__version__}" "User Commands"',
        ".nh\n.ad l",  # no hyphens within options, no gaps between words
        section("NAME"),
        "safelaunch \\- torchrun that watches the job",
        section("SYNOPSIS"),
        "\n.br\n".join(bold_first(line) for line in USAGE),
        section("DESCRIPTION"),
        roff(f"safelaunch is {ABOUT}"),
        ".PP",
        roff(TORCHRUN),
    ]
    for title, options in OPTION_GROUPS.items():
        parts += [section(f"OPTIONS: {title.upper()}"), items((o.usage, o.help) for o in options)]
    parts += [section("OPTIONS: HELP"), items(HELP_OPTIONS.items()), ".PP", roff(ELSEWHERE)]
    parts += [section("SUBCOMMANDS")]
    for command in COMMANDS:
        parts += _command(command)
    parts += [section("EXIT STATUS"), items(EXIT_CODES.items(), bold)]
    parts += [section("EXAMPLES"), items(EXAMPLES.items(), bold)]
    return "\n".join(parts) + "\n"


def _command(command: str) -> list[str]:
    parser = parser_of(command)
    places = [_place(action) for action in parser._get_positional_actions()]
    usage = f"safelaunch {command} {'[options] ' if len(parser._get_optional_actions()) > 1 else ''}{' '.join(places)}"
    actions = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    own = {option.flag for group in OPTION_GROUPS.values() for option in group} if command == "exec" else set()
    told = items((_name(action), str(action.help)) for action in actions if not own & set(action.option_strings))
    more = ["Takes all options above."] if own else []
    as_written = issubclass(parser.formatter_class, argparse.RawDescriptionHelpFormatter)
    lines = [roff(line) for line in folded(parser.epilog or "", 73).splitlines()]
    epilog = [".PP", *([".nf", *lines, ".fi"] if as_written else lines)] if lines else []
    return [f".SS {quoted(usage.strip())}", roff(" ".join(str(parser.description).split())), *more, told, *epilog]


def _name(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest)
    return f"{', '.join(action.option_strings)} {value}".strip()


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return f"[{name}]" if action.nargs in ("?", "*") else name


def section(title: str) -> str:
    return f".SH {quoted(title)}"


def bold(text: str) -> str:
    return f"\\fB{roff(text)}\\fR"


def bold_first(text: str) -> str:
    first, space, rest = text.partition(" ")
    return f"\\fB{roff(first)}\\fR{space}{roff(rest)}"


def items(rows: Iterable[tuple[str, str]], shown: Callable[[str], str] = bold_first) -> str:
    return "\n".join(f".TP\n{shown(name.strip())}\n{roff(text.replace('%%', '%'))}" for name, text in rows)


def quoted(text: str) -> str:
    return '"' + roff(text).replace('"', "\\(dq") + '"'


def roff(text: str) -> str:
    """Text that troff shows as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    text = text.replace("^", "\\(ha").replace("~", "\\(ti")
    return f"\\&{text}" if text.startswith(".") else text


# --- files ------------------------------------------------------------------------------------------------------------


def generated() -> Mapping[Path, str]:
    """The content of each file, by its path in the source tree."""
    return {MAN_PAGE: man_page(), **dict(completions())}


def write(root: Path = ROOT) -> None:
    """Writes each file below ``root``, whole or not at all."""
    for name, text in generated().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(text, "utf-8")
        beside.replace(path)


if __name__ == "__main__":
    write()
