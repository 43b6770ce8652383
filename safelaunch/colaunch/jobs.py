"""The records of a sweep: a job as it will be started, how an attempt of it ended, what is shown of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

State = Literal["waiting", "running", "succeeded", "failed", "hung", "timed-out", "skipped", "cancelled"]
Metric = float | str

FINAL: frozenset[str] = frozenset({"succeeded", "failed", "hung", "timed-out", "skipped", "cancelled"})
# What another attempt may mend. Skipped and cancelled jobs were not given a chance, or not to the end.
WORTH_ANOTHER_ATTEMPT: frozenset[str] = frozenset({"failed", "hung", "timed-out"})


# No word of a command line and no variable can hold a NUL.
_MARK = re.compile("\0([0-9]+)\0")


def port_names(count: int) -> tuple[str, ...]:
    """The placeholders of a job with so many ports: ``port``, ``port2``, ``port3``, ..."""
    return tuple("port" if number == 1 else f"port{number}" for number in range(1, count + 1))


def port_marks(count: int) -> dict[str, str]:
    """What these placeholders are filled with until the numbers are known."""
    return {name: f"\0{index}\0" for index, name in enumerate(port_names(count))}


@dataclass(frozen=True, slots=True)
class Job:
    """One job, every placeholder filled in.

    ``words``: what stands behind ``safelaunch``, without the name and bundle directory that colaunch adds. ``ports``:
    how many it is given when it starts; where their numbers are to stand, ``words`` and ``env`` hold a mark. ``group``:
    the job's key in the specification, which all combinations of its matrix share. ``needs``: names of jobs. ``cwd``
    and ``metric_file`` are absolute. ``where``: ``file:line``, or the command line's word, that it comes from.
    """

    name: str
    words: tuple[str, ...]
    where: str
    group: str = ""
    params: tuple[tuple[str, str], ...] = ()
    gpus: int = 1
    ports: int = 0
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

    def with_ports(self, numbers: Sequence[object]) -> Job:
        """The same with ``numbers`` in the place of the marks; they may also be the names, to be shown."""

        def filled(text: str) -> str:
            return _MARK.sub(lambda match: str(numbers[int(match[1])]), text)

        env = tuple((name, filled(value)) for name, value in self.env)
        return replace(self, words=tuple(map(filled, self.words)), env=env)

    def arguments(self, bundle_dir: str) -> tuple[str, ...]:
        """What ``safelaunch`` is given. ``exec`` stays the first word."""
        own = ("--run-name", self.name, "--bundle-dir", bundle_dir)
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
