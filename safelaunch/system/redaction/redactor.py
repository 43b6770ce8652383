"""Keeps a job's own secrets out of its bundle, because a rank might print a password that it received.

Unmistakable values are replaced in every text, however encoded. Short values, numbers and plain words are replaced only
in the job's own text (output, messages, command lines, names), and only as whole words. A number that counts something
is kept: ``PIN=1234`` leaves step 1234, line 1234 and port 1234 alone.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any
from urllib.parse import quote

from safelaunch.system.redaction.job_secrets import COMMON_WORDS, is_mixed, is_telling
from safelaunch.system.redaction.redact import by_rule, encoded_in, merged, readings, redact_argv, replaced
from safelaunch.system.redaction.shapes import Span, shapes_in

_EDGE = 6  # characters that identify a value if the text cuts it
_CALLED_SO = re.compile(
    r"(?:pass(?:word|wd|phrase|code)?|pwd|pw|secret|token|credentials?|auth|pin)s?[\"']?(?:\s?[=:]\s?|\s(?:is|was)\s|\s)[\"']?\Z",
    re.IGNORECASE,
)
_BEGINNING = 12  # characters that identify a value if the rest is missing
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
_LINE_HEAD = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (?:out|err)\| ")
_CUT_OFF = ".… '\")]}\n"  # after a truncated text
# Text before a number that counts something; _UNIT matches text after one.
_COUNTED = re.compile(
    r"(?:\b(?:line|lineno|l|step|global_step|steps|rank|ranks|pid|tid|thread|process|port|epoch|iter|iteration|it|batch|seq"
    r"|number|no|size|len|length|shape|dim|count|total|gpu|cuda|device|worker|node|version|seed|timeout|after|of|to|from"
    r"|in|at|took|samples?|tokens?|world_size|local_rank|lr|loss|bytes|ms|seconds?)\b[\"']?\s?[=:#]?\s?"
    r"|[#./\-×*+<>$~]|\d[,.x:]|\d, |\[|0x|%)\Z",
    re.IGNORECASE,
)
_AFTER_COLON = 5  # digits of a line or a port, at most
_UNIT = re.compile(
    r"\s?(?:%|ms|s|us|ns|sec\w*|min\w*|h|hours?|[kKMGT]i?B|bytes?|B|steps?|tokens?|samples?|it/s|GPUs?|ranks?|times)\b"
    r"|[.,]\d|,? ?\]|, \d|[/x:\-]\d",
)
_COUNTS = re.compile(r"last_|ranks?\b|pg_id|version|(?:record|collective_seq|p2p_seq|op)_id|name\b")  # keys of a dump
_BEFORE = 24  # preceding characters that are examined
_REMEMBERED_LENGTH = 256  # longest cached text
_MOST_REMEMBERED = 8192


@dataclass(frozen=True)
class Redactor:
    """Removes everything that looks like a secret (``redact``), and the job's own secrets (``secret_values``)."""

    values: tuple[str, ...] = field(default=(), repr=False)

    @cached_property
    def _forms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(form for value in self._telling for form in _forms_of(value)))

    @cached_property
    def _telling(self) -> tuple[str, ...]:
        return tuple(value for value in self.values if is_telling(value))

    @cached_property
    def _short(self) -> tuple[str, ...]:
        return tuple(value for value in self.values if not is_telling(value))

    def text(self, text: str) -> str:
        """Removes secrets from safelaunch's own text."""
        return self._without_secrets(text, short=False)

    def job_text(self, text: str) -> str:
        """Removes secrets from the job's own text, including short ones."""
        return self._without_secrets(text, short=True)

    def _without_secrets(self, text: str, *, short: bool) -> str:
        clean = self._remembered if len(text) <= _REMEMBERED_LENGTH else self._cleaned
        result = clean(text, short)
        return text if result == text else result

    @cached_property
    def _remembered(self) -> Callable[[str, bool], str]:
        # All ranks of a job have the same frames.
        return lru_cache(_MOST_REMEMBERED)(self._cleaned)

    def _cleaned(self, text: str, short: bool) -> str:
        return replaced(text, self._secrets_in(text, by_rule, short=short)) if text else text

    def argv(self, words: Iterable[str]) -> list[str]:
        return [self.job_text(word) for word in redact_argv(words)]

    def markup(self, text: str) -> str:
        """Removes secrets from a report made of cleaned parts.

        Doesn't search for assignments, which would damage the report.
        """
        return replaced(text, self._secrets_in(text, shapes_in))

    def _secrets_in(self, text: str, rule: Callable[[str], Iterator[Span]], *, short: bool = False) -> Iterator[Span]:
        def own(plain: str) -> Iterator[Span]:
            yield from rule(plain)
            yield from self._values_in(plain)
            if short:
                yield from self._short_in(plain)

        for reading in readings(text):
            values = encoded_in(reading.text, self._values_in, is_text=False) if self._telling else ()
            for begin, end in chain(own(reading.text), encoded_in(reading.text, own), values):
                yield reading.origin(begin, end)
        yield from self._cut_off(text)

    def _values_in(self, text: str) -> Iterator[Span]:
        for form in self._forms:
            yield from _occurrences(form, text)
        for value in self._telling:
            yield from _beginnings(value, text)

    def _short_in(self, text: str) -> Iterator[Span]:
        for value in self._short:
            for begin, end in _occurrences(value, text):
                if value.lower() in COMMON_WORDS and not _is_called_so(text, begin, end):
                    continue
                if _stands_alone(value, text, begin, end) and not (value.isdigit() and _counts(text, begin, end)):
                    yield begin, end
            for form in _hexadecimal(value):
                yield from (span for span in _occurrences(form, text) if _is_word(text, *span))

    def _cut_off(self, text: str) -> Iterator[Span]:
        """Yields the beginning of a secret at the text's end, and the end of a secret at the text's beginning."""
        head = _LINE_HEAD.match(text)
        begin, end = head.end() if head else 0, len(text.rstrip(_CUT_OFF))
        for value in self._telling:
            at = text.rfind(value[:_EDGE], max(begin, end - len(value)), end)
            if at >= 0 and value.startswith(text[at:end]):
                yield at, end
            at = text.find(value[-_EDGE:], begin, begin + len(value))
            if at >= 0 and value.endswith(text[begin : at + _EDGE]):
                yield begin, at + _EDGE

    # --- values made of texts -----------------------------------------------------------------------------------------

    def tree(self, value: Any) -> Any:
        """Removes secrets from all strings in nested lists and dicts. Keeps numbers."""
        return _walk(value, self.text, {})

    # --- bytes --------------------------------------------------------------------------------------------------------

    def data(self, data: bytes) -> bytes:
        """Removes secrets from a dump, JSON or text. Returns ``data`` itself if it contains no secrets.

        A dump keeps its format. Other data keep their length, because secrets are overwritten.
        """
        if data.startswith(b"\x80"):
            from safelaunch.system.decoding import load_pickle  # deferred: the rest is needed before a job starts

            return self._encoded(data, load_pickle, lambda value: pickle.dumps(value, protocol=min(data[1], 5)))
        if data.lstrip()[:1] in (b"{", b"["):
            return self._encoded(data, json.loads, lambda value: json.dumps(value).encode())
        if b"\0" not in data:
            try:
                return self.job_text(data.decode("utf-8")).encode("utf-8")
            except UnicodeDecodeError:
                pass
        return self._overwritten(data)

    def _encoded(self, data: bytes, load: Callable[[bytes], Any], dump: Callable[[Any], bytes]) -> bytes:
        try:
            value = load(data)
            cleaned = _walk(value, self.job_text, {})
            # The data can contain more than the value: after its end, or pushed and discarded.
            if cleaned is value and not self._certain(data):
                return data
            return dump(cleaned)
        except Exception:  # noqa: BLE001 - damaged, or not what it looked like: nearly any type is raised
            return self._overwritten(data)

    def _certain(self, data: bytes) -> bool:
        text = data.decode("utf-8", "surrogateescape")
        return any(True for _ in self._values_in(text)) or any(True for _ in shapes_in(text))

    def _overwritten(self, data: bytes) -> bytes:
        text = data.decode("utf-8", "surrogateescape")
        parts: list[bytes] = []
        done = 0
        for begin, end in merged(self._secrets_in(text, by_rule, short=True)):
            parts += [_bytes(text[done:begin]), b"*" * len(_bytes(text[begin:end]))]
            done = end
        return b"".join([*parts, _bytes(text[done:])])


