"""Makes text from the job safe to display, because terminals execute control sequences.

This module alone decides which characters are displayed. The manifest marks files with raw text, such as the end of a
rank's output.
"""

from __future__ import annotations

import json
import re

# C0 and C1 except tab and newline, zero-width characters, direction overrides, surrogates, tags
_CONTROLS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f"
)
_UNSHOWABLE = re.compile(f"[{_CONTROLS}]")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def clean_lines(text: str) -> list[str]:
    """Returns the lines of ``text`` without terminal escapes, control characters or direction overrides."""
    return [clean(line).rstrip() for line in _ESCAPES.sub("", text).splitlines()]


def clean(text: str) -> str:
    """Returns ``text`` on one line, without terminal escapes and control characters."""
    return " ".join(_UNSHOWABLE.sub("", _ESCAPES.sub("", text).replace("\n", " ").replace("\t", " ")).split(" "))


def clean_text(text: str) -> str:
    """Applies ``clean`` to each line that has unprintable characters."""
    return "\n".join(line if line.isprintable() else clean(line) for line in text.split("\n"))


def is_clean(text: str) -> bool:
    """True if a terminal would display the text and do nothing else."""
    return not _UNSHOWABLE.search(text)


def clean_json(text: str) -> str:
    r"""Returns an equal JSON document with unprintable characters escaped, e.g. as ``\u009b``."""
    return _UNSHOWABLE.sub(lambda match: _escaped(match[0]), text)


def json_document(value: object) -> str:
    return clean_json(json.dumps(value, indent=2))


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
