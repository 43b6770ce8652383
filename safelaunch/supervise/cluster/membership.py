"""One connection of a supervisor to the store: a beat up and a page down each round, and what lies beside them there.

``Channel`` runs it in its thread. Keys, below the job's prefix: ``n`` counts the slots; ``m/SLOT`` is who a node is and
``b/SLOT`` its beat; ``head`` is the leader's page, and ``members`` what it says of single nodes; ``e/ROUND/SLOT`` is a
node's evidence in a round, and ``d/ROUND`` the decision about it, of which the first one counts;
``p/TOPIC`` is the leader's value of a topic.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec import structs

from safelaunch.model import format_ranks
from safelaunch.supervise.cluster.codec import BadMessage, Codec
from safelaunch.supervise.cluster.election import QUIET_S, SILENT_S, Liveness, Succession
from safelaunch.supervise.cluster.exchange import Outbox, Peer, PeerStatus, PeerView, Submissions
from safelaunch.supervise.cluster.leader import Leader, LeaderInput
from safelaunch.supervise.cluster.messages import (
    MOST_MEMBERS,
    MOST_TOPICS,
    Beat,
    Decision,
    LeaderPage,
    NodeCard,
    NodesBySlot,
    Round,
)
from safelaunch.supervise.cluster.store import LARGEST_VALUE, StoreClient
from safelaunch.supervise.control.protocol import NodeStatus

STORE_ANSWER_S = 15.0  # the store's only thread may be resolving a name
LAST_BEAT_S = 1.0
DRAIN_EVERY_S = 0.1
MOST_NAMED = 8
CROWD, CROWD_MEMBERS = 64, 16  # nodes; of more, so many at most are told of: each of them reads it
MOST_HALVES = 64  # of a crash, that one node reads: there is little time
MOST_DECISIONS = 8
NEW_AT_ONCE, MOST_QUESTIONS = 64, 64  # slots that are asked for together; such questions in a round
OVERWRITES = 3  # in a round, of what a stranger writes over the leader's page
FETCH_S = 2.0  # for evidence in one round: a leader that reads on is not heard


class Membership:
    """What a supervisor says and hears under a slot of its own, over one connection or, with ``resume``, several.

    Raises StoreError where the store fails.
    """

    def __init__(self, store: StoreClient, prefix: str, codec: Codec, node: NodeCard) -> None:
        self._store = store
        self._prefix = prefix
        self._codec = codec
        self._node = structs.replace(
            node, incarnation=uuid.uuid4().hex[:16], address=store.own_address, hosts=store.is_local
        )
        self._slot = store.add(f"{prefix}/n", 1, deadline_s=STORE_ANSWER_S)
        self._count = 0
        self._hearing = Liveness()
        self._succession = Succession()
        self._unreadable = Liveness()  # a page that changes, in whatever key, is somebody's
        self._unreadable_s: tuple[float, float] | None = None  # the first and the latest, since one could be read
        self._leader: Leader | None = None
        self._page_bytes = b""
        self._slots: set[int] = set()  # whose beats have been seen
        self._newest: dict[int, Beat] = {}
        self._asked_up_to = 0  # the slots up to here were asked for their first beat the last
        self._cards: dict[int, NodeCard] = {}  # who is under which slot: it is written once
        self._nodes: dict[int, NodeCard] = {}
        self._members: dict[int, tuple[NodeCard, Beat]] = {}
        self._members_bytes, self._edition = b"", 0
        self._page: LeaderPage | None = None
        self._page_s = 0.0
        self._survey: tuple[float, tuple[NodeStatus, ...]] = (0.0, ())
        self._quiet_since: dict[int, float] = {}
        self._submitted: dict[str, tuple[Round, int]] = {}  # by kind, what is in the store, and its chunks
        self._submissions: dict[str, dict[int, tuple[Round, list[bytes]]]] = {}
        self._decisions: dict[Round, Decision] = {}
        self._decided: Round = ""
        self._published: dict[str, tuple[int, bytes]] = {}  # by topic, the newest edition and the value
        self._written = codec.encode(f"m/{self._slot}", self._node)
        self._write(f"m/{self._slot}", self._written)

    def resume(self, store: StoreClient) -> bool:
        """Goes on over another connection, under the same slot. False: it is another store, or this host has moved.

        A slot belongs to the one whose incarnation, which nobody else has, is written there. Counts only ever grow, so
        what the old connection still brings is known to be old.
        """
        address, is_local = store.own_address, store.is_local
        if (address, is_local) != (self._node.address, self._node.hosts):
            return False
        if store.get(f"{self._prefix}/m/{self._slot}", deadline_s=STORE_ANSWER_S) != self._written:
            return False
        self._store = store
        return True

    def leave(self, beat: Beat) -> None:
        self._count += 1
        doing = beat.doing if beat.doing == "stopping" else "ended"
        beat = structs.replace(self._own(beat), doing=doing)
        place = f"b/{self._slot}"
        self._store.set(f"{self._prefix}/{place}", self._codec.encode(place, beat), deadline_s=LAST_BEAT_S)

    def drain(self, patience_s: float) -> None:
        """Waits until all others have left, or are not heard: the store ends with this node."""
        hearing, until = Liveness(), time.monotonic() + patience_s
        while (now := time.monotonic()) < until:
            others = {s: beat for s, beat in self._beats().items() if s != self._slot and beat.doing != "ended"}
            hearing.observe({slot: (beat.incarnation, beat.count) for slot, beat in others.items()}, now)
            if all(hearing.silent_s(slot, now) >= QUIET_S for slot in others):
                return
            time.sleep(DRAIN_EVERY_S)

    def round(self, saying: Outbox) -> PeerView:
        self._count += 1
        self._submit(saying)
        self._decide(saying)
        head = self._exchange(self._codec.encode(f"b/{self._slot}", self._own(saying.beat)))
        now = time.monotonic()
        page = self._read_page(head, now)
        submissions: dict[str, Submissions] = {}
        if self._leader is not None:
            page, beats, heard = self._lead(self._leader, saying, now)
            submissions = self._gather(saying.gathers, beats, heard, now)
            self._take_survey(saying, page, beats, heard, now)
        elif page is None:
            if not self._page_bytes or self._is_foreign(now):
                self._begin_to_lead(LeaderPage(leader=self._slot), now)
                page = self._page
        else:
            self._succeed(page, now)
            self._read_members(page)
            self._read_published(page)
            wanted = frozenset(gather for gather in saying.gathers if "." in gather)
            if wanted or saying.wants_survey:
                beats = self._beats()
                heard = {s: beat for s, beat in beats.items() if beat.doing != "ended" and s not in page.silent}
                submissions = self._gather(wanted, beats, heard, now)
                self._take_survey(saying, page, beats, heard, now)
        if page is not None:
            self._read_decisions(page)
        return PeerView(
            page=page,
            why="they use a different key or protocol version" if self._unreadable_s is not None else "",
            leads=self._leader is not None,
            silent_s=now - self._page_s if page is not None else 0.0,
            submissions=submissions,
            decisions=dict(self._decisions),
            nodes=tuple(self._nodes.values()),
            status=self._status(page),
            is_local=self._store.is_local,
            address=self._node.address,
            peers=self._peers(page, now) if page is not None else (),
            slot=self._slot,
            survey=self._survey,
            published={topic: data for topic, (_, data) in self._published.items()},
        )

    def _own(self, beat: Beat) -> Beat:
        """With what this session knows of itself."""
        submitted = tuple(self._submitted.values())
        own = {"incarnation": self._node.incarnation, "count": self._count}
        return structs.replace(beat, submitted=submitted, decided=self._decided, **own)

    # --- a round of all nodes about something: evidence, and a decision ---------------------------------------------

    def _submit(self, saying: Outbox) -> None:
        """Stores what is new of this node's evidence. Nothing expires in the store: what is over is removed."""
        current = {round_ for round_, _ in saying.submitted.values()}
        for kind, (round_, count) in list(self._submitted.items()):
            if round_ not in current:
                for at in range(count):
                    self._store.delete(f"{self._prefix}/{_place(round_, self._slot, at)}", deadline_s=STORE_ANSWER_S)
                del self._submitted[kind]
        for kind, (round_, chunks) in saying.submitted.items():
            if kind not in self._submitted:
                for at, chunk in enumerate(chunks):
                    self._seal(_place(round_, self._slot, at), chunk)
                self._submitted[kind] = round_, len(chunks)

    def _gather(
        self, wanted: frozenset[str], beats: Mapping[int, Beat], heard: Mapping[int, Beat], now: float
    ) -> dict[str, Submissions]:
        """Reads what the others have submitted, for a while: a leader that reads on is not heard."""
        self._submissions = {one: self._submissions.get(one, {}) for one in wanted}
        for one, found in self._submissions.items():
            most = MOST_HALVES if one.startswith("crash.") else len(beats)
            for slot, beat in beats.items():
                for round_, count in beat.submitted:
                    is_it = round_ == one or ("." not in one and round_.startswith(f"{one}."))
                    is_new = slot != self._slot and (slot not in found or found[slot][0] != round_)
                    if is_it and is_new and len(found) < most and time.monotonic() < now + FETCH_S:
                        found[slot] = round_, self._chunks(round_, slot, count)
        others = {slot for slot, beat in heard.items() if beat.ranks and slot != self._slot}
        return {
            one: Submissions(
                {slot: chunks for slot, (_, chunks) in found.items()},
                {slot: round_ for slot, (round_, _) in found.items()},
                len(others - found.keys()),
            )
            for one, found in self._submissions.items()
        }

    def _chunks(self, round_: Round, slot: int, count: int) -> list[bytes]:
        """A node's evidence; empty where it cannot be read."""
        try:
            return [self._unseal(_place(round_, slot, at)) for at in range(count)]
        except BadMessage:
            return []

    def _decide(self, saying: Outbox) -> None:
        """Stores a decision where nobody has stored another one; what is stored is everybody's."""
        for round_, decision in saying.decisions.items():
            if round_ not in self._decisions:
                place, data = f"d/{round_}", self._codec.encode(f"d/{round_}", decision)
                stored = self._store.compare_set(f"{self._prefix}/{place}", b"", data, deadline_s=STORE_ANSWER_S)
                self._store_decision(round_, stored, decision)
                self._decided = round_

    def _read_decisions(self, page: LeaderPage) -> None:
        """Those about a hang once the page says so; about a crash at once: the store may end with another node."""
        hang = f"hang.{page.incident}" if page.phase in ("decided", "agreed") else ""
        crashes = (self._submitted.get("crash", ("", 0))[0], f"crash.{page.crash}" if page.crash else "")
        for round_ in filter(None, dict.fromkeys((hang, *crashes))):
            if round_ not in self._decisions:
                data = self._store.get(f"{self._prefix}/d/{round_}", deadline_s=STORE_ANSWER_S)
                self._store_decision(round_, data or b"")

    def _store_decision(self, round_: Round, data: bytes, otherwise: Decision | None = None) -> None:
        try:
            found: Decision | None = self._codec.decode(f"d/{round_}", data, Decision)
        except BadMessage:
            found = otherwise
        if found is not None:
            self._decisions = dict([*self._decisions.items(), (round_, found)][-MOST_DECISIONS:])

    # --- a view for a person ----------------------------------------------------------------------------------------

    def _take_survey(
        self, saying: Outbox, page: LeaderPage, beats: Mapping[int, Beat], heard: Mapping[int, Beat], now: float
    ) -> None:
        if saying.wants_survey:
            self._survey = now, self._all_nodes(page, beats, heard)

    def _all_nodes(
        self, page: LeaderPage, beats: Mapping[int, Beat], heard: Mapping[int, Beat]
    ) -> tuple[NodeStatus, ...]:
        self._read_cards(sorted(beats.keys() - self._cards.keys()))
        heard_ranks = {rank for beat in heard.values() for rank in beat.ranks}
        return tuple(
            NodeStatus(
                host=self._cards[slot].host,
                ranks=format_ranks(beat.ranks),
                step=beat.step if beat.step >= 0 else None,
                state="ended" if beat.doing == "ended" else "heard" if slot in heard else "silent",
                doing=beat.doing,
                leads=slot == page.leader,
                here=slot == self._slot,
                trouble=beat.trouble,
            )
            for slot, beat in sorted(beats.items(), key=lambda item: (item[1].ranks[:1], item[0]))
            # One whose ranks another has now has only come back under another slot.
            if slot in self._cards and (slot in heard or not heard_ranks.issuperset(beat.ranks))
        )

    # --- following --------------------------------------------------------------------------------------------------

    def _exchange(self, beat: bytes) -> bytes | None:
        """The beat up, the page down."""
        mine, head = f"{self._prefix}/b/{self._slot}", f"{self._prefix}/head"
        if self._page_bytes:
            return self._store.exchange(mine, beat, head, deadline_s=STORE_ANSWER_S)
        self._store.set(mine, beat, deadline_s=STORE_ANSWER_S)
        return self._store.get(head, deadline_s=STORE_ANSWER_S)

    def _read_page(self, data: bytes | None, now: float) -> LeaderPage | None:
        if data is None:
            return None
        if data == self._page_bytes:
            return self._page
        self._page_bytes = data
        try:
            found = self._codec.decode("head", data, LeaderPage)
        except BadMessage:  # whoever leads writes over it
            self._unreadable.observe({0: (data[-200:].hex(), len(data))}, now)
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

    def _status(self, page: LeaderPage | None) -> PeerStatus:
        if page is None:
            return PeerStatus()
        others = [slot for slot in page.stopping if slot != self._slot]
        troubles = tuple(text for slot, text in page.troubles if slot != self._slot)
        anew = any(slot != self._slot for slot in page.restarting)
        return PeerStatus(bool(others), troubles, sum(slot != self._slot for slot in page.quiet), restarting=anew)

    def _read_published(self, page: LeaderPage) -> None:
        """Reads the leader's values that changed. One that can't be read leaves the previous one."""
        for topic, edition in page.published:
            known, data = self._published.get(topic, (0, b""))
            if edition != known:
                with suppress(BadMessage):
                    data = self._unseal(f"p/{topic}")
                self._published[topic] = edition, data

    def _read_members(self, page: LeaderPage) -> None:
        if page.members == self._edition:
            return
        data = self._store.get(f"{self._prefix}/members", deadline_s=STORE_ANSWER_S)
        self._edition = page.members
        with suppress(BadMessage):
            self._store_members(self._codec.decode("members", data or b"", NodesBySlot), page)

    def _store_members(self, members: NodesBySlot, page: LeaderPage) -> None:
        self._members = {slot: (node, beat) for slot, node, beat in members.nodes}
        for slot, (node, _) in sorted(self._members.items()):
            if slot not in (self._slot, *page.silent) and len(self._nodes) < MOST_NAMED:
                self._nodes[slot] = node

    def _peers(self, page: LeaderPage, now: float) -> tuple[Peer, ...]:
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

    def _silent_s(self, slot: int, page: LeaderPage, now: float) -> float:
        if self._leader is not None:
            return self._hearing.silent_s(slot, now)
        if slot == page.leader:
            return now - self._page_s
        return QUIET_S + now - self._quiet_since[slot]

    def _read_cards(self, slots: Sequence[int]) -> None:
        """Who is under these slots; nothing of a batch in which one is missing."""
        for begin in range(0, len(slots), NEW_AT_ONCE):
            batch = slots[begin : begin + NEW_AT_ONCE]
            found = self._store.get_all([f"{self._prefix}/m/{slot}" for slot in batch], deadline_s=STORE_ANSWER_S) or []
            for slot, data in zip(batch, found, strict=False):
                with suppress(BadMessage):
                    self._cards[slot] = self._codec.decode(f"m/{slot}", data, NodeCard)

    def _decode_beats(self, slots: Sequence[int], found: Sequence[bytes]) -> dict[int, Beat]:
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

    # --- leading ----------------------------------------------------------------------------------------------------

    def _is_foreign(self, now: float) -> bool:
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
            return self._store.compare_set(head, self._page_bytes, data, deadline_s=STORE_ANSWER_S)
        self._store.set(
            head, data, deadline_s=STORE_ANSWER_S
        )  # no page of ours; a server would not take it for comparing
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

    def _begin_to_lead(self, page: LeaderPage, now: float, hearing: Liveness | None = None) -> None:
        data = self._codec.encode("head", page)
        if self._replace_page(data) == data:
            self._page, self._page_bytes, self._page_s = page, data, now
            self._leader = Leader(page, now)
            self._members_bytes = b""
            self._hearing = hearing or Liveness()

    def _succeed(self, page: LeaderPage, now: float) -> None:
        """Takes over from a leader that is not heard, where this node is the next."""
        if self._succession.is_orphaned(page, now) and self._succession.is_due(self._slot, page, now):
            beats = self._beats()
            if self._succession.takes_over(self._slot, beats, now):
                hearing = self._succession.hearing(page.leader, now)
                self._begin_to_lead(structs.replace(page, leader=self._slot, epoch=page.epoch + 1), now, hearing)

    def _lead(self, leader: Leader, saying: Outbox, now: float) -> tuple[LeaderPage, dict[int, Beat], dict[int, Beat]]:
        """Writes the next page. Returns it, all beats, and those of the nodes that are heard."""
        beats = self._beats()
        self._hearing.observe({slot: (beat.incarnation, beat.count) for slot, beat in beats.items()}, now)
        here = {slot: beat for slot, beat in beats.items() if beat.doing != "ended"}
        heard = {slot: beat for slot, beat in here.items() if self._hearing.silent_s(slot, now) < SILENT_S}
        heard_ranks = {rank for beat in heard.values() for rank in beat.ranks}
        # One whose ranks another has now has only come back under another slot.
        silent = tuple(s for s in sorted(here.keys() - heard.keys()) if not heard_ranks.issuperset(here[s].ranks))
        quiet = tuple(
            slot for slot in here if self._hearing.silent_s(slot, now) >= QUIET_S and (slot in silent or slot in heard)
        )
        decided = f"hang.{leader.page.incident}" in self._decisions  # it is there before the page says so
        page = leader.next(LeaderInput(heard, silent, decided, quiet, beats), now)
        page = leader.page = self._publish(self._publish_members(page, beats), saying)
        data = self._codec.encode("head", page)
        if self._overwrite_page(data, now):
            self._page, self._page_bytes, self._page_s = page, data, now
        return page, beats, heard

    def _publish(self, page: LeaderPage, saying: Outbox) -> LeaderPage:
        """Writes the values that changed, and returns the page with their editions and this node's topics."""
        editions = dict(page.published)
        for topic, data in saying.published.items():
            if data != self._published.get(topic, (0, b""))[1]:
                self._seal(f"p/{topic}", data)
                editions[topic] = editions.get(topic, 0) + 1
                self._published[topic] = editions[topic], data
        topics = tuple(sorted(gather for gather in saying.gathers if "." not in gather))
        return structs.replace(page, topics=topics, published=tuple(sorted(editions.items()))[:MOST_TOPICS])

    def _publish_members(self, page: LeaderPage, beats: Mapping[int, Beat]) -> LeaderPage:
        """Writes ``Members`` where that has changed, and returns the page with its edition."""
        says = (*page.silent, *page.stopping, *(slot for slot, _ in page.troubles), *page.failed, *page.quiet)
        named = sorted(beats.keys() - set(page.silent))[: MOST_NAMED + 1]
        most = CROWD_MEMBERS if page.nodes > CROWD else MOST_MEMBERS
        told = [slot for slot in dict.fromkeys((page.leader, *says, *named)) if slot in beats][:most]
        self._read_cards([slot for slot in told if slot not in self._cards])
        members = NodesBySlot(tuple((s, self._cards[s], _lasting(beats[s])) for s in sorted(told) if s in self._cards))
        data = self._codec.encode("members", members)
        if data != self._members_bytes:
            self._write("members", data)
            page = structs.replace(page, members=page.members + 1)
            self._members_bytes, self._edition = data, page.members
            self._store_members(members, page)
        return page

    def _number(self) -> int:
        data = self._store.read(f"{self._prefix}/n", deadline_s=STORE_ANSWER_S)
        return min(int(data), 1 << 16) if data.isdigit() else 0

    def _beats(self) -> dict[int, Beat]:
        self._discover(self._number())
        slots = sorted(self._slots)
        found = self._store.read_all([f"{self._prefix}/b/{slot}" for slot in slots], deadline_s=STORE_ANSWER_S)
        return self._decode_beats(slots, found)

    def _discover(self, number: int) -> None:
        """Who has come. A number in the store may be anybody's, so it goes through the slots bit by bit."""
        new = [slot for slot in range(1, number + 1) if slot not in self._slots]
        after = bisect_right(new, self._asked_up_to)
        new = new[after:] + new[:after]
        batches = [new[at : at + NEW_AT_ONCE] for at in range(0, len(new), NEW_AT_ONCE)][::-1]
        for _ in range(MOST_QUESTIONS):
            if not batches:
                return
            batch = batches.pop()
            self._asked_up_to = batch[-1]
            if self._store.has([f"{self._prefix}/b/{slot}" for slot in batch], deadline_s=STORE_ANSWER_S):
                self._slots.update(batch)
            elif len(batch) > 1:
                middle = len(batch) // 2
                batches += [batch[middle:], batch[:middle]]

    def _seal(self, place: str, body: bytes) -> None:
        self._write(place, self._codec.seal(place, body))

    def _unseal(self, place: str) -> bytes:
        """Raises BadMessage."""
        return self._codec.open(place, self._store.get(f"{self._prefix}/{place}", deadline_s=STORE_ANSWER_S) or b"")

    def _write(self, place: str, data: bytes) -> None:
        self._store.set(f"{self._prefix}/{place}", data, deadline_s=STORE_ANSWER_S)


def _place(round_: Round, slot: int, at: int) -> str:
    return f"e/{round_}/{slot}/{at}"


def _lasting(beat: Beat) -> Beat:
    """What all may know of it: nothing that changes with every step."""
    kept = {name: getattr(beat, name) for name in ("ranks", "world", "attempt", "doing", "trouble", "agent")}
    crash = tuple(one for one in beat.submitted if one[0].startswith("crash."))
    return Beat(beat.incarnation, 0, submitted=crash, **kept)
