"""The catalogue of causes: what each means, how safelaunch knows it, and what to do about it."""

from __future__ import annotations

import re
from typing import Literal

from safelaunch.verdict import suggestions
from safelaunch.verdict.doubts import confidence_of
from safelaunch.verdict.suggestions import Advice

CAUSES: dict[str, type[Cause]] = {}


class Cause:
    """One cause of the catalogue.

    ``safelaunch explain`` and the documentation show the docstring: what the cause means, and an example at the end.

    - ``evidence``: how safelaunch knows
    - ``unlike``: causes that look similar, each with the difference
    - ``advice``: advice for its sub-cases, then what fits all of them
    - ``own``: a live rank can do this alone and block its peers; rules about waits conclude no other cause
    - ``failure``: it has ended the rank
    - ``of_node``: if exactly the ranks of one node do it, the node is to blame (``perhaps``: or their script)
    - ``worker``: if several DataLoader workers owe a batch, the one with the highest number is named. Order: workers
      that can't run, then blocked ones, then ones that compute (they might just be slow).
    """

    evidence: str
    unlike: tuple[tuple[str, str], ...] = ()
    advice: tuple[Advice, ...]
    own = False
    failure = False
    of_node: Literal["", "perhaps", "surely"] = ""
    worker = 0

    def __init_subclass__(cls, *, name: str) -> None:
        CAUSES[name] = cls

    @classmethod
    def all_advice(cls) -> list[str]:
        """Returns each piece of advice once, with the torch versions that it is for."""
        texts = (f"{advice.shown} (torch {advice.torch})" if advice.torch else advice.shown for advice in cls.advice)
        return list(dict.fromkeys(texts))


def _advice(*advice: Advice | str) -> tuple[Advice, ...]:
    return tuple(Advice(text) if isinstance(text, str) else text for text in advice)


class CollectiveMismatch(Cause, name="collective-mismatch"):
    """Ranks of one group called different operations, or the same one with different shapes or types.

    Calls are compared by sequence number, and the minority is at fault. A rank that made an extra call or skipped one
    long ago is named with the line where the histories diverge. A majority counts only if its members call from the
    same place and continue with the same calls. If the ranks diverge in three or more ways, the verdict names no rank
    and shows where they diverge.

    ```text
    Rank 1 waits in barrier at collectives.py:17 (wait_for_all) while ranks 0,2 wait in all_reduce at training.py:54
    (train).
    ```
    """

    evidence = (
        "The calls of all ranks are compared group by group, by sequence number, back to the place where they "
        "diverge. They come from the Flight Recorders, or from stacks and logs. The source shows the condition that "
        "sent the ranks different ways."
    )
    unlike = (
        ("uneven-batches", "the rank has left the loop"),
        ("group-order", "each group's calls match, and only the order of the groups differs"),
        ("swallowed-exception", "an exception that the script caught explains the skipped calls"),
    )
    advice = _advice(
        suggestions.UNUSUAL_GROUP,
        suggestions.RACE,
        suggestions.MISSING_TRANSFER,
        suggestions.TAGS_DIFFER,
        suggestions.PEERS_DIFFER,
        suggestions.ROOTS_DIFFER,
        suggestions.DDP_FORWARD,
        suggestions.FSDP_FORWARD,
        suggestions.SYNC_BATCHNORM,
        suggestions.STATE_DICT,
        suggestions.HELD,
        suggestions.HANDLES,
        suggestions.ASIDE,
        suggestions.GUARDED,
        suggestions.LEFT_OUT,
        suggestions.UNUSED_PARAMETERS,
        suggestions.SAME_DECISION,
        suggestions.GROUPS_MADE,
        suggestions.SIZES_DIFFER,
        suggestions.TRIED_AGAIN,
        suggestions.OTHER_ITEMS,
        Advice(
            "Make all ranks call the same collectives in the same order: compare how each rank reaches the call "
            "that it waits in.",
            when=lambda case: not case.finding.all_advice,
        ),
        Advice(
            "To have c10d compare op, shape and type of every collective before it starts",
            when=lambda case: confidence_of(case.finding.doubts) != "high",
            preset=suggestions.DESYNC_PRESET,
            torch=suggestions.DESYNC_TORCH,
        ),
    )


class MissingFromCollective(Cause, name="missing-from-collective"):
    """A rank never entered a collective that its peers wait in, and no stack shows why.

    This is typical of [verdicts from dumps](dumps.md) alone.

    ```text
    Rank 3 made no call after all_reduce #3 of group '0' at train.py:44 (train), while ranks 0-2 wait in all_reduce
    at train.py:50 (train).
    ```
    """

    evidence = (
        "The stacks or records of the peers show the call that they wait in, and the rank's own record ends before it."
    )
    unlike = (
        ("collective-mismatch", "the rank's own pending call is known, and it is a different one"),
        ("stuck-in-user-code", "a stack shows what the rank does instead"),
    )
    advice = _advice(
        suggestions.WRONG_GROUP,
        suggestions.UNUSUAL_GROUP,
        Advice(
            "Look for a branch, an early `continue` or a caught exception before this collective, on the missing rank.",
            unless=(suggestions.WRONG_GROUP, suggestions.UNUSUAL_GROUP),
        ),
        Advice(
            "To see where that rank is, run the job under `safelaunch`: it collects the stacks of all ranks along "
            "with the Flight Recorder.",
            when=lambda case: case.without_stack and case.facts.evidence.launched is None,
            unless=(suggestions.ALL_LOGS,),
        ),
        suggestions.NO_STACKS,
        suggestions.ALL_NODES,
        suggestions.ALL_LOGS,
    )
    own = True
    of_node = "perhaps"


