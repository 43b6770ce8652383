"""What a report says of a job beside its verdict and its evidence: how it was started, the nodes it ran on, and what
early looks found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from safelaunch.model import EarlyLook, Gpu, duration


class Link(msgspec.Struct, frozen=True):
    """A network interface, or a port of an InfiniBand device (``mlx5_0/1``).

    ``speed``: in words, with the MTU where it is known. ``errors``: what its counters say.
    """

    name: str
    state: str = ""
    speed: str = ""
    errors: str = ""


class LaunchFacts(msgspec.Struct, frozen=True):
    """The part of ``launch.json`` that people ask for first. ``command``: what ran, as torchrun; ``typed``: how."""

    run_name: str = ""
    host: str = ""
    user: str = ""
    cwd: str = ""
    started: str = ""
    command: tuple[str, ...] = ()
    safelaunch: str = ""
    torch: str = ""
    presets: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()

    @property
    def as_typed(self) -> tuple[str, ...]:
        """The command line as the user knows it; what ran, where nothing was typed."""
        return ("safelaunch", *self.typed) if self.typed else self.command


@dataclass(frozen=True)
class NodeSummary:
    """What the files in ``node/<host>/`` say. ``no_gpus``: why they name none. ``kernel_log``: its last lines."""

    host: str
    gpus: tuple[Gpu, ...] = ()
    no_gpus: str = ""
    cpus: int = 0
    load: tuple[float, ...] = ()
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    disks: tuple[tuple[str, float], ...] = ()  # place, share of it in use
    versions: tuple[tuple[str, str], ...] = ()
    kernel_log: tuple[str, ...] = ()
    network: tuple[Link, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  # of the job's variables, those about communication and devices


@dataclass(frozen=True)
class ReportHeader:
    """``bundle``: its name. ``at_unix_s``: when the evidence was taken; 0: not known."""

    bundle: str = ""
    at_unix_s: float = 0.0
    launch: LaunchFacts = field(default_factory=LaunchFacts)
    nodes: tuple[NodeSummary, ...] = ()


# --- an early look, on the screen and in ``status`` -------------------------------------------------------------------


def early_line(look: EarlyLook, before: EarlyLook | None = None, *, part: bool = False) -> str:
    """The line on the screen. ``before``: the look before it at the same quiet, whose words are not repeated. ``part``:
    other nodes have ranks.
    """
    found = (look.movement, look.cause, look.places)
    if before is not None and (before.movement, before.cause, before.places) == found:
        return f"quiet for {look.quiet_s:.0f} s: nothing has changed since {before.quiet_s:.0f} s"
    usual = f"usual {duration(look.usual_s)}" if look.usual_s else "no usual step known"
    where = ", on this node" if part else ""
    return f"quiet for {look.quiet_s:.0f} s ({usual}){where}: {look.words}... watching"


def in_status(look: EarlyLook) -> str:
    """In ``status`` and in reports, where the time of the look stands before it."""
    ended = f" (over after {look.lasted_s:.0f} s)" if look.lasted_s else ""
    return f"quiet for {look.quiet_s:.0f} s{ended}: {look.words}"
