"""The table of healthy programs: each is one function, the quiet spell of a short training. Imports nothing heavy."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Case:
    """One case: a job with a spell.

    Attributes:
        on: Ranks with the spell, ``one`` or ``all``; the others step on, and wait.
        at: ``spell`` after 40 steps, ``start`` before the first one, ``whole`` in place of all steps.
        needs: Packages of the spell.
        tools: Programs that it takes.
        works: It computes, transfers, faults pages or makes children throughout.
        root: It takes root.
        outside: Called in a process outside the job, for as long as the job lasts.
        launch: How the job is started (``alive.py``).
    """

    name: str
    spell: Callable[[Spell], object]
    ranks: int = 2
    on: str = "one"
    at: str = "spell"
    needs: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    works: bool = False
    root: bool = False
    outside: Callable[[Outside], object] | None = None
    launch: str = ""
    own: tuple[str, ...] = ()

    def has_spell(self, rank: int, world: int) -> bool:
        """Decides by the name alone which rank it is."""
        return self.on == "all" or rank == zlib.crc32(self.name.encode()) % world

    @property
    def talks(self) -> bool:
        """Returns whether the process outside and a rank meet at a port of this host."""
        return self.outside is not None and "port" in self.outside.__code__.co_consts


CASES: dict[str, Case] = {}


def case(**how: Any) -> Callable[[Callable[[Spell], object]], Callable[[Spell], object]]:
    def enter(spell: Callable[[Spell], object]) -> Callable[[Spell], object]:
        CASES[spell.__name__] = Case(spell.__name__, spell, **how)
        return spell

    return enter


def until(reached: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := reached()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


@dataclass
class Place:
    """The job's private directory, in which ranks and the process outside leave each other word."""

    scratch: Path
    quiet: float  # seconds of the spell
    world: int

    def say(self, name: str, text: object = "") -> None:
        (self.scratch / f"{name}.new").write_text(str(text))
        (self.scratch / f"{name}.new").replace(self.scratch / name)

    def said(self, name: str) -> str:
        """Waits until something was said under this name, and returns it."""
        until((self.scratch / name).exists, PATIENCE_S + 2 * self.quiet)
        return (self.scratch / name).read_text()


@dataclass
class Spell(Place):
    """The facts for a spell: the rank, and ``step``, which makes one step together with all others."""

    rank: int = 0
    step: Callable[[], None] = lambda: None
    model: Any = None
    optimizer: Any = None
    end_s: float = field(default=0.0)

    def begin(self) -> None:
        self.end_s = time.monotonic() + self.quiet
        self.say(f"begun-{self.rank}", os.getpid())

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.end_s

    @property
    def port(self) -> int:
        """Port of the server outside."""
        return int(self.said("port"))


class Outside(Place):
    """The facts for the process outside."""

    def begun(self, number: int = 1) -> list[int]:
        """The pids of the ranks whose spell has begun, once there are ``number`` of them."""
        until(lambda: len(self._marks()) >= number, PATIENCE_S + 2 * self.quiet)
        return [int(mark.read_text()) for mark in self._marks()]

    def _marks(self) -> list[Path]:
        return sorted(path for path in self.scratch.glob("begun-*") if path.suffix != ".new")

    def rest(self) -> None:
        """Until the spell is over."""
        self.begun()
        time.sleep(self.quiet)
