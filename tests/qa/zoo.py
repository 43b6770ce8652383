"""The hang zoo: one specimen per class of hang, its expected verdict, and the checks of a run.

A specimen is a program of ``programs/`` that hangs after a few steps of training, on any given rank. The line at which
it hangs has a comment ``# HANGS: <how>``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from safelaunch.bundle.reading import locate
from safelaunch.supervise.control import discover, protocol
from safelaunch.system.errors import SafelaunchError
from safelaunch.verdict.diagnose import diagnose
from tests.support.jobs import PATIENCE_S, Job, Result
from tests.support.paths import PROGRAMS

EXIT_HUNG = 124


def itself(rank: int, world: int) -> set[int]:
    return {rank}


def with_neighbour(rank: int, world: int) -> set[int]:
    return {rank, (rank + 1) % world}


def the_later_of_two(rank: int, world: int) -> set[int]:
    return {max(with_neighbour(rank, world))}


def the_others(rank: int, world: int) -> set[int]:
    return set(range(world)) - {rank}


def with_the_one_before(rank: int, world: int) -> set[int]:
    return {rank, (rank - 1) % world}


def nobody(rank: int, world: int) -> set[int]:
    return set()


def takes_handlers() -> bool:
    """Returns whether this torch's worker server takes handlers; a function, because most processes need no torch."""
    from torch._C import _distributed_c10d

    return hasattr(_distributed_c10d, "_register_handler")


@dataclass(frozen=True)
class Specimen:
    """One class of hang.

    Attributes:
        process: Prefix of the culprit's process name.
        line: False without a fixed line.
        needs: A required program.
        python: Oldest version that detects the hang.
        more: Further options of the program.
        recorder: Only gloo's Flight Recorder distinguishes it from other hangs.
        one_host: Its ranks also use the host's loopback.
    """

    name: str
    program: str
    how: str
    cause: str
    ranks: int = 2
    options: tuple[str, ...] = ()
    culprits: Callable[[int, int], set[int]] = itself
    process: str = "main"
    line: bool = True
    needs: str = ""
    python: tuple[int, int] = (3, 10)
    more: tuple[str, ...] = ()
    recorder: bool = False
    one_host: bool = False

    @property
    def script(self) -> Path:
        return PROGRAMS / f"{self.program}.py"

    def lines(self) -> set[int]:
        """Returns the lines at which it hangs."""
        marked = (line.partition("# HANGS: ")[2].split(", ") for line in self.script.read_text().splitlines())
        return {number for number, names in enumerate(marked, 1) if self.how in names}

    def unavailable(self, nodes: int = 1) -> str:
        """Returns why it cannot run here, or an empty string."""
        if self.one_host and nodes > 1:
            return "is for one host"
        if self.needs and not shutil.which(self.needs):
            return f"needs {self.needs}"
        if sys.version_info < self.python:
            return f"needs Python {self.python[0]}.{self.python[1]}"
        # in torch 2.6 and 2.9, the server only reads NCCL's recorder and accepts no further handlers
        known = not self.recorder or takes_handlers()
        return "" if known else "needs a worker server that reports gloo's collectives"


_BUSY = ("--max-stall=4",)
_SHORT = ("--steps=40",)
_START = ("--startup-timeout=3",)

