"""This node's membership in the job: each round, it writes its beat and reads the leader's page.

Store keys below the job's prefix: ``n`` counts the slots; ``m/SLOT`` is a node's card and ``b/SLOT`` its beat; ``head``
is the leader's page; ``members`` holds cards and beats that the leader passes on; ``e/ROUND/SLOT`` is evidence;
``d/ROUND`` is the first decision; ``p/TOPIC`` is the leader's value of a topic.
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

STORE_ANSWER_S = 15.0  # the store's only thread might be resolving a name
LAST_BEAT_S = 1.0
DRAIN_EVERY_S = 0.1
MOST_NAMED = 8
CROWD, CROWD_MEMBERS = 64, 16  # nodes; beyond CROWD, the leader passes on fewer, as every node reads them
MOST_HALVES = 64  # submissions about a crash, for which there is little time
MOST_DECISIONS = 8
NEW_AT_ONCE, MOST_QUESTIONS = 64, 64  # slots per store query; queries per round
OVERWRITES = 3  # attempts per round to replace another writer's page
FETCH_S = 2.0  # for evidence in one round, in which a reading leader sends no page


class Membership:
    """Exchanges records in one slot. After NodeStoreError, ``resume`` continues over a new connection."""

    def __init__(self, store: StoreClient, prefix: str, codec: Codec, node: NodeCard) -> None:
        self._store = store
        self._prefix = prefix
        self._codec = codec
        self._node = structs.replace(
            node, incarnation=uuid.uuid4().hex[:16], address=store.own_address, hosts=store.is_local
        )
        self._slot = store.add(f"{prefix}/n", 1, deadline_s=STORE_ANSWER_S)
        self._count = 0
        self._liveness = Liveness()
        self._succession = Succession()
        self._unreadable = Liveness()
        self._unreadable_s: tuple[float, float] | None = None
        self._leader: Leader | None = None
        self._page_bytes = b""
        self._slots: set[int] = set()
        self._newest: dict[int, Beat] = {}
        self._asked_up_to = 0
        self._cards: dict[int, NodeCard] = {}
        self._nodes: dict[int, NodeCard] = {}
        self._members: dict[int, tuple[NodeCard, Beat]] = {}
        self._members_bytes, self._edition = b"", 0
        self._page: LeaderPage | None = None
        self._page_s = 0.0
        self._survey: tuple[float, tuple[NodeStatus, ...]] = (0.0, ())
        self._quiet_since: dict[int, float] = {}
        self._submitted: dict[str, tuple[Round, int]] = {}  # by kind: round and number of chunks
        self._submissions: dict[str, dict[int, tuple[Round, list[bytes]]]] = {}
        self._decisions: dict[Round, Decision] = {}
        self._decided: Round = ""
        self._published: dict[str, tuple[int, bytes]] = {}
        self._written = codec.encode(f"m/{self._slot}", self._node)
        self._write(f"m/{self._slot}", self._written)

    def resume(self, store: StoreClient) -> bool:
        """Continues over a new connection.

        Returns False if the address of the store or of this host has changed, or if another node uses the slot.

        Late messages of the old connection are recognized, because counts only grow.
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
        """Waits until all other nodes have left or are silent, because they need the store that this node hosts."""
        liveness, until = Liveness(), time.monotonic() + patience_s
        while (now := time.monotonic()) < until:
            others = {s: beat for s, beat in self._beats().items() if s != self._slot and beat.doing != "ended"}
            liveness.observe({slot: (beat.incarnation, beat.count) for slot, beat in others.items()}, now)
            if all(liveness.silent_s(slot, now) >= QUIET_S for slot in others):
                return
            time.sleep(DRAIN_EVERY_S)

    def round(self, outbox: Outbox) -> PeerView:
        self._count += 1
        self._submit(outbox)
        self._decide(outbox)
        head = self._exchange(self._codec.encode(f"b/{self._slot}", self._own(outbox.beat)))
        now = time.monotonic()
        page = self._read_page(head, now)
        submissions: dict[str, Submissions] = {}
        if self._leader is not None:
            page, beats, responsive = self._lead(self._leader, outbox, now)
            submissions = self._gather(outbox.gathers, beats, responsive, now)
            self._take_survey(outbox, page, beats, responsive, now)
        elif page is None:
            if not self._page_bytes or self._is_foreign(now):
                self._begin_to_lead(LeaderPage(leader=self._slot), now)
                page = self._page
        else:
            self._succeed(page, now)
            self._read_members(page)
            self._read_published(page)
            wanted = frozenset(gather for gather in outbox.gathers if "." in gather)
            if wanted or outbox.wants_survey:
                beats = self._beats()
                responsive = {s: beat for s, beat in beats.items() if beat.doing != "ended" and s not in page.silent}
                submissions = self._gather(wanted, beats, responsive, now)
                self._take_survey(outbox, page, beats, responsive, now)
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
        submitted = tuple(self._submitted.values())
        own = {"incarnation": self._node.incarnation, "count": self._count}
        return structs.replace(beat, submitted=submitted, decided=self._decided, **own)

    # --- evidence and decisions -------------------------------------------------------------------------------------

    def _submit(self, outbox: Outbox) -> None:
        """Stores new evidence and deletes old evidence, because nothing in the store expires."""
        current = {round_ for round_, _ in outbox.submitted.values()}
        for kind, (round_, count) in list(self._submitted.items()):
            if round_ not in current:
                for at in range(count):
                    self._store.delete(f"{self._prefix}/{_place(round_, self._slot, at)}", deadline_s=STORE_ANSWER_S)
                del self._submitted[kind]
        for kind, (round_, chunks) in outbox.submitted.items():
            if kind not in self._submitted:
                for at, chunk in enumerate(chunks):
                    self._seal(_place(round_, self._slot, at), chunk)
                self._submitted[kind] = round_, len(chunks)

    def _gather(
        self, wanted: frozenset[str], beats: Mapping[int, Beat], responsive: Mapping[int, Beat], now: float
    ) -> dict[str, Submissions]:
        self._submissions = {topic: self._submissions.get(topic, {}) for topic in wanted}
        for topic, received in self._submissions.items():
            most = MOST_HALVES if topic.startswith("crash.") else len(beats)
            for slot, beat in beats.items():
                for round_, count in beat.submitted:
                    is_it = round_ == topic or ("." not in topic and round_.startswith(f"{topic}."))
                    is_new = slot != self._slot and (slot not in received or received[slot][0] != round_)
                    if is_it and is_new and len(received) < most and time.monotonic() < now + FETCH_S:
                        received[slot] = round_, self._chunks(round_, slot, count)
        expected = {slot for slot, beat in responsive.items() if beat.ranks and slot != self._slot}
        return {
            topic: Submissions(
                {slot: chunks for slot, (_, chunks) in received.items()},
                {slot: round_ for slot, (round_, _) in received.items()},
                len(expected - received.keys()),
            )
            for topic, received in self._submissions.items()
        }

    def _chunks(self, round_: Round, slot: int, count: int) -> list[bytes]:
        try:
            return [self._unseal(_place(round_, slot, at)) for at in range(count)]
        except BadMessage:
            return []

    def _decide(self, outbox: Outbox) -> None:
        for round_, decision in outbox.decisions.items():
            if round_ not in self._decisions:
                place, data = f"d/{round_}", self._codec.encode(f"d/{round_}", decision)
                stored = self._store.compare_set(f"{self._prefix}/{place}", b"", data, deadline_s=STORE_ANSWER_S)
                self._store_decision(round_, stored, decision)
                self._decided = round_

    def _read_decisions(self, page: LeaderPage) -> None:
        """Reads the decision about a hang once the page announces it.

        Reads the decision about a crash at once, because the store might end with another node.
        """
        hang = f"hang.{page.incident}" if page.phase in ("decided", "agreed") else ""
        crashes = (self._submitted.get("crash", ("", 0))[0], f"crash.{page.crash}" if page.crash else "")
        for round_ in filter(None, dict.fromkeys((hang, *crashes))):
            if round_ not in self._decisions:
                data = self._store.get(f"{self._prefix}/d/{round_}", deadline_s=STORE_ANSWER_S)
                self._store_decision(round_, data or b"")

    def _store_decision(self, round_: Round, data: bytes, otherwise: Decision | None = None) -> None:
        try:
            stored: Decision | None = self._codec.decode(f"d/{round_}", data, Decision)
        except BadMessage:
            stored = otherwise
        if stored is not None:
            self._decisions = dict([*self._decisions.items(), (round_, stored)][-MOST_DECISIONS:])

    # --- the survey for ``safelaunch status`` -----------------------------------------------------------------------

    def _take_survey(
        self, outbox: Outbox, page: LeaderPage, beats: Mapping[int, Beat], responsive: Mapping[int, Beat], now: float
    ) -> None:
        if outbox.wants_survey:
            self._survey = now, self._all_nodes(page, beats, responsive)

    def _all_nodes(
        self, page: LeaderPage, beats: Mapping[int, Beat], responsive: Mapping[int, Beat]
    ) -> tuple[NodeStatus, ...]:
        self._read_cards(sorted(beats.keys() - self._cards.keys()))
        responsive_ranks = {rank for beat in responsive.values() for rank in beat.ranks}
        return tuple(
            NodeStatus(
                host=self._cards[slot].host,
                ranks=format_ranks(beat.ranks),
                step=beat.step if beat.step >= 0 else None,
                state="ended" if beat.doing == "ended" else "heard" if slot in responsive else "silent",
                doing=beat.doing,
                leads=slot == page.leader,
                here=slot == self._slot,
                trouble=beat.trouble,
            )
            for slot, beat in sorted(beats.items(), key=lambda item: (item[1].ranks[:1], item[0]))
            # If another slot has the ranks of a silent node, it has rejoined.
            if slot in self._cards and (slot in responsive or not responsive_ranks.issuperset(beat.ranks))
        )

    # --- following --------------------------------------------------------------------------------------------------

    def _exchange(self, beat: bytes) -> bytes | None:
        own, head = f"{self._prefix}/b/{self._slot}", f"{self._prefix}/head"
        if self._page_bytes:
            return self._store.exchange(own, beat, head, deadline_s=STORE_ANSWER_S)
        self._store.set(own, beat, deadline_s=STORE_ANSWER_S)
        return self._store.get(head, deadline_s=STORE_ANSWER_S)

    def _read_page(self, data: bytes | None, now: float) -> LeaderPage | None:
        if data is None:
            return None
        if data == self._page_bytes:
            return self._page
        self._page_bytes = data
        try:
            page = self._codec.decode("head", data, LeaderPage)
        except BadMessage:
            self._unreadable.observe({0: (data[-200:].hex(), len(data))}, now)
            self._unreadable_s = (self._unreadable_s or (now, now))[0], now
            return self._page
        self._unreadable_s = None
        if self._leader is not None:
            own = self._leader.page
            if (page.epoch, -page.leader) <= (own.epoch, -own.leader):
                return self._page  # our own page, or an earlier term's
            self._leader = None
        self._page, self._page_s = page, now
        return self._page

    def _status(self, page: LeaderPage | None) -> PeerStatus:
        if page is None:
            return PeerStatus()
        stopping = [slot for slot in page.stopping if slot != self._slot]
        troubles = tuple(text for slot, text in page.troubles if slot != self._slot)
        anew = any(slot != self._slot for slot in page.restarting)
        return PeerStatus(bool(stopping), troubles, sum(slot != self._slot for slot in page.quiet), restarting=anew)

    def _read_published(self, page: LeaderPage) -> None:
        for topic, edition in page.published:
            edition_read, data = self._published.get(topic, (0, b""))
            if edition != edition_read:
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
            return self._liveness.silent_s(slot, now)
        if slot == page.leader:
            return now - self._page_s
        return QUIET_S + now - self._quiet_since[slot]

    def _read_cards(self, slots: Sequence[int]) -> None:
        for begin in range(0, len(slots), NEW_AT_ONCE):
            batch = slots[begin : begin + NEW_AT_ONCE]
            values = (
                self._store.get_all([f"{self._prefix}/m/{slot}" for slot in batch], deadline_s=STORE_ANSWER_S) or []
            )
            for slot, data in zip(batch, values, strict=False):
                with suppress(BadMessage):
                    self._cards[slot] = self._codec.decode(f"m/{slot}", data, NodeCard)

    def _decode_beats(self, slots: Sequence[int], values: Sequence[bytes]) -> dict[int, Beat]:
        """Returns each slot's newest beat. An unreadable beat doesn't replace the previous one.

        Counts only grow, so a beat with a lower count came over an abandoned connection or from a foreign process.
        """
        for slot, data in zip(slots, values, strict=False):
            with suppress(BadMessage):
                beat, newest = self._codec.decode(f"b/{slot}", data, Beat), self._newest.get(slot)
                if newest is None or newest.incarnation != beat.incarnation or beat.count >= newest.count:
                    self._newest[slot] = beat
        return {slot: self._newest[slot] for slot in slots if slot in self._newest}

    # --- leading ----------------------------------------------------------------------------------------------------

    def _is_foreign(self, now: float) -> bool:
        # Without a key, supervisors of another version might write an unreadable page that changes.
        if self._unreadable_s is None:
            return False
        known_s = now - self._unreadable_s[0] if self._codec.signs else self._unreadable.silent_s(0, now)
        return known_s >= SILENT_S

    def _replace_page(self, data: bytes) -> bytes:
        head = f"{self._prefix}/head"
        if len(self._page_bytes) <= LARGEST_VALUE:
            return self._store.compare_set(head, self._page_bytes, data, deadline_s=STORE_ANSWER_S)
        self._store.set(head, data, deadline_s=STORE_ANSWER_S)  # the foreign page is too large for a server to compare
        return data

    def _overwrite_page(self, data: bytes, now: float) -> bool:
        """Stores the leader's page, replacing even a foreign one. Returns False if that failed.

        A readable page isn't replaced, because its node took over when this node didn't respond for a long time.
        """
        for _ in range(OVERWRITES):
            stored = self._replace_page(data)
            if stored == data:
                return True
            self._read_page(stored, now)
            if self._unreadable_s is None:
                break
        return False

    def _begin_to_lead(self, page: LeaderPage, now: float, liveness: Liveness | None = None) -> None:
        data = self._codec.encode("head", page)
        if self._replace_page(data) == data:
            self._page, self._page_bytes, self._page_s = page, data, now
            self._leader = Leader(page, now)
            self._members_bytes = b""
            self._liveness = liveness or Liveness()

    def _succeed(self, page: LeaderPage, now: float) -> None:
        if self._succession.is_orphaned(page, now) and self._succession.is_due(self._slot, page, now):
            beats = self._beats()
            if self._succession.takes_over(self._slot, beats, now):
                liveness = self._succession.liveness(page.leader, now)
                self._begin_to_lead(structs.replace(page, leader=self._slot, epoch=page.epoch + 1), now, liveness)

    def _lead(self, leader: Leader, outbox: Outbox, now: float) -> tuple[LeaderPage, dict[int, Beat], dict[int, Beat]]:
        """Writes the next page. Returns it, all beats, and the responding nodes' beats."""
        beats = self._beats()
        self._liveness.observe({slot: (beat.incarnation, beat.count) for slot, beat in beats.items()}, now)
        present = {slot: beat for slot, beat in beats.items() if beat.doing != "ended"}
        responsive = {slot: beat for slot, beat in present.items() if self._liveness.silent_s(slot, now) < SILENT_S}
        responsive_ranks = {rank for beat in responsive.values() for rank in beat.ranks}
        # If another slot has the ranks of a silent node, it has rejoined.
        silent = tuple(
            s for s in sorted(present.keys() - responsive.keys()) if not responsive_ranks.issuperset(present[s].ranks)
        )
        quiet = tuple(
            slot
            for slot in present
            if self._liveness.silent_s(slot, now) >= QUIET_S and (slot in silent or slot in responsive)
        )
        decided = f"hang.{leader.page.incident}" in self._decisions
        page = leader.next(LeaderInput(responsive, silent, decided, quiet, beats), now)
        page = leader.page = self._publish(self._publish_members(page, beats), outbox)
        data = self._codec.encode("head", page)
        if self._overwrite_page(data, now):
            self._page, self._page_bytes, self._page_s = page, data, now
        return page, beats, responsive

    def _publish(self, page: LeaderPage, outbox: Outbox) -> LeaderPage:
        editions = dict(page.published)
        for topic, data in outbox.published.items():
            if data != self._published.get(topic, (0, b""))[1]:
                self._seal(f"p/{topic}", data)
                editions[topic] = editions.get(topic, 0) + 1
                self._published[topic] = editions[topic], data
        topics = tuple(sorted(gather for gather in outbox.gathers if "." not in gather))
        return structs.replace(page, topics=topics, published=tuple(sorted(editions.items()))[:MOST_TOPICS])

    def _publish_members(self, page: LeaderPage, beats: Mapping[int, Beat]) -> LeaderPage:
        says = (*page.silent, *page.stopping, *(slot for slot, _ in page.troubles), *page.failed, *page.quiet)
        named = sorted(beats.keys() - set(page.silent))[: MOST_NAMED + 1]
        most = CROWD_MEMBERS if page.nodes > CROWD else MOST_MEMBERS
        reported = [slot for slot in dict.fromkeys((page.leader, *says, *named)) if slot in beats][:most]
        self._read_cards([slot for slot in reported if slot not in self._cards])
        members = NodesBySlot(
            tuple((s, self._cards[s], _lasting(beats[s])) for s in sorted(reported) if s in self._cards)
        )
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
        values = self._store.read_all([f"{self._prefix}/b/{slot}" for slot in slots], deadline_s=STORE_ANSWER_S)
        return self._decode_beats(slots, values)

    def _discover(self, number: int) -> None:
        """Finds new slots. Limits the number of queries, because the stored slot count might be wrong."""
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
        return self._codec.open(place, self._store.get(f"{self._prefix}/{place}", deadline_s=STORE_ANSWER_S) or b"")

    def _write(self, place: str, data: bytes) -> None:
        self._store.set(f"{self._prefix}/{place}", data, deadline_s=STORE_ANSWER_S)


def _place(round_: Round, slot: int, at: int) -> str:
    return f"e/{round_}/{slot}/{at}"


def _lasting(beat: Beat) -> Beat:
    # All nodes read it, so leave out values that change often.
    kept = {name: getattr(beat, name) for name in ("ranks", "world", "attempt", "doing", "trouble", "agent")}
    crash = tuple(item for item in beat.submitted if item[0].startswith("crash."))
    return Beat(beat.incarnation, 0, submitted=crash, **kept)
