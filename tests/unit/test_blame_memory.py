"""The file that remembers who was blamed: private, bounded, whole, and never in the way."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
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
    monkeypatch.setattr(memory, "MOST_BYTES", 1200)
    memory.add(tmp_path, incident("8"), NOW)
    assert memory.path_in(tmp_path).stat().st_size <= 1200
    assert ids(tmp_path)[-1] == "8"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"incidents": 3}', b'{"incidents": [{}]}', b"null"]
)
def test_a_damaged_file_holds_nothing_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    memory.path_in(tmp_path).write_bytes(content)
    assert ids(tmp_path) == []
    assert memory.add(tmp_path, incident("one"), NOW) == ""
    assert ids(tmp_path) == ["one"]


def test_a_file_of_a_newer_version_stays(tmp_path: Path) -> None:
    memory.path_in(tmp_path).write_text('{"schema": 2, "incidents": []}')
    assert "newer" in memory.add(tmp_path, incident("one"), NOW)
    assert memory.path_in(tmp_path).read_text() == '{"schema": 2, "incidents": []}'


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "directory"])
def test_what_others_put_there_is_neither_read_nor_replaced(tmp_path: Path, kind: str) -> None:
    path, elsewhere = memory.path_in(tmp_path), tmp_path / "elsewhere"
    memory.add(tmp_path, incident("one"), NOW)
    path.rename(elsewhere)
    make = {
        "link": lambda: path.symlink_to(elsewhere),
        "hard link": lambda: path.hardlink_to(elsewhere),
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    make[kind]()
    assert ids(tmp_path) == []
    assert memory.add(tmp_path, incident("two"), NOW)
    assert b"two" not in elsewhere.read_bytes()
    assert len(list(tmp_path.iterdir())) == 3, "nothing else is left"


def test_a_file_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.add(tmp_path, incident("one"), NOW)
    path = memory.path_in(tmp_path)
    monkeypatch.setattr(memory, "path_in", lambda directory: path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert ids(tmp_path) == []
    assert "not a file of this user" in memory.add(tmp_path, incident("two"), NOW)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert ids(tmp_path / "none") == []
    assert "No such file" in memory.add(tmp_path / "none", incident("one"), NOW)


def test_somebody_who_holds_the_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.add(tmp_path, incident("one"), NOW)
    with memory.path_in(tmp_path).with_suffix(".lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(memory, "LOCK_PATIENCE_S", 0.05)
        assert "holds its lock" in memory.add(tmp_path, incident("two"), NOW)
        monkeypatch.setattr(memory, "LOCK_PATIENCE_S", 60.0)
        problems: list[str] = []
        thread = threading.Thread(target=lambda: problems.append(memory.add(tmp_path, incident("three"), NOW)))
        thread.start()
        fcntl.flock(held, fcntl.LOCK_UN)
        thread.join(60)
    assert problems == [""]
    assert ids(tmp_path) == ["one", "three"]


PROGRAM = """
import sys
from pathlib import Path
from safelaunch.blame import memory
from safelaunch.model import Incident
memory.LOCK_PATIENCE_S = 60.0
for number in range(10):
    one = Incident(f"{sys.argv[2]}.{number}", "train", 1_700_000_000.0, "hang", "gpu-kernel", "high")
    problem = memory.add(Path(sys.argv[1]), one, 1_700_000_000.0)
    assert not problem, problem
"""


def test_several_supervisors_at_once_lose_nothing(tmp_path: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, os.fspath(tmp_path), str(number)], stderr=subprocess.PIPE)
        for number in range(3)
    ]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    assert sorted(ids(tmp_path)) == sorted(f"{one}.{number}" for one in range(3) for number in range(10))


def test_a_disk_that_does_not_answer_costs_the_memory_alone() -> None:
    dead = threading.Event()
    assert memory.within(lambda: str(dead.wait(60)), "no answer", 0.05) == "no answer"
    dead.set()

    def fails() -> str:
        raise OSError("stale file handle")

    assert memory.within(fails, "no answer") == "no answer"
    assert memory.within(lambda: "read", "no answer") == "read"
