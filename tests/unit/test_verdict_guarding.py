"""Conditions on the rank in the source, and what they add to a verdict."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from safelaunch.model import Collective, Frame, GilTest, HandledException, RankException, RankExit, Verdict
from safelaunch.verdict.blame import waiting_culprits
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding, annotated
from safelaunch.verdict.guarding import by_stack, guards
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.evidence import C10D, MODULE, at, entry, in_c10d, job, past, rank, record, script, waiting


def verdict_of(source: str, *ranks: int, odd: int = 41, op: str = "all_gather", world: int = 2) -> Verdict:
    """``ranks`` wait in ``op`` at line ``odd``, the others in all_reduce at line 50. ``source`` begins at line 40."""
    sides = [rank(n, in_c10d(op, odd)) if n in ranks else waiting(n, flight=None) for n in range(world)]
    return diagnose(job(*sides), script(source))


def test_one_against_one_the_call_that_a_condition_keeps_the_other_from_is_at_fault() -> None:
    verdict = verdict_of("if rank == 1:\n    gather()\n", 1)
    assert [c.rank for c in verdict.culprits] == [1] and "either side" not in verdict.summary
    assert verdict.confidence != "high"  # the other may have left out what was to meet it
    assert "Rank 0 never reaches train.py:41 (train) because of `if rank == 1 (train.py:40)`." in verdict.summary
    assert any(claim.file == "ranks/1/stack.txt" and "never reach" in claim.claim for claim in verdict.evidence)


@pytest.mark.parametrize("world", [2, 3])
def test_a_call_behind_a_condition_in_the_last_round_is_no_sign_of_fewer_batches(world: int) -> None:
    """The peers' loop has ended as it ought to; in no round would they have come to that call."""
    loop = "for step in range(9):\n    if rank == 1 and step == 8:\n        gather()\n"
    verdict = verdict_of(loop + "more()\n" * 9, 1, odd=42, world=world)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [1])
    both = loop.replace("gather()\n", "gather()\n    else:\n        gather(1)\n")  # a pipeline's stages, say
    assert verdict_of(both + "more()\n" * 9, 1, odd=42, world=world).cause == "uneven-batches"
    verdict = verdict_of(loop.replace("rank == 1 and ", "") + "more()\n" * 9, 1, odd=42, world=world)
    assert verdict.cause == "uneven-batches"


def test_what_to_do_where_one_rank_alone_tries_again() -> None:
    tries = "for k in range(3):\n    try:\n        return gather()\n    except OSError:\n        sleep()\n"
    verdict = verdict_of(tries + "more()\n" * 9, 1, odd=42, world=4)
    assert "depends on `except OSError, then another attempt (train.py:43)`" in verdict.summary
    assert verdict.suggestions[0].startswith("Don't retry code that contains collectives")


@pytest.mark.parametrize(
    ("source", "odd", "decides"),
    [
        ("if loss < best:\n    gather()\n", 41, "`if loss < best (train.py:40)`"),
        ("for n in range(9):\n    if n % 2:\n        gather()\n    step()\n" + "    step()\n" * 7, 42, ""),
    ],
)
@pytest.mark.parametrize("odd_ranks", [(1,), (0, 2, 3)])
def test_what_decides_the_way_is_told_whatever_it_asks_for(
    source: str, odd: int, decides: str, odd_ranks: tuple[int, ...]
) -> None:
    whole = source if source.count("\n") > 8 else source + "step()\n" * 9
    summary = verdict_of(whole, *odd_ranks, odd=odd, world=4).summary
    assert (f"Which way a rank goes depends on {decides}." in summary) == bool(decides)
    assert ("Which way" in summary) == bool(decides)


def test_who_goes_through_one_loop_in_another_order_is_told_so() -> None:
    source = "def sync():\n    for part in parts:\n        if part is None:\n            continue\n        part(m)\n"
    ways = [(*in_c10d(op, line, name)[:-1], at(44, "sync"), MODULE) for op, line, name in PARTS]
    verdict = diagnose(job(*(rank(n, way) for n, way in enumerate(ways))), script(source))
    loop = "Both sides come from one line of `for part in parts (train.py:41)`: they go through different items, or in"
    assert f"{loop} another order (`if part is None: continue` at train.py:43)." in verdict.summary
    assert any("sorted()" in one for one in verdict.suggestions)


def test_frames_of_exceptions_have_no_names_of_classes() -> None:
    stacks = {0: (at(56, "fit"), MODULE), 1: (at(39, "_record"), MODULE), 2: (at(56, "Trainer.fit"), MODULE)}
    assert list(by_stack(stacks).items()) == [(stacks[0], [0, 2]), (stacks[1], [1])]


