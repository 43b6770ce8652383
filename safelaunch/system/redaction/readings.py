"""Reads a text in several ways (as it is, with escapes decoded, with wrapped lines joined) and maps places back.

A secret may occur in a text as JSON, ``repr``, a URL or HTML write it, nested in another such text, in colours, or
across two lines. Every reading is searched, and each match maps to a place in the text itself. The time is proportional
to the text's length.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial

MOST_LAYERS = 3  # JSON in JSON in JSON


def _utf8(mark: str) -> str:
    """A pattern for the bytes of one UTF-8 character, each after ``mark``."""
    more = mark + "[89ABab][0-9A-Fa-f]"
    several = (("[CDcd][0-9A-Fa-f]", 1), ("[Ee][0-9A-Fa-f]", 2), ("[Ff][0-7]", 3))
    return "|".join([*(f"{mark}{lead}(?:{more}){{{count}}}" for lead, count in several), f"{mark}[0-9A-Fa-f]{{2}}"])


# Every repetition is bounded.
_OF_URLS = _utf8("%")
_OF_HTML = r"&(?:\#\d{1,7}|\#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});"
_OF_PROGRAMS = (
    _utf8(r"\\x") + r"|\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}"
    r"|\\U[0-9A-Fa-f]{8}|\\u\{[0-9A-Fa-f]{1,6}\}|\\[0-3][0-7]{2}|\\[abfnrtv0]|\\[^\w\s]|\\_"
)
_KINDS = tuple(re.compile(kind) for kind in (_OF_URLS, _OF_HTML, _OF_PROGRAMS))
_ESCAPES = re.compile("|".join((_OF_URLS, _OF_HTML, _OF_PROGRAMS)))
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
# Colours and other things that a terminal does, and characters that nobody sees.
_UNSEEN = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\xad\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]"
)
# A terminal, MIME or a person has wrapped a line; a log or torchrun (``[rank0]:``) has put words before the rest. Or a
# text is written as several literals side by side.
_BEFORE_REST = r"(?:\d\d:\d\d:\d\d\.\d{3} (?:out|err)\| |safelaunch: )?(?:\[[A-Za-z_]{1,32}\d{1,6}\]:)?[ \t]*"
_WRAPS = re.compile(
    rf"(?:\r\n?|\n){_BEFORE_REST}"
    r"|(?P<quote>[\"'])(?=[\s+])[ \t]{0,8}\+?[ \t]{0,8}(?:\r?\n[ \t]{0,64})?\+?[ \t]?[bruf]{0,2}(?P=quote)"
)
# The same where it is quoted, or within a box; these signs may also be the secret's own.
_QUOTED = re.compile(rf"\r?\n{_BEFORE_REST}[│┃|>][ \t]*")
_BOX_END = re.compile(r"[│┃|][ \t]{0,4}\r?\n")
_BOXED = re.compile(rf"[ \t]{{0,4}}[│┃|][ \t]{{0,4}}\r?\n{_BEFORE_REST}[│┃|][ \t]*")
_ERASED = re.compile(r"[^\x08]\x08")
# Lists of bytes (``5a:71``, ``5a71 6b6e``, ``0x5a, 0x71``), and what stands between two.
_LISTS = re.compile(  # as it begins decides how fast it is
    r"[0-9a-fA-F][0-9a-fA-F](?:[0-9a-fA-F]{2})?[\s,:;\-]{1,12}(?:0[xX])?"
    r"(?:[0-9a-fA-F]{2}(?:[0-9a-fA-F]{2})?[\s,:;\-]{1,12}(?:0[xX])?){2,}[0-9a-fA-F]{2,4}"
)
_BETWEEN = re.compile(r"[\s,:;\-]{1,12}(?:0[xX])?")


class Reading:
    """A reading: ``text``, and where each part of it is in its source. ``joined``: its lines are joined."""

    def __init__(self, text: str, back: Callable[[int, int], tuple[int, int]], *, joined: bool = False) -> None:
        self.text = text
        self.origin = back
        self.joined = joined


def readings(text: str) -> list[Reading]:
    """``text`` itself, then as displayed, then with layer after layer of escapes decoded; also with lines joined."""
    found = [Reading(text, _here)]
    if seen := _read(found[0], _UNSEEN, _nothing):
        found.append(seen)
    # One kind alone: what a secret itself has of another kind is no escape.
    alone = [reading for kind in _KINDS if (reading := _read(found[-1], kind, _decoded))]
    base = found[-1]
    for _ in range(MOST_LAYERS):
        deeper = _read(base, _ESCAPES, _decoded)
        if deeper is None:
            break
        base = _read(deeper, _UNSEEN, _nothing) or deeper
        found.append(base)
    lines = dict.fromkeys((seen or found[0], found[-1]))
    ways = [(reading, _WRAPS) for reading in lines]
    ways += [(reading, _QUOTED) for reading in lines]
    ways += [(reading, _BOXED) for reading in lines if _BOX_END.search(reading.text)]
    joined = [_read(reading, wraps, by, joined=True) for reading, wraps in ways for by in (_nothing, _space)]
    joined.append(_read(found[0], _ERASED, _nothing, joined=True) if "\b" in text else None)
    found += alone if len(alone) > 1 else []
    return [*found, *(reading for reading in joined if reading is not None)]


def listed_in(reading: Reading, forms: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Where a list of bytes in hexadecimal holds one of ``forms``, in small letters."""
    runs = [(match.start(), match[0]) for match in _LISTS.finditer(reading.text)]
    everything = "\n".join(_BETWEEN.sub("", run) for _, run in runs).lower()
    present = [form for form in forms if form in everything]
    for start, run in runs if present else ():
        bytewise = _read(Reading(run, _here), _BETWEEN, _nothing)
        text = bytewise.text.lower() if bytewise else ""
        for form in present:
            at = text.find(form)
            while bytewise and at >= 0:
                begin, end = bytewise.origin(at, at + len(form))
                yield reading.origin(start + begin, start + end)
                at = text.find(form, at + len(form))


