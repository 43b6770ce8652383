"""Reads other nodes' submissions, and selects the files that this node submits."""

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
MOST_PICKLES, LARGEST_PICKLE = 4 << 20, 512 << 10  # bytes of a node's files
LARGEST_TEXT = 64 << 10


def read_evidence(submissions: Submissions, host: str) -> PeerEvidence:
    evidence: list[Evidence] = []
    notes: list[str] = []
    files: dict[str, bytes] = {}
    hosts, shared = {host}, SharedColumns()
    for slot, chunks in sorted(submissions.chunks.items()):
        try:
            other, its = unpack_evidence(chunks, shared)
            evidence.append(other)
            files |= {distinct_name(name, slot, hosts): content for name, content in its.items()}
            hosts |= {rank.host for rank in other.ranks}
        except BadMessage as error:
            notes.append(f"the evidence of a node could not be read (slot {slot}: {error})")
    return PeerEvidence(tuple(evidence), files, tuple(notes))


def read_parts(submissions: Submissions, service: Service[Any, Part]) -> tuple[list[Part], list[str]]:
    """Returns the other nodes' parts of a service's answer, and notes about unreadable parts."""
    parts: list[Part] = []
    notes: list[str] = []
    for slot, chunks in sorted(submissions.chunks.items()):
        try:
            part = parse(unpack(chunks), service.part)
            service.check(part)
            parts.append(part)
        except (BadMessage, msgspec.ValidationError) as error:
            notes.append(f"a node's {service.noun} could not be read (slot {slot}: {error})")
    return parts, notes


_OF_THE_NODE = {node_file(field) for field in NodeFiles.__struct_fields__}


def small_files(root: Path, *, records: bool) -> dict[str, bytes]:
    """Returns the files to send to the node that writes the merged bundle, by path and without secrets.

    These are files about the node, the end of a long kernel log and, with ``records``, small Flight Recorder pickles.
    """
    files: dict[str, bytes] = {}
    for path in sorted(root.glob("node/*/*")):
        if path.name in _OF_THE_NODE:
            with suppress(OSError):
                content = path.read_bytes()
                if path.suffix == ".txt":
                    content = content[-LARGEST_TEXT:]
                if len(content) <= LARGEST_TEXT:
                    files[path.relative_to(root).as_posix()] = content
    left = MOST_PICKLES
    for path in sorted(root.glob("ranks/*/flight_recorder.pickle")) if records else ():
        with suppress(OSError):
            size = path.stat().st_size
            if size <= min(LARGEST_PICKLE, left):
                files[path.relative_to(root).as_posix()] = path.read_bytes()
                left -= size
    return files


def distinct_name(name: str, slot: int, taken: set[str]) -> str:
    """Returns ``name``, with the slot added to ``node/<host>/...`` if another node has the same host name."""
    parts = name.split("/")
    return "/".join([parts[0], f"{parts[1]}-{slot}", *parts[2:]]) if parts[0] == "node" and parts[1] in taken else name
