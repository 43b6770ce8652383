"""What supervisors tell each other: a fixed set of records, bounded, typed, and signed where a key is given.

Each node writes a *beat*: who it is, what it sees, and how it votes. One of them, the leader, reads all beats and
writes one *page*, which everybody reads; what the others need to know of single nodes, it writes into ``Members``,
which they read where it has changed. So a round costs each node two operations, however many nodes there are.

The store has no authentication: what is read from it is a stranger's until it has passed ``Codec.read``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from safelaunch.model import AgentState, JobCondition, Verdict
from safelaunch.supervise.cluster.codec import MOST_CHUNKS

MOST_RANKS = 65_536
LONGEST_TEXT = 400  # characters of what a node says in words
MOST_TROUBLES = 8
MOST_ASKED = 4  # questions at once
MOST_SUBMITTED = 8  # rounds at once
MOST_MEMBERS = 64
MOST_TOPICS = 8

Vote = JobCondition | Literal["", "paused"]
"""What a node's looks show of its own ranks; empty until it has looked. ``paused``: it takes no part, because its ranks
announced a pause, or its looks were interrupted.
"""
Doing = Literal["watching", "suspecting", "stopping", "ended"]
Phase = Literal["idle", "looking", "collecting", "decided", "agreed"]
Action = Literal["kill", "restart", "dump"]
VoteResult = Literal["", "moving", "alive", "unseen", "stopped", "paused"]
"""Why an incident was closed without a verdict. ``unseen``: not every rank's node has voted, so each decides alone."""

_WireCount = Annotated[int, Meta(ge=0, lt=1 << 48)]
_WireRank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
_WireName = Annotated[str, Meta(max_length=255)]
Round = Annotated[str, Meta(max_length=64, pattern=r"^([a-z]+(\.[0-9]+)+)?$")]
"""What evidence and a decision are about: ``hang.3``, ``crash.1``, ``ask.SLOT.NUMBER``, ``TOPIC.EDITION``."""
QuestionKind = Literal["hang", "crash", "ask"]
TopicName = Annotated[str, Meta(max_length=32, pattern=r"^[a-z]+$")]
"""A subject on which monitors exchange values: every node submits its own, and the leader publishes one for all."""
_WireText = Annotated[str, Meta(max_length=LONGEST_TEXT)]
_WireSlots = Annotated[tuple[_WireCount, ...], Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag="v3"):
    """Base of all of them. The tag is the version of the protocol: what has another one cannot be read."""


class NodeCard(Message, frozen=True):
    """Who a supervisor is; written once.

    ``script``: a digest of it. ``address``: this host's, as the store sees it. ``hosts``: the store is on this host.
    ``node_rank``: as torchrun's command line gives it.
    """

    incarnation: _WireName
    host: _WireName
    pid: _WireCount
    safelaunch: _WireName
    torch: _WireName
    script: _WireName = ""
    address: _WireName = ""
    hosts: bool = False
    node_rank: Annotated[int, Meta(ge=0, lt=1 << 20)] | None = None


class NodeQuestion(Message, frozen=True):
    """What a node that asks all others wants: their evidence, or their part of an add-on's service (``kind``).

    ``number``: the asking node's own. ``ask``: what the service is asked, in msgpack.
    """

    number: _WireCount = 0
    kind: Annotated[str, Meta(max_length=64, pattern="^[a-z]+$")] = "dump"
    ask: Annotated[bytes, Meta(max_length=8192)] = b""


class Beat(Message, frozen=True):
    """What a node says of itself, every half second. ``count`` moves with each; no clock travels.

    ``ranks``: those that it sees, of ``world``. ``attempt``: torchrun's restarts, and how often it started the workers.
    ``suspects``: the newest incident that was closed when it began to suspect the job; ``window_s`` between two looks;
    ``at_limit``: the limit of its answer is reached. ``vote`` and ``agrees`` (it knows the decision) are about
    ``incident``. ``submitted``: the rounds in which its evidence is in the store, and in how many chunks; ``decided``:
    the newest round about which it has stored a decision. ``trouble``: what failed here on its own account, in words.
    ``agent``: how torchrun is. ``step``: the lowest of its ranks; -1: none has stepped. ``asks``: what it wants of all
    others. ``anew``: torchrun has ended its ranks though none had failed, as it does for a new round of the rendezvous,
    and has not started others yet.
    """

    incarnation: _WireName
    count: _WireCount
    ranks: Annotated[tuple[_WireRank, ...], Meta(max_length=4096)] = ()
    world: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0
    attempt: tuple[_WireCount, _WireCount] = (0, 0)
    doing: Doing = "watching"
    suspects: Annotated[int, Meta(ge=-1, lt=1 << 48)] = -1
    window_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 2.0
    at_limit: bool = False
    incident: _WireCount = 0
    vote: Vote = ""
    agrees: bool = False
    trouble: _WireText = ""
    agent: AgentState = ""
    step: Annotated[int, Meta(ge=-1, lt=1 << 48)] = -1
    restarting: bool = False
    submitted: Annotated[
        tuple[tuple[Round, Annotated[int, Meta(ge=0, le=MOST_CHUNKS)]], ...], Meta(max_length=MOST_SUBMITTED)
    ] = ()
    decided: Round = ""
    asks: NodeQuestion | None = None

    def round_of(self, kind: QuestionKind) -> Round:
        """The newest round of this kind in which its evidence is in the store; empty for none."""
        return next((round_ for round_, _ in self.submitted if round_.startswith(f"{kind}.")), "")


