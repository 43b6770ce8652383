"""Choice of the next job: always within the capacity, without starvation, until all have ended."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, SweepJob
from safelaunch.addons.sweep.lineup import Lineup
from safelaunch.addons.sweep.sweep import JobHistory, Rules, Sweep


def queue(capacity: int, *units: int, at_most: int = 100) -> Lineup:
    """Jobs called a, b, c, ... of these sizes."""
    found = Lineup(capacity, at_most)
    for name, size in zip("abcdefghijklmnop", units, strict=False):
        found.add(name, size)
    return found


def started(found: Lineup, free: int | None = None) -> str:
    """Starts all that fits, one after the other."""
    names = ""
    while (name := found.next(free)) is not None:
        found.start(name)
        names += name
        free = free if free is None else free - found.running[-1].units
    return names


def ended(found: Lineup, name: str) -> Lineup:
    found.end(name)
    return found


def choose(sweep: Sweep) -> list[SweepJob]:
    """Starts all jobs that can start now."""
    chosen = []
    while (one := sweep.next()) is not None:
        sweep.mark_started(one)
        chosen.append(one)
    return chosen


# --- one decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "free", "names"),
    [
        (queue(4), None, ""),
        (queue(4, 1, 1, 1), None, "abc"),
        (queue(4, 1, 1, 1, 1, 1), None, "abcd"),
        (queue(4, 3, 2, 1), None, "ac"),
        (queue(4, 4, 1), None, "a"),
        (queue(4, 1, 1, 1, at_most=2), None, "ab"),
        (queue(4, 0, 4, 0), None, "abc"),
        (queue(4, 2, 2), 3, "a"),
        (queue(4, 2, 1), 1, "b"),
        (queue(4, 2, 2), 0, ""),
        (queue(4, 2, 2), 9, "ab"),
    ],
)
def test_jobs_that_fit_start_in_order(found: Lineup, free: int | None, names: str) -> None:
    assert started(found, free) == names


def test_ended_job_frees_its_units() -> None:
    found = queue(2, 1, 1, 1)
    assert (started(found), started(found)) == ("ab", "")
    assert started(ended(found, "a")) == "c"


def test_no_units_stay_idle_for_job_blocked_by_others() -> None:
    """Four GPUs, others use two of them: the job that wants three is overtaken until they are through."""
    found = queue(4, 3, *[1] * 12)
    for _ in range(5):
        started(found, 2 - found.used)
        assert len(found.running) == 2
        found.end(found.running[0].name)
    assert next(job for job in found.waiting if job.name == "a").overtaken >= 4
    assert started(found, 2) == "", "three are ours by now, and kept for it"
    found.end(found.running[0].name)
    assert started(found, 3) == "a"


def test_overtaken_large_job_gets_room_reserved() -> None:
    """Two slots, a job that wants both, and small ones without end: after two it is its turn."""
    found = queue(2, 1, 2, *[1] * 8)
    order = started(found)
    for _ in range(10):
        order += started(ended(found, found.running[0].name))
    assert order[:5] == "acdbe"
    assert len(order) == 10


def test_units_beyond_reservation_stay_in_use() -> None:
    """Four slots, one job runs long, a job that wants three waits: the fourth slot is for small ones all the time."""
    found = queue(4, 2, 3, *[1] * 10)
    assert started(found) == "acd"
    for _ in range(6):
        started(ended(found, next(job.name for job in found.running if job.units == 1)))
    assert next(job for job in found.waiting if job.name == "b").overtaken >= 4
    late = [job.name for job in found.running if job.past == "b"]
    assert len(late) == 1
    started(ended(found, "a"))
    assert "b" in {job.name for job in found.running}


# --- whole sweeps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A job of a simulated sweep."""

    units: int
    seconds: int
    needs: tuple[int, ...]
    retries: int
    ends: tuple[JobState, ...]  # state of each attempt; the last one repeats


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[Plan]]:
    capacity = draw(st.integers(1, 8))
    count = draw(st.integers(1, 14))
    states = st.sampled_from(("succeeded", "succeeded", "succeeded", "failed", "hung", "timed-out"))
    return capacity, [
        Plan(
            draw(st.integers(0, capacity)),
            draw(st.integers(0, 9)),
            tuple(draw(st.sets(st.integers(0, index - 1), max_size=2))) if index else (),
            draw(st.integers(0, 2)),
            tuple(draw(st.lists(states, min_size=1, max_size=3))),
        )
        for index in range(count)
    ]


