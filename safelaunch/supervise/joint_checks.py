"""The consistency checks of a job on several nodes: the node that leads compares those of all, and tells the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from safelaunch.capture.checks import Check
from safelaunch.model import Inconsistency
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.messages import BadMessage, Page
from safelaunch.supervise.watch.shared_checks import (
    MOST_FOUND,
    MOST_POSITIONS,
    Found,
    decode,
    decode_found,
    encode,
    encode_found,
    share_of,
)

POST_EVERY_S = 0.4
MEET_S = 60.0  # for the nodes to meet, from the first check on; then each compares its own
KEPT = 4096  # checks of this node that wait to be stored

Part = Literal["alone", "waits", "leads", "follows"]


class JointChecks:
    """``page``: what the leader says, if it is heard. Every method returns at once."""

    def __init__(self, channel: Channel, page: Callable[[], Page | None]) -> None:
        self._channel = channel
        self._page = page
        self._newest: list[Check] = []
        self._post_s = 0.0
        self._since_s: float | None = None
        self._read: dict[int, int] = {}  # by slot, the edition of its checks that was read last
        self._told = b""
        self._part: Part = "waits"

    def part(self, unseen: Sequence[int], covered: bool, now: float) -> Part:
        """What this node does about them. ``unseen``: ranks of other nodes; ``covered``: all of them are heard."""
        if not self._channel.is_started or not unseen:
            return "alone"
        leads, page = self._channel.seen.leads, self._page()
        if covered and (leads or (page is not None and page.compares)):
            self._since_s = None
            self._part = "leads" if leads else "follows"
        else:
            self._since_s = self._since_s or now
            self._part = self._part if now - self._since_s < MEET_S else "alone"
        return self._part

    def offer(self, checks: Sequence[Check], now: float) -> None:
        """Hands over what this node's ranks have computed."""
        self._newest = [*self._newest, *checks][-KEPT:]
        if now - self._post_s < POST_EVERY_S:
            return
        self._post_s, page = now, self._page()
        data = encode(self._newest, share_of(page.nodes if page is not None else 1))
        moments = sorted({one.moment for one in self._newest})[-MOST_POSITIONS:]
        self._newest = [one for one in self._newest if one.moment in moments]
        self._channel.compare(data)

    def gathered(self) -> list[Check]:
        """What other nodes have handed over since the last call."""
        found: list[Check] = []
        for slot, (edition, data) in self._channel.seen.checks.items():
            if self._read.get(slot) != edition:
                self._read[slot] = edition
                try:
                    found += decode(data)
                except BadMessage:
                    continue  # a stranger's, or of another version
        return found

    def tell(self, found: Sequence[Inconsistency], *, stops: bool = False, place: str = "") -> None:
        """Tells all nodes what has been found in the checks of all."""
        self._channel.tell_wrong(encode_found(Found(tuple(found)[:MOST_FOUND], stops, place[:4096])))

    def told(self) -> Found | None:
        """What the node that leads has found, where that is new."""
        data = self._channel.seen.wrong
        if data in (b"", self._told):
            return None
        self._told = data
        try:
            return decode_found(data)
        except BadMessage:
            return None
