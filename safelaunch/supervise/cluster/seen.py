"""What a supervisor knows of the others of its job at a moment, as its connection to the store has told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from safelaunch.model import Lost
from safelaunch.supervise.cluster.messages import Beat, Decision, Doing, Node, Page, Question


@dataclass(frozen=True, slots=True)
class Word:
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
class Answers:
    """What the other nodes have handed in for a dump that this one has asked for: by slot, chunks.

    ``complete``: every node that is heard has. ``number``: of the dump.
    """

    number: int
    complete: bool
    evidence: Mapping[int, list[bytes]]


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

    ``silent_s``: how long the leader has not been heard. ``leads``: this node is the leader; then ``complete`` says
    that the evidence of the incident is there or need not be waited for, and ``evidence`` has that of the other nodes.
    ``nodes``: the others, the first few. ``word``: what they said last, also of before the connection was lost.

    ``peers``: of the others those that lead, are not heard, fail or are stopped, as far as the leader tells of them;
    those of before the connection was ``lost``. ``crash``: the newest verdict about a crash; ``halves``: the evidence
    of others about it, by slot, where this node gathers it.

    ``around``: every node as of some time, the last at which ``look_around`` asked; ``answers``: to ``ask_all``.
    ``questions``: what other nodes ask of all, by number.

    ``checks``: where this node leads, by slot, edition and bytes of the others' consistency checks; ``wrong``: what the
    leader has found in them.
    """

    page: Page | None = None
    why: str = "no answer yet"
    leads: bool = False
    complete: bool = False
    silent_s: float = 0.0
    decision: tuple[int, Decision] | None = None
    evidence: Mapping[int, list[bytes]] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    word: Word = field(default_factory=Word)
    is_local: bool = False  # the store's host is this one
    peers: tuple[Peer, ...] = ()
    lost: Lost = ""
    slot: int = 0
    crash: tuple[int, Decision] | None = None
    halves: Mapping[int, list[bytes]] = field(default_factory=dict)
    around: tuple[float, tuple[Neighbour, ...]] = (0.0, ())
    answers: Answers | None = None
    checks: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)
    wrong: bytes = b""
    questions: Mapping[int, Question] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Crash:
    """This node's part in a crash: its evidence, whether it reads that of the others, the verdict it has reached."""

    chunks: list[bytes] = field(default_factory=list)
    gathers: bool = False
    decision: Decision | None = None
