"""A stall's way through looks and votes: what the other nodes say is played, everything else is as in a job."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from safelaunch.beacon import layout, page
from safelaunch.bundle.staging import Staging
from safelaunch.capture.look import Look
from safelaunch.capture.pages import Roster
from safelaunch.job.argv import CommandLine
from safelaunch.job.paths import RunPaths
from safelaunch.job.plan import Plan
from safelaunch.job.process import identify
from safelaunch.model import Evidence, JobCondition
from safelaunch.settings.options import Settings
from safelaunch.supervise.cluster.exchange import PeerView
from safelaunch.supervise.cluster.messages import LeaderPage
from safelaunch.supervise.collecting import DraftBundle, Timeline
from safelaunch.supervise.council import Council
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.judge import Judgement
from safelaunch.supervise.kinds import HANG
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.publishing import Agreement, Report
from safelaunch.supervise.respond import JobView
from safelaunch.supervise.stall import LONGEST_S, StallCase, _Suspicion
from safelaunch.supervise.watch.progress import Glance, Watch
from safelaunch.supervise.watch.rhythm import Threshold
from safelaunch.supervise.watch.stall import Limits, Policy, Stall, StallEvent, initial_state

SUSPECT = Stall(ranks=(0,), mark_s=0.0, stalled_s=5.0, threshold_s=3.0, step=5, before_first_step=False)
SUSPECTED = Glance((), StallEvent("suspect", SUSPECT), ())
QUIET = Glance((), None, ())


class Job:
    """One rank that sleeps, on one node of two."""

    def __init__(self, place: Path, pid: int) -> None:
        run = RunPaths(place)
        run.pages.mkdir()
        found = identify(pid)
        assert found is not None
        mapped, words = page.create(os.fspath(run.pages / layout.page_name(0, 0, pid)))
        words[layout.PID], words[layout.START_TICKS] = pid, found.start_ticks
        words[layout.RANK], words[layout.WORLD_SIZE] = 0, 2
        words[layout.READY] = layout.MAGIC
        self._mapped, self.words = mapped, words
        policy = Policy(3.0, 60.0, 1000.0, confirm_s=0.0, stall_given=True)
        self.watch = Watch(Roster(run), policy, time.monotonic())
        self.watch.tick(time.monotonic())
        command = CommandLine((), (), ("train.py",))
        plan = Plan((), {}, (), "train", place, None, Settings(), True, (), command=command)
        context = JobContext("train", place, place / "bundles", place, {}, host="here")
        self.council = Council(plan, context, self.watch)
        self.case = StallCase(JobView(self.watch, context, dict, self.council))
        self.hear(LeaderPage(leader=1, nodes=2, covered=True, world=2))

    def hear(self, said: LeaderPage) -> None:
        self.council.channel.view = PeerView(said, why="")

    def call(self, number: int) -> None:
        """All nodes are to look."""
        self.hear(LeaderPage(leader=1, nodes=2, covered=True, world=2, phase="looking", incident=number, window_s=0.0))

    def tick(self, glance: Glance = QUIET) -> None:
        self.case.advance(glance, time.monotonic())

    def until(self, reached: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60.0
        while not reached():
            assert time.monotonic() < deadline
            self.tick()
            time.sleep(0.01)

    @property
    def vote(self) -> tuple[int, str]:
        return self.council.channel.beat.incident, self.council.channel.beat.vote


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr("safelaunch.supervise.looks.take", lambda *_, **__: Look(0.0, 0.0))
    with subprocess.Popen(["sleep", "600"]) as rank:
        time.sleep(0.3)  # its start would be work
        made = Job(tmp_path, rank.pid)
        yield made
        made.case.abandon()
        for thread in threading.enumerate():
            if thread.name == "closer look":  # it would continue in the next test
                thread.join(60)
                assert not thread.is_alive()
        rank.kill()


@pytest.mark.parametrize("condition", ["dead", "alive", "unknown", "unseen", "moving", "stopped"])
def test_node_votes_with_the_condition_it_found(
    condition: JobCondition, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.case, "_judge", lambda *_: Judgement(condition))
    job.call(1)
    job.until(lambda: job.vote == (1, condition))


def test_node_looks_and_votes_again_in_every_incident(job: Job) -> None:
    """The next incident can begin before this node has seen the end of the last one."""
    job.tick(SUSPECTED)
    job.call(1)
    job.until(lambda: job.vote == (1, "unseen"))
    job.call(2)
    job.until(lambda: job.vote == (2, "unseen"))


def test_node_that_also_suspects_keeps_its_vote(job: Job) -> None:
    """Its ranks' marks are a moment younger: it is asked first, and its own suspicion comes while it looks."""
    job.call(1)
    job.tick()
    job.tick(SUSPECTED)
    job.until(lambda: job.vote == (1, "unseen"))
    assert job.council.channel.beat.doing == "watching", "it has not asked"