class UnevenBatches(Cause, name="uneven-batches"):
    """A rank left the training loop, or exited cleanly, while others are still in it.

    It had fewer batches, or stopped early.

    ```text
    Rank 1 waits in barrier at uneven.py:25 (main) while ranks 0,2 wait in all_reduce at training.py:54 (train); rank
    1 has left the loop at uneven.py:20.
    ```
    """

    evidence = "The rank's stack is past the loop in which its peers wait, or the rank has exited with code 0."
    unlike = (
        ("collective-mismatch", "the rank is still in the loop"),
        ("rank-exited", "the rank ended with an error code, or on purpose before the loop was over"),
    )
    advice = _advice(
        suggestions.EXIT_CALLED,
        suggestions.SAME_BATCHES,
        suggestions.BROKEN_OFF,
        suggestions.UNUSED_PARAMETERS,
        suggestions.LEFT_OUT,
        suggestions.ITERABLE,
        Advice(
            "Give every rank the same number of batches: `DistributedSampler` with `drop_last=True`, or agree on a "
            "number of steps with an `all_reduce` (MIN) before the loop.",
            unless=(suggestions.EXIT_CALLED, suggestions.ITERABLE),
        ),
        Advice(
            "Or wrap the loop in `with model.join():`, so that ranks without further batches still take part in DDP's"
            " collectives; other collectives in the loop still wait for these ranks.",
            when=lambda case: any(purpose in ("gradients", "ddp-forward") for purpose in case.purposes.values()),
        ),
        Advice(
            "Make early-stopping decisions on one rank and broadcast them.",
            unless=(suggestions.EXIT_CALLED, suggestions.BROKEN_OFF),
        ),
    )
    own = True


class GroupOrder(Cause, name="group-order"):
    """Ranks entered their process groups in different orders, so that they wait for each other in a cycle.

    The verdict names all members of the cycle.

    ```text
    Rank 1 waits in group '2' of ranks 0-2 (all_reduce at train.py:60 (train)) while ranks 0,2 wait in group '1' of
    ranks 0-2 (all_reduce at train.py:60 (train)): they entered the groups in different orders.
    ```
    """

    evidence = "The pending call of each rank, and the group of that call, form a cycle of waits."
    unlike = (
        ("collective-mismatch", "one rank made or skipped a call, and the others agree"),
        ("p2p-cycle", "the cycle consists of sends and receives"),
    )
    advice = _advice(
        suggestions.HELD,
        suggestions.HANDLES,
        suggestions.ASIDE,
        suggestions.GUARDED,
        suggestions.LEFT_OUT,
        suggestions.ALONE_IN_GROUPS,
        "Use the groups in the same order on all ranks, or overlap them with `async_op=True` and wait afterwards.",
        Advice(
            "A rank that skips its call in one group, or makes it in the wrong group, also waits in the other like"
            " this: look at the `group=` of that call, and for a branch around it.",
            unless=(suggestions.GUARDED, suggestions.LEFT_OUT, suggestions.ALONE_IN_GROUPS),
        ),
        "Create groups with `new_group()` on every rank, in the same order, including ranks that are not members.",
    )


class P2PCycle(Cause, name="p2p-cycle"):
    """Sends and receives wait for each other in a cycle, and the verdict names all its members.

    ```text
    Rank 0 waits in send to rank 1 at train.py:30 (train) and rank 1 in send to rank 0 at train.py:30 (train): each
    waits for another.
    ```
    """

    evidence = "The pending sends and receives of the ranks form a cycle of waits."
    unlike = (
        ("group-order", "the cycle consists of collectives in several groups"),
        ("collective-mismatch", "a send has no matching receive, because a rank skipped it or named another peer"),
    )
    advice = _advice(
        Advice(
            "Post one side first: even ranks send then receive, odd ranks receive then send; or use "
            "`batch_isend_irecv()` for the exchange.",
            when=lambda case: any(op != "recv" for op in case.transfers),
        ),
        "Compare the sends and receives of each rank per round: their order, number, peers, tags and groups.",
    )


