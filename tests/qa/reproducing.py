"""Runs scripts of ``safelaunch reproduce``, and compares their verdicts with the original ones.

The sources are the zoo's classes that hang in calls of torch.distributed, and the dumps of jobs from
``tests/support/synthetic.py``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safelaunch.addons.reproduce import LOST, Hang, Reproduction, ScriptOptions, compare_run, reproduction_of
from safelaunch.addons.reproduce.tensor_sizes import ABORTS
from safelaunch.addons.reproduce.text import NO_SENDS
from safelaunch.bundle.reading import locate
from safelaunch.capture import user_source
from safelaunch.capture.flight_dump import to_json
from safelaunch.model import Evidence
from tests.qa import zoo
from tests.support.jobs import Job

# The zoo's classes in which ranks wait for each other, and those in which one stands by itself, of each kind one.
CLASSES = (
    "all-gather", "barrier", "broadcast", "roots", "group-order", "left-out", "recv-recv", "tags", "no-send", "unused",
    "thread-behind", "thread-mismatch", "loop-barrier", "loop-break", "guard-tuple", "guard-return", "batch-ring",
    "object-roots", "uneven-barrier", "uneven-thread", "swallowed", "swallowed-of-two", "swallowed-end", "polled-work",
    "flag", "unsent",
    "symmetric", "asleep", "read-pipe", "lock-order", "busy-python", "stops-itself", "init-asleep", "loader-asleep",
)  # fmt: skip
# The job has made its calls within a moment. Only a rank that spins is never still; a job that starts is neither.
OPTIONS = ("--stall-timeout=2", "--startup-timeout=3")
LAYOUTS = ((2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1), (2, 1, 2))
KINDS = ("stop", "skip", "extra", "swap", "shape", "op", "group", "retry", "members", "random")
THREADED = ("side thread", "main thread")  # of no other variant
VARIANTS = ("sends, no stacks", "window, no stacks", "no stacks")

Case = tuple[str, ...]  # a class of the zoo, or kind, variant and seed of a generated job


@dataclass(frozen=True)
class Replay:
    """One reproduction: cause and ranks at fault in the recording and in the run of the script."""

    name: str
    recorded: tuple[str, tuple[int, ...]]
    found: tuple[str, tuple[int, ...]]
    ranks: int
    lines: int
    why_not: str = ""  # empty if they agree
    # The verdict differs, but each rank stalls at the same call, and the header explains why: NCCL's records of
    # sends were decisive, and gloo has none; gloo aborts ranks if sizes differ, so their records are lost; or the
    # verdict depended on calls that the rings have lost.
    in_part: str = ""


def of_zoo(name: str, culprit: int, scratch: Path) -> Evidence:
    """Runs a class of the zoo; returns what its bundle tells."""
    with zoo.start(zoo.BY_NAME[name], culprit, scratch) as job:
        result = job.wait()
    return locate.read(result.bundle.path).evidence


def layout_of(case: Case) -> tuple[int, int, int]:
    """Each kind and variant with another one. Sends need a pipeline."""
    kind, variant, seed = case
    number = VARIANTS.index(variant) + len(VARIANTS) * int(seed)
    return (1, 2, 2) if "sends" in variant else LAYOUTS[(number + sum(map(ord, kind))) % len(LAYOUTS)]


def on_paper(case: Case, layout: Sequence[int] = ()) -> Evidence | None:
    """Returns the evidence of a generated job; None if the fault makes no difference."""
    from scripts.research import verdict_corpus
    from tests.support import synthetic

    kind, variant, seed = case
    layout = synthetic.Layout(*(layout or layout_of(case)))
    found = verdict_corpus.hanging(layout, kind, variant, random.Random(int(seed)))
    return found[1] if found is not None else None


def of_dumps(case: Case, scratch: Path, layout: Sequence[int] = ()) -> Evidence:
    """Writes the dumps of a generated job; returns what they tell."""
    evidence = on_paper(case, layout)
    assert evidence is not None
    for rank in evidence.ranks:
        assert rank.flight_record is not None
        (scratch / f"dump_{rank.rank}.json").write_bytes(to_json(rank.flight_record))
    return locate.read(scratch).evidence


def replay(name: str, evidence: Evidence, scratch: Path, options: ScriptOptions = ScriptOptions()) -> Replay:  # noqa: B008 - frozen
    """Writes the script, runs it and compares the verdicts.

    If the replay differs and a rank's record or stack is missing, it is run once more: on a busy machine, a rank might
    not deliver its record in time, and other ranks stand out without it.
    """
    begun = scratch / "first"
    begun.mkdir()
    found, complete = _replay(name, evidence, begun, options)
    if complete or not (found.why_not or found.in_part):
        return found
    again = scratch / "again"
    again.mkdir()
    return _replay(name, evidence, again, options)[0]


def _replay(name: str, evidence: Evidence, scratch: Path, options: ScriptOptions) -> tuple[Replay, bool]:
    """The replay, and whether its evidence is complete."""
    made = reproduction_of(evidence, options, user_source.text)
    script = scratch / "repro.py"
    script.write_text(made.text)
    limit = "--max-stall=6" if "busy-loop" in made.text else "--max-stall=60"
    with Job([*OPTIONS, limit, f"--nproc-per-node={made.world_size}", script], scratch) as job:
        result = job.wait()
    recorded = (made.hang.cause, made.hang.culprits)
    told = Replay(name, recorded, ("-", ()), made.world_size, made.text.count("\n"))
    if len(result.bundles) != 1:
        why = f"exit code {result.code}, {len(result.bundles)} bundles: {result.said[-300:]}"
        return replace(told, why_not=why), True
    unlike, found = compare_run(made.hang, locate.read(result.bundle.path).evidence, user_source.text)
    told = replace(told, found=(found.cause, found.culprits))
    verdict = result.verdict
    unseen = [text for text in verdict["missing"] if text.startswith(("no Flight", "no Python", "ranks not seen"))]
    why = "; ".join(unlike)
    if why and is_said(made, found.culprits) and not different_calls(made.hang, found):
        return replace(told, in_part=why), not unseen
    why = why and " ".join([f"{why}: {verdict['summary']}", *(f"({text})" for text in unseen)])
    return replace(told, why_not=why), not unseen


def different_calls(recorded: Hang, found: Hang) -> bool:
    return any(rank in found.ranks and one.differs(found.ranks[rank]) for rank, one in recorded.ranks.items())


def is_said(made: Reproduction, found: Sequence[int]) -> bool:
    """Returns True if the script's header explains why its verdict names these ranks."""
    more, fewer = set(made.hang.culprits) <= set(found), set(found) <= set(made.hang.culprits)
    fewer = bool(found) and fewer
    return NO_SENDS in made.notes or (ABORTS in made.notes and (more or fewer)) or (LOST in made.notes and fewer)
