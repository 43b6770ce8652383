"""The engine that hands jobs over to a scheduler (a ``Queue``), follows them, and cancels them.

A job is written down before the scheduler gets it, under a name that finds it there again; and its task claims the
attempt by a file before it does anything (``task``). So it may be submitted twice, after a kill or an unclear answer,
and still runs once. Jobs stay with the scheduler if colaunch is killed; ``--resume`` finds them there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from safelaunch.addons.sweep import metrics
from safelaunch.addons.sweep.attempt_files import AttemptClaim, AttemptFiles, TaskEnd
from safelaunch.addons.sweep.batch_script import SweepPrograms, script, work_name
from safelaunch.addons.sweep.engine import RunningAttempt
from safelaunch.addons.sweep.jobs import AttemptOutcome, JobState, Pace, SweepJob
from safelaunch.addons.sweep.journal import Attempt, Journal
from safelaunch.addons.sweep.paths import SweepPaths, newest, verdict_of
from safelaunch.addons.sweep.position import AttemptPosition, judge, meaning
from safelaunch.addons.sweep.scheduler import Listed, QueueError, Scheduler, SubmittedWork
from safelaunch.addons.sweep.sweep import Sweep, was
from safelaunch.system.files import modified_ns, replace_file

TICK_S, BUSY_TICK_S = 0.25, 0.05
LOOK_EVERY_S, LOOK_AT_MOST_S = 1.0, 10.0
# The files tell of begins and ends sooner than the scheduler, for this part of the time at most.
FILES_EVERY_S, FILES_SHARE = 0.25, 0.05
SETTLE_S = 15.0  # a network disk may show a file of another node only after a while
FULL_PAUSE_S = 15.0
SHOW_EVERY_S = 2.0
AT_ONCE = 16  # submissions in one request
GIVE_UP_AFTER_S = 120.0  # Slurm's KillWait is 30 s by default


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how a sweep runs. ``sweep_id`` and ``handed``, the number of earlier submissions, make names unique."""

    paths: SweepPaths
    journal: Journal
    programs: SweepPrograms
    sweep_id: str
    handed: int = 0
    settle_s: float = SETTLE_S


@dataclass(slots=True)
class SubmittedAttempt:
    """One attempt that was handed over, or is about to be. Times are CLOCK_MONOTONIC, in seconds.

    ``names``: of every submission. ``submitted``: the scheduler has answered, or may have taken it. ``asked``: it was
    told to end; ``killed``: for good. ``doubtful_s``: since when the scheduler and the files do not fit together.
    """

    job: SweepJob
    attempt: int
    files: AttemptFiles
    names: list[str] = field(default_factory=list)
    submitted: bool = False
    refused: bool = False
    listed: tuple[Listed, ...] = ()
    standing: AttemptPosition = field(default_factory=lambda: AttemptPosition("queued"))
    claim: AttemptClaim | None = None
    end: TaskEnd | None = None
    pace: Pace = field(default_factory=Pace)
    began_s: float | None = None
    asked: bool = False
    killed: bool = False
    doubtful_s: float | None = None

    def read(self) -> bool:
        """Reads what the task has left; returns whether that is new."""
        before = self.claim, self.end
        self.claim = self.files.claimed()
        self.end = self.files.end() if self.claim is not None else None
        return (self.claim, self.end) != before