class InitNotJoined(Cause, name="init-not-joined"):
    """Ranks are missing at process-group initialization or at the rendezvous.

    They never arrived, or can't connect to the store: they have a different address than their peers, or no route to
    it. A missing rank is named if its peers are past that point, or are the majority. If all ranks wait at the store,
    another process might use its port. If torchrun gives up its rendezvous because nodes are missing, no rank exists,
    and the bundle's `rendezvous.json` lists the nodes.

    ```text
    Rank 1 never reached init_process_group: it is asleep in late.py:12 (unpack_dataset), while rank 0 waits in
    init_process_group at training.py:27 (Training.__init__).
    ```
    """

    evidence = (
        "The stacks of the peers are in `init_process_group`, and the rank's stack is elsewhere or at a different "
        "store. torchrun's own store lists the nodes that joined."
    )
    unlike = (
        ("rank-exception", "the missing rank has failed before it could join"),
        ("node-unreachable", "the ranks had joined, and the node fell silent later"),
    )
    advice = _advice(
        Advice(
            "Check that the job was started on every node, with the same `--nnodes` and endpoint, and that each node "
            "can reach the endpoint; if nodes join late, make torchrun wait longer: "
            "`--rdzv-conf=join_timeout=SECONDS`.",
            when=lambda case: not case.facts.unseen and case.facts.evidence.rendezvous is not None,
        ),
        suggestions.STORE_NOT_REACHED,
        Advice(
            "Call `init_process_group` on every rank before slow or rank-dependent work (downloads, unpacking, "
            "license checks); follow that work with a barrier.",
            unless=(suggestions.STORE_NOT_REACHED,),
        ),
        Advice(
            "Check `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` of the ranks in `node/<host>/env.json`; "
            "`safelaunch --dry-run ...` shows what they get.",
        ),
    )


class DataLoading(Cause, name="data-loading"):
    """The rank waits for its data pipeline.

    The verdict names the DataLoader worker and the worker's line, even if the worker waits for a lock that it inherited
    through fork.

    ```text
    Rank 1 waits for its DataLoader; worker 11304 is asleep in loader.py:36 (Samples.load_bad_sample), while rank 0
    waits in all_reduce at training.py:54 (Training.train).
    ```
    """

    evidence = (
        "The rank's stack waits for a batch, and the worker that owes the batch has its own stack and process state."
    )
    unlike = (
        ("stuck-in-user-code", "the rank's own code blocks, not its data pipeline"),
        ("uneven-batches", "the rank had no more batches"),
    )
    advice = _advice(
        suggestions.OWN_LOCK,
        suggestions.FORKED_LOCK,
        Advice(
            "Load the sample the worker is stuck on without a DataLoader; give reads and downloads a timeout, and the "
            "DataLoader `timeout=60` so that it raises instead of waiting.",
            unless=(suggestions.FORKED_LOCK,),
        ),
        "To rule the workers out, run with `num_workers=0`.",
    )
    own = True
    of_node = "perhaps"


class BlockingIo(Cause, name="blocking-io"):
    """A read, write, connect or open in your code doesn't return.

    If the kernel shows them, the verdict names the file, pipe or socket, and the process at the other end of a pipe or
    local connection:

    - only the rank itself, or a child that inherited it: the pipe never ends, even if its writer is dead;
    - another rank: if that rank is stuck on its own, it is named. If it waits for the others in a collective, the
      verdict is `medium`;
    - a process outside the job, by name.

    For a store key, the verdict names the key and, if the source shows it, the only rank that sets it;
    that rank is at fault. For a file lock held by another process, it names that process, its command, and how long
    it has held the lock.

    ```text
    Rank 1 is blocked in I/O at blocked.py:24 (read_new_prompts) (openat on /tmp/prompts), while rank 0 waits in
    all_reduce at training.py:54 (Training.train).
    ```
    """

    evidence = (
        "The stack stays at one line. `/proc` shows the system call, the file or socket, and the processes that have "
        "its other end open."
    )
    unlike = (
        ("uninterruptible-io", "the process is in state D, and no signal reaches it"),
        ("lock-deadlock", "the other side waits in turn, so that the wait can never end"),
    )
    advice = _advice(
        *suggestions.PROCESS_CYCLES,
        suggestions.HELD,
        suggestions.DEAD_CHILD,
        suggestions.OWN_END,
        suggestions.INHERITED_END,
        suggestions.OWED,
        suggestions.FOREIGN_LOCK,
        suggestions.OWN_FILE_LOCK,
        suggestions.STORE_KEY,
        "Add a timeout, and do rank-dependent I/O outside the training loop.",
        suggestions.CONNECTION,
    )
    own = True
    of_node = "perhaps"
    worker = 3


class UninterruptibleIo(Cause, name="uninterruptible-io"):
    """The process is in the kernel's D state: it waits for storage, a network file system or a driver.

    The verdict names the wait channel.

    ```text
    Rank 2 is in uninterruptible sleep in rpc_wait_bit_killable at train.py:7 (load), while ranks 0-1,3 wait in
    all_reduce at train.py:50 (train).
    ```
    """

    evidence = "`/proc` shows state D in every sample, and the kernel function in which the process waits."
    unlike = (
        ("blocking-io", "the wait can be interrupted, as at a pipe or a socket"),
        ("rank-stopped", "a signal stopped the process, which SIGCONT resumes"),
    )
    advice = _advice(
        f"The kernel waits for storage, a network file system or a driver: look at {suggestions.KERNEL_LOG} "
        "and the mount that the line reads from. The process can't be killed until that responds.",
        "Put the data or the checkpoint on a local disk and run again.",
    )
    own = True
    of_node = "surely"
    worker = 5


