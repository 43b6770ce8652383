"""One connection of a supervisor to the store: a beat up and a page down each round, and what lies beside them there.

``Channel`` runs it in its thread. Keys, below the job's prefix: ``n`` counts the slots; ``m/SLOT`` is who a node is and
``b/SLOT`` its beat; ``head`` is the leader's page; ``e/``, ``x/`` and ``c/`` are evidence about an incident, for a dump
and about a crash; ``d/`` and ``k/`` are decisions about an incident and a crash.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs

from safelaunch.cluster.council import QUIET_S, SILENT_S, Given, Hearing, Leader, Succession
from safelaunch.cluster.messages import BadMessage, Beat, Codec, Decision, Doing, Node, Page
from safelaunch.cluster.store import Store
from safelaunch.model import Lost

ANSWER_S = 15.0  # the store's only thread may be resolving a name
GOODBYE_S = 1.0
SEE_OFF_EVERY_S = 0.1
MOST_NAMED = 8
MOST_PEERS = 64
MOST_HALVES = 64  # of a crash, that one node reads
NEW_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Word:
    """What other nodes have said of themselves. ``stopping``: a user or a scheduler stops the job there.

    ``troubles``: what failed there on its own account. ``quiet``: how many have not been heard for a few seconds.
    ``lost``: there is no connection any more.
    """

    stopping: bool = False
    troubles: tuple[str, ...] = ()
    quiet: int = 0
    lost: bool = False


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

    ``peers``: the others that lead, are not heard, fail or are stopped, and of a leader all; those of before the
    connection was ``lost``. ``crash``: the newest verdict about a crash; ``halves``: the evidence
    of others about it, by slot, where this node gathers it.

    ``around``: every node as of some time, the last at which ``look_around`` asked; ``answers``: to ``ask_dump``.
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


@dataclass(frozen=True, slots=True)
class Crash:
    """This node's part in a crash: its evidence, whether it reads that of the others, the verdict it has reached."""

    chunks: list[bytes] = field(default_factory=list)
    gathers: bool = False
    decision: Decision | None = None


