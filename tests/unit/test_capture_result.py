"""Late sources of evidence write nothing more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from safelaunch.bundle.staging import Staging
from safelaunch.capture.gather import gather_into
from safelaunch.capture.sink import FileGroup, Gate, Late
from safelaunch.model import Artifact


def named(path: str) -> Artifact:
    return Artifact(path, "a test", 0.0)


def test_late_source_writes_nothing_more_into_bundle(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "bundle")
    over, ended = threading.Event(), threading.Event()

    def late(gate: Gate) -> None:
        gate.add(named("early.txt"), "in time")
        over.wait(60)
        try:
            gate.add(named("late.txt"), "too late")
        finally:
            ended.set()

    gather_into(staging, {"late": late}, deadline_s=0.2)
    over.set()
    assert ended.wait(60)
    listed = {artifact.path: artifact.missing for artifact in staging.close()}
    assert listed == {"early.txt": "", "late": "not collected within 0.2 s"}
    assert not (staging.root / "late.txt").exists()


def test_file_group_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    staging, finished = Staging(tmp_path / "bundle"), list[str]()
    outer = Gate(staging)
    inner = Gate(outer)
    step = FileGroup(inner)
    step.add(named("one.txt"), "1")
    assert not (staging.root / "one.txt").exists()
    step.done(lambda: finished.append("one"))
    step.add(named("two.txt"), "2")
    outer.close()
    with pytest.raises(Late):
        step.done(lambda: finished.append("two"))
    assert finished == ["one"]
    assert [path.name for path in staging.root.iterdir()] == ["one.txt"]