class LockDeadlock(Cause, name="lock-deadlock"):
    """Threads, or a forked child, wait for locks that nothing will release.

    A file lock held by another rank counts too, including one that sqlite or `filelock` polls: a barrier called while
    holding such a lock blocks both sides. `Queue.join()` counts if `task_done()` was not called for an item. If the
    source shows which thread holds the lock, the verdict follows the wait to that thread, with both lines. A
    `Thread.join()` or `Future.result()` is judged by what that thread does.

    ```text
    Rank 1 waits for a lock (`stats_lock`) at locks.py:28 (update_weights); its thread 'stats' has held it since
    locks.py:18 (publish_stats) and waits for a lock (`weights_lock`) at locks.py:20 (publish_stats); its main thread
    has held it since locks.py:26 (update_weights), while rank 0 waits in all_reduce at training.py:54
    (Training.train).
    ```
    """

    evidence = (
        "The stacks show which threads wait for a lock, the source shows which thread holds it, and `/proc/locks` "
        "shows which process holds a file lock."
    )
    unlike = (
        ("blocking-io", "the wait can still end, because the other side is alive"),
        ("gil-held", "no Python code of the rank runs at all"),
    )
    advice = _advice(
        *suggestions.PROCESS_CYCLES,
        suggestions.HELD,
        suggestions.TASK_DONE,
        suggestions.OWN_LOOP,
        suggestions.OWN_LOCK,
        suggestions.FORKED_LOCK,
        suggestions.SIGNAL,
        suggestions.TIMED,
        suggestions.LOCKED_INIT,
        suggestions.LOCK_ORDER,
        Advice(
            "Add a timeout to `lock.acquire()`, `queue.get()`, `event.wait()` and `future.result()`, so that it raises "
            "where it waits.",
            unless=(suggestions.TIMED,),
        ),
    )
    own = True
    of_node = "perhaps"
    worker = 4


class GilHeld(Cause, name="gil-held"):
    """Native code holds Python's global interpreter lock and doesn't return, so no Python thread of that rank runs.

    ```text
    Rank 0 holds the GIL in native code called from train.py:7 (load) (100% of a core), while ranks 1-3 wait in
    all_reduce at train.py:50 (train).
    ```
    """

    evidence = (
        "In the rank, code that needs the GIL doesn't answer, while code without it does. py-spy shows the thread "
        "that owns the GIL."
    )
    unlike = (
        ("busy-loop", "Python code runs, and other threads get their turn"),
        ("lock-deadlock", "the thread waits for a lock of the script, not for the GIL"),
    )
    advice = _advice(
        "Make the native call release the GIL (Py_BEGIN_ALLOW_THREADS, pybind11's gil_scoped_release, ctypes.CDLL "
        "instead of PyDLL), or return.",
        "See the C frames in `stack.txt` (needs `py-spy --native`; check with `safelaunch doctor`).",
    )
    own = True
    of_node = "perhaps"


class BusyLoop(Cause, name="busy-loop"):
    """Your Python code spins without making a step.

    ```text
    Rank 0 spins in train.py:7 (load) (100% of a core), while ranks 1-3 wait in all_reduce at train.py:50 (train).
    ```
    """

    evidence = "The thread uses CPU time between the samples, and its stack stays in your code."
    unlike = (
        ("gil-held", "native code keeps other threads from running"),
        ("slow-not-stuck", "the job makes progress"),
    )
    advice = _advice(
        suggestions.GROUP_TIMEOUT,
        "Bound the loop at this line, and check its exit condition on this rank.",
        "If it is legitimate work (an evaluation, a checkpoint), announce it: `safelaunch.phase('eval')`.",
    )
    own = True
    of_node = "perhaps"
    worker = 1


class StuckInUserCode(Cause, name="stuck-in-user-code"):
    """Your code blocks in some other way: a sleep, a subprocess, `input()`.

    - *A subprocess that waits for its parent*: it writes into a full pipe that the parent would read only after it
      exits, or waits for input that the parent no longer sends. The verdict names the parent's line.
    - *A loop that polls*: the verdict quotes its condition. If a condition keeps one rank out of the loop, that
      rank might be the one to end it: if it has moved on, it is named, with `medium` confidence. A loop around
      `work.is_completed()` is a wait for peers.
    - *A loop that retries* a call that raises each time.

    ```text
    Rank 2 is asleep in train.py:7 (load), while ranks 0-1,3 wait in all_reduce at train.py:50 (train).
    ```
    """

    evidence = "The stack stays at one line of your code, and `/proc` shows the system call in which the thread waits."
    unlike = (
        ("blocking-io", "the kernel shows a file, a pipe or a socket that the rank waits for"),
        ("busy-loop", "the rank uses a core"),
    )
    advice = _advice(
        suggestions.GROUP_TIMEOUT,
        *suggestions.PROCESS_CYCLES,
        suggestions.HELD,
        suggestions.POLLS,
        suggestions.ATTEMPTS,
        suggestions.LOCK_FILE,
        suggestions.BUILD_LOCK,
        suggestions.POOL,
        suggestions.OUTLIVES,
        "Add a timeout, or move the call to where no other rank depends on it.",
        "If the wait is intentional, mark it: `safelaunch.pause()` or `safelaunch.phase(...)`, or a longer "
        "`--stall-timeout`.",
    )
    own = True
    worker = 2