class Session:
    """One connection, registered under a slot of its own. Raises StoreError where the store fails."""

    def __init__(self, store: Store, prefix: str, codec: Codec, node: Node) -> None:
        self._store = store
        self._prefix = prefix
        self._codec = codec
        # A connection is an incarnation: who comes back has not seen what was said meanwhile.
        self._node = structs.replace(
            node, incarnation=uuid.uuid4().hex[:16], address=store.own_address, hosts=store.is_local
        )
        self._slot = store.add(f"{prefix}/n", 1, deadline_s=ANSWER_S)
        self._count = 0
        self._hearing = Hearing()
        self._succession = Succession()
        self._unreadable = Hearing()  # a page that changes, in whatever key, is somebody's
        self._leader: Leader | None = None
        self._page_bytes = b""
        self._slots: set[int] = set()  # whose beats have been seen
        self._known: dict[int, Node] = {}  # who is under which slot: it is written once
        self._nodes: dict[int, Node] = {}
        self._evidence: dict[int, list[bytes]] = {}
        self._evidence_of = 0  # the incident
        self._handed_in: list[str] = []
        self._decision: tuple[int, Decision] | None = None
        self._page: Page | None = None
        self._page_s = 0.0
        self.looks_around = self.asks_dump = False
        self._around: tuple[float, tuple[Neighbour, ...]] = (0.0, ())
        self._asked = 0  # the number of the dump that this node asks for
        self._answers: dict[int, list[bytes]] = {}
        self._dumped = (0, -1)
        self._handed_in_dumps: list[str] = []
        self._peers: dict[int, Peer] = {}
        self._quiet_since: dict[int, float] = {}
        self._was_covered = False
        self._failed_in = self._decided = 0  # the crash about which this node's evidence, and its verdict, is stored
        self._crash: tuple[int, Decision] | None = None
        self._halves: dict[int, list[bytes]] = {}
        self._write(f"m/{self._slot}", codec.encode(f"m/{self._slot}", self._node))

    def hand_in(self, incident: int, chunks: list[bytes]) -> int:
        for number, chunk in enumerate(chunks):
            place = f"e/{incident}/{self._slot}/{number}"
            self._write(place, self._codec.seal(place, chunk))
            self._handed_in.append(place)
        return len(chunks)

    def hand_in_dump(self, number: int, chunks: list[bytes]) -> None:
        while self._handed_in_dumps:  # who asked for the last one may have gone without it
            self._store.delete(f"{self._prefix}/{self._handed_in_dumps.pop()}", deadline_s=ANSWER_S)
        for at, chunk in enumerate(chunks):
            place = f"x/{number}/{self._slot}/{at}"
            self._write(place, self._codec.seal(place, chunk))
            self._handed_in_dumps.append(place)
        self._dumped = number, len(chunks)

    def leave(self, beat: Beat) -> None:
        self._count += 1
        doing = beat.doing if beat.doing == "stopping" else "ended"
        beat = structs.replace(beat, incarnation=self._node.incarnation, count=self._count, doing=doing)
        place = f"b/{self._slot}"
        self._store.set(f"{self._prefix}/{place}", self._codec.encode(place, beat), deadline_s=GOODBYE_S)

    def see_off(self, patience_s: float) -> None:
        """Waits until all others have left, or are not heard: the store ends with this node."""
        hearing, until = Hearing(), time.monotonic() + patience_s
        while (now := time.monotonic()) < until:
            others = {s: beat for s, beat in self._beats().items() if s != self._slot and beat.doing != "ended"}
            hearing.hear({slot: (beat.incarnation, beat.count) for slot, beat in others.items()}, now)
            if all(hearing.silent_s(slot, now) >= QUIET_S for slot in others):
                return
            time.sleep(SEE_OFF_EVERY_S)

    def round(self, beat: Beat, deciding: tuple[int, Decision] | None) -> Seen:
        self._count += 1
        if self.asks_dump and not self._asked:
            self._asked, self._answers = self._store.add(f"{self._prefix}/x", 1, deadline_s=ANSWER_S), {}
        elif not self.asks_dump:
            self._asked = 0
        dumps = {"asks": max(self._asked, 0), "dumped": self._dumped}
        beat = structs.replace(beat, incarnation=self._node.incarnation, count=self._count, **dumps)
        self._write(f"b/{self._slot}", self._codec.encode(f"b/{self._slot}", beat))
        now = time.monotonic()
        page = self._read_page(now)
        complete = False
        if self._leader is not None:
            page, complete = self._lead(self._leader, deciding, now)
        elif page is None:
            if not self._page_bytes or self._unreadable.silent_s(0, now) >= SILENT_S:
                self._begin_to_lead(Page(leader=self._slot), now)
                page = self._page
        elif self._succession.is_orphaned(page, now):
            beats = self._beats()
            if self._succession.takes_over(self._slot, beats, now):
                hearing = self._succession.hearing(page.leader, now)
                self._begin_to_lead(structs.replace(page, leader=self._slot, epoch=page.epoch + 1), now, hearing)
        if page is not None and page.phase in ("decided", "agreed"):
            self._read_decision(page.incident)
        if page is not None and page.crash > (self._crash[0] if self._crash is not None else 0):
            self._read_crash(page.crash)  # at once: the store may end with the ranks of another node
        if page is not None and page.phase in ("idle", "agreed"):
            while self._handed_in:  # nothing expires in the store
                self._store.delete(f"{self._prefix}/{self._handed_in.pop()}", deadline_s=ANSWER_S)
        silent_s = now - self._page_s if page is not None else 0.0
        if page is not None:
            self._name(page)
        answers = self._of_all(page, now) if page is not None else None
        return Seen(
            page=page,
            why="" if page is not None else "they speak with another key, or in another version",
            leads=self._leader is not None,
            complete=complete,
            silent_s=silent_s,
            decision=self._decision,
            evidence=dict(self._evidence),
            nodes=tuple(self._nodes.values()),
            word=self._word(page),
            is_local=self._store.is_local,
            peers=self._know(page, now) if page is not None else (),
            slot=self._slot,
            crash=self._crash,
            halves=dict(self._halves),
            around=self._around,
            answers=answers,
        )

    # --- what is asked of all nodes: a view for a person, their evidence for a dump --------------------------------

    def _of_all(self, page: Page, now: float) -> Answers | None:
        if not (self.looks_around or self._asked):
            return None
        beats = self._beats()
        heard = {s: beat for s, beat in beats.items() if beat.doing != "ended" and s not in page.silent}
        if self.looks_around:
            self._around = now, self._neighbours(page, beats, heard)
        return self._answered(heard) if self._asked else None

    def _neighbours(self, page: Page, beats: Mapping[int, Beat], heard: Mapping[int, Beat]) -> tuple[Neighbour, ...]:
        self._learn(sorted(beats.keys() - self._known.keys()))
        heard_ranks = {rank for beat in heard.values() for rank in beat.ranks}
        return tuple(
            Neighbour(
                host=self._known[slot].host,
                ranks=beat.ranks,
                step=beat.step if beat.step >= 0 else None,
                doing=beat.doing,
                heard=slot in heard,
                leads=slot == page.leader,
                here=slot == self._slot,
                trouble=beat.trouble,
            )
            for slot, beat in sorted(beats.items(), key=lambda item: (item[1].ranks[:1], item[0]))
            # One whose ranks another has now has only come back under another slot.
            if slot in self._known and (slot in heard or not heard_ranks.issuperset(beat.ranks))
        )

    def _answered(self, heard: Mapping[int, Beat]) -> Answers:
        others = {slot: beat for slot, beat in heard.items() if beat.ranks and slot != self._slot}
        for slot, beat in others.items():
            number, chunks = beat.dumped
            if number == self._asked and slot not in self._answers:
                places = [f"x/{number}/{slot}/{at}" for at in range(max(chunks, 0))]
                self._answers[slot] = self._chunks(places)
                for place in places:
                    self._store.delete(f"{self._prefix}/{place}", deadline_s=ANSWER_S)
        return Answers(self._asked, others.keys() <= self._answers.keys(), dict(self._answers))

    def _chunks(self, places: Sequence[str]) -> list[bytes]:
        """A node's evidence; empty where it cannot be read."""
        found = []
        for place in places:
            data = self._store.get(f"{self._prefix}/{place}", deadline_s=ANSWER_S)
            try:
                found.append(self._codec.open(place, data or b""))
            except BadMessage:
                return []
        return found

    # --- following --------------------------------------------------------------------------------------------------

    def _read_page(self, now: float) -> Page | None:
        data = self._store.get(f"{self._prefix}/head", deadline_s=ANSWER_S)
        if data is None:
            return None
        if self._leader is not None and data != self._page_bytes:
            self._leader = None  # somebody has taken over
        if data != self._page_bytes:
            self._page_bytes = data
            try:
                found = self._codec.decode("head", data, Page)
            except BadMessage:
                self._unreadable.hear({0: (data[-200:].hex(), len(data))}, now)
                return self._page
            self._page, self._page_s = found, now
        return self._page

    def _read_decision(self, incident: int) -> None:
        if self._decision is not None and self._decision[0] == incident:
            return
        place = f"d/{incident}"
        data = self._store.get(f"{self._prefix}/{place}", deadline_s=ANSWER_S)
        if data is not None:
            try:
                self._decision = incident, self._codec.decode(place, data, Decision)
            except BadMessage:
                return

    def _name(self, page: Page) -> None:
        """A few others, once each."""
        if len(self._nodes) >= min(page.nodes - 1, MOST_NAMED):
            return
        number = self._number()
        for slot in range(1, min(number, 4 * MOST_NAMED) + 1):
            if slot != self._slot and slot not in self._nodes and slot not in page.silent:
                node = self._node_of(slot)
                if node is not None:
                    self._nodes[slot] = node

    def _word(self, page: Page | None) -> Word:
        if page is None:
            return Word()
        others = [slot for slot in page.stopping if slot != self._slot]
        troubles = tuple(text for slot, text in page.troubles if slot != self._slot)
        return Word(bool(others), troubles, sum(slot != self._slot for slot in page.quiet))

    def _know(self, page: Page, now: float) -> tuple[Peer, ...]:
        """Whom there is something to say of."""
        quiet = {*page.quiet, *page.silent}
        if now - self._page_s >= QUIET_S:
            quiet.add(page.leader)
        self._quiet_since = {slot: self._quiet_since.get(slot, now) for slot in quiet}
        says = {*page.stopping, *page.failed, *(slot for slot, _ in page.troubles)}
        told = {page.leader, *quiet, *says, *self._nodes}
        for slot in sorted(told - {self._slot})[:MOST_PEERS]:
            before = self._peers.get(slot)
            node = self._nodes.get(slot) or (before.node if before is not None else self._node_of(slot))
            if node is None:
                continue
            beat = before.beat if before is not None else None
            changes = slot in says or (page.covered and not self._was_covered)
            if beat is None or changes or (slot in quiet) != (before is not None and before.silent_s > 0):
                beat = self._beat_of(slot) or beat
            silent_s = self._silent_s(slot, page, now) if slot in quiet else 0.0
            self._peers[slot] = Peer(slot, node, beat, silent_s)
        self._was_covered = page.covered
        heard = {slot: peer for slot, peer in self._peers.items() if slot in told}
        return tuple(heard[slot] for slot in sorted(heard))

    def _silent_s(self, slot: int, page: Page, now: float) -> float:
        if self._leader is not None:
            return self._hearing.silent_s(slot, now)
        if slot == page.leader:
            return now - self._page_s
        return QUIET_S + now - self._quiet_since[slot]

    def _node_of(self, slot: int) -> Node | None:
        if slot not in self._known:
            self._learn([slot])
        return self._known.get(slot)

    def _learn(self, slots: Sequence[int]) -> None:
        """Who is under these slots; nothing of a batch in which one is missing."""
        for begin in range(0, len(slots), NEW_AT_ONCE):
            batch = slots[begin : begin + NEW_AT_ONCE]
            found = self._store.get_all([f"{self._prefix}/m/{slot}" for slot in batch], deadline_s=ANSWER_S) or []
            for slot, data in zip(batch, found, strict=False):
                with suppress(BadMessage):
                    self._known[slot] = self._codec.decode(f"m/{slot}", data, Node)

    def _beat_of(self, slot: int) -> Beat | None:
        data = self._store.get(f"{self._prefix}/b/{slot}", deadline_s=ANSWER_S)
        try:
            return self._codec.decode(f"b/{slot}", data, Beat) if data is not None else None
        except BadMessage:
            return None

    # --- a crash ----------------------------------------------------------------------------------------------------

    def attend(self, beat: Beat, crash: Crash) -> tuple[int, int]:
        """Stores what this node knows of a crash and reads what others do: chunks stored, and the verdict's number."""
        number = beat.crash
        if self._failed_in != number:
            for at, chunk in enumerate(crash.chunks):
                place = f"c/{number}/{self._slot}/{at}"
                self._write(place, self._codec.seal(place, chunk))
            self._failed_in, self._halves = number, {}
        if not self._knows(number):
            self._read_crash(number)
        if crash.decision is not None and not self._knows(number):
            self._crash = number, self._first(f"k/{number}", crash.decision)
            self._decided = number
        if crash.gathers and not self._knows(number):
            self._gather(number)
        return len(crash.chunks), self._decided

    def _knows(self, crash: int) -> bool:
        return self._crash is not None and self._crash[0] == crash

    def _read_crash(self, number: int) -> None:
        place = f"k/{number}"
        data = self._store.get(f"{self._prefix}/{place}", deadline_s=ANSWER_S)
        if data is not None:
            with suppress(BadMessage):
                self._crash = number, self._codec.decode(place, data, Decision)

    def _gather(self, number: int) -> None:
        page = self._page
        for slot in (page.failed if page is not None else ())[:MOST_HALVES]:
            beat = self._beat_of(slot) if slot != self._slot and slot not in self._halves else None
            if beat is None or beat.crash != number or beat.failed < 0:
                continue
            self._halves[slot] = self._chunks([f"c/{number}/{slot}/{at}" for at in range(beat.failed)])

    def _first(self, place: str, decision: Decision) -> Decision:
        """Stores it, where nobody has stored another one; returns what is stored."""
        data = self._codec.encode(place, decision)
        stored = self._store.compare_set(f"{self._prefix}/{place}", b"", data, deadline_s=ANSWER_S)
        try:
            return self._codec.decode(place, stored, Decision)
        except BadMessage:
            return decision

    # --- leading ----------------------------------------------------------------------------------------------------

    def _begin_to_lead(self, page: Page, now: float, hearing: Hearing | None = None) -> None:
        data = self._codec.encode("head", page)
        stored = self._store.compare_set(f"{self._prefix}/head", self._page_bytes, data, deadline_s=ANSWER_S)
        if stored == data:
            self._page, self._page_bytes, self._page_s = page, data, now
            self._leader = Leader(page, now)
            self._hearing = hearing or Hearing()

    def _lead(self, leader: Leader, deciding: tuple[int, Decision] | None, now: float) -> tuple[Page, bool]:
        beats = self._beats()
        self._hearing.hear({slot: (beat.incarnation, beat.count) for slot, beat in beats.items()}, now)
        here = {slot: beat for slot, beat in beats.items() if beat.doing != "ended"}
        heard = {slot: beat for slot, beat in here.items() if self._hearing.silent_s(slot, now) < SILENT_S}
        heard_ranks = {rank for beat in heard.values() for rank in beat.ranks}
        # One whose ranks another has now has only come back under another slot.
        silent = tuple(s for s in sorted(here.keys() - heard.keys()) if not heard_ranks.issuperset(here[s].ranks))
        decided = deciding is not None and deciding[0] == leader.page.incident and leader.page.phase == "collecting"
        if decided and deciding is not None:
            incident, decision = deciding
            self._decision = incident, self._first(f"d/{incident}", decision)
        quiet = tuple(
            slot for slot in here if self._hearing.silent_s(slot, now) >= QUIET_S and (slot in silent or slot in heard)
        )
        given = Given(heard, silent, decided, quiet, beats)
        before = self._page_bytes
        page = leader.next(given, now)
        data = self._codec.encode("head", page)
        stored = self._store.compare_set(f"{self._prefix}/head", before, data, deadline_s=ANSWER_S)
        if stored != data:
            self._leader = None  # somebody has taken over, having heard nothing of us for long
            return page, False
        self._page, self._page_bytes, self._page_s = page, data, now
        if page.phase == "collecting":
            self._fetch(page.incident, heard)
        return page, leader.is_complete(given, now) and self._has_fetched(page.incident, heard)

    def _number(self) -> int:
        data = self._store.get(f"{self._prefix}/n", deadline_s=ANSWER_S)
        return min(int(data), 1 << 16) if data is not None and data.isdigit() else 0

    def _beats(self) -> dict[int, Beat]:
        new = (slot for slot in range(1, self._number() + 1) if slot not in self._slots)
        for slot in islice(new, NEW_AT_ONCE):  # a number in the store may be anybody's
            if self._store.get(f"{self._prefix}/b/{slot}", deadline_s=ANSWER_S) is not None:
                self._slots.add(slot)
        slots = sorted(self._slots)
        found = self._store.get_all([f"{self._prefix}/b/{slot}" for slot in slots], deadline_s=ANSWER_S) or []
        beats = {}
        for slot, data in zip(slots, found, strict=False):
            try:
                beats[slot] = self._codec.decode(f"b/{slot}", data, Beat)
            except BadMessage:
                continue  # as if it were not there: nobody is heard by it
        return beats

    def _fetch(self, incident: int, heard: Mapping[int, Beat]) -> None:
        if self._evidence_of != incident:
            self._evidence, self._evidence_of = {}, incident
        for slot, beat in heard.items():
            mine = beat.incident == incident and slot != self._slot
            if not mine or beat.chunks < 0 or slot in self._evidence:
                continue
            self._evidence[slot] = self._chunks([f"e/{incident}/{slot}/{number}" for number in range(beat.chunks)])

    def _has_fetched(self, incident: int, heard: Mapping[int, Beat]) -> bool:
        return all(
            slot in self._evidence
            for slot, beat in heard.items()
            if slot != self._slot and beat.incident == incident and beat.chunks >= 0
        )

    def _write(self, place: str, data: bytes) -> None:
        self._store.set(f"{self._prefix}/{place}", data, deadline_s=ANSWER_S)
