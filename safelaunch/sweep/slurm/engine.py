"""The Slurm engine: hands jobs over, follows them, and cancels them.

A job is written down before sbatch gets it, under a name that finds it in squeue again; and it claims its attempt by a
file before it does anything (``claims``). So it may be submitted twice, after a kill or an unclear answer, and still
runs once. Jobs stay with Slurm if colaunch is killed; ``--resume`` finds them there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safelaunch.sweep import metrics
from safelaunch.sweep.bundles import newest, verdict_of
from safelaunch.sweep.engine import Ended
from safelaunch.sweep.jobs import Job, Metric, Outcome, Pace, State
from safelaunch.sweep.journal import Handed, Journal
from safelaunch.sweep.paths import SweepPaths
from safelaunch.sweep.slurm.claims import AttemptFiles, Claim, End
from safelaunch.sweep.slurm.judge import QUEUED, Listed, Standing, judge, spare, state_of
from safelaunch.sweep.slurm.queue import Slurm, SlurmError
from safelaunch.sweep.slurm.script import Attempt, Batch, Programs, alike, batch_name, command, script
from safelaunch.sweep.sweep import Sweep, was
from safelaunch.sweep.view import JobView

TICK_S, BUSY_TICK_S = 0.25, 0.05
LOOK_EVERY_S, LOOK_AT_MOST_S = 1.0, 10.0
# The files tell of begins and ends sooner than squeue, for this part of the time at most.
FILES_EVERY_S, FILES_SHARE = 0.25, 0.05
# A network disk may show a file of another node only after a while.
SETTLE_S = 15.0
FULL_PAUSE_S = 15.0
SHOW_EVERY_S = 2.0
# What the metrics of running jobs may cost: the end of a few jobs' output at a time, each now and then.
MEASURE_EVERY_S, MEASURE_AT_ONCE, NEWEST_BYTES, MEASURE_CPU_S = 5.0, 8, 64 << 10, 0.1


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how a sweep runs. ``sweep_id`` and ``batches``, the number of earlier ones, make names unique."""

    paths: SweepPaths
    journal: Journal
    slurm: Slurm
    programs: Programs
    sweep_id: str
    batches: int = 0
    largest_array: int = 0
    settle_s: float = SETTLE_S


@dataclass(slots=True)
class Given:
    """One attempt that was handed over, or is about to be. Times are CLOCK_MONOTONIC, in seconds.

    ``known_as``: batch and task, of every submission. ``submitted``: sbatch has answered, or may have. ``asked``: it
    was told to end; ``killed``: for good. ``doubtful_s``: since when squeue and the files do not fit together.
    """

    job: Job
    attempt: int
    files: AttemptFiles
    known_as: list[tuple[str, int]] = field(default_factory=list)
    submitted: bool = False
    listed: tuple[Listed, ...] = ()
    standing: Standing = field(default_factory=lambda: Standing("queued"))
    claim: Claim | None = None
    end: End | None = None
    pace: Pace = field(default_factory=Pace)
    metrics: dict[str, Metric] = field(default_factory=dict)
    measured_s: float = 0.0
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

    @property
    def address(self) -> str:
        """What a dependency calls it; empty while that is unknown."""
        return self.standing.listed.address if self.standing.listed is not None else ""


