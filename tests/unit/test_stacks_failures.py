"""Meanings of errors by NCCL, CUDA, device meshes and the allocator, and last messages of aborted processes."""

from __future__ import annotations

import pytest

from safelaunch.stacks.aborts import last_abort
from safelaunch.stacks.failures import failure, first_failure
from safelaunch.stacks.gpu_shortage import shortage
from tests.support.evidence import OUT_OF_MEMORY

COMPLETION = "NET/IB : Got completion from peer 10.5.0.34<33956> with "


@pytest.mark.parametrize(
    ("message", "kind", "own", "means"),
    [
        ("Cuda failure 2 'out of memory'", "nccl-memory", True, "no memory left"),
        ("Cuda failure 700 'an illegal memory access was encountered'", "nccl-cuda", True, "illegal memory"),
        ("NCCL WARN Cuda failure 'invalid argument'", "nccl-cuda", True, "failed: invalid argument"),
        ("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "nccl-cuda", True, "NCCL's log"),
        (
            "Error while creating shared memory segment /dev/shm/nccl-x (size 9), error: No space left on device (28)",
            "nccl-shm",
            True,
            "shared memory",
        ),
        (COMPLETION + "error 12, opcode 0, len 1", "infiniband", False, "10.5.0.34 failed with status 12"),
        (COMPLETION + "status=12 opcode=129", "infiniband", False, "10.5.0.34 failed with status 12"),
        (COMPLETION + "error 5, opcode 0", "infiniband", False, "status 5"),
        (COMPLETION + "error 10, opcode 0", "infiniband", False, "status 10"),
        ("Call to ibv_create_cq failed with error Cannot allocate memory", "nccl-limit", True, "locked memory"),
        (
            "Call to ibv_modify_qp failed with error Invalid argument",
            "infiniband",
            True,
            "failed: Invalid argument",
        ),
        (
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            "one-gpu",
            True,
            "ranks 1 and 0 use the same GPU",
        ),
        ("socketStartConnect: Connect to 10.0.0.7<4711> failed : No route to host", "socket", False, "not be reached"),
        ("Invalid device mesh", "mesh", True, "world size"),
        (
            "NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
            "infiniband",
            False,
            "status 12",
        ),
        ("NET/IB : Got completion with error 4, opcode 1, len 0, vendor err 81", "infiniband", False, "status 4"),
        (
            "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx_x:1, curr state INIT",
            "infiniband",
            True,
            "ibv_modify_qp of InfiniBand failed: Connection timed out",
        ),
        (
            "Call to ibv_modify_qp failed with error Network is unreachable",
            "infiniband",
            True,
            "Network is unreachable",
        ),
        ("Error: failed to extend /dev/shm/nccl-H1dBqY to 9637892 bytes", "nccl-shm", True, "shared memory"),
        ("Error while creating shared memory segment /dev/shm/nccl-a (size 9)", "nccl-shm", True, "shared memory"),
        ("Cuda failure 'driver shutting down'", "nccl-ending", False, "already ending"),
        ("Cuda failure 999 'unknown error'", "nccl-cuda", True, "unknown error"),
        (
            "socketProgressOpt: Call to send to 10.44.137.149<52905> failed : Connection reset by peer",
            "socket",
            False,
            "a peer ended",
        ),
        ("socketProgress: Connection closed by remote peer node2<42830>", "socket", False, "a peer ended"),
        ("Message truncated : received 256 bytes instead of 4", "nccl-sizes", False, "different sizes"),
        ("NET/Socket : message truncated : receiving 696320 bytes instead of 32768", "nccl-sizes", False, "sizes"),
        (
            "NET/IB : req 0/1 tag 0 peer b<5> collective mismatch error, local size 496640 remote size 65536",
            "nccl-sizes",
            False,
            "settings differ",
        ),
        (
            "init.cc:1 NCCL WARN Mismatched NCCL version detected : rank 0 version 21403 rank 1 version 21602",
            "nccl-versions",
            True,
            "different versions",
        ),
    ],
)
def test_failure_message_is_classified(message: str, kind: str, own: bool, means: str) -> None:
    cause = failure(message)
    assert cause is not None
    assert (cause.kind, cause.own) == (kind, own)
    assert means in cause.means


def test_failure_uses_last_error_over_general_message() -> None:
    general = "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nLast error:\n"
    cause = failure(general + "Error while creating shared memory segment /dev/shm/nccl-x, error: No space left")
    assert cause is not None and cause.kind == "nccl-shm"


@pytest.mark.parametrize("message", ["", "loss is not finite", "CUDA out of memory. Tried to allocate 2.00 GiB."])
def test_failure_ignores_other_messages(message: str) -> None:
    assert failure(message) is None


def test_first_failure_prefers_own_error_over_peer_errors() -> None:
    peer = "socketProgress: Connection closed by remote peer node2<42830>"
    own = "Cuda failure 700 'an illegal memory access was encountered'"
    ending = "Cuda failure 'driver shutting down'"
    cause = first_failure(["Failed to open libibverbs.so[.1]", peer, own, ending])
    assert cause is not None and (cause.text, cause.kind) == (own, "nccl-cuda")
    cause = first_failure([ending, peer])
    assert cause is not None and cause.text == peer
    assert first_failure(["Failed to open libibverbs.so[.1]", ending]) is None


# --- exhausted memory of a GPU ----------------------------------------------------------------------------------------

GIB, MIB = 1 << 30, 1 << 20


def test_memory_shortage_sizes_are_parsed() -> None:
    memory = shortage(OUT_OF_MEMORY)
    assert memory is not None
    assert (memory.device, memory.asked, memory.total, memory.free) == (1, 2 * GIB, 79 * GIB, 512 * MIB)
    assert (memory.own, memory.allocated, memory.unused) == (73 * GIB + 512 * MIB, 66 * GIB, 6 * GIB)
    assert memory.others == ((4711, 5 * GIB),)
    assert memory.is_fragmented


def test_memory_shortage_without_sizes_leaves_them_unknown() -> None:
    memory = shortage("HIP out of memory. Tried to allocate 20.00 MiB.")
    assert memory is not None
    assert (memory.device, memory.asked, memory.own, memory.others) == (-1, 20 * MIB, None, ())
    assert not memory.is_fragmented


def test_memory_shortage_with_zero_bytes_free_is_parsed() -> None:
    memory = shortage(OUT_OF_MEMORY.replace("512.00 MiB is free", "0 bytes is free").replace("capacity", "capacty"))
    assert memory is not None and (memory.free, memory.total) == (0, 79 * GIB)


@pytest.mark.parametrize("message", ["", "CUDA out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_memory_shortage_ignores_other_messages(message: str) -> None:
    assert shortage(message) is None


# --- last messages of aborted processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "words", "means"),
    [
        (
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
            "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:457]"
            " op.preamble.length <= op.nbytes. 4096 vs 64\n",
            "terminate called after throwing an instance of 'gloo::EnforceNotMet' what():",
            "a peer sent 4096 bytes into a call that has room for 64",
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: unspecified launch\n"
            "Exception raised from query at Event.cpp:5 (most recent call first):\nframe #0: c10::Error::Error()\n",
            "'c10::Error' what():  CUDA error: unspecified launch",
            "an uncaught C++ exception",
        ),
        ("terminate called without an active exception\n", "without an active", "an uncaught C++ exception"),
        ("step 5\nFatal Python error: none_dealloc: fatal\n", "none_dealloc", "the interpreter itself"),
        ("step 5\nfree(): invalid pointer\n", "free(): invalid pointer", "the heap had been corrupted"),
        ("double free or corruption (!prev)\n", "double free", "the heap had been corrupted"),
        ("*** stack smashing detected ***: terminated\n", "stack smashing", "past the end of a buffer"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0\n", "oom_kill", "out-of-memory killer"),
        ("  what():  std::bad_alloc\n", "std::bad_alloc", "no memory left"),
        ("python: gemm.c:91: pack: Assertion `n > 0' failed.\n", "n > 0", "an assertion"),
    ],
)
def test_abort_message_is_found_in_log(log: str, words: str, means: str) -> None:
    abort = last_abort(f"loss 0.5\n{log}")
    assert abort is not None
    assert words in abort.words and means in abort.means


@pytest.mark.parametrize(
    "log",
    [
        "",
        "loss 0.5\n",
        "Fatal Python error: Bus error\n",
        "what is free: malloc_stats()\n",
        "free(): x\n" + "step\n" * 60,
    ],
)
def test_log_without_abort_message_gives_none(log: str) -> None:
    assert last_abort(log) is None