EVALUATION = """\
def evaluate():
    for chunk in pool.batches():
        gather(chunk)

def train():
    for step in steps:
        backward()
        if step % 3 == 0:
            evaluate()
"""
SOMETIMES = EVALUATION.replace("  backward", "  if x: backward")


@pytest.mark.parametrize(("source", "told"), [(EVALUATION, True), (SOMETIMES, False)])
@pytest.mark.parametrize("rounds", [2, 4])
def test_a_loop_that_goes_on_for_some_ranks_is_told(source: str, told: bool, rounds: int) -> None:
    """Rank 1 has gone round it three times, as all did before. Where steps may have none of the other calls, its calls
    may be those of several steps.
    """
    inside = (*in_c10d("all_gather", 42, "evaluate")[:-1], at(48), MODULE)
    step = [entry("all_reduce", 0, line=46)]
    chunk = [replace_frames(entry("all_gather", 0), inside)]
    usual = (step * 3 + chunk * 3) * 3
    mine, its = [*usual, *step * 3, *chunk * 3, *step], [*usual, *step * 3, *chunk * rounds]
    ranks = [
        rank(n, inside if n != 1 else in_c10d("all_reduce", 46), flight=record(*numbered(mine if n == 1 else its)))
        for n in range(4)
    ]
    summary = diagnose(job(*ranks), script(source)).summary
    words = "Rank 1 has called last from train.py:42 (evaluate), too: the loop at train.py:41 has ended there, and goes"
    assert (f"{words} on for ranks 0,2-3." in summary) == (told and rounds == 4), summary


def replace_frames(one: Collective, frames: tuple[Frame, ...]) -> Collective:
    return structs.replace(one, frames=frames)


def numbered(made: list[Collective]) -> list[Collective]:
    """All but the last one have completed."""
    return [structs.replace(one, seq=n, record_id=n, completed=n < len(made)) for n, one in enumerate(made, start=1)]


PARTS = [("broadcast", 60, "first"), ("all_reduce", 50, "mean"), ("all_reduce", 50, "mean")]
ROUNDS = """\
def save():
    barrier()

def train():
    for n in range(9):
        try:
            step()
        except ValueError:
            continue
        if n % 4 == 3:
            save()
"""


@pytest.mark.parametrize(
    ("call", "group", "told"), [("save()", "0", True), ("log(Lazy(save))", "0", False), ("save()", "1", False)]
)
def test_who_is_in_a_later_round_after_as_many_calls_has_left_some_out(call: str, group: str, told: bool) -> None:
    """Unless a library has called what waits there: under conditions of its own, as a level of logging. In another
    group it may have made as many calls as all.
    """
    read = script(ROUNDS.replace("        save()\n", f"        {call}\n"))
    *waits, module = in_c10d("barrier", 41, "save")
    groups = {"0": (0, 1, 2), "1": (0, 1, 2)}
    mine = record(*past(3), entry("barrier", 4 if group == "0" else 1, group=group), groups=groups)
    its = record(*past(3), entry("all_reduce", 4), groups=groups)
    peers = [rank(n, in_c10d("all_reduce", 46), flight=its) for n in (0, 2)]
    summary = diagnose(job(peers[0], rank(1, (*waits, at(50), module), flight=mine), peers[1]), read).summary
    so = "All ranks get to train.py:41 (save) in the same rounds (`if n % 4 == 3 (train.py:49)`), so rank 1 has left "
    so = f"{so}out calls before, or ranks 0,2 have made more (`except ValueError: continue` at train.py:48)."
    assert (so in summary) == told, summary
    assert ("rounds" in summary) == told


def test_who_takes_the_other_branch_to_the_same_function_is_not_kept_from_it() -> None:
    """``if rank == 1: sync(); add()``, ``else: add(); sync()``: all come to ``sync``, which is at line 41."""
    source = (
        "def sync():\n    gather()\n\nif rank == 1:\n    sync()\n    add()\nelse:\n    add()\n    sync()\n\nadd()\n"
    )
    frames = (Frame(C10D, 3252, "all_gather"), at(41, "sync"), at(44, "<module>"))
    evidence = job(rank(1, frames), waiting(0, flight=None))
    assert "never reach" not in diagnose(evidence, script(source)).summary
    source = source.replace("    sync()\n\nadd()", "\nadd()")
    assert "Rank 0 never reaches train.py:41" in diagnose(evidence, script(source)).summary


