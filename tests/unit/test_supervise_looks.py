"""Looks at the ranks, and which of these get a look at their C frames too."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from safelaunch.capture import file_locks, inside, look, proc, stacks
from safelaunch.capture.counters import Counters, CpuTime, ProcessCounters
from safelaunch.capture.look import Look, ProcessLook, RankLook, Target, process_evidence, with_c_frames
from safelaunch.capture.result import Result
from safelaunch.job.process import ProcessId
from safelaunch.model import Frame, ProcessState, StackSample
from safelaunch.supervise.judge import describe_unseen
from safelaunch.supervise.looks import (
    MOST_PATIENCE,
    Looks,
    Starvation,
    _is_unclear,
    _with_rest,
    look_at,
    with_late_processes,
)
from tests.support.evidence import in_c10d, in_user, looked_at, process


@pytest.mark.parametrize(
    ("frames", "kernel", "unclear"),
    [
        (in_user(7), "futex", True),
        (in_user(7), "restart_futex", True),
        (in_user(7), "", True),
        (in_user(7), "sleep", False),
        (in_user(7), "run", False),
        (in_c10d("all_reduce", 7), "futex", False),
    ],
)
def test_futex_below_a_user_line_is_unclear(frames: tuple[Frame, ...], kernel: str, unclear: bool) -> None:
    """Also where a stack reader's stop has left ``restart_syscall`` in place of a wait with a time limit."""
    assert _is_unclear(looked_at(0, frames, kernel)) is unclear


def test_c_frames_are_read_first_for_distinct_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are not read in time keep their stacks, with a note."""
    lines = {0: 7, 1: 7, 2: 7, 3: 7, 4: 9, 5: 7}
    last = Look(0.0, 1.0, {number: looked_at(number, in_user(line)) for number, line in lines.items()})
    asked: list[int] = []

    def answers(pid: int, state: object = None, *, deadline_s: float) -> Result[StackSample]:
        asked.append((pid - 1000) // 10)
        if asked[-1] in (0, 4):
            return Result(
                process(pid, in_user(1), "futex", native=(Frame("libtorch.so", 0, "c10d::wait"),)).stacks[-1], "", 0.1
            )
        return Result(None, "py-spy", deadline_s, missing="no answer in time", kind="timeout")

    monkeypatch.setattr(stacks, "with_c_frames_of", answers)
    targets = [Target(number, number, 1000 + 10 * number, 1) for number in lines]
    found = with_c_frames(targets, last, deadline_s=60.0)
    assert set(asked[:2]) == {0, 4}
    assert set(asked) == set(lines)
    mains = {number: found.ranks[number].main for number in lines}
    natives = {number for number, main in mains.items() if main and main.stack.value and main.stack.value.native}
    assert natives == {0, 4}
    assert mains[1] is not None and mains[1].stack.note == "without the C frames: no answer in time"
    main, _ = process_evidence([last, found], 1)
    assert main is not None and len(main.stacks) == len(main.states) == 1


def test_late_process_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank itself is read before its children; a late process is listed without a state."""
    mine, child = os.getpid(), os.getpid() + 1
    monkeypatch.setattr(look.process, "descendants", lambda pids, table: [ProcessId(child, 1)])
    over = threading.Event()

    def read(pid: int, deadline_s: float, locks: object) -> ProcessLook:
        if pid == child:
            over.wait(60)
        return ProcessLook(pid, proc.read_process(mine), Result(None, "py-spy", 0.1, missing="no permission"))

    monkeypatch.setattr(look, "_process", read)
    start_ticks = proc.read_process(mine).start_ticks
    found = look_at([Target(0, 0, mine, start_ticks)], None, deadline_s=1.0)
    over.set()
    rank = found.taken[-1].ranks[0]
    assert rank.main is not None and rank.main.state is not None
    assert [(one.pid, one.state, one.is_late) for one in rank.children] == [(child, None, True)]
    assert found.is_late and describe_unseen(found.taken[-1], found) != ""