class SwallowedException(Cause, name="swallowed-exception"):
    """A rank raised an exception, caught it, and skipped the collectives that its peers called there.

    It then meets its peers one call early, until it finishes and they don't. Reported on Python 3.12+; on older
    versions only if the rank printed something in the `except` that its peers didn't. A batch skipped without an
    exception (`if not torch.isfinite(loss): print(...); continue`) is a `collective-mismatch` with that line.

    ```text
    Rank 1 raised ValueError at train.py:30 (decode) and continued at train.py:62 (train), skipping the collectives
    that its peers called there...
    ```
    """

    evidence = (
        "Inside the rank, safelaunch records the exceptions that code catches. The records of calls show that the "
        "ranks diverge at that moment."
    )
    unlike = (
        ("collective-mismatch", "no exception explains the skipped calls"),
        ("rank-exception", "the exception ended the rank"),
    )
    advice = _advice(
        "Let the exception end the rank, or let all ranks take the same branch after it: a rank that skips a batch "
        "also skips its collectives.",
    )


class RankStopped(Cause, name="rank-stopped"):
    """A signal stopped the process (state T), or its cgroup is frozen.

    ```text
    Rank 0 is stopped by a signal (state T) at train.py:7 (load), while ranks 1-3 wait in all_reduce at train.py:50
    (train).
    ```
    """

    evidence = "`/proc` shows state T in every sample, or the process is in a frozen cgroup."
    unlike = (
        ("uninterruptible-io", "the process waits for the kernel, and SIGCONT changes nothing"),
        ("launcher-stopped", "torchrun is stopped, and the ranks run"),
    )
    advice = _advice(
        "Something stopped the process: `kill -CONT <pid>` resumes it; look for a debugger, a job suspension by the "
        "scheduler, or a cgroup freezer.",
    )
    of_node = "surely"
    worker = 7


class GpuKernel(Cause, name="gpu-kernel"):
    """The rank waits for its GPU, and its peers are past that point.

    ```text
    Rank 0 waits for its GPU in a synchronize at train.py:33 (train); all_reduce #2 is queued behind it and has not
    started, while ranks 1-3 wait in all_reduce of train.py:30 (train) at train.py:33 (train).
    ```
    """

    evidence = (
        "The rank's stack is in a synchronization, or its record shows a call that its GPU has not started or "
        "finished. No peer is missing from the calls that it has started. If all ranks wait at the same place, two "
        "readings of all GPUs show it: one is idle or computes, while most others spin (100 % busy, no memory traffic)."
    )
    unlike = (
        ("gpu-lost", "the driver has reported an error"),
        ("no-rank-stands-out", "every rank waits in the same call"),
    )
    advice = _advice(
        Advice("To find the kernel", preset="cuda-sync"),
        f"Look for Xid errors in {suggestions.KERNEL_LOG}.",
    )
    own = True
    of_node = "surely"


class GpuLost(Cause, name="gpu-lost"):
    """The GPU driver has reported an error (an Xid) while the rank waits for the GPU or for peers.

    The error concerns the rank's GPU or the rank's work there. The verdict quotes the driver's line.

    ```text
    Rank 2 waits at train.py:33 (train), and the driver has reported Xid 79 of its GPU, while ranks 0-1,3 wait in
    all_reduce of train.py:30 (train) at train.py:33 (train).
    ```
    """

    evidence = (
        "The kernel log has an Xid of the rank's GPU or of its process, and the rank waits for that GPU or for peers. "
        "If all ranks wait at the same place, a GPU that NVML reports as lost, or with new memory errors, counts too."
    )
    unlike = (
        ("gpu-kernel", "the driver has reported no error"),
        ("rank-exception", "a CUDA error ended the rank"),
    )
    advice = _advice(
        "Xid 13, 31 and 43 mostly point to an error in a kernel: `compute-sanitizer` finds it. Others (48, 74, 79, 94, "
        "95, 119, ...) point to hardware or driver: drain the node, reset the GPU, and run `dcgmi diag -r 3`.",
    )
    own = True
    of_node = "surely"


class RankExited(Cause, name="rank-exited"):
    """A rank ended early through `sys.exit()` or `os._exit()`, and its peers fail or wait because of it.

    ```text
    Rank 1 exited with code 4: sys.exit() at train.py:41 (leave).
    ```
    """

    evidence = (
        "torchrun or the log reports the exit code. The times of the failures show which rank ended first; lost "
        "connections of other ranks are consequences."
    )
    unlike = (
        ("rank-exception", "an uncaught exception ended the rank"),
        ("uneven-batches", "the rank ended with code 0 after its last batch"),
    )
    advice = _advice(
        suggestions.LAUNCHER,
        suggestions.OPTIONS_REFUSED,
        suggestions.EXIT_CALLED,
        Advice(
            "Find the `sys.exit()` or `os._exit()` that ended the rank; to stop early, let all ranks agree first.",
            when=lambda case: bool(case.named),
            unless=(suggestions.LAUNCHER, suggestions.OPTIONS_REFUSED, suggestions.EXIT_CALLED, suggestions.LAST_LINES),
        ),
        suggestions.LAST_LINES,
        suggestions.ALL_NODES,
        suggestions.ALL_LOGS,
    )
    failure = True
    worker = 6


