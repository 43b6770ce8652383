"""Runs jobs with a planted slow rank and healthy jobs of an uneven pace, and scores safelaunch's reports on them.

``slow_cases`` lists the jobs, ``programs/slow`` has their programs, and ``slow_outside`` slows ranks down from outside.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.qa.slow_cases import CASES, Case
from tests.qa.slow_outside import ACTORS, CONTROLLERS, TAKE_ROOT, Scene
from tests.support import cgroups, netns
from tests.support.jobs import Job, Result

__all__ = ["CASES", "Answer", "Case", "How", "Report", "cannot", "run", "score", "totals"]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
HEALTHY_S, MIDDLE_S, AFTER_S, FROM_START_S = 600.0, 50.0, 130.0, 150.0
LIMIT_S, LIMIT_STEPS = 60.0, 100
SAME_S = 60.0  # between a line and the bundle that says the same
CLOCK_S = 1.0
SETTLED_S = 4.0  # from the first step
LEAST_GROWTH = 0.10
FIRST_STEP_S, ENDING_S = 240.0, 90.0
PORT = 29400
TORCH_ABORTS_AT_EXIT = "terminate called without an active exception"  # tests/conftest.py

ABOUT_PACE = re.compile(r"\bslower since\b|\bother ranks wait for\b|\bslow from the start\b")
PAST = re.compile(r"\bno longer slows?\b")
RANK = re.compile(r"\bwait for rank (\d+)")
SPENT = re.compile(r"\bspends \d+% in (?P<file>\S+):(?P<line>\d+) \((?P<function>[^)]+)\)")
SINCE = re.compile(r"\bslower since step ([\d,]+)")


@dataclass(frozen=True)
class How:
    """How the jobs run.

    Attributes:
        healthy_s: Length of a healthy job, from its first step.
        onset_s: When a rank becomes slow that isn't slow from the start.
        after_s: Length of the job after that.
        from_start_s: Length of a job with a rank that is slow from the start.
        plain: Under torchrun, without safelaunch, to measure the plant's cost; all onsets are in the middle.
        own: Options of safelaunch.
    """

    healthy_s: float = HEALTHY_S
    onset_s: float = MIDDLE_S
    after_s: float = AFTER_S
    from_start_s: float = FROM_START_S
    plain: bool = False
    own: tuple[str, ...] = ()

    def onset_of(self, case: Case) -> float:
        return 0.0 if case.from_start and not self.plain else self.onset_s

    def length_of(self, case: Case) -> float:
        if not case.planted:
            return self.healthy_s
        return self.from_start_s if case.from_start and not self.plain else self.onset_s + self.after_s


@dataclass(frozen=True)
class Report:
    """A report of safelaunch about the pace: a bundle, a line of its output, or both."""

    at: float  # UTC
    ranks: tuple[int, ...] = ()
    file: str = ""
    line: int = 0
    function: str = ""
    reason: str | None = None  # None: only a bundle has it
    since: int | None = None  # first slow step
    lost: float | None = None
    confidence: str = ""
    bundle: str = ""
    words: str = ""


@dataclass(frozen=True)
class Onset:
    step: int
    time: float  # UTC


@dataclass(frozen=True)
class Score:
    """How right the reports on a planted job are. ``line`` and ``reason`` are about the first right report.

    Attributes:
        wrong: Number of reports that name another rank, or a rank before its onset.
        line: None if the job has no line at fault, or if the rank isn't named.
        reason: None if the job has no reason, or if the rank isn't named.
        invented: The report gives a reason that isn't there.
        seconds: From the onset to the report.
        steps: From the onset to the report.
        off: First slow step in the report, minus the onset's.
    """

    named: bool = False
    wrong: int = 0
    line: bool | None = None
    reason: bool | None = None
    invented: bool = False
    seconds: float | None = None
    steps: int | None = None
    off: int | None = None

    @property
    def in_time(self) -> bool:
        if self.seconds is None:
            return False
        return self.seconds <= LIMIT_S or (self.steps is not None and self.steps <= LIMIT_STEPS)


@dataclass(frozen=True)
class Answer:
    """Result of a job. If it is ``broken`` or ``skipped``, it shows nothing about safelaunch."""

    name: str
    planted: bool
    share: float = 0.0  # as planned
    seconds: float = 0.0
    onset: Onset | None = None
    before_s: float = 0.0  # a step's time before and after the onset
    now_s: float = 0.0
    reports: tuple[Report, ...] = ()
    score: Score = field(default_factory=Score)
    broken: str = ""
    skipped: str = ""

    @property
    def growth(self) -> float:
        """Share by which the steps became slower; 0 if it isn't known."""
        return self.now_s / self.before_s - 1 if self.before_s and self.now_s else 0.0

    @property
    def counts(self) -> bool:
        return not self.broken and not self.skipped

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "growth": round(self.growth, 3)}


