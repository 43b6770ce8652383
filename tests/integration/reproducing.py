"""Runs what ``safelaunch reproduce`` writes, and compares its verdict with the one that it was written from.

The sources are the zoo's classes that hang at calls of torch.distributed, and jobs of ``tests/unit/synthetic.py``, as
their dumps alone tell of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import zoo
from jobs import Job

from safelaunch.capture import user_source
from safelaunch.capture.flight_dump import to_json
from safelaunch.diagnose import diagnose
from safelaunch.diagnose.rank_state import Facts
from safelaunch.model import Evidence, RankEvidence
from safelaunch.postmortem import locate
from safelaunch.reading.frames import basename
from safelaunch.reproduce import LOST, Reproduction, Wish, reproduction_of
from safelaunch.reproduce.program import RankProgram
from safelaunch.reproduce.programs import program_of
from safelaunch.reproduce.smaller import ABORTS, with_fewest_ranks
from safelaunch.reproduce.text import NO_SENDS

# What makes a rank stand, by the cause of the replay, where it cannot be the recorded one.
STAND_INS = {
    "missing-from-collective": ("stuck-in-user-code",),  # here its stack says why
    "data-loading": ("stuck-in-user-code",),
    "uninterruptible-io": ("stuck-in-user-code",),
    "gil-held": ("stuck-in-user-code",),
    "swallowed-exception": ("collective-mismatch", "uneven-batches"),
}
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
    """One reproduction. ``recorded`` and ``found``: cause and ranks at fault. ``why_not``: empty where they agree.

    ``in_part``: the verdict differs, but each rank stands at the same call, and the head of the script says why: with
    sends, NCCL's records of them have decided, and gloo makes none; with sizes that differ, gloo aborts ranks, whose
    records are lost; where rings have wrapped, what they have lost is what the verdict was in doubt about.
    """

    name: str
    recorded: tuple[str, tuple[int, ...]]
    found: tuple[str, tuple[int, ...]]
    ranks: int
    lines: int
    why_not: str = ""
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
    """The evidence of a generated job. None where the fault makes no difference."""
    import synthetic
    import verdict_corpus

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


def replay(name: str, evidence: Evidence, scratch: Path, wish: Wish = Wish()) -> Replay:  # noqa: B008 - frozen
    """Writes the script, runs it and compares the verdicts.

    A replay that a rank's record or stack is missing of says little: where it differs, it is run again, once. On a busy
    machine, a rank may not hand over its record in time, and other ranks stand out without it.
    """
    begun = scratch / "first"
    begun.mkdir()
    found, complete = _replay(name, evidence, begun, wish)
    if complete or not (found.why_not or found.in_part):
        return found
    again = scratch / "again"
    again.mkdir()
    return _replay(name, evidence, again, wish)[0]


def _replay(name: str, evidence: Evidence, scratch: Path, wish: Wish) -> tuple[Replay, bool]:
    """The replay, and whether its evidence is complete."""
    made = reproduction_of(evidence, wish, user_source.text)
    script = scratch / "repro.py"
    script.write_text(made.text)
    limit = "--max-stall=6" if "busy-loop" in made.text else "--max-stall=60"
    with Job([*OPTIONS, limit, f"--nproc-per-node={made.world_size}", script], scratch) as job:
        result = job.wait()
    told = Replay(name, (made.cause, made.culprits), ("-", ()), made.world_size, made.text.count("\n"))
    if len(result.bundles) != 1:
        why = f"exit code {result.code}, {len(result.bundles)} bundles: {result.said[-300:]}"
        return replace(told, why_not=why), True
    verdict = result.verdict
    told = replace(told, found=(verdict["cause"], tuple(one["rank"] for one in verdict["culprits"])))
    why = difference(made, verdict["outcome"], told.found)
    unseen = [text for text in verdict["missing"] if text.startswith(("no Flight", "no Python", "ranks not seen"))]
    why = why and " ".join([f"{why}: {verdict['summary']}", *(f"({text})" for text in unseen)])
    said = is_said(made, told.found[1])
    if why and said and (left := not_reached(evidence, wish, result.bundle.path)):
        why += f" (not at their last call: ranks {left})"
    elif why and said:
        return replace(told, in_part=why), not unseen
    return replace(told, why_not=why), not unseen


def is_said(made: Reproduction, found: Sequence[int]) -> bool:
    """Whether the head of the script says why its verdict may name such ranks."""
    more, fewer = set(made.culprits) <= set(found), set(found) <= set(made.culprits)
    fewer = bool(found) and fewer
    return NO_SENDS in made.notes or (ABORTS in made.notes and (more or fewer)) or (LOST in made.notes and fewer)


def not_reached(evidence: Evidence, wish: Wish, bundle: Path) -> list[int]:
    """The ranks that stand at another call than the last one that the script has for them.

    A call is known by the comment beside it: the user's line.
    """
    facts = Facts.of(evidence, user_source.text)
    if wish.fewest:
        evidence, _ = with_fewest_ranks(evidence, diagnose(evidence, user_source.text), user_source.text)
        facts = Facts.of(evidence, user_source.text)
    programs = program_of(facts, wish.extent).ranks
    told = {one.rank: one for one in locate.read(bundle).evidence.ranks}
    return [rank for rank, one in programs.items() if rank in told and not _is_at_the_end(one, told[rank])]


def _is_at_the_end(program: RankProgram, found: RankEvidence) -> bool:
    stacks = found.main.stacks if found.main is not None else ()
    frames = [frame for one in stacks[-1:] for thread in one.threads for frame in thread.frames]
    if found.exception is not None:
        frames = [*found.exception.frames]
    lines = Path(next((frame.file for frame in frames if frame.file.endswith("repro.py")), "/dev/null"))
    source = lines.read_text().splitlines()
    here = next((frame.line for frame in frames if frame.file.endswith("repro.py")), 0)
    near = [line.partition("# ")[2] for line in reversed(source[:here]) if "# " in line]
    at = program.end.site if program.end.kind != "waits" else program.calls[-1].site if program.calls else None
    return not frames or at is None or (bool(near) and f"{basename(at.file)}:{at.line}" in near[0])


def difference(made: Reproduction, outcome: str, found: tuple[str, tuple[int, ...]]) -> str:
    causes = (made.cause, *STAND_INS.get(made.cause, ()))
    if outcome not in (made.outcome, "crash"):  # gloo aborts at some sizes that other backends hang at
        return f"a {outcome}"
    if found[0] not in causes:
        return "another cause"
    return "" if found[1] == made.culprits else "other ranks"
