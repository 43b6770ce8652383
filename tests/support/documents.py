"""Checks documents against the published JSON Schemas."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from safelaunch import schemas


def check(name: str, found: Any) -> None:
    """Raises jsonschema.ValidationError."""
    schema = json.loads(schemas.path(name).read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(found)
