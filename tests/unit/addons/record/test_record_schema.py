"""The output of ``safelaunch record --json`` matches its JSON Schema."""

from __future__ import annotations

import json

import msgspec
import pytest
from jsonschema import ValidationError

from safelaunch.addons.record.document import document
from safelaunch.addons.record.rows import RecordingReport
from safelaunch.addons.record.slowness import verdict_of
from safelaunch.system.console import json_text
from tests.support.documents import check
from tests.unit.addons.record.recordings import recorded


def test_recording_document_matches_its_schema() -> None:
    straggler = recorded("straggler")
    found = document(RecordingReport(straggler, verdict_of(straggler)), "r1", "/folder")
    printed = json.loads(json_text(msgspec.to_builtins(found)))
    check("record.json", printed)
    del printed["findings"]
    with pytest.raises(ValidationError):
        check("record.json", printed)
