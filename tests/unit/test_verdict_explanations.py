"""An exception that a rank caught explains that it is behind, where it lies at the point at which the ranks parted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from safelaunch.model import CaughtException, Collective, Evidence, Progress, RankEvidence, RankExit, Verdict
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt
from tests.support.evidence import SCRIPT, at, entry, in_c10d, job, past, rank, record
from tests.support.verdict_cases import calls_in

SECOND = 1_000_000_000


def caught(after: float, line: int = 30, kind: str = "ValueError") -> CaughtException:
    """``after`` is a time: call number n is made at second n."""
    return CaughtException(kind, "a truncated image", after, at(line, "decode"), at(62))


def waits(number: int, calls: Sequence[tuple[str, int]], *exceptions: CaughtException) -> RankEvidence:
    """``calls``: (operation, line) from number 1 on; it waits in the last one."""
    entries: list[Collective] = [
        msgspec.structs.replace(entry(op, seq, done=seq < len(calls), line=line), created_ns=seq * SECOND)
        for seq, (op, line) in enumerate(calls, 1)
    ]
    op, line = calls[-1]
    return rank(number, in_c10d(op, line), flight=record(*entries), more={"caught": exceptions})


STEP, END = ("all_reduce", 50), ("barrier", 70)
WHOLE = [STEP] * 10


def reached(evidence: Evidence) -> tuple[str, list[int], str]:
    verdict = diagnose(evidence)
    return verdict.cause, [c.rank for c in verdict.culprits], verdict.confidence


def test_where_the_records_show_the_place_too() -> None:
    calls = [("all_reduce", 50), ("broadcast", 51), ("all_gather", 52)] * 4
    ranks = [waits(n, calls[:10]) for n in range(3)]
    ranks[1] = waits(1, [*calls[:4], *calls[5:10], END], caught(4.5))
    assert reached(job(*ranks)) == ("swallowed-exception", [1], "high")
    ranks[1] = waits(
        1, [*calls[:4], *calls[5:10], END], caught(1.5)
    )  # that one was before, and no call is missing there
    assert reached(job(*ranks))[:2] == ("collective-mismatch", [1])


def test_peers_that_caught_the_same_went_on_all_the_same() -> None:
    ranks = [waits(n, WHOLE, caught(5.4)) for n in range(3)]
    ranks[1] = waits(1, [*WHOLE[1:], END], caught(5.5))
    assert reached(job(*ranks))[:2] == ("collective-mismatch", [1])


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
    """Rank 1 has left the loop one round earlier; ``lines`` are its output, ``peers`` that of the others."""
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
def test_what_a_rank_printed_as_it_skipped_a_batch(line: str, cause: str, at_line: int, way: str, world: int) -> None:
    verdict = skipping(line, world=world)
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == (cause, [1])
    assert verdict.culprits[0].frame == at(at_line)
    assert f"printed '{line}'" in verdict.summary and f"in {way}" in verdict.summary
    assert any(claim.file == "ranks/1/log_tail.txt" for claim in verdict.evidence)
    if cause != "uneven-batches":
        assert verdict.confidence == "medium"
        conditions = [claim.claim for claim in verdict.evidence if "under `if" in claim.claim]
        assert not conditions, "another condition than the one at which it went on is no evidence"


def test_who_stops_early_and_exits_is_to_agree_on_that_with_its_peers() -> None:
    calls = [("all_reduce", 50), ("all_reduce", 60)] * 5
    ranks = [with_log(waits(n, calls), "step 1") for n in range(3)]
    gone = with_log(waits(1, calls[:-2]), "step 1", "rank 1 stops early")
    ranks[1] = msgspec.structs.replace(gone, main=None, exit=RankExit(0, 4.0, before_close=True))
    verdict = diagnose(job(*ranks, outcome="crash"), lambda path: SKIPS)
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("uneven-batches", [1])
    assert verdict.suggestions[0].startswith("If that `if` is why"), verdict


def test_what_its_peers_printed_as_well_explains_nothing() -> None:
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
def test_who_is_past_the_loop_may_have_skipped_calls_instead(body: str, why: str, more_steps: int) -> None:
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
def test_more_or_fewer_steps_with_as_many_calls_are_told(steps: int, told: str) -> None:
    ranks = [waits(n, [STEP] * 10) for n in range(4)]
    ranks[1] = waits(1, [*[STEP] * 9, ("all_gather", 60)])
    summary = diagnose(job(*at_steps(ranks, 9, steps, 9, 9))).summary
    assert (f"rank 1 has made {told} with as many calls" in summary) == bool(told)
    assert ("steps with as many calls" in summary) == bool(told)


@pytest.mark.parametrize(("ahead_s_step", "left"), [(20, True), (26, False)])
def test_who_has_returned_from_a_loop_has_left_it(ahead_s_step: int, left: bool) -> None:
    """A loop of a function that all have called in this round; steps tell where some make more calls than others."""
    source = "\n" * 39 + (
        "def evaluate():\n"  # 40
        "    for x in batches:\n"
        "        all_reduce(x)\n"
        "def train():\n"
        "    while True:\n"
        "        evaluate()\n"  # 45
        "        barrier()\n"
    )
    *waiting, module = in_c10d("all_reduce", 42, "evaluate")
    ranks = [rank(n, in_c10d("barrier", 46), flight=record(*past(3), entry("barrier", 4))) for n in range(3)]
    ranks[1] = rank(1, (*waiting, at(45), module), flight=record(*past(3), entry("all_reduce", 4)))
    ranks = at_steps(ranks, ahead_s_step, 20, ahead_s_step)
    verdict = diagnose(job(*ranks), lambda path: source if path == SCRIPT else None)
    assert [one.rank for one in verdict.culprits] == [1]
    assert (
        "ranks 0,2 have left the loop at train.py:41, in this iteration or the previous one" in verdict.summary
    ) == left
    assert ("6 fewer steps with as many calls" in verdict.summary) != left


def test_an_exception_that_ends_the_loop_is_no_way_around_its_calls() -> None:
    source = "\n" * 45 + (
        "def train():\n"  # 46
        "    try:\n"
        "        for batch in loader:\n"  # 48
        "            all_reduce(step)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "    barrier()\n"  # 52
    )
    ranks = [waits(0, [("all_reduce", 49)] * 10), waits(1, [*[("all_reduce", 49)] * 9, ("barrier", 52)])]
    verdict = diagnose(job(*ranks), lambda path: source)
    assert (verdict.cause, verdict.confidence) == ("uneven-batches", "high")
    assert "without these calls" not in verdict.summary


@pytest.mark.parametrize("others", [[12], [12, 19, 25]])
@pytest.mark.parametrize("who", [0, 2])
def test_calls_from_another_line_make_nobody_ahead_who_ends_where_others_do(others: list[int], who: int) -> None:
    """Calls that are all alike agree under any shift: a rank that took another way to the same call is level."""
    usual = [("all_reduce", 50)] * 30
    own = [("all_reduce", 44 if number in others else 50) for number in range(1, 31)]
    ranks = [waits(n, own if n == who else usual) for n in range(4)]
    ranks[1] = waits(1, [*usual[:-1], ("barrier", 70)])
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("collective-mismatch", [1])
    assert "ahead of its peers" not in verdict.summary


def test_three_calls_more_are_found_where_all_later_calls_come_from_one_line() -> None:
    """One line of a sharded model gathers, gathers, and reduces: what it called tells a shift from another way."""
    step = [("all_gather", 18)] * 3 + [("all_reduce", 18)] * 3
    usual = step * 6 + [("all_gather", 18)] * 3
    ranks = [waits(n, [*usual, *step[3:]]) for n in range(4)]
    ranks[0] = waits(0, [*step * 6, *[("all_gather", 15)] * 3, *step[:3]])
    verdict = diagnose(job(*ranks))
    assert [(one.rank, one.frame and one.frame.line) for one in verdict.culprits] == [(0, 15)]
    assert "Rank 0 called 3 collectives" in verdict.summary


@pytest.mark.parametrize("matching", [2, 4])
def test_calls_that_match_again_are_not_said_to_have_matched_no_more(matching: int) -> None:
    steps = [("all_reduce", 50), ("broadcast", 51), ("all_gather", 52)] * 4
    ranks = [waits(n, [*steps, *steps[:matching]]) for n in range(3)]
    ranks[1] = waits(1, [*steps, ("all_gather", 52), *steps[:matching]])
    verdict = diagnose(job(*ranks))
    agree = any("peers' again, shifted by 1" in one.claim for one in verdict.evidence)
    assert agree and not any("have not matched" in one for one in verdict.doubts)


# --- a group that the rank is not in: torch only warns, and its own group waits ---------------------------------------

GROUPS = {"1": (0, 1), "2": (2, 3)}


def warning(number: int, op: str = "all_reduce") -> str:
    return (
        f"13:00:49.591 err| UserWarning: Running {op} on global rank {number} which does not belong to the given group."
    )


def one(number: int, text: str, line: int, log: str = "") -> RankEvidence:
    found = rank(number, in_c10d("all_reduce", line), flight=record(*calls_in(text), groups=GROUPS))
    return msgspec.structs.replace(found, log_tail=log)


def halves(**logs: str) -> Evidence:
    """Ranks 1 and 2 are past line 60 and in the next call of all; 0 and 3 wait at line 60 in their halves."""
    return job(
        one(0, "0@50x3 1@60*", 60),
        one(1, "0@50x3 0@70*", 70, logs.get("first", "")),
        one(2, "0@50x3 0@70*", 70, logs.get("second", "")),
        one(3, "0@50x3 2@60*", 60),
    )


def test_who_took_the_wrong_group_is_named_with_the_call() -> None:
    verdict = diagnose(halves(first=warning(1), second=warning(2)))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("missing-from-collective", [1, 2])
    assert {c.frame and (c.frame.file, c.frame.line) for c in verdict.culprits} == {(at(60).file, 60)}
    assert "Ranks 1-2 called all_reduce on a group that they are not in" in verdict.summary
    assert "ranks 0,3 wait in all_reduce at train.py:60 (train) in their own groups" in verdict.summary
    assert {"ranks/1/log_tail.txt", "ranks/2/log_tail.txt"} <= {claim.file for claim in verdict.evidence}
    assert "Use only groups that the rank is in" in verdict.suggestions[0]
    assert not any("caught exception" in text for text in verdict.suggestions)


def test_who_calls_from_a_line_in_another_group_than_before_has_left_its_habit() -> None:
    """Frames of stacks have the names of classes, and those of records have none."""
    waits = in_c10d("broadcast", 70), in_c10d("all_reduce", 60, "Exchange.train")
    made = [calls_in("0@50x3 1@60x3 broadcast:0@70*"), calls_in("0@50x3 2@60x3 0@60*")]
    ranks = [rank(n, waits[n // 2], flight=record(*made[n // 2], groups=GROUPS)) for n in range(4)]
    verdict = diagnose(job(*ranks))
    assert [c.rank for c in verdict.culprits] == [2, 3]
    assert verdict.summary.startswith(
        "Rank 2 made its 3 earlier calls at train.py:60 (Exchange.train) in group '2': with group '0' it may have "
        "taken the wrong one. The same holds for rank 3. Ranks 0-1 wait in broadcast at train.py:70 (train)."
    )
    assert "Check how this line selects its group" in verdict.suggestions[0]


def test_the_call_at_which_a_rank_diverged_tells_its_habit_though_it_has_gone_on() -> None:
    """Rank 3 has met rank 1's later call, in the group of replicas, and waits in it for the next."""
    groups = {"1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
    made = {0: ("1 3", "1@50 3@60*", 60), 1: ("1 4", "1@50 4@60 1@50*", 50)}
    made |= {2: ("2 3", "2@50*", 50), 3: ("2 4", "4@50 4@60*", 60)}
    ranks = []
    for n, (own, rest, line) in made.items():
        tensor, replicas = own.split()
        flight = record(*calls_in(f"{tensor}@50 {replicas}@60 " * 4 + rest), groups=groups)
        ranks.append(rank(n, in_c10d("all_reduce", line), flight=flight))
    verdict = diagnose(job(*ranks))
    assert [one.rank for one in verdict.culprits] == [3]
    words = "Rank 3 made its 4 earlier calls at train.py:50 (train) in group '2': with group '4' it may have taken the"
    assert verdict.summary.startswith(words), verdict.summary


def test_groups_entered_in_another_order_are_no_wrong_group() -> None:
    groups = {"1": (1, 2), "2": (1, 2)}
    made = ["0@50x3 0@70*", "0@50x3 1@60 2@61 1@60 2@61 1@60*", "0@50x3 1@60 2@61 1@60 2@61 2@60*"]
    ranks = [
        rank(n, in_c10d("all_reduce", 70 if n == 0 else 60), flight=record(*calls_in(one), groups=groups))
        for n, one in enumerate(made)
    ]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("group-order", [1, 2])