class RankKilled(Cause, name="rank-killed"):
    """A signal ended a rank: the out-of-memory killer, the scheduler, a segmentation fault, an abort.

    ```text
    Rank 2 was killed by SIGKILL, while ranks 0-1 wait in all_reduce at train.py:50 (train).
    ```
    """

    evidence = (
        "The exit status is a signal. The kernel log, the cgroup's count of out-of-memory kills and the output of "
        "faulthandler show why."
    )
    unlike = (
        ("rank-exception", "Python ended the rank, with a traceback"),
        ("node-lost", "every process of the node is gone"),
    )
    advice = _advice(
        suggestions.DETAIL_CRASH,
        *suggestions.COMMUNICATION,
        suggestions.OUT_OF_MEMORY,
        suggestions.KILLED_FROM_OUTSIDE,
        suggestions.ABORTED_CALL,
        suggestions.CHECK_EVERY_CALL,
        suggestions.AFTER_THE_END,
        suggestions.FATAL_SIGNAL,
    )
    failure = True


class RankExceptionCause(Cause, name="rank-exception"):
    """A rank raised an uncaught exception, and this was the first failure.

    The errors of the other ranks follow from it, whatever torchrun's summary says. If all ranks raised the same
    exception at the same line, all are named.

    A rank that raised might never exit: its exit handler waits for peers, which wait for it. Then the job hangs, and
    the verdict says where that rank waits.

    ```text
    Rank 2 raised ValueError: x at train.py:41 (step), while ranks 0-1 waited in all_reduce at train.py:50 (train).
    ```
    """

    evidence = (
        "Inside the rank, safelaunch records the exception with its time and line; a log has its traceback. Errors "
        "that only report a lost peer are consequences."
    )
    unlike = (
        ("swallowed-exception", "the script caught the exception and continued"),
        ("rank-killed", "a signal ended the rank, without a traceback"),
    )
    advice = _advice(
        suggestions.GRADIENT_MISSING,
        *suggestions.COMMUNICATION,
        suggestions.OUT_OF_MEMORY,
        suggestions.KILLED_FROM_OUTSIDE,
        Advice(suggestions.BY_FAILURE["nccl-shm"], when=lambda case: case.raised_like(suggestions.SHARED_MEMORY)),
        suggestions.GPU_OF_TWO_RANKS,
        suggestions.GPU_SHARED,
        suggestions.EXPANDABLE_SEGMENTS,
        suggestions.EXPANDABLE_SEGMENTS_BEFORE_2_11,
        suggestions.GPU_FULL,
        suggestions.GPU_UNSHARDED,
        suggestions.MEMORY_LINES,
        Advice(
            "Select the GPU by `LOCAL_RANK`, not by `RANK`, and start no more ranks on a node than it has GPUs.",
            when=lambda case: case.raised_like(re.compile("invalid device ordinal")),
        ),
        Advice(
            "CUDA reports errors late. To have this one raised at the line that causes it",
            when=lambda case: case.raised_like(suggestions.GPU_ASSERT),
            preset="cuda-sync",
        ),
        Advice(
            "Every rank raised this exception: look at the line, or debug it in a single process "
            "(`--nproc-per-node=1`).",
            when=lambda case: case.all_alike,
            unless=(suggestions.GRADIENT_MISSING, suggestions.MEMORY_LINES),
        ),
        suggestions.LAUNCHER,
        Advice(
            "Fix the exception at this line; errors of other ranks follow from it.",
            when=lambda case: not case.all_alike,
            unless=(
                suggestions.STORE_NOT_REACHED,
                suggestions.LAUNCHER,
                suggestions.OUT_OF_MEMORY,
                suggestions.KILLED_FROM_OUTSIDE,
                suggestions.EXIT_WAITS,
            ),
        ),
        suggestions.EXIT_WAITS,
        suggestions.OUTLIVES,
        suggestions.STORE_NOT_REACHED,
    )
    failure = True


class NodeLost(Cause, name="node-lost"):
    """A [node](nodes.md) is gone, and the other nodes' ranks lost their connections to it.

    Its safelaunch fell silent without reporting a failure or a stop. Typical reasons are a power failure, a kernel
    panic, or something that killed every process of the job there.

    ```text
    Node b (ranks 2-3) is gone without reporting a failure, and ranks 0-1 lost their connections to it: ranks 0-1
    waited in communication at train.py:41 (train).
    ```
    """

    evidence = (
        "Every failure is a lost connection to a rank of that node, and the node's safelaunch fell silent without a "
        "report."
    )
    unlike = (
        ("node-unreachable", "the connections to the node are still open"),
        ("rank-killed", "the node's safelaunch is alive and reports the end of a rank"),
    )
    advice = _advice(
        "Check the node: power, a kernel panic (its BMC or serial console), or a scheduler or out-of-memory killer "
        "that killed every process of the job there.",
        "Exclude the node until it is checked: `scontrol update NodeName=NODE State=DRAIN`, `kubectl cordon`.",
    )


class NodeUnreachable(Cause, name="node-unreachable"):
    """A node is silent, but no connection to it has closed: it is down, or cut off from the others.

    Given the bundles of both sides, `safelaunch diagnose` can tell that both are alive. A node whose own interface has
    no link names itself.

    ```text
    Ranks 0-1 wait in all_reduce at train.py:50 (train) for ranks 2-3 on node b, which is silent: it is down, or cut
    off.
    ```
    """

    evidence = "The messages of that node's safelaunch have stopped, and the connections to its ranks are still open."
    unlike = (
        ("node-lost", "the connections to the node have closed"),
        ("launcher-stopped", "the node answers, and only its torchrun or safelaunch doesn't"),
    )
    advice = _advice(
        "From another node: `ping HOST`, and `ip -s link` on both ends; then the switch and its ports.",
        "If the node answers, look for the job's processes there: they might still run and occupy its GPUs.",
        suggestions.OTHER_NODES,
    )


