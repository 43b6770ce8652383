"""How sure a finding is: ``high``, less what there is to doubt about it.

A rule names its doubts and never a level. Doubts about the same part of a finding are one reason to be unsure; doubts
about different parts add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Literal

from safelaunch.model import Confidence

# The parts of a finding: what the ranks at fault do; where their calls parted from their peers'; whether others may be
# at fault; whether another explanation fits; how good the evidence is, and how many are named, which both count only
# where nothing else does.
About = Literal["state", "calls", "others", "rival", "evidence", "share", "proof"]

_LEVELS: tuple[Confidence, ...] = ("high", "medium", "low")


class Doubt(Enum):
    """``levels``: by how many it lowers the confidence. ``why``: one sentence."""

    about: About
    levels: int
    why: str

    def __init__(self, about: About, levels: int, why: str) -> None:
        self.about, self.levels, self.why = about, levels, why

    STATE_INFERRED = "state", 1, "What the rank does is inferred: other states look the same from outside."
    MAY_BE_SLOW = "state", 1, "The rank computes: slow or endless, the samples cannot tell."
    MAY_END = "state", 1, "What the rank waits for may still come."
    RECORD_ALONE = "state", 1, "No stack: the Flight Recorder alone says how far the rank came."
    STATE_UNKNOWN = "state", 2, "No stack and no record says what the rank does."
    STATUS_UNKNOWN = "state", 1, "The rank has ended, and nobody knows its exit status."
    ABORTED_IN_COLLECTIVE = "state", 1, "Its communication library aborted the rank; what a peer sent may be why."
    ONE_LOOK = "state", 1, "Somebody computes, and one look cannot tell slow from endless."
    BY_EXCLUSION = "state", 1, "Nothing shows what holds the ranks up: it is what remains when the rest is ruled out."

    BRIEFLY_SILENT = "state", 1, "Nothing had been heard from the node for a few seconds only."

    STACKS_ALONE = "calls", 1, "No Flight Recorder numbers the calls: stacks alone say what the ranks wait in."
    LINES_ALONE = "calls", 2, "The ranks wait in the same operation, at lines that may well meet."
    SUMS_ALONE = "calls", 1, "Of an all_to_all only the sums over all ranks can be compared."
    NO_AGREEMENT_SINCE = "calls", 1, "The calls have not agreed again since they parted."
    NO_FRAMES = "calls", 1, "The records do not say from which lines the calls came."
    ROUND_UNKNOWN = "calls", 1, "Both lines are in one outer loop, so the rank may just be an iteration behind."
    MEMBERS_UNKNOWN = "calls", 1, "The members of a group that ranks wait in are not known."
    RINGS_NOT_WHOLE = "calls", 1, "The ranks may have parted before the first call that their ring buffers still hold."
    NOT_CALLED_ALIKE = "calls", 1, "The ranks did not make the same calls in these groups before."
    NOT_IN_TURNS = "calls", 1, "What the ranks wait in need not be the calls of one round in another order."
    HABIT_BROKEN = "calls", 1, "A rank left out a call that it always made right before."
    HABIT_ALONE = "calls", 1, "The rank's own habit shows the call that it left out; it may yet call it."
    ROLE_ALONE = "calls", 1, "The rank went another way than others of its role, and roles are inferred."
    PEERS_NOT_RECORDED = "calls", 1, "The backend records no peer of a send or receive."
    SEVERAL_PLACES_FIT = (
        "calls",
        1,
        "The records agree with the place where the rank left calls out, and do not show it.",
    )

    UNSEEN_RANKS = "others", 1, "Ranks were not seen, and one of them may be at fault."
    UNSEEN_PEERS = "others", 2, "The peers that the others wait for were not seen."
    SEVERAL_CAUSES = "others", 1, "Ranks hold up their peers in different ways."
    SEVERAL_PLACES = "others", 1, "The ranks are in different places."
    NO_MAJORITY = "others", 1, "No side has a majority: either may be at fault."
    OWN_WAYS = "others", 1, "The ranks go three or more different ways: no side has a majority."
    EITHER_SIDE = "others", 1, "Calls that meet do not fit, and any of them may be the wrong one."
    MAY_BE_OWED = "others", 1, "What the rank waits for is a peer's to send or to make: either may be at fault."
    NO_PATTERN = (
        "others",
        1,
        "Several ranks went another way, and nothing sets them apart: each may have made its own random choice.",
    )
    RANK_AND_MORE = (
        "others",
        2,
        "Several ranks went another way, by a condition that asks for the rank and for what their records do not tell.",
    )
    PATTERN_BY_CHANCE = (
        "others",
        1,
        "Few ranks went another way: what sets them apart may be chance, if each drew for itself.",
    )
    ORIGIN_UNKNOWN = "others", 1, "The ranks' gradients were averaged already: any rank may have been the first."
    NO_WAIT_SHOWN = "others", 2, "Nothing shows that the other ranks wait for it."

    SAME_MOMENT = "others", 1, "Ranks of another node failed at the same moment, as far as clocks of two nodes tell."
    NODE_MAY_LIVE = "others", 1, "Nothing is heard from the node, but it answers or may answer: its ranks may live."
    UNCOUNTED_NODES = "others", 1, "Only nodes with safelaunch are counted: one with plain torchrun may have come."
    NOT_OF_THE_NODE = "others", 1, "The ranks of one node alone are behind; their script may have sent them there."

    MISMATCH_TOO = "rival", 1, "Ranks also recorded different operations under one number."
    CALL_ON_SOME_RANKS = "rival", 1, "A peer waits in a call that only some ranks reach."
    TRANSFER_LEFT_OUT = "rival", 1, "A peer may wait for a send or receive that the rank left out before it ended."
    ABORTED_CALL_LOST = "rival", 1, "The aborted rank's calls are lost."

    NOT_PROVED = "proof", 1, "Nothing proves that the job cannot go on: what it waits for may still come."
    MORE_NAMED = "share", 1, "More ranks are named than are left innocent: these may be at fault instead."
    DAMAGED_RECORD = "evidence", 1, "A Flight Recorder dump is malformed."


def those(found: Mapping[Doubt, bool]) -> tuple[Doubt, ...]:
    """The doubts that are true."""
    return tuple(doubt for doubt, true in found.items() if true)


def levels_of(doubts: Iterable[Doubt]) -> int:
    """By how many levels these lower the confidence, all together."""
    worst: dict[About, int] = {}
    for doubt in doubts:
        worst[doubt.about] = max(worst.get(doubt.about, 0), doubt.levels)
    at_least = max(worst.pop("evidence", 0), worst.pop("share", 0), worst.pop("proof", 0))
    return min(sum(worst.values()) or at_least, len(_LEVELS) - 1)


def confidence_of(doubts: Iterable[Doubt]) -> Confidence:
    return _LEVELS[levels_of(doubts)]
