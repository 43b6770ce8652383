"""Movement in a job without steps, from constructed looks."""

from __future__ import annotations

import os
import site
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from safelaunch.capture.counters import Counters, CpuTime, ProcessCounters
from safelaunch.capture.jobs import JobProcess, RunningJob, RunningRank
from safelaunch.capture.look import Look, ProcessLook, RankLook, Target
from safelaunch.capture.result import Result
from safelaunch.model import Frame, ProcessState, StackSample, Thread, ThreadState
from safelaunch.supervise.attach import attach
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.movement import movement
from safelaunch.system.console import COMMAND
from safelaunch.system.errors import SafelaunchError
from tests.support.evidence import in_c10d, in_user

SECONDS = 2.0
CALL, SLEEP, LOOP = in_c10d("all_reduce", 50), in_user("time.sleep"), in_user("train")
ELSEWHERE = in_user("evaluate")


@dataclass(frozen=True)
class Main:
    """A rank's main thread at two looks: its places and its CPU time between them."""

    before: tuple[Frame, ...] = CALL
    after: tuple[Frame, ...] | None = None
    slices: int = 0
    cpu_ms: int = 0
    state: str = "S"
    seen: bool = True
    torn: bool = False


def looked_at(pid: int, main: Main, number: int) -> ProcessLook:
    frames = main.after if number and main.after is not None else main.before
    used = ThreadState(
        pid, "python", main.state, cpu_ms=main.cpu_ms * number, queued_ms=0, slices=10 + main.slices * number
    )
    kernel = ProcessState(pid, 1, pid, SECONDS * number, "python", (), main.state, (used,))
    stack = StackSample(pid, 0.0, "", (Thread(frames, "MainThread", pid, torn=main.torn),)) if main.seen else None
    return ProcessLook(pid, kernel, Result(stack, "py-spy", 0.1, missing="" if stack else "no answer"))


def looks(*mains: Main) -> Looks:
    pids = [1000 + 10 * number for number in range(len(mains))]
    taken = tuple(
        Look(
            number * SECONDS,
            number * SECONDS + 0.1,
            {rank: RankLook(rank, looked_at(pids[rank], main, number)) for rank, main in enumerate(mains)},
        )
        for number in (0, 1)
    )

    def counters(number: int) -> Counters:
        found = {
            (pid, pid): ProcessCounters(pid, threads={pid: CpuTime(float(main.cpu_ms * number))})
            for pid, main in zip(pids, mains, strict=True)
        }
        return Counters(SECONDS * number, int(100 * SECONDS * number), found)

    return Looks(
        tuple(Target(rank, rank, pid, pid) for rank, pid in enumerate(pids)),
        taken=taken,
        counters=((counters(0), counters(0)), (counters(1), counters(1))),
    )


@pytest.mark.parametrize(
    ("mains", "moves", "stands"),
    [
        ([Main(), Main(SLEEP)], False, True),
        ([Main(), Main(state="T")], False, True),
        ([Main(cpu_ms=1990, slices=40, state="R"), Main(SLEEP)], False, True),  # it spins while it waits for its peers
        ([Main(), Main(LOOP, cpu_ms=1990, slices=40, state="R")], True, True),  # slow, or endless
        ([Main(), Main(LOOP, ELSEWHERE, slices=4)], True, True),
        ([Main(SLEEP, slices=9), Main(SLEEP, slices=9)], True, False),  # short steps, asleep at each look
        ([Main(CALL, LOOP, slices=9), Main(LOOP, CALL, slices=9)], True, False),
        ([Main(SLEEP, slices=9), Main(seen=False)], False, False),  # not known
        ([Main(seen=False), Main(seen=False)], False, False),
        ([Main(), Main(LOOP, ELSEWHERE, slices=4, torn=True)], False, True),  # a mix of two moments tells no place
    ],
)
def test_two_looks_distinguish_moving_from_still_ranks(mains: list[Main], moves: bool, stands: bool) -> None:
    moving, stood_s = movement(looks(*mains))
    assert (moving, stood_s) == (moves, pytest.approx(SECONDS - 0.1) if stands else 0.0)


def test_dump_without_py_spy_fails_with_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(site, "getuserbase", lambda: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    job = RunningJob(1, {0: RunningRank(JobProcess(os.getpid(), 1), 0, 1, 0)}, 1, {os.getpid()})
    with pytest.raises(SafelaunchError) as caught:
        attach(job, tmp_path)
    assert "py-spy is not installed" in caught.value.message
    assert caught.value.fix == f"{COMMAND}/nowhere/python -m pip install py-spy"
    assert list(tmp_path.iterdir()) == []
