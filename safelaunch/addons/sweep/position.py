"""Decides an attempt's position and outcome from the scheduler's list and the files of its task. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from safelaunch.addons.sweep.attempt_files import AttemptClaim, TaskEnd
from safelaunch.addons.sweep.engine import state_of
from safelaunch.addons.sweep.jobs import JobState
from safelaunch.addons.sweep.scheduler import Listed, Scheduler

Stands = Literal["queued", "running", "ended", "absent", "hopeless", "unsettled"]


@dataclass(frozen=True, slots=True)
class AttemptPosition:
    """Where an attempt is. ``listed``: the scheduler's job that counts; ``end``: what its task left.

    ``absent``: the scheduler has no job for it, and none has begun. ``unsettled``: it has ended, but what it left may
    not be visible here yet. ``hopeless``: a job that it needs has not succeeded.
    """

    stands: Stands
    listed: Listed | None = None
    end: TaskEnd | None = None


def judge(listed: Sequence[Listed], claim: AttemptClaim | None, end: TaskEnd | None) -> AttemptPosition:
    """``listed``: the jobs that were submitted for this attempt; more than one after a double submission.

    A success, or an end that no signal brought about, stands, whatever the scheduler still thinks of the job. After a
    signal, the job may come back: the scheduler's word counts.
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


def meaning(
    standing: AttemptPosition, verdict: str, queue: Scheduler, *, asked_by_us: bool, claimed: bool
) -> tuple[JobState, str]:
    """The state and cause of an attempt that ended. ``verdict``: the outcome in its bundle, empty without one."""
    listed, end = standing.listed, standing.end
    state = state_of(end.exit_code, verdict) if end is not None else "failed"
    if state in ("succeeded", "hung"):
        return state, ""
    if asked_by_us:
        return "cancelled", ""
    if end is not None and end.over_limit:
        return "timed-out", "timeout"
    for word in (listed.word if listed is not None else "", end.word if end is not None else ""):
        found = queue.meanings.get(word)
        if found is not None and (end is None or end.signalled or not found.asked):
            return found.state, found.cause
    if end is not None:
        return "failed", ""
    if listed is None:
        return "failed", "lost"
    if listed.word == "COMPLETED":
        return "succeeded", ""  # by the scheduler's word: the job could not write its end down
    return "failed", "" if claimed else "never began"
