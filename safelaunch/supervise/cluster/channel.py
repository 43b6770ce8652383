"""The thread in which a supervisor talks to the others: one connection, a beat up and a page down, again and again.

Nobody waits for it: the supervisor leaves what it has to say (``tell``, ``hand_in``, ``decide``) and reads what is
known (``seen``). When the store does not answer any more, the supervisor is alone, until it can be reached again.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import Any

from msgspec import structs

from safelaunch.supervise.cluster.hosting import StoreHost
from safelaunch.supervise.cluster.messages import Beat, Codec, Decision, Node, Question, node_count
from safelaunch.supervise.cluster.seen import Crash, Seen
from safelaunch.supervise.cluster.session import CROWD, GOODBYE_S, Session
from safelaunch.supervise.cluster.store import CONNECT_S, Store, StoreError, ValueTooLarge
from safelaunch.supervise.cluster.where import Meeting

IDLE_S, CROWD_IDLE_S = 0.5, 1.0  # between rounds; in a crowd
BUSY_S, BUSY_NODE_S = 0.15, 0.0008  # in a crowd so much a node: the store, or what shares its cores, has other work
GREETED_S = 0.1  # a node: a store that waits 5 s for the name of one client in 50 takes that long to greet all
FIRST_TRIES_S = 2.0  # the store is not there before torchrun, or the helper, has started
AGAIN_S = (5.0, 15.0, 30.0, 60.0)
SEE_OFF_S = 8.0  # for the others' last words, where their store ends with this node's


class Channel:
    """``start`` it, and ``close`` it at the end. All methods return at once, and are for any thread.

    ``host``: starts the store, where it is no store of torchrun's. One that is never started hears nobody: the channel
    of a job on one node. ``why``: why it is that of a job on several.
    """

    def __init__(self, node: Node, why: str = "") -> None:
        self._host: StoreHost | None = None
        self.node = node
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = self._sees_off = False
        self._beat = Beat(node.incarnation, 0)
        self._to_hand_in: tuple[int, list[bytes]] | None = None
        self._to_decide: tuple[int, Decision] | None = None
        self._crash = Crash()
        self._dumped: tuple[int, list[bytes]] | None = None
        self._asks: Question | None = None
        self._looks_around = False
        self._checks = self._wrong = b""
        self._compares = False
        self._session: Session | None = None
        self.seen = Seen(why=why)
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self, meeting: Meeting, key: bytes = b"", host: StoreHost | None = None) -> None:
        self._host = host
        self._thread = threading.Thread(target=self._run, args=(meeting, key), name="cluster", daemon=True)
        self._thread.start()

    def close(self, *, at_once: bool = False) -> None:
        """Says goodbye; takes a second at most, or ``SEE_OFF_S`` where this node has the store of all.

        ``at_once``: the others lose their store without a last word.
        """
        self._sees_off = self.hosts and not at_once
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(GOODBYE_S + (SEE_OFF_S if self._sees_off else 0.0))
        if self._host is not None:
            self._host.close()

    @property
    def hosts(self) -> bool:
        """Whether this supervisor has started the store."""
        return self._host is not None and self._host.has_started

    def tell(self, **changes: Any) -> None:
        """Changes fields of this node's beat."""
        with self._lock:
            beat = structs.replace(self._beat, **changes)
            changed, self._beat = beat != self._beat, beat
        if changed:
            self._wake.set()

    @property
    def beat(self) -> Beat:
        """What this node says of itself."""
        return self._beat

    def hand_in(self, incident: int, chunks: list[bytes]) -> None:
        """This node's evidence."""
        with self._lock:
            self._to_hand_in = incident, chunks
        self._wake.set()

    def decide(self, incident: int, decision: Decision) -> None:
        """The leader's word; the first one that is stored counts."""
        with self._lock:
            self._to_decide = incident, decision
        self._wake.set()

    def note(self, step: int) -> None:
        """The lowest step of this node's ranks, which may travel with the next beat."""
        with self._lock:
            self._beat = structs.replace(self._beat, step=step)

    def look_around(self) -> None:
        """Somebody wants to know of every node: ``seen.around`` has it after the next round."""
        self._looks_around = True
        self._wake.set()

    def ask_all(self, question: Question | None) -> None:
        """Asks all other nodes (``seen.answers``), until nothing is wanted any longer."""
        self._asks = question
        self._wake.set()

    def hand_in_dump(self, number: int, chunks: list[bytes]) -> None:
        """This node's evidence, for another one that has asked for it."""
        with self._lock:
            self._dumped = number, chunks
        self._wake.set()

    def compare(self, checks: bytes) -> None:
        """The newest consistency checks of this node's ranks, for the leader, who compares those of all."""
        self._checks, self._compares = checks, True

    def tell_wrong(self, data: bytes) -> None:
        """What this node, which leads, has found in the checks of all."""
        self._wrong = data
        self._wake.set()

    def fail(self, crash: int, chunks: list[bytes]) -> None:
        """This node's evidence about a crash that its ranks are part of."""
        with self._lock:
            self._crash = Crash(chunks)
            self._beat = structs.replace(self._beat, crash=crash, failed=-1)
        self._wake.set()

    def gather(self) -> None:
        """Reads what the others know of the crash."""
        with self._lock:
            self._crash = replace(self._crash, gathers=True)
        self._wake.set()

    def decide_crash(self, decision: Decision) -> None:
        """The verdict about it; the first one that is stored counts."""
        with self._lock:
            self._crash = replace(self._crash, decision=decision)
        self._wake.set()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, meeting: Meeting, key: bytes) -> None:
        codec = Codec(meeting.prefix, key)
        tries, has_met = 0, False
        while not self._closing:
            met = False
            try:
                if self._host is not None and not has_met:  # one that is lost is not replaced: nobody knows it
                    self._host.start()
                store = Store(meeting.address, deadline_s=CONNECT_S + GREETED_S * meeting.most_nodes)
                try:
                    if self._session is None or not self._session.resume(store):
                        self._session = Session(store, meeting.prefix, codec, self.node)
                    met = has_met = True
                    self._converse(self._session)
                finally:
                    store.close()
            except (StoreError, ValueTooLarge) as error:
                lost = error.lost if isinstance(error, StoreError) else ""
                before = self.seen
                self.seen = Seen(
                    why=(self._host.problem if self._host is not None else "") or str(error),
                    nodes=before.nodes,
                    word=before.word,
                    peers=before.peers,
                    lost=lost or before.lost,
                    slot=before.slot,
                    crash=before.crash,
                )
            except Exception as error:  # noqa: BLE001 - a fault of ours costs the channel only
                self.seen = Seen(why=f"a fault of safelaunch's own ({type(error).__name__}: {error})")
                return
            tries = 0 if met else tries + 1
            pause_s = FIRST_TRIES_S if self._begins(has_met) else AGAIN_S[min(tries, len(AGAIN_S) - 1)]
            pause_s *= random.uniform(0.5, 1.0)  # nodes that were lost together come back one by one
            until = time.monotonic() + pause_s
            while not self._closing and (left_s := until - time.monotonic()) > 0:
                self._wake.wait(left_s)
                self._wake.clear()

    def _begins(self, has_met: bool) -> bool:
        """Whether the store may not be there yet: nothing listens, or a helper imports torch before it answers."""
        return "refused" in self.seen.why if self._host is None or self._host.problem else not has_met

    def _converse(self, session: Session) -> None:
        while True:
            with self._lock:
                beat, handing_in, deciding = self._beat, self._to_hand_in, self._to_decide
                dumped = self._dumped
                crash = self._crash
            if self._closing:
                session.leave(beat)
                if self._sees_off:
                    session.see_off(SEE_OFF_S)
                return
            if handing_in is not None:
                number = session.hand_in(*handing_in)
                with self._lock:
                    if self._to_hand_in is handing_in:  # over another connection it is handed in again
                        self._to_hand_in = None
                    if self._beat.incident == handing_in[0]:
                        self._beat = beat = structs.replace(self._beat, chunks=number)
            if dumped is not None:
                session.hand_in_dump(*dumped)
                with self._lock:
                    if self._dumped is dumped:
                        self._dumped = None
            session.asks = self._asks
            session.looks_around, self._looks_around = self._looks_around, False
            session.board.compares = self._compares
            if self._checks:
                session.board.post(self._checks)
            session.board.tell(self._wrong)
            if beat.crash:
                failed, decided = session.attend(beat, crash)
                with self._lock:
                    if self._beat.crash == beat.crash:
                        self._beat = beat = structs.replace(self._beat, failed=failed, decided=decided)
            self.seen = seen = session.round(beat, deciding)
            page = seen.page
            failing = page is not None and bool(page.failed or page.troubles)
            busy = (
                failing
                or session.asks is not None
                or beat.doing == "suspecting"
                or (page is not None and page.phase not in ("idle", "agreed"))
            )
            nodes = node_count(page)
            quiet_s = CROWD_IDLE_S if nodes > CROWD else IDLE_S
            self._wake.wait(min(max(BUSY_S, BUSY_NODE_S * nodes), quiet_s) if busy else quiet_s)
            self._wake.clear()
