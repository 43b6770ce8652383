"""The records of a sweep: a job ready to start, and how its attempts ended."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from safelaunch.job.argv import CommandLine

JobState = Literal["waiting", "running", "succeeded", "failed", "hung", "timed-out", "skipped", "cancelled"]
Metric = float | str

FINAL: frozenset[str] = frozenset({"succeeded", "failed", "hung", "timed-out", "skipped", "cancelled"})
# States that another attempt may fix. Skipped and cancelled jobs had no chance, or not until their end.
WORTH_ANOTHER_ATTEMPT: frozenset[str] = frozenset({"failed", "hung", "timed-out"})


# No word of a command line and no variable can contain a NUL.
_MARK = re.compile("\0([0-9]+)\0")


def port_names(count: int) -> tuple[str, ...]:
    """The port placeholders of a job: ``port``, ``port2``, ``port3``, ..."""
    return tuple("port" if number == 1 else f"port{number}" for number in range(1, count + 1))


def port_marks(count: int) -> dict[str, str]:
    """The marks that fill these placeholders until the numbers are known."""
    return {name: f"\0{index}\0" for index, name in enumerate(port_names(count))}


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job, every placeholder filled in.

    ``words``: the arguments of ``safelaunch``, without the name and bundle directory that colaunch adds. ``ports``: the
    number of ports that it gets at its start; until then, ``words`` and ``env`` contain marks for them. ``group``: the
    job's key in the specification, shared by all combinations of its matrix. ``needs``: names of jobs. ``cwd``
    is absolute. ``nodes``: it runs on so many, with ``gpus`` on each. ``batch``: further words for
    sbatch. ``where``: the ``file:line``, or word of the command line, that it comes from.
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
    nodes: int = 1
    batch: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A hash of the job's work: two jobs with equal fingerprints do the same work."""
        nodes = [self.nodes] if self.nodes > 1 else []
        text = json.dumps([self.words, sorted(self.env), self.cwd, *nodes])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_ports(self, numbers: Sequence[object]) -> SweepJob:
        """A copy with ``numbers`` in place of the marks; for display, they may also be the names."""

        def filled(text: str) -> str:
            return _MARK.sub(lambda match: str(numbers[int(match[1])]), text)

        env = tuple((name, filled(value)) for name, value in self.env)
        return replace(self, words=tuple(map(filled, self.words)), env=env)

    def arguments(self, bundle_dir: str) -> tuple[str, ...]:
        """The arguments for ``safelaunch``. ``exec`` stays the first word."""
        own = ("--run-name", self.name, "--bundle-dir", bundle_dir)
        if self.words[:1] == ("exec",):
            return ("exec", *own, *self.words[1:])
        return (*own, *self.words)


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How one attempt ended. ``exit_code``: as a shell shows it; ``last_step``: the last one that the watch saw.

    ``gpus``: UUIDs, or ``node:number``; ``bundle``: its path; ``cause``: by its verdict, its first wrong result,
    or the scheduler's word; empty if there are none.
    """

    state: JobState
    exit_code: int | None = None
    duration_s: float = 0.0
    last_step: int | None = None
    gpus: tuple[str, ...] = ()
    bundle: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """A job's step and rate; None if unknown. ``master_port``: according to its ranks.

    ``age_s``: since the newest step of any rank; ``quiet``: that is far longer than usual, and no rank has said that it
    would be. ``cause``: what an early look at it suggests. ``wrong``: its first wrong result.
    """

    step: int | None = None
    steps_per_s: float | None = None
    master_port: str = ""
    age_s: float | None = None
    quiet: bool = False
    cause: str = ""
    wrong: str = ""


@dataclass(slots=True)
class Track:
    """One job's way through the sweep. ``attempts`` includes those of earlier invocations; ``tries`` does not."""

    job: SweepJob
    state: JobState = "waiting"
    attempts: int = 0
    tries: int = 0
    outcome: AttemptOutcome | None = None
    why: str = ""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL


def threads(words: Sequence[str], cores: int) -> int:
    """OMP_NUM_THREADS for a job with command ``words`` on ``cores`` cores: an equal share per rank, at least 1."""
    return max(1, cores // ranks(words))


def ranks(words: Sequence[str]) -> int:
    """The value of ``--nproc-per-node``; 1 if it is missing or not a number (``auto``, ``gpu``)."""
    options = takewhile(
        lambda word: word.startswith("-") or not word.endswith(".py"), words
    )  # the rest is the script's
    text = CommandLine((), tuple(options), ()).value_of("--nproc-per-node", shortest="--np") or ""
    return int(text) if text.isdecimal() and int(text) else 1
