"""Conditions on the rank in the source, and what they add to a verdict."""

from __future__ import annotations

import pytest

from safelaunch.model import Verdict
from safelaunch.verdict.blame import waiting_culprits
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.findings import Finding, annotated
from safelaunch.verdict.guarding import by_stack, guards
from safelaunch.verdict.rank_state import CaseFacts
from tests.support.evidence import MODULE, at, entry, in_c10d, job, past, rank, record, script, waiting


def verdict_of(source: str, *ranks: int, odd: int = 41, op: str = "all_gather", world: int = 2) -> Verdict:
    """``ranks`` wait in ``op`` at line ``odd``, the others in all_reduce at line 50. ``source`` begins at line 40."""
    sides = [rank(n, in_c10d(op, odd)) if n in ranks else waiting(n, flight=None) for n in range(world)]
    return diagnose(job(*sides), script(source))


@pytest.mark.parametrize("world", [2, 3])
def test_conditional_call_in_last_round_is_not_uneven_batches(world: int) -> None:
    """The peers' loop has ended as it ought to; in no round would they have come to that call."""
    loop = "for step in range(9):\n    if rank == 1 and step == 8:\n        gather()\n"
    verdict = verdict_of(loop + "more()\n" * 9, 1, odd=42, world=world)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("collective-mismatch", [1])
    both = loop.replace("gather()\n", "gather()\n    else:\n        gather(1)\n")  # a pipeline's stages, say
    assert verdict_of(both + "more()\n" * 9, 1, odd=42, world=world).cause == "uneven-batches"
    verdict = verdict_of(loop.replace("rank == 1 and ", "") + "more()\n" * 9, 1, odd=42, world=world)
    assert verdict.cause == "uneven-batches"


@pytest.mark.parametrize(
    ("source", "odd", "decides"),
    [
        ("if loss < best:\n    gather()\n", 41, "`if loss < best (train.py:40)`"),
        ("for n in range(9):\n    if n % 2:\n        gather()\n    step()\n" + "    step()\n" * 7, 42, ""),
    ],
)
@pytest.mark.parametrize("odd_ranks", [(1,), (0, 2, 3)])
def test_branch_condition_is_named_in_the_summary(
    source: str, odd: int, decides: str, odd_ranks: tuple[int, ...]
) -> None:
    whole = source if source.count("\n") > 8 else source + "step()\n" * 9
    summary = verdict_of(whole, *odd_ranks, odd=odd, world=4).summary
    assert (f"Which way a rank goes depends on {decides}." in summary) == bool(decides)
    assert ("Which way" in summary) == bool(decides)


def test_frames_with_and_without_class_names_are_grouped_together() -> None:
    stacks = {0: (at(56, "fit"), MODULE), 1: (at(39, "_record"), MODULE), 2: (at(56, "Trainer.fit"), MODULE)}
    assert list(by_stack(stacks).items()) == [(stacks[0], [0, 2]), (stacks[1], [1])]


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
def test_rank_in_later_round_with_equal_calls_skipped_some(call: str, group: str, told: bool) -> None:
    """Doesn't apply if a library made the call, under its own conditions, or if the call is in another group."""
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


# --- several ranks, and what sets them apart --------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "named"), [("recv", [1, 4, 6]), ("send", [1, 4, 6]), ("all_gather", [])])
def test_rank_waiting_in_send_or_receive_took_no_branch(op: str, named: list[int]) -> None:
    """A send or receive has its peer: that its ranks are no pattern says nothing."""
    ranks = [rank(n, in_c10d(op, 41)) if n in (1, 4, 6) else waiting(n, flight=None) for n in range(8)]
    facts = CaseFacts.of(job(*ranks))
    culprits = waiting_culprits(facts, (1, 4, 6))
    finding = Finding("collective-mismatch", (Doubt.STACKS_ALONE,), "They do not meet.", culprits)
    finding = annotated(finding, guards(facts, finding))
    assert [one.rank for one in finding.culprits] == named
    assert (Doubt.MAY_BE_OWED in finding.doubts) is bool(named)


# --- outside the program's main flow ----------------------------------------------------------------------------------

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
def test_call_from_a_handler_ignores_surrounding_conditions(line: int, function: str, what: str, world: int) -> None:
    """A condition around the interrupted line doesn't keep other ranks from the call."""
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
