"""An early look's way from a quiet job to its line, without a job: the watch is played, and so are the looks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from safelaunch.capture.look import Look, ProcessLook, RankLook, Target
from safelaunch.capture.pages import Roster
from safelaunch.capture.result import Result
from safelaunch.capture.worker_server import Questions
from safelaunch.job.paths import RunPaths
from safelaunch.model import EarlyLook, FirstWord, Place, StackSample, Thread
from safelaunch.supervise import collecting, early, judge, judge_process, respond
from safelaunch.supervise.early import EarlyLooks, without_the_gil
from safelaunch.supervise.hooks import Notifier
from safelaunch.supervise.job_context import JobContext
from safelaunch.supervise.kinds import EARLY_LOOK, IncidentKind
from safelaunch.supervise.looks import Looks
from safelaunch.supervise.respond import JobView
from safelaunch.supervise.watch.progress import Watch as RealWatch
from safelaunch.supervise.watch.quiet import Spell
from safelaunch.supervise.watch.stall import Policy, Stall, Status, idle_s
from safelaunch.supervise.watch.work import Background, ObservedWork
from tests.support.evidence import at, behind, in_user, looked_at, rank, with_culprit

ASLEEP = FirstWord("rank 1 is asleep in train.py:7 (load)", "stuck-in-user-code", (Place(1, at(7, "load")),))
COMPUTES = FirstWord("rank 0 is active at train.py:33 (evaluate)", "", (Place(0, at(33, "evaluate")),), common=True)
NOBODY = FirstWord("all ranks wait in all_reduce at train.py:9", "no-rank-stands-out", (), common=True)


@dataclass
class Watch:
    """A job whose last progress the test sets."""

    mark_s: float = 100.0
    stage: Any = "steps"
    judged: bool = True
    attempt: tuple[int, int] = (0, 1)
    unseen: tuple[int, ...] = ()
    policy: Policy = field(default_factory=lambda: Policy(600.0, 1800.0, 1800.0))
    early: tuple[EarlyLook, ...] = ()
    quiet: None = None
    background: Background = field(default_factory=Background)
    state: Any = field(default_factory=lambda: SimpleNamespace(status=Status.WATCHING, due_s=10_000.0))

    def spell(self, now: float) -> Spell | None:
        usual_s = 0.05 if self.stage == "steps" else 0.0
        return Spell(self.mark_s, self.stage, usual_s, usual_s) if self.judged else None

    def targets(self) -> tuple[()]:
        return ()

    quiet_readings: int = 0  # how often what the job had done was forgotten
    proved_s: float = 0.0
    worked: int = 0  # how often an early look saw work

    def note_work(self, at_s: float) -> None:
        self.worked += 1

    def drop_quiet_counters(self) -> None:
        self.quiet_readings += 1

    def note_proof(self, mark_s: float) -> None:
        self.proved_s = mark_s


class Job:
    """``works``: the processes that do; ``word``: what the looks find."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watch, self.said, self.told = Watch(), list[str](), list[dict[str, str]]()
        self.works: tuple[int, ...] = ()
        self.ranks: Any = {}
        self.entries: tuple[dict[int, int], ...] = ({}, {})
        self.word, self.looks, self.asked, self.proves = ASLEEP, 0, list[bool](), list[bool]()
        job = self

        class Suspects(Notifier):
            def start(self, variables: Any) -> None:
                job.told.append(dict(variables))

        def look_at(targets: Any, looks: Looks | None, **_: Any) -> Looks:
            job.looks += 1
            one = Look(0.0, self.now, self.ranks)
            return Looks((Target(0, 0, 1000, 0),), taken=(one,), entries=self.entries if looks is not None else ())

        def evidence_of(kind: IncidentKind, *_: Any) -> None:
            job.asked.append(kind.asks)

        monkeypatch.setattr(respond, "look_at", look_at)
        monkeypatch.setattr(early, "EARLY_LOOK", dataclasses.replace(EARLY_LOOK, between_s=0.0))
        monkeypatch.setattr(judge, "work_in", lambda *_: tuple(ObservedWork(p, p, p, "cpu", 900.0) for p in self.works))
        monkeypatch.setattr(early, "say", self.said.append)
        monkeypatch.setattr(collecting, "snapshot_of", lambda *_: None)
        monkeypatch.setattr(collecting, "evidence_of", evidence_of)

        def ask(*_: Any, prove: bool) -> FirstWord:
            job.proves.append(prove)
            return replace(job.word, proved=prove and job.word.proved)

        monkeypatch.setattr(judge_process, "ask", ask)
        about = JobContext("train", tmp_path, tmp_path, tmp_path, {}, host="here", suspects=Suspects())
        self.early = EarlyLooks(JobView(cast("Any", self.watch), about, dict, cast("Any", None)))
        self.now = self.watch.mark_s
        self.free = True

    def wait(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        """Ticks, and gives each thread the time that it takes."""
        end_s = self.now + seconds
        while self.now < end_s and not until():
            self.now += 0.25
            self.early.advance(self.now, free=self.free)
            if self.early._under_way is not None:
                assert self.early._under_way.wait(30)

    def step(self) -> None:
        self.watch.mark_s = self.now


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("works", "entries", "seen"), [((1000,), ({}, {}), True), ((), ({}, {0: 5}), True), ((), ({}, {}), False)]
)
def test_work_in_an_early_look_is_noted(works: tuple[int, ...], entries: Any, seen: bool, job: Job) -> None:
    job.works, job.entries = works, entries
    job.wait(12)
    assert bool(job.watch.worked) is seen


