"""Files that are read by several processes: the same as by one, whatever happens to the processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from safelaunch.postmortem import cores
from safelaunch.postmortem.cores import parse_all

PARENT = os.getpid()


def read(paths: Sequence[Path]) -> list[tuple[str, int]]:
    return [(path.read_text(), os.getpid()) for path in paths]


def read_and_die_of_it(paths: Sequence[Path]) -> list[tuple[str, int]]:
    if os.getpid() != PARENT and any(path.name == "70" for path in paths):
        os.kill(os.getpid(), signal.SIGKILL)
    return read(paths)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr("safelaunch.postmortem.cores.os.sched_getaffinity", lambda pid: {0, 1, 2})
    for number in range(100):
        (tmp_path / str(number)).write_text(f"text {number}")
    return [tmp_path / str(number) for number in range(100)]


def test_several_processes_give_all_in_order(files: list[Path]) -> None:
    found = list(parse_all(files, read, worth_it_bytes=0))
    assert [text for text, _ in found] == [f"text {number}" for number in range(100)]
    assert os.getpid() not in {pid for _, pid in found}


def test_little_is_read_here(files: list[Path]) -> None:
    found = list(parse_all(files, read))
    assert [text for text, _ in found] == [f"text {number}" for number in range(100)]
    assert {pid for _, pid in found} == {os.getpid()}


def test_a_process_that_is_killed_costs_nothing(files: list[Path]) -> None:
    found = list(parse_all(files, read_and_die_of_it, worth_it_bytes=0))
    assert [text for text, _ in found] == [f"text {number}" for number in range(100)]


def test_no_processes_to_be_had(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(cores, "ProcessPoolExecutor", refuse)
    found = list(parse_all(files, read, worth_it_bytes=0))
    assert [text for text, _ in found] == [f"text {number}" for number in range(100)]
