"""Keeps one job's own secrets out of its bundle, wherever they stand: a rank may print the password that it got."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any
from urllib.parse import quote

from msgspec import structs

from safelaunch.capture.redact import NOT_SECRET, REDACTED, URL_PASSWORD, is_secret_name, redact_shapes, redact_text
from safelaunch.model import RankException


def secret_values(environment: Mapping[str, str], argv: Iterable[str], ordinary: Iterable[str] = ()) -> tuple[str, ...]:
    """What the environment and the command line hold under secret names, and the passwords of their URLs.

    Only values that cannot be mistaken for a word: at least 8 characters, with a digit or at least 16, no path. Those
    that are part of one of ``ordinary`` (directories, names) are left out: every mention of these would be replaced.
    """
    words = list(argv)
    found = [value for name, value in environment.items() if is_secret_name(name)]
    for word, before in zip(words, ["", *words], strict=False):
        name, equals, value = word.partition("=")
        if equals and is_secret_name(name):
            found.append(value)
        elif before.startswith("-") and "=" not in before and is_secret_name(before) and not word.startswith("-"):
            found.append(word)
    texts = [*environment.values(), *words]
    found += [match["password"] for text in texts if "://" in text for match in URL_PASSWORD.finditer(text)]
    lines = {line.strip() for value in found for line in value.splitlines()}
    plain = list(ordinary)
    return tuple(sorted(line for line in lines if _is_telling(line) and not any(line in text for text in plain)))


def _is_telling(value: str) -> bool:
    if len(value) < 8 or value.startswith(("/", "~/", "./", "../")) or NOT_SECRET.fullmatch(value):
        return False
    return len(value) >= 16 or (any(c.isdigit() for c in value) and not (value.isdigit() and len(value) < 12))


@dataclass(frozen=True)
class Redactor:
    """``redact_text``, and besides the very secrets of one job (``secret_values``), wherever they stand."""

    values: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def _literal(self) -> re.Pattern[str] | None:
        """The values, also as they stand in JSON, in URLs and in HTML, not as part of a longer word."""
        forms = {
            form
            for value in self.values
            for form in (value, json.dumps(value)[1:-1], quote(value, safe=""), escape(value))
        }
        if not forms:
            return None
        either = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
        return re.compile(rf"(?<![A-Za-z0-9])(?:{either})(?![A-Za-z0-9])")

    def text(self, text: str) -> str:
        """Free text without secrets."""
        return redact_text(self._literal.sub(REDACTED, text) if self._literal else text)

    def markup(self, text: str) -> str:
        """A report made of evidence that has passed ``text``: what may have come in otherwise, by a thread's name."""
        return redact_shapes(self._literal.sub(REDACTED, text) if self._literal else text)

    def tree(self, value: Any) -> Any:
        """Lists and dicts of text and numbers, as JSON has them, with every text (keys are kept) without secrets."""
        known: dict[str, str] = {}  # file and function names of stacks come again and again

        def clean(item: Any) -> Any:
            if isinstance(item, str):
                if item not in known:
                    known[item] = self.text(item)
                return known[item]
            if isinstance(item, dict):
                return {key: clean(entry) for key, entry in item.items()}
            return [clean(entry) for entry in item] if isinstance(item, (list, tuple)) else item

        return clean(value)

    def exception(self, exception: RankException | None) -> RankException | None:
        """What a rank raised: its message may quote anything, its traceback shows lines of the program."""
        if exception is None:
            return None
        return structs.replace(exception, message=self.text(exception.message), text=self.text(exception.text))

    def binary(self, data: bytes) -> bytes:
        """A dump with the job's own secrets overwritten; its length, and so its format, stays."""
        for value in self.values:
            raw = value.encode("utf-8", "surrogateescape")
            data = data.replace(raw, b"*" * len(raw))
        return data
