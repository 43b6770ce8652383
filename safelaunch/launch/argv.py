"""Splitting a command line into safelaunch's own options, torchrun's options, and the script with its arguments.

Own options may stand anywhere before the script, mixed with torchrun's; they are recognised only when spelled exactly,
so none of torchrun's abbreviations becomes ambiguous. To find the script one must know which of torchrun's options take
a value: ``takes_value`` is the installed version's table (``torchrun.options``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from safelaunch.errors import UsageError

_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")


@dataclass(frozen=True, slots=True)
class CommandLine:
    """``own``: our options in order, with their values. ``torchrun``: its options, without ours.

    ``script``: the script (or module, or program) and its arguments, untouched; empty when there is none. ``program``:
    under ``exec``, where what is started need not be torchrun.
    """

    own: tuple[tuple[str, str | None], ...]
    torchrun: tuple[str, ...]
    script: tuple[str, ...]
    program: str | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What torchrun is given."""
        return self.torchrun + self.script

    def has_flag(self, *names: str) -> bool:
        return any(word in names for word in self.torchrun)

    def value_of(self, name: str, *, shortest: str) -> str | None:
        """The value of torchrun's option ``name`` (``--nproc-per-node``), in either spelling; the last one counts.

        ``shortest``: the shortest abbreviation of it that argparse takes.
        """
        found = None
        for position, word in enumerate(self.torchrun):
            if _means(word, name, shortest):
                _, equals, value = word.partition("=")
                following = self.torchrun[position + 1 : position + 2]
                found = value if equals else "".join(following)
        return found

    def with_value(self, name: str, old: str, new: str, *, shortest: str) -> CommandLine:
        """The same with ``old`` replaced by ``new`` wherever it is the value of option ``name``; as ``value_of``."""
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


def split(words: Sequence[str], own: Mapping[str, bool], takes_value: Mapping[str, bool]) -> CommandLine:
    """Splits ``words`` as argparse would split them for torchrun, taking out what is ours.

    ``own`` and ``takes_value`` map option strings to whether they take a value. Raises UsageError for an own option
    that lacks its value or has one it does not take; what torchrun would reject is left to it.
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
            elif equals and not own[name]:
                raise UsageError(f"{name} takes no value, but was given {value!r}.", "See safelaunch --help.")
            mine.append((name, value if equals else None))
        elif word == "--":
            # argparse: everything that follows is positional, so the next word is the script.
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


def _means(word: str, name: str, shortest: str) -> bool:
    """Whether ``word`` is option ``name``, spelled with hyphens or underscores, in full or abbreviated."""
    given = word.partition("=")[0]
    full = (name, name[:2] + name[2:].replace("-", "_"))
    return len(given) >= len(shortest) and any(spelling.startswith(given) for spelling in full)


def _is_option(word: str, takes_value: Mapping[str, bool]) -> bool:
    """argparse's own test (``_parse_optional``) for a parser none of whose options looks like a negative number."""
    if not word.startswith("-") or word == "-":
        return False
    if word[1:2] == "-" and " " not in word:
        return True
    if word in takes_value or _matches(word.partition("=")[0], takes_value):
        return True
    if word[:2] in takes_value:
        return True  # a short one with its value in the same word, which may hold anything
    return not (_NEGATIVE_NUMBER.match(word) or " " in word)


def _matches(name: str, takes_value: Mapping[str, bool]) -> list[str]:
    """Option strings that ``name`` is, or abbreviates (argparse: only long ones are abbreviated)."""
    if name in takes_value:
        return [name]
    if name.startswith("--"):
        return [option for option in takes_value if option.startswith(name)]
    return []


def _wants_next(word: str, takes_value: Mapping[str, bool]) -> bool:
    """Whether the option ``word`` takes the following word as its value."""
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        # Abbreviations that match several options: where they agree argparse may accept them, else it rejects them.
        return not equals and any(takes_value[match] for match in _matches(name, takes_value))
    # Short ones may be joined: -m, -r3, -mr 3. The first that takes a value takes the rest of the word, if any.
    for position, letter in enumerate(word[1:], start=2):
        if takes_value.get(f"-{letter}", False):
            return position == len(word)
    return False
