"""Submits jobs to a scheduler, follows them, and cancels them.

A job is recorded before it is submitted, under a name by which the scheduler can find it. Its task starts by claiming
the attempt with a file (``task``). So a job runs only once even if it was submitted twice, because colaunch was killed
or the scheduler's answer was unclear. If colaunch is killed, jobs stay with the scheduler, and ``--resume`` finds them
there.
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
from safelaunch.addons.sweep.position import AttemptPosition, final_state, judge
from safelaunch.addons.sweep.scheduler import ListedJob, QueueError, Scheduler, SubmittedWork
from safelaunch.addons.sweep.sweep import Sweep, ending
from safelaunch.system.files import modified_ns, replace_file

TICK_S, BUSY_TICK_S = 0.25, 0.05
LIST_EVERY_S, LIST_AT_MOST_S = 1.0, 10.0
# The files change sooner than the scheduler's list. Poll them for at most this share of the time.
FILES_EVERY_S, FILES_SHARE = 0.25, 0.05
SETTLE_S = 15.0  # a network disk can take a while to show another node's file
FULL_PAUSE_S = 15.0
SHOW_EVERY_S = 2.0
AT_ONCE = 16  # submissions in one request


@dataclass(frozen=True, slots=True)
class Site:
    paths: SweepPaths
    journal: Journal
    programs: SweepPrograms
    sweep_id: str
    handed: int = 0  # earlier submissions; with sweep_id, makes names unique
    settle_s: float = SETTLE_S


@dataclass(slots=True)
class SubmittedAttempt:
    """One attempt. Times are CLOCK_MONOTONIC, in seconds."""

    job: SweepJob
    number: int
    files: AttemptFiles
    names: list[str] = field(default_factory=list)  # one name for each submission
    submitted: bool = False  # the scheduler has answered, or might have taken it
    refused: bool = False
    listed: tuple[ListedJob, ...] = ()
    position: AttemptPosition = field(default_factory=lambda: AttemptPosition("queued"))
    claim: AttemptClaim | None = None
    end: TaskEnd | None = None
    pace: Pace = field(default_factory=Pace)
    began_s: float | None = None
    asked: bool = False
    killed: bool = False
    doubtful_s: float | None = None  # when the scheduler and the files first disagreed

    def read(self) -> bool:
        before = self.claim, self.end
        self.claim = self.files.read_claim()
        self.end = self.files.read_end() if self.claim is not None else None
        return (self.claim, self.end) != before


class BatchEngine:
    """Runs the jobs of ``sweep`` through the scheduler ``queue``.

    Args:
        before: Earlier attempts that the scheduler might still have.
        later: Runs a function in a thread.
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
        self._submissions = site.handed
        self._attempts: dict[str, SubmittedAttempt] = {}
        self._to_submit: list[tuple[SubmittedAttempt, SubmittedWork]] = []
        self._request: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None
        self._has_news = False
        self._listed_s, self._list_due_s, self._list_every_s = 0.0, 0.0, LIST_EVERY_S
        self._files_due_s = self._shown_s = self._full_until_s = 0.0
        self._kill = False
        self._reported: set[str] = set()
        for name, attempt in before.items():
            submitted = self._new(sweep.tracks[name].job, attempt.number)
            submitted.names, submitted.submitted = [*attempt.handed], True

    @property
    def unfinished(self) -> int:
        return len(self._attempts)

    @property
    def tick_s(self) -> float:
        if self._request is not None or self._to_submit or self._has_news:
            return BUSY_TICK_S
        return min(TICK_S, max(BUSY_TICK_S, self._list_due_s - self._clock()))

    def close(self) -> None:
        if self._attempts:
            names = " ".join(sorted(name for each in self._attempts.values() for name in each.names))
            self._say(f"jobs of this sweep might still be in {self._queue.name}: {names}")

    def _new(self, job: SweepJob, number: int) -> SubmittedAttempt:
        attempt = SubmittedAttempt(job, number, AttemptFiles(self._site.paths.job(job.name), number))
        self._attempts[job.name] = attempt
        return attempt

    def _say_once(self, about: str, text: str) -> None:
        if about not in self._reported:
            self._reported.add(about)
            self._say(text)

    def submit(self) -> None:
        while (job := self._sweep.next()) is not None:
            self._sweep.mark_started(job)
            self._new(job, self._sweep.tracks[job.name].attempts)
        for attempt in self._attempts.values():
            if (
                not attempt.names
                and (after := self._after(attempt.job)) is not None
                and not self._write(attempt, after)
            ):
                return

    def _after(self, job: SweepJob) -> tuple[str, ...] | None:
        """Returns the scheduler's numbers of unfinished jobs that ``job`` depends on; None while one is unknown."""
        numbers = []
        for name in job.needs:
            if self._sweep.tracks[name].state == "succeeded":
                continue
            position = self._attempts[name].position if name in self._attempts else AttemptPosition("absent")
            if position.listed is None or position.stage not in ("queued", "running"):
                return None
            numbers.append(position.listed.number)
        return tuple(numbers)

    def _write(self, attempt: SubmittedAttempt, after: tuple[str, ...]) -> bool:
        """Writes the script and the journal record, then queues the submission; returns False if writing failed."""
        job, paths = attempt.job, self._site.paths
        name = work_name(job.group, self._site.sweep_id, self._submissions + 1)
        work = SubmittedWork(name, job, paths.batch_script(name), paths.batch_output(name), after)
        try:
            for directory in (paths.batches, paths.bundles(job.name)):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = script(name, job, attempt.number, paths, self._site.programs, self._queue)
            replace_file(work.script, text, mode=0o600)
            self._site.journal.record_submission(job, attempt.number, name)
        except OSError as error:
            self._say_once("disk", f"no job can be submitted now; colaunch keeps trying ({error.strerror or error})")
            return False
        self._reported.discard("disk")
        self._submissions += 1
        attempt.names.append(name)
        self._to_submit.append((attempt, work))
        return True

    def _advance(self) -> None:
        if self._request is not None:
            future, answered = self._request
            if not future.done():
                return
            self._request = None
            answered(future)
        now, away = self._clock(), "away" in self._reported
        submitting = self._to_submit and not away and not self._sweep.stopped and now >= self._full_until_s
        if not away and (numbers := self._to_cancel()):
            kill = self._kill
            self._request = self._later(lambda: self._queue.cancel(numbers, kill=kill)), self._on_cancelled
        elif self._attempts and now >= self._list_due_s and (self._listed_s or not submitting):
            self._request = self._later(self._queue.list), self._on_listed
        elif submitting:
            some, self._to_submit = self._to_submit[:AT_ONCE], self._to_submit[AT_ONCE:]
            self._request = (
                self._later(lambda: self._submit_some(some)),
                lambda future: self._on_submitted(some, future),
            )

    def _submit_some(self, some: Sequence[tuple[SubmittedAttempt, SubmittedWork]]) -> list[str | QueueError]:
        """Submits work until the scheduler is unavailable; returns the scheduler's answers. Runs in a thread."""
        answers: list[str | QueueError] = []
        for _, work in some:
            try:
                answers.append(self._queue.submit(work))
            except QueueError as error:
                answers.append(error)
                if error.passing or error.full:
                    break
        return answers

    def _on_submitted(self, some: Sequence[tuple[SubmittedAttempt, SubmittedWork]], future: Future[Any]) -> None:
        answers: list[str | QueueError] = future.result()
        self._to_submit = [*some[len(answers) :], *self._to_submit]
        for (attempt, work), answer in zip(some, answers, strict=False):
            if isinstance(answer, str):
                attempt.submitted, attempt.doubtful_s = True, None
                attempt.position = AttemptPosition("queued", ListedJob(work.name, answer, "queued"))
                self._say(f"{attempt.job.name}: submitted as job {answer}")
            elif answer.full:
                self._say_once(
                    "full", f"{self._queue.name}'s per-user job limit is reached; colaunch will keep trying ({answer})"
                )
                self._full_until_s = self._clock() + FULL_PAUSE_S
                self._to_submit.insert(0, (attempt, work))
            elif answer.passing:  # it might have taken the job and its answer was lost: the next listing shows
                self._say_once("away", f"{self._queue.name} doesn't respond; colaunch keeps trying ({answer})")
                attempt.submitted, attempt.doubtful_s = True, None
            else:
                self._say(f"{self._queue.name} refuses {attempt.job.name}: {answer}")
                attempt.submitted = attempt.refused = self._has_news = True
        self._list_due_s, self._list_every_s = self._listed_s + LIST_EVERY_S, LIST_EVERY_S

    def _on_cancelled(self, future: Future[Any]) -> None:
        self._list_due_s = 0.0
        try:
            future.result()
        except QueueError as error:
            if error.passing:
                for each in self._attempts.values():
                    each.asked = each.killed = False
                self._say_once("away", f"{self._queue.name} doesn't respond; colaunch keeps trying ({error})")

    def _on_listed(self, future: Future[Any]) -> None:
        try:
            listed: list[ListedJob] = future.result()
        except QueueError as error:
            self._list_due_s = self._clock() + LIST_AT_MOST_S / 2
            self._say_once(
                "away", f"{self._queue.name} doesn't respond; its jobs continue, and colaunch keeps asking ({error})"
            )
            return
        if "away" in self._reported:
            self._reported.discard("away")
            self._say(f"{self._queue.name} responds again")
        self._assign(listed)
        self._has_news = True

    def _assign(self, listed: Iterable[ListedJob]) -> None:
        by_name = {each.name: each for each in listed}
        changed = False
        for attempt in [each for each in self._attempts.values() if each.submitted]:
            own = tuple(by_name[name] for name in attempt.names if name in by_name)
            if not own or any(each.stage != "queued" for each in own):
                attempt.read()
            own = own or tuple(
                each for each in attempt.listed if each.stage == "ended"
            )  # the scheduler forgets an ended job after a while
            changed |= own != attempt.listed
            attempt.listed = own
        self._list_every_s = LIST_EVERY_S if changed else min(LIST_AT_MOST_S, self._list_every_s * 1.25)
        self._listed_s = self._clock()
        self._list_due_s = self._listed_s + self._list_every_s

    def _read_files(self) -> None:
        """Reads the files of all tasks. After a new claim, lists jobs soon; an end might make that unnecessary."""
        began_s = self._clock()
        if began_s < self._files_due_s:
            return
        for attempt in self._attempts.values():
            if attempt.submitted and attempt.read():
                self._has_news = True
                if attempt.end is None:
                    self._list_soon()
        now = self._clock()
        self._files_due_s = now + max(FILES_EVERY_S, (now - began_s) / FILES_SHARE)

    def _list_soon(self) -> None:
        self._list_due_s, self._list_every_s = min(self._list_due_s, self._listed_s + LIST_EVERY_S), LIST_EVERY_S

    def poll(self) -> Iterator[tuple[SweepJob, AttemptOutcome]]:
        self._advance()
        if self._sweep.stopped:
            self._withdraw()
        self._read_files()
        if not self._has_news:
            return
        self._has_news = False
        for attempt in [each for each in self._attempts.values() if each.submitted]:
            outcome = AttemptOutcome("failed", cause="refused") if attempt.refused else self._judge(attempt)
            if outcome is not None:
                self._forget(attempt)
                yield attempt.job, outcome
        self._advance()

    def _forget(self, attempt: SubmittedAttempt) -> None:
        del self._attempts[attempt.job.name]
        try:
            attempt.files.close()
        except OSError:
            pass  # at worst, a manual requeue runs it again

    def _withdraw(self) -> None:
        if self._request is None:
            self._to_submit.clear()
            for attempt in [each for each in self._attempts.values() if not each.submitted]:
                self._give_back(attempt, "cancelled", self._sweep.stopped)

    def _give_back(self, attempt: SubmittedAttempt, state: JobState, why: str) -> None:
        if state == "waiting":
            del self._attempts[attempt.job.name]
        else:
            self._forget(attempt)
            self._site.journal.record_end(attempt.job.name, attempt.number, AttemptOutcome(state))
        self._sweep.put_back(attempt.job.name, state, why)
        self._say(f"{attempt.job.name}: {state if state != 'waiting' else 'will be submitted again'} ({why})")

    def _judge(self, attempt: SubmittedAttempt) -> AttemptOutcome | None:
        """Returns the outcome of an attempt that has ended; None if it is active or never started."""
        before = attempt.position
        position = attempt.position = judge(attempt.listed, attempt.claim, attempt.end)
        if position.stage in ("queued", "running"):
            attempt.doubtful_s = None
            if position.stage == "running" and (attempt.began_s is None or before.stage == "queued"):
                attempt.began_s = self._clock()
                self._say(f"{attempt.job.name}: started on {position.listed.nodes if position.listed else ''}")
            return None
        if position.stage in ("absent", "unsettled"):
            attempt.doubtful_s = self._clock() if attempt.doubtful_s is None else attempt.doubtful_s
            if self._clock() - attempt.doubtful_s < self._site.settle_s:
                self._list_due_s = min(self._list_due_s, self._clock() + LIST_EVERY_S)
                attempt.position = replace(position, listed=position.listed or before.listed)
                return None
        if position.stage == "absent":
            self._give_back(attempt, "waiting", f"{self._queue.name} has no record of it")
        elif position.stage == "hopeless":
            self._on_hopeless(attempt)
        elif attempt.claim is None and position.listed is not None and position.listed.word == "CANCELLED":
            self._give_back(attempt, "cancelled", "scancel")
        else:
            return self._outcome(attempt, position)
        return None

    def _on_hopeless(self, attempt: SubmittedAttempt) -> None:
        needs = [self._sweep.tracks[name] for name in attempt.job.needs]
        lost = next((need for need in needs if need.is_final and need.state != "succeeded"), None)
        if lost is not None:
            self._give_back(attempt, "skipped", f"needs {lost.job.name}, which {ending(lost)}")
        elif all(need.state == "succeeded" for need in needs):
            self._give_back(attempt, "waiting", f"{self._queue.name} dropped its dependency")

    def _outcome(self, attempt: SubmittedAttempt, position: AttemptPosition) -> AttemptOutcome:
        claim, log = attempt.claim, self._site.paths.log(attempt.job.name, attempt.number)
        since_ns = int(claim.began_unix_s * 1e9) if claim is not None else time.time_ns()
        took_s = self._clock() - attempt.began_s if attempt.began_s is not None else 0.0
        end = position.end
        if end is None:  # the task left no end: derive what can be derived
            bundles = [path for path in self._site.paths.bundles_of(attempt.job.name) if modified_ns(path) >= since_ns]
            step, bundle = attempt.files.read_pace().step, newest(bundles)
            end = TaskEnd("", 0, 1, round(took_s, 3), last_step=step, bundle=bundle)
        verdict, cause = verdict_of(end.bundle)
        state, why = final_state(position, verdict, self._queue, asked_by_us=attempt.asked, claimed=claim is not None)
        return AttemptOutcome(
            state=state,
            exit_code=end.exit_code if position.end is not None else None,
            duration_s=end.duration_s,
            last_step=end.last_step,
            gpus=end.gpus,
            bundle=end.bundle,
            metrics=metrics.from_log(log, attempt.job.metrics, self._say),
            cause=(cause if state in ("hung", "failed") else "") or why or end.wrong,
        )

    def cancel(self, *, kill: bool) -> None:
        self._kill = self._kill or kill
        self._list_due_s = 0.0

    def _to_cancel(self) -> list[str]:
        """Returns the jobs to cancel: all once the sweep is stopped; before that, duplicates of a running attempt."""
        numbers: list[str] = []
        for attempt in self._attempts.values():
            if self._sweep.stopped:
                alive = [each.number for each in attempt.listed if each.stage != "ended"]
                if alive and not (attempt.killed if self._kill else attempt.asked):
                    attempt.asked, attempt.killed = True, self._kill
                    numbers += alive
            elif attempt.claim is not None:
                claimed = attempt.claim.name
                spare = [each for each in attempt.listed if each.name != claimed and each.stage == "queued"]
                attempt.listed = tuple(each for each in attempt.listed if each not in spare)
                numbers += [each.number for each in spare]
        return numbers

    def look(self) -> dict[str, RunningAttempt]:
        now = self._clock()
        if now - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = now
            for attempt in self._attempts.values():
                if attempt.position.stage == "running":
                    attempt.pace = attempt.files.read_pace()
        return {name: self._running(attempt, now) for name, attempt in self._attempts.items()}

    def _running(self, attempt: SubmittedAttempt, now: float) -> RunningAttempt:
        listed = attempt.position.listed
        if attempt.position.stage == "queued" or attempt.began_s is None:
            return RunningAttempt(stopping=attempt.asked, queued_for=listed.reason if listed is not None else "")
        nodes = listed.nodes if listed is not None else ""
        return RunningAttempt(nodes, attempt.pace.master_port, (), now - attempt.began_s, attempt.pace, attempt.asked)
