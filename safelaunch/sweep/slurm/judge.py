"""How a job stands, from what Slurm says of it and from the files that it left. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from safelaunch.job.job import EXIT_GAVE_UP, EXIT_HUNG
from safelaunch.sweep.jobs import State
from safelaunch.sweep.slurm.claims import Claim, End

# Slurm's names for a job that has ended, see squeue(1). All others may still run.
FINAL = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
NEVER_SATISFIED = "DependencyNeverSatisfied"
# What Slurm's word means for a job that did not succeed: its state, and the cause that the table shows.
MEANINGS: dict[str, tuple[State, str]] = {
    "TIMEOUT": ("timed-out", "time limit"),
    "DEADLINE": ("timed-out", "deadline"),
    "CANCELLED": ("cancelled", "scancel"),
    "PREEMPTED": ("cancelled", "preempted"),
    "REVOKED": ("cancelled", "revoked"),
    "NODE_FAIL": ("failed", "node failed"),
    "BOOT_FAIL": ("failed", "node failed"),
    "OUT_OF_MEMORY": ("failed", "out of memory"),
}
# What the signal may have come from; the others say nothing about a job that was not signalled.
ASKED_TO_END = frozenset({"TIMEOUT", "DEADLINE", "CANCELLED", "PREEMPTED", "REVOKED"})


@dataclass(frozen=True, slots=True)
class Listed:
    """A job, or one task of an array, as squeue lists it. ``job_id`` as in its SLURM_JOB_ID once it has begun; the
    waiting tasks of an array share one.

    ``address``: what scancel and a dependency call it.
    """

    name: str
    task: int
    job_id: str
    address: str
    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL


Stands = Literal["queued", "running", "ended", "absent", "never-satisfied", "unsettled"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an attempt is. ``listed``: the job of Slurm that counts; ``end``: what its task left.

    ``absent``: Slurm has no job for it, and none has begun. ``unsettled``: it has ended, but what it left may not be
    visible here yet.
    """

    stands: Stands
    listed: Listed | None = None
    end: End | None = None


def judge(listed: Sequence[Listed], claim: Claim | None, end: End | None) -> Standing:
    """``listed``: the jobs of Slurm that were submitted for this attempt; more than one after a double submission.

    A success, or an end that no signal brought about, stands, whatever Slurm still thinks of the job. After a signal,
    the job may come back: Slurm's word counts.
    """
    if claim is None:
        return _unclaimed(listed)
    owner = next((each for each in listed if each.address == claim.place), None)
    is_its = end is not None and (end.job_id, end.restart) == (claim.job_id, claim.restart)
    if is_its and end is not None and (end.exit_code == 0 or not end.signalled):
        return Standing("ended", owner, end)
    if owner is not None and not owner.is_final:
        return Standing("queued" if owner.state in QUEUED else "running", owner)
    if is_its:
        return Standing("ended", owner, end)
    return Standing("unsettled", owner)


def _unclaimed(listed: Sequence[Listed]) -> Standing:
    alive = [each for each in listed if not each.is_final]
    if alive:
        first = min(alive, key=lambda each: each.state in QUEUED)
        return Standing("queued" if first.state in QUEUED else "running", first)
    if not listed:
        return Standing("absent")
    last = listed[-1]
    if last.state == "CANCELLED" and last.reason == NEVER_SATISFIED:
        return Standing("never-satisfied", last)
    return Standing("ended" if last.state == "CANCELLED" else "unsettled", last)


def spare(listed: Sequence[Listed], claim: Claim | None) -> list[Listed]:
    """The jobs that wait in the queue for an attempt that another one runs, or has run."""
    return [each for each in listed if claim and each.address != claim.place and each.state in QUEUED]


def state_of(standing: Standing, verdict: str, *, asked_by_us: bool, claimed: bool = True) -> tuple[State, str]:
    """The state and cause of an attempt that ended. ``verdict``: the outcome in its bundle, empty without one.

    ``claimed``: its task had begun.
    """
    end = standing.end
    if end is not None and end.exit_code == 0:
        return "succeeded", ""
    hung = (EXIT_HUNG, EXIT_GAVE_UP) if verdict == "hang" else () if verdict == "crash" else (EXIT_HUNG,)
    if end is not None and end.exit_code in hung:
        return "hung", ""
    word = _word(standing)
    if asked_by_us:
        return "cancelled", ""
    if end is not None and end.over_limit:
        return "timed-out", "timeout"
    if word in MEANINGS:
        return MEANINGS[word]
    if end is not None:
        return "failed", ""
    if standing.listed is None:
        return "failed", "lost"
    if standing.listed.state == "COMPLETED":
        return "succeeded", ""  # by Slurm's word: the job could not write its end down
    return "failed", "" if claimed else "never began"


def _word(standing: Standing) -> str:
    """Slurm's word for the end, if it says anything about this one."""
    listed, end = standing.listed, standing.end
    words: Collection[str] = (listed.state if listed is not None else "", end.told if end is not None else "")
    if end is not None and not end.signalled:
        words = [word for word in words if word not in ASKED_TO_END]  # it ended by itself
    return next((word for word in words if word in MEANINGS), "")