def cannot(case: Case) -> str:
    """Returns why the case can't run here; empty if it can."""
    if case.nodes > 1 and (reason := netns.cannot()):
        return reason
    controller = CONTROLLERS.get(case.outside)
    if controller is not None and (reason := cgroups.cannot(controller)):
        return reason
    if case.outside in TAKE_ROOT and os.getuid():
        return f"{case.outside} takes root"
    return "takes two CPUs" if case.alone and len(os.sched_getaffinity(0)) < 2 else ""


# --- running ----------------------------------------------------------------------------------------------------------


def run(case: Case, scratch: Path, how: How, starting: threading.Lock) -> Answer:
    """Runs the job to its end. Holds ``starting`` until its first step, because the start of a job takes all CPUs."""
    answer = Answer(case.name, case.planted, case.share)
    if skipped := cannot(case):
        return replace(answer, skipped=skipped)
    scene = Scene(case, scratch, how.onset_of(case))
    try:
        with ExitStack() as stack:
            with starting:
                _start(stack, scene, how)
                first = scene.jobs[0]
                first.until((scratch / "steps.txt").exists, "the first step", FIRST_STEP_S, every_s=0.2)
            with scene.acting(ACTORS.get(case.outside)):
                reports = _watch(scene, how.length_of(case) + ENDING_S)
            results = [job.wait(ENDING_S) for job in scene.jobs]
    except AssertionError as error:
        return replace(answer, broken=str(error).splitlines()[0][:200])
    steps, onset = read_steps(scratch), read_onset(scratch)
    before_s, now_s = paces(steps, onset)
    answer = replace(
        answer,
        seconds=round(max(result.seconds for result in results), 1),
        onset=onset,
        before_s=round(before_s, 4),
        now_s=round(now_s, 4),
        reports=tuple(reports),
    )
    if problem := scene.problem or _problem(case, answer, results):
        return replace(answer, broken=problem)
    return replace(answer, score=score(case, reports, onset, steps)) if onset is not None and case.planted else answer


def _start(stack: ExitStack, scene: Scene, how: How) -> None:
    case = scene.case
    script: list[str | Path] = [case.script, f"--scratch={scene.scratch}", f"--seconds={how.length_of(case):g}"]
    script += [f"--how={case.how}"] if case.how else []
    if case.planted:
        onset_s = math.inf if case.outside else how.onset_of(case)
        script += [f"--slow-rank={case.rank}", f"--extra={case.extra:g}", f"--onset={onset_s:g}"]
    script += case.words
    if case.nodes == 1:
        torchrun = [f"--nproc-per-node={case.ranks}"]
        job = Job(_words(case, how, torchrun, script), scene.scratch, launcher=TORCHRUN if how.plain else ())
        scene.jobs.append(stack.enter_context(job))
        return
    slow = {number: (delay_s, loss) for number, delay_s, loss in case.slow_links}
    scene.network = stack.enter_context(netns.Network(case.nodes, scene.scratch, slow=slow))
    for number in range(case.nodes):
        place = scene.scratch / netns.host(number)
        place.mkdir()
        torchrun = [f"--nnodes={case.nodes}", *netns.meeting(number, PORT, static=True)]
        torchrun.append(f"--nproc-per-node={case.ranks // case.nodes}")
        inside = scene.network.enter(number)
        job = Job(
            _words(case, how, torchrun, script),
            place,
            env={"GLOO_SOCKET_IFNAME": netns.DEVICE},
            interpreter=[*inside, sys.executable, "-m", "safelaunch"],
            launcher=[*inside, *TORCHRUN] if how.plain else (),
        )
        scene.jobs.append(stack.enter_context(job))


