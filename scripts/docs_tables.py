"""Hook of MkDocs: puts in what the code says by itself, so that no page repeats it.

``<!-- table: rules -->`` becomes the table of rules, ``<!-- table: doubts -->`` that of the doubts, and
``<!-- advice: CAUSE -->`` the list of all advice that a verdict with this cause may give.
"""

from __future__ import annotations

import re
from typing import Any

from safelaunch.verdict.causes import CAUSES
from safelaunch.verdict.doubts import About, Doubt
from safelaunch.verdict.rules import OWN, RULES

_ABOUT: dict[About, str] = {
    "state": "what the rank does",
    "calls": "where calls parted",
    "others": "who else may be at fault",
    "rival": "another explanation",
    "proof": "the proof",
    "share": "how many are named",
    "evidence": "the evidence",
}
_MARK = re.compile(r"<!-- (table|advice): (.+?) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)


def filled(markdown: str) -> str:
    """Raises ``KeyError`` for a table or cause that is not there."""
    return _MARK.sub(lambda mark: _advice(mark[2]) if mark[1] == "advice" else _TABLES[mark[2]](), markdown)


def _advice(cause: str) -> str:
    given = [f"{one.shown} (torch {one.torch})" if one.torch else one.shown for one in CAUSES[cause].advice]
    return "\n".join(f"- {one}" for one in dict.fromkeys(given))


def _rules() -> str:
    rows = ["| rule | finds | needs | causes |", "|---|---|---|---|"]
    for rule in RULES:
        causes = "*its own*" if rule.concludes == OWN else ", ".join(f"`{cause}`" for cause in rule.concludes)
        rows.append(f"| `{rule.name}` | {rule.says} | {', '.join(rule.needs)} | {causes} |")
    return "\n".join(rows)


def _doubts() -> str:
    rows = ["| about | doubt | levels |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| {_ABOUT[doubt.about]} | {doubt.why} | {doubt.levels} |" for doubt in Doubt)])


_TABLES = {"rules": _rules, "doubts": _doubts}
