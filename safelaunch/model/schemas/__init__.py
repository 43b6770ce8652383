"""JSON Schemas (2020-12) of the documents that programs read: two files, and what each ``--json`` prints.

They are files of this package. ``scripts/build/schemas.py`` makes them from the records that the documents are written
from.
"""

from __future__ import annotations

from pathlib import Path

NAMES = (
    "verdict.json",  # also `diagnose --json`
    "summary.json",  # of a sweep
    "status.json",
    "dump.json",
    "record.json",
    "gpus.json",
    "doctor.json",
    "presets.json",
    "preset.json",  # `presets show NAME --json`
    "calls.json",  # `diagnose --calls --json`
)


def path(document: str) -> Path:
    """The file of the schema of ``verdict.json`` or any other of ``NAMES``. Raises KeyError for other documents."""
    if document not in NAMES:
        raise KeyError(document)
    return Path(__file__).parent / document.replace(".json", ".schema.json")
