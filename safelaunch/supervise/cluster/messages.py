"""Records that supervisors exchange: a fixed set, bounded, typed, and signed if the job has a key.

Each node writes a *beat* about itself: its ranks, what it sees, its vote. The leader reads all beats and writes one
*page* that every node reads. Nodes read ``NodesBySlot``, which has facts about single nodes, only when it changes. So a
round costs each node two operations, whatever the number of nodes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from safelaunch.model import AgentState, JobCondition, Verdict
from safelaunch.supervise.cluster.codec import MOST_CHUNKS

MOST_RANKS = 65_536
LONGEST_TEXT = 400  # characters
MOST_TROUBLES = 8
MOST_ASKED = 4
MOST_SUBMITTED = 8
MOST_MEMBERS = 64
MOST_TOPICS = 8

Vote = JobCondition | Literal["", "paused"]
"""Job's condition by a node's two looks; empty before them. ``paused``: the node abstains, because its ranks announced
a pause or its looks were interrupted."""
Doing = Literal["watching", "suspecting", "stopping", "ended"]
Phase = Literal["idle", "looking", "collecting", "decided", "agreed"]
Action = Literal["kill", "restart", "dump"]
VoteResult = Literal["", "moving", "alive", "unseen", "stopped", "paused"]
"""Reason for closing an incident without a verdict. ``unseen``: a node didn't vote, so each node decides alone."""

_WireCount = Annotated[int, Meta(ge=0, lt=1 << 48)]
WireRank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
_WireName = Annotated[str, Meta(max_length=255)]
Round = Annotated[str, Meta(max_length=64, pattern=r"^([a-z]+(\.[0-9]+)+)?$")]
"""Subject of evidence and decisions: ``hang.3``, ``crash.1``, ``ask.SLOT.NUMBER``, ``TOPIC.EDITION``."""
QuestionKind = Literal["hang", "crash", "ask"]
TopicName = Annotated[str, Meta(max_length=32, pattern=r"^[a-z]+$")]
"""Subject of values that monitors of all nodes exchange."""
_WireText = Annotated[str, Meta(max_length=LONGEST_TEXT)]
_WireSlots = Annotated[tuple[_WireCount, ...], Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag="v3"):
    """Base of all records. Its tag is the protocol's version."""


class NodeCard(Message, frozen=True):
    incarnation: _WireName  # random, new with each membership
    host: _WireName
    pid: _WireCount
    safelaunch: _WireName
    torch: _WireName
    script: _WireName = ""  # digest of its content
    address: _WireName = ""  # of this host, as the store sees it
    hosts: bool = False  # this host runs the store
    node_rank: Annotated[int, Meta(ge=0, lt=1 << 20)] | None = None  # from torchrun's command line


class NodeQuestion(Message, frozen=True):
    """A request to all nodes: a dump, or their part of an add-on's service."""

    number: _WireCount = 0  # counts the node's requests
    kind: Annotated[str, Meta(max_length=64, pattern="^[a-z]+$")] = "dump"
    ask: Annotated[bytes, Meta(max_length=8192)] = b""  # in msgpack


class Beat(Message, frozen=True):
    """A node's report about itself, sent every half second. It contains no clock times."""

    incarnation: _WireName
    count: _WireCount
    ranks: Annotated[tuple[WireRank, ...], Meta(max_length=4096)] = ()
    world: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0
    attempt: tuple[_WireCount, _WireCount] = (0, 0)  # torchrun's restarts, and starts of the workers
    doing: Doing = "watching"
    suspects: Annotated[int, Meta(ge=-1, lt=1 << 48)] = -1
    """newest closed incident when this node began to suspect the job"""
    window_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 2.0
    at_limit: bool = False  # its time limit is over
    incident: _WireCount = 0  # for ``vote`` and ``agrees``
    vote: Vote = ""
    agrees: bool = False  # it has read the decision
    trouble: _WireText = ""
    agent: AgentState = ""  # of torchrun
    step: Annotated[int, Meta(ge=-1, lt=1 << 48)] = -1  # lowest of its ranks; -1 before the first step
    restarting: bool = False
    """torchrun ended healthy ranks for a new rendezvous, and hasn't started others yet"""
    submitted: Annotated[
        tuple[tuple[Round, Annotated[int, Meta(ge=0, le=MOST_CHUNKS)]], ...], Meta(max_length=MOST_SUBMITTED)
    ] = ()
    """rounds with stored evidence of this node, and the number of chunks"""
    decided: Round = ""  # newest round with a decision by this node
    asks: NodeQuestion | None = None

    def round_of(self, kind: QuestionKind) -> Round:
        return next((round_ for round_, _ in self.submitted if round_.startswith(f"{kind}.")), "")


class LeaderPage(Message, frozen=True):
    leader: _WireCount
    epoch: _WireCount = 0
    count: _WireCount = 0
    nodes: _WireCount = 1
    covered: bool = False  # the responding nodes have all ranks of the job
    silent: _WireSlots = ()  # not responding for ``SILENT_S``
    incident: _WireCount = 0  # the newest; closed in phase ``idle``
    phase: Phase = "idle"
    result: VoteResult = ""
    window_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 2.0
    quiet: _WireSlots = ()  # not responding for ``QUIET_S``
    stopping: _WireSlots = ()  # by a user or a scheduler
    troubles: Annotated[tuple[tuple[_WireCount, _WireText], ...], Meta(max_length=MOST_TROUBLES)] = ()
    crash: _WireCount = 0  # number of crashes with a verdict
    failed: _WireSlots = ()  # nodes that submitted evidence of the next crash
    asked: Annotated[tuple[tuple[_WireCount, NodeQuestion], ...], Meta(max_length=MOST_ASKED)] = ()
    world: Annotated[int, Meta(ge=0, le=MOST_RANKS)] = 0  # number of ranks, if ``covered``
    line: _WireSlots = ()  # order of succession
    members: _WireCount = 0  # edition of ``NodesBySlot``
    restarting: _WireSlots = ()
    topics: Annotated[tuple[TopicName, ...], Meta(max_length=MOST_TOPICS)] = ()  # gathered by the leader
    published: Annotated[tuple[tuple[TopicName, _WireCount], ...], Meta(max_length=MOST_TOPICS)] = ()
    """edition of the newest value, by topic"""

    @property
    def questions(self) -> dict[Round, NodeQuestion]:
        return {ask_round(slot, question): question for slot, question in self.asked}

    def is_over(self, round_: Round) -> bool:
        if round_.startswith("hang."):
            return round_ != f"hang.{self.incident}" or self.phase in ("idle", "agreed")
        return round_.startswith("ask.") and round_ not in self.questions


def ask_round(slot: int, question: NodeQuestion) -> Round:
    return f"ask.{slot}.{question.number}"


def node_count(page: LeaderPage | None) -> int:
    return page.nodes if page is not None else 1


class NodesBySlot(Message, frozen=True):
    """Cards and beats that the leader passes on, the most important nodes first. Beats have no count and no vote."""

    nodes: Annotated[tuple[tuple[_WireCount, NodeCard, Beat], ...], Meta(max_length=MOST_MEMBERS)] = ()


class Decision(Message, frozen=True):
    verdict: Verdict
    action: Action
    host: _WireName  # host and path of the merged bundle
    path: Annotated[str, Meta(max_length=4096)]
    step: int | None = None  # lowest step of a rank