SPECIMENS: tuple[Specimen, ...] = (
    Specimen("asleep", "blocked", "asleep", "stuck-in-user-code"),
    Specimen("read-fifo", "blocked", "fifo", "blocking-io"),
    Specimen("read-socket", "blocked", "socket", "blocking-io"),
    Specimen("read-pipe", "blocked", "pipe", "blocking-io"),
    Specimen("subprocess", "blocked", "subprocess", "stuck-in-user-code"),
    Specimen("input", "blocked", "input", "stuck-in-user-code"),
    Specimen("print", "blocked", "print", "blocking-io"),
    Specimen("child", "blocked", "child", "stuck-in-user-code", process="child"),
    Specimen(
        "two-asleep", "blocked", "asleep", "stuck-in-user-code", 3, culprits=with_neighbour, more=("--culprits=2",)
    ),
    Specimen("disk", "blocked", "disk", "uninterruptible-io", needs="gcc"),
    Specimen("checkpoint", "blocked", "checkpoint", "blocking-io"),
    Specimen("busy-python", "busy", "python", "busy-loop", options=_BUSY),
    Specimen("busy-regex", "busy", "regex", "gil-held", options=_BUSY),
    Specimen("stops-itself", "stopped", "itself", "rank-stopped"),
    Specimen("stopped-by-other", "stopped", "other", "rank-stopped", line=False),
    Specimen("gil", "gil", "gil", "gil-held"),
    Specimen("all-gather", "collectives", "all_gather", "collective-mismatch", 3),
    Specimen("barrier", "collectives", "barrier", "collective-mismatch", 3),
    Specimen("broadcast", "collectives", "broadcast", "collective-mismatch", 3),
    Specimen("init-asleep", "late", "asleep", "init-not-joined", options=_START),
    Specimen("init-blocked", "late", "fifo", "init-not-joined", options=_START),
    Specimen("loader-asleep", "loader", "asleep", "data-loading", process="dataloader worker (pid "),
    Specimen("loader-fifo", "loader", "fifo", "data-loading", process="dataloader worker (pid "),
    Specimen("loader-lock", "loader", "lock", "data-loading", process="dataloader worker (pid "),
    Specimen("loader-inline", "loader", "inline", "blocking-io"),
    Specimen("lock-order", "locks", "order", "lock-deadlock"),
    Specimen("thread-join", "locks", "join", "blocking-io"),
    Specimen("future", "locks", "future", "blocking-io"),
    Specimen("queue", "locks", "queue", "lock-deadlock"),
    Specimen("server-lock", "serving", "lock", "lock-deadlock", 3, one_host=True),
    Specimen("server-loop", "serving", "loop", "lock-deadlock", 3, one_host=True),
    Specimen("sqlite-lock", "held", "sqlite", "lock-deadlock", 3),
    Specimen("library-lock", "held", "filelock", "lock-deadlock", 3),
    Specimen("thread-behind", "held", "thread", "stuck-in-user-code", 3, recorder=True),
    Specimen("group-order", "pairs", "groups", "group-order", 3, culprits=the_later_of_two, recorder=True),
    Specimen("left-out", "pairs", "leaves-out", "collective-mismatch", 3, recorder=True),
    Specimen("recv-recv", "pairs", "recv", "p2p-cycle", 3, culprits=with_neighbour),
    Specimen("tags", "pairs", "tags", "collective-mismatch", 3, culprits=with_neighbour),
    Specimen("no-send", "pairs", "no-send", "collective-mismatch", 3, culprits=with_neighbour, line=False),
    Specimen("roots", "collectives", "roots", "collective-mismatch", 3),
    Specimen("kept-open", "kindred", "kept-open", "blocking-io"),
    Specimen("own-end", "kindred", "own-end", "blocking-io", 4),
    Specimen("full-pipe", "kindred", "full-pipe", "stuck-in-user-code"),
    Specimen("undrained", "kindred", "undrained", "stuck-in-user-code", 3),
    Specimen("no-sentinel", "kindred", "no-sentinel", "stuck-in-user-code"),
    Specimen("dead-sender", "kindred", "dead-sender", "blocking-io"),
    Specimen("task-done", "kindred", "task-done", "lock-deadlock"),
    Specimen("unsent", "aside", "unsent", "blocking-io", 3, one_host=True),
    Specimen("unsent-asleep", "aside", "unsent-asleep", "stuck-in-user-code", 4, one_host=True),
    Specimen("flag", "aside", "flag", "stuck-in-user-code", 4, line=False),
    Specimen("polled-work", "aside", "polled-work", "stuck-in-user-code", 4, recorder=True),
    Specimen("store-key", "aside", "store-key", "blocking-io", 3),
    Specimen("attempts", "aside", "attempts", "stuck-in-user-code"),
    Specimen("uneven-barrier", "uneven", "barrier", "uneven-batches", 3),
    Specimen("uneven-thread", "uneven", "thread", "uneven-batches", line=False),
    Specimen("uneven-marker", "uneven", "marker", "stuck-in-user-code"),
    Specimen("swallowed", "swallowed", "skip", "swallowed-exception", 3, more=_SHORT, python=(3, 12)),
    Specimen("swallowed-of-two", "swallowed", "skip", "swallowed-exception", more=_SHORT, python=(3, 12)),
    Specimen("swallowed-end", "swallowed", "leave", "swallowed-exception", 3, python=(3, 12)),
    Specimen("thread-mismatch", "parted", "trainer", "collective-mismatch", 4),
    Specimen("thread-future", "parted", "future", "lock-deadlock"),
    Specimen("loop-barrier", "parted", "loop-barrier", "collective-mismatch", 3),
    Specimen("unused", "parted", "unused", "collective-mismatch", 3),
    Specimen("loop-break", "parted", "loop-break", "collective-mismatch", 4, line=False),
    Specimen("guard-tuple", "parted", "guard-tuple", "collective-mismatch", 5, culprits=with_neighbour),
    Specimen("guard-return", "parted", "guard-return", "collective-mismatch", 3),
    Specimen("batch-ring", "parted", "ring", "collective-mismatch", 4, culprits=with_the_one_before, line=False),
    Specimen("object-roots", "parted", "object-roots", "collective-mismatch", 4),
    Specimen("symmetric", "symmetric", "", "no-rank-stands-out", culprits=nobody, line=False),
)
BY_NAME = {specimen.name: specimen for specimen in SPECIMENS}


