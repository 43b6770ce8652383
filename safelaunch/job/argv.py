"""Splits a command line into safelaunch's options, torchrun's options, and the script with its arguments.

safelaunch's options can be mixed with torchrun's. They must be spelled out in full, so that they don't make torchrun's
abbreviations ambiguous. To find the script, the split needs to know the installed torchrun's options
(``torchrun.options``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from safelaunch.system.errors import UsageError

_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True, slots=True)
class CommandLine:
    own: tuple[tuple[str, str | None], ...]  # with their values, in order
    torchrun: tuple[str, ...]
    script: tuple[str, ...]  # script, module or program with its arguments
    program: str | None = None  # program that ``exec`` starts

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.torchrun + self.script

    def has_flag(self, *names: str) -> bool:
        return any(word in names for word in self.torchrun)

    def value_of(self, name: str, *, shortest: str) -> str | None:
        """Returns the last value given for torchrun's option ``name`` (``--nproc-per-node``), in any spelling, or None.

        Args:
            shortest: Shortest abbreviation of ``name`` that argparse accepts.
        """
        result = None
        for position, word in enumerate(self.torchrun):
            if _means(word, name, shortest):
                _, equals, value = word.partition("=")
                following = self.torchrun[position + 1 : position + 2]
                result = value if equals else "".join(following)
        return result

    def with_value(self, name: str, old: str, new: str, *, shortest: str) -> CommandLine:
        """Returns a copy in which option ``name`` has the value ``new`` wherever it had ``old`` (see ``value_of``)."""
        words = list(self.torchrun)
        for position, word in enumerate(words):
            spelling, equals, value = word.partition("=")
            if not _means(word, name, shortest):
                continue
            if equals and value == old:
                words[position] = f"{spelling}={new}"
            elif not equals and words[position + 1 : position + 2] == [old]:
                words[position + 1] = new
        return replace(self, torchrun=tuple(words))


def split(words: Sequence[str], own: Mapping[str, bool | None], takes_value: Mapping[str, bool]) -> CommandLine:
    """Splits ``words`` as torchrun's argparse would, and takes out safelaunch's options.

    Raises UsageError for a safelaunch option with a missing or unexpected value. Errors in torchrun's options are left
    to torchrun.

    Args:
        own: Option → True if it takes a value, None if it takes one only after an equals sign.
        takes_value: Option of torchrun → True if it takes a value.
    """
    own_options: list[tuple[str, str | None]] = []
    torchrun: list[str] = []
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
            own_options.append((name, value if equals else None))
        elif word == "--":
            # argparse takes the next word as positional: it is the script.
            return CommandLine(tuple(own_options), (*torchrun, "--"), tuple(words[index + 1 :]))
        elif not _is_option(word, takes_value):
            return CommandLine(tuple(own_options), tuple(torchrun), tuple(words[index:]))
        else:
            torchrun.append(word)
            if _wants_next(word, takes_value) and index + 1 < len(words):
                index += 1
                torchrun.append(words[index])
        index += 1
    return CommandLine(tuple(own_options), tuple(torchrun), ())


def of_torchrun(command: CommandLine, environ: Mapping[str, str], name: str, shortest: str, default: str) -> str:
    """Returns the value of torchrun's option ``name``, else of its variable (``PET_NNODES``), else ``default``."""
    value = command.value_of(name, shortest=shortest)
    return (value if value is not None else environ.get(f"PET_{name[2:].upper().replace('-', '_')}", default)).strip()


def is_given(options: Collection[str], environ: Mapping[str, str], name: str, short: str = "") -> bool:
    variable = "PET_" + name.upper().replace("-", "_")
    switches = {f"--{name}", f"--{name.replace('-', '_')}", short} & set(options)
    return bool(switches) or environ.get(variable, "0").strip() not in ("", "0")


def is_one_node(command: CommandLine, environ: Mapping[str, str]) -> bool:
    return of_torchrun(command, environ, "--nnodes", "--nn", "1") in ("1", "1:1")


def restarts(command: CommandLine, environ: Mapping[str, str]) -> bool:
    return most_restarts(command, environ) > 0


def most_restarts(command: CommandLine, environ: Mapping[str, str]) -> int:
    """Returns the limit on torchrun's restarts of the ranks; 0 if the value isn't a number, which torchrun rejects."""
    value = of_torchrun(command, environ, "--max-restarts", "--max", "0")
    return int(value) if value.isdecimal() else 0


def options_given(words: Sequence[str], takes_value: Mapping[str, bool]) -> list[tuple[str, list[str]]]:
    """Returns each option in torchrun's ``words``, with the full names that it can stand for."""
    options = []
    at = 0
    while at < len(words):
        if words[at] != "--":
            options.append((words[at], _meanings(words[at], takes_value)))
            at += _wants_next(words[at], takes_value)
        at += 1
    return options


def _meanings(word: str, takes_value: Mapping[str, bool]) -> list[str]:
    if word.startswith("--") or word.partition("=")[0] in takes_value:
        return _matches(word.partition("=")[0], takes_value)
    names: list[str] = []
    for letter in word[1:]:
        if f"-{letter}" not in takes_value:
            return names
        names.append(f"-{letter}")
        if takes_value[f"-{letter}"]:
            return names
    return names


def _means(word: str, name: str, shortest: str) -> bool:
    option = word.partition("=")[0]
    full = (name, name[:2] + name[2:].replace("-", "_"))
    return len(option) >= len(shortest) and any(spelling.startswith(option) for spelling in full)


def _is_option(word: str, takes_value: Mapping[str, bool]) -> bool:
    """Returns whether argparse would parse ``word`` as an option (see its ``_parse_optional``).

    Assumes that no option looks like a negative number.
    """
    if not word.startswith("-") or word == "-":
        return False
    if word[1:2] == "-" and " " not in word:
        return True
    if word in takes_value or _matches(word.partition("=")[0], takes_value):
        return True
    if word[:2] in takes_value:
        return True  # a short option with its value
    return not (_NEGATIVE_NUMBER.match(word) or " " in word)


def _matches(name: str, takes_value: Mapping[str, bool]) -> list[str]:
    if name in takes_value:
        return [name]
    if name.startswith("--"):
        return [option for option in takes_value if option.startswith(name)]
    return []


def _wants_next(word: str, takes_value: Mapping[str, bool]) -> bool:
    """Returns whether the option ``word`` takes the next word as its value."""
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        # argparse might accept an ambiguous abbreviation if all its meanings agree.
        return not equals and any(takes_value[match] for match in _matches(name, takes_value))
    # Short options can be joined (-mr 3); the first one with a value takes the rest of the word (-r3).
    for position, letter in enumerate(word[1:], start=2):
        if takes_value.get(f"-{letter}", False):
            return position == len(word)
    return False
