"""A dump of a whole job: every node takes its evidence at once, for the one on which a person asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from safelaunch.cluster.channel import Channel
from safelaunch.cluster.evidence import Shared, condensed, merged, received
from safelaunch.cluster.messages import BadMessage, Page, node_count, share_of
from safelaunch.model import Evidence, RankEvidence
from safelaunch.redaction.evidence import without_secrets
from safelaunch.supervise.incident import Circumstances
from safelaunch.supervise.small_files import apart

DUMP_S = 30.0  # for the evidence of the other nodes
DUMP_EVERY_S = 5.0  # between two that others ask for


class JointDump:
    """``page``: what the leader says, if it is heard. Everything but ``collected`` returns at once."""

    def __init__(self, channel: Channel | None, about: Circumstances, page: Callable[[], Page | None]) -> None:
        self._channel = channel
        self._about = about
        self._page = page
        self._known: set[int] = set()  # that this node has asked for, or taken part in
        self._next_s = 0.0

    def ask(self) -> bool:
        """Asks all nodes for their evidence, now. False: there is nobody to ask."""
        page = self._page()
        if self._channel is None or page is None or page.nodes < 2:
            return False
        self._channel.ask_dump(True)
        return True

    def collected(self, own: Evidence) -> tuple[Evidence, tuple[RankEvidence, ...]]:
        """The evidence of all nodes as one, and what of it is other nodes'; waits for it ``DUMP_S`` at most."""
        assert self._channel is not None
        until = time.monotonic() + DUMP_S
        while (seen := self._channel.seen).page is not None and time.monotonic() < until:
            if seen.answers is not None and seen.answers.complete:
                break
            time.sleep(0.05)
        handed_in = seen.answers.evidence if seen.answers is not None else {}
        everything, others, _ = whole_of(own, handed_in, self._about.host)
        return everything, others

    def is_over(self) -> None:
        """No other node need answer any longer."""
        if self._channel is not None:
            if self._channel.seen.answers is not None:
                self._known.add(self._channel.seen.answers.number)
            self._channel.ask_dump(False)

    def wanted(self, now: float) -> int | None:
        """The number of a dump that another node asks for, and this one has not taken part in."""
        if self._channel is None or now < self._next_s or (page := self._page()) is None:
            return None
        answers = self._channel.seen.answers
        known = self._known | ({answers.number} if answers is not None else set())
        number = next((number for number in page.dumps if number not in known), None)
        if number is not None:
            self._known.add(number)
            self._next_s = now + DUMP_EVERY_S
        return number

    @property
    def _share(self) -> int:
        return share_of(node_count(self._page()))

    def hand_in(self, number: int, evidence: Evidence) -> None:
        if self._channel is not None:
            self._channel.hand_in_dump(
                number, condensed(without_secrets(evidence, self._about.redactor), share=self._share)
            )


def whole_of(
    own: Evidence, handed_in: Mapping[int, list[bytes]], host: str
) -> tuple[Evidence, tuple[RankEvidence, ...], dict[str, bytes]]:
    """The evidence of all nodes as one, the ranks in it that are not of this one, and the others' files."""
    others: list[Evidence] = []
    notes: list[str] = []
    files: dict[str, bytes] = {}
    hosts, shared = {host}, Shared()
    for slot, chunks in sorted(handed_in.items()):
        try:
            other, its = received(chunks, shared)
            others.append(other)
            files |= {apart(name, slot, hosts): content for name, content in its.items()}
            hosts |= {rank.host for rank in other.ranks}
        except BadMessage as error:
            notes.append(f"the evidence of a node could not be read (slot {slot}: {error})")
    everything = merged(own, others)
    mine = {rank.rank for rank in own.ranks}
    foreign = tuple(rank for rank in everything.ranks if rank.rank not in mine)
    return replace(everything, notes=(*everything.notes, *notes)), foreign, files
