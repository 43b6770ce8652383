"""Removes secrets from records of evidence before they are written, judged or shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import msgspec

from safelaunch.model import Artifact, Collective, FlightRecord, Frame, ProcessState, Verdict
from safelaunch.model.entries import Entries, Kinds
from safelaunch.system.redaction.redactor import Redactor, same_or

T = TypeVar("T")

# Names of the program's parts, and safelaunch's own text: plain words and numbers belong there.
_NAMES_AND_OURS = (Frame, Collective, FlightRecord, Verdict, Artifact)


def without_secrets(value: T, redactor: Redactor) -> T:
    """Removes secrets from every string and dump in ``value`` (records, dataclasses, lists, dicts, strings, dumps).

    Text that the job wrote also loses its short secrets. Names of its files and functions, and safelaunch's own text,
    lose only unmistakable secrets. Returns the same object if nothing changes.
    """
    result: T = _cleaned(value, redactor, redactor.job_text)
    return result


def _cleaned(item: Any, redactor: Redactor, clean_text: Callable[[str], str]) -> Any:
    if isinstance(item, str):
        return clean_text(item)
    if isinstance(item, bytes):
        return redactor.data(item)
    if isinstance(item, ProcessState):
        argv = tuple(redactor.argv(item.cmdline))
        item = item if argv == item.cmdline else msgspec.structs.replace(item, cmdline=argv)
    if isinstance(item, Collective):  # the job chooses the names of a group and of an operation
        item = _with_fields(item, ("description", "op"), redactor.job_text, msgspec.structs.replace)
    inside = redactor.text if isinstance(item, _NAMES_AND_OURS) else clean_text

    def part(value: Any) -> Any:
        return _cleaned(value, redactor, inside)

    if isinstance(item, Entries):
        return item if all(part(kind) is kind for kind in item.used().values()) else item.with_kinds(part, Kinds())
    if isinstance(item, msgspec.Struct):
        return _with_fields(item, item.__struct_fields__, part, msgspec.structs.replace)
    if is_dataclass(item) and not isinstance(item, type):
        return _with_fields(item, [field.name for field in fields(item) if field.init], part, replace)
    return same_or(item, part)


def _with_fields(item: Any, names: Iterable[str], clean: Callable[[Any], Any], rebuild: Callable[..., Any]) -> Any:
    parts = {name: getattr(item, name) for name in names}
    cleaned = {name: clean(part) for name, part in parts.items()}
    different = {name: part for name, part in cleaned.items() if part is not parts[name]}
    return rebuild(item, **different) if different else item
