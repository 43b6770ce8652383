"""The summary of a sweep is what its JSON Schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import ValidationError

from safelaunch.addons.sweep.jobs import AttemptOutcome, SweepJob, Track
from safelaunch.addons.sweep.summary import document
from tests.support.documents import check


def test_summary_is_valid_by_schema() -> None:
    ended = AttemptOutcome("hung", 124, 61.5, 40, ("GPU-1",), "/bundles/one", {"loss": 0.5, "note": "late"})
    tracks = [_track("waiting", None), _track("hung", ended)]
    found = json.loads(json.dumps(document(tracks)))
    check("summary.json", found)
    assert [job["state"] for job in found["jobs"]] == ["waiting", "hung"]
    with pytest.raises(ValidationError):
        check("summary.json", {"jobs": [{"name": "a"}]})


def _track(state: Any, outcome: AttemptOutcome | None) -> Track:
    track = Track(SweepJob(name=state, words=("train.py",), where="sweep.yaml:3", params=(("lr", "0.1"),)))
    track.state, track.outcome = state, outcome
    return track
