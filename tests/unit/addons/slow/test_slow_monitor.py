"""Messages of the watch for slow ranks: ``monitor.SlowMonitor``, with stubs of the job and of its examinations."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safelaunch.addons.record.recording import RankRecord, Recording
from safelaunch.addons.slow import bundle, late_rank, monitor
from safelaunch.addons.slow.bundle import FoundSlow, headline
from safelaunch.addons.slow.late_rank import SlowRanks
from safelaunch.addons.slow.monitor import SlowMonitor
from safelaunch.addons.slow.service import Examination
from safelaunch.bundle.publication import Publication
from safelaunch.model import Frame, Verdict
from safelaunch.supervise.control.protocol import ServiceAnswer

SLOW = SlowRanks((1,), 0.2, Frame("/home/me/train.py", 9, "augment"), 0.3, 0.01)
SEEN = Examination(Recording(ranks=[RankRecord(1)]), late={"": [[1], [1]]})


class Watched:
    """Stub of a watch over two ranks that make a step in ``step_s``."""

    def __init__(self) -> None:
        self.attempt = (0, 0)
        self.notes: tuple[str, ...] = ()
        self.last_progress: dict[int, Any] = {}
        self.now, self.step = 1000.0, 0

    def note(self, source: str, notes: tuple[str, ...]) -> None:
        self.notes = notes

    def make(self, count: int, step_s: float) -> None:
        self.now += count * step_s
        self.step += count
        times = {"step": self.step, "last_step_ns": int(self.now * 1e9), "first_step_ns": int(1000e9)}
        self.last_progress = {n: SimpleNamespace(rank=n, paused=False, phase="", **times) for n in range(2)}


class Harness:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watch = Watched()
        self.answers: list[SlowRanks | None] = []
        self.refused, self.seen = False, SEEN
        self.checks = self.asked = 0
        self.suspects: list[dict[str, str]] = []
        context = SimpleNamespace(suspects=SimpleNamespace(start=self.suspects.append), run_name="train")
        job = SimpleNamespace(
            view=SimpleNamespace(watch=self.watch, context=context),
            topic=lambda name: SimpleNamespace(has_others=False, gather=lambda: None),
            actions=SimpleNamespace(ask_nodes=self._ask),
        )
        monkeypatch.setattr(late_rank, "needs_another", lambda examinations: False)
        monkeypatch.setattr(late_rank, "slow_ranks", self._judge)
        monkeypatch.setattr(bundle, "write_bundle", self._write)
        self.monitor = SlowMonitor(job)  # type: ignore[arg-type]
        clock = {name: getattr(time, name) for name in ("time", "strftime", "localtime")}
        monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: self.watch.now, **clock))

    def _ask(self, service: object, ask: object, take: Any) -> None:
        self.asked += 1
        take(ServiceAnswer(problem="busy") if self.refused else ServiceAnswer(part=self.seen))

    def _judge(self, examinations: object, *, since_start: bool) -> SlowRanks | None:
        self.checks += 1
        return self.answers.pop(0) if self.answers else None

    def _write(self, found: FoundSlow, job: object) -> Any:
        words = Verdict(1, "slow", "late-rank", "medium", f"{headline(found)}.", (), "", (), (), (), ())
        return words, Publication(Path("/home/me/bundles/train-slow"))

    def run(self, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.watch.make(1, step_s)
            self.monitor.tick()
            check = self.monitor._check
            for task in (check.judging if check is not None else None, self.monitor._writing):
                if task is not None:
                    assert task.wait(10)
                    self.monitor.tick()
            if self.monitor._writing is not None:
                assert self.monitor._writing.wait(10)
                self.monitor.tick()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(monkeypatch)


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


def test_onset_and_end_are_said_once_each(job: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    job.run(130, 0.2)  # the first check comes at 30 s
    job.answers = [None, SLOW, SLOW, SLOW]
    job.run(40, 0.2)
    job.run(600, 0.3)
    line, place = said(capfd)
    assert line.startswith("safelaunch: slower since step 1") and "0.2 s -> 0.3 s a step" in line
    assert place == "safelaunch: bundle: /home/me/bundles/train-slow"
    assert [look["SAFELAUNCH_OUTCOME"] for look in job.suspects] == ["slow"]
    assert "wait for rank 1 20% of the time; it spends 30% in train.py:9 (augment)" in line
    assert job.watch.notes == (SLOW.words,)
    job.run(200, 0.2)
    assert said(capfd) == ["safelaunch: back to 0.2 s a step: rank 1 no longer slows the job down"]
    assert job.watch.notes == ()


def test_rank_that_is_slow_from_the_start_is_said_once_and_its_note_goes_with_it(
    job: Harness, capfd: pytest.CaptureFixture[str]
) -> None:
    job.answers = [SLOW, SLOW, None]
    job.run(700, 0.2)
    line, _ = said(capfd)
    assert line.startswith("safelaunch: the other ranks wait for rank 1 20% of the time") and job.checks == 2
    assert job.watch.notes == (SLOW.words,)
    job.run(3000, 0.2)
    assert (said(capfd), job.checks, job.watch.notes) == ([], 3, ())


def test_onset_without_a_slow_rank_says_nothing_and_is_examined_a_few_times(
    job: Harness, capfd: pytest.CaptureFixture[str]
) -> None:
    job.run(170, 0.2)
    job.run(1500, 0.3)
    assert said(capfd) == []
    assert job.checks <= len(monitor.CHECKS_S) + monitor.RETRIES


def test_new_attempt_forgets_the_slow_rank(job: Harness) -> None:
    job.answers = [SLOW]
    job.run(200, 0.2)
    assert job.watch.notes == (SLOW.words,)
    job.watch.attempt = (1, 0)
    job.monitor.tick()
    assert job.watch.notes == ()


def test_refused_examination_is_tried_again_and_not_counted(job: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    job.run(130, 0.2)
    job.answers = [SLOW]
    job.refused = True
    job.run(600, 0.3)
    assert (said(capfd), job.checks) == ([], 0)
    job.refused = False
    job.run(500, 0.3)
    assert "wait for rank 1" in said(capfd)[0] and job.checks == 1


def test_line_at_the_end_says_what_the_run_lost(job: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    job.answers = [SLOW] * 9
    job.run(700, 0.2)
    said(capfd)
    job.monitor.finish(succeeded=True)
    (line,) = said(capfd)
    assert "20% of the run's time was lost: the other ranks wait for rank 1 20% of the time; it spends 30% in" in line


def test_run_without_a_slow_rank_ends_in_silence(job: Harness, capfd: pytest.CaptureFixture[str]) -> None:
    job.run(700, 0.2)
    job.monitor.finish(succeeded=True)
    assert said(capfd) == []


def test_time_before_an_examination_without_a_slow_rank_is_not_lost(
    job: Harness, capfd: pytest.CaptureFixture[str]
) -> None:
    job.answers = [None, None, SLOW]
    job.run(3700, 0.2)  # the third check comes at 720 s
    said(capfd)
    job.monitor.finish(succeeded=True)
    assert said(capfd) == [] and job.checks == 3


def test_end_is_said_only_after_its_beginning_and_with_the_present_pace(
    job: Harness, capfd: pytest.CaptureFixture[str]
) -> None:
    job.run(130, 0.2)
    job.answers = [None, *[SLOW] * 9]
    job.run(40, 0.2)
    job.run(200, 0.4)
    assert "slower since step" in said(capfd)[0]
    job.run(60, 0.28)
    assert said(capfd) == ["safelaunch: back to 0.28 s a step: rank 1 no longer slows the job down"]
    job.run(300, 0.2)
    job.run(200, 0.4)
    assert job.watch.notes == (SLOW.words,)
    job.run(200, 0.2)
    assert (job.watch.notes, said(capfd)) == ((), [])


def test_checks_that_a_node_skipped_before_it_led_are_not_made_up_for(job: Harness) -> None:
    job.watch.make(1, 0.2)
    job.watch.now += 36_000
    job.run(100, 0.2)
    assert job.checks == 1


def test_no_rank_is_examined_in_an_announced_phase(job: Harness) -> None:
    job.run(100, 0.2)
    for progress in job.watch.last_progress.values():
        progress.phase = "evaluation"
    job.watch.now += 60
    job.monitor.tick()
    assert job.checks == 0
    job.run(10, 0.2)
    assert job.checks == 1


def test_examination_that_fails_each_time_is_tried_ever_more_rarely(job: Harness) -> None:
    job.refused = True
    job.run(5 * 3600, 0.2)
    assert 3 <= job.asked <= 10


@pytest.mark.parametrize(("steps", "is_said"), [(0, False), (20, False), (48, True), (None, True)])
def test_rank_is_not_late_if_all_wait_for_its_evaluation(
    job: Harness, capfd: pytest.CaptureFixture[str], steps: int | None, is_said: bool
) -> None:
    recorded = Recording(ranks=[RankRecord(rank, steps=steps) for rank in range(2)], elapsed_s=10.0)
    job.seen, job.answers = Examination(recorded, late={"": [[1], [1]]}), [SLOW]
    job.run(200, 0.2)
    assert bool(said(capfd)) == is_said


@pytest.mark.parametrize(
    ("passed_s", "due_s"),
    [(0.0, 30.0), (30.0, 120.0), (119.0, 120.0), (120.0, 720.0), (725.0, 1320.0), (36e3, 36120.0)],
)
def test_checks_come_after_30_s_120_s_and_then_every_ten_minutes(passed_s: float, due_s: float) -> None:
    assert monitor._next_check_s(passed_s) == due_s
