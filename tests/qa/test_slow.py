"""The scores of ``python -m scripts.qa slow``, and two of its jobs."""

from __future__ import annotations

import ast
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.qa import slow
from tests.qa.slow import Answer, Onset, Report, Score, score
from tests.qa.slow_cases import CASES, planted_lines
from tests.qa.slow_outside import ACTORS
from tests.support import cgroups, netns

AUGMENT = CASES["vision-augment-25"]  # rank 2 is slow
SWAP = CASES["swap-50"]
ONSET = Onset(step=400, time=1000.0)
STEPS = [(step, 1000.0 + (step - 400) * 0.2) for step in range(1, 1200)]
(LINE, FUNCTION), *_ = AUGMENT.lines.items()
RIGHT = Report(1040.0, (2,), "/home/vision.py", LINE, f"Images.{FUNCTION}", "", since=402)
SAID = (
    "safelaunch: slower since step 1,309 (06:52): 0.0993 s -> 0.14 s a step; the other ranks wait for rank 2 21% "
    "of the time; it spends 31% in train.py:9 (augment); the others spend 5%. The job continues."
)


def test_line_about_a_slow_rank_gives_rank_step_and_place() -> None:
    report = slow.of_line(SAID, 5.0)
    assert (report.ranks, report.since) == ((2,), 1309)
    assert (report.file, report.line, report.function, report.reason) == ("train.py", 9, "augment", None)


@pytest.mark.parametrize(
    ("line", "is_about"),
    [
        (SAID, True),
        (
            "safelaunch: the other ranks wait for rank 1 30% of the time; its extra time is spread over many lines.",
            True,
        ),
        ("safelaunch: slower since step 40 (06:52) on all ranks: 0.1 s -> 0.2 s a step", True),
        ("safelaunch: back to 0.1 s a step: rank 1 no longer slows the job down", False),
        ("safelaunch: quiet for 12 s: rank 1 sleeps... watching", False),
        ("train.py: the other ranks wait for rank 1", False),
    ],
)
def test_only_safelaunch_lines_about_the_pace_count(line: str, is_about: bool) -> None:
    assert slow.is_about_pace(line) is is_about


def test_verdict_of_a_bundle_gives_rank_place_and_reason() -> None:
    frame = {"file": "/job/train.py", "line": 9, "function": "augment"}
    verdict = {
        "outcome": "slow",
        "summary": "rank 2 is late",
        "confidence": "high",
        "culprits": [{"rank": 2, "frame": frame, "reason": "spends more time there"}],
        "slow": {"step": 309, "since": "", "before_s": 0.1, "now_s": 0.14, "lost": 0.21, "reason": "cpu-queue"},
    }
    report = slow.of_verdict(verdict, 5.0, "run-slow")
    assert (report.ranks, report.file, report.line, report.function) == ((2,), "/job/train.py", 9, "augment")
    assert (report.reason, report.since, report.lost, report.bundle) == ("cpu-queue", 309, 0.21, "run-slow")


def test_verdict_without_culprits_names_no_rank() -> None:
    report = slow.of_verdict({"outcome": "slow", "culprits": [], "summary": "all are slower"}, 5.0)
    assert (report.ranks, report.file, report.reason) == ((), "", "")


def test_bundles_of_two_nodes_and_their_line_are_one_report() -> None:
    first, second = replace(RIGHT, file="", line=0, bundle="a"), replace(RIGHT, at=1042.0, bundle="b")
    (report,) = slow.merged([first, second], [replace(RIGHT, at=1039.0, reason=None)])
    assert (report.at, report.bundle, report.reason) == (1039.0, "b", "")


def test_line_about_another_rank_than_the_bundle_stays() -> None:
    assert [each.ranks for each in slow.merged([RIGHT], [replace(RIGHT, ranks=(0,), at=1050.0)])] == [(2,), (0,)]


def test_right_report_gets_rank_line_and_delay() -> None:
    found = score(AUGMENT, [RIGHT], ONSET, STEPS)
    assert found == Score(named=True, line=True, seconds=40.0, steps=200, off=2)
    assert found.in_time


def test_another_rank_is_wrong() -> None:
    assert score(AUGMENT, [replace(RIGHT, ranks=(1,))], ONSET, STEPS) == Score(wrong=1)
    assert score(AUGMENT, [replace(RIGHT, ranks=(1, 2))], ONSET, STEPS) == Score(wrong=1)
    both = score(AUGMENT, [replace(RIGHT, ranks=(1,)), RIGHT], ONSET, STEPS)
    assert (both.named, both.wrong) == (True, 1)


def test_rank_that_is_named_before_its_onset_is_wrong() -> None:
    assert score(AUGMENT, [replace(RIGHT, at=990.0)], ONSET, STEPS) == Score(wrong=1)


def test_report_without_a_rank_is_neither_right_nor_wrong() -> None:
    assert score(AUGMENT, [replace(RIGHT, ranks=())], ONSET, STEPS) == Score()


