"""A rank that waits for its own GPU, told from ranks that wait for peers: NCCL's records and synchronizing stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from safelaunch.capture.gpu import errors_of
from safelaunch.model import Collective, FlightRecord, Frame, RankEvidence
from safelaunch.verdict.diagnose import diagnose
from tests.support.evidence import MODULE, SITE, at, in_user, job, rank

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


XID = "2026-11-20 10:00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OF_A_PROCESS = "2026-11-20 10:00:01 NVRM: Xid (PCI:0000:5e:00): 31, pid=41, name=python, Ch 00000008, MMU Fault"
REPAIRED = "2026-11-20 10:00:02 NVRM: Xid (PCI:0000:3b:00): 63, pid=41, name=python, Row Remapper: remapped"


def test_whose_gpu_the_driver_reports_an_error_of(tmp_path: Path) -> None:
    for place, uuid in (("0000:3b:00.0", "GPU-aa"), ("0000:5e:00.0", "GPU-bb")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\n")
    log = [XID, OF_A_PROCESS, REPAIRED, "python[41]: segfault at 0"]
    assert errors_of(7, "GPU-aa", log, tmp_path) == (XID,)
    assert errors_of(41, "GPU-cc", log, tmp_path) == errors_of(41, "", log, tmp_path) == (OF_A_PROCESS,)
    assert errors_of(7, "GPU-bb", log, tmp_path) == (OF_A_PROCESS,)
    assert errors_of(4, "", log, tmp_path) == errors_of(4, "1", [], tmp_path) == ()


def test_a_rank_whose_gpu_is_lost_while_all_have_arrived() -> None:
    """Stacks and records of all are alike: only the driver knows which GPU does not answer."""
    ranks = [synchronizing(n, WAITING, more={"gpu_errors": (XID,) if n == 2 else ()}) for n in range(4)]
    verdict = diagnose(job(*ranks))
    assert (verdict.cause, [c.rank for c in verdict.culprits], verdict.victims) == ("gpu-lost", [2], "0-1,3")
    assert "79" in verdict.summary and any(XID in claim.claim for claim in verdict.evidence)
    assert diagnose(job(*(synchronizing(n, WAITING) for n in range(4)))).cause == "no-rank-stands-out"


def test_an_error_of_the_gpu_does_not_explain_a_sleep() -> None:
    ranks = [rank(n, in_user(7), "sleep", flight=record(DONE), more={"gpu_errors": (XID,)}) for n in range(1)]
    assert diagnose(job(*ranks)).cause != "gpu-lost"
