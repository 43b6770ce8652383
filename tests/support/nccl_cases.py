"""Jobs whose ranks write Flight Recorder dumps in the formats of NCCL's process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.nccl_formats import Format, Op, Recorder, State


def ranks(layout: Format, *, timing: bool = True, past: int = 4, world: int = 4) -> list[Recorder]:
    """Returns ranks that have completed ``past`` all_reduces together."""
    found = [Recorder(rank, {"0": range(world)}, layout, timing=timing) for rank in range(world)]
    for one in found:
        for _ in range(past):
            one.collective()
    return found


@dataclass(frozen=True)
class Case:
    """One case: after four all_reduces of all ranks, ``play`` makes the next calls, from collective ``number`` on."""

    play: Callable[[list[Recorder]], object]
    cause: str
    culprits: list[int]
    number: int = 5
    blocks_only: bool = False


def all_but(odd: int, recorders: list[Recorder], call: Callable[[Recorder], object]) -> None:
    for one in recorders:
        if one.rank != odd:
            call(one)


def another(odd: int, **of_call: object) -> Callable[[list[Recorder]], object]:
    """``odd`` calls something else than its peers."""

    def play(recorders: list[Recorder]) -> None:
        all_but(odd, recorders, lambda one: one.collective(state="started"))
        recorders[odd].collective(**{"state": "started", "line": 41, **of_call})  # type: ignore[arg-type]

    return play


def absent(recorders: list[Recorder], *, also: int = 0) -> None:
    """Rank 1 does not come; the CPUs of the others run on and queue ``also`` more."""
    for _ in range(also + 1):
        state: State = "started" if len(recorders[0].entries) == 4 else "scheduled"
        all_but(1, recorders, lambda one, state=state: one.collective(state=state))


def device_behind(recorders: list[Recorder]) -> None:
    """All CPUs have queued 51 collectives; the device of rank 3 has begun none of them."""
    for place in range(51):
        all_but(3, recorders, lambda one, place=place: one.collective(state="scheduled" if place else "started"))
        recorders[3].collective(state="scheduled")


def past_elsewhere(recorders: list[Recorder]) -> None:
    """All devices but rank 3's have completed the collective."""
    all_but(3, recorders, lambda one: one.collective())
    recorders[3].collective(state="started")


def sends_behind_it(recorders: list[Recorder]) -> None:
    """Rank 1 has sent 30 times to rank 0, which its status counts as it counts collectives, and does not come."""
    for _ in range(30):
        recorders[1].send(0)
        recorders[0].recv(1)
    absent_only = [one for one in recorders if one.rank != 1]
    for one in absent_only:
        one.collective(state="started")


def batches_of_some(recorders: list[Recorder]) -> None:
    """Ranks 0 and 1 exchange batches, the others do not; then rank 2 does not come to the next collective."""
    for _ in range(5):
        recorders[0].batch([Op("send", peer=1), Op("recv", peer=1)])
        recorders[1].batch([Op("recv", peer=0), Op("send", peer=0)])
    all_but(2, recorders, lambda one: one.collective(state="started"))


def block(odd: int, ops: list[Op] | None, **of_block: object) -> Callable[[list[Recorder]], object]:
    """A block of three all_reduces; ``odd`` does other ``ops``, or none."""
    usual = [Op("all_reduce"), Op("all_reduce", (8,)), Op("all_reduce", (2,))]

    def play(recorders: list[Recorder]) -> None:
        all_but(odd, recorders, lambda one: one.block(usual, "started"))
        if ops is not None:
            recorders[odd].block(ops, **{"state": "started", "line": 81, **of_block})  # type: ignore[arg-type]

    return play


def uneven_gather(recorders: list[Recorder]) -> None:
    """all_gather of uneven sizes is a block of broadcasts; rank 3 does not come."""
    broadcasts = [Op("_broadcast_oop", (number + 1, 2)) for number in range(4)]
    all_but(3, recorders, lambda one: one.block(broadcasts, "started", kind="ALLGATHER"))


def timed_out(recorders: list[Recorder]) -> None:
    another(2, op="all_gather", state="timed out")(recorders)
    for one in recorders:
        one.entries[-1]["retired"] = True


CASES = {
    "another operation": Case(another(2, op="all_gather"), "collective-mismatch", [2]),
    "another size": Case(another(0, size=(5,)), "collective-mismatch", [0]),
    "another type": Case(another(3, dtype="Half"), "collective-mismatch", [3]),
    "another size in a gather": Case(
        lambda all_ranks: [one.collective("gather", "started", size=(4 + (one.rank == 1),)) for one in all_ranks],
        "collective-mismatch",
        [1],
    ),
    "retired without having completed": Case(timed_out, "collective-mismatch", [2]),
    "a rank that does not come": Case(absent, "missing-from-collective", [1]),
    "CPUs that run ahead": Case(lambda all_ranks: absent(all_ranks, also=50), "missing-from-collective", [1]),
    "a device that has begun nothing": Case(device_behind, "gpu-kernel", [3]),
    "a device in what its peers have left": Case(past_elsewhere, "gpu-kernel", [3]),
    "sends are no collectives": Case(sends_behind_it, "missing-from-collective", [1]),
    "batches are no collectives": Case(batches_of_some, "missing-from-collective", [2]),
    "a block without one rank": Case(block(3, None), "missing-from-collective", [3]),
    "a block that one rank has not ended": Case(
        block(3, [Op("all_reduce"), Op("all_reduce", (8,))], state=None), "missing-from-collective", [3]
    ),
    "a block with another operation in it": Case(
        block(1, [Op("all_reduce"), Op("broadcast", (8,)), Op("all_reduce", (2,))]),
        "collective-mismatch",
        [1],
        blocks_only=True,
    ),
    "a block with another size in it": Case(
        block(0, [Op("all_reduce"), Op("all_reduce", (9,)), Op("all_reduce", (2,))]),
        "collective-mismatch",
        [0],
        blocks_only=True,
    ),
    "an uneven all_gather without one rank": Case(uneven_gather, "missing-from-collective", [3]),
}
