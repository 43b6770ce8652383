"""Confidence in a finding: ``high``, lowered by its doubts.

A rule names its doubts, never a level. Doubts with the same subject count once; doubts with different subjects add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Literal

from safelaunch.model import Confidence

# Subjects of doubt: the state of the ranks at fault; their diverging calls; the possibility that other ranks
# are at fault or that another explanation fits; and the quality of the evidence, the share of ranks named, and a
# missing proof, which count only if no other subject is in doubt.
DoubtSubject = Literal["state", "calls", "others", "rival", "evidence", "share", "proof"]

_LEVELS: tuple[Confidence, ...] = ("high", "medium", "low")


class Doubt(Enum):
    """A reason to be less sure of a finding."""

    about: DoubtSubject
    levels: int  # how many levels it lowers the confidence
    why: str  # one sentence

    def __init__(self, about: DoubtSubject, levels: int, why: str) -> None:
        self.about, self.levels, self.why = about, levels, why

    STATE_INFERRED = "state", 1, "What the rank does is inferred: other states look the same from outside."
    MAY_BE_SLOW = "state", 1, "The rank computes; the samples cannot distinguish slow from endless."
    MAY_END = "state", 1, "What the rank waits for may still arrive."
    RECORD_ALONE = "state", 1, "No stack: only the Flight Recorder shows how far the rank got."
    STATE_UNKNOWN = "state", 2, "Neither a stack nor a record shows what the rank does."
    STATUS_UNKNOWN = "state", 1, "The rank has exited, and its exit status is unknown."
    ABORTED_IN_COLLECTIVE = "state", 1, "Its communication library aborted the rank; what a peer sent may be why."
    ONE_LOOK = "state", 1, "A process computes, and one look cannot distinguish slow from endless."
    BY_EXCLUSION = (
        "state",
        1,
        "Nothing shows directly what blocks the ranks: this is what is left after other causes were ruled out.",
    )

    GPUS_ALONE = "state", 1, "Only the readings of the GPUs set the rank apart."
    BRIEFLY_SILENT = "state", 1, "The node had been silent for only a few seconds."

    STACKS_ALONE = "calls", 1, "Without sequence numbers, only stacks show what the ranks wait in."
    LINES_ALONE = "calls", 2, "Only stacks show the calls, and those of two lines may match."
    SUMS_ALONE = "calls", 1, "For all_to_all, only the sums over all ranks can be compared."
    FEW_AGREE_SINCE = "calls", 1, "Too few calls have matched since the histories diverged: that may be coincidence."
    NO_FRAMES = "calls", 1, "The records do not show which lines made the calls."
    MAY_SKIP_CALLS = "calls", 1, "The rank may have had as many batches, and skipped the calls of one."
    ROUND_UNKNOWN = "calls", 1, "Both lines are in one outer loop, so the rank may just be an iteration behind."
    RINGS_NOT_WHOLE = "calls", 1, "The ranks may have diverged before the oldest call in their ring buffers."
    HABIT_ALONE = "calls", 1, "Only the rank's earlier calls suggest this; it may still make the other call."
    ROLE_ALONE = "calls", 1, "The rank diverged from others in its role, and roles are inferred."
    PEERS_NOT_RECORDED = "calls", 1, "The backend does not record the peer of a send or receive."
    SEVERAL_PLACES_FIT = "calls", 1, "The records are consistent with calls skipped there, but do not show it."

    UNSEEN_RANKS = "others", 1, "Ranks were not seen, and one of them may be at fault."
    UNSEEN_PEERS = "others", 2, "The peers that the ranks wait for were not seen."
    SEVERAL_CAUSES = "others", 1, "Ranks block their peers in different ways."
    SEVERAL_PLACES = "others", 1, "The ranks are in different places."
    NO_MAJORITY = "others", 1, "No side has a majority: either may be at fault."
    OWN_WAYS = "others", 1, "The ranks go three or more different ways: no side has a majority."
    EITHER_SIDE = "others", 1, "Calls that meet do not match, and any of them may be the wrong one."
    MAY_BE_OWED = "others", 1, "The rank waits for something that a peer must send or create: either may be at fault."
    NO_PATTERN = "others", 1, "Ranks diverged with nothing in common: each may have made its own random choice."
    RANK_AND_MORE = (
        "others",
        2,
        "The condition at which ranks diverged depends on the rank and on what is not recorded.",
    )
    PATTERN_BY_CHANCE = "others", 1, "Few ranks diverged: what they have in common may be coincidence."
    ORIGIN_UNKNOWN = "others", 1, "The gradients had already been averaged: any rank may have been the first."
    NO_WAIT_SHOWN = "others", 2, "Nothing shows that the other ranks wait for it."

    GPUS_UNREAD = "others", 1, "The GPUs of some ranks were not read, or are shared: one of them may differ as well."
    LINKS_UNREAD = "others", 1, "The links of some nodes were not read twice: their errors may grow as well."
    SAME_MOMENT = "others", 1, "Ranks of another node failed at the same moment, as far as the two nodes' clocks show."
    NODE_MAY_LIVE = "others", 1, "The node's supervisor is silent, but the node may be up: its ranks may be alive."
    UNCOUNTED_NODES = "others", 1, "Only nodes with safelaunch are counted: one with plain torchrun may have joined."
    NOT_OF_THE_NODE = "others", 1, "Only ranks of one node are behind; their script may be the reason."

    GPU_BY_NUMBER = "rival", 1, "The rank's GPU is known by its number alone, and CUDA and NVML may number differently."
    MISMATCH_TOO = "rival", 1, "Ranks also recorded different operations with the same sequence number."
    CALL_ON_SOME_RANKS = "rival", 1, "A peer waits in a call that only some ranks reach."
    TRANSFER_LEFT_OUT = "rival", 1, "A peer may wait for a send or receive that the rank skipped before it exited."
    ABORTED_CALL_LOST = "rival", 1, "The aborted rank's calls are lost."

    NOT_PROVED = "proof", 1, "There is no proof that the job cannot continue: what it waits for may still arrive."
    MORE_NAMED = "share", 1, "More ranks are named than cleared: hardly all of them are at fault."
    WHOSE_ORDER = "share", 1, "Nothing shows whose order is the wrong one."
    TWO_TO_ONE = "share", 1, "Two ranks against one: the two may have gone wrong in the same way."
    MAY_BE_CAUGHT = "evidence", 2, "The process printed more after its exception: it may have caught it."
    OTHER_ORDER = "others", 1, "By the launcher's times, another rank ended first."
    PRINTED_STEPS = "evidence", 2, "Only the steps that ranks printed show it, and output may be lost or late."
    RANK_UNKNOWN = "evidence", 1, "Nothing gives the rank of a process at fault."
    DAMAGED_RECORD = "evidence", 1, "A Flight Recorder dump is malformed."
    PRINTED_ALONE = "evidence", 1, "Only the log says so, and only one kind of line in it."


def doubts_if(conditions: Mapping[Doubt, bool]) -> tuple[Doubt, ...]:
    """Returns the doubts whose condition holds."""
    return tuple(doubt for doubt, holds in conditions.items() if holds)


def levels_of(doubts: Iterable[Doubt]) -> int:
    """Returns how many levels these doubts lower the confidence together."""
    worst: dict[DoubtSubject, int] = {}
    for doubt in doubts:
        worst[doubt.about] = max(worst.get(doubt.about, 0), doubt.levels)
    at_least = max(worst.pop("evidence", 0), worst.pop("share", 0), worst.pop("proof", 0))
    return min(sum(worst.values()) or at_least, len(_LEVELS) - 1)


def confidence_of(doubts: Iterable[Doubt]) -> Confidence:
    return _LEVELS[levels_of(doubts)]
