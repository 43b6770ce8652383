"""The bundles of a job: which is the newest, and what it says."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any


def newest(bundles: Collection[str]) -> str:
    """The path of the newest of these bundles, or empty. Of one job's nodes, one has the whole; it comes first."""
    return max(bundles, key=lambda path: (_is_whole(path), _modified(path), path), default="")


def verdict_of(bundle: str) -> tuple[str, str]:
    """``hang``, ``crash`` or ``dump``, and the cause; both empty without a bundle or a readable verdict."""
    document = _verdict(bundle) if bundle else None
    if document is None or "outcome" not in document:
        return "", ""
    return str(document["outcome"]), str(document.get("cause", ""))


def _is_whole(bundle: str) -> bool:
    document = _verdict(bundle)
    place = document.get("bundle") if document is not None else None
    return document is not None and (not isinstance(place, dict) or bool(place.get("whole", True)))


def _verdict(bundle: str) -> dict[str, Any] | None:
    """What verdict.json says; None where it cannot be read."""
    try:
        document = json.loads((Path(bundle) / "verdict.json").read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _modified(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
