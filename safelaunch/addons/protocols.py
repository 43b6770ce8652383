"""What the core expects of add-ons. A new kind of extension is a new protocol here; the core never asks for a name.

The sweep has one more, for schedulers: ``addons.sweep.engine.Scheduler``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from safelaunch.bundle.reading.guard import FoundEvidence, ReadLimits
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

    def bounds(self, paths: Sequence[Path]) -> ReadLimits:
        """Returns the limits of the child in which ``read`` reads these files."""

    def read(self, paths: Sequence[Path]) -> FoundEvidence:
        """Reads files of one job that it claims. Raises Unreadable."""

    def read_folder(self, folder: Path, dumps: FoundEvidence | None) -> FoundEvidence | None:
        """Reads its files below a folder; ``dumps``: the evidence in the folder's dumps. None: neither is there."""


class Monitor(Protocol):
    """Watches a running job for something other than a stall.

    The hook ``monitors`` makes monitors of a ``MonitoredJob`` (see ``supervise.monitors``), by which they request a
    bundle, end the job, and exchange values with other nodes. What a monitor finds wrong with the job's results, it adds
    to ``watch.wrong_results``: later bundles, verdicts and ``safelaunch status`` have it from there.
    """

    name: str  # in messages, with its article

    def tick(self) -> None:
        """Called by the supervisor's loop, several times a second. Must not block. An exception ends the monitor."""

    def finish(self, *, succeeded: bool) -> None:
        """Called once the job has ended; ``succeeded``: by itself, with exit code 0."""


class Probe(Protocol):
    """Runs inside each rank: the module ``probe`` of an add-on whose hook ``probe_values`` returns variables.

    It imports only the standard library, its own modules and the beacon's (``from ...beacon import marks``); see
    ``beacon.addon_probes``. Nothing in it may raise into the script, print, or wait.
    """

    VARIABLE: str  # the environment variable whose value it gets

    def install(self, base: str, value: str) -> None:
        """Called before the user's script runs. ``base``: path of the rank's page, a prefix for files of the probe."""

    def detach(self) -> None:
        """Called in a process forked from the rank: removes what ``install`` left."""


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
