"""Reads a text in several ways (as it is, as a terminal shows it, with escapes decoded) and maps places back.

A secret may occur in a text as JSON, ``repr``, a URL or HTML write it, nested in another such text, or in colours.
Every reading is searched, and each match maps to a place in the text itself. The time is proportional to the text's
length.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable
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
    r"|\\U[0-9A-Fa-f]{8}|\\[0-3][0-7]{2}|\\[abfnrtv0]|\\[^\w\s]|\\_"
)
_ESCAPES = re.compile("|".join((_OF_URLS, _OF_HTML, _OF_PROGRAMS)))
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
# Colours and other things that a terminal does, and characters that nobody sees.
_UNSEEN = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)?|[@-Z\\-_])"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\xad\u200b-\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]"
)


class Reading:
    """A reading: ``text``, and where each part of it is in its source."""

    def __init__(self, text: str, back: Callable[[int, int], tuple[int, int]]) -> None:
        self.text = text
        self.origin = back


def readings(text: str) -> list[Reading]:
    """``text`` itself, then as a terminal shows it, then with layer after layer of escapes decoded."""
    found = [Reading(text, _here)]
    if shown := _read(found[0], _UNSEEN, _nothing):
        found.append(shown)
    for _ in range(MOST_LAYERS):
        deeper = _read(found[-1], _ESCAPES, _decoded)
        if deeper is None:
            break
        found.append(_read(deeper, _UNSEEN, _nothing) or deeper)
    return found


def _here(begin: int, end: int) -> tuple[int, int]:
    return begin, end


def _nothing(_: str) -> str:
    return ""


def _decoded(escape: str) -> str:
    """The decoded text of one match of ``_ESCAPES``."""
    kind = escape[:2]
    if kind == "\\x" or escape[0] == "%":
        digits = escape.replace("\\x", "").replace("%", "")
        return bytes.fromhex(digits).decode("utf-8", "replace")
    if kind == "\\u":
        return bytes.fromhex(escape.replace("\\u", "")).decode("utf-16-be", "replace")
    if kind == "\\U":
        number = int(escape[2:], 16)
        return chr(number) if number < 0x110000 else escape
    if escape[0] == "&":
        from html import unescape  # with two thousand names, which few texts need

        return unescape(escape)
    return chr(int(escape[1:], 8)) if len(escape) == 4 else _LETTERS.get(kind[1], kind[1])


def _read(before: Reading, pattern: re.Pattern[str], decode: Callable[[str], str]) -> Reading | None:
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
    return Reading(text, partial(_origin, here, there, before.origin))


def _origin(
    here: array[int], there: array[int], further: Callable[[int, int], tuple[int, int]], begin: int, end: int
) -> tuple[int, int]:
    """The place of ``[begin, end)`` in the previous reading; a replaced part counts whole. ``end`` > ``begin``."""
    first, last = bisect_right(here, begin) - 1, bisect_right(here, end - 1) - 1
    start = there[first] if first % 2 else there[first] + begin - here[first]
    stop = there[last + 1] if last % 2 else there[last] + end - here[last]
    return further(start, stop)
