"""What a supervisor knows of the others of its job at a moment, as its connection to the store has told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.model import Lost
from safelaunch.supervise.cluster.messages import Beat, Decision, Doing, Node, Page, Round


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
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A node of the job, this one included, as its newest beat says. ``step``: the lowest of its ranks."""

    host: str
    ranks: tuple[int, ...]
    step: int | None
    doing: Doing
    heard: bool = True
    leads: bool = False
    here: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Gathered:
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


NOTHING = Gathered()


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node, as far as it is known here. ``beat``: its last words; ``silent_s``: 0 while it is heard."""

    slot: int
    node: Node
    beat: Beat | None = None
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known at this moment. ``page`` None: there is nobody to talk to, and ``why``.

    ``silent_s``: how long the leader has not been heard. ``leads``: this node is the leader. ``gathered``: what others
    have submitted, in the rounds in which this node gathers it; ``decisions``: those that are known, by round.
    ``nodes``: the others, the first few. ``status``: what they said last, also of before the connection was lost.

    ``peers``: of the others those that lead, are not heard, fail or are stopped, as far as the leader tells of them;
    those of before the connection was ``lost``. ``around``: every node as of some time, the last at which
    ``look_around`` asked. ``wrong``: what the leader has found in the consistency checks of all.
    """

    page: Page | None = None
    why: str = "no answer yet"
    leads: bool = False
    silent_s: float = 0.0
    gathered: Mapping[Round, Gathered] = field(default_factory=dict)
    decisions: Mapping[Round, Decision] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    status: PeerStatus = field(default_factory=PeerStatus)
    is_local: bool = False  # the store's host is this one
    address: str = ""  # this host's own, as the others know it
    peers: tuple[Peer, ...] = ()
    lost: Lost = ""
    slot: int = 0
    around: tuple[float, tuple[Neighbour, ...]] = (0.0, ())
    wrong: bytes = b""


@dataclass(frozen=True, slots=True)
class Saying:
    """What this node has to say in the next round of the channel.

    ``submitted``: its evidence, one round of each kind. ``gathers``: the rounds, or kinds, of which it reads what the
    others have submitted. ``decisions``: that it has reached. ``wrong``: what it has found in the checks of all.
    """

    beat: Beat
    submitted: Mapping[str, tuple[Round, list[bytes]]] = field(default_factory=dict)
    gathers: frozenset[str] = frozenset()
    decisions: Mapping[Round, Decision] = field(default_factory=dict)
    wrong: bytes = b""
    looks_around: bool = False