def _here(begin: int, end: int) -> tuple[int, int]:
    return begin, end


def _nothing(_: str) -> str:
    return ""


def _space(_: str) -> str:
    return " "


def _decoded(escape: str) -> str:
    """The decoded text of one match of ``_ESCAPES``."""
    kind = escape[:2]
    if kind == "\\x" or escape[0] == "%":
        digits = escape.replace("\\x", "").replace("%", "")
        return bytes.fromhex(digits).decode("utf-8", "replace")
    if escape.startswith("\\u{"):
        number = int(escape[3:-1], 16)
        return chr(number) if number < 0x110000 else escape
    if kind == "\\u":
        return bytes.fromhex(escape.replace("\\u", "")).decode("utf-16-be", "replace")
    if kind == "\\U":
        number = int(escape[2:], 16)
        return chr(number) if number < 0x110000 else escape
    if escape[0] == "&":
        from html import unescape  # with two thousand names, which few texts need

        return unescape(escape)
    return chr(int(escape[1:], 8)) if len(escape) == 4 else _LETTERS.get(kind[1], kind[1])


def _read(
    before: Reading, pattern: re.Pattern[str], decode: Callable[[str], str], *, joined: bool = False
) -> Reading | None:
    """``before`` with every match of ``pattern`` replaced; None without a match."""
    # Pieces by turns as they stood (even numbers) and replaced (odd ones): where each begins here, and there.
    here, there, parts = array("q", [0]), array("q", [0]), []
    length = done = 0
    for match in pattern.finditer(before.text):
        kept, new = before.text[done : match.start()], decode(match[0])
        parts += [kept, new]
        here.extend((length + len(kept), length + len(kept) + len(new)))
        there.extend((match.start(), match.end()))
        length, done = length + len(kept) + len(new), match.end()
    if not parts:
        return None
    text = "".join([*parts, before.text[done:]])
    there.append(len(before.text))
    return Reading(text, partial(_origin, here, there, before.origin), joined=joined)


def _origin(
    here: array[int], there: array[int], further: Callable[[int, int], tuple[int, int]], begin: int, end: int
) -> tuple[int, int]:
    """The place of ``[begin, end)`` in the previous reading; a replaced part counts whole. ``end`` > ``begin``."""
    first, last = bisect_right(here, begin) - 1, bisect_right(here, end - 1) - 1
    start = there[first] if first % 2 else there[first] + begin - here[first]
    stop = there[last + 1] if last % 2 else there[last] + end - here[last]
    return further(start, stop)
