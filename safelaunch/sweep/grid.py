"""Parameters and their values: ranges, combinations, and ``{name}`` in a job's words, where ``{{`` is a brace."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.settings.yamlfile import Node, did_you_mean
from safelaunch.system.errors import SpecError

MAX_JOBS = 10_000
BUILTIN = ("name", "job_dir", "sweep_dir")

Params = tuple[tuple[str, str], ...]

PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_-]*)\}|[{}]")
_RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)", re.ASCII)


def scalar(node: Node, what: str) -> str:
    """The text of a word, as written. Raises SpecError."""
    if node.kind in ("text", "number", "boolean"):
        if "\0" in node.text:
            raise SpecError(f"{node.where}: {what}: text cannot contain a NUL character")
        return node.text
    hint = 'a word that begins with { needs quotes: "{lr}"' if node.kind == "mapping" else ""
    raise SpecError(f"{node.where}: {what}: a value must be text or a number, not {node.describe()}", hint)


@dataclass(frozen=True, slots=True)
class Text:
    """Text that may hold placeholders, and where it was written (``sweep.yaml:7``)."""

    text: str
    where: str

    def fields(self) -> frozenset[str]:
        """The names of its placeholders. Raises SpecError for a single brace."""
        found = set()
        for match in _TOKEN.finditer(self.text):
            if match.group() in "{}":
                raise SpecError(
                    f"{self.where}: a single {match.group()!r} in {self.text!r}",
                    "a placeholder is {name}; write {{ and }} for braces",
                )
            if match[1]:
                found.add(match[1])
        return frozenset(found)

    def check(self, known: Collection[str]) -> frozenset[str]:
        """Its placeholders, which must all be among ``known``. Raises SpecError."""
        found = self.fields()
        for name in sorted(found - set(known)):
            raise SpecError(
                f"{self.where}: unknown placeholder {{{name}}} in {self.text!r}{did_you_mean(name, known)}",
                f"known here: {', '.join(sorted(known))}; write {{{{ and }}}} for braces",
            )
        return found

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with every placeholder replaced by its value, once: a value's own braces stay as they are."""

        def replaced(match: re.Match[str]) -> str:
            return values[match[1]] if match[1] else match.group()[0]

        return _TOKEN.sub(replaced, self.text)


@dataclass(frozen=True, slots=True)
class Axis:
    """One parameter with its values, as written."""

    name: str
    values: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """Every combination of ``axes``."""

    axes: tuple[Axis, ...] = ()

    def combinations(self) -> tuple[Params, ...]:
        """All combinations in the order of the axes, the first changing slowest. Raises SpecError for too many."""
        size = 1
        for axis in self.axes:
            size *= len(axis.values)
        if size > MAX_JOBS:
            raise SpecError(f"{self.axes[0].where}: {size} combinations, more than {MAX_JOBS}", "split the sweep")
        names = [axis.name for axis in self.axes]
        return tuple(
            tuple(zip(names, values, strict=True)) for values in itertools.product(*(a.values for a in self.axes))
        )


def axis(name: str, words: Sequence[str], where: str) -> Axis:
    """A parameter with its values, where ``0..4`` means 0, 1, 2, 3, 4. Raises SpecError."""
    if not PARAMETER.fullmatch(name):
        raise SpecError(f"{where}: {name!r} cannot be a parameter's name", "letters, digits, _ and -, a letter first")
    if name in BUILTIN:
        raise SpecError(
            f"{where}: {{{name}}} is a built-in placeholder: {_ABOUT_BUILTIN}", "give the parameter another name"
        )
    values: list[str] = []
    for word in words:
        values += _range(word, where)
    if not values:
        raise SpecError(f"{where}: {name!r} has no values", f"write e.g. {name}=1,2 or a list")
    twice = next((value for value in values if values.count(value) > 1), None) if len(values) <= MAX_JOBS else None
    if twice is not None:
        raise SpecError(f"{where}: {name!r} has the value {twice!r} twice")
    return Axis(name, tuple(values), where)


def parse_grid(word: str) -> Axis:
    """Parses a value of ``--grid``: ``lr=1e-3,3e-4`` or ``seed=0..4``. Raises SpecError."""
    name, equals, values = word.partition("=")
    where = f"--grid {word}"
    if not equals:
        raise SpecError(f"{where}: expected NAME=VALUE,VALUE,...", "e.g. --grid lr=1e-3,3e-4 --grid seed=0..4")
    return axis(name, [value for value in values.split(",") if value] if values else [], where)


def _range(word: str, where: str) -> list[str]:
    match = _RANGE.fullmatch(word)
    if not match:
        return [word]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise SpecError(f"{where}: the range {word} is empty", f"write {last}..{first}, or list the values")
    if last - first >= MAX_JOBS:
        raise SpecError(f"{where}: the range {word} has more than {MAX_JOBS} values", "split the sweep")
    return [str(number) for number in range(first, last + 1)]


_ABOUT_BUILTIN = "the job's name, its directory or the sweep's"
