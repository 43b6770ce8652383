"""What the source says of the lines at which ranks are, and what that does to a verdict."""

from __future__ import annotations

import pytest
from evidence import C10D, MODULE, SCRIPT, at, in_c10d, job, rank, waiting

from safelaunch.diagnose import diagnose
from safelaunch.model import Frame, RankException, RankExit
from safelaunch.reading.source import condition_on_rank, loop_left

CONDITIONS = {
    "if rank == 0:": True,
    "if dist.get_rank() == 0 and step % 25 == 0:": True,
    "if not local_rank:": True,
    "if self.global_rank == 0:": True,
    "if accelerator.is_main_process:": True,
    "if state.is_world_process_zero:": True,
    "if trainer.is_global_zero:": True,
    "if args.process_index == 0:": True,
    "if self.is_master:": True,
    "if step % 25 == 0:": False,
    "if ranking > 3:": False,
    "if loss_is_zero:": False,
    "if rank0:": True,
    "for rank in range(4):": False,
    "while rank == 0:": False,
}


@pytest.mark.parametrize(("line", "asks"), CONDITIONS.items())
def test_what_asks_for_the_rank(line: str, asks: bool) -> None:
    source = f"def f():\n    {line}\n        call()\n"
    found = condition_on_rank((at(3),), lambda path: source)
    assert (found is not None) == asks
    assert found is None or (found.line, f"if {found.text}:") == (2, line)


def test_the_innermost_frame_and_the_innermost_if_count() -> None:
    source = "if rank == 0:\n    if is_main_process:\n        call()\nelse:\n    other()\ncall()\n"
    found = condition_on_rank((at(3), at(6)), lambda path: source)
    assert found is not None and found.words == "if is_main_process (train.py:2)"
    assert condition_on_rank((at(6), at(3)), lambda path: source) is not None  # of a caller's line
    assert condition_on_rank((at(5),), lambda path: source) is None  # the other branch is everybody else's
    assert condition_on_rank((at(3),), lambda path: "not python {") is None
    assert condition_on_rank((at(3),), lambda path: None) is None


def source(path: str) -> str | None:
    return "\n" * 39 + "if rank == 0:\n    gather()\n" if path == SCRIPT else None


def test_one_against_one_says_which_side_is_under_a_condition() -> None:
    odd = rank(1, in_c10d("all_gather", 41))
    verdict = diagnose(job(waiting(0, flight=None), odd), source)
    assert [c.rank for c in verdict.culprits] == [0, 1]
    assert "only rank 1 is under `if rank == 0 (train.py:40)`" in verdict.summary
    assert any(claim.file == "ranks/1/stack.txt" and "under" in claim.claim for claim in verdict.evidence)
    both = diagnose(job(rank(0, in_c10d("barrier", 41)), odd), source)
    assert "under" not in both.summary


def test_a_clean_exit_is_less_sure_where_a_peer_waits_alone_under_a_condition() -> None:
    frames = (Frame(C10D, 3252, "all_reduce"), at(41), at(60, "<module>"))
    lost = RankException("RuntimeError", "Connection closed by peer", 5.0, frames, "Traceback")
    gone = rank(1, seen=False, more={"exit": RankExit(0, 4.0, before_close=True), "exit_call": None})
    raised = {"exception": lost, "exit": RankExit(1, 6.0, before_close=True)}
    peer = rank(0, in_c10d("all_reduce", 41), more=raised)
    sure = diagnose(job(peer, gone, outcome="crash"))
    assert (sure.cause, [c.rank for c in sure.culprits]) == ("uneven-batches", [1])
    verdict = diagnose(job(peer, gone, outcome="crash"), source)
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("uneven-batches", [1])
    assert (sure.confidence, verdict.confidence) == ("high", "medium")
    assert any("if rank == 0 (train.py:40)" in text and "runner-up" in text for text in verdict.ruled_out)


LOOP = """
def train():
    setup()
    for batch in loader:
        if rank == 0:
            log(batch)
        step(batch)
    finish()

def other():
    finish()
"""


@pytest.mark.parametrize(
    ("ahead", "behind", "loop"),
    [(8, 7, 4), (6, 7, None), (7, 8, None), (3, 7, None), (11, 7, None), (7, 7, None)],
)
def test_loop_left(ahead: int, behind: int, loop: int | None) -> None:
    stacks = [(Frame(C10D, 1, "barrier"), at(line, "train"), MODULE) for line in (ahead, behind)]
    assert loop_left(stacks[0], stacks[1], lambda path: LOOP) == loop


def test_loop_left_without_a_source() -> None:
    stacks = [(at(line, "train"), MODULE) for line in (8, 7)]
    assert loop_left(stacks[0], stacks[1], lambda path: None) is None
    assert loop_left(stacks[0], stacks[1], lambda path: "def broken(:") is None
