"""Conditions on the rank that decide whether a line is reached, and the ranks for which they hold."""

from __future__ import annotations

import textwrap

import pytest

from safelaunch.stacks.guards import Guard, guards_of
from safelaunch.stacks.rank_values import Whereabouts
from tests.support.evidence import at

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
    "if mesh.get_local_rank('dp') == 1:": True,
    "if mesh.get_coordinate() == [0, 1]:": True,
    "if int(os.environ['RANK']) % 2:": True,
    "if step % 25 == 0:": False,
    "if ranking > 3:": False,
    "if loss_is_zero:": False,
    "if rank0:": True,
    "for rank in range(4):": False,
    "while rank == 0:": True,
}


def guards(source: str, line: int) -> tuple[Guard, ...]:
    return guards_of((at(line),), lambda path: textwrap.dedent(source))


def line_of(source: str, mark: str = "# here") -> int:
    lines = textwrap.dedent(source).splitlines()
    return next(number for number, line in enumerate(lines, 1) if mark in line)


def admitted(source: str, world: int = 4) -> list[int] | None:
    """Returns the ranks that reach the marked line, or None if the source doesn't tell."""
    conditions = guards(source, line_of(source))
    ranks = []
    for rank in range(world):
        answers = [guard.admits(Whereabouts(rank, rank % 2, world)) for guard in conditions]
        if False not in answers and None in answers:
            return None
        if False not in answers:
            ranks.append(rank)
    return ranks


@pytest.mark.parametrize(("line", "asks"), CONDITIONS.items())
def test_guard_is_condition_on_rank(line: str, asks: bool) -> None:
    conditions = guards(f"def f():\n    {line}\n        call()\n", 3)
    assert [(guard.line, f"{guard.text}:") for guard in conditions] == ([(2, line)] if asks else [])


def test_guards_list_innermost_first_and_callers() -> None:
    source = "if rank == 0:\n    if is_main_process:\n        call()\nelse:\n    other()\ncall()\n"
    conditions = guards_of((at(3), at(6)), lambda path: source)
    assert [guard.words for guard in conditions] == ["if is_main_process (train.py:2)", "if rank == 0 (train.py:1)"]
    assert guards_of((at(6), at(3)), lambda path: source) == conditions
    (other,) = guards_of((at(5),), lambda path: source)
    assert (other.text, other.taken) == ("else of if rank == 0", False)
    for text in ("not python {", None, ""):
        assert guards_of((at(3),), lambda path, text=text: text) == ()  # type: ignore[misc]


WHO = {
    "if rank in (0, 1):\n    call()  # here": [0, 1],
    "if rank not in [2]:\n    call()  # here": [0, 1, 3],
    "if rank in range(1, 3):\n    call()  # here": [1, 2],
    "k = 3\nr = dist.get_rank()\nif r < k:\n    call()  # here": [0, 1, 2],
    "if not dist.get_rank():\n    call()  # here": [0],
    "if dist.get_rank():\n    pass\nelse:\n    call()  # here": [0],
    "if rank == 0:\n    log()\nelif rank == 1:\n    call()  # here": [1],
    "is_main = dist.get_rank() == 0\nif is_main:\n    call()  # here": [0],
    "main = int(os.environ['RANK']) == 0\nif not main:\n    call()  # here": [1, 2, 3],
    "if int(os.environ.get('RANK', 0)) == 2:\n    call()  # here": [2],
    "rank, world = dist.get_rank(), dist.get_world_size()\nif rank == world - 1:\n    call()  # here": [3],
    "if rank % 2 == 0 and rank > 0:\n    call()  # here": [2],
    "if rank == 0 or rank == 3:\n    call()  # here": [0, 3],
    "if 0 < rank < 3:\n    call()  # here": [1, 2],
    "if accelerator.is_main_process:\n    call()  # here": [0],
    "if local_rank == 1:\n    call()  # here": [1, 3],
    "rank == 2 and call()  # here": [2],
    "if rank == 2 and call():  # here\n    log()": [2],
    "if rank == 2 or call():  # here\n    log()\nelse:\n    other()": [0, 1, 3],
    "rank == 2 or call()  # here": [0, 1, 3],
    "x = call() if rank == 1 else None  # here": [1],
    "if (r := dist.get_rank()) == 3:\n    call()  # here": [3],
    "def f(rank):\n    if rank != 0:\n        return\n    call()  # here": [0],
    "def f():\n    for x in y:\n        if rank == 1:\n            continue\n        call()  # here": [0, 2, 3],
    "def f():\n    for x in y:\n        if rank == 1:\n            log()\n            break\n        with z:\n"
    "            call()  # here": [0, 2, 3],
    "def f():\n    if rank == 1:\n        with z:\n            return\n    call()  # here": [0, 2, 3],
    "def f():\n    if rank == 1:\n        go()\n    else:\n        raise SystemExit\n    call()  # here": [1],
    "def f():\n    try:\n        if rank == 1:\n            return\n    finally:\n        call()  # here": [0, 1, 2, 3],
    "def f():\n    if rank == 1:\n        def g():\n            call()  # here": [
        0,
        1,
        2,
        3,
    ],  # the time of the call is unknown
    "if rank == 0 and step % 10 == 0:\n    call()  # here": None,
    "if dist.get_rank(group) == 0:\n    call()  # here": None,
    "if ranks[rank] == 2:\n    call()  # here": None,
    "r = dist.get_rank()\nr = other()\nif r == rank:\n    call()  # here": None,
    "if mesh.get_local_rank('dp') == 0:\n    call()  # here": None,
    "if rank % 0:\n    call()  # here": None,
    "if rank < 'x':\n    call()  # here": None,
    "call()  # here": [0, 1, 2, 3],
}


@pytest.mark.parametrize(("source", "ranks"), WHO.items())
def test_guards_admit_expected_ranks(source: str, ranks: list[int] | None) -> None:
    assert admitted(source) == ranks


def test_partly_known_guard_excludes_ranks() -> None:
    source = "if rank == 0 and step % 10 == 0:\n    call()  # here"
    (guard,) = guards(source, 2)
    assert [guard.admits(Whereabouts(rank, rank, 2)) for rank in (0, 1)] == [None, False]


def test_rank_zero_decorator_is_guard() -> None:
    source = "@rank_zero_only\ndef log():\n    call()\n"
    (guard,) = guards(source, 3)
    assert guard.words == "@rank_zero_only (train.py:1)"
    assert guard.admits(Whereabouts(1, 1, 2)) is None


def test_guard_with_circular_assignment_has_no_value() -> None:
    (guard,) = guards("rank_a = rank_b\nrank_b = rank_a\nif rank_a:\n    call()\n", 4)
    assert guard.admits(Whereabouts(1, 1, 2)) is None


def test_long_guard_text_is_cut() -> None:
    (guard,) = guards(f"if rank == 0 and {' and '.join(['name'] * 60)}:\n    call()\n", 2)
    assert guard.text.endswith("…") and len(guard.text) < 130
