"""Rejects files and folders that contain no evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safelaunch import addons
from safelaunch.bundle.reading.files import Unreadable

if TYPE_CHECKING:
    pass


_NOTHING = (
    "it holds no bundle, no run directory, no log, no stacks and no Flight Recorder dumps (files whose names end in a"
    " rank number: nccl_trace_rank_0, comm_lib_trace_rank_0, dump_0.json)"
)
GIVE = (
    "Name a job's output, its stacks, its Flight Recorder dumps or a bundle. While the job hangs, `safelaunch dump"
    " --all` on its node needs no file."
)


def missing_reader() -> str:
    missing = addons.missing("readers")
    return f", and this installation can't read logs: its add-on {missing[0]!r} is missing" if missing else ""


_NAMES_SHOWN = 3
_MAGIC = {
    b"PK\x03\x04": "a zip archive, such as a checkpoint",
    b"\x7fELF": "a program",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"%PDF": "a PDF",
}


def reject_other_data(path: Path) -> None:
    """Raises Unreadable for binary data of a known kind, unless it is an archive."""
    with path.open("rb") as file:
        head = file.read(1 << 12)
    if head.startswith(b"\x80") or b'"pg_config"' in head:
        raise Unreadable("it is one Flight Recorder dump, or a pickle", "Name the folder with the dumps of all ranks.")
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
    if kind:
        raise Unreadable(f"it is {kind}, not the output of a job", GIVE)


def holds_nothing(folder: Path) -> Unreadable:
    names = sorted(path.name for path in folder.iterdir())
    more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    shown = " and ".join(filter(None, (", ".join(names[:_NAMES_SHOWN]), *more)))
    return Unreadable(f"{_NOTHING}, only {shown}" if names else "it is an empty folder", GIVE)
