"""JSON Schemas (2020-12) of the documents that programs read: ``verdict.json`` and ``summary.json``.

They are files of this package, made by ``scripts/schemas.py`` from the records that the documents are written from.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("verdict.json", "summary.json")


def path(document: str) -> Path:
    """The file of the schema of ``verdict.json`` or ``summary.json``. Raises KeyError for any other document."""
    if document not in NAMES:
        raise KeyError(document)
    return Path(__file__).parent / document.replace(".json", ".schema.json")
