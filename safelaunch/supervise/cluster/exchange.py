"""Records that a supervisor and its channel exchange: ``Outbox`` and ``PeerView``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.model import Lost
from safelaunch.supervise.cluster.messages import Beat, Decision, LeaderPage, NodeCard, Round
from safelaunch.supervise.control.protocol import NodeStatus


@dataclass(frozen=True, slots=True)
class PeerStatus:
    stopping: bool = False  # by a user or a scheduler
    troubles: tuple[str, ...] = ()
    quiet: int = 0  # number of nodes that haven't responded for a few seconds
    lost: bool = False
    restarting: bool = False  # torchrun restarts ranks that hadn't failed


@dataclass(frozen=True, slots=True)
class Submissions:
    chunks: Mapping[int, list[bytes]] = field(default_factory=dict)
    rounds: Mapping[int, Round] = field(default_factory=dict)
    missing: int = 1  # nodes that might still submit

    @property
    def is_complete(self) -> bool:
        return not self.missing


NO_SUBMISSIONS = Submissions()


@dataclass(frozen=True, slots=True)
class Peer:
    slot: int
    node: NodeCard
    beat: Beat | None = None
    silent_s: float = 0.0  # 0 while it responds


@dataclass(frozen=True, slots=True)
class PeerView:
    """This node's view of the job's nodes. Without a connection, ``peers`` and ``status`` keep their last values."""

    page: LeaderPage | None = None  # None: this node is alone
    why: str = "no answer yet"
    leads: bool = False
    silent_s: float = 0.0  # since the leader's page last changed
    submissions: Mapping[Round, Submissions] = field(default_factory=dict)
    decisions: Mapping[Round, Decision] = field(default_factory=dict)
    nodes: tuple[NodeCard, ...] = ()  # the first few other nodes
    status: PeerStatus = field(default_factory=PeerStatus)
    is_local: bool = False  # this host runs the store
    address: str = ""  # of this host, as the store sees it
    peers: tuple[Peer, ...] = ()  # nodes that lead, fail, stop or don't respond, if the leader reports them
    lost: Lost = ""
    slot: int = 0
    survey: tuple[float, tuple[NodeStatus, ...]] = (0.0, ())  # time of the last survey, and all nodes then
    published: Mapping[str, bytes] = field(default_factory=dict)  # the leader's values, by topic


@dataclass(frozen=True, slots=True)
class Outbox:
    """Records that this node sends in the next round."""

    beat: Beat
    submitted: Mapping[str, tuple[Round, list[bytes]]] = field(default_factory=dict)
    gathers: frozenset[str] = frozenset()  # rounds or kinds of rounds
    decisions: Mapping[Round, Decision] = field(default_factory=dict)
    published: Mapping[str, bytes] = field(default_factory=dict)  # by topic, if it leads
    wants_survey: bool = False
