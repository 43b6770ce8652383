"""Defines the protocols through which the core uses add-ons without knowing which add-on it uses.

The protocol for schedulers is part of the sweep: ``addons.sweep.engine.Scheduler``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from safelaunch.bundle.reading.evidence import EvidenceSource
    from safelaunch.bundle.reading.guard import ReadLimits
    from safelaunch.cli.parsing import Parser
    from safelaunch.supervise.respond import JobView

Ask = TypeVar("Ask")
Part = TypeVar("Part")


class Command(Protocol):
    """A subcommand, implemented by the module ``command`` of an add-on that is listed in ``COMMANDS``."""

    def parser(self) -> Parser: ...

    def main(self, argv: list[str]) -> int:
        """Runs the subcommand and returns the exit code. Raises SafelaunchError."""


class Reader(Protocol):
    """Reads evidence for ``safelaunch diagnose PATH`` from files other than bundles, run directories and dumps."""

    def claims(self, path: Path) -> bool:
        """Returns whether this reader reads the file. Raises OSError."""

    def bounds(self, paths: Sequence[Path]) -> ReadLimits:
        """Returns the limits of the child process in which ``read`` will read these files."""

    def read(self, paths: Sequence[Path]) -> EvidenceSource:
        """Reads the files of one job; ``claims`` must be true for each. Raises Unreadable."""

    def read_folder(self, folder: Path, dumps: EvidenceSource | None) -> EvidenceSource | None:
        """Adds the evidence in other files of a folder to its Flight Recorder ``dumps``; None if there is neither."""


class Monitor(Protocol):
    """Watches a running job for problems other than stalls.

    An add-on's hook ``monitors`` creates its monitors. They get a ``MonitoredJob`` (see ``supervise.monitors``),
    through which they request a bundle, end the job, and exchange values with other nodes. A monitor adds wrong results
    to ``watch.wrong_results``, from which later bundles, verdicts and ``safelaunch status`` read them.
    """

    name: str  # used in messages, with its article

    def tick(self) -> None:
        """Runs in the supervisor's loop, several times a second. Must not block. An exception ends the monitor."""

    def finish(self, *, succeeded: bool) -> None:
        """Runs once the job has ended. ``succeeded`` is True if it ended by itself with exit code 0."""


class Probe(Protocol):
    """Runs inside each rank: the module ``probe`` of an add-on whose hook ``probe_values`` returns variables.

    It can import only the standard library, its add-on's own modules, and the beacon's (``from ...beacon import
    marks``); see ``beacon.addon_probes``. It must not raise exceptions into the script, print, or wait.
    """

    VARIABLE: str  # environment variable with the value for ``install``

    def install(self, base: str, value: str) -> None:
        """Runs before the user's script. ``base`` is the path of the rank's page and a prefix for the probe's files."""

    def detach(self) -> None:
        """In a process forked from the rank, removes what ``install`` set up."""


class Service(Protocol[Ask, Part]):
    """Serves clients' requests about a running job. Every node serves its own ranks; the one asked merges the parts.

    ``ask`` and ``part`` are msgspec types. The control socket and the job's store transfer them as opaque bytes, which
    can come from an untrusted sender, so these types are decoded here.
    """

    name: str  # command on the control socket
    noun: str  # name of its product, in messages
    ask: type[Ask]
    part: type[Part]

    def here(self, ask: Ask, job: JobView, stop: threading.Event) -> Part:
        """Returns this node's part: the answer for its ranks, without secrets. Returns early once ``stop`` is set."""

    def check(self, part: Part) -> None:
        """Raises msgspec.ValidationError if a part from another node is unusable."""

    def merged(self, ask: Ask, parts: Sequence[Part], notes: Sequence[str]) -> Part:
        """Merges the parts into the answer for the client. ``notes`` say why parts of other nodes are missing."""

    def bounded(self, part: Part, fits: Callable[[Part], bool]) -> Part:
        """Shortens the part until ``fits`` accepts it, because the size of messages is limited."""
