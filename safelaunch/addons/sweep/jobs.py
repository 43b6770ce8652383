"""Defines the records for the jobs of a sweep and their outcomes."""

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
# States that another attempt might fix. Skipped and cancelled jobs didn't run to their end.
WORTH_ANOTHER_ATTEMPT: frozenset[str] = frozenset({"failed", "hung", "timed-out"})


# NUL can't occur in a command line or variable.
_MARK = re.compile("\0([0-9]+)\0")


def port_names(count: int) -> tuple[str, ...]:
    return tuple("port" if number == 1 else f"port{number}" for number in range(1, count + 1))


def port_marks(count: int) -> dict[str, str]:
    """Maps the names of ``count`` port placeholders to marks, which are replaced once the port numbers are known."""
    return {name: f"\0{index}\0" for index, name in enumerate(port_names(count))}


@dataclass(frozen=True, slots=True)
class SweepJob:
    name: str
    words: tuple[str, ...]  # arguments of ``safelaunch``, without the name and bundle directory that colaunch adds
    where: str  # ``file:line`` or command-line word that defines it
    group: str = ""  # key in the specification, shared by all combinations of the matrix
    params: tuple[tuple[str, str], ...] = ()
    gpus: int = 1  # GPUs on each node
    ports: int = 0  # number of ports leased when it starts; until then, ``words`` and ``env`` contain marks for them
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = "/"  # absolute path
    needs: tuple[str, ...] = ()  # names of jobs
    timeout_s: float | None = None
    retries: int = 0
    metrics: tuple[str, ...] = ()
    nodes: int = 1
    batch: tuple[str, ...] = ()  # additional words for sbatch

    @property
    def fingerprint(self) -> str:
        nodes = [self.nodes] if self.nodes > 1 else []
        text = json.dumps([self.words, sorted(self.env), self.cwd, *nodes])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_ports(self, numbers: Sequence[object]) -> SweepJob:
        """Returns a copy in which ``numbers`` (or names, for display) replace the marks for ports."""

        def filled(text: str) -> str:
            return _MARK.sub(lambda match: str(numbers[int(match[1])]), text)

        env = tuple((name, filled(value)) for name, value in self.env)
        return replace(self, words=tuple(map(filled, self.words)), env=env)

    def arguments(self, bundle_dir: str) -> tuple[str, ...]:
        own = ("--run-name", self.name, "--bundle-dir", bundle_dir)
        if self.words[:1] == ("exec",):
            return ("exec", *own, *self.words[1:])
        return (*own, *self.words)


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    state: JobState
    exit_code: int | None = None
    duration_s: float = 0.0
    last_step: int | None = None
    gpus: tuple[str, ...] = ()  # UUIDs, or ``node:number``
    bundle: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    cause: str = ""  # cause in its verdict, its first wrong result, or the scheduler's reason


@dataclass(frozen=True, slots=True)
class Pace:
    """The step and rate of a job; None if unknown."""

    step: int | None = None
    steps_per_s: float | None = None
    master_port: str = ""  # port that its ranks use
    age_s: float | None = None  # time since the latest step of any rank
    quiet: bool = False  # that time is far longer than usual, and no rank has announced it
    cause: str = ""  # cause that an early look suggests
    wrong: str = ""


@dataclass(slots=True)
class Track:
    job: SweepJob
    state: JobState = "waiting"
    attempts: int = 0  # number of attempts, including earlier invocations
    tries: int = 0
    outcome: AttemptOutcome | None = None
    why: str = ""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL


def threads(words: Sequence[str], cores: int) -> int:
    """Returns the value for OMP_NUM_THREADS: an equal share of ``cores`` for each rank, at least 1."""
    return max(1, cores // ranks(words))


def ranks(words: Sequence[str]) -> int:
    """Returns the value of ``--nproc-per-node``; 1 if it is missing or isn't a number (``auto``, ``gpu``)."""
    options = takewhile(
        lambda word: word.startswith("-") or not word.endswith(".py"), words
    )  # the rest belongs to the script
    text = CommandLine((), tuple(options), ()).value_of("--nproc-per-node", shortest="--np") or ""
    return int(text) if text.isdecimal() and int(text) else 1
