"""What the core expects of add-ons. A new kind of extension is a new protocol here; the core never asks for a name.

The sweep has one more, for schedulers: ``addons.sweep.engine.Queue``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from safelaunch.bundle.reading.guard import Bounds, Found
    from safelaunch.cli.parsing import Parser
    from safelaunch.supervise.respond import JobView

Ask = TypeVar("Ask")
Part = TypeVar("Part")


class Command(Protocol):
    """A subcommand: the module ``command`` of an add-on that ``COMMANDS`` names."""

    def parser(self) -> Parser: ...

    def main(self, argv: list[str]) -> int:
        """Runs the subcommand and returns the exit code. Raises SafelaunchError."""


class Reader(Protocol):
    """Reads evidence for ``safelaunch diagnose PATH``: files other than bundles, run directories and dumps."""

    def claims(self, path: Path) -> bool:
        """Returns whether it reads this file. Raises OSError."""

    def bounds(self, paths: Sequence[Path]) -> Bounds:
        """Returns the limits of the child in which ``read`` reads these files."""

    def read(self, paths: Sequence[Path]) -> Found:
        """Reads files of one job that it claims. Raises Unreadable."""

    def read_folder(self, folder: Path, dumps: Found | None) -> Found | None:
        """Reads its files below a folder; ``dumps``: the evidence in the folder's dumps. None: neither is there."""


class Service(Protocol[Ask, Part]):
    """Serves what a client may ask of a running job. Every node serves its own ranks; the asked one merges the parts.

    ``ask`` and ``part`` are msgspec types. They travel through the control socket and the job's store, which don't
    know them, so they are decoded here and may come from a stranger.
    """

    name: str  # the command on the control socket
    noun: str  # what it makes, in messages
    ask: type[Ask]
    part: type[Part]

    def here(self, ask: Ask, job: JobView, stop: threading.Event) -> Part:
        """Returns the part of this node's ranks, without secrets. Returns early after ``stop``."""

    def check(self, part: Part) -> None:
        """Raises msgspec.ValidationError for a part of another node that can't be used."""

    def merged(self, ask: Ask, parts: Sequence[Part], notes: Sequence[str]) -> Part:
        """Returns the answer for the client; ``notes``: why parts of other nodes are missing."""

    def bounded(self, part: Part, fits: Callable[[Part], bool]) -> Part:
        """Returns as much of the part as ``fits``."""
