"""Errors as gloo, c10d, TCPStore, NCCL and scripts word them: a rank's own failure, a peer's, or neither.

The messages are those that people report. The explanation of an error is correct or absent, never wrong.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from safelaunch.model import Frame, RankException, RankExit
from safelaunch.verdict.diagnose import diagnose
from safelaunch.verdict.exceptions import failure_of, is_consequence, is_timeout
from tests.support.evidence import SITE, at, job, rank, waiting

C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
STORE = f"{SITE}/torch/distributed/rendezvous.py"
MESH = f"{SITE}/torch/distributed/device_mesh.py"
BACKWARD = f"{SITE}/torch/autograd/graph.py"
MINE = "/home/me/data.py"
BACKEND, NETWORK, STORE_ERROR = (f"torch.distributed.Dist{kind}Error" for kind in ("Backend", "Network", "Store"))
GLOO = "../third_party/gloo/gloo/transport/tcp"
REMOTE = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network"
    " error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process"
    " exiting prematurely.\nLast error:\n"
)
SYSTEM = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled system error (run with NCCL_DEBUG=INFO"
    " for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library call"
    " failed or device error.\nLast error:\n"
)
INTERNAL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, internal error - please report this issue"
    " to the NCCL developers, NCCL version 2.18.6\nncclInternalError: Internal check failed.\nLast error:\n"
)
CUDA = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda error (run with NCCL_DEBUG=INFO"
    " for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
UNIQUE_ID = (
    "[15] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but"
    " store->get('0') got error: {}\nException raised from recvBytes at ../torch/csrc/distributed/c10d/Utils.hpp:672"
)
LISTEN = "The server socket has failed to listen on any local network address."


def raised(kind: str, message: str, *files: str) -> RankException:
    frames = tuple(Frame(file, 100, "inner") for file in files)
    return RankException(kind, message, 100.0, (*frames, at(41, "step"), at(100, "<module>")))


PEERS = [
    ("RuntimeError", f"[{GLOO}/unbound_buffer.cc:136] Timed out waiting 1800000ms for send operation to complete", C10D,
     "peer-late", "no peer matched this send within the group's timeout (1800000 ms)"),
    ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", "", "peer-late",
     "matched this recv"),
    ("RuntimeError", "Application timeout caused pair closure", "", "peer-late", "an earlier call over the same"),
    ("RuntimeError", f"[{GLOO}/pair.cc:534] Connection closed by peer [127.0.0.1]:10895", "", "socket", "a peer ended"),
    ("RuntimeError", f"[{GLOO}/pair.cc:589] Read error [192.168.70.92]:25266: Connection reset by peer", BACKWARD,
     "socket", "a peer ended"),
    ("RuntimeError", f"Gloo connectFullMesh failed with [{GLOO}/pair.cc:144] no error", C10D, "socket",
     "not be reached"),
    (NETWORK, "The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).", STORE,
     "socket", "not be reached"),
    (NETWORK, "failed to recv, got 0 bytes", C10D, "socket", "a peer ended"),
    (STORE_ERROR, "Timed out after 1801 seconds waiting for clients. 3/4 clients joined.", STORE, "peer-late",
     "3 of 4"),
    (STORE_ERROR, "wait timeout after 300000ms, keys: /default_pg/0//cuda//2", C10D, "peer-late", "set the store key"),
    (BACKEND, UNIQUE_ID.format("Connection reset by peer"), C10D, "socket", "a peer ended"),
    ("RuntimeError", UNIQUE_ID.format("Socket Timeout"), C10D, "peer-late", "set the store key"),
    (BACKEND, REMOTE + "socketProgressOpt: Call to recv from 172.1.1.1<33759> failed : Connection reset by peer", C10D,
     "socket", "a peer ended"),
    (BACKEND, REMOTE, C10D, "socket", "a peer ended"),
    (BACKEND, REMOTE + "NET/IB : Got completion from peer 172.21.17.89<38536> with error 12, opcode 48, len 32710,"
     " vendor err 129", C10D, "infiniband", "with 172.21.17.89 failed"),
    (BACKEND, REMOTE + "NET/IB: Got completion from peer fe80::966d:ae03:8b:df78%ib0<53249> with error 4, opcode 32564",
     C10D, "infiniband", "with fe80::966d:ae03:8b:df78%ib0 failed with status 4"),
    (BACKEND, SYSTEM + "socketStartConnect: Connect to 10.0.0.2<45763> failed : Software caused connection abort", C10D,
     "socket", "not be reached"),
    (BACKEND, SYSTEM, C10D, "nccl-system", "a system call of NCCL failed"),
    (BACKEND, INTERNAL + "Net : Connection closed by remote peer node2<47861>", C10D, "socket", "a peer ended"),
    (BACKEND, "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=40402014, OpType=_ALLGATHER_BASE,"
     " NumelIn=513, Timeout(ms)=1800000) ran for 1800046 milliseconds before timing out.", "", "peer-late",
     "didn't finish"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "file", "failure", "means"), PEERS)
def test_peer_error_is_a_consequence_not_a_cause(kind: str, message: str, file: str, failure: str, means: str) -> None:
    exception = raised(kind, message, *filter(None, (file,)))
    found = failure_of(exception)
    assert found is not None
    assert (found.kind, found.own) == (failure, False)
    assert means in found.means
    assert is_consequence(exception)
    assert is_timeout(exception) is (failure == "peer-late" or "timed out" in message)


OWN = [
    ("RuntimeError", f"[enforce fail at {GLOO}/device.cc:83] ifa != nullptr. Unable to find address for: eth9", C10D,
     "interface", "no network interface fits"),
    ("RuntimeError", f"[enforce fail at {GLOO}/device.cc:208] rv != -1. -1 vs -1. Name or service not known", C10D,
     "host-name", "could not be resolved"),
    (NETWORK, "The IPv6 network addresses of (node-0, 29500) cannot be retrieved (gai error: -2 - Name or service not"
     " known).", STORE, "host-name", "could not be resolved"),
    (NETWORK, f"{LISTEN} port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
     STORE, "port", "the port that it needs"),
    ("RuntimeError", f"{LISTEN} The server socket has failed to bind to [::]:44796 (errno: 98 - Address already in use",
     STORE, "port", "the port that it needs"),
    (BACKEND, SYSTEM + "Call to bind failed : Address already in use", C10D, "port", "the port that it needs"),
    (BACKEND, SYSTEM + "Call to accept failed : Too many open files", C10D, "open-files", "open files"),
    (BACKEND, CUDA + "Cuda failure 217 'peer access is not supported between these two devices'", C10D, "nccl-cuda",
     "peer access is not supported"),
    (BACKEND, CUDA + "Cuda failure 3 'initialization error'", C10D, "nccl-cuda", "initialization error"),
    (BACKEND, INTERNAL + "Bootstrap : no socket interface found", C10D, "interface", "no network interface fits"),
    (BACKEND, INTERNAL, C10D, "nccl-system", "a check inside NCCL failed"),
    ("RuntimeError", "Mesh should not be bigger than default world size 4, but found 8 ranks!", MESH, "mesh",
     "world size"),
    ("RuntimeError", "The new group's rank should be within the world_size set by init_process_group", C10D, "mesh",
     "ranks that this job doesn't have"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "file", "failure", "means"), OWN)
def test_own_failure_blames_its_rank(kind: str, message: str, file: str, failure: str, means: str) -> None:
    exception = raised(kind, message, file)
    found = failure_of(exception)
    assert found is not None
    assert (found.kind, found.own) == (failure, True)
    failed = rank(0, seen=False, more={"exception": exception, "exit": RankExit(1, 100.2)})
    peer = replace(waiting(1), exit=RankExit(-15, 105.0, before_close=False))
    verdict = diagnose(job(failed, peer, outcome="crash"))
    assert (verdict.cause, [one.rank for one in verdict.culprits]) == ("rank-exception", [0])
    assert means in verdict.summary


@pytest.mark.parametrize(
    ("kind", "message", "files"),
    [
        ("RuntimeError", "wandb: connection reset by peer", (MINE,)),
        ("RuntimeError", "feature cache at 10.0.0.9: socket was closed, connection refused", (MINE,)),
        ("TimeoutError", "Timed out waiting for the dataset server", (MINE,)),
        ("RuntimeError", "Timed out waiting 30 s for the tokenizer", (MINE,)),
        (
            "requests.exceptions.ConnectionError",
            "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
            (f"{SITE}/requests/adapters.py", MINE),
        ),
        (
            "RuntimeError",
            "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            "RuntimeError: s3: connection reset by peer",
            (f"{SITE}/torch/_utils.py", f"{SITE}/torch/utils/data/dataloader.py"),
        ),
        (
            "ConnectionResetError",
            "[Errno 104] Connection reset by peer",
            ("/usr/lib/python3.11/ssl.py", f"{SITE}/torch/hub.py"),
        ),
        ("OSError", "[Errno 98] Address already in use", ("/usr/lib/python3.11/socketserver.py", MINE)),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", (f"{SITE}/torch/nn/functional.py",)),
        ("RuntimeError", "No backend type associated with device type cpu", (C10D,)),
        ("RuntimeError", "('Found the DeviceMesh have 2 dimensions', '`mesh_dim` needs to be specified')", (MESH,)),
        (BACKEND, INTERNAL + "Attribute busid of node nic not found", (C10D,)),
    ],
)  # fmt: skip
def test_unknown_errors_are_own_failures_without_explanation(kind: str, message: str, files: tuple[str, ...]) -> None:
    exception = raised(kind, message, *files)
    assert failure_of(exception) is None
    assert not is_consequence(exception)
