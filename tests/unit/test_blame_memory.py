"""The file that remembers who was blamed: private, bounded, whole, and never in the way."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from safelaunch.blame import memory
from safelaunch.model import BlamedRank, Incident

NOW = 1_700_000_000.0


def incident(name: str, at_s: float = NOW) -> Incident:
    blamed = (BlamedRank(3, "a", "GPU-3", "/train.py", 41),)
    return Incident(name, "train", at_s, "hang", "gpu-kernel", "high", blamed, units=("gpu",), bundle=f"/b/{name}")


def ids(directory: Path, now_s: float = NOW) -> list[str]:
    return [one.id for one in memory.read(directory, now_s)]


def test_what_is_added_is_read_again_and_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert memory.add(tmp_path, incident("one"), NOW) == memory.add(tmp_path, incident("two"), NOW) == ""
    finally:
        os.umask(before)
    assert memory.read(tmp_path, NOW) == (incident("one"), incident("two"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert all(path.name.startswith(".safelaunch-blamed-") for path in tmp_path.iterdir()), "nothing is left of a write"


def test_the_nodes_of_a_job_add_their_incident_once(tmp_path: Path) -> None:
    memory.add(tmp_path, incident("one"), NOW)
    memory.add(tmp_path, incident("one"), NOW)
    assert ids(tmp_path) == ["one"]


def test_it_forgets(tmp_path: Path) -> None:
    memory.add(tmp_path, incident("old"), NOW)
    assert ids(tmp_path, NOW + memory.LONGEST_S - 1) == ["old"]
    assert ids(tmp_path, NOW + memory.LONGEST_S + 1) == []
    memory.add(tmp_path, incident("new", NOW + memory.LONGEST_S + 1), NOW + memory.LONGEST_S + 1)
    assert ids(tmp_path) == ["new"]


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_INCIDENTS", 5)
    for number in range(8):
        memory.add(tmp_path, incident(str(number)), NOW)
    assert ids(tmp_path) == ["3", "4", "5", "6", "7"]


def test_a_damaged_file_holds_nothing_and_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    memory.path_in(tmp_path).write_bytes(b'{"incidents": [{}]}')
    assert ids(tmp_path) == []
    assert "was damaged" in memory.add(tmp_path, incident("one"), NOW)
    assert ids(tmp_path) == ["one"]


def test_a_file_of_a_newer_version_stays(tmp_path: Path) -> None:
    memory.path_in(tmp_path).write_text('{"schema": 2, "incidents": []}')
    assert "newer" in memory.add(tmp_path, incident("one"), NOW)
    assert memory.path_in(tmp_path).read_text() == '{"schema": 2, "incidents": []}'


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert ids(tmp_path / "none") == []
    assert "No such file" in memory.add(tmp_path / "none", incident("one"), NOW)


def test_a_disk_that_does_not_answer_costs_the_memory_alone() -> None:
    dead = threading.Event()
    assert memory.within(lambda: str(dead.wait(60)), "no answer", 0.05) == "no answer"
    dead.set()

    def fails() -> str:
        raise OSError("stale file handle")

    assert memory.within(fails, "no answer") == "no answer"
    assert memory.within(lambda: "read", "no answer") == "read"
