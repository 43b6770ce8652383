"""The result of one check of ``safelaunch doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Result = Literal["ok", "warning", "failed"]
RESULTS: tuple[Result, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``detail``: what it found; ``fix``: what to do about it, in one or more lines.

    ``warning``: safelaunch works, but with less evidence or at a risk to the job. ``failed``: a main function of
    safelaunch does not work.
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