def _words(case: Case, how: How, torchrun: Sequence[str], script: Sequence[str | Path]) -> list[str | Path]:
    if how.plain:
        return [*torchrun, *script]
    if case.exec:
        return ["exec", *how.own, "--", *TORCHRUN, *torchrun, *script]
    return [*how.own, *torchrun, *script]


def _watch(scene: Scene, patience_s: float) -> list[Report]:
    """Reads the reports as they appear, until the job ends."""
    lines: dict[str, float] = {}
    bundles: dict[Path, float] = {}
    deadline = time.monotonic() + patience_s
    running = True
    while running:
        running = any(job.process.poll() is None for job in scene.jobs)
        assert time.monotonic() < deadline, f"the job hasn't ended after {patience_s:g} s"
        for job in scene.jobs:
            for line in job.stderr.splitlines():
                if is_about_pace(line):
                    lines.setdefault(line, time.time())
            for bundle in job.bundles():
                bundles.setdefault(bundle.path, time.time())
        time.sleep(0.5)
    verdicts = [(at, json.loads((path / "verdict.json").read_text()), path.name) for path, at in bundles.items()]
    found = [of_verdict(verdict, at, name) for at, verdict, name in verdicts if verdict["outcome"] == "slow"]
    return merged(found, [of_line(line, at) for line, at in lines.items()])


def _problem(case: Case, answer: Answer, results: Sequence[Result]) -> str:
    """Returns why the job tests nothing."""
    failed = [result for result in results if result.code and TORCH_ABORTS_AT_EXIT not in result.stderr]
    if failed:
        errors = [line for line in failed[0].stderr.splitlines() if "Error" in line]
        return f"exit code {failed[0].code}: {''.join(errors[-1:])[:150]}"
    if case.planted and answer.onset is None:
        return "there was no onset"
    if answer.before_s and case.planted and not case.slow_links and answer.growth < LEAST_GROWTH:
        return f"the steps became slower by {100 * answer.growth:.0f}% only"
    return ""


def read_steps(scratch: Path) -> list[tuple[int, float]]:
    """Returns rank 0's steps and the times (UTC) at which they began."""
    file = scratch / "steps.txt"
    words = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
    return [(int(step), float(at)) for step, at in words]


def read_onset(scratch: Path) -> Onset | None:
    file = scratch / "onset.json"
    return Onset(**json.loads(file.read_text())) if file.exists() else None


def paces(steps: Sequence[tuple[int, float]], onset: Onset | None) -> tuple[float, float]:
    """Returns the mean time of a step before and after the onset; 0 for too few steps."""
    if not steps or onset is None:
        return 0.0, _pace(steps)
    settled = steps[0][1] + SETTLED_S
    return _pace([each for each in steps if settled < each[1] < onset.time]), _pace(
        [each for each in steps if each[1] > onset.time]
    )


def _pace(steps: Sequence[tuple[int, float]]) -> float:
    if len(steps) < 3:
        return 0.0
    return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])


# --- reports ----------------------------------------------------------------------------------------------------------


def is_about_pace(line: str) -> bool:
    return line.startswith("safelaunch: ") and ABOUT_PACE.search(line) is not None and PAST.search(line) is None


def of_line(line: str, at: float) -> Report:
    rank, spent, since = RANK.search(line), SPENT.search(line), SINCE.search(line)
    return Report(
        at,
        ranks=(int(rank[1]),) if rank else (),
        file=spent["file"] if spent else "",
        line=int(spent["line"]) if spent else 0,
        function=spent["function"] if spent else "",
        since=int(since[1].replace(",", "")) if since else None,
        words=line.removeprefix("safelaunch: "),
    )


