"""Decides which nodes are alive, and which of them succeeds a dead leader. Has no side effects."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from safelaunch.supervise.cluster.messages import Beat, LeaderPage

SILENT_S = 15.0  # without a new count, after which a node counts as dead
QUIET_S = 2.5  # several beats: worth reporting if something else is wrong
PROVING_S = 4.0  # for which a successor observes the other nodes before it takes over
LINE, LINE_S = 4, 10.0  # number of nodes that can succeed the leader; after LINE_S, every node can
GAP_S = 5.0  # longest pause between two rounds; after a longer one, this process was stopped, and no node was silent


class Liveness:
    """Tracks which nodes are alive: the count of a live node changes. Uses only this node's clock."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[tuple[str, int], float]] = {}
        self._proven: set[int] = set()
        self._last_s: float | None = None

    def observe(self, counts: Mapping[int, tuple[str, int]], now: float) -> None:
        """Processes the incarnation and count of each slot. A new slot counts as alive."""
        gap_s = now - self._last_s if self._last_s is not None else 0.0
        self._last_s = now
        if gap_s > GAP_S:
            self._moved = {slot: (count, at + gap_s) for slot, (count, at) in self._moved.items()}
        for slot, count in counts.items():
            before = self._moved.get(slot)
            if before is None or before[0] != count:
                if before is not None:
                    self._proven.add(slot)
                self._moved[slot] = (count, now)

    def silent_s(self, slot: int, now: float) -> float:
        return now - self._moved[slot][1] if slot in self._moved else 0.0

    def mark_silent(self, slot: int, now: float) -> None:
        if slot in self._moved:
            self._moved[slot] = (self._moved[slot][0], now - SILENT_S)

    @property
    def proven(self) -> Collection[int]:
        return self._proven


class Succession:
    """Decides when a follower takes over: when the leader's page no longer changes, and no lower slot is alive."""

    def __init__(self) -> None:
        self._page = Liveness()
        self._others: Liveness | None = None
        self._since_s = 0.0

    def is_orphaned(self, page: LeaderPage, now: float) -> bool:
        """Returns whether the leader is silent.

        If it is, the caller must pass all beats to ``takes_over`` from now on.
        """
        self._page.observe({0: (f"{page.leader}.{page.epoch}", page.count)}, now)
        orphaned = self._page.silent_s(0, now) >= SILENT_S
        if not orphaned:
            self._others = None
        elif self._others is None:
            self._others, self._since_s = Liveness(), now
        return orphaned

    def is_due(self, slot: int, page: LeaderPage, now: float) -> bool:
        """Returns whether this node can try to succeed the leader. If so, the caller must read all beats."""
        return slot in (page.leader, *page.line) or now - self._since_s >= LINE_S

    def liveness(self, leader: int, now: float) -> Liveness:
        nodes = self._others or Liveness()
        nodes.mark_silent(leader, now)
        return nodes

    def takes_over(self, slot: int, beats: Mapping[int, Beat], now: float) -> bool:
        if self._others is None:
            return False
        self._others.observe({s: (beat.incarnation, beat.count) for s, beat in beats.items()}, now)
        lower = [s for s in self._others.proven if s < slot and beats[s].doing != "ended"]
        return now - self._since_s >= PROVING_S and not lower
