"""A supervisor's part in a council: a suspicion, an incident's result, and notices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.capture.pages import Roster
from safelaunch.job.argv import CommandLine
from safelaunch.job.paths import RunPaths
from safelaunch.job.plan import Plan
from safelaunch.settings.options import Settings
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.election import SILENT_S
from safelaunch.supervise.cluster.exchange import PeerStatus, PeerView
from safelaunch.supervise.cluster.messages import LeaderPage, NodeCard, VoteResult
from safelaunch.supervise.cluster.rendezvous import SharedStore
from safelaunch.supervise.cluster.store import Address
from safelaunch.supervise.control.protocol import NodeStatus
from safelaunch.supervise.council import SUCCEED_S, Council, RoundOutcome
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.node_notices import NodeNotices
from safelaunch.supervise.watch.progress import Watch
from safelaunch.supervise.watch.stall import Policy


@pytest.fixture
def node(tmp_path: Path) -> Council:
    """A council whose channel is not started: a test says what it has read (``say``)."""
    plan = Plan((), {}, (), "train", tmp_path, None, Settings(), True, (), command=CommandLine((), (), ("train.py",)))
    about = JobContext("train", tmp_path, tmp_path / "bundles", tmp_path, {}, host="here")
    made = Council(plan, about, Watch(Roster(RunPaths(tmp_path)), Policy(5.0, 60.0, 60.0), 0.0))
    made.channel.view = PeerView(LeaderPage(leader=1, nodes=2, covered=True, world=1), why="")
    return made


def say(node: Council, *, page: dict[str, Any] | None = None, **changes: Any) -> None:
    seen = node.channel.view
    assert seen.page is not None
    node.channel.view = dataclasses.replace(seen, page=replace(seen.page, **(page or {})), **changes)


def test_incident_is_not_requested_without_coverage_or_leader(node: Council) -> None:
    assert node.suspect(2.0)
    assert (node.channel.beat.doing, node.channel.beat.suspects) == ("suspecting", 0)
    say(node, silent_s=SILENT_S)
    assert not node.suspect(2.0)
    assert "no message from the leader" in node.why_alone
    for page in ({"covered": False}, {"covered": True, "world": 4}):
        say(node, silent_s=0.0, page=page)
        assert not node.suspect(2.0)
        assert "not every rank" in node.why_alone
    node.channel.view = PeerView(why="no store at h:1: refused")
    assert not node.suspect(2.0)
    assert (node.is_covered, node.why_alone) == (False, "no store at h:1: refused")


def test_incident_is_joined_once_and_answers_own_suspicion(node: Council) -> None:
    assert node.pending_call() is None
    say(node, page={"phase": "looking", "incident": 3})
    call = node.pending_call()
    assert call is not None and call.incident == 3
    node.suspect(2.0)
    assert node.channel.beat.suspects == 3, "it would have the next one opened"
    assert node.join_call() == call
    assert node.pending_call() is None
    assert (node.channel.beat.incident, node.channel.beat.vote, node.channel.beat.suspects) == (3, "", 2)


@pytest.mark.parametrize(
    ("page", "outcome"),
    [
        ({"incident": 3, "phase": "looking"}, None),
        ({"incident": 3, "phase": "collecting"}, "hang"),
        ({"incident": 3, "phase": "decided"}, "hang"),
        ({"incident": 3, "phase": "agreed"}, "hang"),
        *(({"incident": 3, "phase": "idle", "result": r}, r) for r in ("moving", "alive", "stopped", "paused")),
        ({"incident": 4, "phase": "looking"}, "unseen"),
        ({"incident": 2, "phase": "idle"}, "alone"),
    ],
)
def test_outcome_follows_from_the_leaders_page(
    node: Council, page: dict[str, Any], outcome: RoundOutcome | None
) -> None:
    say(node, page=page)
    assert node.outcome(3) == outcome


def test_silent_leader_is_awaited_until_a_successor_can_lead(node: Council) -> None:
    say(node, page={"incident": 3, "phase": "looking"}, silent_s=SILENT_S + 1)
    assert node.outcome(3) is None
    say(node, silent_s=SILENT_S + SUCCEED_S)
    assert node.outcome(3) == "alone"


@pytest.mark.parametrize("result", ["alive", "moving"])
def test_incident_that_ended_before_the_look_gives_its_result(node: Council, result: VoteResult) -> None:
    node.suspect(2.0)
    assert node.outcome(0) is None
    say(node, page={"incident": 1, "phase": "idle", "result": result})
    assert node.outcome(0) == result


def test_survey_older_than_the_request_is_ignored(node: Council) -> None:
    here = NodeStatus("here", "0-1", 7, doing="watching", here=True)
    say(node, survey=(5.0, (here,)))
    assert node.request_survey()
    assert (node.survey(4.0), node.survey(5.0)) == ((here,), None)
    node.channel.view = PeerView(why="gone")
    assert not node.request_survey()


def test_leader_queries_nccl_and_ranks_live_until_agreement(node: Council) -> None:
    assert not node.queries_nccl and node.why_ranks_must_live == "the nodes have yet to agree"
    say(node, leads=True)
    assert node.queries_nccl
    say(node, leads=False, silent_s=SILENT_S)
    assert node.queries_nccl and node.why_ranks_must_live == "", "alone, each asks, and ends its ranks"


# --- notices ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def notices() -> NodeNotices:
    """The notices of the first of three nodes."""
    channel = Channel(NodeCard("", "here", 1, "0.1", "2.13", node_rank=0))
    return NodeNotices(SharedStore(Address("h", 1), "x", nodes=3), channel, ("here", "gone", "there"))


def changes(notices: NodeNotices, seen: PeerView, *seconds: int, ending: bool = False) -> None:
    for second in seconds:
        notices.note_changes(seen, float(second), covered=seen.page is not None and seen.page.covered, ending=ending)


COVERED = PeerView(LeaderPage(leader=1, nodes=2, covered=True, world=4), why="")
SILENT = PeerView(LeaderPage(leader=1, silent=(2,)), why="")
LOST = PeerView(why="it has closed the connection", lost="closed")


def test_changes_of_other_nodes_are_reported_once(notices: NodeNotices, capfd: pytest.CaptureFixture[str]) -> None:
    changes(notices, COVERED, 0)
    changes(notices, SILENT, 1, 2)
    changes(notices, LOST, *range(3, 20))
    assert notices.apart, "a later crash knows it, too"
    changes(notices, COVERED, 20, 21, 22)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 3
    assert "no message from a node" in said[0] and "lost contact with the other nodes" in said[1]
    assert "is restored" in said[2]


def test_node_whose_ranks_ended_reports_no_lost_contact(
    notices: NodeNotices, capfd: pytest.CaptureFixture[str]
) -> None:
    """At a healthy end, the store ends with its node, and the others' torchruns end later."""
    changes(notices, COVERED, 0)
    changes(notices, SILENT, 1, ending=True)
    changes(notices, LOST, *range(2, 60), ending=True)
    assert capfd.readouterr().err == ""
    changes(notices, LOST, *range(60, 70))  # torchrun has restarted the ranks
    assert capfd.readouterr().err.count("lost contact with the other nodes") == 1