def test_one_against_one_behind_either_side_of_a_condition() -> None:
    source = "if rank == 1:\n    gather()\nelse:\n" + "    step()\n" * 8
    verdict = verdict_of(source, 1)
    assert [c.rank for c in verdict.culprits] == [0, 1] and "either side" in verdict.summary


def test_a_clean_exit_is_less_sure_where_a_peer_waits_alone_under_a_condition() -> None:
    frames = (Frame(C10D, 3252, "all_reduce"), at(41), at(60, "<module>"))
    lost = RankException("RuntimeError", "Connection closed by peer", 5.0, frames, "Traceback")
    gone = rank(1, seen=False, more={"exit": RankExit(0, 4.0, before_close=True), "exit_call": None})
    raised = {"exception": lost, "exit": RankExit(1, 6.0, before_close=True)}
    peer = rank(0, in_c10d("all_reduce", 41), more=raised)
    evidence = job(peer, gone, outcome="crash")
    sure = diagnose(evidence)
    assert (sure.cause, [c.rank for c in sure.culprits]) == ("uneven-batches", [1])
    verdict = diagnose(evidence, script("if rank == 0:\n    gather()\n"))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [1])
    assert (sure.confidence, verdict.confidence) == ("medium", "low")
    assert any("if rank == 0 (train.py:40)" in text and "runner-up" in text for text in verdict.ruled_out)


# --- several ranks, and what sets them apart --------------------------------------------------------------------------


def verdict_of_odd(odd: set[int], world: int = 8, *, handling: str = "", source: str = "") -> Verdict:
    """Of a job in which ``odd`` ranks wait in an all_gather, the others in an all_reduce.

    ``handling``: these do so in the handler of such an exception.
    """
    ranks = [
        waiting(n, "all_gather", line=41, **in_handler(handling)) if n in odd else waiting(n) for n in range(world)
    ]
    return diagnose(job(*ranks), script(source) if source else None)


def in_handler(exception: str) -> dict[str, Any]:
    """Of a rank that handles such an exception, if any."""
    handled = HandledException(1, exception, "a bad batch", (at(30),))
    return {"gil": GilTest(True, True, (handled,)), "ident": 1} if exception else {}


@pytest.mark.parametrize(("op", "named"), [("recv", [1, 4, 6]), ("send", [1, 4, 6]), ("all_gather", [])])
def test_who_waits_in_a_send_or_receive_has_decided_nothing(op: str, named: list[int]) -> None:
    """A send or receive has its peer: that its ranks are no pattern says nothing."""
    ranks = [rank(n, in_c10d(op, 41)) if n in (1, 4, 6) else waiting(n, flight=None) for n in range(8)]
    facts = CaseFacts.of(job(*ranks))
    culprits = waiting_culprits(facts, (1, 4, 6))
    finding = Finding("collective-mismatch", (Doubt.STACKS_ALONE,), "They do not meet.", culprits)
    finding = annotated(finding, guards(facts, finding))
    assert [one.rank for one in finding.culprits] == named
    assert (Doubt.MAY_BE_OWED in finding.doubts) is bool(named)


def test_where_no_condition_parts_the_ranks_nobody_has_decided_anything() -> None:
    """``if step % 10 == 0`` is passed by both sides; without the source, nothing excludes a decision."""
    source = "if step % 10 == 0:\n    gather()\n" + "    more()\n" * 9
    verdict = verdict_of_odd({1, 4, 6}, source=source)
    assert [one.rank for one in verdict.culprits] == [1, 4, 6] and verdict.confidence == "medium"
    assert not any("drawn for itself" in why for why in verdict.doubts)
    assert not verdict_of_odd({1, 4, 6}).culprits


def test_ranks_that_say_themselves_why_are_named_without_a_pattern() -> None:
    verdict = verdict_of_odd({1, 4, 6}, handling="ValueError")
    assert [one.rank for one in verdict.culprits] == [1, 4, 6]
    assert "ValueError: a bad batch" in verdict.summary


def test_ranks_that_a_condition_on_the_rank_lets_through_are_named_without_a_pattern() -> None:
    """Also where it asks for more, and so cannot be evaluated: but not surely."""
    verdict = verdict_of_odd({1, 4, 6}, source="if due and rank in those:\n    gather()\n")
    assert ([one.rank for one in verdict.culprits], verdict.confidence) == ([1, 4, 6], "low")
    assert not verdict_of_odd({1, 4, 6}, source="if random() < 0.1:\n    gather()\n").culprits


# --- beside the course of the program ---------------------------------------------------------------------------------

