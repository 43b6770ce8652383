"""Fills the templates of pages. Data can neither end the block that contains it nor act as markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib import resources
from math import isfinite
from typing import Any

from safelaunch.system.printable import clean, clean_json
from safelaunch.verdict.phrases import first_sentence

_STYLE, _SCRIPT, _COMMON = "report.css", "report.js", "common.js"


@cache
def _part(name: str) -> str:
    return resources.files("safelaunch.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")


def prepare() -> None:
    """Reads the templates in advance, because a disk can be slow."""
    for name in ("report.html", _STYLE, _COMMON, _SCRIPT):
        _part(name)


def render(page: dict[str, Any], script: str | None = None) -> str:
    """Returns a complete HTML page with ``page`` as its data.

    Args:
        script: Program that draws the page, run after the common functions; None draws an incident.
    """
    code = _part(_COMMON) + (script if script is not None else _part(_SCRIPT))
    data = clean_json(json.dumps(_cleaned(page), ensure_ascii=False, separators=(",", ":")))
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    head = page["head"]
    values = {
        "title": escape(clean(f"{head['cause']}: {head['summary']}")[:200]),
        "policy": f"default-src 'none'; style-src {_hash(_part(_STYLE))}; script-src {_hash(code)}; "
        "base-uri 'none'; form-action 'none'",
        "outcome": escape(head["words"].capitalize()),
        "cause": escape(head["cause"]),
        "summary": escape(first_sentence(clean(head["summary"]))),
        "style": _part(_STYLE),
        "data": data,
        "script": code,
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], _part("report.html"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _cleaned(value: Any) -> Any:
    """Removes invisible characters, except spaces, because they indent source."""
    if isinstance(value, str):
        return value if value.isprintable() else _printable(value)
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if value and all(type(item) is int for item in value) else [_cleaned(item) for item in value]
    return value if not isinstance(value, float) or isfinite(value) else None


def _printable(text: str) -> str:
    return "\n".join(clean(line) for line in text.split("\n"))
