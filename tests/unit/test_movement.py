"""What counts as movement between two looks: a server that nobody calls, beside a training whose loop stands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from evidence import MODULE, STDLIB, at, in_c10d, in_user, process

from safelaunch.capture.look import Look, ProcessLook, RankLook
from safelaunch.capture.result import Result
from safelaunch.model import Frame, ProcessEvidence
from safelaunch.watch import movement

SELECT = Frame(f"{STDLIB}/selectors.py", 415, "_PollLikeSelector.select")
SERVING = (SELECT, Frame(f"{STDLIB}/socketserver.py", 235, "BaseServer.serve_forever"), at(30), MODULE)
EVENT_LOOP = (SELECT, Frame(f"{STDLIB}/asyncio/base_events.py", 1884, "BaseEventLoop._run_once"), at(30), MODULE)
AT_A_QUEUE = (
    Frame(f"{STDLIB}/threading.py", 320, "Condition.wait"),
    Frame(f"{STDLIB}/queue.py", 171, "Queue.get"),
    at(30),
    MODULE,
)
IN_A_LOCK = (Frame(f"{STDLIB}/threading.py", 168, "_RLock.acquire"), at(30), MODULE)


def looks(*ranks: ProcessEvidence) -> tuple[Look, Look]:
    """Two looks at the ranks' main processes."""
    found = []
    for number in range(2):
        seen = {}
        for rank, one in enumerate(ranks):
            state, stack = one.states[number], one.stacks[number]
            seen[rank] = RankLook(rank, ProcessLook(state.pid, state, Result(stack, "py-spy", 0.1)))
        found.append(Look(2.0 * number, 2.0 * number + 0.1, seen))
    return found[0], found[1]


def with_thread(frames: Sequence[Frame], other: Sequence[Frame] = ()) -> ProcessEvidence:
    return process(10, frames, "poll", threads=[("http", other, "poll")] if other else [])


PEER = process(20, in_c10d("broadcast", 50), "futex")


@pytest.mark.parametrize(
    ("server", "waits_for_callers"),
    [
        (with_thread(SERVING), True),
        (with_thread(EVENT_LOOP), True),
        (with_thread(AT_A_QUEUE, SERVING), True),
        (with_thread(AT_A_QUEUE), False),
        (with_thread(IN_A_LOCK, SERVING), False),
        (with_thread(in_user(7), SERVING), False),
        (with_thread(in_c10d("all_reduce", 9), SERVING), False),
    ],
    ids=["serves", "event loop", "fed by a server", "a queue alone", "a lock", "own code", "a collective"],
)
def test_a_server_without_steps_waits_for_callers(server: ProcessEvidence, waits_for_callers: bool) -> None:
    before, after = looks(server, PEER)
    assert movement.judge(before, after, without_steps=True) == ("active" if waits_for_callers else "still")
    assert movement.judge(before, after) == "still", "a training that stands is a hang, whatever serves beside it"
