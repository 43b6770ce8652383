"""An early look as people read it: on the screen and in ``status``."""

from __future__ import annotations

from safelaunch.model import EarlyLook, duration


def line(look: EarlyLook, before: EarlyLook | None = None, *, part: bool = False) -> str:
    """The line on the screen. ``before``: the look before it at the same quiet, whose words are not repeated. ``part``:
    other nodes have ranks.
    """
    if before is not None and same(before, look):
        return f"quiet for {look.quiet_s:.0f} s: nothing has changed since {before.quiet_s:.0f} s"
    usual = f"usual {duration(look.usual_s)}" if look.usual_s else "no usual step known"
    where = ", on this node" if part else ""
    return f"quiet for {look.quiet_s:.0f} s ({usual}){where}: {look.words}... watching"


def same(one: EarlyLook, other: EarlyLook) -> bool:
    """Whether two looks found the same ranks at the same places."""
    return (one.movement, one.cause, one.places) == (other.movement, other.cause, other.places)


def in_status(look: EarlyLook) -> str:
    """In ``status`` and in reports, where the time of the look stands before it."""
    ended = f" (over after {look.lasted_s:.0f} s)" if look.lasted_s else ""
    return f"quiet for {look.quiet_s:.0f} s{ended}: {look.words}"
