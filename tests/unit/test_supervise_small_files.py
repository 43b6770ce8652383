"""The files of a node that travel to the one that writes the whole bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.supervise import small_files as module
from safelaunch.supervise.small_files import LARGEST_TEXT, apart, small_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in {
        "node/a/resources.json": "{}",
        "node/a/kernel_log.txt": "x" * LARGEST_TEXT + "end",
        "node/a/gpus.json": "x" * (LARGEST_TEXT + 1),
        "node/a/beacon.log": "no",
        "ranks/3/flight_recorder.pickle": "p" * 10,
        "ranks/4/flight_recorder.pickle": "q" * 10,
        "ranks/3/stack.txt": "no",
        "verdict.json": "{}",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def test_what_is_small_travels_and_of_a_log_the_end(root: Path) -> None:
    found = small_files(root, records=True)
    recorders = {f"ranks/{rank}/flight_recorder.pickle" for rank in (3, 4)}
    assert set(found) == {"node/a/resources.json", "node/a/kernel_log.txt", *recorders}
    assert len(found["node/a/kernel_log.txt"]) == LARGEST_TEXT
    assert found["node/a/kernel_log.txt"].endswith(b"end")
    assert set(small_files(root, records=False)) == {"node/a/resources.json", "node/a/kernel_log.txt"}
    assert small_files(root / "none", records=True) == {}


def test_recorders_travel_as_long_as_there_is_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 15)
    assert [name for name in small_files(root, records=True) if "pickle" in name] == ["ranks/3/flight_recorder.pickle"]


def test_nodes_of_one_host_name_are_kept_apart() -> None:
    assert apart("node/a/x.json", 2, {"a"}) == "node/a-2/x.json"
    assert apart("node/b/x.json", 2, {"a"}) == "node/b/x.json"
    assert apart("ranks/1/flight_recorder.pickle", 2, {"a", "1"}) == "ranks/1/flight_recorder.pickle"
