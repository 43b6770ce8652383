"""TODO."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from safelaunch.model import Evidence, NodeFiles, node_file
from safelaunch.supervise.cluster.codec import BadMessage, parse, unpack
from safelaunch.supervise.cluster.evidence import SharedColumns, unpack_evidence
from safelaunch.supervise.cluster.exchange import Submissions
from safelaunch.supervise.cluster.merge import PeerEvidence

if TYPE_CHECKING:
    from safelaunch.addons.protocols import Service

Part = TypeVar("Part")
MOST_PICKLES, LARGEST_PICKLE = 4 << 20, 512 << 10  # bytes of a node's files that travel
LARGEST_TEXT = 64 << 10


def read_evidence(found: Submissions, host: str) -> PeerEvidence:
    """The evidence that the others have submitted. ``host``: this node's name."""
    evidence: list[Evidence] = []
    notes: list[str] = []
    files: dict[str, bytes] = {}
    hosts, shared = {host}, SharedColumns()
    for slot, chunks in sorted(found.chunks.items()):
        try:
            other, its = unpack_evidence(chunks, shared)
            evidence.append(other)
            files |= {distinct_name(name, slot, hosts): content for name, content in its.items()}
            hosts |= {rank.host for rank in other.ranks}
        except BadMessage as error:
            notes.append(f"the evidence of a node could not be read (slot {slot}: {error})")
    return PeerEvidence(tuple(evidence), files, tuple(notes))


def read_parts(found: Submissions, service: Service[Any, Part]) -> tuple[list[Part], list[str]]:
    """Returns what the service of the other nodes has answered, and what could not be read of it."""
    parts: list[Part] = []
    notes: list[str] = []
    for slot, chunks in sorted(found.chunks.items()):
        try:
            part = parse(unpack(chunks), service.part)
            service.check(part)
            parts.append(part)
        except (BadMessage, msgspec.ValidationError) as error:
            notes.append(f"a node's {service.noun} could not be read (slot {slot}: {error})")
    return parts, notes


_OF_THE_NODE = {node_file(field) for field in NodeFiles.__struct_fields__}


def small_files(root: Path, *, records: bool) -> dict[str, bytes]:
    """The files of a node's bundle that travel to the node that writes the whole: those about the node, small pickles.

    Path in the bundle → content, without secrets, as it is written there. ``records``: Flight Recorders as well.

    Of a kernel log that is long, the end.
    """
    found: dict[str, bytes] = {}
    for path in sorted(root.glob("node/*/*")):
        if path.name in _OF_THE_NODE:
            with suppress(OSError):
                content = path.read_bytes()
                if path.suffix == ".txt":
                    content = content[-LARGEST_TEXT:]
                if len(content) <= LARGEST_TEXT:
                    found[path.relative_to(root).as_posix()] = content
    left = MOST_PICKLES
    for path in sorted(root.glob("ranks/*/flight_recorder.pickle")) if records else ():
        with suppress(OSError):
            size = path.stat().st_size
            if size <= min(LARGEST_PICKLE, left):
                found[path.relative_to(root).as_posix()] = path.read_bytes()
                left -= size
    return found


def distinct_name(name: str, slot: int, taken: set[str]) -> str:
    """``node/<host>/...`` of a node whose host name another one has as well: with its number."""
    parts = name.split("/")
    return "/".join([parts[0], f"{parts[1]}-{slot}", *parts[2:]]) if parts[0] == "node" and parts[1] in taken else name
