"""Nodes whose records are unreadable for a moment: a store in a dictionary, and a clock of the test."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.supervise.cluster import membership as sessions
from safelaunch.supervise.cluster.codec import Codec
from safelaunch.supervise.cluster.election import SILENT_S
from safelaunch.supervise.cluster.exchange import Outbox, PeerView
from safelaunch.supervise.cluster.membership import Membership
from safelaunch.supervise.cluster.messages import Beat, NodeCard
from tests.support.dict_store import DictStore

PREFIX = "safelaunch/1/test"


class Job:
    """Nodes of two ranks each; the first one leads."""

    def __init__(self, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.store = 100.0, DictStore()
        monkeypatch.setattr(sessions, "time", SimpleNamespace(monotonic=lambda: self.now))
        codec = Codec(PREFIX)
        self.sessions = [
            Membership(self.store, PREFIX, codec, NodeCard("", f"host{number}", 1, "0.1", "2.13"))  # type: ignore[arg-type]
            for number in range(nodes)
        ]
        self.beats = [Beat("", 0, (2 * number, 2 * number + 1), 2 * nodes) for number in range(nodes)]

    def say(self, node: int, **changes: Any) -> None:
        self.beats[node] = replace(self.beats[node], **changes)

    def round(self, *without: int) -> list[PeerView]:
        """Runs a round of all nodes but these."""
        self.now += 0.5
        living = [number for number in range(len(self.sessions)) if number not in without]
        return [self.sessions[number].round(Outbox(self.beats[number])) for number in living]

    def meet(self) -> None:
        for _ in range(3):
            seen = self.round()
        assert all(one.page is not None and one.page.covered for one in seen)

    def look(self, window_s: float = 2.0) -> None:
        """Opens an incident that all nodes join."""
        self.say(0, doing="suspecting", suspects=0, window_s=window_s)
        self.round()
        self.round()
        for number in range(len(self.beats)):
            self.say(number, incident=1)
        assert {one.page.phase for one in self.round() if one.page} == {"looking"}


def test_limit_ends_nothing_while_another_beat_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2, monkeypatch)
    job.meet()
    job.look()
    job.say(1, vote="alive")
    job.round()
    job.store.damages = lambda key: key == f"{PREFIX}/b/2"
    job.say(0, vote="unknown", at_limit=True)
    assert [one.page.phase for one in job.round() if one.page] != ["collecting", "collecting"]
    job.store.damages = lambda key: False
    seen = job.round()
    assert [(one.page.phase, one.page.result) for one in seen if one.page] == [("idle", "alive")] * 2


def test_node_with_unreadable_beats_becomes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2, monkeypatch)
    job.meet()
    job.store.damages = lambda key: key == f"{PREFIX}/b/2"
    for _ in range(int(2 * SILENT_S) + 2):
        leader, _ = job.round()
    assert leader.page is not None and leader.page.silent == (2,) and not leader.page.covered


def test_new_leader_reopens_incident_after_an_unreadable_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(3, monkeypatch)
    job.meet()
    for _ in range(int(2 * SILENT_S) + 6):  # the others respond, the leader doesn't
        job.round(0)
    job.store.damages = lambda key: key == f"{PREFIX}/b/2"
    job.round(0)
    job.store.damages = lambda key: False
    for _ in range(30):
        second, third = job.round(0)
    assert second.leads and not third.leads


def test_node_that_ends_first_is_neither_silent_nor_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it ends during an incident, and the other one has reached its limit."""
    job = Job(2, monkeypatch)
    job.meet()
    job.look()
    job.say(0, vote="unknown", at_limit=True)
    job.sessions[1].leave(job.beats[1])
    (seen,) = job.round(1)
    assert seen.page is not None and (seen.page.phase, seen.page.result) == ("idle", "unseen")
    job.say(0, suspects=1)
    for _ in range(int(2 * SILENT_S) + 2):
        (seen,) = job.round(1)
    assert seen.page is not None and (seen.page.incident, seen.page.silent, seen.page.covered) == (1, (), False)
    assert not seen.status.quiet and not seen.status.troubles


@pytest.mark.parametrize("seed", range(8))
def test_healthy_job_stays_covered_despite_unreadable_moments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job, chance = Job(3, monkeypatch), random.Random(seed)
    job.meet()
    job.store.damages = lambda key: chance.random() < 0.3
    job.say(1, doing="suspecting", suspects=0, vote="unknown", at_limit=True)
    job.say(2, vote="alive")
    results = set()
    for _ in range(200):
        for one in job.round():
            assert one.page is not None and one.page.covered and not one.page.silent
            results.add((one.page.phase, one.page.result))
            for number in range(3):
                job.say(number, incident=one.page.incident)
    assert results <= {("idle", ""), ("idle", "alive"), ("looking", "")}, results
