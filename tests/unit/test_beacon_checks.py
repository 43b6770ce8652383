"""The clocks of the consistency checks: which steps of a rank are those of its peers."""

from __future__ import annotations

import pytest

from safelaunch.beacon import checks

EVERY = 3


class Optimizer:
    pass


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> checks._Owner:
    monkeypatch.setattr(checks, "_every", EVERY)
    return checks._Owner(None, "module of 0,1 0")


def rounds(owner: checks._Owner, count: int, *optimizers: Optimizer) -> list[bool]:
    """Steps for which gradients were to be averaged: whether each has a check."""
    due = []
    for _ in range(count):
        owner.ready = True
        first, *_ = [owner.stepped(one) for one in optimizers]
        due.append(first)
    return due


def test_the_first_round_and_every_third_is_checked(owner: checks._Owner) -> None:
    assert rounds(owner, 6, Optimizer()) == [True, False, True, False, False, True]


def test_steps_of_one_rank_alone_do_not_move_its_rounds(owner: checks._Owner) -> None:
    warm, own = Optimizer(), Optimizer()
    for _ in range(5):
        owner.stepped(warm)
    assert rounds(owner, 2, own) == [True, False]
    owner.stepped(own)
    assert rounds(owner, 1, own) == [True]


def test_steps_without_a_round_are_checked_as_often(owner: checks._Owner) -> None:
    one = Optimizer()
    rounds(owner, 1, one)
    assert [owner.stepped(one) for _ in range(5)] == [False, True, False, False, True]


def test_optimizers_that_share_a_round_make_one_step(owner: checks._Owner) -> None:
    one, other = Optimizer(), Optimizer()
    assert rounds(owner, 3, one, other) == [True, False, True]
    owner.ready = True
    assert not owner.stepped(other)
    assert rounds(owner, 2, one, other) == [False, True]


def test_an_optimizer_takes_over_from_one_that_is_gone(owner: checks._Owner) -> None:
    def before() -> None:
        owner.stepped(Optimizer())

    before()
    assert [owner.stepped(one) for one in [Optimizer()] * 2] == [False, True]