def test_noted_work_delays_user_threshold_but_no_proof(tmp_path: Path) -> None:
    policy = Policy(20.0, 20.0, 240.0, stall_given=True)
    watch = RealWatch(Roster(RunPaths(tmp_path)), policy, 0.0)
    watch.note_work(16.0)
    stall = Stall((0,), 0.0, 20.0, 20.0, before_first_step=False)
    assert idle_s(watch.state, policy, stall, "unknown", 22.0) == 6.0
    assert idle_s(watch.state, policy, stall, "dead", 22.0) == 22.0


def test_still_rank_is_reported_early_and_at_growing_intervals(job: Job) -> None:
    job.wait(60)
    assert len(job.said) == 3 and job.looks == 6
    assert job.said[0] == "quiet for 5 s (usual 0.05 s): rank 1 is asleep in train.py:7 (load)... watching"
    begins = [text.split(" s")[0].removeprefix("quiet for ") for text in job.said]
    again = "quiet for {} s: nothing has changed since {} s"
    assert job.said[1:] == [again.format(now, before) for before, now in pairwise(begins)], "the words stand above"
    assert [one["SAFELAUNCH_RANKS"] for one in job.told] == ["1"] * 3
    assert job.told[0]["SAFELAUNCH_CAUSE"] == "stuck-in-user-code"
    assert [(one.said, one.lasted_s, one.places) for one in job.watch.early] == [(True, 0.0, ASLEEP.places)] * 3
    assert job.asked == [True] * 3


def test_evaluation_is_reported_once_and_runs_no_command(job: Job) -> None:
    job.works, job.word = (1000,), COMPUTES
    for _ in range(4):
        job.wait(30)
        job.step()
    assert job.said == ["quiet for 5 s (usual 0.05 s): rank 0 is active at train.py:33 (evaluate)... watching"]
    assert job.told == []
    assert [one.lasted_s for one in job.watch.early] == [30.0, 30.0]
    assert job.asked == [False] * 2, "a rank that computes is not asked for anything"


def test_moving_ranks_are_not_reported(job: Job) -> None:
    job.entries = ({0: 4}, {0: 5})
    job.wait(60)
    assert job.looks
    assert (job.said, job.told, job.watch.early) == ([], [], ())


def test_suspended_job_is_not_reported(job: Job) -> None:
    stopped = looked_at(0, (), "stop")
    job.ranks = {0: stopped, 1: stopped}
    job.wait(60)
    assert job.looks
    assert (job.said, job.told, job.watch.early) == ([], [], ())


def test_work_outside_the_ranks_is_not_reported(job: Job) -> None:
    job.works = (7,)
    job.wait(60)
    assert job.said == []


@pytest.mark.parametrize(("word", "lines"), [(ASLEEP, 2), (NOBODY, 0), (FirstWord(common=True), 0)])
def test_only_outliers_are_reported_without_a_usual_step(job: Job, word: FirstWord, lines: int) -> None:
    job.watch.stage, job.word = "start", word
    job.wait(60)
    assert len(job.said) == lines
    assert not lines or job.said[0].startswith("quiet for 10 s (no usual step known): rank 1 is asleep")


def test_stall_timeout_alone_prints_that_startup_timeout_applies(job: Job) -> None:
    job.watch.stage, job.watch.policy = "start", Policy(5.0, 1800.0, 60.0, stall_given=True)
    job.wait(60)
    limit = "until then --startup-timeout (1800 s) applies, not --stall-timeout"
    assert [limit in line for line in job.said] == [False, True, False]


@pytest.mark.parametrize(("word", "lines"), [(ASLEEP, 3), (NOBODY, 0)])
def test_one_of_several_nodes_reports_its_own_still_ranks(job: Job, word: FirstWord, lines: int) -> None:
    job.watch.unseen, job.word = (2, 3), word
    job.wait(60)
    assert len(job.said) == lines and len(job.watch.early) == 3
    assert all(", on this node: rank 1" in line for line in job.said[:1])