def start(
    specimen: Specimen,
    culprit: int,
    scratch: Path,
    *,
    ranks: int | None = None,
    configured: bool = True,
    more: Sequence[str] = (),
    launcher: Sequence[str] = (),
    interpreter: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
) -> Job:
    """Starts ``specimen`` under safelaunch in the empty directory ``scratch``.

    Args:
        configured: False: with default settings.
        more: Arguments of the program.
        launcher: A launcher instead of safelaunch.
        interpreter: Words that start safelaunch.
    """
    prepare(specimen, scratch)
    own = [
        *(options_of(specimen) if configured and not launcher else ()),
        f"--nproc-per-node={ranks or specimen.ranks}",
    ]
    words = [*own, *script_of(specimen, culprit, scratch), *more]
    return Job(words, scratch, launcher=launcher, interpreter=interpreter, env=env)


def prepare(specimen: Specimen, scratch: Path) -> None:
    """Builds what the program needs in ``scratch``."""
    if specimen.how == "disk":
        source, library = PROGRAMS / "libdisk.c", scratch / "libdisk.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)


def options_of(specimen: Specimen) -> list[str]:
    """safelaunch's options."""
    return ["--stall-timeout=2", *specimen.options]


def script_of(specimen: Specimen, culprit: int, scratch: Path) -> list[str | Path]:
    """The program and its arguments."""
    return [
        specimen.script,
        f"--culprit={culprit}",
        f"--how={specimen.how}",
        f"--scratch={scratch}",
        *specimen.more,
    ]


@dataclass(frozen=True)
class Word:
    """The first words about a quiet job: ``quiet_s`` after its last progress, about ``ranks``."""

    quiet_s: float
    ranks: tuple[int, ...]
    words: str


def first_word(job: Job, patience_s: float = PATIENCE_S) -> Word | None:
    """Waits for the first printed early look; returns None if there is none in ``patience_s``, or the job has ended."""
    found: list[Word] = []

    def has_said() -> bool:
        for run in discover.find((job.runtime / "safelaunch",)):
            try:
                answer = json.loads(
                    protocol.ask(run.directory / "control", protocol.ControlRequest("status"), deadline_s=5.0)
                )
            except SafelaunchError:
                continue
            for look in answer.get("early", ()):
                ranks = tuple(place["rank"] for place in look.get("places", ()))
                found.extend([Word(look["quiet_s"], ranks, look["words"])] if look.get("said") else [])
        return bool(found)

    try:
        job.until(has_said, "a first word", patience_s, every_s=0.5)
    except AssertionError:
        return None
    return found[0]