# --- tools ------------------------------------------------------------------------------------------------------------


def _forms_of(value: str) -> tuple[str, ...]:
    """Returns ``value`` as it can appear: unchanged, in a URL, JSON, ``repr``, HTML, Base64 or hexadecimal."""
    in_json = json.dumps(value)[1:-1]
    twice = json.dumps(in_json)[1:-1]
    quoted = (value.replace(" ", "+"), quote(value, safe=""), in_json, twice, ascii(value)[1:-1])
    raw = _bytes(value)
    # Without the last byte, which might be encoded together with the following ones.
    encoded = [encode(raw).decode()[: 8 * len(raw) // 6] for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    return (value, *quoted, value.translate(_HTML), *encoded, *_hexadecimal(value))


def _hexadecimal(value: str) -> tuple[str, ...]:
    digits = _bytes(value).hex()
    return tuple(dict.fromkeys((digits, digits.upper())))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _occurrences(part: str, text: str) -> Iterator[Span]:
    at = text.find(part)
    while at >= 0:
        yield at, at + len(part)
        at = text.find(part, at + len(part))


def _beginnings(value: str, text: str) -> Iterator[Span]:
    """Yields truncated forms of ``value``, as in shortened logs, unless they are only a few ordinary words."""
    for at, end in _occurrences(value[:_BEGINNING], text) if len(value) > _BEGINNING else ():
        while end - at < len(value) and text[end : end + 1] == value[end - at]:
            end += 1
        _, scheme, place = text[at:end].partition("://")
        if is_mixed(place or text[at:end]) or (2 * (end - at) >= len(value) and not scheme):
            yield at, end


def _is_called_so(text: str, begin: int, end: int) -> bool:
    # An ordinary word after ``password is`` or the like, or in ``user:word@host``.
    if text[begin - 1 : begin] == ":" and text[end : end + 1] == "@":
        return True
    return bool(_CALLED_SO.search(text[max(0, begin - _BEFORE) : begin]))


def _stands_alone(value: str, text: str, begin: int, end: int) -> bool:
    # A word or a number must not be part of a name. A value that mixes them or has signs can stand anywhere.
    if value.isalpha() or value.isdigit():
        return _is_word(text, begin, end)
    return not (text[begin - 1 : begin].isalnum() or text[end : end + 1].isalnum())


def _is_word(text: str, begin: int, end: int) -> bool:
    """True unless the span is part of a longer word, a path, a module or a host name."""
    before, after = text[max(0, begin - 2) : begin], text[end : end + 2]
    if (before and _in_word(before[-1])) or (after and _in_word(after[0])):
        return False
    joined_before = len(before) == 2 and before[1] in "./\\-" and _in_word(before[0])
    joined_after = len(after) == 2 and after[0] in "./\\-" and _in_word(after[1])
    return not (joined_before or joined_after)


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _counts(text: str, begin: int, end: int) -> bool:
    before = text[max(0, begin - _BEFORE) : begin]
    if before.endswith(":") and text.startswith("@", end):  # user:1234@host
        return False
    after_colon = before.endswith(":") and before[:-1][-1:].isalnum() and end - begin <= _AFTER_COLON
    return after_colon or bool(_COUNTED.search(before) or _UNIT.match(text, end, end + 12))


def same_or(item: Any, clean: Callable[[Any], Any]) -> Any:
    """Cleans the elements of lists, tuples and dicts. Returns the same object if nothing changes."""
    if isinstance(item, dict):
        pairs = {
            key if _is_number(key) else clean(key): entry
            if _is_number(entry) and _COUNTS.match(str(key))
            else clean(entry)
            for key, entry in item.items()
        }
        same = len(pairs) == len(item) and all(
            key is old and entry is item[old] for (key, entry), old in zip(pairs.items(), item, strict=True)
        )
        return item if same else pairs
    if isinstance(item, (list, tuple)):
        parts = [clean(part) for part in item]
        if all(part is old for part, old in zip(parts, item, strict=True)):
            return item
        return parts if isinstance(item, list) else tuple(parts)
    return item


def _is_number(item: object) -> bool:
    return isinstance(item, str) and item.isdigit()


def _texts_in(value: Any) -> set[str]:
    texts: set[str] = set()
    waiting: list[Iterable[Any]] = [(value,)]
    known_ids: set[int] = set()
    while waiting:
        for part in waiting.pop():
            if isinstance(part, str):
                texts.add(part)
            elif isinstance(part, bytes):
                texts.add(part.decode("utf-8", "surrogateescape"))
            elif isinstance(part, (dict, list, tuple)) and id(part) not in known_ids:
                known_ids.add(id(part))
                waiting.append(part)
                if isinstance(part, dict):
                    waiting.append(part.values())
    return texts


def _walk(value: Any, clean: Callable[[str], str], done: dict[int, Any]) -> Any:
    """Applies ``same_or`` recursively.

    ``done`` maps an object's id to its result, so that repeated parts are cleaned once.
    """
    if all(clean(text) == text for text in _texts_in(value)):
        return value

    def visit(item: Any) -> Any:
        if isinstance(item, str):
            return clean(item)
        if isinstance(item, bytes):
            text = item.decode("utf-8", "surrogateescape")
            cleaned = clean(text)
            return item if cleaned == text else _bytes(cleaned)
        if not isinstance(item, (dict, list, tuple)):
            return item
        if id(item) not in done:
            done[id(item)] = item  # for a list that contains itself
            done[id(item)] = same_or(item, visit)
        return done[id(item)]

    return visit(value)
