"""The thread in which a supervisor talks to the others: one connection, a beat up and a page down, again and again.

Nobody waits for it: the supervisor leaves what it has to say (``tell``, ``submit``, ``decide``) and reads what is known
(``seen``). When the store does not answer any more, the supervisor is alone, until it can be reached again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from safelaunch.supervise.cluster.codec import Codec
from safelaunch.supervise.cluster.exchange import Outbox, PeerView
from safelaunch.supervise.cluster.membership import CROWD, LAST_BEAT_S, Membership
from safelaunch.supervise.cluster.messages import Beat, Decision, NodeCard, Round, node_count
from safelaunch.supervise.cluster.rendezvous import SharedStore
from safelaunch.supervise.cluster.store import CONNECT_S, NodeStoreError, StoreClient, ValueTooLarge
from safelaunch.supervise.cluster.store_host import StoreHost

IDLE_S, CROWD_IDLE_S = 0.6, 1.2  # at most between rounds; in a crowd
BUSY_S, BUSY_NODE_S = 0.15, 0.0008  # in a crowd so much a node: the store, or what shares its cores, has other work
GREETED_S = 0.1  # a node: a store that waits 5 s for the name of one client in 50 takes that long to greet all
FIRST_TRIES_S = 2.0  # the store is not there before torchrun, or the helper, has started
AGAIN_S = (5.0, 15.0, 30.0, 60.0)
DRAIN_S = 8.0  # for the others' last beats, where their store ends with this node's


class Channel:
    """``start`` it, and ``close`` it at the end. All methods return at once, and are for any thread.

    ``host``: starts the store, where it is no store of torchrun's. One that is never started hears nobody: the channel
    of a job on one node. ``why``: why it is that of a job on several.
    """

    def __init__(self, node: NodeCard, why: str = "") -> None:
        self._host: StoreHost | None = None
        self.node = node
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = self._drains = False
        self._saying = Outbox(Beat(node.incarnation, 0))
        self._session: Membership | None = None
        self.view = PeerView(why=why)
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self, meeting: SharedStore, key: bytes = b"", host: StoreHost | None = None) -> None:
        self._host = host
        self._thread = threading.Thread(target=self._run, args=(meeting, key), name="cluster", daemon=True)
        self._thread.start()

    def close(self, *, at_once: bool = False) -> None:
        """Says goodbye; takes a second at most, or ``DRAIN_S`` where this node has the store of all.

        ``at_once``: the others lose their store without a last word.
        """
        self._drains = self.hosts and not at_once
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LAST_BEAT_S + (DRAIN_S if self._drains else 0.0))
        if self._host is not None:
            self._host.close()

    @property
    def hosts(self) -> bool:
        """Whether this supervisor has started the store."""
        return self._host is not None and self._host.has_started

    def update(self, **changes: Any) -> None:
        """Changes fields of this node's beat."""
        self._change(lambda saying: replace(saying, beat=structs.replace(saying.beat, **changes)))

    @property
    def beat(self) -> Beat:
        """What this node says of itself."""
        return self._saying.beat

    def set_step(self, step: int) -> None:
        """The lowest step of this node's ranks, which may travel with the next beat."""
        with self._lock:
            self._saying = replace(self._saying, beat=structs.replace(self._saying.beat, step=step))

    def request_survey(self) -> None:
        """Somebody wants to know of every node: ``seen.survey`` has it after the next round."""
        self._change(lambda saying: replace(saying, wants_survey=True))

    def submit(self, round_: Round, chunks: list[bytes]) -> None:
        """This node's evidence in a round, which replaces that in an earlier one of the same kind."""
        given = {_kind(round_): (round_, chunks)}
        self._change(lambda saying: replace(saying, submitted={**saying.submitted, **given}))

    def withdraw(self, what: str) -> None:
        """Removes this node's evidence in a round, or in that of a kind, and reads no more of the others'."""

        def without(saying: Outbox) -> Outbox:
            kept = {kind: given for kind, given in saying.submitted.items() if what not in (kind, given[0])}
            gathers = frozenset(gather for gather in saying.gathers if what not in (gather, _kind(gather)))
            return replace(saying, submitted=kept, gathers=gathers)

        self._change(without)

    def gather(self, round_: str) -> None:
        """Reads what the others submit in a round (``seen.submissions``); in all of a kind where this node leads."""
        self._change(lambda saying: replace(saying, gathers=saying.gathers | {round_}))

    def decide(self, round_: Round, decision: Decision) -> None:
        """A decision about a round; the first one that is stored counts (``seen.decisions``)."""
        self._change(lambda saying: replace(saying, decisions={**saying.decisions, round_: decision}))

    def publish(self, topic: str, data: bytes) -> None:
        """Replaces the leader's value of a topic, which all nodes read (``seen.published``)."""
        self._change(lambda saying: replace(saying, published={**saying.published, topic: data}))

    def _change(self, change: Callable[[Outbox], Outbox]) -> None:
        with self._lock:
            before, self._saying = self._saying, change(self._saying)
        if self._saying != before:
            self._wake.set()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, meeting: SharedStore, key: bytes) -> None:
        codec = Codec(meeting.prefix, key)
        tries, has_met = 0, False
        while not self._closing:
            met = False
            try:
                if self._host is not None and not has_met:  # one that is lost is not replaced: nobody knows it
                    self._host.start()
                store = StoreClient(meeting.address, deadline_s=CONNECT_S + GREETED_S * meeting.most_nodes)
                try:
                    if self._session is None or not self._session.resume(store):
                        self._session = Membership(store, meeting.prefix, codec, self.node)
                        self._change(lambda saying: replace(saying, decisions={}))  # of a store with other numbers
                    met = has_met = True
                    self._converse(self._session)
                finally:
                    store.close()
            except (NodeStoreError, ValueTooLarge) as error:
                lost = error.lost if isinstance(error, NodeStoreError) else ""
                before = self.view
                self.view = PeerView(
                    why=(self._host.problem if self._host is not None else "") or str(error),
                    nodes=before.nodes,
                    status=before.status,
                    peers=before.peers,
                    lost=lost or before.lost,
                    slot=before.slot,
                    address=before.address,
                    decisions=before.decisions,
                )
            except Exception as error:  # noqa: BLE001 - a fault of ours costs the channel only
                self.view = PeerView(why=f"a fault of safelaunch's own ({type(error).__name__}: {error})")
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
        return "refused" in self.view.why if self._host is None or self._host.problem else not has_met

    def _converse(self, session: Membership) -> None:
        while True:
            with self._lock:
                saying, self._saying = self._saying, replace(self._saying, wants_survey=False)
            if self._closing:
                session.leave(saying.beat)
                if self._drains:
                    session.drain(DRAIN_S)
                return
            self.view = seen = session.round(saying)
            page, beat = seen.page, saying.beat
            for round_, _ in saying.submitted.values():
                if page is not None and page.is_over(round_):
                    self.withdraw(round_)
            failing = page is not None and bool(page.failed or page.troubles)
            busy = (
                failing
                or beat.asks is not None
                or beat.doing == "suspecting"
                or (page is not None and page.phase not in ("idle", "agreed"))
            )
            nodes = node_count(page)
            quiet_s = CROWD_IDLE_S if nodes > CROWD else IDLE_S
            # In step with whoever writes over the leader's page, a node would read it at the wrong moment for minutes.
            quiet_s *= random.uniform(0.5, 1.0)
            self._wake.wait(min(max(BUSY_S, BUSY_NODE_S * nodes), quiet_s) if busy else quiet_s)
            self._wake.clear()


def _kind(round_: str) -> str:
    return round_.partition(".")[0]
