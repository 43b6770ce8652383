"""What to do about each cause: the usual fix first, then the command that gets the evidence that is still missing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from safelaunch.diagnose.conditions import Sign


@dataclass(frozen=True)
class Advice:
    """``only_if``: it fits the cases that show this sign, and no others."""

    text: str
    only_if: Sign | None = None


# Nobody is named: the ranks that were seen are innocent, or may be.
_ALL_NODES = Advice(
    "Put the bundles of all nodes into one folder: `safelaunch diagnose FOLDER` reaches one verdict over all ranks.",
    only_if="nobody-named",
)
_OTHER_NODES = Advice(_ALL_NODES.text, only_if="ranks-unseen")

ADVICE: dict[str, tuple[Advice, ...]] = {
    "collective-mismatch": (
        Advice(
            "The other end of a send or receive may be what is missing: look on the peer for a branch that leaves"
            " it out.",
            only_if="transfer",
        ),
        Advice(
            "Gate the side effect, not the collective: let every rank call it, and put only the logging or saving"
            " under `if rank == 0`."
        ),
        Advice(
            "To have c10d check op, shape and type of every collective before it starts: safelaunch --preset "
            "desync-detail ..."
        ),
    ),
    "missing-from-collective": (
        Advice(
            "Look for a branch, an early `continue` or a caught exception before this collective, on the rank "
            "that did not come."
        ),
        Advice("To get stacks beside the Flight Recorder, run it under safelaunch --preset hang-debug ..."),
        _ALL_NODES,
    ),
    "uneven-batches": (
        Advice(
            "Give every rank the same number of batches (DistributedSampler with drop_last=True, or a step count "
            "agreed upon by all_reduce), or wrap the loop in torch.distributed.algorithms.join.Join."
        ),
        Advice("Take early-stopping decisions on one rank and broadcast them."),
    ),
    "group-order": (
        Advice(
            "Let all ranks enter their groups in one order, or overlap them with async_op=True and wait afterwards."
        ),
        Advice(
            "A rank that leaves out its call in one group waits in the other like this, too: look for a branch "
            "around it."
        ),
        Advice("Create groups with new_group() on every rank, in the same order, also on ranks that are not members."),
    ),
    "p2p-cycle": (
        Advice(
            "Post one side first: even ranks send then receive, odd ranks receive then send; or use "
            "batch_isend_irecv() for the exchange."
        ),
        Advice(
            "Where one sends and another receives, and both wait: compare peer, tag and group of the two calls.",
            only_if="send-and-receive",
        ),
    ),
    "init-not-joined": (
        Advice(
            "Check that the job was started on every node, with the same --nnodes and endpoint, and that each node "
            "reaches the endpoint's host and port.",
            only_if="nodes-absent",
        ),
        Advice(
            "If nodes only come late, let torchrun wait longer: --rdzv-conf=join_timeout=SECONDS.",
            only_if="nodes-absent",
        ),
        Advice(
            "Let every rank reach init_process_group before slow or rank-dependent work (downloads, unpacking, "
            "licence checks); do that work after it and end it with a barrier."
        ),
        Advice(
            "Check WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the ranks in node/<host>/env.json; `safelaunch "
            "--dry-run ...` shows what they are given."
        ),
    ),
    "data-loading": (
        Advice(
            "Run the dataset alone over the sample that the worker is at; give reads and downloads a timeout, and"
            " the DataLoader `timeout=60` so that it raises instead of waiting."
        ),
        Advice(
            "If the worker waits for a lock: start threads after the workers, or use "
            "multiprocessing_context='spawn' (or 'forkserver').",
            only_if="lock",
        ),
        Advice("To see whether the workers are at fault: the same run with num_workers=0."),
    ),
    "blocking-io": (
        Advice("Give the call a timeout, and do rank-dependent I/O outside the training loop."),
        Advice(
            "`ls -l /proc/<pid>/fd` of the live rank shows what is at the other end: safelaunch --on-stall dump ..."
        ),
    ),
    "uninterruptible-io": (
        Advice(
            "The kernel waits for storage, a network file system or a driver: look at node/<host>/kernel_log.txt "
            "and the mount that the line reads from; killing the process will not help until it answers."
        ),
        Advice("Put the data or the checkpoint on a local disk and run again."),
    ),
    "lock-deadlock": (
        Advice(
            "Take locks in one order everywhere, or one lock less; never call a collective or join a thread with "
            "a lock held."
        ),
        Advice(
            "Give lock.acquire(), queue.get(), event.wait() and future.result() a timeout, so that it raises "
            "where it waits."
        ),
    ),
    "gil-held": (
        Advice(
            "The native call has to release the GIL (Py_BEGIN_ALLOW_THREADS, pybind11's gil_scoped_release, "
            "ctypes.CDLL instead of PyDLL), or to return."
        ),
        Advice(
            "The C frames are in stack.txt where py-spy --native succeeded: safelaunch doctor tells whether it can."
        ),
    ),
    "busy-loop": (
        Advice("Bound the loop at this line, and check its exit condition on this rank."),
        Advice(
            "If it is honest work (an evaluation, a checkpoint), let the peers know: safelaunch.phase('eval') "
            "around it, or a longer --max-stall."
        ),
    ),
    "stuck-in-user-code": (
        Advice("Give this call a timeout, or let only ranks that nobody waits for run it."),
        Advice(
            "If the wait is meant, mark it: safelaunch.pause() or safelaunch.phase(...), or a longer --stall-timeout."
        ),
    ),
    "swallowed-exception": (
        Advice(
            "Let the exception end the rank, or let all ranks take the same branch after it: a rank that skips a "
            "batch also skips its collectives."
        ),
    ),
    "rank-stopped": (
        Advice(
            "Somebody or something stopped the process: `kill -CONT <pid>` lets it run on; look for a debugger, a"
            " job suspension by the scheduler, or a cgroup freezer."
        ),
    ),
    "gpu-kernel": (
        Advice("To find the kernel: safelaunch --preset cuda-sync ..."),
        Advice("Look at node/<host>/kernel_log.txt for Xid errors."),
    ),
    "rank-exited": (
        Advice(
            "Find the sys.exit() or os._exit() on this rank; to stop early, let all ranks agree first.",
            only_if="somebody-named",
        ),
        Advice(
            "Its last words are in the rank's log_tail.txt.",
            only_if="somebody-named",
        ),
        _ALL_NODES,
    ),
    "rank-killed": (
        Advice(
            "Out of host memory: fewer DataLoader workers, less prefetching, no copy of the dataset in each rank;"
            " or a higher memory limit for the job (node/<host>/resources.json shows it).",
            only_if="out-of-memory",
        ),
        Advice(
            "Whoever sent the SIGKILL leaves no trace in the process: look at the scheduler's log, at limits of "
            "time or memory of the job, and at node/<host>/kernel_log.txt.",
            only_if="killed-from-outside",
        ),
        Advice(
            "An abort in a collective: a peer may have called it with another size or type; to have every call "
            "checked first: safelaunch --preset desync-detail ...",
            only_if="aborted-in-a-collective",
        ),
        Advice(
            "The training had ended: torch may abort a rank that ends right after a collective over gloo (PyTorch"
            " issue 190489); a dist.barrier() before dist.destroy_process_group() avoids it.",
            only_if="after-the-end",
        ),
        Advice(
            "SIGSEGV, SIGABRT or SIGBUS: the rank's fault.txt has the stack of every thread at that moment; for "
            "/dev/shm that is full, safelaunch doctor.",
            only_if="fatal-signal",
        ),
    ),
    "rank-exception": (
        Advice("Fix the exception on this rank; the errors of the other ranks follow from it."),
        Advice("If it comes from one sample or one rank only, run that rank's input alone."),
    ),
    "node-lost": (
        Advice(
            "Look at the node itself: power, kernel panic (its BMC or serial console), or a scheduler or out-of-memory"
            " killer that took every process of the job there."
        ),
        Advice(
            "Leave the node out until it is checked: `scontrol update NodeName=NODE State=DRAIN`, `kubectl cordon`."
        ),
    ),
    "node-unreachable": (
        Advice("From another node: `ping HOST`, and `ip -s link` on both ends; then the switch and its ports."),
        Advice("If the node answers, look there for the job's processes: they may still run, and hold its GPUs."),
        _OTHER_NODES,
    ),
    "node-behind": (
        Advice(
            "Compare this node with the others: node/<host>/ has its GPUs, kernel log, disks, memory and load; then"
            " leave it out and run again."
        ),
        Advice("If the script branches by node or rank (`GROUP_RANK`, host name), look at that branch first."),
    ),
    "launcher-stopped": (
        Advice(
            "On that node: `ps -o pid,stat,cmd -C python`; `kill -CONT PID` lets a stopped torchrun or safelaunch run"
            " on. Look for a debugger, a job suspension by the scheduler, or a cgroup freezer."
        ),
        Advice("If it has ended, end the ranks that it left there before you start the job again."),
    ),
    "versions-differ": (
        Advice("Give all nodes the same environment: one image, or one shared directory, and one copy of the script."),
    ),
    "no-rank-stands-out": (
        Advice(
            "All ranks have arrived: suspect the transport (NIC, NCCL_SOCKET_IFNAME, firewall between nodes) or a GPU.",
            only_if="all-arrived",
        ),
        Advice(
            "A broadcast or reduce whose src or dst differs between ranks looks like this, too, and no backend "
            "records it: print it on every rank.",
            only_if="all-arrived",
        ),
        Advice(
            "To see what the transport does: safelaunch --preset nccl-debug ...",
            only_if="all-arrived",
        ),
        Advice(
            "To check that all ranks meant the same collective: safelaunch --preset desync-detail ...",
            only_if="all-arrived",
        ),
        Advice(
            "No rank waits for another one: what they wait for is outside the job. Look at the lines above, and give"
            " such a call a timeout.",
            only_if="all-in-own-code",
        ),
        _OTHER_NODES,
    ),
    "slow-not-stuck": (
        Advice("Nothing to fix for a hang; to see where the time goes, look at the merged stacks in report.md."),
        Advice("To watch it: safelaunch status --watch"),
    ),
}


def advice_for(cause: str, signs: Collection[Sign] = ()) -> tuple[str, ...]:
    """The advice for ``cause`` that fits a case with these signs."""
    return tuple(one.text for one in ADVICE.get(cause, ()) if one.only_if is None or one.only_if in signs)
