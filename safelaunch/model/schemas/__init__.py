"""JSON Schemas (2020-12) of the documents that programs read: two files, and the output of each ``--json``.

``scripts/build/schemas.py`` generates the schema files from the documents' records. An add-on has its own schemas.
"""

from __future__ import annotations

from pathlib import Path

from safelaunch import addons

NAMES = (
    "verdict.json",  # also `diagnose --json`
    "status.json",
    "dump.json",
    "gpus.json",
    "doctor.json",
    "presets.json",
    "preset.json",  # `presets show NAME --json`
    "calls.json",  # `diagnose --calls --json`
    *(document for document, addon in addons.SCHEMAS.items() if addons.is_present(addon)),
)


def path(document: str) -> Path:
    """Returns the schema file of a document, ``verdict.json`` or another of ``NAMES``.

    Raises KeyError for other documents.
    """
    if document not in NAMES:
        raise KeyError(document)
    addon = addons.SCHEMAS.get(document)
    folder = Path(addons.folder(addon)) if addon is not None else Path(__file__).parent
    return folder / document.replace(".json", ".schema.json")
