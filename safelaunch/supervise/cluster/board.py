"""The consistency checks of all nodes in the store: each leaves its own there, and the leader what it finds in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from msgspec import structs

from safelaunch.supervise.cluster.messages import BadMessage, Beat, Page


class Board:
    """A node's part in them. ``write``, ``read``: of a sealed value in the store, the latter raises BadMessage.

    ``compares``: this node compares what the others leave, should it lead. ``edition``: of what it has left itself.
    ``checks``: of others, by slot: edition and bytes; ``wrong``: what the leader has found.
    """

    def __init__(self, slot: int, write: Callable[[str, bytes], None], read: Callable[[str], bytes]) -> None:
        self._slot, self._write, self._read = slot, write, read
        self.compares = False
        self.edition = 0
        self.checks: dict[int, tuple[int, bytes]] = {}
        self.wrong = b""
        self._wrong_edition = 0
        self._posted = self._to_tell = b""

    def post(self, data: bytes) -> None:
        """Leaves the newest checks of this node's ranks; they replace those of before."""
        if data != self._posted:
            self._posted = data
            self._write(f"s/{self._slot}", data)
            self.edition += 1

    def tell(self, data: bytes) -> None:
        """What this node has found in the checks of all; it counts where this node leads."""
        self._to_tell = data

    def read_checks(self, heard: Mapping[int, Beat], until: float) -> None:
        """Reads what is new, for a while: a leader that reads on is not heard."""
        for slot, beat in heard.items():
            if slot == self._slot or beat.checks <= self.checks.get(slot, (0, b""))[0]:
                continue
            if time.monotonic() > until:
                return
            with suppress(BadMessage):
                self.checks[slot] = beat.checks, self._read(f"s/{slot}")

    def read_wrong(self, page: Page) -> None:
        if page.wrong != self._wrong_edition:
            self._wrong_edition = page.wrong
            with suppress(BadMessage):
                self.wrong = self._read("wrong")

    def with_wrong(self, page: Page) -> Page:
        """Writes what was found where that has changed, and returns the page with its edition."""
        if self._to_tell not in (b"", self.wrong):
            self._write("wrong", self._to_tell)
            self.wrong, self._wrong_edition = self._to_tell, page.wrong + 1
            page = structs.replace(page, wrong=self._wrong_edition)
        return structs.replace(page, compares=self.compares)