def test_file_locks_are_read_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel blocks all file locks of the node while it lists them."""
    table = file_locks.parse("1: FLOCK  ADVISORY  WRITE 1 08:02:131 0 EOF\n")
    given = list[object]()

    def read_process(pid: int, *, locks: object, **_: object) -> None:
        if pid == child.pid:
            given.append(locks)

    monkeypatch.setattr(file_locks, "lock_table", lambda: table)
    monkeypatch.setattr(proc, "read_process", read_process)
    monkeypatch.setattr(stacks, "stack_of", lambda *_, **__: Result(None, "py-spy", 0.1, missing="no permission"))
    with subprocess.Popen(["sleep", "1000"]) as child:  # the test process might itself wait for a file lock
        monkeypatch.setattr(look.process, "descendants", lambda pids, table: [ProcessId(child.pid, 1)] * 3)
        look_at(
            [Target(n, n, child.pid, proc.read_quick(child.pid).start_ticks) for n in (0, 1)], None, deadline_s=60.0
        )
        child.kill()
    assert len(given) == 8  # two processes, each with three below it
    assert all(one is table for one in given)


def test_longer_look_gives_other_ends_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def with_ends(states: Sequence[ProcessState], pids: object, *, deadline_s: float) -> Sequence[ProcessState]:
        given.append(deadline_s)
        return states

    monkeypatch.setattr("safelaunch.capture.descriptor_holders.with_ends", with_ends)
    for deadline_s in (-1.0, 400.0):
        look_at([], None, deadline_s=deadline_s)
    assert given[0] == look.LEAST_ENDS_S and given[1] > 100.0


def test_process_without_kernel_state_in_time_is_late() -> None:
    one = looked_at(0, in_user(7))
    assert one.main is not None and one.main.state is not None and not one.main.is_late
    silent = replace(
        one.main, state=structs.replace(one.main.state, note="/proc/10: no answer from the kernel within 2 s")
    )
    assert silent.is_late


def test_starvation_is_measured_by_the_supervisors_own_waits() -> None:
    read = iter([(100, 100), (200, 1000), (200, 1000), (300, 1000)])
    starvation = Starvation(lambda: next(read))
    assert [starvation.factor() for _ in range(4)] == [2.0, MOST_PATIENCE, 1.0, 1.0]
    assert Starvation().factor() >= 1.0


def test_late_process_is_looked_at_again_with_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = looked_at(0, in_user(7)), looked_at(1, in_user(7))
    assert one.main is not None and two.main is not None
    slow = replace(two, main=replace(two.main, stack=Result(None, "py-spy", 3.0, missing="too slow", kind="timeout")))
    looks = Looks(tuple(Target(n, n, 10 + n, 1) for n in (0, 1)), taken=(Look(0.0, 1.0, {0: one, 1: slow}),))
    asked: list[int] = []

    def take(targets: list[Target], *, deadline_s: float) -> Look:
        asked.extend(target.rank for target in targets)
        return Look(2.0, 3.0, {1: two})

    monkeypatch.setattr("safelaunch.supervise.looks.take", take)
    found = with_late_processes(looks)
    assert asked == [1] and not found.is_late
    assert with_late_processes(found) is found
    main, _ = process_evidence(found.taken, 1)
    assert main is not None and len(main.stacks) == 1


def test_later_look_uses_the_newest_targets() -> None:
    """A rank that still imports torch at the first look has no worker server yet, and is asked for its record later."""
    before = Target(0, 0, os.getpid(), 0)
    now = Target(0, 0, os.getpid(), 0, socket=Path("/rank0.sock"))
    looks = look_at((before,), None)
    looks = look_at((now, Target(1, 1, os.getpid(), 0)), looks)
    assert [(target.rank, target.socket) for target in looks.targets] == [(0, now.socket), (1, None)]
    assert look_at((), looks).targets == looks.targets  # one that has ended since is still asked what it left


@pytest.mark.parametrize(("before", "now", "rested_s"), [(5.0, 5.0, 30.0), (5.0, 5.1, 0.0), (None, 5.0, None)])
def test_rest_time_of_a_thread_comes_from_two_counters(
    before: float | None, now: float, rested_s: float | None
) -> None:
    seen = process(1000, in_user(7))
    state = structs.replace(seen.states[-1], start_ticks=3)
    look_ = Look(0.0, 0.0, {0: RankLook(0, ProcessLook(1000, state, Result(None, "", 0.0)))})

    def counted(at_s: float, cpu_ms: float | None) -> Counters:
        threads = {state.threads[0].tid: CpuTime(cpu_ms)} if cpu_ms is not None else {}
        return Counters(at_s, 0, {(1000, 3): ProcessCounters(1000, threads=threads)})

    main = _with_rest(look_, counted(100.0, before), counted(130.0, now)).ranks[0].main
    assert main is not None and main.state is not None and main.state.threads[0].rested_s == rested_s
    assert _with_rest(look_, None, counted(130.0, now)) == look_


class Answers:
    """A rank's page: ``owes_answer`` as given."""

    def __init__(self, owes_answer: bool = False) -> None:
        self.owes_answer = owes_answer

    def begin_question(self) -> bool:
        return True

    def withdraw_question(self) -> None: ...


@pytest.mark.parametrize(
    ("state", "owes", "asks"),
    [("S", False, True), ("D", False, True), ("T", False, False), ("t", False, False), ("S", True, False)],
)
def test_rank_is_queried_for_stacks_unless_stopped_or_pending(
    state: str, owes: bool, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = looked_at(0, in_user(7)).main
    assert given is not None and given.state is not None and given.stack.value is not None
    refused = Result[StackSample](None, "py-spy", 0.1, missing="permission denied", kind="denied")
    main = replace(given, state=structs.replace(given.state, state=state), stack=refused)
    asked: list[int] = []

    @contextmanager
    def answer(server: Path, pid: int, questions: object, *, deadline_s: float) -> Iterator[inside.InsideReport]:
        asked.append(pid)
        yield inside.InsideReport(replace(given.stack, how=inside.HOW), roles={7: "dataloader worker"})

    monkeypatch.setattr(inside, "asked", answer)
    target = Target(0, 0, main.pid, 1, "0-0-1", Path("/nowhere.sock"), Answers(owes))
    seen, roles = look._from_inside(target, main, None, time.monotonic() + 60.0)

    assert asked == ([main.pid] if asks else [])
    assert (seen.stack.value, seen.stack.missing) == ((given.stack.value, "") if asks else (None, "permission denied"))
    if asks:
        assert "permission denied" in seen.stack.note and "without C frames" in seen.stack.note
        assert roles == {7: "dataloader worker"}
