"""An early look as people read it: on the screen and in ``status``."""

from __future__ import annotations

from safelaunch.model import EarlyLook


def line(look: EarlyLook, before: EarlyLook | None = None, *, part: bool = False) -> str:
    """The line on the screen. ``before``: the look before it at the same quiet, whose words are not repeated. ``part``:
    other nodes have ranks.
    """
    if before is not None and same(before, look):
        return f"quiet for {look.quiet_s:.0f} s: nothing has changed since {before.quiet_s:.0f} s"
    usual = f"usual {_seconds(look.usual_s)}" if look.usual_s else "no usual step known"
    where = ", on this node" if part else ""
    return f"quiet for {look.quiet_s:.0f} s ({usual}){where}: {look.words}... watching"


def same(one: EarlyLook, other: EarlyLook) -> bool:
    """Whether two looks found the same ranks at the same places."""
    return (one.movement, one.cause, one.places) == (other.movement, other.cause, other.places)


def in_status(look: EarlyLook) -> str:
    """In ``status`` and in reports, where the time of the look stands before it."""
    ended = f" (over after {look.lasted_s:.0f} s)" if look.lasted_s else ""
    return f"quiet for {look.quiet_s:.0f} s{ended}: {look.words}"


def _seconds(value: float) -> str:
    """``2 ms``, ``0.05 s``, ``1.2 s``, ``70 s``."""
    if value < 0.01:
        return f"{max(1.0, 1000 * value):.0f} ms"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
