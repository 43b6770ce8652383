"""Choice of the look whose files are written for a rank, and their entries in the manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from safelaunch.beacon import layout, output
from safelaunch.capture import collect
from safelaunch.capture.collect import most_telling
from safelaunch.capture.flight_recorder import FlightCapture
from safelaunch.capture.gather import gather
from safelaunch.capture.look import Look, ProcessLook, RankLook, Target
from safelaunch.capture.result import Result
from safelaunch.capture.sink import FileContent, Sink
from safelaunch.model import Artifact, FlightRecord, GilTest, ProcessState, RankExit, StackSample
from safelaunch.system.redaction.redactor import Redactor

STATE = ProcessState(7, 1, 5, 0.0, "python", ("python",), "S")


def look(how: str) -> Look:
    """Returns a look that got a stack, only a process state, nothing before its deadline, or has no such rank."""
    if how == "absent":
        return Look(0.0, 1.0, {})
    sample = StackSample(7, 0.0, "py-spy", ()) if how == "stack" else None
    result = Result(sample, "py-spy", 0.0, missing="" if sample else "no answer")
    return Look(0.0, 1.0, {0: RankLook(0, None if how == "nothing" else ProcessLook(7, STATE, result))})


def chosen(*hows: str) -> int | None:
    looks = [look(how) for how in hows]
    choice = most_telling(looks, 0)
    return next((n for n, look in enumerate(looks) if look.ranks.get(0) is choice), None) if choice else None


def test_most_telling_look_is_newest_with_stack() -> None:
    assert chosen("stack", "stack") == 1
    assert chosen("stack", "nothing") == 0
    assert chosen("stack", "state") == 0
    assert chosen("stack", "absent") == 0


def test_most_telling_look_without_stack_is_newest_with_data() -> None:
    assert chosen("state", "nothing") == 0
    assert chosen("nothing", "state") == 1
    assert chosen("nothing") == 0
    assert chosen("absent") is None


class Listed(Sink):
    """Sink that keeps the manifest entry and the text of each artifact."""

    def __init__(self) -> None:
        super().__init__(Redactor())
        self.found: dict[str, tuple[str, object]] = {}
        self.missing: dict[str, str] = {}

    def made(self, artifact: Artifact, data: bytes | str | None) -> FileContent:
        return artifact, data.encode() if isinstance(data, str) else data

    def put(self, made: FileContent) -> None:
        artifact, data = made
        self.found[artifact.path] = artifact.note, data
        self.missing[artifact.path] = artifact.missing


@pytest.mark.parametrize(("text", "note"), [("loss\t0.1\n", ""), ("\x1b[2Jloss\n", collect.RAW_OUTPUT)])
def test_output_tail_with_terminal_sequences_is_kept_and_noted(text: str, note: str, tmp_path: Path) -> None:
    writer = output.Ring(str(tmp_path / f"0-0-7{layout.RING_SUFFIX}"))
    writer.append(output.STDOUT, text.encode())
    listed = Listed()
    collect.of_ended(0, collect.RankBasics(pid=7, page_name="0-0-7"), tmp_path, "node1", listed)
    noted, data = listed.found["ranks/0/log_tail.txt"]
    assert noted == note and isinstance(data, bytes) and text.encode() in data


@pytest.mark.parametrize("slow", ["stack.txt", "log_tail.txt"], ids=["at once", "once its Flight Recorder was there"])
def test_late_rank_evidence_and_files_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """A busy machine or a log full of secrets can delay a rank's files."""
    over, waiting = threading.Event(), threading.Event()

    class Slow(Listed):
        def made(self, artifact: Artifact, data: bytes | str | None) -> FileContent:
            if artifact.path.endswith(slow) and threading.current_thread() is not threading.main_thread():
                waiting.set()
                over.wait(60)
            return super().made(artifact, data)

    def in_time(calls: list[Callable[[], object]], *, deadline_s: float) -> list[object]:
        thread = threading.Thread(target=lambda: gather(calls, deadline_s=60.0))
        thread.start()
        threads.append(thread)
        assert waiting.wait(60)
        return [None]

    threads: list[threading.Thread] = []
    record = FlightRecord("2.10")
    capture = FlightCapture(Result(record, "server", 0.0), Result(b"{}", "server", 0.0), Result(None, "", 0.0, "none"))
    monkeypatch.setattr(collect, "gather", in_time)
    monkeypatch.setattr(collect, "ask_server", lambda target: (GilTest(), capture))
    listed = Slow()
    ended = RankExit(1, 5.0)
    basics = {0: collect.RankBasics(pid=7, exit=ended)}
    target = Target(0, 0, 7, 5, socket=tmp_path / "socket")
    (evidence,) = collect.ranks((target,), (look("stack"),), basics, tmp_path, "node1", listed)
    over.set()
    threads[0].join(60)
    assert evidence.main is not None and evidence.main.stacks and evidence.exit == ended
    assert listed.missing["ranks/0"] == "not collected within 10 s"
    assert listed.missing["ranks/0/stack.txt"] == "" and "ranks/0/log_tail.txt" not in listed.found
    assert (
        (evidence.flight_record is record) == ("ranks/0/flight_recorder.json" in listed.found) == (slow != "stack.txt")
    )


def test_rank_collection_deadline_grows_with_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []

    def none(calls: list[Callable[[], object]], *, deadline_s: float) -> list[object]:
        deadlines.append(deadline_s)
        return [None]

    monkeypatch.setattr(collect, "gather", none)
    for patience in (1.0, 3.0):
        collect.ranks((Target(0, 0, 7, 5),), (look("stack"),), {}, tmp_path, "node1", Listed(), patience=patience)
    assert deadlines == [10.0, 30.0]