@dataclass
class Simulation:
    """Runs a sweep on a simulated clock, and checks the invariants at every moment."""

    capacity: int
    plans: list[Plan]
    at_most: int = 99
    fail_fast: bool = False

    def __post_init__(self) -> None:
        jobs = [
            SweepJob(f"j{n}", ("t.py",), "", gpus=p.units, needs=tuple(f"j{m}" for m in p.needs), retries=p.retries)
            for n, p in enumerate(self.plans)
        ]
        self.sweep = Sweep(jobs, Rules(self.capacity, self.at_most, self.fail_fast))
        self.running: dict[str, int] = {}
        self.order: list[str] = []
        self.started_s: dict[str, list[int]] = {}
        self.now = 0

    def run(self) -> None:
        ends: list[tuple[int, int, str]] = []
        for number in range(1000):
            for job in choose(self.sweep):
                assert job.name not in self.running, "the same job twice at once"
                assert all(self.sweep.tracks[need].state == "succeeded" for need in job.needs)
                self.running[job.name] = job.gpus
                self.order.append(job.name)
                self.started_s.setdefault(job.name, []).append(self.now)
                heapq.heappush(ends, (self.now + self.plans[int(job.name[1:])].seconds, number, job.name))
            assert sum(self.running.values()) <= self.capacity
            assert len(self.running) <= self.at_most
            if not ends:
                return
            self.now, _, name = heapq.heappop(ends)
            del self.running[name]
            plan = self.plans[int(name[1:])]
            states = plan.ends
            self.sweep.mark_ended(name, AttemptOutcome(states[min(len(self.started_s[name]), len(states)) - 1], 0))
        raise AssertionError("it never ends")


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(plans(), st.integers(1, 9))
def test_simulated_sweep_ends_within_capacity(planned: tuple[int, list[Plan]], at_most: int) -> None:
    simulation = Simulation(*planned, at_most=at_most)
    simulation.run()
    assert simulation.sweep.finished
    for number, plan in enumerate(planned[1]):
        track = simulation.sweep.tracks[f"j{number}"]
        needs = [simulation.sweep.tracks[f"j{need}"].state for need in plan.needs]
        assert (track.state == "skipped") == any(state != "succeeded" for state in needs)
        if track.state == "skipped":
            assert track.attempts == 0
            continue
        expected = [plan.ends[min(index, len(plan.ends) - 1)] for index in range(plan.retries + 1)]
        tries = expected.index("succeeded") + 1 if "succeeded" in expected else plan.retries + 1
        assert (track.attempts, track.state) == (tries, expected[tries - 1])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), st.data())
