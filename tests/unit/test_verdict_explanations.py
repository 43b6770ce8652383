"""A caught exception explains a rank's lag if it was raised at the point of divergence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import msgspec
import pytest

from safelaunch.model import CaughtException, Collective, Culprit, Progress, RankEvidence, Verdict
from safelaunch.verdict import diagnose as diagnosing
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.explanations import EXPLANATIONS
from safelaunch.verdict.findings import Annotation, Finding, Reason, annotated
from tests.support.evidence import at, entry, in_c10d, job, rank, record
from tests.support.verdict_cases import CaseText, all_cases, calls_in, decision_of

SECOND = 1_000_000_000


def waits(number: int, calls: Sequence[tuple[str, int]], *exceptions: CaughtException) -> RankEvidence:
    """Returns a rank that made ``calls``, as (operation, line) from number 1, and waits in the last one."""
    entries: list[Collective] = [
        msgspec.structs.replace(entry(op, seq, done=seq < len(calls), line=line), created_ns=seq * SECOND)
        for seq, (op, line) in enumerate(calls, 1)
    ]
    op, line = calls[-1]
    return rank(number, in_c10d(op, line), flight=record(*entries), more={"caught": exceptions})


STEP, END = ("all_reduce", 50), ("barrier", 70)


# --- a batch that was skipped, in the rank's own words ----------------------------------------------------------------

SKIPS = "\n" * 45 + (
    "def train():\n"  # 46
    "    for batch in loader:\n"
    "        try:\n"
    "            loss = model(batch)\n"
    "            all_reduce(loss)\n"  # 50
    "        except OutOfMemoryError as error:\n"
    "            print('skipping batch:', error)\n"  # 52
    "            continue\n"
    "        if not isfinite(loss):\n"
    "            log.warning(f'loss is {loss}, batch {number} is left out')\n"  # 55
    "            continue\n"
    "        if patience.over(rank, loss):\n"
    "            print(f'rank {rank} stops early')\n"  # 58
    "            break\n"
    "        all_reduce(step)\n"  # 60
    "    barrier()\n"  # 61
)


def with_log(one: RankEvidence, *lines: str) -> RankEvidence:
    return msgspec.structs.replace(one, log_tail="".join(f"13:00:49.591 out| {line}\n" for line in lines))


def skipping(*lines: str, peers: Sequence[str] = (), world: int = 3) -> Verdict:
    """Rank 1 has left the loop one round earlier; ``lines`` are its output, ``peers`` the others' output."""
    calls = [("all_reduce", 50), ("all_reduce", 60)] * 5
    ranks = [with_log(waits(n, calls), "step 1", *peers) for n in range(world)]
    ranks[1] = with_log(waits(1, [*calls[:-2], ("barrier", 61)]), "step 1", *lines)
    return diagnose(job(*ranks), lambda path: SKIPS)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("line", "cause", "at_line", "way"),
    [
        ("skipping batch: CUDA out of memory. Tried to", "swallowed-exception", 52, "`except OutOfMemoryError`"),
        ("WARNING loss is nan, batch 7 is left out", "collective-mismatch", 55, "`if not isfinite(loss)`"),
        ("rank 1 stops early", "uneven-batches", 61, "`if patience.over(rank, loss)`"),
    ],
)
def test_skip_message_of_a_rank_explains_its_missing_calls(
    line: str, cause: str, at_line: int, way: str, world: int
) -> None:
    verdict = skipping(line, world=world)
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == (cause, [1])
    assert verdict.culprits[0].frame == at(at_line)
    assert f"printed '{line}'" in verdict.summary and f"in {way}" in verdict.summary
    assert any(claim.file == "ranks/1/log_tail.txt" for claim in verdict.evidence)
    if cause != "uneven-batches":
        assert verdict.confidence == "medium"
        conditions = [claim.claim for claim in verdict.evidence if "under `if" in claim.claim]
        assert not conditions, "only the condition at which the rank continued is evidence"


def test_message_also_printed_by_peers_explains_nothing() -> None:
    line = "skipping batch: CUDA out of memory"
    assert skipping(line, peers=["skipping batch: CUDA out of memory on another GPU"]).cause == "uneven-batches"
    assert skipping("something else").cause == "uneven-batches"


# --- past a loop: fewer batches, or the same and fewer calls ----------------------------------------------------------


