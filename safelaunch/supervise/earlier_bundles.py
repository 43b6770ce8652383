"""Finds hardware that fails repeatedly: the GPUs and hosts blamed by the latest bundles of hangs and crashes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from safelaunch.bundle.copier import BUNDLE
from safelaunch.model import (
    BundlePlace,
    Evidence,
)
from safelaunch.system.decoding import from_json
from safelaunch.system.task import BackgroundTask

if TYPE_CHECKING:
    pass


LATEST_BUNDLES = 5
RECALL_DEADLINE_S = 3.0  # the bundle directory's disk might not respond
_MOST_READ = 64
_LARGEST_VERDICT = 4 << 20


class _BlamedCulprit(msgspec.Struct):
    gpu: str = ""


class _NodeShape(msgspec.Struct):
    host: str = ""


class _VerdictPart(msgspec.Struct):
    outcome: str = ""
    culprits: tuple[_BlamedCulprit, ...] = ()
    nodes: tuple[_NodeShape, ...] = ()
    bundle: BundlePlace | None = None


def with_earlier_bundles(evidence: Evidence, bundle_dir: Path) -> Evidence:
    """Adds the hardware that the latest bundles blame to ``evidence``. Never raises."""
    if evidence.earlier is not None or evidence.outcome in ("dump", "suspect"):
        return evidence
    task = BackgroundTask("earlier bundles", lambda: blamed_hardware(bundle_dir))
    try:
        earlier = task.result() if task.wait(RECALL_DEADLINE_S) else ()
    except OSError:
        earlier = ()
    return msgspec.structs.replace(evidence, earlier=earlier)


def blamed_hardware(directory: Path) -> tuple[tuple[str, ...], ...]:
    """Returns the GPUs and hosts that each bundle blames, latest first. Raises OSError."""
    matches = (BUNDLE.fullmatch(path.name) for path in directory.iterdir())
    names = sorted(filter(None, matches), key=lambda name: name["time"])
    blamed: list[tuple[str, ...]] = []
    for name in reversed(names[-_MOST_READ:]):
        if len(blamed) < LATEST_BUNDLES:
            blamed += _blamed(directory / name[0] / "verdict.json")
    return tuple(blamed)


def _blamed(path: Path) -> Iterator[tuple[str, ...]]:
    from safelaunch.bundle.reading.files import Unreadable, read_limited

    try:
        verdict = from_json(read_limited(path, _LARGEST_VERDICT), _VerdictPart)
    except (Unreadable, msgspec.DecodeError, RecursionError):
        return  # another user's, or damaged
    if verdict.outcome in ("hang", "crash") and (verdict.bundle is None or verdict.bundle.whole):
        yield tuple(filter(None, dict.fromkeys((*(c.gpu for c in verdict.culprits), *(n.host for n in verdict.nodes)))))
