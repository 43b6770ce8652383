"""A dump or a recording of a whole job: every node takes its part at once, for the one on which a person asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from msgspec.structs import replace

from safelaunch.capture.redaction import without_secrets
from safelaunch.model import Evidence, RankEvidence
from safelaunch.model.recording import Recording, bounded, check
from safelaunch.supervise.cluster.channel import Channel
from safelaunch.supervise.cluster.evidence import Shared, condensed, merged, received
from safelaunch.supervise.cluster.messages import (
    MOST_RANKS,
    BadMessage,
    Page,
    Question,
    node_count,
    packed,
    share_of,
    unpacked,
)
from safelaunch.supervise.cluster.seen import Answers
from safelaunch.supervise.incident import Circumstances
from safelaunch.supervise.small_files import apart
from safelaunch.system.decoding import from_msgpack

DUMP_S = 30.0  # for the evidence of the other nodes
DUMP_EVERY_S = 5.0  # between two that others ask for


class JointDump:
    """``page``: what the leader says, if it is heard. Everything but ``collected`` and ``recorded`` returns at once;
    ``asking`` waits for another question of this node's.
    """

    def __init__(self, channel: Channel, about: Circumstances, page: Callable[[], Page | None]) -> None:
        self._channel = channel
        self._about = about
        self._page = page
        self._known: set[int] = set()  # that this node has asked for, or taken part in
        self._next_s = 0.0
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def asking(self, question: Question | None = None) -> Iterator[bool]:
        """Asks all nodes for their evidence, or what the question says, now. False: there is nobody to ask."""
        if not self.of_several:
            yield False
            return
        with self._one_at_a_time:
            self._channel.ask_all(question or Question())
            try:
                yield True
            finally:
                if self._channel.seen.answers is not None:
                    self._known.add(self._channel.seen.answers.number)
                self._channel.ask_all(None)

    def collected(self, own: Evidence) -> tuple[Evidence, tuple[RankEvidence, ...]]:
        """The evidence of all nodes as one, and what of it is other nodes'; waits for it ``DUMP_S`` at most."""
        everything, others, _ = whole_of(own, self._answers(), self._about.host)
        return everything, others

    def recorded(self, stop: threading.Event) -> tuple[list[Recording], list[str]]:
        """What the other nodes have sampled, and what could not be read of it; waits for it ``DUMP_S`` at most.

        ``stop``: waits no longer.
        """
        found: list[Recording] = []
        notes: list[str] = []
        for slot, chunks in sorted(self._answers(stop).items()):
            try:
                found.append(recording_of(chunks))
            except BadMessage as error:
                notes.append(f"a node's samples could not be read (slot {slot}: {error})")
        return found, notes

    def _answers(self, stop: threading.Event | None = None) -> Mapping[int, list[bytes]]:
        stop, until = stop or threading.Event(), time.monotonic() + DUMP_S
        while (seen := self._channel.seen).page is not None and time.monotonic() < until:
            if (answers := self._own(seen.answers)) is not None and answers.complete:
                return answers.evidence
            if stop.wait(0.05):
                break
        answers = self._own(self._channel.seen.answers)
        return answers.evidence if answers is not None else {}

    def _own(self, answers: Answers | None) -> Answers | None:
        """Those to the present question; the channel may still have those to the last one."""
        return answers if answers is not None and answers.number not in self._known else None

    @property
    def of_several(self) -> bool:
        """Whether there are other nodes, all of which take part in one dump or recording at a time."""
        page = self._page()
        return page is not None and page.nodes > 1

    @property
    def presses(self) -> bool:
        """Whether another node asks for a dump that this one has not taken part in yet."""
        return any(question.kind == "dump" for question in self._new().values())

    def wanted(self, now: float) -> tuple[int, Question] | None:
        """What another node asks for, and this one has not taken part in, and its number. Dumps come first."""
        new = self._new() if now >= self._next_s else {}
        if not new:
            return None
        number = min(new, key=lambda one: (new[one].kind != "dump", one))
        self._known.add(number)
        self._next_s = now + DUMP_EVERY_S
        return number, new[number]

    def _new(self) -> dict[int, Question]:
        """What other nodes ask for, and this one has not taken part in."""
        page = self._page()
        if page is None:
            return {}
        answers, questions = self._channel.seen.answers, self._channel.seen.questions
        known = self._known | ({answers.number} if answers is not None else set())
        return {number: questions[number] for number in page.dumps if number not in known and number in questions}

    @property
    def _share(self) -> int:
        return share_of(node_count(self._page()))

    def hand_in(self, number: int, evidence: Evidence) -> None:
        own = without_secrets(evidence, self._about.redactor)
        self._channel.hand_in_dump(number, condensed(own, share=self._share))

    def hand_in_recording(self, number: int, recording: Recording) -> None:
        """``recording`` is without secrets."""
        share = self._share
        small = bounded(recording, lambda one: packed(msgspec.msgpack.encode(one), share) is not None)
        self._channel.hand_in_dump(number, packed(msgspec.msgpack.encode(small)) or [])


def recording_of(chunks: list[bytes]) -> Recording:
    """What ``hand_in_recording`` has sent. Raises BadMessage."""
    try:
        found = from_msgpack(unpacked(chunks), Recording)
        check(found)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise BadMessage(str(error)) from error
    if not all(0 <= rank.rank < MOST_RANKS for rank in found.ranks):
        raise BadMessage("samples of impossible ranks")
    return found


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