def at_steps(ranks: Sequence[RankEvidence], *steps: int) -> list[RankEvidence]:
    return [
        msgspec.structs.replace(one, progress=Progress(n, n, len(ranks), 0, 1000 + n, n, "torch", step))
        for n, (one, step) in enumerate(zip(ranks, steps, strict=True))
    ]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("            pass\n", ""),
        ("            if bad(batch):\n                continue\n", "`if bad(batch): continue` at train.py:50"),
        ("            if len(batch) > 9:\n                break\n", ""),
        ("            with model.no_sync():\n                model(batch)\n", "`no_sync()` at line 49"),
        ("            try:\n                model(batch)\n            except OSError:\n                pass\n", ""),
    ],
)
@pytest.mark.parametrize("more_steps", [0, 1])
def test_skipped_calls_rank_past_the_loop_is_alternative(body: str, why: str, more_steps: int) -> None:
    source = "\n" * 45 + (
        "def train():\n"  # 46
        "    for batch in loader:\n"
        "        if True:\n"
        f"{body}"
        "        all_reduce(step)\n"
        "    barrier()\n"
    )
    last = source.count("\n")
    ranks = [waits(n, [("all_reduce", last - 1)] * 10) for n in range(2)]
    ranks[1] = waits(1, [*[("all_reduce", last - 1)] * 9, ("barrier", last)])
    verdict = diagnose(job(*at_steps(ranks, 9, 9 + more_steps)), lambda path: source)
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("uneven-batches", [1])
    reasons = [*([why] if why else []), *(["1 more step, with as many calls"] if more_steps else [])]
    assert all(reason in verdict.summary for reason in reasons), verdict.summary
    assert ("after a round without these calls" in verdict.summary) == bool(reasons)
    assert (Doubt.MAY_SKIP_CALLS.why in verdict.doubts) == bool(reasons)
    assert ("(`if len(batch) > 9` at line 49 can end it early)" in verdict.summary) == ("break" in body)
    first = "If that `if`" if "break" in body else "If its forward" if more_steps else "Look" if reasons else "Give"
    assert verdict.suggestions[0].startswith(first)


@pytest.mark.parametrize(("steps", "told"), [(20, "11 more steps"), (2, "7 fewer steps"), (8, ""), (10, "")])
def test_differing_step_counts_with_equal_calls_are_reported(steps: int, told: str) -> None:
    ranks = [waits(n, [STEP] * 10) for n in range(4)]
    ranks[1] = waits(1, [*[STEP] * 9, ("all_gather", 60)])
    summary = diagnose(job(*at_steps(ranks, 9, steps, 9, 9))).summary
    assert (f"rank 1 has made {told} with as many calls" in summary) == bool(told)
    assert ("steps with as many calls" in summary) == bool(told)


# --- a group that the rank is not in: torch only warns, and its own group waits ---------------------------------------

GROUPS = {"1": (0, 1), "2": (2, 3)}


def one(number: int, text: str, line: int, log: str = "") -> RankEvidence:
    found = rank(number, in_c10d("all_reduce", line), flight=record(*calls_in(text), groups=GROUPS))
    return msgspec.structs.replace(found, log_tail=log)


# --- the order of explanations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_order_of_explanations_changes_no_decision(case: CaseText, monkeypatch: pytest.MonkeyPatch) -> None:
    read = case.read()
    before, chance = decided(read.verdict), random.Random(case.name)
    shuffled = tuple(tuple(chance.sample(phase, len(phase))) for phase in EXPLANATIONS)
    monkeypatch.setattr(diagnosing, "EXPLANATIONS", shuffled)
    assert decided(read.verdict) == before


def decided(verdict: Verdict) -> tuple[object, ...]:
    unordered = (verdict.doubts, verdict.ruled_out, verdict.summary.split())
    return (decision_of(verdict), verdict.culprits, verdict.suggestions, *map(sorted, unordered))


def test_surest_reason_wins_whatever_the_order_of_annotations() -> None:
    finding = Finding("collective-mismatch", (Doubt.STACKS_ALONE,), "They do not meet.", of="sizes")
    named = {reason: (Culprit(reason, "node", 1, "main", None, None, reason.name),) for reason in Reason}
    notes = [Annotation(why.name, cause=why.name, culprits=named[why], explains=why) for why in Reason]
    withdrawn = Annotation("No rank is named.", doubts=(Doubt.NO_PATTERN,), culprits=(), of="own choice")
    for some in (notes, notes[2:]):
        for order in permutations([*some, withdrawn]):
            after = annotated(finding, order)
            assert (after.cause, after.doubts, after.culprits) == (some[0].cause, (), some[0].culprits)
            assert (after.of, after.summary) == ("sizes", f"{some[0].sentence} They do not meet.")
    after = annotated(finding, [withdrawn])
    assert (after.of, after.doubts) == ("own choice", (Doubt.STACKS_ALONE, Doubt.NO_PATTERN))
    with pytest.raises(AssertionError, match="order"):
        annotated(finding, [withdrawn, withdrawn])
