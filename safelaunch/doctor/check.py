"""What the doctor says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warning", "failed"]
RESULTS: tuple[Result, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True, slots=True)
class Check:
    """One examined thing. ``detail``: what was seen; ``fix``: what to do about it, several lines where it takes them.

    ``warning``: safelaunch works, with less evidence or at a risk to the job; ``failed``: something that it is for does
    not work.
    """

    name: str
    result: Result
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def warning(name: str, detail: str, fix: str = "") -> Check:
    return Check(name, "warning", detail, fix)


def failed(name: str, detail: str, fix: str = "") -> Check:
    return Check(name, "failed", detail, fix)
