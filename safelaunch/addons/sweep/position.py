"""Determines an attempt's position and outcome from the scheduler's list and the files of its task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from safelaunch.addons.sweep.attempt_files import AttemptClaim, TaskEnd
from safelaunch.addons.sweep.engine import state_of
from safelaunch.addons.sweep.jobs import JobState
from safelaunch.addons.sweep.scheduler import ListedJob, Scheduler

AttemptStage = Literal["queued", "running", "ended", "absent", "hopeless", "unsettled"]


@dataclass(frozen=True, slots=True)
class AttemptPosition:
    # absent: the scheduler has no job for it, and it hasn't started; unsettled: it has ended, but its files might not
    # be visible yet; hopeless: a job that it needs didn't succeed
    stage: AttemptStage
    listed: ListedJob | None = None  # scheduler's job that runs the attempt
    end: TaskEnd | None = None


def judge(listed: Sequence[ListedJob], claim: AttemptClaim | None, end: TaskEnd | None) -> AttemptPosition:
    """Returns the position of an attempt. After a double submission, ``listed`` contains several jobs.

    A success, or an exit that wasn't caused by a signal, is final. After a signal, the scheduler decides, because it
    might requeue the job.
    """
    if claim is None:
        alive = [each for each in listed if each.stage != "ended"]
        if alive:
            first = min(alive, key=lambda each: each.stage == "queued")
            return AttemptPosition(first.stage, first)
        if not listed:
            return AttemptPosition("absent")
        last = listed[-1]
        return AttemptPosition(
            "hopeless" if last.hopeless else "ended" if last.word == "CANCELLED" else "unsettled", last
        )
    owner = next((each for each in listed if each.name == claim.name), None)
    if end is not None and (end.name, end.restart) != (claim.name, claim.restart):
        end = None
    if end is not None and (end.exit_code == 0 or not end.signalled):
        return AttemptPosition("ended", owner, end)
    if owner is not None and owner.stage != "ended":
        return AttemptPosition(owner.stage, owner)
    return AttemptPosition("ended" if end is not None else "unsettled", owner, end)


def final_state(
    position: AttemptPosition, verdict: str, queue: Scheduler, *, asked_by_us: bool, claimed: bool
) -> tuple[JobState, str]:
    """Returns the final state and cause of an attempt. ``verdict`` is the outcome in its bundle, if any."""
    listed, end = position.listed, position.end
    state = state_of(end.exit_code, verdict) if end is not None else "failed"
    if state in ("succeeded", "hung"):
        return state, ""
    if asked_by_us:
        return "cancelled", ""
    if end is not None and end.over_limit:
        return "timed-out", "timeout"
    for word in (listed.word if listed is not None else "", end.word if end is not None else ""):
        end_meaning = queue.meanings.get(word)
        if end_meaning is not None and (end is None or end.signalled or not end_meaning.asked):
            return end_meaning.state, end_meaning.cause
    if end is not None:
        return "failed", ""
    if listed is None:
        return "failed", "lost"
    if listed.word == "COMPLETED":
        return "succeeded", ""  # according to the scheduler: the task couldn't write its end
    return "failed", "" if claimed else "never began"
