"""The JSON Schemas in the wheel: up to date, and true of the documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import incidents
import msgspec
import pytest
from jsonschema import Draft202012Validator, ValidationError

import safelaunch
from safelaunch import schemas
from safelaunch.colaunch.jobs import Job, Outcome, Track
from safelaunch.colaunch.summary import document
from safelaunch.model import BundlePlace, NodeAtFault
from safelaunch.system.console import json_text

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import schemas as writer


def check(name: str, found: Any) -> None:
    schema = json.loads(schemas.path(name).read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(found)


def test_the_schemas_are_those_of_the_records() -> None:
    """If this fails, run ``python scripts/schemas.py``."""
    assert writer.main(["--check"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", incidents.ALL)
def test_every_verdict_is_valid(name: str) -> None:
    verdict = incidents.ALL[name]().verdict
    found = json.loads(msgspec.json.encode(verdict))
    check("verdict.json", found)
    check("verdict.json", json.loads(json_text(msgspec.to_builtins(verdict))))
    with pytest.raises(ValidationError):
        check("verdict.json", {**found, "confidence": "certain"})
    with pytest.raises(ValidationError):
        check("verdict.json", {key: value for key, value in found.items() if key != "culprits"})
    check("verdict.json", {**found, "added_by_a_newer_version": 1})


def test_the_verdict_of_several_nodes_is_valid() -> None:
    verdict = msgspec.structs.replace(
        incidents.ALL["crash"]().verdict,
        bundle=BundlePlace("node1", "/bundles/one", True),
        nodes=(NodeAtFault("node2", "8-15", "it is gone"),),
    )
    check("verdict.json", json.loads(msgspec.json.encode(verdict)))


def test_the_summary_of_a_sweep_is_valid() -> None:
    ended = Outcome("hung", 124, 61.5, 40, ("GPU-1",), "/bundles/one", {"loss": 0.5, "note": "late"})
    tracks = [_track("waiting", None), _track("hung", ended)]
    found = json.loads(json.dumps(document(tracks)))
    check("summary.json", found)
    assert [job["state"] for job in found["jobs"]] == ["waiting", "hung"]
    with pytest.raises(ValidationError):
        check("summary.json", {"jobs": [{"name": "a"}]})


def _track(state: Any, outcome: Outcome | None) -> Track:
    track = Track(Job(name=state, words=("train.py",), where="sweep.yaml:3", params=(("lr", "0.1"),)))
    track.state, track.outcome = state, outcome
    return track


def test_a_document_without_a_schema_is_an_error() -> None:
    with pytest.raises(KeyError):
        schemas.path("manifest.json")
    assert safelaunch.schemas is schemas
