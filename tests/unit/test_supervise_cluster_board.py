"""What nodes leave of their consistency checks in a store, and what they read there."""

from __future__ import annotations

from safelaunch.supervise.cluster.board import Board
from safelaunch.supervise.cluster.messages import BadMessage, Beat, Page

LATE = 1e12


class Place:
    """A store. ``reads``: how often somebody has read there; ``damaged``: keys that cannot be read."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.damaged: set[str] = set()
        self.reads = 0

    def board(self, slot: int) -> Board:
        return Board(slot, self.kept.__setitem__, self._read)

    def _read(self, place: str) -> bytes:
        self.reads += 1
        if place in self.damaged:
            raise BadMessage(place)
        return self.kept.get(place, b"")


def beats(*boards: Board) -> dict[int, Beat]:
    return {number: Beat("x", 1, checks=board.edition) for number, board in enumerate(boards, 1)}


def test_the_leader_reads_each_edition_once() -> None:
    place = Place()
    leader, other = place.board(1), place.board(2)
    other.post(b"first")
    other.post(b"first")
    for _ in range(2):
        leader.read_checks(beats(leader, other), LATE)
    assert leader.checks == {2: (1, b"first")} and place.reads == 1
    other.post(b"second")
    leader.read_checks(beats(leader, other), LATE)
    assert leader.checks == {2: (2, b"second")}


def test_what_cannot_be_read_or_has_no_time_left_costs_nothing_else() -> None:
    place = Place()
    leader, bad, good = place.board(1), place.board(2), place.board(3)
    bad.post(b"bad")
    good.post(b"good")
    place.damaged.add("s/2")
    leader.read_checks(beats(leader, bad, good), 0.0)
    assert leader.checks == {}
    leader.read_checks(beats(leader, bad, good), LATE)
    assert leader.checks == {3: (1, b"good")}


def test_what_is_found_reaches_the_others_and_outlives_its_leader() -> None:
    place = Place()
    leader, other = place.board(1), place.board(2)
    leader.compares = True
    assert leader.with_wrong(Page(1)) == Page(1, compares=True)
    leader.tell(b"found")
    page = leader.with_wrong(Page(1))
    assert page.wrong == 1 and leader.with_wrong(page) == page
    other.read_wrong(page)
    other.read_wrong(page)
    assert other.wrong == b"found" and place.reads == 1
    other.tell(b"found, and more")
    later = other.with_wrong(page)
    assert later.wrong == 2 and place.kept["wrong"] == b"found, and more"
