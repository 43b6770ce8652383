"""``{name}`` in a job's words: found, checked and filled in. ``{{`` and ``}}`` stand for braces."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from safelaunch.settings.yamlfile import did_you_mean
from safelaunch.system.errors import SpecError

PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_-]*)\}|[{}]")


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