def test_another_torch_version_is_reported_once(notices: NodeNotices, capfd: pytest.CaptureFixture[str]) -> None:
    changes(notices, dataclasses.replace(COVERED, nodes=(NodeCard("b", "there", 1, "0.1", "2.9"),)), 0, 1, 2)
    assert capfd.readouterr().err.splitlines() == ["safelaunch: torch differs between nodes: 2.13 here, 2.9 on there"]


def come(notices: NodeNotices, number: int, *nodes: NodeCard, seconds: range) -> None:
    page = LeaderPage(leader=1, nodes=number) if number else None
    notices._channel.view = PeerView(page, nodes=nodes)
    for second in seconds:
        notices.note_rendezvous(page, float(second))


THERE = NodeCard("b", "there.lan", 1, "0.1", "2.13", node_rank=2)


def test_incomplete_rendezvous_is_reported_and_remembered(
    notices: NodeNotices, capfd: pytest.CaptureFixture[str]
) -> None:
    assert notices.rendezvous is None
    come(notices, 1, seconds=range(100))
    come(notices, 2, THERE, seconds=range(100, 200))
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("no rank yet: 1 of 3 nodes have joined the rendezvous (here); node ranks 1-2 have not")
    assert second.endswith("2 of 3 nodes have joined the rendezvous (here, there.lan); node rank 1 has not")
    come(notices, 1, seconds=range(200, 201))
    come(notices, 0, seconds=range(201, 202))
    told = notices.rendezvous
    assert told is not None
    assert (told.wanted, told.come, told.hosts) == (3, 2, ("here", "there.lan"))
    assert (told.absent_ranks, told.absent_hosts, told.waited_s, told.store) == ((1,), ("gone",), 201.0, "")
    come(notices, 3, seconds=range(202, 203))
    assert notices.rendezvous is None


@pytest.mark.parametrize("hosts", [(), ("here", "there")])
def test_mismatched_host_list_names_no_absent_host(notices: NodeNotices, hosts: tuple[str, ...]) -> None:
    notices._hosts = hosts
    come(notices, 2, THERE, seconds=range(3))
    assert notices.rendezvous is not None and notices.rendezvous.absent_hosts == ()


def test_rendezvous_stopped_on_another_node_is_not_incomplete(node: Council, notices: NodeNotices) -> None:
    node._notices = notices
    come(notices, 2, THERE, seconds=range(3))
    assert node.rendezvous is not None
    say(node, status=PeerStatus(stopping=True))
    assert node.rendezvous is None
