"""The thread in which a supervisor exchanges records with the others, in rounds over one connection.

The supervisor never waits for this thread: it leaves records in an outbox (``update``, ``submit``, ``decide``) and
reads ``view``. If the store stops responding, the supervisor is isolated until a new connection succeeds.
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

IDLE_S, CROWD_IDLE_S = 0.6, 1.2  # longest pause between rounds; with more than CROWD nodes
BUSY_S, BUSY_NODE_S = 0.15, 0.0008  # pause during an incident, and per node, as the store has other work
GREETED_S = 0.1  # to connect, per node: a store might wait 5 s for the name of one client in 50
FIRST_TRIES_S = 2.0
AGAIN_S = (5.0, 15.0, 30.0, 60.0)
DRAIN_S = 8.0  # for other nodes' last beats, if their store ends with this node


class Channel:
    """Exchanges records between ``start`` and ``close``; thread-safe. Only ``close`` blocks."""

    def __init__(self, node: NodeCard, why: str = "") -> None:
        # why: reason why a job of several nodes never starts its channel
        self._host: StoreHost | None = None
        self.node = node
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = self._drains = False
        self._outbox = Outbox(Beat(node.incarnation, 0))
        self._membership: Membership | None = None
        self.view = PeerView(why=why)
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self, shared: SharedStore, key: bytes = b"", host: StoreHost | None = None) -> None:
        self._host = host
        self._thread = threading.Thread(target=self._run, args=(shared, key), name="cluster", daemon=True)
        self._thread.start()

    def close(self, *, at_once: bool = False) -> None:
        """Leaves the job within a second; within ``DRAIN_S`` if this node hosts the store and ``at_once`` is False."""
        self._drains = self.hosts and not at_once
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LAST_BEAT_S + (DRAIN_S if self._drains else 0.0))
        if self._host is not None:
            self._host.close()

    @property
    def hosts(self) -> bool:
        return self._host is not None and self._host.has_started

    def update(self, **changes: Any) -> None:
        self._change(lambda outbox: replace(outbox, beat=structs.replace(outbox.beat, **changes)))

    @property
    def beat(self) -> Beat:
        return self._outbox.beat

    def set_step(self, step: int) -> None:
        with self._lock:
            self._outbox = replace(self._outbox, beat=structs.replace(self._outbox.beat, step=step))

    def request_survey(self) -> None:
        self._change(lambda outbox: replace(outbox, wants_survey=True))

    def submit(self, round_: Round, chunks: list[bytes]) -> None:
        """Submits this node's evidence, replacing earlier evidence of the same kind."""
        submission = {_kind(round_): (round_, chunks)}
        self._change(lambda outbox: replace(outbox, submitted={**outbox.submitted, **submission}))

    def withdraw(self, what: str) -> None:
        """Removes this node's submission for a round or kind of rounds, and stops reading other nodes' submissions."""

        def without(outbox: Outbox) -> Outbox:
            kept = {
                kind: submission for kind, submission in outbox.submitted.items() if what not in (kind, submission[0])
            }
            gathers = frozenset(gather for gather in outbox.gathers if what not in (gather, _kind(gather)))
            return replace(outbox, submitted=kept, gathers=gathers)

        self._change(without)

    def gather(self, round_: str) -> None:
        """Starts to read other nodes' submissions for a round into ``view.submissions``."""
        self._change(lambda outbox: replace(outbox, gathers=outbox.gathers | {round_}))

    def decide(self, round_: Round, decision: Decision) -> None:
        self._change(lambda outbox: replace(outbox, decisions={**outbox.decisions, round_: decision}))

    def publish(self, topic: str, data: bytes) -> None:
        self._change(lambda outbox: replace(outbox, published={**outbox.published, topic: data}))

    def _change(self, change: Callable[[Outbox], Outbox]) -> None:
        with self._lock:
            before, self._outbox = self._outbox, change(self._outbox)
        if self._outbox != before:
            self._wake.set()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, shared: SharedStore, key: bytes) -> None:
        codec = Codec(shared.prefix, key)
        tries, has_met = 0, False
        while not self._closing:
            met = False
            try:
                if self._host is not None and not has_met:  # a lost store isn't replaced
                    self._host.start()
                store = StoreClient(shared.address, deadline_s=CONNECT_S + GREETED_S * shared.most_nodes)
                try:
                    if self._membership is None or not self._membership.resume(store):
                        self._membership = Membership(store, shared.prefix, codec, self.node)
                        self._change(lambda outbox: replace(outbox, decisions={}))  # of another store
                    met = has_met = True
                    self._converse(self._membership)
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
            except Exception as error:  # noqa: BLE001 - our own error costs only the channel
                self.view = PeerView(why=f"an internal error of safelaunch ({type(error).__name__}: {error})")
                return
            tries = 0 if met else tries + 1
            pause_s = FIRST_TRIES_S if self._begins(has_met) else AGAIN_S[min(tries, len(AGAIN_S) - 1)]
            pause_s *= random.uniform(0.5, 1.0)  # so that nodes don't all reconnect at once
            until = time.monotonic() + pause_s
            while not self._closing and (left_s := until - time.monotonic()) > 0:
                self._wake.wait(left_s)
                self._wake.clear()

    def _begins(self, has_met: bool) -> bool:
        # The store might still be starting: nothing listens yet, or a helper imports torch.
        return "refused" in self.view.why if self._host is None or self._host.problem else not has_met

    def _converse(self, membership: Membership) -> None:
        while True:
            with self._lock:
                outbox, self._outbox = self._outbox, replace(self._outbox, wants_survey=False)
            if self._closing:
                membership.leave(outbox.beat)
                if self._drains:
                    membership.drain(DRAIN_S)
                return
            self.view = view = membership.round(outbox)
            page, beat = view.page, outbox.beat
            for round_, _ in outbox.submitted.values():
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
            # A pause that is in step with another writer of the page would hide the leader's page for minutes.
            quiet_s *= random.uniform(0.5, 1.0)
            self._wake.wait(min(max(BUSY_S, BUSY_NODE_S * nodes), quiet_s) if busy else quiet_s)
            self._wake.clear()


def _kind(round_: str) -> str:
    return round_.partition(".")[0]
