"""A rank that waits for its own GPU, told from ranks that wait for peers: NCCL's records and synchronizing stacks."""

from __future__ import annotations

import pytest
from evidence import MODULE, SITE, at, in_user, job, rank
from msgspec import structs

from safelaunch.model import Collective, FlightRecord, Frame, RankEvidence, format_ranks
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


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_all_sit_in_a_synchronize_and_one_gpu_is_stuck(culprit: int) -> None:
    """The stacks are the same on all ranks: only what the devices have begun tells them apart."""
    ranks = [synchronizing(n, BEHIND_A_KERNEL if n == culprit else WAITING) for n in range(4)]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("gpu-kernel", [culprit])
    assert verdict.victims == format_ranks([n for n in range(4) if n != culprit])
    assert verdict.confidence == "high"
    assert verdict.culprits[0].frame == at(33)
    assert "#2 is queued behind it and has not started" in verdict.summary


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


def test_all_have_begun_the_same_collective() -> None:
    """Then it is the transport, or a GPU: nobody stands out, and no rank is said to be stuck in a kernel."""
    verdict = diagnose(job(*(synchronizing(n, WAITING) for n in range(4))))
    assert (verdict.cause, verdict.culprits) == ("no-rank-stands-out", ())


def test_a_record_that_tells_nothing_of_starts_accuses_no_gpu() -> None:
    untold = record(DONE, structs.replace(nccl("all_reduce", 2, state="scheduled"), started=None))
    verdict = diagnose(
        job(*(synchronizing(n, untold) for n in range(3)), rank(3, in_user(7), "sleep", flight=record(DONE)))
    )
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [3])


def test_a_group_that_waits_for_peers_explains_what_stands_behind_it() -> None:
    """Two groups on one stream: the first waits for rank 3, the second is only queued behind it."""
    behind = record(DONE, nccl("all_reduce", 2, state="started"), nccl("all_gather", 9, state="scheduled", group="tp"))
    ranks = [synchronizing(n, behind) for n in range(3)] + [rank(3, in_user(7), "sleep", flight=record(DONE))]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("stuck-in-user-code", [3])


def test_the_cpu_runs_ahead_of_a_stuck_gpu() -> None:
    """Rank 1 has queued three more collectives than its peers; its step count says nothing."""
    ahead = record(DONE, *(nccl("all_reduce", n, state="scheduled") for n in (2, 3, 4)), world=3)
    usual = record(DONE, nccl("all_reduce", 2, state="started"), world=3)
    ranks = [synchronizing(n, ahead if n == 1 else usual, step=9 if n == 1 else 6) for n in range(3)]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("gpu-kernel", [1])


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_gpu_that_is_still_in_what_all_others_have_left(culprit: int) -> None:
    """No peer can hold it up any more, whatever these do now."""
    over = record(DONE, nccl("all_reduce", 2, state="completed"))
    ranks = [rank(n, in_user(7), "sleep", flight=over) for n in range(4)]
    ranks[culprit] = synchronizing(culprit, WAITING)
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits]) == ("gpu-kernel", [culprit])
    assert "all its peers have completed all_reduce #2" in verdict.summary
