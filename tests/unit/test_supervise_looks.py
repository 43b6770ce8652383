"""Which ranks get a look at their C frames: those of which Python's frames alone do not say what they wait for."""

from __future__ import annotations

import pytest
from evidence import in_c10d, in_user, process

from safelaunch.capture.look import ProcessLook, RankLook
from safelaunch.capture.result import Result
from safelaunch.model import Frame
from safelaunch.supervise.looks import _is_unclear


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
