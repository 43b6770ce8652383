"""One connection of a supervisor to the store: a beat up and a page down each round, and what lies beside them there.

``Channel`` runs it in its thread. Keys, below the job's prefix: ``n`` counts the slots; ``m/SLOT`` is who a node is and
``b/SLOT`` its beat; ``head`` is the leader's page, and ``members`` what it says of single nodes; ``e/``, ``x/`` and
``c/`` are evidence about an incident, for who asks and about a crash; ``q/`` is what is asked; ``d/`` and ``k/`` are
decisions about an incident and a crash. ``s/SLOT`` has a node's newest consistency checks, and ``wrong`` what the
leader has found in those of all.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import structs

from safelaunch.supervise.cluster.board import Board
from safelaunch.supervise.cluster.council import QUIET_S, SILENT_S, Given, Hearing, Leader, Succession
from safelaunch.supervise.cluster.messages import (
    MOST_MEMBERS,
    BadMessage,
    Beat,
    Codec,
    Decision,
    Members,
    Node,
    Page,
    Question,
)
from safelaunch.supervise.cluster.seen import Answers, Crash, Neighbour, Peer, Seen, Word
from safelaunch.supervise.cluster.store import LARGEST_VALUE, Store

ANSWER_S = 15.0  # the store's only thread may be resolving a name
GOODBYE_S = 1.0
SEE_OFF_EVERY_S = 0.1
MOST_NAMED = 8
CROWD, CROWD_MEMBERS = 64, 16  # nodes; of more, so many at most are told of: each of them reads it
MOST_HALVES = 64  # of a crash, that one node reads
NEW_AT_ONCE, MOST_QUESTIONS = 64, 64  # slots that are asked for together; such questions in a round
OVERWRITES = 3  # in a round, of what a stranger writes over the leader's page
FETCH_S = 2.0  # for evidence in one round: a leader that reads on is not heard


class Session:
    """What a supervisor says and hears under a slot of its own, over one connection or, with ``resume``, several.

    Raises StoreError where the store fails.
    """

    def __init__(self, store: Store, prefix: str, codec: Codec, node: Node) -> None:
        self._store = store
        self._prefix = prefix
        self._codec = codec
        self._node = structs.replace(
            node, incarnation=uuid.uuid4().hex[:16], address=store.own_address, hosts=store.is_local
        )
        self._slot = store.add(f"{prefix}/n", 1, deadline_s=ANSWER_S)
        self._count = 0
        self._hearing = Hearing()
        self._succession = Succession()
        self._unreadable = Hearing()  # a page that changes, in whatever key, is somebody's
        self._unreadable_s: tuple[float, float] | None = None  # the first and the latest, since one could be read
        self._leader: Leader | None = None
        self._page_bytes = b""
        self._slots: set[int] = set()  # whose beats have been seen
        self._newest: dict[int, Beat] = {}
        self._asked_to = 0  # the slots up to here were asked for their first beat the last
        self._known: dict[int, Node] = {}  # who is under which slot: it is written once
        self._nodes: dict[int, Node] = {}
        self._members: dict[int, tuple[Node, Beat]] = {}
        self._members_bytes, self._edition = b"", 0
        self._evidence: dict[int, list[bytes]] = {}
        self._evidence_of = 0  # the incident
        self._handed_in: list[str] = []
        self._decision: tuple[int, Decision] | None = None
        self._page: Page | None = None
        self._page_s = 0.0
        self.looks_around = False
        self.asks: Question | None = None
        self._around: tuple[float, tuple[Neighbour, ...]] = (0.0, ())
        self._asked = 0  # the number of the question that this node asks
        self._asking: Question | None = None  # that question
        self._answers: dict[int, list[bytes]] = {}
        self._questions: dict[int, Question] = {}
        self._dumped = (0, -1)
        self._handed_in_dumps: list[str] = []
        self._quiet_since: dict[int, float] = {}
        self._failed_in = self._decided = 0  # the crash about which this node's evidence, and its verdict, is stored
        self._crash: tuple[int, Decision] | None = None
        self._halves: dict[int, list[bytes]] = {}
        self.board = Board(self._slot, self._sealed, self._unsealed)
        self._written = codec.encode(f"m/{self._slot}", self._node)
        self._write(f"m/{self._slot}", self._written)

    def resume(self, store: Store) -> bool:
        """Goes on over another connection, under the same slot. False: it is another store, or this host has moved.

        A slot belongs to the one whose incarnation, which nobody else has, is written there. Counts only ever grow, so
        what the old connection still brings is known to be old.
        """
        address, is_local = store.own_address, store.is_local
        if (address, is_local) != (self._node.address, self._node.hosts):
            return False
        if store.get(f"{self._prefix}/m/{self._slot}", deadline_s=ANSWER_S) != self._written:
            return False
        self._store = store
        return True

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
        self._ask()
        dumps = {"asks": max(self._asked, 0), "dumped": self._dumped}
        own = {"incarnation": self._node.incarnation, "count": self._count, "checks": self.board.edition}
        beat = structs.replace(beat, **own, **dumps)
        head = self._exchange(self._codec.encode(f"b/{self._slot}", beat))
        now = time.monotonic()
        page = self._read_page(head, now)
        complete = False
        if self._leader is not None:
            page, complete = self._lead(self._leader, deciding, now)
        elif page is None:
            if not self._page_bytes or self._is_strangers(now):
                self._begin_to_lead(Page(leader=self._slot), now)
                page = self._page
        elif self._succession.is_orphaned(page, now) and self._succession.is_due(self._slot, page, now):
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
        if page is not None and self._leader is None:
            self._read_members(page)
            self.board.read_wrong(page)
        answers = self._of_all(page, now) if page is not None else None
        return Seen(
            page=page,
            why="they use a different key or protocol version" if self._unreadable_s is not None else "",
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
            checks=dict(self.board.checks) if self._leader is not None else {},
            wrong=self.board.wrong,
            questions=self._hear_questions(page) if page is not None else {},
        )

    # --- what is asked of all nodes: a view for a person, their evidence for a dump, their samples -----------------

    def _ask(self) -> None:
        """Asks, or asks no longer, for what this node wants of all: the question is there before anybody is asked."""
        asks = self.asks
        if self._asked and asks is not self._asking:  # one question may follow another within a round
            self._store.delete(f"{self._prefix}/q/{self._asked}", deadline_s=ANSWER_S)
            self._asked = 0
        if asks is not None and not self._asked:
            self._asked, self._answers = self._store.add(f"{self._prefix}/x", 1, deadline_s=ANSWER_S), {}
            self._asking = asks
            place = f"q/{self._asked}"
            self._write(place, self._codec.encode(place, asks))

    def _hear_questions(self, page: Page) -> dict[int, Question]:
        """What others want to know, by the number under which they do. One that says nothing wants the evidence."""
        for number in page.dumps:
            if number not in self._questions and number != self._asked:
                place = f"q/{number}"
                data = self._store.get(f"{self._prefix}/{place}", deadline_s=ANSWER_S)
                self._questions[number] = Question()
                with suppress(BadMessage):
                    self._questions[number] = self._codec.decode(place, data, Question) if data else Question()
        self._questions = {number: one for number, one in self._questions.items() if number in page.dumps}
        return dict(self._questions)

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

    def _exchange(self, beat: bytes) -> bytes | None:
        """The beat up, the page down."""
        mine, head = f"{self._prefix}/b/{self._slot}", f"{self._prefix}/head"
        if self._page_bytes:
            return self._store.exchange(mine, beat, head, deadline_s=ANSWER_S)
        self._store.set(mine, beat, deadline_s=ANSWER_S)
        return self._store.get(head, deadline_s=ANSWER_S)

    def _read_page(self, data: bytes | None, now: float) -> Page | None:
        if data is None:
            return None
        if data == self._page_bytes:
            return self._page
        self._page_bytes = data
        try:
            found = self._codec.decode("head", data, Page)
        except BadMessage:  # whoever leads writes over it
            self._unreadable.hear({0: (data[-200:].hex(), len(data))}, now)
            self._unreadable_s = (self._unreadable_s or (now, now))[0], now
            return self._page
        self._unreadable_s = None
        if self._leader is not None:
            own = self._leader.page
            if (found.epoch, -found.leader) <= (own.epoch, -own.leader):
                return self._page  # our own, or of an earlier term: nobody has taken over
            self._leader = None
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

    def _word(self, page: Page | None) -> Word:
        if page is None:
            return Word()
        others = [slot for slot in page.stopping if slot != self._slot]
        troubles = tuple(text for slot, text in page.troubles if slot != self._slot)
        anew = any(slot != self._slot for slot in page.anew)
        return Word(bool(others), troubles, sum(slot != self._slot for slot in page.quiet), anew=anew)

    def _read_members(self, page: Page) -> None:
        if page.members == self._edition:
            return
        data = self._store.get(f"{self._prefix}/members", deadline_s=ANSWER_S)
        self._edition = page.members
        with suppress(BadMessage):
            self._know_members(self._codec.decode("members", data or b"", Members), page)

    def _know_members(self, members: Members, page: Page) -> None:
        self._members = {slot: (node, beat) for slot, node, beat in members.nodes}
        for slot, (node, _) in sorted(self._members.items()):
            if slot not in (self._slot, *page.silent) and len(self._nodes) < MOST_NAMED:
                self._nodes[slot] = node

    def _know(self, page: Page, now: float) -> tuple[Peer, ...]:
        """Of whom there is something to say."""
        quiet = {*page.quiet, *page.silent}
        if now - self._page_s >= QUIET_S:
            quiet.add(page.leader)
        self._quiet_since = {slot: self._quiet_since.get(slot, now) for slot in quiet}
        return tuple(
            Peer(slot, node, beat, self._silent_s(slot, page, now) if slot in quiet else 0.0)
            for slot, (node, beat) in sorted(self._members.items())
            if slot != self._slot
        )

    def _silent_s(self, slot: int, page: Page, now: float) -> float:
        if self._leader is not None:
            return self._hearing.silent_s(slot, now)
        if slot == page.leader:
            return now - self._page_s
        return QUIET_S + now - self._quiet_since[slot]

    def _learn(self, slots: Sequence[int]) -> None:
        """Who is under these slots; nothing of a batch in which one is missing."""
        for begin in range(0, len(slots), NEW_AT_ONCE):
            batch = slots[begin : begin + NEW_AT_ONCE]
            found = self._store.get_all([f"{self._prefix}/m/{slot}" for slot in batch], deadline_s=ANSWER_S) or []
            for slot, data in zip(batch, found, strict=False):
                with suppress(BadMessage):
                    self._known[slot] = self._codec.decode(f"m/{slot}", data, Node)

    def _beats_of(self, slots: Sequence[int]) -> dict[int, Beat]:
        """Their beats; none where one is missing."""
        found = self._store.get_all([f"{self._prefix}/b/{slot}" for slot in slots], deadline_s=ANSWER_S) or []
        return self._decoded(slots, found)

    def _decoded(self, slots: Sequence[int], found: Sequence[bytes]) -> dict[int, Beat]:
        """The newest beat of each. While one cannot be read, the last one counts, by which nobody is heard for long.

        Counts only ever grow: what is older than what was read before is a connection's that has been given up, or a
        stranger's.
        """
        for slot, data in zip(slots, found, strict=False):
            with suppress(BadMessage):
                beat, known = self._codec.decode(f"b/{slot}", data, Beat), self._newest.get(slot)
                if known is None or known.incarnation != beat.incarnation or beat.count >= known.count:
                    self._newest[slot] = beat
        return {slot: self._newest[slot] for slot in slots if slot in self._newest}

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
        failed = (page.failed if page is not None else ())[:MOST_HALVES]
        left = [slot for slot in failed if slot != self._slot and slot not in self._halves]
        for slot, beat in self._beats_of(left).items():
            if beat.crash == number and beat.failed >= 0:
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

    def _is_strangers(self, now: float) -> bool:
        """Whether nobody of this job can have written the page that can't be read.

        One that changes may be that of supervisors of another version; of a job with a key, none of its own.
        """
        if self._unreadable_s is None:
            return False
        known_s = now - self._unreadable_s[0] if self._codec.signs else self._unreadable.silent_s(0, now)
        return known_s >= SILENT_S

    def _replace_page(self, data: bytes) -> bytes:
        """Stores ``data`` where the page is still the one that was read last. Returns what is stored then."""
        head = f"{self._prefix}/head"
        if len(self._page_bytes) <= LARGEST_VALUE:
            return self._store.compare_set(head, self._page_bytes, data, deadline_s=ANSWER_S)
        self._store.set(head, data, deadline_s=ANSWER_S)  # no page of ours; a server would not take it for comparing
        return data

    def _overwrite_page(self, data: bytes, now: float) -> bool:
        """Stores the leader's page, also over what a stranger writes meanwhile; False if it could not.

        A page that can be read is of somebody who has taken over, having heard nothing of us for long.
        """
        for _ in range(OVERWRITES):
            stored = self._replace_page(data)
            if stored == data:
                return True
            self._read_page(stored, now)
            if self._unreadable_s is None:
                break
        return False

    def _begin_to_lead(self, page: Page, now: float, hearing: Hearing | None = None) -> None:
        data = self._codec.encode("head", page)
        if self._replace_page(data) == data:
            self._page, self._page_bytes, self._page_s = page, data, now
            self._leader = Leader(page, now)
            self._members_bytes = b""
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
        quiet = tuple(
            slot for slot in here if self._hearing.silent_s(slot, now) >= QUIET_S and (slot in silent or slot in heard)
        )
        given = Given(heard, silent, decided, quiet, beats)
        page = leader.page = self.board.with_wrong(self._introduce(leader.next(given, now), beats))
        if self.board.compares:
            self.board.read_checks(heard, now + FETCH_S)
        if deciding is not None and decided and page.phase == "decided":  # it is there before the page says so
            self._decision = page.incident, self._first(f"d/{page.incident}", deciding[1])
        data = self._codec.encode("head", page)
        if not self._overwrite_page(data, now):
            return page, False
        self._page, self._page_bytes, self._page_s = page, data, now
        if page.phase == "collecting":
            self._fetch(page.incident, heard, now)
        return page, leader.is_complete(given, now) and self._has_fetched(page.incident, heard)

    def _introduce(self, page: Page, beats: Mapping[int, Beat]) -> Page:
        """Writes ``Members`` where that has changed, and returns the page with its edition."""
        says = (*page.silent, *page.stopping, *(slot for slot, _ in page.troubles), *page.failed, *page.quiet)
        named = sorted(beats.keys() - set(page.silent))[: MOST_NAMED + 1]
        most = CROWD_MEMBERS if page.nodes > CROWD else MOST_MEMBERS
        told = [slot for slot in dict.fromkeys((page.leader, *says, *named)) if slot in beats][:most]
        self._learn([slot for slot in told if slot not in self._known])
        members = Members(tuple((s, self._known[s], _lasting(beats[s])) for s in sorted(told) if s in self._known))
        data = self._codec.encode("members", members)
        if data != self._members_bytes:
            self._write("members", data)
            page = structs.replace(page, members=page.members + 1)
            self._members_bytes, self._edition = data, page.members
            self._know_members(members, page)
        return page

    def _number(self) -> int:
        data = self._store.read(f"{self._prefix}/n", deadline_s=ANSWER_S)
        return min(int(data), 1 << 16) if data.isdigit() else 0

    def _beats(self) -> dict[int, Beat]:
        self._discover(self._number())
        slots = sorted(self._slots)
        found = self._store.read_all([f"{self._prefix}/b/{slot}" for slot in slots], deadline_s=ANSWER_S)
        return self._decoded(slots, found)

    def _discover(self, number: int) -> None:
        """Who has come. A number in the store may be anybody's, so it goes through the slots bit by bit."""
        new = [slot for slot in range(1, number + 1) if slot not in self._slots]
        after = bisect_right(new, self._asked_to)
        new = new[after:] + new[:after]
        batches = [new[at : at + NEW_AT_ONCE] for at in range(0, len(new), NEW_AT_ONCE)][::-1]
        for _ in range(MOST_QUESTIONS):
            if not batches:
                return
            batch = batches.pop()
            self._asked_to = batch[-1]
            if self._store.has([f"{self._prefix}/b/{slot}" for slot in batch], deadline_s=ANSWER_S):
                self._slots.update(batch)
            elif len(batch) > 1:
                middle = len(batch) // 2
                batches += [batch[middle:], batch[:middle]]

    def _fetch(self, incident: int, heard: Mapping[int, Beat], now: float) -> None:
        if self._evidence_of != incident:
            self._evidence, self._evidence_of = {}, incident
        for slot, beat in heard.items():
            if time.monotonic() - now > FETCH_S:
                return
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

    def _sealed(self, place: str, body: bytes) -> None:
        self._write(place, self._codec.seal(place, body))

    def _unsealed(self, place: str) -> bytes:
        """Raises BadMessage."""
        return self._codec.open(place, self._store.get(f"{self._prefix}/{place}", deadline_s=ANSWER_S) or b"")

    def _write(self, place: str, data: bytes) -> None:
        self._store.set(f"{self._prefix}/{place}", data, deadline_s=ANSWER_S)


def _lasting(beat: Beat) -> Beat:
    """What all may know of it: nothing that changes with every step."""
    kept = {name: getattr(beat, name) for name in ("ranks", "world", "attempt", "doing", "trouble", "agent", "crash")}
    return Beat(beat.incarnation, 0, failed=beat.failed, **kept)