@pytest.mark.parametrize(
    "report",
    [
        replace(RIGHT, line=LINE + 1),
        replace(RIGHT, file="/home/other.py"),
        replace(RIGHT, function="collate"),
        replace(RIGHT, file="", line=0, function=""),
    ],
)
def test_another_place_is_another_line(report: Report) -> None:
    found = score(AUGMENT, [report], ONSET, STEPS)
    assert (found.named, found.line) == (True, False)


@pytest.mark.parametrize(("reason", "right"), [("memory", True), ("disk", False), ("", False), (None, False)])
def test_reason_counts_if_the_job_has_one(reason: str | None, right: bool) -> None:
    report = replace(RIGHT, ranks=(SWAP.rank,), reason=reason)
    found = score(SWAP, [report], ONSET, STEPS)
    assert (found.reason, found.invented) == (right, bool(reason) and not right)


def test_reason_of_a_job_without_one_is_invented() -> None:
    found = score(AUGMENT, [replace(RIGHT, reason="network")], ONSET, STEPS)
    assert (found.reason, found.invented) == (None, True)


@pytest.mark.parametrize(
    ("seconds", "steps", "in_time"), [(59.0, 400, True), (90.0, 80, True), (90.0, 140, False), (None, None, False)]
)
def test_report_is_in_time_within_the_later_of_both_limits(
    seconds: float | None, steps: int | None, in_time: bool
) -> None:
    assert Score(named=seconds is not None, seconds=seconds, steps=steps).in_time is in_time


def test_totals_leave_out_broken_and_skipped_jobs() -> None:
    right = Score(named=True, line=True, reason=True, seconds=40.0, steps=100)
    answers = [
        Answer("a", planted=True, score=right),
        Answer("b", planted=True, score=replace(right, line=False, reason=None, wrong=1)),
        Answer("c", planted=True),
        Answer("d", planted=True, broken="exit code 1"),
        Answer("e", planted=True, skipped="takes root"),
        Answer("f", planted=False, reports=(RIGHT,)),
        Answer("g", planted=False),
    ]
    named, precision, line, reason, none, in_time, healthy = slow.totals(answers)
    assert [(total.count, total.of) for total in (named, precision, line)] == [(2, 3), (2, 3), (1, 2)]
    assert [(total.count, total.of) for total in (reason, none, in_time)] == [(1, 1), (2, 2), (2, 2)]
    assert (healthy.count, healthy.of, healthy.reached) == (1, 2, False)


def test_paces_are_mean_step_times_before_and_after_the_onset() -> None:
    steps = [(step, 0.1 * step) for step in range(101)] + [(100 + more, 10.0 + 0.2 * more) for more in range(1, 50)]
    before_s, now_s = slow.paces(steps, Onset(101, 10.0))
    assert (round(before_s, 3), round(now_s, 3)) == (0.1, 0.2)


def test_there_are_enough_jobs_of_every_kind() -> None:
    planted = [case for case in CASES.values() if case.planted]
    assert len(planted) >= 40 and len(CASES) - len(planted) >= 24
    assert {reason for case in planted for reason in case.reasons} >= {
        *("cpu-queue", "cpu-quota", "stopped", "disk", "memory", "network", "garbage-collection", ""),
    }
    assert {case.ranks for case in planted} >= {2, 3, 4, 8}
    assert {case.from_start for case in planted} == {case.exec for case in planted} == {True, False}
    assert {case.outside for case in CASES.values()} - {""} == set(ACTORS)


@pytest.mark.parametrize("script", sorted({case.script for case in CASES.values()}), ids=lambda path: path.stem)
def test_every_mark_belongs_to_a_job(script: Path) -> None:
    text = script.read_text()
    ast.parse(text)
    marks = {how for line in text.splitlines() if "# SLOW: " in line for how in line.split("# SLOW: ")[1].split(", ")}
    assert marks <= {case.how for case in CASES.values() if case.script == script and case.planted}
    assert all(planted_lines(script, how) for how in marks)


@pytest.mark.skipif(bool(cgroups.cannot("cpu")), reason=cgroups.cannot("cpu") or "-")
def test_limits_are_removed_at_the_end() -> None:
    with cgroups.Limits("cpu") as limits:
        limits.cpu(0.5)
        assert limits.path.is_dir()
    assert not limits.path.exists()


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["vision-augment-50-start", "solver-boundary-50-exec", "even-vision"])
def test_job_runs_to_its_end(name: str, tmp_path: Path) -> None:
    how = slow.How(healthy_s=8.0, onset_s=8.0, after_s=10.0, from_start_s=12.0)
    answer = slow.run(CASES[name], tmp_path, how, threading.Lock())
    assert (answer.broken, answer.skipped) == ("", "")
    assert (answer.onset is not None) == answer.planted


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(netns.cannot()), reason=netns.cannot() or "-")
def test_slow_link_makes_the_steps_slower(tmp_path: Path) -> None:
    how = slow.How(onset_s=12.0, after_s=12.0, plain=True)
    answer = slow.run(CASES["link-50"], tmp_path, how, threading.Lock())
    assert answer.broken == "" and answer.growth > 0.15