def test_large_job_never_starves(capacity: int, data: st.DataObject) -> None:
    """Small jobs arrive forever; a large one and its predecessors are overtaken a bounded number of times."""
    found = Lineup(capacity, 99)
    size = data.draw(st.integers(1, capacity))
    for number in range(data.draw(st.integers(0, capacity))):
        found.add(f"before{number}", data.draw(st.integers(1, capacity)))
    ahead = len(found.waiting)
    started(found)
    found.add("large", size)
    rounds = 0
    while "large" not in {job.name for job in found.running}:
        rounds += 1
        assert rounds <= (ahead + 1) * (capacity + 2) * 4, "starved"
        found.add(f"small{rounds}", 1)
        if found.running:  # any of them ends next, the older ones at the latest after all others once
            index = data.draw(st.integers(0, len(found.running) - 1)) if rounds % 2 else 0
            found.end(found.running[index].name)
        started(found)
        assert found.used <= capacity


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(plans(), st.integers(0, 20))
def test_stopped_sweep_starts_nothing_and_ends(planned: tuple[int, list[Plan]], at: int) -> None:
    simulation = Simulation(*planned)
    begun: set[str] = set()
    for _ in range(at):
        begun |= {job.name for job in choose(simulation.sweep)}
        if not simulation.sweep.running:
            break
        simulation.sweep.mark_ended(simulation.sweep.running[0], AttemptOutcome("succeeded", 0))
    simulation.sweep.stop("stopped by SIGINT")
    assert choose(simulation.sweep) == []
    for name in simulation.sweep.running:
        simulation.sweep.mark_ended(name, AttemptOutcome("cancelled", 143))
    assert simulation.sweep.finished
    assert choose(simulation.sweep) == []


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(plans())
def test_fail_fast_starts_nothing_after_failure(planned: tuple[int, list[Plan]]) -> None:
    simulation = Simulation(*planned, fail_fast=True)
    simulation.run()
    assert simulation.sweep.finished
    failed = [t for t in simulation.sweep.tracks.values() if t.state in ("failed", "hung", "timed-out")]
    assert bool(failed) == bool(simulation.sweep.stopped)


# --- the sweep's own rules --------------------------------------------------------------------------------------------


def job(name: str, *needs: str, retries: int = 0) -> SweepJob:
    return SweepJob(name, ("t.py",), "", needs=needs, retries=retries)


def states(sweep: Sweep) -> dict[str, str]:
    return {name: track.state for name, track in sweep.tracks.items()}


def test_failed_dependency_skips_dependents() -> None:
    sweep = Sweep([job("c", "b"), job("b", "a"), job("a"), job("d")], Rules(2, 9))
    assert [each.name for each in choose(sweep)] == ["a", "d"]
    sweep.mark_ended("a", AttemptOutcome("hung", 124))
    assert states(sweep) == {"a": "hung", "b": "skipped", "c": "skipped", "d": "running"}
    assert sweep.tracks["b"].why == "needs a, which hung"
    assert sweep.tracks["c"].why == "needs b, which was skipped"


def test_earlier_success_is_not_repeated_and_satisfies_dependents() -> None:
    done = AttemptOutcome("succeeded", 0)
    sweep = Sweep([job("a"), job("b", "a"), job("c")], Rules(4, 9), {"a": JobHistory(2, done), "c": JobHistory(1)})
    assert [each.name for each in choose(sweep)] == ["b", "c"]
    assert {name: track.attempts for name, track in sweep.tracks.items()} == {"a": 2, "b": 1, "c": 2}
    assert sweep.tracks["a"].outcome is done


def test_retries_ignore_earlier_invocations() -> None:
    sweep = Sweep([job("a", retries=1)], Rules(1, 9), {"a": JobHistory(5)})
    for expected in ("waiting", "failed"):
        choose(sweep)
        sweep.mark_ended("a", AttemptOutcome("failed", 1))
        assert sweep.tracks["a"].state == expected
    assert sweep.tracks["a"].attempts == 7


def test_job_put_back_counts_no_try() -> None:
    sweep = Sweep([job("a"), job("b")], Rules(1, 9))
    assert sweep.next() is not None
    assert (sweep.tracks["a"].state, sweep.tracks["a"].attempts) == ("waiting", 0)
    assert [each.name for each in choose(sweep)] == ["a"]


def test_stop_cancels_waiting_and_retrying_jobs() -> None:
    sweep = Sweep([replace(job("a"), retries=3), job("b")], Rules(1, 9))
    choose(sweep)
    sweep.stop("stopped by SIGINT")
    sweep.mark_ended("a", AttemptOutcome("failed", 1))
    assert states(sweep) == {"a": "failed", "b": "cancelled"}