def of_verdict(verdict: Mapping[str, Any], at: float, bundle: str = "") -> Report:
    culprits = verdict.get("culprits") or []
    frame = next((culprit["frame"] for culprit in culprits if culprit.get("frame")), None) or {}
    slow = verdict.get("slow") or {}
    return Report(
        at,
        ranks=tuple(culprit["rank"] for culprit in culprits),
        file=frame.get("file") or "",
        line=frame.get("line") or 0,
        function=frame.get("function") or "",
        reason=slow.get("reason") or "",
        since=slow.get("step"),
        lost=slow.get("lost"),
        confidence=str(verdict.get("confidence") or ""),
        bundle=bundle,
        words=verdict.get("summary") or "",
    )


def merged(bundles: Sequence[Report], lines: Sequence[Report]) -> list[Report]:
    """Joins reports on the same ranks at about the same time: bundles of several nodes, and the lines about them."""
    found: list[Report] = []
    for report in (*sorted(bundles, key=lambda each: each.at), *lines):
        same = (n for n, each in enumerate(found) if each.ranks == report.ranks and abs(each.at - report.at) <= SAME_S)
        number = next(same, None)
        if number is None:
            found.append(report)
            continue
        first = found[number] if found[number].file or not report.bundle else report
        found[number] = replace(first, at=min(found[number].at, report.at))
    return sorted(found, key=lambda each: each.at)


# --- scoring ----------------------------------------------------------------------------------------------------------


def score(case: Case, reports: Sequence[Report], onset: Onset, steps: Sequence[tuple[int, float]]) -> Score:
    right = [each for each in reports if each.ranks and _is_right(case, each, onset)]
    wrong = sum(bool(each.ranks) for each in reports) - len(right)
    if not right:
        return Score(wrong=wrong)
    first = right[0]
    made = max((step for step, at in steps if at <= first.at), default=onset.step)
    return Score(
        named=True,
        wrong=wrong,
        line=_is_right_line(case, first) if case.lines else None,
        reason=first.reason in case.reasons if "" not in case.reasons else None,
        invented=bool(first.reason) and first.reason not in case.reasons,
        seconds=round(max(0.0, first.at - onset.time), 1),
        steps=max(0, made - onset.step),
        off=first.since - onset.step if first.since is not None else None,
    )


def _is_right(case: Case, report: Report, onset: Onset) -> bool:
    return case.right_ranks.issuperset(report.ranks) and report.at >= onset.time - CLOCK_S


def _is_right_line(case: Case, report: Report) -> bool:
    if Path(report.file).name != case.script.name or report.line not in case.lines:
        return False
    return not report.function or report.function.rpartition(".")[2] == case.lines[report.line]


@dataclass(frozen=True)
class Total:
    name: str
    count: int
    of: int
    aim: float

    @property
    def share(self) -> float:
        return self.count / self.of if self.of else 1.0

    @property
    def reached(self) -> bool:
        return self.share >= self.aim


def totals(answers: Sequence[Answer]) -> list[Total]:
    """Returns the totals, with the aims. Lines, reasons and times count for named ranks only."""
    ran = [answer for answer in answers if answer.counts]
    scores = [answer.score for answer in ran if answer.planted]
    named = [each for each in scores if each.named]
    lines = [each.line for each in named if each.line is not None]
    reasons = [each.reason for each in named if each.reason is not None]
    healthy = [answer for answer in ran if not answer.planted]
    return [
        Total("right rank named", len(named), len(scores), 0.90),
        Total("right rank, of all reports that name one", len(named), len(named) + sum(s.wrong for s in scores), 0.95),
        Total("right line", sum(lines), len(lines), 0.80),
        Total("right reason, of jobs that have one", sum(reasons), len(reasons), 0.70),
        Total("no other reason", sum(not s.invented for s in named), len(named), 0.95),
        Total(f"within {LIMIT_S:g} s or {LIMIT_STEPS} steps", sum(s.in_time for s in named), len(named), 0.90),
        Total("healthy jobs without a report", sum(not answer.reports for answer in healthy), len(healthy), 1.0),
    ]


def typical_delay(answers: Sequence[Answer]) -> float:
    """Returns the median time from the onset to the report, in seconds; 0 without a report."""
    delays = [answer.score.seconds for answer in answers if answer.counts and answer.score.seconds is not None]
    return statistics.median(delays) if delays else 0.0