class SlurmEngine:
    """Runs the jobs of ``sweep`` through Slurm. ``before``: attempts of earlier invocations that may still be there."""

    kind = "Slurm"

    def __init__(
        self,
        sweep: Sweep,
        site: Site,
        say: Callable[[str], None],
        before: Mapping[str, tuple[int, Sequence[Handed]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sweep = sweep
        self._site = site
        self._say = say
        self._clock = clock
        self._batches = site.batches
        self._given: dict[str, Given] = {}
        self._held: list[tuple[Attempt, ...]] = []
        self._to_submit: list[Batch] = []
        self._working: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None
        self._fresh = False  # a listing has come in
        self._look_due_s, self._look_every_s = 0.0, LOOK_EVERY_S
        self._looked_s = self._files_due_s = 0.0
        self._full_until_s = 0.0
        self._kill = False
        self._told: set[str] = set()
        self._shown_s = 0.0
        for name, (number, handed) in before.items():
            given = self._new(Attempt(sweep.tracks[name].job, number))
            given.known_as, given.submitted = [(each.batch, each.task) for each in handed], True

    @property
    def unfinished(self) -> int:
        return len(self._given)

    @property
    def tick_s(self) -> float:
        if self._working is not None or self._to_submit or self._fresh:
            return BUSY_TICK_S
        return min(TICK_S, max(BUSY_TICK_S, self._look_due_s - self._clock()))

    def log(self, name: str, attempt: int) -> Path:
        return self._site.paths.log(name, attempt)

    def close(self) -> None:
        if self._given:
            names = ",".join(sorted({batch for each in self._given.values() for batch, _ in each.known_as}))
            self._say(f"jobs of this sweep may still be in Slurm: scancel --name={names}")

    def _new(self, attempt: Attempt) -> Given:
        job = attempt.job
        given = Given(job, attempt.number, AttemptFiles(self._site.paths.job(job.name), attempt.number))
        self._given[job.name] = given
        return given

    # --- handing over -----------------------------------------------------------------------------------------------

    def submit(self) -> None:
        started: list[Attempt] = []
        while (job := self._sweep.next()) is not None:
            self._sweep.began(job)
            attempt = Attempt(job, self._sweep.tracks[job.name].attempts)
            self._new(attempt)
            started.append(attempt)
        self._held += alike(started, max(1, min(self._site.largest_array, 500)))
        for group in list(self._held):
            needs = self._needs(group[0].job)
            if needs is not None and self._write(group, needs):
                self._held.remove(group)

    def _needs(self, job: Job) -> tuple[str, ...] | None:
        """What Slurm calls the jobs that ``job`` needs and that have not succeeded yet; None while that is unknown."""
        addresses = []
        for name in job.needs:
            if self._sweep.tracks[name].state == "succeeded":
                continue
            given = self._given.get(name)
            if given is None or not given.address or given.standing.stands not in ("queued", "running"):
                return None
            addresses.append(given.address)
        return tuple(addresses)

    def _write(self, group: tuple[Attempt, ...], needs: tuple[str, ...]) -> bool:
        """Writes a batch down, in its script and in the journal, and queues it for sbatch."""
        self._batches += 1
        batch = Batch(batch_name(group[0].job.group, self._site.sweep_id, self._batches), group, needs)
        paths = self._site.paths
        try:
            paths.batches.mkdir(mode=0o700, parents=True, exist_ok=True)
            for each in group:
                paths.bundles(each.job.name).mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_private(paths.batch_script(batch.name), script(batch, paths, self._site.programs))
            self._site.journal.handed(batch.name, [(each.job, each.number) for each in group])
        except OSError as error:
            self._tell("disk", f"no job can be submitted now; colaunch keeps trying ({error.strerror or error})")
            return False
        self._told.discard("disk")
        self._to_submit.append(batch)
        for task, each in enumerate(group):
            self._given[each.job.name].known_as.append((batch.name, task))
        return True

    def _tell(self, about: str, text: str) -> None:
        """Says it, once until it is over."""
        if about not in self._told:
            self._told.add(about)
            self._say(text)

    # --- one request to Slurm at a time -----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Takes the answer to the last request, and makes the next one."""
        if self._working is not None:
            future, done = self._working
            if not future.done():
                return
            self._working = None
            done(future)
        slurm, now = self._site.slurm, self._clock()
        wanted = self._to_cancel()
        if wanted and "away" not in self._told:
            kill = self._kill
            self._working = slurm.later(lambda: slurm.cancel(wanted, kill=kill)), self._on_cancelled
        elif self._to_submit and now >= self._full_until_s and not self._sweep.stopped and "away" not in self._told:
            batch = self._to_submit.pop(0)
            words = command(batch, os.fspath(self._site.paths.batch_script(batch.name)))
            given = [word[2:].partition("=")[0] for word in batch.attempts[0].job.batch]
            work = slurm.later(lambda: slurm.submit(words, given))
            self._working = work, lambda future: self._on_submitted(batch, future)
        elif self._given and now >= self._look_due_s:
            self._working = slurm.later(slurm.listed), self._on_listed

    def _on_submitted(self, batch: Batch, future: Future[Any]) -> None:
        mine = [self._given[each.job.name] for each in batch.attempts]
        self._look_due_s, self._look_every_s = 0.0, LOOK_EVERY_S
        try:
            number = str(future.result())
        except SlurmError as error:
            if error.full:
                self._on_full(batch, error)
                return
            if not error.passing:
                self._refused(mine, error)
                return
            self._tell("away", f"Slurm does not answer; colaunch keeps trying ({error})")
            number = ""  # it may have taken the job before its answer was lost: the next listing tells
        for task, each in enumerate(mine):
            each.submitted, each.doubtful_s = True, None
            if number:
                address = f"{number}_{task}" if batch.is_array else number
                name = batch.name
                each.standing = Standing("queued", Listed(name, task, number, address, "PENDING"))
                self._say(f"{each.job.name}: submitted as job {address}")

    def _on_full(self, batch: Batch, error: SlurmError) -> None:
        """The user may not have so many jobs at a time: smaller arrays may fit, or there is room later."""
        self._tell("full", f"Slurm takes no more jobs of this user now; colaunch keeps trying ({error})")
        self._full_until_s = self._clock() + FULL_PAUSE_S
        half = len(batch.attempts) // 2
        if half:
            self._held += [batch.attempts[:half], batch.attempts[half:]]
        else:
            self._to_submit.append(batch)

    def _refused(self, given: Sequence[Given], error: SlurmError) -> None:
        self._say(f"Slurm refuses {', '.join(each.job.name for each in given[:4])}: {error}")
        for each in given:
            each.submitted, each.standing = True, Standing("ended", Listed("", 0, "", "", "REFUSED"))
        self._fresh = True

    def _on_cancelled(self, future: Future[Any]) -> None:
        self._look_due_s = 0.0
        try:
            future.result()
        except SlurmError as error:
            if error.passing:
                for each in self._given.values():
                    each.asked = each.killed = False
                self._tell("away", f"Slurm does not answer; colaunch keeps trying ({error})")

    def _on_listed(self, future: Future[Any]) -> None:
        try:
            found = future.result()
        except SlurmError as error:
            self._look_due_s = self._clock() + min(5.0, LOOK_AT_MOST_S)
            self._tell("away", f"Slurm does not answer; its jobs go on, and colaunch keeps asking ({error})")
            return
        assert isinstance(found, list)
        if "away" in self._told:
            self._told.discard("away")
            self._say("Slurm answers again")
        self._sort_in(found)
        self._fresh = True

    def _sort_in(self, listed: Iterable[Listed]) -> None:
        """Gives each attempt the jobs that were submitted for it, and sets the time of the next look."""
        by_name: dict[tuple[str, int], list[Listed]] = {}
        by_address: dict[str, Listed] = {}
        for each in listed:
            by_name.setdefault((each.name, each.task), []).append(each)
            by_address.setdefault(each.address, each)
        changed = False
        for given in self._given.values():
            if not given.submitted:
                continue
            own = [each for place in given.known_as for each in by_name.get(place, ())]
            if any(each.state not in QUEUED for each in own) or not own:
                given.read()
            claimant = by_address.get(given.claim.place) if given.claim is not None else None
            if claimant is not None and claimant not in own:
                own.append(claimant)
            own = own or [each for each in given.listed if each.is_final]  # Slurm forgets them after a while
            changed |= tuple(own) != given.listed
            given.listed = tuple(own)
        self._look_every_s = LOOK_EVERY_S if changed else min(LOOK_AT_MOST_S, self._look_every_s * 1.25)
        self._looked_s = self._clock()
        self._look_due_s = self._looked_s + self._look_every_s

    def _read_files(self) -> None:
        """Finds out what the tasks have left: a begin makes us look at Slurm, an end may need no look."""
        began_s = self._clock()
        if began_s < self._files_due_s:
            return
        for given in self._given.values():
            if given.submitted and given.read():
                self._fresh = True
                if given.end is None:
                    self._look_due_s, self._look_every_s = (
                        min(self._look_due_s, self._looked_s + LOOK_EVERY_S),
                        LOOK_EVERY_S,
                    )
        now = self._clock()
        self._files_due_s = now + max(FILES_EVERY_S, (now - began_s) / FILES_SHARE)

    # --- how they end -----------------------------------------------------------------------------------------------

    def poll(self) -> Iterator[Ended]:
        self._advance()
        if self._sweep.stopped:
            self._withdraw()
        self._read_files()
        if not self._fresh:
            return
        self._fresh = False
        for given in list(self._given.values()):
            if given.submitted and given.standing.listed is not None and given.standing.listed.state == "REFUSED":
                yield self._ended(given, Outcome("failed", cause="refused"))
            elif given.submitted and (outcome := self._judge(given)) is not None:
                yield self._ended(given, outcome)
        self._advance()

    def _ended(self, given: Given, outcome: Outcome) -> Ended:
        del self._given[given.job.name]
        try:
            given.files.close()
        except OSError:
            pass  # a requeue by hand could run it again
        return Ended(given.job, given.attempt, outcome)

    def _withdraw(self) -> None:
        """Takes back what sbatch has not got yet."""
        self._held.clear()
        self._to_submit.clear()
        for given in [each for each in self._given.values() if not each.submitted]:
            if self._working is None:
                self._return(given, "cancelled", self._sweep.stopped)

    def _return(self, given: Given, state: State, why: str) -> None:
        """It has not begun, and will not under this submission."""
        del self._given[given.job.name]
        if state != "waiting":
            try:
                given.files.close()
            except OSError:
                pass
            self._site.journal.ended(given.job.name, given.attempt, Outcome(state))
        self._sweep.returned(given.job.name, state, why)
        self._say(f"{given.job.name}: {state if state != 'waiting' else 'is submitted again'} ({why})")

    def _judge(self, given: Given) -> Outcome | None:
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
                if before.listed is not None:
                    given.standing = replace(standing, listed=standing.listed or before.listed)
                return None
        if standing.stands == "absent":
            self._return(given, "waiting", "Slurm does not know it")
            return None
        if standing.stands == "never-satisfied":
            self._on_never_satisfied(given)
            return None
        if given.claim is None and standing.listed is not None and standing.listed.state == "CANCELLED":
            self._return(given, "cancelled", "scancel")
            return None
        return self._outcome(given, standing)

    def _on_never_satisfied(self, given: Given) -> None:
        needs = [self._sweep.tracks[name] for name in given.job.needs]
        lost = next((need for need in needs if need.is_final and need.state != "succeeded"), None)
        if lost is not None:
            self._return(given, "skipped", f"needs {lost.job.name}, which {was(lost)}")
        elif all(need.state == "succeeded" for need in needs):
            self._return(given, "waiting", "Slurm gave its dependency up")

    def _outcome(self, given: Given, standing: Standing) -> Outcome:
        end, claim = standing.end, given.claim
        bundles = self._site.paths.bundles_of(given.job.name)
        since_ns = int(claim.began_unix_s * 1e9) if claim is not None else time.time_ns()
        found = [path for path in bundles if end is None and _modified_ns(path) >= since_ns]
        bundle = end.bundle if end is not None else newest(found)
        verdict, cause = verdict_of(bundle)
        state, why = state_of(standing, verdict, asked_by_us=given.asked, claimed=claim is not None)
        elapsed_s = self._clock() - given.began_s if given.began_s is not None else 0.0
        return Outcome(
            state=state,
            exit_code=end.exit_code if end is not None else None,
            duration_s=end.duration_s if end is not None else round(elapsed_s, 3),
            last_step=end.last_step if end is not None else given.files.pace().step,
            gpus=end.gpus if end is not None else (),
            bundle=bundle,
            metrics=metrics.from_log(self.log(given.job.name, given.attempt), given.job.metrics, self._say),
            cause=(cause if state in ("hung", "failed") else "") or why or (end.wrong if end is not None else ""),
        )

    # --- stopping ---------------------------------------------------------------------------------------------------

    def cancel(self, *, kill: bool) -> None:
        self._kill = self._kill or kill
        self._look_due_s = 0.0

    def _to_cancel(self) -> list[str]:
        """What scancel has yet to be told of: everything once the sweep is stopped, and spare submissions."""
        found = []
        for given in self._given.values():
            alive = [each for each in given.listed if not each.is_final]
            if self._sweep.stopped and alive and not (given.killed if self._kill else given.asked):
                given.asked, given.killed = True, self._kill
                found += [each.address for each in alive]
            elif not self._sweep.stopped:
                spares = [each.address for each in spare(given.listed, given.claim)]
                found += spares
                given.listed = tuple(each for each in given.listed if each.address not in spares)
        return found

    # --- what is seen of it -----------------------------------------------------------------------------------------

    def look(self) -> None:
        now = self._clock()
        if now - self._shown_s < SHOW_EVERY_S:
            return
        self._shown_s = now
        for given in self._given.values():
            if given.standing.stands == "running":
                given.pace = given.files.pace()
        due = [each for each in self._given.values() if each.standing.stands == "running" and each.job.metrics]
        due = [each for each in due if now - each.measured_s >= MEASURE_EVERY_S]
        for given in sorted(due, key=lambda each: each.measured_s)[:MEASURE_AT_ONCE]:
            given.measured_s = now
            log = self.log(given.job.name, given.attempt)
            found = metrics.from_log(log, given.job.metrics, lambda _: None, NEWEST_BYTES, MEASURE_CPU_S)
            given.metrics = {**given.metrics, **found}

    def so_far(self) -> dict[str, Outcome]:
        return {name: self._so_far(given) for name, given in self._given.items()}

    def _so_far(self, given: Given) -> Outcome:
        if given.standing.stands == "queued" or given.began_s is None:
            return Outcome("waiting")
        elapsed_s = round(self._clock() - given.began_s, 3)
        return Outcome("running", duration_s=elapsed_s, last_step=given.pace.step, metrics=given.metrics)

    def view(self, name: str) -> JobView:
        track, given = self._sweep.tracks[name], self._given.get(name)
        if given is None:
            return JobView(track.job, track.state, track.attempts, track.why, outcome=track.outcome)
        listed, pace = given.standing.listed, given.pace
        if given.standing.stands == "queued" or given.began_s is None:
            reason = listed.reason if listed is not None and listed.reason != "None" else ""
            why = "stopping" if given.asked else "queued"
            return JobView(track.job, "waiting", track.attempts, why, outcome=track.outcome, cause=reason)
        return JobView(
            track.job,
            "running",
            track.attempts,
            "stopping" if given.asked else "",
            listed.nodes if listed is not None else "",
            pace.master_port,
            pace.step,
            pace.steps_per_s,
            self._clock() - given.began_s,
            track.outcome,
            age_s=pace.age_s,
            quiet=pace.quiet,
            cause=pace.cause,
            wrong=pace.wrong,
            metrics=given.metrics,
        )


def _write_private(path: Path, text: str) -> None:
    """Writes a file that holds variables of a job, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    beside.replace(path)


def _modified_ns(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0
