"""The nodes of a job as evidence."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from safelaunch.model import Lost, NodeEvidence
from safelaunch.supervise.cluster.exchange import Peer, PeerView
from safelaunch.supervise.cluster.messages import Beat, LeaderPage, NodeCard
from safelaunch.supervise.cluster.store import probe
from safelaunch.supervise.node_evidence import agent_state, digest_of, nodes_of
from tests.support.waiting import until

HERE, THERE = (
    NodeCard("", "here", 1, "0.1", "2.13"),
    NodeCard("", "there", 2, "0.1", "2.9", "abc", "127.0.0.1", hosts=True),
)
BEAT = Beat("a", 1, ranks=(2, 3), world=4)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def seen(beat: Beat | None = BEAT, silent_s: float = 0.0, *, others: tuple[Peer, ...] = (), **more: Any) -> PeerView:
    page = more.pop("page", LeaderPage(leader=1))
    return PeerView(page, "", peers=(Peer(2, THERE, beat, silent_s), *others), slot=1, **more)


def told(found: PeerView, store: Lost = "") -> NodeEvidence:
    own, *others = nodes_of(found, HERE, Beat("b", 1, ranks=(0, 1)), port=free_port(), store=store)
    assert (own.host, own.slot, own.ranks, own.here, own.is_gone) == ("here", 1, (0, 1), True, False)
    return others[0]


def test_responding_node_reports_its_ranks_and_versions() -> None:
    versions = {"torch": "2.9", "safelaunch": "0.1", "script": "abc"}
    assert told(seen()) == NodeEvidence("there", 2, (2, 3), last="watching", **versions)
    assert told(seen(replace(BEAT, submitted=(("crash.1", 2),), trouble="oh"))).last == "failing"


def test_host_of_a_silent_node_is_probed() -> None:
    found = told(seen(silent_s=20.04))
    assert (found.silent_s, found.probe, found.is_gone) == (20.0, "answers", True)


@pytest.mark.parametrize(
    ("own", "flags", "found"),
    [
        ("127.0.0.1", None, "answers"),
        ("127.0.0.1", 0x1003, "no route"),  # up, without a carrier
        ("127.0.0.1", 0x1042, "no route"),  # down
        ("192.0.2.1", None, "no route"),  # the address is gone
    ],
)
def test_node_without_a_link_probes_no_host(
    own: str, flags: int | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another route might lead to another host that answers."""

    def ioctl(of: socket.socket, what: int, request: bytes) -> bytes:
        got = as_it_is(of, what, request)
        return got if what != 0x8913 or flags is None else got[:16] + struct.pack("H", flags) + got[18:]

    as_it_is: Any = fcntl.ioctl
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert told(seen(silent_s=20.0, address=own)).probe == found


@pytest.mark.parametrize("doing", ["stopping", "ended"])
def test_node_that_left_is_not_probed(doing: Any) -> None:
    found = told(seen(replace(BEAT, doing=doing), 20.0))
    assert (found.last, found.probe, found.is_gone) == (doing, "", False)


def test_lost_store_belongs_to_its_host() -> None:
    assert told(seen(page=None), "closed").store == "closed"
    assert told(seen(page=None)).store == "", "it ended with this node's own agent"
    elsewhere = Peer(3, replace(THERE, host="third", hosts=False))
    assert told(seen(page=None, others=(elsewhere,)), "closed").store == "closed"
    also = Peer(3, replace(THERE, host="third"))
    assert told(seen(page=None, others=(also,)), "closed").store == "", "either may"


def test_probe_needs_an_address_and_accepts_a_refusal() -> None:
    assert probe("127.0.0.1", free_port(), deadline_s=2.0) == "answers"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert probe("127.0.0.1", listening.getsockname()[1], deadline_s=2.0) == "answers"
    assert probe("localhost", 1, deadline_s=2.0) == probe("", 1, deadline_s=2.0) == ""


def test_agent_state_follows_its_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        until(lambda: agent_state(process.pid) == "running")
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: agent_state(process.pid) == "stopped")
        process.kill()
        until(lambda: agent_state(process.pid) == "gone")
    assert agent_state(process.pid) == "gone"


def test_digests_distinguish_scripts(tmp_path: Path) -> None:
    one, other = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1")
    other.write_text("x = 2")
    assert len({digest_of(one), digest_of(other), digest_of(tmp_path / "none.py"), ""}) == 3