class LeaderPage(Message, frozen=True):
    """What the leader says to all. ``leader``: its slot; ``epoch``: how often somebody took over; ``count`` moves.

    ``covered``: the ranks of the nodes that are heard are all ranks of the job. ``silent``: slots that are not heard;
    ``quiet``: not for a few seconds. ``stopping``: somebody stops the job there. ``troubles``: by slot.
    ``incident`` is the newest; in phase ``idle`` it is closed with ``result``. ``crash``: how many crashes have had
    their verdict; ``failed``: slots whose ranks are part of the next one. ``asked``: what is wanted of all, by slot.
    ``world``: how many ranks the job has, if ``covered``. ``line``: who follows, should the leader be lost.
    ``members``: the edition of ``Members``; 0: there is none yet. ``anew``: slots whose ranks torchrun starts anew.
    ``topics``: those that the leader gathers; ``published``: the edition of its newest value, by topic.
    """

    leader: _WireCount
    epoch: _WireCount = 0
    count: _WireCount = 0
    nodes: _WireCount = 1
    covered: bool = False
    silent: _WireSlots = ()
    incident: _WireCount = 0
    phase: Phase = "idle"
    result: VoteResult = ""
    window_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 2.0
    quiet: _WireSlots = ()
    stopping: _WireSlots = ()
    troubles: Annotated[tuple[tuple[_WireCount, _WireText], ...], Meta(max_length=MOST_TROUBLES)] = ()
    crash: _WireCount = 0
    failed: _WireSlots = ()
    asked: Annotated[tuple[tuple[_WireCount, NodeQuestion], ...], Meta(max_length=MOST_ASKED)] = ()
    world: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0
    line: _WireSlots = ()
    members: _WireCount = 0
    restarting: _WireSlots = ()
    topics: Annotated[tuple[TopicName, ...], Meta(max_length=MOST_TOPICS)] = ()
    published: Annotated[tuple[tuple[TopicName, _WireCount], ...], Meta(max_length=MOST_TOPICS)] = ()

    @property
    def questions(self) -> dict[Round, NodeQuestion]:
        """What is wanted of all, by the round in which it is answered."""
        return {ask_round(slot, question): question for slot, question in self.asked}

    def is_over(self, round_: Round) -> bool:
        """Whether nobody needs the evidence of this round any more."""
        if round_.startswith("hang."):
            return round_ != f"hang.{self.incident}" or self.phase in ("idle", "agreed")
        return round_.startswith("ask.") and round_ not in self.questions


def ask_round(slot: int, question: NodeQuestion) -> Round:
    return f"ask.{slot}.{question.number}"


def node_count(page: LeaderPage | None) -> int:
    """How many nodes take part; 1 while there is nobody to talk to."""
    return page.nodes if page is not None else 1


class NodesBySlot(Message, frozen=True):
    """Nodes that the leader tells all others of, by slot: those that something is to be said of first.

    So nobody but the leader reads the beats of others. Of a beat only what lasts: it has no count, and no vote.
    """

    nodes: Annotated[tuple[tuple[_WireCount, NodeCard, Beat], ...], Meta(max_length=MOST_MEMBERS)] = ()


class Decision(Message, frozen=True):
    """What all nodes do about a round. ``host``, ``path``: where the whole bundle is, as its writer plans.

    ``step``: the lowest that a rank has marked.
    """

    verdict: Verdict
    action: Action
    host: _WireName
    path: Annotated[str, Meta(max_length=4096)]
    step: int | None = None