class NodeBehind(Cause, name="node-behind"):
    """All ranks of one node are behind, and no others.

    The node is slow or broken, or the script has a branch for that node. `nodes` names it; `culprits` is empty. Ranks
    that the script itself puts to sleep keep their own cause and lines.

    ```text
    Node b is behind as a whole: ranks 2-3, and no others. Each of ranks 2-3 is in uninterruptible sleep in
    rpc_wait_bit_killable at train.py:7 (train), while ranks 0-1 wait in all_reduce at train.py:50 (train).
    ```
    """

    evidence = "The ranks that hold up their peers are all ranks of that node, and no other rank does."
    unlike = (("node-unreachable", "the node is silent"),)
    advice = _advice(
        "Compare this node with the others: `node/<host>/` has its GPUs, kernel log, disks, memory and load. Then "
        "run again without it.",
        "If the script branches by node or rank (`GROUP_RANK`, host name), look at that branch first.",
    )


class LauncherStopped(Cause, name="launcher-stopped"):
    """A node answers, but its torchrun or safelaunch doesn't: it was stopped, or exited while its ranks still ran.

    A stopped torchrun blocks ranks whenever they use its store, as in `init_process_group`. If the process that hosts
    the agents' store ends, torchrun fails on the other nodes too.

    ```text
    Torchrun on node a failed: its agents' store was on node b (ranks 2-3), where torchrun has ended.
    ```
    """

    evidence = (
        "The node's safelaunch reports that torchrun is stopped or has ended. If safelaunch itself is silent, the "
        "node still answers."
    )
    unlike = (
        ("node-unreachable", "the node doesn't answer at all"),
        ("rank-stopped", "a rank is stopped, and torchrun runs"),
    )
    advice = _advice(
        "On that node: `ps -o pid,stat,cmd -C python`; `kill -CONT PID` resumes a stopped torchrun or safelaunch. "
        "Look for a debugger, a job suspension by the scheduler, or a cgroup freezer.",
        "If it has ended, end its remaining ranks before you restart the job.",
    )


class VersionsDiffer(Cause, name="versions-differ"):
    """All ranks wait, no rank stands out, and the nodes run different versions of torch, safelaunch or the script.

    If the verdict is a different cause, the versions are listed as evidence.

    ```text
    Ranks 0-3 wait in all_reduce at train.py:50 (train), and torch differs between nodes: 2.13.0 on a; 2.9.1 on b.
    ```
    """

    evidence = "Each node's safelaunch reports its versions and a checksum of the script."
    unlike = (("no-rank-stands-out", "all nodes run the same versions"),)
    advice = _advice(
        "Give all nodes the same environment: one image, or one shared directory, and one copy of the script.",
    )


class NoRankStandsOut(Cause, name="no-rank-stands-out"):
    """Every rank is in the same place.

    Suspect the network, a GPU, or something outside the job that all ranks wait for.

    ```text
    Ranks 0-3 wait in all_reduce at train.py:50 (train); every rank has arrived: no rank stands out.
    ```
    """

    evidence = "All ranks wait in the same call or at the same place, and no other check has found a difference."
    unlike = (
        ("missing-from-collective", "a rank has not entered the call"),
        ("gpu-kernel", "one rank's GPU holds up the others"),
    )
    advice = _advice(
        suggestions.LINK_ERRORS,
        suggestions.LATE_JOIN,
        suggestions.ALL_STACKS,
        *suggestions.COMMUNICATION,
        Advice(
            "All ranks have arrived: suspect the transport (NIC, `NCCL_SOCKET_IFNAME`, firewall between nodes) or a"
            " GPU.",
            when=lambda case: case.all_arrived,
        ),
        Advice(
            "A broadcast or reduce whose src or dst differs between ranks also looks like this, and no backend "
            "records it: print it on every rank.",
            when=lambda case: case.all_arrived and not case.all_in_init,
        ),
        Advice(
            "To see what the transport does",
            when=lambda case: case.all_arrived and not case.over_gloo,
            preset="nccl-debug",
        ),
        Advice(
            "To check that all ranks meant the same collective",
            when=lambda case: case.all_arrived,
            preset=suggestions.DESYNC_PRESET,
            torch=suggestions.DESYNC_TORCH,
        ),
        Advice(
            "Find out what ended the other ranks: the ones in this log only lost their connections.",
            when=lambda case: case.lost and not case.facts.evidence.stopped,
        ),
        Advice(
            "Connect the supervisors of all nodes, so that they look at the same moment: under torchrun they are "
            "already connected; under `safelaunch exec`, pass `--cluster-store HOST:PORT`.",
            when=lambda case: bool(case.facts.evidence.stopped),
        ),
        suggestions.BUILD_LOCK,
        suggestions.STORE_KEY,
        Advice(
            "No rank waits for another rank: they wait for something outside the job. Look at each rank's line, and "
            "add a timeout to that call.",
            when=lambda case: case.all_in_own_code and not case.without_stack,
            unless=(suggestions.BUILD_LOCK, suggestions.STORE_KEY),
        ),
        suggestions.NO_STACKS,
        suggestions.OTHER_NODES,
    )


