"""Writes the JSON Schemas in ``safelaunch/model/schemas`` and in add-ons, from the records of the documents.

``--check``: writes nothing, and exits with 1 where a file differs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from importlib import import_module
from itertools import pairwise
from typing import Any

import msgspec

from safelaunch import schemas
from safelaunch.cli import doctor, dump, gpus, presets
from safelaunch.cli.status import AnsweringRun, SilentRun
from safelaunch.model import Verdict, evidence
from safelaunch.report.calls import CallDocument
from safelaunch.verdict.causes import CAUSES

# The records of a document; ``list``: it is a list of them.
DOCUMENTS: dict[str, tuple[tuple[type, ...], str]] = {
    "verdict.json": ((Verdict,), "A verdict of safelaunch"),
    "status.json": ((list, AnsweringRun, SilentRun), "What safelaunch status --json prints"),
    "dump.json": ((dump.Document,), "What safelaunch dump --json prints"),
    "gpus.json": ((gpus.Document,), "What safelaunch gpus --json prints"),
    "doctor.json": ((doctor.Document,), "What safelaunch doctor --json prints"),
    "presets.json": ((list, presets.SummaryDocument), "What safelaunch presets --json prints"),
    "preset.json": ((presets.PresetDocument,), "What safelaunch presets show NAME --json prints"),
    "calls.json": ((list, CallDocument), "What safelaunch diagnose --calls --json prints"),
}

OF_ADDONS = {
    "summary.json": ("sweep.summary", "Summary", "The summary of a sweep of safelaunch colaunch"),
    "record.json": ("record.document", "RecordDocument", "What safelaunch record --json prints"),
}
for document, (module, record, title) in OF_ADDONS.items():
    if document in schemas.NAMES:
        DOCUMENTS[document] = (getattr(import_module(f"safelaunch.addons.{module}"), record),), title


def schema_of(document: str) -> dict[str, Any]:
    """Returns the schema of a document, such as ``verdict.json``. It allows keys that newer versions might add."""
    records, title = DOCUMENTS[document]
    is_list = records[0] is list
    found, definitions = msgspec.json.schema_components(records[is_list:], ref_template="#/$defs/{name}")
    if Verdict in records:
        properties = definitions["Verdict"]["properties"]
        properties["schema"] = {"const": 1}
        # A list of examples, not of all values: a newer version might know more causes.
        properties["cause"] = {"type": "string", "examples": sorted(CAUSES)}
    for definition in definitions.values():
        if "description" in definition:
            definition["description"] = " ".join(definition["description"].replace("``", "`").split())
        for name, text in meanings(definition.get("title", "")).items():
            definition["properties"][name] = {**definition["properties"][name], "description": text}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    one = found[0] if len(found) == 1 else {"anyOf": list(found)}
    return {**head, **({"type": "array", "items": one} if is_list else one), "$defs": definitions}


def meanings(record: str) -> dict[str, str]:
    """Returns the meanings of the fields of a record of ``safelaunch.model.evidence``: the strings below them."""
    tree = ast.parse(inspect.getsource(evidence))
    classes = {one.name: one.body for one in tree.body if isinstance(one, ast.ClassDef)}
    return {
        field.target.id: " ".join(text.value.value.replace("``", "`").split())
        for field, text in pairwise(classes.get(record, ()))
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


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