class BatchEngine:
    """Runs the jobs of ``sweep`` through ``queue``. ``before``: attempts of earlier invocations that may be there.

    ``later``: does work in a thread.
    """

    def __init__(
        self,
        sweep: Sweep,
        queue: Scheduler,
        site: Site,
        say: Callable[[str], None],
        before: Mapping[str, Attempt],
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[Callable[[], Any]], Future[Any]] | None = None,
    ) -> None:
        self._sweep = sweep
        self._queue = queue
        self._site = site
        self._say = say
        self._clock = clock
        self._later = later or ThreadPoolExecutor(1, "queue").submit
        self._handed = site.handed
        self._given: dict[str, SubmittedAttempt] = {}
        self._to_submit: list[tuple[SubmittedAttempt, SubmittedWork]] = []
        self._asking: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None
        self._fresh = False  # something new is known
        self._looked_s, self._look_due_s, self._look_every_s = 0.0, 0.0, LOOK_EVERY_S
        self._files_due_s = self._shown_s = self._full_until_s = 0.0
        self._kill = False
        self._told: set[str] = set()
        for name, attempt in before.items():
            given = self._new(sweep.tracks[name].job, attempt.number)
            given.names, given.submitted = [*attempt.handed], True

    @property
    def unfinished(self) -> int:
        return len(self._given)

    @property
    def tick_s(self) -> float:
        if self._asking is not None or self._to_submit or self._fresh:
            return BUSY_TICK_S
        return min(TICK_S, max(BUSY_TICK_S, self._look_due_s - self._clock()))

    def close(self) -> None:
        if self._given:
            names = " ".join(sorted(name for each in self._given.values() for name in each.names))
            self._say(f"jobs of this sweep may still be in {self._queue.name}: {names}")

    def _new(self, job: SweepJob, attempt: int) -> SubmittedAttempt:
        given = SubmittedAttempt(job, attempt, AttemptFiles(self._site.paths.job(job.name), attempt))
        self._given[job.name] = given
        return given

    def _tell(self, about: str, text: str) -> None:
        """Says it, once until it is over."""
        if about not in self._told:
            self._told.add(about)
            self._say(text)

    def submit(self) -> None:
        while (job := self._sweep.next()) is not None:
            self._sweep.began(job)
            self._new(job, self._sweep.tracks[job.name].attempts)
        for given in self._given.values():
            if not given.names and (after := self._after(given.job)) is not None and not self._write(given, after):
                return

    def _after(self, job: SweepJob) -> tuple[str, ...] | None:
        """The numbers of the jobs that ``job`` needs and that have not succeeded yet; None while they are unknown."""
        numbers = []
        for name in job.needs:
            if self._sweep.tracks[name].state == "succeeded":
                continue
            standing = self._given[name].standing if name in self._given else AttemptPosition("absent")
            if standing.listed is None or standing.stands not in ("queued", "running"):
                return None
            numbers.append(standing.listed.number)
        return tuple(numbers)

    def _write(self, given: SubmittedAttempt, after: tuple[str, ...]) -> bool:
        """Writes an attempt down, in its script and in the journal, and queues it; returns False if that failed."""
        job, paths = given.job, self._site.paths
        name = work_name(job.group, self._site.sweep_id, self._handed + 1)
        work = SubmittedWork(name, job, paths.batch_script(name), paths.batch_output(name), after)
        try:
            for directory in (paths.batches, paths.bundles(job.name)):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = script(name, job, given.attempt, paths, self._site.programs, self._queue)
            replace_file(work.script, text, mode=0o600)
            self._site.journal.handed(job, given.attempt, name)
        except OSError as error:
            self._tell("disk", f"no job can be submitted now; colaunch keeps trying ({error.strerror or error})")
            return False
        self._told.discard("disk")
        self._handed += 1
        given.names.append(name)
        self._to_submit.append((given, work))
        return True

    def _advance(self) -> None:
        """Takes the answer to the last request, and makes the next one."""
        if self._asking is not None:
            future, answered = self._asking
            if not future.done():
                return
            self._asking = None
            answered(future)
        now, away = self._clock(), "away" in self._told
        submitting = self._to_submit and not away and not self._sweep.stopped and now >= self._full_until_s
        if not away and (numbers := self._to_cancel()):
            kill = self._kill
            self._asking = self._later(lambda: self._queue.cancel(numbers, kill=kill)), self._on_cancelled
        elif self._given and now >= self._look_due_s and (self._looked_s or not submitting):
            self._asking = self._later(self._queue.list), self._on_listed
        elif submitting:
            some, self._to_submit = self._to_submit[:AT_ONCE], self._to_submit[AT_ONCE:]
            self._asking = self._later(lambda: self._submitted(some)), lambda future: self._on_submitted(some, future)

    def _submitted(self, some: Sequence[tuple[SubmittedAttempt, SubmittedWork]]) -> list[str | QueueError]:
        """In the thread: submits until one fails; returns what came of each."""
        found: list[str | QueueError] = []
        for _, work in some:
            try:
                found.append(self._queue.submit(work))
            except QueueError as error:
                found.append(error)
                if error.passing or error.full:
                    break
        return found

    def _on_submitted(self, some: Sequence[tuple[SubmittedAttempt, SubmittedWork]], future: Future[Any]) -> None:
        answers: list[str | QueueError] = future.result()
        self._to_submit = [*some[len(answers) :], *self._to_submit]
        for (given, work), answer in zip(some, answers, strict=False):
            if isinstance(answer, str):
                given.submitted, given.doubtful_s = True, None
                given.standing = AttemptPosition("queued", Listed(work.name, answer, "queued"))
                self._say(f"{given.job.name}: submitted as job {answer}")
            elif answer.full:
                self._tell(
                    "full", f"{self._queue.name} takes no more jobs of this user now; colaunch keeps trying ({answer})"
                )
                self._full_until_s = self._clock() + FULL_PAUSE_S
                self._to_submit.insert(0, (given, work))
            elif answer.passing:  # it may have taken the job before its answer was lost: the next listing tells
                self._tell("away", f"{self._queue.name} does not answer; colaunch keeps trying ({answer})")
                given.submitted, given.doubtful_s = True, None
            else:
                self._say(f"{self._queue.name} refuses {given.job.name}: {answer}")
                given.submitted = given.refused = self._fresh = True
        self._look_due_s, self._look_every_s = self._looked_s + LOOK_EVERY_S, LOOK_EVERY_S

    def _on_cancelled(self, future: Future[Any]) -> None:
        self._look_due_s = 0.0
        try:
            future.result()
        except QueueError as error:
            if error.passing:
                for each in self._given.values():
                    each.asked = each.killed = False
                self._tell("away", f"{self._queue.name} does not answer; colaunch keeps trying ({error})")

    def _on_listed(self, future: Future[Any]) -> None:
        try:
            found: list[Listed] = future.result()
        except QueueError as error:
            self._look_due_s = self._clock() + LOOK_AT_MOST_S / 2
            self._tell(
                "away", f"{self._queue.name} does not answer; its jobs go on, and colaunch keeps asking ({error})"
            )
            return
        if "away" in self._told:
            self._told.discard("away")
            self._say(f"{self._queue.name} answers again")
        self._sort_in(found)
        self._fresh = True

    def _sort_in(self, listed: Iterable[Listed]) -> None:
        """Gives each attempt the jobs that were submitted for it, and sets the time of the next look."""
        by_name = {each.name: each for each in listed}
        changed = False
        for given in [each for each in self._given.values() if each.submitted]:
            own = tuple(by_name[name] for name in given.names if name in by_name)
            if not own or any(each.stage != "queued" for each in own):
                given.read()
            own = own or tuple(each for each in given.listed if each.stage == "ended")  # it is forgotten after a while
            changed |= own != given.listed
            given.listed = own
        self._look_every_s = LOOK_EVERY_S if changed else min(LOOK_AT_MOST_S, self._look_every_s * 1.25)
        self._looked_s = self._clock()
        self._look_due_s = self._looked_s + self._look_every_s

    def _read_files(self) -> None:
        """Finds out what the tasks have left: a begin makes us look at the scheduler, an end may need no look."""
        began_s = self._clock()
        if began_s < self._files_due_s:
            return
        for given in self._given.values():
            if given.submitted and given.read():
                self._fresh = True
                if given.end is None:
                    self._look_soon()
        now = self._clock()
        self._files_due_s = now + max(FILES_EVERY_S, (now - began_s) / FILES_SHARE)

    def _look_soon(self) -> None:
        self._look_due_s, self._look_every_s = min(self._look_due_s, self._looked_s + LOOK_EVERY_S), LOOK_EVERY_S

    def poll(self) -> Iterator[tuple[SweepJob, AttemptOutcome]]:
        self._advance()
        if self._sweep.stopped:
            self._withdraw()
        self._read_files()
        if not self._fresh:
            return
        self._fresh = False
        for given in [each for each in self._given.values() if each.submitted]:
            outcome = AttemptOutcome("failed", cause="refused") if given.refused else self._judge(given)
            if outcome is not None:
                self._forget(given)
                yield given.job, outcome
        self._advance()

    def _forget(self, given: SubmittedAttempt) -> None:
        del self._given[given.job.name]
        try:
            given.files.close()
        except OSError:
            pass  # a requeue by hand could run it again

    def _withdraw(self) -> None:
        """Takes back what the scheduler has not got yet."""
        if self._asking is None:
            self._to_submit.clear()
            for given in [each for each in self._given.values() if not each.submitted]:
                self._return(given, "cancelled", self._sweep.stopped)

    def _return(self, given: SubmittedAttempt, state: JobState, why: str) -> None:
        """It has not begun, and will not under this submission."""
        if state == "waiting":
            del self._given[given.job.name]
        else:
            self._forget(given)
            self._site.journal.ended(given.job.name, given.attempt, AttemptOutcome(state))
        self._sweep.returned(given.job.name, state, why)
        self._say(f"{given.job.name}: {state if state != 'waiting' else 'is submitted again'} ({why})")

    def _judge(self, given: SubmittedAttempt) -> AttemptOutcome | None:
        """The outcome of an attempt that has ended; None while it goes on, or where it never began."""
        before = given.standing
        standing = given.standing = judge(given.listed, given.claim, given.end)
        if standing.stands in ("queued", "running"):
            given.doubtful_s = None
            if standing.stands == "running" and (given.began_s is None or before.stands == "queued"):
                given.began_s = self._clock()
                self._say(f"{given.job.name}: started on {standing.listed.nodes if standing.listed else ''}")
            return None
        if standing.stands in ("absent", "unsettled"):
            given.doubtful_s = self._clock() if given.doubtful_s is None else given.doubtful_s
            if self._clock() - given.doubtful_s < self._site.settle_s:
                self._look_due_s = min(self._look_due_s, self._clock() + LOOK_EVERY_S)
                given.standing = replace(standing, listed=standing.listed or before.listed)
                return None
        if standing.stands == "absent":
            self._return(given, "waiting", f"{self._queue.name} does not know it")
        elif standing.stands == "hopeless":
            self._on_hopeless(given)
        elif given.claim is None and standing.listed is not None and standing.listed.word == "CANCELLED":
            self._return(given, "cancelled", "scancel")
        else:
            return self._outcome(given, standing)
        return None

    def _on_hopeless(self, given: SubmittedAttempt) -> None:
        needs = [self._sweep.tracks[name] for name in given.job.needs]
        lost = next((need for need in needs if need.is_final and need.state != "succeeded"), None)
        if lost is not None:
            self._return(given, "skipped", f"needs {lost.job.name}, which {was(lost)}")
        elif all(need.state == "succeeded" for need in needs):
            self._return(given, "waiting", f"{self._queue.name} gave its dependency up")

    def _outcome(self, given: SubmittedAttempt, standing: AttemptPosition) -> AttemptOutcome:
        claim, log = given.claim, self._site.paths.log(given.job.name, given.attempt)
        since_ns = int(claim.began_unix_s * 1e9) if claim is not None else time.time_ns()
        took_s = self._clock() - given.began_s if given.began_s is not None else 0.0
        end = standing.end
        if end is None:  # what can be known without it
            found = [path for path in self._site.paths.bundles_of(given.job.name) if modified_ns(path) >= since_ns]
            step, bundle = given.files.pace().step, newest(found)
            end = TaskEnd("", 0, 1, round(took_s, 3), last_step=step, bundle=bundle)
        verdict, cause = verdict_of(end.bundle)
        state, why = meaning(standing, verdict, self._queue, asked_by_us=given.asked, claimed=claim is not None)
        return AttemptOutcome(
            state=state,
            exit_code=end.exit_code if standing.end is not None else None,
            duration_s=end.duration_s,
            last_step=end.last_step,
            gpus=end.gpus,
            bundle=end.bundle,
            metrics=metrics.from_log(log, given.job.metrics, self._say),
            cause=(cause if state in ("hung", "failed") else "") or why or end.wrong,
        )

    def cancel(self, *, kill: bool) -> None:
        self._kill = self._kill or kill
        self._look_due_s = 0.0

    def _to_cancel(self) -> list[str]:
        """What has yet to be told to end: everything once the sweep is stopped, and submissions that are spare.

        Spare are those that wait for an attempt that another one runs, or has run.
        """
        found: list[str] = []
        for given in self._given.values():
            if self._sweep.stopped:
                alive = [each.number for each in given.listed if each.stage != "ended"]
                if alive and not (given.killed if self._kill else given.asked):
                    given.asked, given.killed = True, self._kill
                    found += alive
            elif given.claim is not None:
                claimed = given.claim.name
                spare = [each for each in given.listed if each.name != claimed and each.stage == "queued"]
                given.listed = tuple(each for each in given.listed if each not in spare)
                found += [each.number for each in spare]
        return found

    def look(self) -> dict[str, RunningAttempt]:
        now = self._clock()
        if now - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = now
            for given in self._given.values():
                if given.standing.stands == "running":
                    given.pace = given.files.pace()
        return {name: self._live(given, now) for name, given in self._given.items()}

    def _live(self, given: SubmittedAttempt, now: float) -> RunningAttempt:
        listed = given.standing.listed
        if given.standing.stands == "queued" or given.began_s is None:
            return RunningAttempt(stopping=given.asked, queued_for=listed.reason if listed is not None else "")
        nodes = listed.nodes if listed is not None else ""
        return RunningAttempt(nodes, given.pace.master_port, (), now - given.began_s, given.pace, given.asked)