def judge_word(specimen: Specimen, culprit: int, word: Word | None, *, ranks: int | None = None) -> list[str]:
    """Returns what is wrong with a first word: its ranks must be the verdict's."""
    if word is None:
        return ["nothing was said"]
    expected = specimen.culprits(culprit, ranks or specimen.ranks)
    return [] if set(word.ranks) == expected else [f"ranks {sorted(word.ranks)}, not {sorted(expected)}"]


def judge(specimen: Specimen, culprit: int, result: Result, *, ranks: int | None = None) -> list[str]:
    """Returns everything that is wrong: nothing for a correct verdict, a good bundle and a clean end."""
    wrong = []
    if result.code != EXIT_HUNG:
        wrong.append(f"exit code {result.code}")
    wrong += [f"left behind: {what}" for what in result.leftovers]
    if len(result.bundles) != 1:
        return [*wrong, f"{len(result.bundles)} bundles"]
    wrong += result.bundle.problems()
    wrong += _judge_verdict(specimen, culprit, result.verdict, ranks or specimen.ranks)
    wrong += _judge_again(result)
    if str(result.bundle.path) not in result.stderr:
        wrong.append("the bundle's path was not said")
    return wrong


def _judge_again(result: Result) -> list[str]:
    """Checks that the bundle's files alone lead to the same verdict, as on another machine."""
    found = locate.read(result.bundle.path)
    kept = found.source or {}
    again = json.loads(msgspec.json.encode(diagnose(found.evidence, read_source=kept.get)))
    wrong = [f"not read again: {problem}" for problem in found.problems]
    for field in again.keys() - {"bundle"}:  # which names the directory, and how it was written
        if again[field] != result.verdict[field]:
            wrong.append(f"read again, {field} is {again[field]}, not {result.verdict[field]}")
    return wrong


def _judge_verdict(specimen: Specimen, culprit: int, verdict: dict[str, Any], world: int) -> list[str]:
    wrong = []
    if (verdict["outcome"], verdict["cause"]) != ("hang", specimen.cause):
        wrong.append(f"cause {verdict['outcome']}: {verdict['cause']}")
    expected = specimen.culprits(culprit, world)
    victims = set(range(world)) - expected if expected else set()
    if _ranks(verdict["victims"]) != victims:
        wrong.append(f"victims {verdict['victims']!r}")
    for one in verdict["culprits"]:
        if not one["process"].startswith(specimen.process):
            wrong.append(f"process {one['process']!r}")
        if not one["reason"] or not one["pid"] or not one["host"]:
            wrong.append(f"culprit without reason, pid or host: {one}")
    if not verdict["summary"] or not verdict["suggestions"]:
        wrong.append("no summary or no suggestion")
    return [*wrong, *judge_place(specimen, culprit, verdict, world)]


def judge_place(specimen: Specimen, culprit: int, verdict: dict[str, Any], world: int) -> list[str]:
    """Returns what is wrong with the ranks and lines that it names."""
    wrong = []
    expected = specimen.culprits(culprit, world)
    named = [one["rank"] for one in verdict["culprits"]]
    if named != sorted(expected):
        wrong.append(f"culprits {named}, not {sorted(expected)}")
    for one in verdict["culprits"] if specimen.line else ():
        frame = one["frame"] or {"file": "", "line": 0}
        if (frame["file"], frame["line"] in specimen.lines()) != (str(specimen.script), True):
            wrong.append(f"frame {frame['file']}:{frame['line']}")
    return wrong


def _ranks(text: str) -> set[int]:
    # ``"0-2,5"`` → {0, 1, 2, 5}
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
