"""Which look at a rank its files are written from."""

from __future__ import annotations

from safelaunch.capture.collect import most_telling
from safelaunch.capture.look import Look, ProcessLook, RankLook
from safelaunch.capture.result import Result
from safelaunch.model import ProcessState, StackSample

STATE = ProcessState(7, 1, 5, 0.0, "python", ("python",), "S")


def look(how: str) -> Look:
    """``how``: ``stack`` (all of it), ``state`` (py-spy failed), ``nothing`` (the deadline passed), ``absent``."""
    if how == "absent":
        return Look(0.0, 1.0, {})
    sample = StackSample(7, 0.0, "py-spy", ()) if how == "stack" else None
    result = Result(sample, "py-spy", 0.0, missing="" if sample else "no answer")
    return Look(0.0, 1.0, {0: RankLook(0, None if how == "nothing" else ProcessLook(7, STATE, result))})


def chosen(*hows: str) -> int | None:
    looks = [look(how) for how in hows]
    found = most_telling(looks, 0)
    return next((n for n, one in enumerate(looks) if one.ranks.get(0) is found), None) if found else None


def test_the_newest_with_a_stack() -> None:
    assert chosen("stack", "stack") == 1
    assert chosen("stack", "nothing") == 0
    assert chosen("stack", "state") == 0
    assert chosen("stack", "absent") == 0


def test_without_a_stack_the_newest_with_anything() -> None:
    assert chosen("state", "nothing") == 0
    assert chosen("nothing", "state") == 1
    assert chosen("nothing") == 0
    assert chosen("absent") is None
