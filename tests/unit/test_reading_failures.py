"""What errors of NCCL, CUDA and device meshes mean, by messages as these libraries write them."""

from __future__ import annotations

import pytest

from safelaunch.reading.failures import failure

COMPLETION = "NET/IB : Got completion from peer 10.5.0.34<33956> with "


@pytest.mark.parametrize(
    ("message", "kind", "own", "means"),
    [
        ("Cuda failure 2 'out of memory'", "nccl-memory", True, "no memory left"),
        ("Cuda failure 700 'an illegal memory access was encountered'", "nccl-cuda", True, "a kernel had failed"),
        ("NCCL WARN Cuda failure 'invalid argument'", "nccl-cuda", True, "failed: invalid argument"),
        ("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "nccl-cuda", True, "NCCL's log"),
        ("unhandled system error (run with NCCL_DEBUG=INFO for details)", "nccl-system", False, "system call"),
        (
            "Error while creating shared memory segment /dev/shm/nccl-x (size 9), error: No space left on device (28)",
            "nccl-shm",
            True,
            "shared memory",
        ),
        (COMPLETION + "error 12, opcode 0, len 1", "infiniband", False, "10.5.0.34 did not answer"),
        (COMPLETION + "status=12 opcode=129", "infiniband", False, "10.5.0.34 did not answer"),
        (COMPLETION + "error 5, opcode 0", "infiniband", False, "had failed before"),
        (COMPLETION + "error 10, opcode 0", "infiniband", False, "status 10"),
        ("Call to ibv_create_cq failed with error Cannot allocate memory", "nccl-limit", True, "locked memory"),
        ("Call to ibv_modify_qp failed with error Invalid argument", "infiniband", True, "refused ibv_modify_qp"),
        ("Bootstrap : no socket interface found", "interface", True, "no network interface"),
        (
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            "one-gpu",
            True,
            "ranks 1 and 0 use one and the same GPU",
        ),
        ("socketStartConnect: Connect to 10.0.0.7<4711> failed : No route to host", "socket", False, "not be reached"),
        ("remote process exited or there was a network error, NCCL version 2.26.2", "socket", False, "a peer ended"),
        ("Mesh should not be bigger than default world size 4, but found 8 ranks!", "mesh", True, "world size"),
        ("Invalid device mesh", "mesh", True, "world size"),
    ],
)
def test_errors_are_told_apart(message: str, kind: str, own: bool, means: str) -> None:
    found = failure(message)
    assert found is not None
    assert (found.kind, found.own) == (kind, own)
    assert means in found.means


def test_the_last_error_is_more_than_the_general_words_before_it() -> None:
    general = "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nLast error:\n"
    found = failure(general + "Error while creating shared memory segment /dev/shm/nccl-x, error: No space left")
    assert found is not None and found.kind == "nccl-shm"


@pytest.mark.parametrize("message", ["", "loss is not finite", "CUDA out of memory. Tried to allocate 2.00 GiB."])
def test_other_errors_are_none_of_them(message: str) -> None:
    assert failure(message) is None
