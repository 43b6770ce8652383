"""Examinations: ``service.Examiner``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from safelaunch import addons
from safelaunch.addons.record.recording import Recording
from safelaunch.addons.slow import service
from safelaunch.addons.slow.service import Examination, Examine, Examiner, late_by_arrivals
from safelaunch.capture.look import Target
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


def late(monkeypatch: pytest.MonkeyPatch, arrivals: dict[int, Any], *, is_whole: bool) -> tuple[int, ...] | None:
    monkeypatch.setattr(service, "arrivals_of", lambda socket: arrivals[int(socket)])
    monkeypatch.setattr(service, "has_driver", lambda environ: False)
    targets = tuple(Target(rank, rank, 1, 1, socket=Path(str(rank))) for rank in arrivals)
    watch = SimpleNamespace(targets=lambda: targets)
    return late_by_arrivals(SimpleNamespace(watch=watch, is_whole=is_whole), 0.0)  # type: ignore[arg-type]


def pairs_and_world(late_rank: int, ranks: int = 4) -> dict[int, dict[tuple[str, int], int]]:
    """Returns arrivals of ranks that reduce in pairs and then all together, each step in 100 ms."""
    arrivals: dict[int, dict[tuple[str, int], int]] = {rank: {} for rank in range(ranks)}
    for step in range(100):
        for rank in range(ranks):
            begin, is_late = 100 * step, rank == late_rank
            arrivals[rank][f"pair{rank // 2}", step] = (begin + (70 if is_late else 40)) * 1_000_000
            arrivals[rank]["world", step] = (begin + (75 if rank // 2 == late_rank // 2 else 45)) * 1_000_000
    return arrivals


def test_peer_of_a_rank_that_does_not_answer_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = pairs_and_world(3)
    assert late(monkeypatch, arrivals, is_whole=True) == (3,)
    assert late(monkeypatch, {**arrivals, 3: {}}, is_whole=True) is None


def test_rank_that_waits_for_another_node_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {rank: calls for rank, calls in pairs_and_world(3).items() if rank != 3}
    assert late(monkeypatch, here, is_whole=False) is None
    assert late(monkeypatch, pairs_and_world(3), is_whole=False) == (3,)
