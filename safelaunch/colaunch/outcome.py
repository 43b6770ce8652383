"""How an attempt ended: from its wait status, its bundle, and what was asked of it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path

from safelaunch.colaunch.jobs import State
from safelaunch.launch.job import EXIT_GAVE_UP, EXIT_HUNG


def exit_code(status: int) -> int:
    """The exit code for a wait status as a shell shows it: 128 and the signal's number where one ended it."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def state_of(code: int, verdict: str, ended_by_us: State | None) -> State:
    """``verdict``: the outcome in the bundle's verdict, empty without one: it knows, where the code only suggests.

    ``ended_by_us``: why the job was asked to stop. One that succeeded all the same has succeeded.
    """
    if code == 0:
        return "succeeded"
    if ended_by_us is not None:
        return ended_by_us
    if verdict in ("hang", "crash"):
        return "hung" if verdict == "hang" and code in (EXIT_HUNG, EXIT_GAVE_UP) else "failed"
    return "hung" if code == EXIT_HUNG else "failed"


def newest(bundles: Collection[str]) -> str:
    """The path of the newest of these bundles, or empty. Their names hold the time."""
    return max(bundles, key=lambda path: (_modified(path), path), default="")


def verdict_of(bundle: str) -> str:
    """``hang``, ``crash`` or ``dump``; empty where there is no bundle or no verdict to be read."""
    if not bundle:
        return ""
    try:
        document = json.loads((Path(bundle) / "verdict.json").read_bytes())
        return str(document["outcome"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _modified(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
