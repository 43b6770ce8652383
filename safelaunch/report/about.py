"""Facts about a job that are neither verdict nor evidence: its launch, nodes and early looks."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from safelaunch.model import EarlyLook, Gpu, duration


class Link(msgspec.Struct, frozen=True):
    """A network interface, or an InfiniBand port (``mlx5_0/1``)."""

    name: str
    state: str = ""
    speed: str = ""  # with the MTU
    errors: str = ""  # from its counters


class LaunchFacts(msgspec.Struct, frozen=True):
    """The parts of ``launch.json`` that a report shows."""

    run_name: str = ""
    host: str = ""
    user: str = ""
    cwd: str = ""
    started: str = ""
    command: tuple[str, ...] = ()
    safelaunch: str = ""
    torch: str = ""
    presets: tuple[str, ...] = ()
    typed: tuple[str, ...] = ()  # by the user

    @property
    def as_typed(self) -> tuple[str, ...]:
        return ("safelaunch", *self.typed) if self.typed else self.command


@dataclass(frozen=True)
class NodeSummary:
    """Facts about one node, from the bundle's directory ``node/<host>/``."""

    host: str
    gpus: tuple[Gpu, ...] = ()
    no_gpus: str = ""  # why ``gpus`` is empty
    cpus: int = 0
    load: tuple[float, ...] = ()
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    disks: tuple[tuple[str, float], ...] = ()  # place, share in use
    versions: tuple[tuple[str, str], ...] = ()
    kernel_log: tuple[str, ...] = ()  # last lines
    network: tuple[Link, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()  # variables about communication and devices


@dataclass(frozen=True)
class ReportHeader:
    """Facts shown above the verdict in a report."""

    bundle: str = ""
    at_unix_s: float = 0.0  # of the evidence
    launch: LaunchFacts = field(default_factory=LaunchFacts)
    nodes: tuple[NodeSummary, ...] = ()


# --- an early look, on the screen and in ``status`` -------------------------------------------------------------------


def early_line(look: EarlyLook, before: EarlyLook | None = None, *, part: bool = False) -> str:
    """Describes an early look in one line, for the screen.

    Args:
        before: Previous look in the same quiet period; its words aren't repeated.
        part: True if other nodes have ranks, too.
    """
    content = (look.movement, look.cause, look.places)
    if before is not None and (before.movement, before.cause, before.places) == content:
        return f"quiet for {look.quiet_s:.0f} s: nothing has changed since {before.quiet_s:.0f} s"
    usual = f"usual {duration(look.usual_s)}" if look.usual_s else "no usual step known"
    where = ", on this node" if part else ""
    return f"quiet for {look.quiet_s:.0f} s ({usual}){where}: {look.words}... watching"


def in_status(look: EarlyLook) -> str:
    ended = f" (over after {look.lasted_s:.0f} s)" if look.lasted_s else ""
    return f"quiet for {look.quiet_s:.0f} s{ended}: {look.words}"