class ReplicasDiverged(Cause, name="replicas-diverged"):
    """Parameters or BatchNorm statistics that should be bitwise equal on several ranks aren't.

    [`--check-every`](results.md) found the difference, and the job continues. The verdict names a rank if it differs
    from a majority, otherwise both sides.

    ```text
    Parameters diverged between steps 6 and 9: rank 2 differs from the others in 2.weight.
    ```
    """

    evidence = "`--check-every` compares checksums between the ranks that should hold the same values."
    unlike = (
        ("loss-diverged", "the losses differ; the replicas might still be equal"),
        ("non-finite-gradient", "a gradient is infinite or NaN"),
    )
    advice = _advice(
        suggestions.ALL_APART,
        suggestions.APART_AT_FIRST,
        suggestions.APART_LATER,
        "Wrap the model after its last change: parameters unfrozen or added after DDP wrapped it get no averaged"
        " gradient. If the gradients are equal, look at learning rates and the optimizer's state.",
        suggestions.ONE_APART,
        "To find the line: call `safelaunch.probes.check_consistent(model)` around the suspects, and run with"
        " `--check-every 1`.",
    )


class NonFiniteGradient(Cause, name="non-finite-gradient"):
    """An optimizer step used infinite or NaN gradients, as [`--check-every`](results.md) found.

    The verdict names the rank whose own gradient was the first that wasn't finite. If safelaunch could check only the
    averaged gradient, it names no rank.

    ```text
    Gradients are not finite on rank 1 since step 7, the first is that of 4.bias (6 of 6): one rank diverged.
    ```
    """

    evidence = "`--check-every` looks at the gradients of every checked step, before they are averaged if it can."
    unlike = (("loss-diverged", "the loss that the script reports is not finite, or too high"),)
    advice = _advice(
        "Look at that rank's batch in that step: print it, and `torch.isfinite(loss)` before `backward()`.",
        "To find the operation, run a few steps from the last good checkpoint with"
        " `torch.autograd.set_detect_anomaly(True)`.",
        "With float16 use a GradScaler, or switch to bfloat16; clip with"
        " `clip_grad_norm_(..., error_if_nonfinite=True)`, which raises before the step.",
    )


class LossDiverged(Cause, name="loss-diverged"):
    """One rank's loss isn't finite, or is far above the others'.

    The script reports its loss with `safelaunch.step(loss=loss)`.

    ```text
    Loss: rank 1 diverged: 8.4 on average since step 41, while the others are at 0.31.
    ```
    """

    evidence = "safelaunch compares the losses that the ranks report."
    unlike = (("replicas-diverged", "the parameters of the ranks differ, bit by bit"),)
    advice = _advice(
        "Look at that rank's data: its shard, its sampler and its augmentation seed.",
        "If the losses should be equal, compare the models: `safelaunch --check-every 100 ...` finds replicas that "
        "have diverged.",
    )


class SlowNotStuck(Cause, name="slow-not-stuck"):
    """The job is making progress.

    Steps or collectives advanced between two looks, or the last ones are only a few usual steps old. Only `safelaunch
    dump` gives this verdict. If the job has been quiet for longer while a rank computes, the verdict is about that
    rank, starts with `No step for 41 s (usual 0.1 s):`, and is never `high`, because a dump can't distinguish slow
    from endless.

    ```text
    The job is making progress (rank 0 at step 60, rank 1 at step 60); nothing is stuck.
    ```
    """

    evidence = "Two looks a few seconds apart show different steps or calls."
    unlike = (
        ("no-rank-stands-out", "nothing moves"),
        ("busy-loop", "one rank computes and the job makes no step"),
    )
    advice = _advice(
        "The job isn't hung. To see where the time goes, look at the merged stacks in `report.md`.",
        "To watch it: `safelaunch status --watch`",
    )


class LateRank(Cause, name="late-rank"):
    """The job is making progress, and the other ranks wait for this rank at each step.

    safelaunch says so while the job runs, and writes a bundle with the outcome `slow`. Nothing is ended. `safelaunch
    record` gives the same verdict. See [Job is slow](slow.md).

    ```text
    Slower since step 4,310 (10:42): 0.48 s -> 0.61 s a step; the other ranks wait for rank 5 21% of the time; it spends
    24% in data.py:88 (augment); the others spend 2%.
    ```
    """

    evidence = (
        "Two witnesses name the same rank: it arrives last at most collectives, before and after ten seconds of "
        "samples, and in the samples it waits less than the others. Its counters show why, if one of them differs "
        "clearly and explains most of the loss."
    )
    unlike = (
        ("slow-not-stuck", "no rank was looked for that slows the job down"),
        ("stuck-in-user-code", "the job makes no step"),
    )
    advice = _advice("Compare this rank's data and device with the others'.")


FAILURES = tuple(name for name, cause in CAUSES.items() if cause.failure)
BY_ITSELF = ("rank-stopped", *FAILURES)  # true of a whole process, whatever its peers do
