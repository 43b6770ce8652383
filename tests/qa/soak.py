"""Healthy jobs of every rhythm, which safelaunch must not end, and frozen ones, which it must not miss.

All run under ``auto`` with a floor of 5 s. That is stricter than the default of 60 s. One case keeps the default: a
download without a byte, which looks frozen in every respect for longer than 5 s.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.jobs import Bundle, Job, Result
from tests.support.paths import PROGRAMS

SCRIPT = PROGRAMS / "rhythms.py"
EVERYDAY = PROGRAMS / "everyday.py"
FLOOR_S = 5
STOPPED_S = 9.0


@dataclass(frozen=True)
class Healthy:
    """A job that ends by itself with exit code 0."""

    name: str
    how: str = "steady"
    ranks: int = 2
    steps: int = 150
    length: float = 0.1
    more: tuple[str, ...] = ()
    own: tuple[str, ...] = (f"--stall-floor={FLOOR_S}",)
    meanwhile: Callable[[Sequence[Job]], None] | None = None  # what the test does to all of its nodes
    script: Path = SCRIPT
    rests: bool = False  # for a while nothing moves, so an early look can report where the ranks are


@dataclass(frozen=True)
class Frozen:
    """A job that freezes after ``after`` steps on rank ``culprit``, in the way ``freeze``."""

    name: str
    how: str
    freeze: str
    culprit: int = 0
    ranks: int = 2
    after: int = 45
    length: float = 0.1
    busy: bool = False
    causes: tuple[str, ...] = ()


def _trained(job: Job) -> bool:
    return job.process.poll() is not None or job.seconds > 16


def stop_the_ranks(nodes: Sequence[Job]) -> None:
    """Stops the whole job, like a debugger, a scheduler or a frozen cgroup."""
    nodes[-1].until(lambda: _trained(nodes[-1]), "some steps")
    pids = [pid for job in nodes for pid in job.pids()]
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in pids:
        _send(pid, signal.SIGCONT)


def suspend_everything(nodes: Sequence[Job]) -> None:
    """Stops the job and safelaunch, like a closed laptop or a paused virtual machine."""
    nodes[-1].until(lambda: _trained(nodes[-1]), "some steps")
    pids = [pid for job in nodes for pid in (job.process.pid, *job.pids())]
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in reversed(pids):
        _send(pid, signal.SIGCONT)


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # it has ended by now


DEFAULT_FLOOR: tuple[str, ...] = ()

HEALTHY: tuple[Healthy, ...] = (
    Healthy("steady"),
    Healthy("quick steps", length=0.01, steps=1500),
    Healthy("slow steps", length=1.0, steps=40),
    Healthy("very slow steps", length=3.0, steps=30),
    Healthy("four ranks", ranks=4),
    Healthy("eight ranks on two cores", ranks=8, length=0.02, steps=250),
    Healthy("a single rank", ranks=1),
    Healthy("bimodal", "bimodal"),
    Healthy("bimodal, slow", "bimodal", length=0.3, steps=60),
    Healthy("accumulating", "accumulating"),
    Healthy("accumulating, slow", "accumulating", length=0.4, steps=60),
    Healthy("curriculum", "curriculum"),
    Healthy("curriculum, steep", "curriculum", length=0.2, steps=100),
    Healthy("evaluation", "evaluating"),
    Healthy("evaluation, four ranks", "evaluating", ranks=4),
    Healthy("evaluation with output", "evaluating-aloud"),
    Healthy("rank 0 evaluates", "rank-0-evaluates"),
    Healthy("rank 0 evaluates, four ranks", "rank-0-evaluates", ranks=4),
    Healthy("rank 0 saves", "rank-0-saves"),
    Healthy("rank 0 saves, three ranks", "rank-0-saves", ranks=3),
    Healthy("all save", "all-save"),
    Healthy("rank 0 compresses", "compresses"),
    Healthy("a child evaluates", "child-evaluates"),
    Healthy("phase with a timeout", "timed-phase"),
    Healthy("pause", "pausing"),
    Healthy("one hiccup", "one-hiccup"),
    Healthy("a slow disk", "slow-disk"),
    Healthy("a download that looks frozen", "downloading", own=DEFAULT_FLOOR, rests=True),
    Healthy("long start", "long-start", rests=True),
    Healthy("long first step", "long-first-step"),
    Healthy("long tail", "long-tail"),
    Healthy("own steps", "own-steps"),
    Healthy("no steps at all", "no-steps"),
    Healthy("collectives, no steps", "collectives", own=("--startup-timeout=4",), length=0.005),
    Healthy("collectives of eight ranks", "collectives", own=("--startup-timeout=4",), length=0.0, ranks=8, steps=50),
    Healthy("workers asleep 4 s an item", "slow-loader", steps=36, length=0.01),
    Healthy("workers asleep, four ranks", "slow-loader", steps=35, length=0.01, ranks=4),
    Healthy("a rank that only evaluates", ranks=3, more=("--trainers=2",)),
    Healthy("trainers, and two other ranks", ranks=4, more=("--trainers=2",)),
    Healthy("logger and profiler", more=("--busy-thread",)),
    Healthy("a lot of output", "chatty"),
    Healthy("stopped for a while", meanwhile=stop_the_ranks, steps=250),
    Healthy("stopped, four ranks", meanwhile=stop_the_ranks, steps=250, ranks=4),
    Healthy("suspended with the watch", meanwhile=suspend_everything, steps=250),
    # With the default floor early looks come long before a suspicion.
    Healthy("long evaluation", "evaluating", steps=90, more=("--quiet=12",), own=DEFAULT_FLOOR),
    Healthy("rank 0 evaluates for long", "rank-0-evaluates", steps=110, more=("--quiet=12",), own=DEFAULT_FLOOR),
    Healthy("a child evaluates for long", "child-evaluates", steps=130, more=("--quiet=12",), own=DEFAULT_FLOOR),
    Healthy("rank 0 saves, by default", "rank-0-saves", own=DEFAULT_FLOOR),
    Healthy("a slow disk, by default", "slow-disk", own=DEFAULT_FLOOR, rests=True),
    Healthy("phase with a timeout, by default", "timed-phase", own=DEFAULT_FLOOR),
    Healthy("pause, by default", "pausing", own=DEFAULT_FLOOR),
    Healthy("very slow steps, by default", length=3.0, steps=30, own=DEFAULT_FLOOR),
    Healthy("long first step, by default", "long-first-step", own=DEFAULT_FLOOR),
    Healthy("stopped for a while, by default", meanwhile=stop_the_ranks, steps=250, own=DEFAULT_FLOOR),
)


def _everyday(name: str, how: str, starved: str = "", ranks: int = 2) -> Healthy:
    more = (f"--starved={starved}",) if starved else ()
    return Healthy(f"{name}{', ' + starved if starved else ''}", how, ranks, more=more, script=EVERYDAY)


HEALTHY += (
    _everyday("saves in a thread", "async-checkpoint", "nice"),
    _everyday("others poll for the evaluation", "polled-evaluation", ranks=3),
    _everyday("a large file", "large-file"),
    _everyday("uneven inputs under Join", "uneven-join", ranks=3),
    _everyday("a tokenizer, a line a second", "tokenizer"),
    _everyday("a pipe, a line a second", "slow-pipe"),
    _everyday("a file that grows", "growing-file"),
    _everyday("a slow first batch", "first-batch", "nice"),
    _everyday("a new loader each epoch", "new-loader", "crowd"),
    _everyday("a mapped file", "mapped-file", "quota"),
    _everyday("accumulation without sync", "no-sync"),
    _everyday("training in a thread", "thread", "nice"),
    _everyday("sleeps to throttle", "throttle", ranks=4),
    _everyday("a learning rate finder", "rate-finder", "crowd"),
    _everyday("compiles in a pool", "pool"),
    _everyday("an event loop", "event-loop", "quota"),
    _everyday("a timer's signals", "timer"),
    _everyday("objects", "objects", ranks=4),
    _everyday("sockets between ranks", "sockets", "crowd", ranks=3),
    _everyday("a store key", "key"),
    _everyday("a sweep in one process", "sweep"),
)

_WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sleep", ("stuck-in-user-code",)),
    ("lock", ("lock-deadlock",)),
    ("read", ("blocking-io",)),
    ("mismatch", ("collective-mismatch",)),
    ("loader", ("data-loading",)),
)
_RHYTHMS = ("steady", "bimodal", "accumulating", "curriculum", "evaluating", "rank-0-saves", "all-save", "one-hiccup")

_STEPPING = (
    Frozen(
        f"{how}, {way}{', busy thread' if (number + place) % 2 else ''}",
        how,
        way,
        culprit=(number + place) % 2,
        ranks=3 if way == "mismatch" else 2,
        busy=bool((number + place) % 2),
        causes=causes,
    )
    for number, how in enumerate(_RHYTHMS)
    for place, (way, causes) in enumerate(_WAYS)
)
FROZEN: tuple[Frozen, ...] = (
    *_STEPPING,
    Frozen("raises and never exits", "steady", "raise", 1, causes=("rank-exception",)),
    Frozen("raises and never exits, busy thread", "evaluating", "raise", busy=True, causes=("rank-exception",)),
    # Without step marks: in its loop after a minute, frozen after ten floors without a collective.
    Frozen("collectives, no steps", "collectives", "sleep", 1, after=900, causes=("stuck-in-user-code",)),
)


def run_healthy(case: Healthy, scratch: Path) -> list[str]:
    """Runs a healthy job. Returns what went wrong; empty if safelaunch left it alone."""
    mine = [*script_of(case), f"--scratch={scratch}"]
    with Job([*case.own, f"--nproc-per-node={case.ranks}", case.script, *mine], scratch) as job:
        if case.meanwhile is not None:
            case.meanwhile([job])
        result = job.wait(300.0)
    return wrong_with_healthy(case, [result], case.ranks)


def wrong_with_healthy(case: Healthy, results: Sequence[Result], ranks: int) -> list[str]:
    """Returns what is wrong with a healthy job, from the results of each node."""
    trained = sum(line.endswith(" trained") for result in results for line in result.stdout.splitlines())
    trainers = next((int(word.partition("=")[2]) for word in case.more if word.startswith("--trainers")), ranks)
    wrong = [f"exit code {result.code}" for result in results if result.code]
    wrong += [f"{trained} of {trainers} ranks trained to the end"] if trained != trainers else []
    # Waits for the outside are neither dead nor alive: their bundle must say so, and that the job has recovered.
    accused = [one for result in results for one in result.bundles if not is_of_a_recovered_wait(one)]
    wrong += [f"a bundle: {bundle.path.name}" for bundle in accused]
    wrong += [problem for result in results for problem in wrong_with_words(result.stderr, rests=case.rests)]
    return wrong + [left for result in results for left in result.leftovers]


def is_of_a_recovered_wait(bundle: Bundle) -> bool:
    return bundle.verdict["outcome"] == "suspect" and bundle.verdict.get("recovered") is True


def wrong_with_words(stderr: str, *, rests: bool) -> list[str]:
    """Returns wrong words of early looks at a healthy job: that it hangs, or that a working rank stands still."""
    found = []
    for words in re.findall(r"^safelaunch: quiet for .*?: (.*)\.\.\. watching$", stderr, re.MULTILINE):
        if re.search(r"\b(hangs?|hung|stuck|deadlock|fault|culprit|blamed?)\b", words):
            found.append(f"an early word accuses: {words}")
        elif not rests and " active at " not in words:
            found.append(f"an early word of a job that moves: {words}")
    return found


WORKS = "but the job is working"


def run_frozen(case: Frozen, scratch: Path) -> tuple[list[str], Result]:
    """Runs a frozen job. Returns what went wrong; empty if safelaunch named the freeze, and ended what was proved."""
    mine = [*script_of(case), f"--scratch={scratch}"]
    with Job([f"--stall-floor={FLOOR_S}", f"--nproc-per-node={case.ranks}", SCRIPT, *mine], scratch) as job:
        end_what_is_not_proved(case, [job])
        result = job.wait()
    return wrong_with_frozen(case, result), result


def end_what_is_not_proved(case: Frozen, jobs: Sequence[Job]) -> None:
    """Waits for the answer on each node.

    A job without a proof would be ended half an hour later, if at all.
    """

    def answered() -> bool:
        return all(job.bundles() for job in jobs) or (case.busy and any(WORKS in job.stderr for job in jobs))

    jobs[0].until(answered, "an answer", 300.0)
    if not all(job.bundles() and job.bundles()[0].verdict["outcome"] != "suspect" for job in jobs):
        for job in jobs:
            job.process.terminate()


def script_of(case: Healthy | Frozen) -> list[str]:
    """The script's arguments."""
    if isinstance(case, Healthy) and case.script == EVERYDAY:
        return [f"--how={case.how}", *case.more]
    if isinstance(case, Healthy):
        return [f"--how={case.how}", f"--steps={case.steps}", f"--length={case.length}", *case.more]
    mine = [f"--how={case.how}", f"--freeze={case.freeze}", f"--culprit={case.culprit}", f"--after={case.after}"]
    return [*mine, f"--length={case.length}", *(["--busy-thread"] if case.busy else [])]


def wrong_with_frozen(case: Frozen, result: Result) -> list[str]:
    if case.busy and WORKS in result.stderr:  # a thread does more than while the job made steps: that might be work
        return [*result.leftovers]
    if len(result.bundles) != 1:
        return [f"{len(result.bundles)} bundles", *result.leftovers]
    outcome = result.verdict["outcome"]
    wrong = [f"exit code {result.code}, {outcome}"] if (result.code == 124) != (outcome == "hang") else []
    verdict = result.verdict
    if verdict["cause"] not in case.causes:
        wrong.append(f"cause {verdict['cause']}")
    if [culprit["rank"] for culprit in verdict["culprits"]] != [case.culprit]:
        wrong.append(f"culprits {[culprit['rank'] for culprit in verdict['culprits']]}")
    return [*wrong, *result.leftovers]