def test_one_of_several_nodes_does_not_report_work(job: Job) -> None:
    job.watch.unseen, job.works, job.word = (2, 3), (1000,), COMPUTES
    job.wait(60)
    assert job.said == []


@pytest.mark.parametrize(
    ("seen", "unseen", "word", "proved"),
    [
        (True, (), replace(ASLEEP, proved=True), True),
        (True, (), replace(NOBODY, proved=True), True),
        (True, (), ASLEEP, False),
        (False, (), replace(ASLEEP, proved=True), False),
        (True, (2, 3), replace(ASLEEP, proved=True), False),
    ],
)
def test_proof_needs_every_rank_and_prints_no_line(
    job: Job, seen: bool, unseen: tuple[int, ...], word: FirstWord, proved: bool
) -> None:
    job.ranks, job.watch.unseen, job.word, job.watch.stage = (
        {0: looked_at(0, in_user(7), "sleep")} if seen else {},
        unseen,
        word,
        "start",
    )
    job.wait(20)
    assert job.watch.proved_s == (job.watch.mark_s if proved else 0.0)


def test_quiet_counters_are_dropped_after_a_look(job: Job) -> None:
    """Else what a start has read would be work for as long as the job then waits."""
    job.works = (7,)
    job.wait(60)
    assert job.looks == 6 and job.watch.quiet_readings == 3


def test_step_cancels_the_look(job: Job) -> None:
    job.wait(60, until=lambda: job.looks)
    job.step()
    job.wait(4)
    assert (job.said, job.watch.early) == ([], ())


@pytest.mark.parametrize("why", ["not free", "suspected", "due soon", "not judged"])
def test_early_look_is_skipped_during_suspicion_or_without_rank(job: Job, why: str) -> None:
    job.free = why != "not free"
    job.watch.judged = why != "not judged"
    job.watch.state.status = Status.UNDECIDED if why == "suspected" else Status.WATCHING
    if why == "due soon":
        job.watch.state.due_s = job.watch.mark_s + 8.0
    job.wait(6.0 if why == "due soon" else 60)
    assert (job.looks, job.said) == (0, [])


def test_new_attempt_resets_the_early_looks(job: Job) -> None:
    job.wait(60, until=lambda: job.said)
    job.watch.attempt, job.watch.early = (1, 2), ()
    job.step()
    job.wait(10)
    assert len(job.said) == 2 and "nothing has changed" not in job.said[1]


def test_error_ends_the_early_looks_but_not_the_watch(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(judge, "work_in", fails)
    job.wait(60)
    assert job.said == ["an internal error ended the early looks (RuntimeError: no). Still watching."]


def test_rank_with_held_gil_gets_no_gil_question() -> None:
    def seen(*threads: Thread) -> Look:
        sample = Result(StackSample(7, 1.0, "py-spy", threads) if threads else None, "py-spy", 0.1)
        return Look(1.0, 1.1, {0: RankLook(0, ProcessLook(7, None, sample))})

    target = Target(0, 0, 7, 5, questions=cast(Questions, object()))
    assert without_the_gil(target, seen(Thread(()), Thread(()))) is target
    assert without_the_gil(target, seen(Thread(()), Thread((), owns_gil=True))).questions is None
    assert without_the_gil(target, seen()).questions is None
    assert without_the_gil(target, Look(1.0, 1.1, {})).questions is None


# --- the process that finds the words ---------------------------------------------------------------------------------


def test_child_process_writes_the_early_look_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the working directory must not be imported."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    evidence = with_culprit(rank(1, in_user(7, "load"), "sleep", flight=behind()), 3)
    found = judge_process.ask(evidence, None, tmp_path / "question")
    assert found.words.startswith("rank 1 is asleep in train.py:7 (load), while ranks 0,2 wait in all_reduce")
    assert (found.cause, found.places) == ("stuck-in-user-code", (Place(1, at(7, "load")),))
    computing = with_culprit(rank(1, in_user(33, "evaluate"), "run", flight=behind()), 3)
    assert judge_process.ask(computing, [1], tmp_path / "question").words.startswith("rank 1 is active at train.py:33")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["msgspec.py"]


def test_failed_child_process_returns_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_process, "DEADLINE_S", 0.01)
    begin = time.monotonic()
    assert judge_process.ask(with_culprit(rank(1), 2), None, tmp_path / "question").words == ""
    assert time.monotonic() - begin < 60
    assert judge_process.ask(with_culprit(rank(1), 2), None, tmp_path / "no" / "question").words == ""