def test_rank_in_a_timed_phase_votes_paused_without_look(job: Job) -> None:
    job.watch.current_stall = lambda now: None  # type: ignore[method-assign]
    job.call(1)
    job.tick()
    assert job.vote == (1, "paused") and not job.case.looking


def test_restart_of_the_clock_votes_paused(job: Job) -> None:
    """The other nodes would otherwise decide without its evidence."""
    job.call(1)
    job.until(lambda: job.case.looking)
    job.tick(Glance((), StallEvent("clock-restarted"), ()))
    assert job.vote == (1, "paused") and not job.case.looking


def test_look_on_a_starved_machine_has_more_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def take(*_: object, deadline_s: float) -> Look:
        given.append(deadline_s)
        return Look(0.0, 0.0)

    monkeypatch.setattr("safelaunch.supervise.looks.take", take)
    monkeypatch.setattr("safelaunch.supervise.looks.Starvation.factor", lambda self: 3.0)
    job.call(1)
    job.until(lambda: given)
    assert given[0] == 18.0


def test_single_node_decides_by_its_own_looks(job: Job) -> None:
    job.council.channel.view = PeerView(why="no store")
    job.tick(SUSPECTED)
    assert job.case.looking
    job.until(lambda: not job.case.looking)
    assert job.council.channel.beat.vote == "" and not job.case.writing


def test_restarted_ranks_are_not_suspected(job: Job) -> None:
    job.tick(SUSPECTED)
    job.tick()
    assert job.case.looking and job.council.channel.beat.doing == "suspecting"
    job.watch.attempt = (0, 2)
    job.tick()
    assert not job.case.looking and job.council.channel.beat.doing == "watching"
    job.call(1)  # all look, including the ranks of the new round
    job.until(lambda: job.vote[0] == 1)


