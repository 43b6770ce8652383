"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.model import Lost
from safelaunch.supervise.cluster.messages import Beat, Decision, LeaderPage, NodeCard, Round
from safelaunch.supervise.control.protocol import NodeStatus


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """What other nodes have said of themselves. ``stopping``: a user or a scheduler stops the job there.

    ``troubles``: what failed there on its own account. ``quiet``: how many have not been heard for a few seconds.
    ``lost``: there is no connection any more. ``anew``: torchrun starts ranks anew there, none of which had failed.
    """

    stopping: bool = False
    troubles: tuple[str, ...] = ()
    quiet: int = 0
    lost: bool = False
    restarting: bool = False


@dataclass(frozen=True, slots=True)
class Submissions:
    """What the other nodes have submitted in a round, by slot, in chunks.

    ``rounds``: of each slot, the round itself: of a kind that has editions, the newest that was read. ``missing``: of
    how many nodes with ranks it may still come.
    """

    chunks: Mapping[int, list[bytes]] = field(default_factory=dict)
    rounds: Mapping[int, Round] = field(default_factory=dict)
    missing: int = 1

    @property
    def is_complete(self) -> bool:
        return not self.missing


NO_SUBMISSIONS = Submissions()


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node, as far as it is known here. ``beat``: its last words; ``silent_s``: 0 while it is heard."""

    slot: int
    node: NodeCard
    beat: Beat | None = None
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerView:
    """What is known at this moment. ``page`` None: there is nobody to talk to, and ``why``.

    ``silent_s``: how long the leader has not been heard. ``leads``: this node is the leader. ``gathered``: what others
    have submitted, in the rounds in which this node gathers it; ``decisions``: those that are known, by round.
    ``nodes``: the others, the first few. ``status``: what they said last, also of before the connection was lost.

    ``peers``: of the others those that lead, are not heard, fail or are stopped, as far as the leader tells of them;
    those of before the connection was ``lost``. ``around``: every node as of some time, the last at which
    ``request_survey`` asked. ``published``: the leader's values, by topic.
    """

    page: LeaderPage | None = None
    why: str = "no answer yet"
    leads: bool = False
    silent_s: float = 0.0
    submissions: Mapping[Round, Submissions] = field(default_factory=dict)
    decisions: Mapping[Round, Decision] = field(default_factory=dict)
    nodes: tuple[NodeCard, ...] = ()
    status: PeerStatus = field(default_factory=PeerStatus)
    is_local: bool = False  # the store's host is this one
    address: str = ""  # this host's own, as the others know it
    peers: tuple[Peer, ...] = ()
    lost: Lost = ""
    slot: int = 0
    survey: tuple[float, tuple[NodeStatus, ...]] = (0.0, ())
    published: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outbox:
    """What this node has to say in the next round of the channel.

    ``submitted``: its evidence, one round of each kind. ``gathers``: the rounds, or kinds, of which it reads what the
    others have submitted. ``decisions``: that it has reached. ``published``: its values for all nodes, by topic, if it
    leads.
    """

    beat: Beat
    submitted: Mapping[str, tuple[Round, list[bytes]]] = field(default_factory=dict)
    gathers: frozenset[str] = frozenset()
    decisions: Mapping[Round, Decision] = field(default_factory=dict)
    published: Mapping[str, bytes] = field(default_factory=dict)
    wants_survey: bool = False
