"""Which look at a rank its files are written from, and what the manifest says of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from safelaunch.beacon import layout, ring
from safelaunch.capture import collect
from safelaunch.capture.collect import most_telling
from safelaunch.capture.look import Look, ProcessLook, RankLook, Target
from safelaunch.capture.result import Result
from safelaunch.model import Artifact, ProcessState, RankExit, StackSample
from safelaunch.redaction.redactor import Redactor

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


class Listed:
    """Takes artifacts, and keeps their lines of the manifest and their texts."""

    redactor = Redactor()

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, object]] = {}
        self.missing: dict[str, str] = {}

    def add(self, artifact: Artifact, data: bytes | str | None) -> None:
        self.found[artifact.path] = artifact.note, data
        self.missing[artifact.path] = artifact.missing

    def add_json(self, artifact: Artifact, value: object) -> None: ...


@pytest.mark.parametrize(("text", "note"), [("loss\t0.1\n", ""), ("\x1b[2Jloss\n", collect.RAW_OUTPUT)])
def test_output_with_terminal_sequences_is_kept_and_noted(text: str, note: str, tmp_path: Path) -> None:
    writer = ring.Ring(str(tmp_path / f"0-0-7{layout.RING_SUFFIX}"))
    writer.append(ring.STDOUT, text.encode())
    listed = Listed()
    collect.of_ended(0, collect.Known(pid=7, page_name="0-0-7"), tmp_path, "node1", listed)
    noted, data = listed.found["ranks/0/log_tail.txt"]
    assert noted == note and text in str(data)


def test_of_a_rank_that_comes_too_late_what_was_seen_is_kept_and_the_rest_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, or with a log full of secrets."""
    over = threading.Event()

    class Slow(Listed):
        def add_json(self, artifact: Artifact, value: object) -> None:
            over.wait(60)

    monkeypatch.setattr(collect, "RANK_DEADLINE_S", -1.9)
    listed = Slow()
    ended = RankExit(1, 5.0)
    known = {0: collect.Known(pid=7, exit=ended)}
    (found,) = collect.ranks((Target(0, 0, 7, 5),), (look("stack"),), known, tmp_path, "node1", listed, ask=False)
    over.set()
    assert found.main is not None and found.main.stacks and found.exit == ended
    assert listed.missing["ranks/0"] == "not collected within 0.1 s"
