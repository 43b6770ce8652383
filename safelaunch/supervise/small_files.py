"""Which files of a node's bundle travel to the node that writes the whole: those about the node, and small pickles."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from safelaunch.model import NodeFiles, node_file

MOST_BYTES = 4 << 20
LARGEST_PICKLE = 512 << 10
LARGEST_TEXT = 64 << 10
_OF_THE_NODE = {node_file(field) for field in NodeFiles.__struct_fields__}


def small_files(root: Path, *, records: bool) -> dict[str, bytes]:
    """Path in the bundle → content, without secrets, as it is written there. ``records``: Flight Recorders as well.

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
    left = MOST_BYTES
    for path in sorted(root.glob("ranks/*/flight_recorder.pickle")) if records else ():
        with suppress(OSError):
            size = path.stat().st_size
            if size <= min(LARGEST_PICKLE, left):
                found[path.relative_to(root).as_posix()] = path.read_bytes()
                left -= size
    return found


def apart(name: str, slot: int, taken: set[str]) -> str:
    """``node/<host>/...`` of a node whose host name another one has as well: with its number."""
    parts = name.split("/")
    return "/".join([parts[0], f"{parts[1]}-{slot}", *parts[2:]]) if parts[0] == "node" and parts[1] in taken else name
