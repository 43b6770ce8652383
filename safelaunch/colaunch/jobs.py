"""The records of a sweep: a job as it will be started, how an attempt of it ended, what is shown of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "running", "succeeded", "failed", "hung", "timed-out", "skipped", "cancelled"]
Metric = float | str

FINAL: frozenset[str] = frozenset({"succeeded", "failed", "hung", "timed-out", "skipped", "cancelled"})
# What another attempt may mend. Skipped and cancelled jobs were not given a chance, or not to the end.
WORTH_ANOTHER_ATTEMPT: frozenset[str] = frozenset({"failed", "hung", "timed-out"})


@dataclass(frozen=True, slots=True)
class Job:
    """One job, every placeholder filled in.

    ``words``: what stands behind ``safelaunch``, without the name and bundle directory that colaunch adds. ``group``:
    the job's key in the specification, which all combinations of its matrix share. ``needs``: names of jobs. ``cwd``
    and ``metric_file`` are absolute. ``where``: ``file:line``, or the command line's word, that it comes from.
    """

    name: str
    words: tuple[str, ...]
    where: str
    group: str = ""
    params: tuple[tuple[str, str], ...] = ()
    gpus: int = 1
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = "/"
    needs: tuple[str, ...] = ()
    timeout_s: float | None = None
    retries: int = 0
    metrics: tuple[str, ...] = ()
    metric_file: str = ""

    @property
    def fingerprint(self) -> str:
        """What the job does, in short: two jobs with the same one are the same work."""
        text = json.dumps([self.words, sorted(self.env), self.cwd])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def arguments(self, bundle_dir: str, options: Sequence[str] = ()) -> tuple[str, ...]:
        """What ``safelaunch`` is given, ``options`` those of its share of the node. ``exec`` stays the first word."""
        own = ("--run-name", self.name, "--bundle-dir", bundle_dir, *options)
        if self.words[:1] == ("exec",):
            return ("exec", *own, *self.words[1:])
        return (*own, *self.words)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt ended. ``exit_code`` as a shell shows it; ``last_step`` as the watch last saw it.

    ``gpus``: UUIDs; ``bundle``: its path; both empty where there were none.
    """

    state: State
    exit_code: int | None = None
    duration_s: float = 0.0
    last_step: int | None = None
    gpus: tuple[str, ...] = ()
    bundle: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(slots=True)
class Track:
    """One job's way through the sweep. ``attempts`` counts those of earlier invocations, too, ``tries`` does not."""

    job: Job
    state: State = "waiting"
    attempts: int = 0
    tries: int = 0
    outcome: Outcome | None = None
    why: str = ""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL
