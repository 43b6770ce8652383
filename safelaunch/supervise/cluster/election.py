"""TODO."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from safelaunch.supervise.cluster.messages import Beat, LeaderPage

SILENT_S = 15.0  # a node whose count has not moved for so long is not heard
QUIET_S = 2.5  # several beats: worth a word where something else is the matter
PROVING_S = 4.0  # before somebody takes over: so long it sees who else is there
LINE, LINE_S = 4, 10.0  # so many are next in line; what follows later, where none of these is alive
GAP_S = 5.0  # between two of our own rounds: we were stopped, and nobody else was silent


class Liveness:
    """Who is heard, by the hearer's own clock alone: a node's count has to move, whatever it counts."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[tuple[str, int], float]] = {}
        self._proven: set[int] = set()
        self._last_s: float | None = None

    def observe(self, counts: Mapping[int, tuple[str, int]], now: float) -> None:
        """``counts``: by slot, incarnation and count. A slot that is new is taken for heard at first."""
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
        """It is known from elsewhere to be silent, until its count moves."""
        if slot in self._moved:
            self._moved[slot] = (self._moved[slot][0], now - SILENT_S)

    @property
    def proven(self) -> Collection[int]:
        """Slots whose count was seen to move."""
        return self._proven


class Succession:
    """When a node that follows becomes the leader: the page stands still, and no lower slot is alive."""

    def __init__(self) -> None:
        self._page = Liveness()
        self._others: Liveness | None = None
        self._since_s = 0.0

    def is_orphaned(self, page: LeaderPage, now: float) -> bool:
        """Whether the leader is no longer heard; from then on ``takes_over`` wants all beats."""
        self._page.observe({0: (f"{page.leader}.{page.epoch}", page.count)}, now)
        orphaned = self._page.silent_s(0, now) >= SILENT_S
        if not orphaned:
            self._others = None
        elif self._others is None:
            self._others, self._since_s = Liveness(), now
        return orphaned

    def is_due(self, slot: int, page: LeaderPage, now: float) -> bool:
        """Whether this node is next in line, or those that are next have had their time. It wants all beats then."""
        return slot in (page.leader, *page.line) or now - self._since_s >= LINE_S

    def hearing(self, leader: int, now: float) -> Liveness:
        """What was heard of all while the leader was not."""
        others = self._others or Liveness()
        others.mark_silent(leader, now)
        return others

    def takes_over(self, slot: int, beats: Mapping[int, Beat], now: float) -> bool:
        if self._others is None:
            return False
        self._others.observe({s: (beat.incarnation, beat.count) for s, beat in beats.items()}, now)
        lower = [s for s in self._others.proven if s < slot and beats[s].doing != "ended"]
        return now - self._since_s >= PROVING_S and not lower
