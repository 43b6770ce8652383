"""Which hardware the last bundles in the bundle directory blame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from safelaunch.bundle.copier import BUNDLE
from safelaunch.bundle.reading.guard import Unreadable, read_limited
from safelaunch.model import BundlePlace, Evidence
from safelaunch.system.decoding import from_json
from safelaunch.system.task import Task

if TYPE_CHECKING:
    from safelaunch.supervise.incident import JobContext

LAST = 5
DEADLINE_S = 3.0  # the disk of the bundle directory may not answer
_MOST_READ = 64
_MOST_BYTES = 4 << 20


class _Culprit(msgspec.Struct):
    gpu: str = ""


class _Node(msgspec.Struct):
    host: str = ""


class _Verdict(msgspec.Struct):
    outcome: str = ""
    culprits: tuple[_Culprit, ...] = ()
    nodes: tuple[_Node, ...] = ()
    bundle: BundlePlace | None = None


def recalled(evidence: Evidence, context: JobContext) -> Evidence:
    """The evidence with what the last bundles blame; as it is, if it has that already. Never raises."""
    if evidence.earlier is not None or evidence.outcome in ("dump", "suspect"):
        return evidence
    task = Task("earlier bundles", lambda: blamed_in(context.bundle_dir))
    try:
        earlier = task.result() if task.wait(DEADLINE_S) else ()
    except OSError:
        earlier = ()  # there is no such directory yet, or it cannot be read
    return msgspec.structs.replace(evidence, earlier=earlier)


def blamed_in(directory: Path) -> tuple[tuple[str, ...], ...]:
    """The GPUs and hosts that each of the last bundles of a hang or crash blames, the newest first. Raises OSError."""
    matches = (BUNDLE.fullmatch(path.name) for path in directory.iterdir())
    names = sorted(filter(None, matches), key=lambda name: name["time"])
    found: list[tuple[str, ...]] = []
    for name in reversed(names[-_MOST_READ:]):
        if len(found) < LAST:
            found += _blamed(directory / name[0] / "verdict.json")
    return tuple(found)


def _blamed(path: Path) -> Iterator[tuple[str, ...]]:
    try:
        one = from_json(read_limited(path, _MOST_BYTES), _Verdict)
    except (Unreadable, msgspec.DecodeError, RecursionError):
        return  # another user's, or damaged
    if one.outcome in ("hang", "crash") and (one.bundle is None or one.bundle.whole):
        yield tuple(filter(None, dict.fromkeys((*(c.gpu for c in one.culprits), *(n.host for n in one.nodes)))))