def test_look_that_never_ends_is_abandoned_and_repeated_later(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    returns = threading.Event()
    monkeypatch.setattr(job.case, "_look_closer", lambda *_: returns.wait(60))
    job.tick(SUSPECTED)
    now = time.monotonic()
    job.case.advance(QUIET, now + LONGEST_S - 5.0)
    assert job.case.looking
    job.case.advance(QUIET, now + LONGEST_S + 5.0)
    returns.set()
    assert not job.case.looking
    assert job.watch.state.look_again_s > now + LONGEST_S
    assert "taking another one" in capfd.readouterr().err


@pytest.fixture
def writing(job: Job, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Outcomes of the bundles that the job's supervisor collects."""
    found: list[str] = []

    def finish(_: DraftBundle, agreement: Agreement) -> Report | None:
        found.append(agreement.outcome or "")
        return None

    monkeypatch.setattr("safelaunch.supervise.collecting.with_nccl", lambda found, **_: found)
    monkeypatch.setattr("safelaunch.supervise.collecting.DraftBundle.discard", lambda _: found.append("discarded"))
    monkeypatch.setattr("safelaunch.supervise.publishing.finish", finish)
    job.council.channel.view = PeerView(why="one node")
    return found


def collected(job: Job) -> DraftBundle:
    evidence = Evidence("hang", 2, ())
    return DraftBundle(evidence, cast("Staging", None), Timeline(), cast("JobContext", None))


@pytest.mark.parametrize("found", ["unknown", "dead"])
@pytest.mark.parametrize("steps", [True, False])
def test_rank_that_advances_during_collection_is_not_ended(
    steps: bool,
    found: JobCondition,
    job: Job,
    writing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither the user's limit nor a proof ends it: the step refutes both."""

    def collect(_: object) -> DraftBundle:
        if steps:
            job.words[layout.LAST_STEP_NS] = time.monotonic_ns()
            job.watch.tick(time.monotonic())
        return collected(job)

    monkeypatch.setattr(job.case, "_collecting", lambda *_: collect)
    job.case._write(_Suspicion(SUSPECT, Threshold(3.0, ""), Timeline(), 0.0), Looks(()), Judgement(found), HANG, 5.0)
    job.until(lambda: not job.case.writing)
    assert writing == ["discarded" if steps else "hang"]
    assert ("a rank advanced" in capfd.readouterr().err) is steps


@pytest.mark.parametrize("proves", [True, False])
def test_proof_that_the_full_evidence_refutes_ends_no_job(
    proves: bool, job: Job, writing: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The bundle has more evidence than the looks: C frames can show another thread that could end the wait."""
    job.watch.policy = replace(job.watch.policy, stall_given=False)  # else the user's word ends it
    monkeypatch.setattr("safelaunch.supervise.judge.proves", lambda _: proves)
    monkeypatch.setattr(job.case, "_collecting", lambda *_: lambda _: collected(job))
    stall = replace(SUSPECT, mark_s=time.monotonic() - 5.0)
    suspicion = _Suspicion(stall, Threshold(3.0, ""), Timeline(), 0.0)
    job.case._write(suspicion, Looks(()), Judgement("dead"), HANG, time.monotonic())
    job.until(lambda: not job.case.writing)
    assert writing == ["hang" if proves else "suspect"]
    assert ("the job continues" in capfd.readouterr().err) is not proves
    assert job.case._is_refuted(stall.mark_s) is not proves
    job.case._suspect_bundle = cast("Any", SimpleNamespace(mark_s=stall.mark_s))
    job.case._write(suspicion, Looks(()), Judgement("dead"), HANG, time.monotonic())
    job.until(lambda: not job.case.writing)
    assert writing[1:] == ["hang" if proves else "discarded"], "one bundle of it is enough"


def saying(watch: Any) -> StallCase:
    return StallCase(JobView(watch, cast("JobContext", None), dict, cast("Council", None)))


PROVED = Judgement("dead")
OVER = Judgement("unknown", limits=Limits(200.0), group="group '0'")


@pytest.mark.parametrize(
    ("last_steps_s", "judged", "said"),
    [
        ((40.0, 40.0, 40.1), PROVED, "no progress for 60 s (last step 61): collecting"),
        (
            (99.9, 40.0, 99.8),
            PROVED,
            "rank 1 has made no step for 60 s (last step 61), while the others continue: coll",
        ),
        (
            (40.0, 40.0, 99.8),
            PROVED,
            "ranks 0-1 have made no step for 60 s (last step 61), while the others continue: c",
        ),
        ((40.0, 40.0, 40.1), OVER, "no proof of a hang, but the timeout of group '0' has been reached; collecting"),
        (
            (40.0, 40.0, 40.1),
            Judgement("unseen"),
            "no proof of a hang, but the nodes of this job have agreed",
        ),
    ],
)
def test_hang_message_names_ranks_and_reason(
    last_steps_s: tuple[float, ...], judged: Judgement, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks that meet in every step make their last one at nearly the same moment: that is no going on."""
    pages = {rank: SimpleNamespace(last_step_ns=int(at_s * 1e9)) for rank, at_s in enumerate(last_steps_s)}
    watch = SimpleNamespace(last_progress=pages, policy=Policy(60.0, 1800.0, 1800.0), unseen=())
    case = saying(watch)
    case._say_hang(Stall((0,), 40.0, 60.0, 60.0, False, 61), judged, 100.0)
    assert said in " ".join(capfd.readouterr().err.split())


def test_continuing_job_is_reported_per_condition_and_hourly(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No default limit is announced: no rank waits in a group."""
    case = saying(SimpleNamespace(policy=Policy(60.0, 1800.0, 1800.0), unseen=(), state=initial_state(0.0)))
    stall = Stall((0,), 0.0, 60.0, 60.0, False, 61)
    for now in (60.0, 120.0, 3600.0, 3661.0, 3700.0, 7200.0, 7262.0):
        case._say_waiting(stall, Judgement("unknown"), now)
    said = [line for line in capfd.readouterr().err.splitlines() if "no step for" in line]
    assert [line.split("no step for ")[1] for line in said] == [
        f"{seconds} s, but there is no proof of a hang; the job continues" for seconds in (60, 3661, 7262)
    ]


def test_waiting_message_counts_user_threshold_from_last_work(capfd: pytest.CaptureFixture[str]) -> None:
    policy = Policy(20.0, 1800.0, 240.0, stall_given=True)
    watch = SimpleNamespace(policy=policy, unseen=(), state=replace(initial_state(0.0), worked_s=16.0))
    saying(watch)._say_waiting(Stall((0,), 0.0, 20.0, 20.0, False, 61), Judgement("unknown"), 22.0)
    said = " ".join(capfd.readouterr().err.split())
    assert "Without a step, it is ended 20 s after it last worked (--stall-timeout)" in said


@pytest.mark.parametrize(("policy", "ends"), [({}, False), ({"max_stall_given": True}, True)])
def test_only_explicit_max_stall_ends_unproved_multi_node_job(policy: dict[str, bool], ends: bool) -> None:
    """``_is_at_limit`` is what a node tells the leader, and what the evidence of all nodes is judged with."""
    policy_ = replace(Policy(60.0, 1800.0, 1800.0), **policy)
    watch = SimpleNamespace(policy=policy_, unseen=(1,), state=initial_state(0.0))
    stall = Stall((0,), time.monotonic() - 7200.0, 7200.0, 60.0, False, 61)
    for found in ("unknown", "unseen"):
        assert saying(watch)._is_at_limit(stall, Judgement(found)) is ends  # type: ignore[arg-type]


def test_hang_message_on_one_node_names_its_evidence(capfd: pytest.CaptureFixture[str]) -> None:
    """The merged evidence of all nodes can still prove the hang."""
    pages = {0: SimpleNamespace(last_step_ns=int(40e9))}
    watch = SimpleNamespace(last_progress=pages, policy=Policy(60.0, 1800.0, 1800.0), unseen=(1,))
    saying(watch)._say_hang(Stall((0,), 40.0, 60.0, 60.0, False, 61), OVER, 100.0)
    assert "no proof of a hang on this node, but" in " ".join(capfd.readouterr().err.split())
