"""Parts of a status that are read on request: looks at silent ranks, and GPU memory by NVML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from safelaunch.capture.gpu import gpus
from safelaunch.capture.look import Look, RankLook, Target
from safelaunch.capture.result import Result
from safelaunch.model import Gpu, GpuProcess, Gpus
from safelaunch.supervise.gpu_memory import GpuMemory, memory_by_process
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.silent_ranks import AGAIN_S, SilentRanks, activity_of
from tests.support.evidence import in_c10d, in_user, looked_at
from tests.support.nvml import stub

TARGETS = tuple(Target(rank, rank, 1000 + rank, 1) for rank in range(3))


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (looked_at(1, in_user(7), "sleep"), "train.py:7 (train)"),
        (looked_at(1, in_c10d("all_reduce", 9)), "waits in all_reduce at train.py:9 (train)"),
        (looked_at(1, in_user(7), "stop"), "is stopped at train.py:7 (train)"),
        (RankLook(1, None), "not seen"),
        (None, "not seen"),
    ],
)
def test_activity_of_a_silent_rank_is_described(seen: RankLook | None, words: str) -> None:
    assert activity_of(seen) == words


def test_silent_rank_is_looked_at_once_until_it_moves() -> None:
    asked: list[list[int]] = []

    def ask_ranks(targets: Sequence[Target]) -> Looks:
        asked.append([target.rank for target in targets])
        return Looks(tuple(targets), (Look(0.0, 0.0, {one.rank: looked_at(one.rank, in_user(7)) for one in targets}),))

    silent = SilentRanks(ask_ranks)

    def ask(ranks: dict[int, float], later_s: float = 0.0) -> None:
        import time

        silent.ask(ranks, TARGETS, time.monotonic() + later_s)
        while silent.busy:
            time.sleep(0.001)

    ask({})
    assert asked == [] and silent.words(1, 5.0) == ""
    ask({1: 5.0})
    ask({1: 5.0})
    assert asked == [[1]] and silent.words(1, 5.0) == "train.py:7 (train)"
    assert silent.words(1, 6.0) == "", "it has made progress since"
    ask({1: 5.0, 2: 4.0})
    assert asked == [[1], [2]]
    ask({1: 5.0}, later_s=AGAIN_S + 1)
    assert asked[-1] == [1]


def test_failed_look_leaves_only_its_description_empty() -> None:
    def fails(targets: Sequence[Target]) -> Looks:
        raise OSError("no")

    silent = SilentRanks(fails)
    silent.ask({1: 5.0}, TARGETS, 0.0)
    while silent.busy:
        pass
    assert silent.words(1, 5.0) == "not seen"


def test_gpu_memory_is_summed_per_process(node: stub.Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in node.environ.items():
        monkeypatch.setenv(name, value)
    node.write(f"process 0 {os.getpid()} 1000", f"process 3 {os.getpid()} 500", "process 3 4711 7", gpus=4)
    found = memory_by_process(gpus(deadline_s=120.0))
    assert (found[os.getpid()], found[4711]) == (1500, 7)


def test_node_without_gpus_is_queried_once(tmp_path: Path) -> None:
    asked = []

    def ask() -> Result[Gpus]:
        asked.append(1)
        return Result(None, "NVML", 0.0, missing="no driver")

    memory = GpuMemory(ask)
    for now in (1.0, 100.0, 200.0):
        memory.ask(now)
        while memory._asking is not None and not memory._asking.done:
            pass
        assert memory.of(1) == 0
    assert asked == [1]


def test_processes_without_a_size_count_as_zero() -> None:
    found = Gpus(gpus=(Gpu(0, error="lost"), Gpu(processes=(GpuProcess(1),))))
    assert memory_by_process(Result(found, "NVML", 0.0)) == {1: 0}
