"""What to do about each cause: the usual fix first, then the command that gets the evidence that is still missing."""

from __future__ import annotations

import re
from collections.abc import Iterable

ADVICE: dict[str, tuple[str, ...]] = {
    "collective-mismatch": (
        "The other end of a send or receive may be what is missing: look on the peer for a branch that leaves it out.",
        "Gate the side effect, not the collective: let every rank call it, and put only the logging or saving under"
        " `if rank == 0`.",
        "To have c10d check op, shape and type of every collective before it starts:"
        " safelaunch --preset desync-detail ...",
    ),
    "missing-from-collective": (
        "Look for a branch, an early `continue` or a caught exception before this collective, on the rank that did not"
        " come.",
        "To get stacks beside the Flight Recorder, run it under safelaunch --preset hang-debug ...",
    ),
    "uneven-batches": (
        "Give every rank the same number of batches (DistributedSampler with drop_last=True, or a step count agreed"
        " upon by all_reduce), or wrap the loop in torch.distributed.algorithms.join.Join.",
        "Take early-stopping decisions on one rank and broadcast them.",
    ),
    "group-order": (
        "Let all ranks enter their groups in one order, or overlap them with async_op=True and wait afterwards.",
        "A rank that leaves out its call in one group waits in the other like this, too: look for a branch around it.",
        "Create groups with new_group() on every rank, in the same order, also on ranks that are not members.",
    ),
    "p2p-cycle": (
        "Post one side first: even ranks send then receive, odd ranks receive then send; or use"
        " batch_isend_irecv() for the exchange.",
        "Where one sends and another receives, and both wait: compare peer, tag and group of the two calls.",
    ),
    "init-not-joined": (
        "Let every rank reach init_process_group before slow or rank-dependent work (downloads, unpacking, licence"
        " checks); do that work after it and end it with a barrier.",
        "Check WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the ranks in node/<host>/env.json;"
        " `safelaunch --dry-run ...` shows what they are given.",
    ),
    "data-loading": (
        "Run the dataset alone over the sample that the worker is at; give reads and downloads a timeout, and the"
        " DataLoader `timeout=60` so that it raises instead of waiting.",
        "If the worker waits for a lock: start threads after the workers, or use multiprocessing_context='spawn'"
        " (or 'forkserver').",
        "To see whether the workers are at fault: the same run with num_workers=0.",
    ),
    "blocking-io": (
        "Give the call a timeout, and do rank-dependent I/O outside the training loop.",
        "`ls -l /proc/<pid>/fd` of the live rank shows what is at the other end: safelaunch --on-stall dump ...",
    ),
    "uninterruptible-io": (
        "The kernel waits for storage, a network file system or a driver: look at node/<host>/kernel_log.txt and the"
        " mount that the line reads from; killing the process will not help until it answers.",
        "Put the data or the checkpoint on a local disk and run again.",
    ),
    "lock-deadlock": (
        "Take locks in one order everywhere, or one lock less; never call a collective or join a thread with a lock"
        " held.",
        "Give lock.acquire(), queue.get(), event.wait() and future.result() a timeout, so that it raises where it"
        " waits.",
    ),
    "gil-held": (
        "The native call has to release the GIL (Py_BEGIN_ALLOW_THREADS, pybind11's gil_scoped_release,"
        " ctypes.CDLL instead of PyDLL), or to return.",
        "The C frames are in stack.txt where py-spy --native succeeded: safelaunch doctor tells whether it can.",
    ),
    "busy-loop": (
        "Bound the loop at this line, and check its exit condition on this rank.",
        "If it is honest work (an evaluation, a checkpoint), let the peers know: safelaunch.phase('eval') around it,"
        " or a longer --max-stall.",
    ),
    "stuck-in-user-code": (
        "Give this call a timeout, or let only ranks that nobody waits for run it.",
        "If the wait is meant, mark it: safelaunch.pause() or safelaunch.phase(...), or a longer --stall-timeout.",
    ),
    "swallowed-exception": (
        "Let the exception end the rank, or let all ranks take the same branch after it: a rank that skips a batch"
        " also skips its collectives.",
    ),
    "rank-stopped": (
        "Somebody or something stopped the process: `kill -CONT <pid>` lets it run on; look for a debugger, a job"
        " suspension by the scheduler, or a cgroup freezer.",
    ),
    "gpu-kernel": (
        "To find the kernel: safelaunch --preset cuda-sync ...",
        "Look at node/<host>/kernel_log.txt for Xid errors.",
    ),
    "rank-exited": (
        "Find the sys.exit() or os._exit() on this rank; to stop early, let all ranks agree first.",
        "Its last words are in the rank's log_tail.txt.",
    ),
    "rank-killed": (
        "Out of host memory: fewer DataLoader workers, less prefetching, no copy of the dataset in each rank; or a"
        " higher memory limit for the job (node/<host>/resources.json shows it).",
        "Whoever sent the SIGKILL leaves no trace in the process: look at the scheduler's log, at limits of time or"
        " memory of the job, and at node/<host>/kernel_log.txt.",
        "An abort in a collective: a peer may have called it with another size or type; to have every call checked"
        " first: safelaunch --preset desync-detail ...",
        "The training had ended: torch may abort a rank that ends right after a collective over gloo (PyTorch issue"
        " 190489); a dist.barrier() before dist.destroy_process_group() avoids it.",
        "SIGSEGV, SIGABRT or SIGBUS: the rank's fault.txt has the stack of every thread at that moment; for /dev/shm"
        " that is full, safelaunch doctor.",
    ),
    "rank-exception": (
        "Fix the exception on this rank; the errors of the other ranks follow from it.",
        "If it comes from one sample or one rank only, run that rank's input alone.",
    ),
    "no-rank-stands-out": (
        "All ranks have arrived: suspect the transport (NIC, NCCL_SOCKET_IFNAME, firewall between nodes) or a GPU.",
        "A broadcast or reduce whose src or dst differs between ranks looks like this, too, and no backend records it:"
        " print it on every rank.",
        "To see what the transport does: safelaunch --preset nccl-debug ...",
        "To check that all ranks meant the same collective: safelaunch --preset desync-detail ...",
    ),
    "slow-not-stuck": (
        "Nothing to fix for a hang; to see where the time goes, look at the merged stacks in report.md.",
        "To watch it: safelaunch status --watch",
    ),
}


_ONLY_IF = {
    "The other end of a send": r"waits in (?:a send|\w*(?:send|recv)\b)",
    "If the worker waits for a lock": "waits for a lock",
    "Out of host memory": "out-of-memory killer took",
    "Whoever sent the SIGKILL": "SIGKILL(?!: the)",
    "An abort in a collective": "communication library",
    "The training had ended": "SIGABRT.* after its script had ended",
    "SIGSEGV": "SIG(?!KILL|TERM)",
    "Where one sends": "send.*recv|recv.*send",
}


def suggestions_for(cause: str, reasons: Iterable[str] = ()) -> tuple[str, ...]:
    """The advice for ``cause``; what fits one kind of case only is given where the culprits' ``reasons`` show it."""
    said = " ".join(reasons)
    return tuple(
        advice
        for advice in ADVICE.get(cause, ())
        if all(re.search(sign, said) for start, sign in _ONLY_IF.items() if advice.startswith(start))
    )
