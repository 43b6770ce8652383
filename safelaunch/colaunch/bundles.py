"""The bundles of a job: which is the newest, and what it says."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path


def newest(bundles: Collection[str]) -> str:
    """The path of the newest of these bundles, or empty. Of one job's nodes, one has the whole; it comes first."""
    return max(bundles, key=lambda path: (_is_whole(path), _modified(path), path), default="")


def verdict_of(bundle: str) -> tuple[str, str]:
    """``hang``, ``crash`` or ``dump``, and the cause; both empty without a bundle or a readable verdict."""
    if not bundle:
        return "", ""
    try:
        document = json.loads((Path(bundle) / "verdict.json").read_bytes())
        return str(document["outcome"]), str(document.get("cause", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", ""


def _is_whole(bundle: str) -> bool:
    try:
        place = json.loads((Path(bundle) / "verdict.json").read_bytes()).get("bundle")
        return not isinstance(place, dict) or bool(place.get("whole", True))
    except (OSError, ValueError, AttributeError):
        return False


def _modified(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
