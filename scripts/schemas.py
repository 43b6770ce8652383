"""Writes the JSON Schemas in ``safelaunch/schemas`` from the records that the documents are written from.

``--check``: writes nothing, and exits with 1 where a file differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import msgspec

from safelaunch import schemas
from safelaunch.colaunch.summary import Summary
from safelaunch.diagnose.causes import CAUSES
from safelaunch.model import Verdict

DOCUMENTS: dict[str, tuple[type, str]] = {
    "verdict.json": (Verdict, "A verdict of safelaunch"),
    "summary.json": (Summary, "The summary of a sweep of safelaunch colaunch"),
}


def schema_of(document: str) -> dict[str, Any]:
    """The schema of ``verdict.json`` or ``summary.json``. It allows keys that newer versions may add."""
    record, title = DOCUMENTS[document]
    made = msgspec.json.schema(record)
    if record is Verdict:
        properties = made["$defs"]["Verdict"]["properties"]
        properties["schema"] = {"const": 1}
        # A list of examples, not of all values: a newer version may know more causes.
        properties["cause"] = {"type": "string", "examples": sorted(CAUSES)}
    for definition in made["$defs"].values():
        definition["description"] = " ".join(definition["description"].replace("``", "`").split())
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**head, **made}


def text_of(document: str) -> str:
    return json.dumps(schema_of(document), indent=2) + "\n"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args(words).check
    stale = [name for name in DOCUMENTS if not _is_current(name)]
    for name in stale:
        print(f"{schemas.path(name)} is out of date" if check else f"writing {schemas.path(name)}")
        if not check:
            schemas.path(name).write_text(text_of(name), "utf-8")
    return 1 if check and stale else 0


def _is_current(name: str) -> bool:
    path = schemas.path(name)
    return path.is_file() and path.read_text("utf-8") == text_of(name)


if __name__ == "__main__":
    sys.exit(main())