HANDLERS = (
    "import signal\n"
    "def on_preempt(number, frame):\n"
    "    dist.barrier()\n"  # 3
    "class Saver:\n"
    "    def __del__(self):\n"
    "        dist.barrier()\n"  # 6
    "def save():\n"
    "    dist.barrier()\n"  # 8
    "signal.signal(signal.SIGUSR1, on_preempt)\n"
    "for step in range(9):\n"
    "    if rank == 1:\n"
    "        work()\n"  # 12
    "    dist.all_reduce(loss)\n"
)


@pytest.mark.parametrize(
    ("line", "function", "what"),
    [(3, "on_preempt", "a signal handler"), (6, "Saver.__del__", "a finalizer"), (8, "save", "")],
)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_call_that_no_line_of_the_program_makes(line: int, function: str, what: str, world: int) -> None:
    """A condition around the line at which it came between keeps nobody from it."""
    others = [
        rank(n, (*in_c10d("all_reduce", 13)[:2], at(13, "<module>")), flight=record(*past(3), entry("all_reduce", 4)))
        for n in range(world)
        if n != 1
    ]
    frames = (*in_c10d("barrier", line)[:2], at(line, function), at(12, "<module>"))
    odd = rank(1, frames, flight=record(*past(3), entry("barrier", 4)))
    verdict = diagnose(job(odd, *others), script(HANDLERS, first=1))
    assert verdict.cause == "collective-mismatch" and 1 in [one.rank for one in verdict.culprits]
    if what:
        assert [one.rank for one in verdict.culprits] == [1]
        assert f"Rank 1 does so in {what}, {function.rpartition('.')[2]}." in verdict.summary
        assert "never reach" not in verdict.summary
        assert verdict.suggestions[0].startswith("Don't call collectives there")
    else:
        assert "because of `if rank == 1" in verdict.summary


@pytest.mark.parametrize(
    ("odd", "world", "exception", "decides"),
    [({1}, 2, "KeyError", True), ({1}, 3, "KeyError", True), ({1}, 4, "KeyError", True),
     ({0, 1, 2}, 4, "KeyError", False),
     ({1}, 2, "StopIteration", False)],
)  # fmt: skip
def test_who_handles_an_exception_is_beside_the_others(
    odd: set[int], world: int, exception: str, decides: bool
) -> None:
    """Unless most do: then it is how their loop ends, as by ``StopIteration``."""
    verdict = verdict_of_odd(odd, world, handling=exception)
    told = "unsure" if verdict.doubts else "sure"
    if decides:
        assert ([one.rank for one in verdict.culprits], told) == ([*odd], "sure" if world > 2 else "unsure")
        assert verdict.suggestions[0].startswith("Fix that exception first")
    else:
        assert [one.rank for one in verdict.culprits] != [*odd] or told == "unsure"


def test_a_condition_that_may_have_let_peers_pass_before_is_not_what_to_change() -> None:
    """It asks for the rank and for more, and the peers have made such a call."""
    source = "if rank == 0 or log_all:\n    gather()\n" + "more()\n" * 9
    calls = {n: [*past(2), entry("all_gather", 3, done=True)] for n in range(4)}
    ranks = [
        rank(n, in_c10d("all_gather" if n == 0 else "all_reduce", 41 if n == 0 else 50),
             flight=record(*calls[n], entry("all_gather" if n == 0 else "all_reduce", 4)))
        for n in range(4)
    ]  # fmt: skip
    read = script(source)
    assert not any("gate the side effect" in text for text in diagnose(job(*ranks), read).suggestions)
    before = [structs.replace(one, flight_record=record(*past(3), entry("all_gather" if n == 0 else "all_reduce", 4)))
              for n, one in enumerate(ranks)]  # fmt: skip
    assert any("gate the side effect" in text for text in diagnose(job(*before), read).suggestions)


@pytest.mark.parametrize(("earlier", "decides"), [(42, False), (50, True)])
def test_a_fallback_that_a_rank_always_takes_is_not_beside_the_others(earlier: int, decides: bool) -> None:
    """It makes its calls from the body of an ``except``: by design, where it has made them there before."""
    read = script("def reduce():\n    try: pass\n    except KeyError:\n        all_reduce()\n", first=39)
    calls = [entry("all_reduce", n, done=n < 4, line=earlier if n < 4 else 42) for n in range(1, 5)]
    fallback = rank(1, in_c10d("all_reduce", 42), flight=record(*calls), **in_handler("KeyError"))
    peer = rank(0, in_c10d("barrier", 70), flight=record(*calls[:3], entry("barrier", 4, line=70)))
    verdict = diagnose(job(peer, fallback), read)
    assert any("Fix that exception first" in text for text in verdict.suggestions) == decides
