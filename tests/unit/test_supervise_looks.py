"""Looks at the ranks, and which of these get a look at their C frames too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from evidence import in_c10d, in_user, process

from safelaunch.capture.look import ProcessLook, RankLook, Target
from safelaunch.capture.result import Result
from safelaunch.model import Frame
from safelaunch.supervise.looks import _is_unclear, look_at


@pytest.mark.parametrize(
    ("frames", "kernel", "unclear"),
    [
        (in_user(7), "futex", True),
        (in_user(7), "restart_futex", True),
        (in_user(7), "", True),
        (in_user(7), "sleep", False),
        (in_user(7), "run", False),
        (in_c10d("all_reduce", 7), "futex", False),
    ],
)
def test_a_futex_below_the_users_line_is_unclear(frames: tuple[Frame, ...], kernel: str, unclear: bool) -> None:
    """Also where a stack reader's stop has left ``restart_syscall`` in place of a wait with a time limit."""
    one = process(10, frames, kernel)
    look = RankLook(0, ProcessLook(10, one.states[-1], Result(one.stacks[-1], "py-spy", 0.1)))
    assert _is_unclear(look) is unclear


def test_a_later_look_knows_what_the_ranks_have_by_then() -> None:
    """A rank that still imports torch at the first look has no worker server yet, and is asked for its record later."""
    before = Target(0, 0, os.getpid(), 0)
    now = Target(0, 0, os.getpid(), 0, socket=Path("/rank0.sock"))
    looks = look_at((before,), None)
    looks = look_at((now, Target(1, 1, os.getpid(), 0)), looks)
    assert [(target.rank, target.socket) for target in looks.targets] == [(0, now.socket), (1, None)]
    assert look_at((), looks).targets == looks.targets  # one that has ended since is still asked what it left
