"""One node of several: its ranks 2-3 of 4 are seen. Which of them is at fault, regardless of the others?"""

from __future__ import annotations

from typing import Any

import pytest

from safelaunch.model import Evidence, Frame, RankEvidence
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import (
    STDLIB,
    behind,
    in_loader,
    in_user,
    in_worker,
    job,
    process,
    rank,
    waiting,
)

LOCK = (Frame(f"{STDLIB}/threading.py", 168, "_RLock.acquire"), *in_user(7))


def node(*ranks: RankEvidence, world: int = 4, **fields: Any) -> Evidence:
    seen = {each.rank for each in ranks}
    return job(*ranks, world=world, missing_ranks=tuple(set(range(world)) - seen), **fields)


def third(frames: tuple[Frame, ...], kernel: str, **fields: Any) -> RankEvidence:
    """Rank 3, which has not come to where rank 2 waits."""
    return rank(3, frames, kernel, flight=behind(), **fields)


def stuck_worker(kernel: str) -> dict[str, Any]:
    return {"children": [process(91, in_worker(12), kernel, role="dataloader worker")]}


FOR_GOOD = {
    "asleep for a day": third(in_user(7), "sleep"),
    "a lock": third(LOCK, "futex"),
    "D state": third(in_user(7), "disk"),
    "stopped": third(in_user(7), "stop"),
    "left the loop": third(in_user(7), "sleep", page="exited"),
    "a lock, and a deadlocked thread": third(LOCK, "futex", threads=[("saver", LOCK, "futex")]),
    "asleep, and a thread that logs": third(in_user(7), "sleep", threads=[("logger", in_user(80), "nap")]),
    "a loader worker asleep": third(in_loader(30), "poll", **stuck_worker("sleep")),
}


@pytest.mark.parametrize("how", FOR_GOOD)
def test_permanently_stuck_rank_is_the_culprit(how: str) -> None:
    evidence = node(waiting(2), FOR_GOOD[how])
    assert [culprit.rank for culprit in diagnose(evidence).culprits] == [3]


# --- a peer that ended first ------------------------------------------------------------------------------------------
