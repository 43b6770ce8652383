"""Examinations: ``service.Examiner``."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from safelaunch import addons
from safelaunch.addons.record.recording import Recording
from safelaunch.addons.slow.service import Examination, Examine, Examiner
from tests.unit.addons.record.recordings import FORWARD, recording


def test_nodes_find_the_service_by_its_name() -> None:
    assert isinstance(addons.service(Examiner.name), Examiner)
    found = addons.service("record")
    assert found is not None and found.name == "record" and addons.service("other") is None


def test_ranks_that_were_not_sampled_on_purpose_are_not_missing() -> None:
    seen = replace(recording({FORWARD: 1.0}, {FORWARD: 1.0}), world_size=64)
    other = Examination(Recording(world_size=64), late={"b": [[]]})
    merged = Examiner().merged(Examine(0.0), [Examination(seen), other], ["a note"])
    assert [(rank.rank, rank.missing) for rank in merged.recording.ranks] == [(0, ""), (1, "")]
    assert merged.recording.notes == ["a note"]


@pytest.mark.parametrize("share", [float("nan"), float("inf"), -0.1, 3.0])
def test_impossible_numbers_of_another_node_are_refused(share: float) -> None:
    for readings in ({"shares": {"disk": share}}, {"connections": [{"local": "", "remote": "", "busy": share}]}):
        part = msgspec.msgpack.encode({"readings": [{"rank": 0, **readings}]})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(part, type=Examination)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"since_unix_s": share * 1e12}), type=Examine)
