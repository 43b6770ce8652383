"""A rank that waits for its own GPU, told from ranks that wait for peers: NCCL's records and synchronizing stacks."""

from __future__ import annotations

import pytest
from evidence import MODULE, SITE, at, in_user, job, rank

from safelaunch.model import Collective, FlightRecord, Frame, RankEvidence
from safelaunch.verdict.diagnose import diagnose

SYNCHRONIZE = (Frame(f"{SITE}/torch/cuda/__init__.py", 1108, "synchronize"), at(33), MODULE)
ITEM = (Frame("libcuda.so.1", 0, "cuStreamSynchronize"), Frame("libtorch_cuda.so", 0, "at::native::item"))


def nccl(op: str, seq: int, *, state: str, group: str = "0", line: int = 30) -> Collective:
    started = {"completed": True, "started": True, "scheduled": False}[state]
    return Collective(
        group, seq, f"nccl:{op}", state == "completed", state, "default_pg", record_id=seq, started=started,
        input_sizes=((4,),), input_dtypes=("Float",), frames=(at(line), MODULE),
    )  # fmt: skip


def record(*entries: Collective, world: int = 4) -> FlightRecord:
    return FlightRecord("2.10", entries, {"0": tuple(range(world))})


DONE = nccl("all_reduce", 1, state="completed")
WAITING = record(DONE, nccl("all_reduce", 2, state="started"))
BEHIND_A_KERNEL = record(DONE, nccl("all_reduce", 2, state="scheduled"))


def synchronizing(number: int, flight: FlightRecord, **fields: object) -> RankEvidence:
    return rank(number, SYNCHRONIZE, "run", flight=flight, **fields)


def test_a_single_rank_whose_kernel_does_not_end() -> None:
    verdict = diagnose(job(synchronizing(0, record(DONE, nccl("all_reduce", 2, state="started"), world=1))))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("gpu-kernel", [0])
    assert diagnose(job(synchronizing(0, record(DONE, world=1)))).cause == "gpu-kernel"


def test_the_drivers_call_is_seen_in_c_frames() -> None:
    """``loss.item()`` leaves no Python frame of torch's."""
    ranks = [rank(n, in_user(33), "run", native=ITEM, flight=BEHIND_A_KERNEL if n == 2 else WAITING) for n in range(4)]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("gpu-kernel", [2])
    assert "cuStreamSynchronize" in verdict.summary


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_gpu_that_is_still_in_what_all_others_have_left(culprit: int) -> None:
    """No peer can hold it up any more, whatever these do now."""
    over = record(DONE, nccl("all_reduce", 2, state="completed"))
    ranks = [rank(n, in_user(7), "sleep", flight=over) for n in range(4)]
    ranks[culprit] = synchronizing(culprit, WAITING)
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("gpu-kernel", [culprit])
    assert "all its peers have completed all_reduce #2" in verdict.summary
