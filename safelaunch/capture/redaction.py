"""Removes secrets from evidence, in records and their parts, before it is written, judged or shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import msgspec

from safelaunch.model import Artifact, Collective, FlightRecord, Frame, ProcessState, Verdict
from safelaunch.model.entries import Entries, Kinds
from safelaunch.system.redaction.redactor import Redactor, remembered, same_or

T = TypeVar("T")

# Names of the program's parts, and our own text: plain words and numbers belong there.
_NAMES = (Frame, Collective, FlightRecord)
_OURS = (Verdict, Artifact)


def without_secrets(value: T, redactor: Redactor) -> T:
    """``value`` (records, dataclasses, lists, dicts, texts, dumps), with secrets removed from every text and dump.

    The job's own text also loses its short secrets; names of its files and functions, and our own text, only lose
    unmistakable ones. A value without secrets is returned as the same object.
    """
    result: T = _Cleaning(redactor).anything(value)
    return result


class _Cleaning:
    """One pass, with a cache: file and function names of stacks repeat."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._said: dict[str, str] = {}
        self._ours: dict[str, str] = {}

    def anything(self, item: Any) -> Any:
        if isinstance(item, str):
            return remembered(item, self._redactor.said, self._said)
        if isinstance(item, bytes):
            return self._redactor.data(item)
        if isinstance(item, Entries):
            return self._entries(item)
        if isinstance(item, ProcessState):
            words = tuple(self._redactor.argv(item.cmdline))
            item = item if words == item.cmdline else msgspec.structs.replace(item, cmdline=words)
        if isinstance(item, Collective):  # the job chooses a group's name
            item = _with_fields(item, ("description",), self.anything, msgspec.structs.replace)
        ours = isinstance(item, (*_NAMES, *_OURS))
        return _rebuilt(item, self._own_words if ours else self.anything)

    def _own_words(self, item: Any) -> Any:
        """Whether the text is a name, or our own text."""
        if isinstance(item, str):
            return remembered(item, self._redactor.text, self._ours)
        if isinstance(item, Entries):
            return self._entries(item)
        return _rebuilt(item, self._own_words)

    def _entries(self, entries: Entries) -> Entries:
        kinds = entries.used()
        cleaned = {number: self.anything(kind) for number, kind in kinds.items()}
        if all(cleaned[number] is kind for number, kind in kinds.items()):
            return entries
        return entries.with_kinds(self.anything, Kinds())


def _rebuilt(item: Any, clean: Callable[[Any], Any]) -> Any:
    """``item`` with redacted parts; ``item`` itself if it has none, or if none changes."""
    if isinstance(item, msgspec.Struct):
        return _with_fields(item, item.__struct_fields__, clean, msgspec.structs.replace)
    if is_dataclass(item) and not isinstance(item, type):
        return _with_fields(item, [one.name for one in fields(item) if one.init], clean, replace)
    return same_or(item, clean)


def _with_fields(item: Any, names: Iterable[str], clean: Callable[[Any], Any], rebuild: Callable[..., Any]) -> Any:
    parts = {name: getattr(item, name) for name in names}
    cleaned = {name: clean(part) for name, part in parts.items()}
    different = {name: part for name, part in cleaned.items() if part is not parts[name]}
    return rebuild(item, **different) if different else item
