"""Splits a command line into safelaunch's own options, torchrun's options, and the script with its arguments.

Own options may come anywhere before the script, mixed with torchrun's. They count only if spelled exactly, so none of
torchrun's abbreviations becomes ambiguous. To find the script, the split must know which of torchrun's options take a
value: ``takes_value`` is the installed version's table (``torchrun.options``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from safelaunch.system.errors import UsageError

_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A split command line. ``own``: our options in order, with their values; ``torchrun``: its options.

    ``script``: the script (or module, or program) and its arguments, unchanged; empty if there is none. ``program``:
    the program that ``exec`` starts, which need not be torchrun; else None.
    """

    own: tuple[tuple[str, str | None], ...]
    torchrun: tuple[str, ...]
    script: tuple[str, ...]
    program: str | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments for torchrun."""
        return self.torchrun + self.script

    def has_flag(self, *names: str) -> bool:
        return any(word in names for word in self.torchrun)

    def value_of(self, name: str, *, shortest: str) -> str | None:
        """The value of torchrun's option ``name`` (``--nproc-per-node``), in either spelling; the last one counts.

        ``shortest``: its shortest abbreviation that argparse accepts.
        """
        found = None
        for position, word in enumerate(self.torchrun):
            if _means(word, name, shortest):
                _, equals, value = word.partition("=")
                following = self.torchrun[position + 1 : position + 2]
                found = value if equals else "".join(following)
        return found

    def with_value(self, name: str, old: str, new: str, *, shortest: str) -> CommandLine:
        """A copy with ``new`` in place of ``old`` wherever that is the value of option ``name``; see ``value_of``."""
        words = list(self.torchrun)
        for position, word in enumerate(words):
            given, equals, value = word.partition("=")
            if not _means(word, name, shortest):
                continue
            if equals and value == old:
                words[position] = f"{given}={new}"
            elif not equals and words[position + 1 : position + 2] == [old]:
                words[position + 1] = new
        return replace(self, torchrun=tuple(words))


def split(words: Sequence[str], own: Mapping[str, bool | None], takes_value: Mapping[str, bool]) -> CommandLine:
    """Splits ``words`` as argparse would for torchrun, and takes out our own options.

    ``own`` and ``takes_value`` map option strings to whether they take a value; None: after an equals sign only. Raises
    UsageError for an own option that lacks its value or has one it does not take. Other errors are left to torchrun.
    """
    mine: list[tuple[str, str | None]] = []
    theirs: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        name, equals, value = word.partition("=")
        if name in own:
            if own[name] and not equals:
                index += 1
                if index >= len(words):
                    raise UsageError(f"{name} needs a value.", "See safelaunch --help.")
                value, equals = words[index], "="
            elif equals and own[name] is False:
                raise UsageError(f"{name} takes no value, but got {value!r}.", "See safelaunch --help.")
            mine.append((name, value if equals else None))
        elif word == "--":
            # In argparse, everything after it is positional, so the next word is the script.
            return CommandLine(tuple(mine), (*theirs, "--"), tuple(words[index + 1 :]))
        elif not _is_option(word, takes_value):
            return CommandLine(tuple(mine), tuple(theirs), tuple(words[index:]))
        else:
            theirs.append(word)
            if _wants_next(word, takes_value) and index + 1 < len(words):
                index += 1
                theirs.append(words[index])
        index += 1
    return CommandLine(tuple(mine), tuple(theirs), ())


def of_torchrun(command: CommandLine, environ: Mapping[str, str], name: str, shortest: str, default: str) -> str:
    """The value of torchrun's option ``name``: as given, else of its variable (``PET_NNODES``)."""
    given = command.value_of(name, shortest=shortest)
    return (given if given is not None else environ.get(f"PET_{name[2:].upper().replace('-', '_')}", default)).strip()


def is_one_node(command: CommandLine, environ: Mapping[str, str]) -> bool:
    return of_torchrun(command, environ, "--nnodes", "--nn", "1") in ("1", "1:1")


def restarts(command: CommandLine, environ: Mapping[str, str]) -> bool:
    """Whether torchrun starts the ranks again when one has failed."""
    return most_restarts(command, environ) > 0


def most_restarts(command: CommandLine, environ: Mapping[str, str]) -> int:
    """Returns how often torchrun starts the ranks again; 0 for what it won't understand."""
    given = of_torchrun(command, environ, "--max-restarts", "--max", "0")
    return int(given) if given.isdecimal() else 0


def options_given(words: Sequence[str], takes_value: Mapping[str, bool]) -> list[tuple[str, list[str]]]:
    """Each option among torchrun's ``words``, with the option strings that it may mean; none: torchrun rejects it."""
    found = []
    at = 0
    while at < len(words):
        if words[at] != "--":
            found.append((words[at], _meanings(words[at], takes_value)))
            at += _wants_next(words[at], takes_value)
        at += 1
    return found


def _meanings(word: str, takes_value: Mapping[str, bool]) -> list[str]:
    if word.startswith("--") or word.partition("=")[0] in takes_value:
        return _matches(word.partition("=")[0], takes_value)
    meant: list[str] = []
    for letter in word[1:]:
        if f"-{letter}" not in takes_value:
            return meant
        meant.append(f"-{letter}")
        if takes_value[f"-{letter}"]:
            return meant
    return meant


def _means(word: str, name: str, shortest: str) -> bool:
    """Whether ``word`` is option ``name``, spelled with hyphens or underscores, in full or abbreviated."""
    given = word.partition("=")[0]
    full = (name, name[:2] + name[2:].replace("-", "_"))
    return len(given) >= len(shortest) and any(spelling.startswith(given) for spelling in full)


def _is_option(word: str, takes_value: Mapping[str, bool]) -> bool:
    """argparse's test (``_parse_optional``) for a parser without options that look like negative numbers."""
    if not word.startswith("-") or word == "-":
        return False
    if word[1:2] == "-" and " " not in word:
        return True
    if word in takes_value or _matches(word.partition("=")[0], takes_value):
        return True
    if word[:2] in takes_value:
        return True  # a short option with its value in the same word, which may contain anything
    return not (_NEGATIVE_NUMBER.match(word) or " " in word)


def _matches(name: str, takes_value: Mapping[str, bool]) -> list[str]:
    """Option strings that ``name`` equals or abbreviates (argparse abbreviates only long ones)."""
    if name in takes_value:
        return [name]
    if name.startswith("--"):
        return [option for option in takes_value if option.startswith(name)]
    return []


def _wants_next(word: str, takes_value: Mapping[str, bool]) -> bool:
    """Whether the option ``word`` takes the following word as its value."""
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        # An abbreviation of several options: argparse may accept it if they agree, and rejects it otherwise.
        return not equals and any(takes_value[match] for match in _matches(name, takes_value))
    # Short options may be joined: -m, -r3, -mr 3. The first one that takes a value takes the rest of the word, if any.
    for position, letter in enumerate(word[1:], start=2):
        if takes_value.get(f"-{letter}", False):
            return position == len(word)
    return False
