"""The catalogue of causes: what sets each apart from the others, and what to do about it.

Advice gives the usual fix first, then the command that gets the evidence that is still missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from safelaunch.settings.presetfile import version_matches

# What sets cases of one cause apart, for the advice that fits each.
Sign = Literal[
    "transfer",
    "send-and-receive",
    "lock",
    "out-of-memory",
    "killed-from-outside",
    "aborted-in-a-collective",
    "after-the-end",
    "fatal-signal",
    "detail-crash",
    "somebody-named",
    "nobody-named",
    "all-arrived",
    "nodes-absent",
    "all-in-own-code",
    "ranks-unseen",
    "race",
    "guarded",
    "left-out",
    "sizes-differ",
    "roots-differ",
    "tags-differ",
    "groups-made",
    "drawn",
    "polls",
    "attempts",
    "waits-in-turn",
    "full-pipe",
    "own-end",
    "inherited-end",
    "dead-child",
    "owed",
    "task-done",
    "lock-file",
    "build-lock",
    "own-lock",
    "held",
    "foreign-lock",
    "handler",
    "own-loop",
    "pool",
    "connection",
    "store-key",
    "store-not-reached",
    "all-in-init",
    "exit-called",
    "group-timeout",
    "outlives",
    "receives",
    "may-send",
    "no-sign",
    "wrong-group",
    "unusual-group",
    "out-of-step",
    "ddp",
    "ddp-forward",
    "fsdp-forward",
    "sync-batchnorm",
    "state-dict",
    "unused-parameters",
    "gpu-memory",
    "gpu-assert",
    "all-alike",
    "not-all-alike",
    "one-rank",
    "launcher",
    "foreign-dumps",
    "no-stacks",
    "lost-connection",
    "seen-apart",
    "gloo",
    "unsure",
    "nccl-cuda",
    "nccl-memory",
    "nccl-shm",
    "nccl-limit",
    "infiniband",
    "interface",
    "one-gpu",
    "mesh",
    "nccl-versions",
    "nccl-sizes",
    "nccl-ending",
    "socket",
    "nccl-system",
    "port",
    "host-name",
    "open-files",
    "peer-late",
    "gpu-fragmented",
    "gpu-shared",
    "gpu-of-two-ranks",
    "gpu-full",
    "apart-at-first",
    "apart-later",
    "one-apart",
    "all-apart",
    "gpu-unsharded",
]


@dataclass(frozen=True)
class Advice:
    """``only_if``: it fits the cases that show this sign; ``unless``: and none of these.

    ``preset``: under which the same run shows more. It is no advice where the run had that preset, nor for versions of
    torch other than ``torch``.
    """

    text: str
    only_if: Sign | None = None
    unless: tuple[Sign, ...] = ()
    preset: str = ""
    torch: str = ""

    @property
    def shown(self) -> str:
        """The text with the command that it is about."""
        return f"{self.text}: `safelaunch --preset {self.preset} ...`" if self.preset else self.text

    def fits(self, signs: Collection[Sign], presets: Collection[str], torch: str) -> bool:
        """``presets``: those of the run; ``torch``: its version, empty where that is not known."""
        if (self.only_if is not None and self.only_if not in signs) or any(one in signs for one in self.unless):
            return False
        return self.preset not in presets and (not self.torch or version_matches(self.torch, torch))


@dataclass(frozen=True)
class Cause:
    """One cause of the catalogue.

    - ``own``: a rank may do it by itself and hold up its peers, without having failed
    - ``failure``: the rank has ended by it
    - ``of_node``: where all ranks of one node alone do it, the node is to blame (``perhaps``: or their script)
    - ``worker``: of several DataLoader workers that owe a batch, the one with the highest is named. Who cannot run
      comes before who is blocked, and that before who computes, which may only be slow.
    """

    advice: tuple[Advice, ...]
    own: bool = False
    failure: bool = False
    of_node: Literal["", "perhaps", "surely"] = ""
    worker: int = 0


def _cause(
    *advice: Advice | str,
    own: bool = False,
    failure: bool = False,
    of_node: Literal["", "perhaps", "surely"] = "",
    worker: int = 0,
) -> Cause:
    texts = tuple(Advice(one) if isinstance(one, str) else one for one in advice)
    return Cause(texts, own, failure, of_node, worker)


_DESYNC = "desync-detail"
_DESYNC_WORKS = "<2.13"  # later, TORCH_DISTRIBUTED_DEBUG=DETAIL crashes in DDP's constructor
_MODELS: tuple[Sign, ...] = ("ddp-forward", "fsdp-forward", "sync-batchnorm", "state-dict")

# Nobody is named: the ranks that were seen are innocent, or may be.
_ALL_NODES = Advice(
    "Put the bundles of all nodes into one folder: `safelaunch diagnose FOLDER` reaches one verdict over all ranks.",
    only_if="nobody-named",
    unless=("launcher",),
)
_NO_STACKS = "No stack could be read: `safelaunch doctor`, where the job runs, shows why."
_OTHER_NODES = Advice(_ALL_NODES.text, only_if="ranks-unseen")

# Processes of one rank that wait for each other, whatever its main thread waits in.
_CIRCLES = (
    Advice(
        "Read what the other process writes before waiting for its end: `communicate()` instead of `wait()`, all of"
        " `queue.get()` before `join()`; or let it write to a file.",
        only_if="full-pipe",
    ),
    Advice(
        "Tell the other process that nothing more will come (a sentinel, the closed end of the pipe) before waiting for"
        " it, or end it with `terminate()`.",
        only_if="waits-in-turn",
    ),
)

_BUILD_LOCK = Advice(
    "Delete that lock file if no process is building the extension: a job that was killed in its build leaves it"
    " behind, and nothing ever removes it. Then build it on one rank, or before the job: the others find it ready.",
    only_if="build-lock",
)

_HOST_MEMORY = Advice(
    "Out of host memory: fewer DataLoader workers, less prefetching, no copy of the dataset in each rank; or a higher"
    " memory limit for the job (`ulimit -a`; `node/<host>/resources.json` shows it).",
    only_if="out-of-memory",
)

_GROUP_TIMEOUT = Advice(
    "The process group's own timeout ended the job. If this line legitimately takes that long, raise the timeout: "
    "`init_process_group(timeout=...)`, or `safelaunch --pg-timeout '2h!' ...` for one run of the unchanged script.",
    only_if="group-timeout",
)

_STORE_KEY = Advice(
    "Find who is to set this key, and under which condition: it has to be set on every path. Give the wait a time"
    " limit: `store.wait([key], timedelta(seconds=60))`.",
    only_if="store-key",
)

_LAUNCHER = Advice(
    "Fix what the launcher complains of: its command line, its configuration, what it needs on this node, or the error"
    " of a process that it started, which is above it in the output.",
    only_if="launcher",
)
_STORE_ADDRESS = Advice(
    "Print `MASTER_ADDR` and `MASTER_PORT` (or the `init_method`) right before this line on every rank: the script may"
    " have changed what torchrun gave it (`node/<host>/env.json`), or kept it from before a restart. Then see whether"
    " that address answers: `nc -vz HOST PORT` on the rank's node.",
    only_if="store-not-reached",
)

_OWN_LOCK = Advice(
    "Release the lock before taking it again, or make it an `RLock`: the thread waits for itself.", only_if="own-lock"
)

_HELD_LOCK = Advice(
    "Don't block while holding a lock: move the call in which its holder waits (`queue.put()`, `join()`, a read, a"
    " collective) out of the `with` block, and take the lock only for the change itself.",
    only_if="held",
)

_ANOTHER_GROUP = Advice(
    "Look at how this line gets its group on the rank that took another one than before.", only_if="unusual-group"
)
_GROW = "Let segments grow, so that what torch holds fits together:"

# Errors of NCCL, of the network under it, and of device meshes.
_COMMUNICATION = (
    Advice(
        "Give each rank a GPU of its own, by `LOCAL_RANK`: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`"
        " before the first tensor and the first collective.",
        only_if="one-gpu",
    ),
    Advice(
        "Leave NCCL some memory of the GPU: a smaller batch, fewer process groups (each has buffers of its own), or a"
        " smaller `NCCL_BUFFSIZE`.",
        only_if="nccl-memory",
    ),
    Advice(
        "Look for an Xid in `node/<host>/kernel_log.txt`, compare the driver with the CUDA version of torch "
        "(`node/<host>/versions.json`), and see with `nvidia-smi topo -m` how the GPUs reach each other. Try "
        "`NCCL_P2P_DISABLE=1` and `NCCL_NVLS_ENABLE=0` to rule out P2P and NVLS.",
        only_if="nccl-cuda",
    ),
    Advice(
        "Make room in `/dev/shm` (`df -h /dev/shm`; in a container `--shm-size=8g` or `--ipc=host`), and remove what"
        " ended jobs have left there.",
        only_if="nccl-shm",
    ),
    Advice(
        "Raise the limit of locked memory where the ranks start: `ulimit -l unlimited` (`--ulimit memlock=-1` for a"
        " container, `LimitMEMLOCK=infinity` for a service).",
        only_if="nccl-limit",
    ),
    Advice(
        "Check the link on both nodes: `ibstat`, and the error counters of the port in `node/<host>/resources.json`; "
        "for RoCE also `NCCL_IB_GID_INDEX`. If the same job runs with `NCCL_IB_DISABLE=1`, the InfiniBand link is the "
        "problem.",
        only_if="infiniband",
    ),
    Advice(
        "Set `NCCL_SOCKET_IFNAME` (and `GLOO_SOCKET_IFNAME`) to an interface that all nodes have: `ip -br addr` lists"
        " them.",
        only_if="interface",
    ),
    Advice(
        "Give all nodes one environment: the versions of torch and NCCL are in `node/<host>/versions.json`.",
        only_if="nccl-versions",
    ),
    Advice(
        "Compare the sizes that the ranks pass into this call, and `NCCL_ALGO`, `NCCL_PROTO` and the version of NCCL on"
        " all nodes (`node/<host>/env.json`, `versions.json`).",
        only_if="nccl-sizes",
    ),
    Advice(
        "Look first whether the peer ended by itself; then whether its node answers on that interface (firewall,"
        " `NCCL_SOCKET_IFNAME`, `ping`).",
        only_if="socket",
    ),
    Advice(
        "Make the product of the mesh's dimensions the world size (`dp * tp * pp == WORLD_SIZE`), and start that many "
        "ranks (`--nproc-per-node` times `--nnodes`).",
        only_if="mesh",
    ),
    Advice(
        "See who has the port (`ss -ltnp`), often a rank of an earlier job. `--standalone`, or port 0 in"
        " `--rdzv-endpoint`, takes a free one; a script should not choose a port of its own.",
        only_if="port",
    ),
    Advice(
        "Let every node resolve the name (`getent hosts NAME`), or give the address: `--rdzv-endpoint ADDRESS:PORT`,"
        " `MASTER_ADDR`.",
        only_if="host-name",
    ),
    Advice(
        "Raise the limit of open files where the ranks start (`ulimit -n 65536`); `node/<host>/resources.json` has the"
        " present one. DataLoader workers that share tensors by file descriptor use many:"
        " `torch.multiprocessing.set_sharing_strategy('file_system')`.",
        only_if="open-files",
    ),
    Advice(
        "If a rank may take that long (a checkpoint, an evaluation on one rank, a first compilation), give the groups"
        " more time: `--pg-timeout 2h`.",
        only_if="peer-late",
    ),
    Advice("To have NCCL say which call failed", only_if="nccl-system", preset="nccl-debug"),
)

CAUSES: dict[str, Cause] = {
    "collective-mismatch": _cause(
        _ANOTHER_GROUP,
        Advice(
            "If two threads call collectives at the same time: give each a group of its own (`new_group()`, on all"
            " ranks in one order), or let one thread make all calls.",
            only_if="race",
        ),
        Advice(
            "The matching send or receive may be missing. On the peer, look for a branch that skips it.",
            only_if="transfer",
            unless=("tags-differ",),
        ),
        Advice("Give the send and its receive the same `tag`.", only_if="tags-differ"),
        Advice(
            "Give the call the same `src` or `dst` on every rank: a global rank, also in a smaller group. Where the"
            " rank is computed, decide it on one rank and broadcast it.",
            only_if="roots-differ",
        ),
        Advice(
            "Evaluate through `model.module`, or let all ranks evaluate: a forward pass through"
            " `DistributedDataParallel` broadcasts the buffers, and that is a collective.",
            only_if="ddp-forward",
        ),
        Advice(
            "Let all ranks make the forward pass, also of an evaluation: a sharded model gathers its parameters from"
            " all of them.",
            only_if="fsdp-forward",
        ),
        Advice(
            "Call `model.eval()` before a forward pass that not all ranks make: `SyncBatchNorm` in training mode is a"
            " collective.",
            only_if="sync-batchnorm",
        ),
        Advice(
            "Make the state dict on all ranks, and write the file on one: a full state dict is gathered from all of"
            " them (`get_model_state_dict()` with `full_state_dict=True, cpu_offload=True` keeps it on rank 0 only).",
            only_if="state-dict",
        ),
        Advice(
            "Gate the side effect, not the collective: let every rank call it, and put only the logging or saving under"
            " `if rank == 0`.",
            only_if="guarded",
            unless=(*_MODELS, "transfer", "roots-differ"),
        ),
        Advice(
            "Look around the call that was left out for a `continue`, an early return, a caught exception or a branch"
            " that only some ranks take: a rank that skips the work still has to make its collectives.",
            only_if="left-out",
        ),
        Advice(
            "If its forward pass did not use some parameters, DDP left out the reduction of their gradients: use all of"
            " them on every rank, or pass `find_unused_parameters=True`.",
            only_if="unused-parameters",
        ),
        Advice(
            "Let all ranks decide alike: `all_reduce` the condition or draw on one rank and broadcast it before the"
            " branch, or give the generator that it draws from the same seed on every rank.",
            only_if="drawn",
        ),
        Advice(
            "Call `new_group()` on every rank, in one order, also for groups that a rank is not in.",
            only_if="groups-made",
        ),
        Advice(
            "Give the call the same size and type on every rank: pad, or exchange the sizes first.",
            only_if="sizes-differ",
            unless=(*_MODELS, "unusual-group"),
        ),
        Advice(
            "Look in the step for what skips the rest of it on one rank, as a `continue`, an early return or an"
            " `except` does: that rank is in its next forward pass, while its peers still wait in the step before.",
            only_if="out-of-step",
        ),
        Advice(
            "Let all ranks make the same calls in one order: compare how each rank gets to the call that it waits in.",
            only_if="no-sign",
            unless=("out-of-step",),
        ),
        Advice(
            "To have c10d compare op, shape and type of every collective before it starts",
            only_if="unsure",
            preset=_DESYNC,
            torch=_DESYNC_WORKS,
        ),
    ),
    "missing-from-collective": _cause(
        Advice(
            "Give each rank the group that it is in: compare how each rank picks its group with the ranks given to"
            " `new_group()`. On other groups torch warns, and makes no call.",
            only_if="wrong-group",
        ),
        _ANOTHER_GROUP,
        Advice(
            "Look for a branch, an early `continue` or a caught exception before this collective, on the rank that did"
            " not come.",
            unless=("wrong-group", "unusual-group"),
        ),
        Advice(
            "To see where that rank is, run the job under `safelaunch`: it takes the stacks of all ranks beside the"
            " Flight Recorder.",
            only_if="foreign-dumps",
        ),
        Advice(_NO_STACKS, only_if="no-stacks"),
        _ALL_NODES,
        own=True,
        of_node="perhaps",
    ),
    "uneven-batches": _cause(
        Advice(
            "Let all ranks agree before one ends: decide on one rank, `broadcast` the decision, and end everywhere or"
            " nowhere.",
            only_if="exit-called",
        ),
        Advice(
            "A rank that skips a batch by what it has computed (`continue`, an early return) is through the loop"
            " sooner, too: let all ranks skip it, or none.",
            only_if="drawn",
        ),
        "Give every rank the same number of batches: `DistributedSampler` with `drop_last=True`, or a number of steps "
        "that an `all_reduce` (MIN) before the loop agrees upon.",
        Advice(
            "Or wrap the loop in `with model.join():`, where ranks that have run out of batches answer DDP's"
            " collectives; other collectives in the loop still wait for them.",
            only_if="ddp",
        ),
        Advice("Take early-stopping decisions on one rank and broadcast them.", unless=("exit-called",)),
        own=True,
    ),
    "group-order": _cause(
        _ANOTHER_GROUP,
        "Let all ranks enter their groups in one order, or overlap them with `async_op=True` and wait afterwards.",
        "A rank that leaves out its call in one group waits in the other like this, too: look for a branch around it.",
        "Create groups with `new_group()` on every rank, in the same order, also on ranks that are not members.",
    ),
    "p2p-cycle": _cause(
        Advice(
            "Post one side first: even ranks send then receive, odd ranks receive then send; or use "
            "`batch_isend_irecv()` for the exchange.",
            only_if="may-send",
        ),
        Advice(
            "Where all of them wait in `recv`: count the sends and receives that each makes in a round, and compare"
            " their order. A send was left out or comes after the receive, or one receive is too many.",
            only_if="receives",
        ),
        Advice(
            "Where one sends and another receives, and both wait: compare peer, tag and group of the two calls.",
            only_if="send-and-receive",
        ),
    ),
    "init-not-joined": _cause(
        Advice(
            "If nodes have not come to the rendezvous: check that the job was started on every node, with the same "
            "`--nnodes` and endpoint, and that each node reaches the endpoint's host and port.",
            only_if="nodes-absent",
        ),
        Advice(
            "If nodes only come late, let torchrun wait longer: `--rdzv-conf=join_timeout=SECONDS`.",
            only_if="nodes-absent",
        ),
        _STORE_ADDRESS,
        Advice(
            "Let every rank reach `init_process_group` before slow or rank-dependent work (downloads, unpacking, "
            "licence checks); do that work after it and end it with a barrier.",
            unless=("store-not-reached",),
        ),
        Advice(
            "Check `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` of the ranks in `node/<host>/env.json`; `safelaunch "
            "--dry-run ...` shows what they are given.",
        ),
    ),
    "data-loading": _cause(
        _OWN_LOCK,
        "Load the sample the worker is stuck on without a DataLoader; give reads and downloads a timeout, and the "
        "DataLoader `timeout=60` so that it raises instead of waiting.",
        Advice(
            "If the worker waits for a lock: start threads after the workers, or use "
            "`multiprocessing_context='spawn'` (or `'forkserver'`).",
            only_if="lock",
        ),
        "To see whether the workers are at fault: the same run with `num_workers=0`.",
        own=True,
        of_node="perhaps",
    ),
    "blocking-io": _cause(
        *_CIRCLES,
        _HELD_LOCK,
        Advice(
            "Find out why the child process that should have sent this exited (its output, "
            "`node/<host>/kernel_log.txt`), and make the wait detect that: `get(timeout=...)` in a loop that checks "
            "`is_alive()`, or a `ProcessPoolExecutor`, which raises.",
            only_if="dead-child",
        ),
        Advice(
            "Close the other end of the pipe here once the child has it: while this process has it open itself, the"
            " pipe never ends.",
            only_if="own-end",
        ),
        Advice(
            "Let only the writer have the write end: no `pass_fds` or `set_inheritable()` for other children, and after"
            " a fork each closes the ends that it does not use. Then the reader sees the end when the writer dies.",
            only_if="inherited-end",
        ),
        Advice(
            "Compare the two ends: what one waits for, the other has to send on every path, before an early `continue`"
            " or `return` as well; give the socket a timeout (`settimeout()`).",
            only_if="owed",
        ),
        Advice(
            "Look at the process that holds the lock (`ps -o pid,lstart,cmd -p PID`): let it end, end it, or give this"
            " job a file or cache of its own; and give the lock a timeout.",
            only_if="foreign-lock",
        ),
        _STORE_KEY,
        Advice("Give the call a timeout.", only_if="one-rank"),
        Advice("Give the call a timeout, and do rank-dependent I/O outside the training loop.", unless=("one-rank",)),
        Advice(
            "`lsof -E -p PID` on the rank's node shows who has the other end of a pipe or socket; `safelaunch"
            " --on-stall dump ...` keeps the job alive for that.",
            only_if="connection",
        ),
        own=True,
        of_node="perhaps",
        worker=3,
    ),
    "uninterruptible-io": _cause(
        "The kernel waits for storage, a network file system or a driver: look at `node/<host>/kernel_log.txt` and "
        "the mount that the line reads from; killing the process will not help until it answers.",
        "Put the data or the checkpoint on a local disk and run again.",
        own=True,
        of_node="surely",
        worker=5,
    ),
    "lock-deadlock": _cause(
        *_CIRCLES,
        _HELD_LOCK,
        Advice(
            "Call `task_done()` for each item that was taken, in a `finally`: an exception or a `continue` before it"
            " leaves `join()` waiting for ever.",
            only_if="task-done",
        ),
        Advice(
            "Only set a flag in a signal handler, and do the work in the training loop; or make the lock an `RLock`.",
            only_if="handler",
        ),
        Advice(
            "`await` the coroutine on the thread of its loop; code that has to block there goes to"
            " `asyncio.to_thread()`.",
            only_if="own-loop",
        ),
        _OWN_LOCK,
        Advice(
            "Acquire locks in the same order everywhere, or use a single lock; never call a collective or join a "
            "thread with a lock held.",
            only_if="lock",
        ),
        "Give `lock.acquire()`, `queue.get()`, `event.wait()` and `future.result()` a timeout, so that it raises "
        "where it waits.",
        own=True,
        of_node="perhaps",
        worker=4,
    ),
    "gil-held": _cause(
        "The native call has to release the GIL (Py_BEGIN_ALLOW_THREADS, pybind11's gil_scoped_release, ctypes.CDLL"
        " instead of PyDLL), or to return.",
        "See the C frames in `stack.txt` (needs `py-spy --native`; check with `safelaunch doctor`).",
        own=True,
        of_node="perhaps",
    ),
    "busy-loop": _cause(
        _GROUP_TIMEOUT,
        "Bound the loop at this line, and check its exit condition on this rank.",
        Advice(
            "If it is honest work (an evaluation, a checkpoint), let the peers know: `safelaunch.phase('eval')` around "
            "it, or a longer `--max-stall`.",
            unless=("one-rank",),
        ),
        own=True,
        of_node="perhaps",
        worker=1,
    ),
    "stuck-in-user-code": _cause(
        _GROUP_TIMEOUT,
        *_CIRCLES,
        _HELD_LOCK,
        Advice(
            "Bound the loop that polls and raise when its time is up; better, let whoever makes what it looks for tell"
            " the others by a broadcast, which also shows who is missing.",
            only_if="polls",
        ),
        Advice(
            "Bound the number of attempts, and raise the last exception when they are used up, so that the job ends"
            " with the reason.",
            only_if="attempts",
        ),
        Advice(
            "If nobody holds the lock: delete the lock file that is left, and use one that ends with its process"
            " (`FileLock`, not `SoftFileLock`).",
            only_if="lock-file",
        ),
        _BUILD_LOCK,
        Advice(
            "A `multiprocessing.Pool` never returns the task of a worker that died: use `ProcessPoolExecutor`, which"
            " raises, or `map_async(...).get(timeout)`. Why it died: `node/<host>/kernel_log.txt`.",
            only_if="pool",
        ),
        Advice(
            "Make the thread a daemon (`daemon=True`), or stop and join it before the script ends.",
            only_if="outlives",
        ),
        Advice("Add a timeout.", only_if="one-rank"),
        Advice("Add a timeout, or move the call to where no other rank depends on it.", unless=("one-rank",)),
        "If the wait is meant, mark it: `safelaunch.pause()` or `safelaunch.phase(...)`, or a longer `--stall-"
        "timeout`.",
        own=True,
        worker=2,
    ),
    "swallowed-exception": _cause(
        "Let the exception end the rank, or let all ranks take the same branch after it: a rank that skips a batch "
        "also skips its collectives.",
    ),
    "rank-stopped": _cause(
        "Somebody or something stopped the process: `kill -CONT <pid>` lets it run on; look for a debugger, a job "
        "suspension by the scheduler, or a cgroup freezer.",
        of_node="surely",
        worker=7,
    ),
    "gpu-kernel": _cause(
        Advice("To find the kernel", preset="cuda-sync"),
        "Look at `node/<host>/kernel_log.txt` for Xid errors.",
        own=True,
        of_node="surely",
    ),
    "rank-exited": _cause(
        Advice(
            "Find the `sys.exit()` or `os._exit()` on this rank; to stop early, let all ranks agree first.",
            only_if="somebody-named",
            unless=("one-rank",),
        ),
        _LAUNCHER,
        Advice("Find the `sys.exit()` or `os._exit()` that ended it.", only_if="one-rank", unless=("launcher",)),
        Advice(
            "Its last words are in the rank's `log_tail.txt`.",
            only_if="somebody-named",
        ),
        _ALL_NODES,
        failure=True,
        worker=6,
    ),
    "rank-killed": _cause(
        Advice(
            "Unset `TORCH_DISTRIBUTED_DEBUG=DETAIL`: torch 2.13 and later crash under it where a DDP model is built."
            " `INFO` works; `--preset hang-debug` shows calls that do not match.",
            only_if="detail-crash",
        ),
        *_COMMUNICATION,
        _HOST_MEMORY,
        Advice(
            "Whoever sent the SIGKILL leaves no trace in the process: look at the scheduler's log, at limits of "
            "time or memory of the job, and at `node/<host>/kernel_log.txt`.",
            only_if="killed-from-outside",
        ),
        Advice(
            "An abort in a collective: a peer may have called it with another size or type, or have left the loop and"
            " ended. Compare what the ranks pass at that line, and how many batches each has.",
            only_if="aborted-in-a-collective",
        ),
        Advice(
            "To have every call checked before it starts",
            only_if="aborted-in-a-collective",
            preset=_DESYNC,
            torch=_DESYNC_WORKS,
        ),
        Advice(
            "The training had ended: torch may abort a rank that ends right after a collective over gloo (PyTorch "
            "issue 190489); a `dist.barrier()` before `dist.destroy_process_group()` avoids it.",
            only_if="after-the-end",
        ),
        Advice(
            "SIGSEGV, SIGABRT or SIGBUS: the rank's `fault.txt` has the stack of every thread at that moment; for "
            "`/dev/shm` that is full, `safelaunch doctor`.",
            only_if="fatal-signal",
        ),
        failure=True,
    ),
    "rank-exception": _cause(
        Advice(
            "Let every parameter take part in the loss, or freeze what is not trained (`requires_grad_(False)` before"
            " wrapping): DDP waits for a gradient of each. `TORCH_DISTRIBUTED_DEBUG=INFO` adds their names to the"
            " message. Only if steps leave some out on purpose, pass `find_unused_parameters=True`, which costs time in"
            " each step.",
            only_if="unused-parameters",
        ),
        *_COMMUNICATION,
        _HOST_MEMORY,
        Advice(
            "Several ranks have memory on one GPU: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before"
            " anything is put on a device, and `map_location='cpu'` in `torch.load()`.",
            only_if="gpu-of-two-ranks",
        ),
        Advice(
            "Another process has memory of that GPU: `safelaunch gpus` shows whose it is; `--gpus N` leases GPUs that"
            " nobody uses.",
            only_if="gpu-shared",
        ),
        Advice(
            f"{_GROW} `PYTORCH_ALLOC_CONF=expandable_segments:True`.",
            only_if="gpu-fragmented",
            torch=">=2.11",
        ),
        Advice(
            f"{_GROW} `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
            only_if="gpu-fragmented",
            torch="<2.11",
        ),
        Advice(
            "The tensors fill the GPU: a smaller batch with gradient accumulation, activation checkpointing, or"
            " parameters and optimizer state that are sharded over the ranks (FSDP, ZeRO).",
            only_if="gpu-full",
            unless=("gpu-unsharded",),
        ),
        Advice(
            "Shard what every rank holds whole: wrap those modules, too (`fully_shard` or `auto_wrap_policy`), the root"
            " module last. `safelaunch.probes.sharding(model)` lists them.",
            only_if="gpu-unsharded",
        ),
        Advice("To see which lines hold the memory", only_if="gpu-memory", preset="oom-debug"),
        Advice(
            "CUDA reports an error later than it happens. To have it raised at its own line",
            only_if="gpu-assert",
            preset="cuda-sync",
        ),
        Advice(
            "Every rank raised it alike, so it is not about one rank: look at the line, or debug it in a single process"
            " (`--nproc-per-node=1`).",
            only_if="all-alike",
            unless=("unused-parameters", "gpu-memory"),
        ),
        _LAUNCHER,
        Advice("Fix the exception at this line.", only_if="one-rank", unless=("launcher",)),
        Advice(
            "Fix the exception on this rank; the errors of the other ranks follow from it.",
            only_if="not-all-alike",
            unless=("store-not-reached",),
        ),
        Advice(
            "If it comes from one sample or one rank only, run that rank's input alone.",
            only_if="not-all-alike",
            unless=("store-not-reached",),
        ),
        _STORE_ADDRESS,
        failure=True,
    ),
    "node-lost": _cause(
        "Look at the node itself: power, kernel panic (its BMC or serial console), or a scheduler or out-of-memory "
        "killer that took every process of the job there.",
        "Leave the node out until it is checked: `scontrol update NodeName=NODE State=DRAIN`, `kubectl cordon`.",
    ),
    "node-unreachable": _cause(
        "From another node: `ping HOST`, and `ip -s link` on both ends; then the switch and its ports.",
        "If the node answers, look there for the job's processes: they may still run, and hold its GPUs.",
        _OTHER_NODES,
    ),
    "node-behind": _cause(
        "Compare this node with the others: `node/<host>/` has its GPUs, kernel log, disks, memory and load; then "
        "leave it out and run again.",
        "If the script branches by node or rank (`GROUP_RANK`, host name), look at that branch first.",
    ),
    "launcher-stopped": _cause(
        "On that node: `ps -o pid,stat,cmd -C python`; `kill -CONT PID` lets a stopped torchrun or safelaunch run "
        "on. Look for a debugger, a job suspension by the scheduler, or a cgroup freezer.",
        "If it has ended, end the ranks that it left there before you start the job again.",
    ),
    "versions-differ": _cause(
        "Give all nodes the same environment: one image, or one shared directory, and one copy of the script.",
    ),
    "no-rank-stands-out": _cause(
        *_COMMUNICATION,
        Advice(
            "All ranks have arrived: suspect the transport (NIC, `NCCL_SOCKET_IFNAME`, firewall between nodes) or a"
            " GPU.",
            only_if="all-arrived",
        ),
        Advice(
            "A broadcast or reduce whose src or dst differs between ranks looks like this, too, and no backend "
            "records it: print it on every rank.",
            only_if="all-arrived",
            unless=("all-in-init",),
        ),
        Advice("To see what the transport does", only_if="all-arrived", unless=("gloo",), preset="nccl-debug"),
        Advice(
            "To check that all ranks meant the same collective",
            only_if="all-arrived",
            preset=_DESYNC,
            torch=_DESYNC_WORKS,
        ),
        Advice(
            "Look at what ended the other ranks: these lost their connections, and did not hang by themselves.",
            only_if="lost-connection",
        ),
        Advice(
            "Let the supervisors of all nodes meet, so that they look at the same moment: under torchrun they do by"
            " themselves, under `safelaunch exec` give them `--cluster-store HOST:PORT`.",
            only_if="seen-apart",
        ),
        _BUILD_LOCK,
        _STORE_KEY,
        Advice(
            "No rank waits for another one: what they wait for is outside the job. Look at the line that each rank is "
            "at, and give such a call a timeout.",
            only_if="all-in-own-code",
            unless=("no-stacks", "foreign-dumps", "build-lock", "store-key"),
        ),
        Advice(_NO_STACKS, only_if="no-stacks"),
        _OTHER_NODES,
    ),
    "replicas-diverged": _cause(
        Advice(
            "Every rank differs from every other, so nothing averages the gradients: look for a `no_sync()` around"
            " every backward pass (an accumulation that never ends), or a forward pass through `model.module`.",
            only_if="all-apart",
        ),
        Advice(
            "Look at what sets the parameters before the first step: a checkpoint (model or optimizer) that only some"
            " ranks load, or initialisation under a seed of each rank's own.",
            only_if="apart-at-first",
        ),
        Advice(
            "Look for what only some ranks do between these steps: a backward pass under `no_sync()` that should"
            " synchronise, an assignment to parameters or buffers under a condition on the rank.",
            only_if="apart-later",
        ),
        "Parameters that DDP did not know when it wrapped the model (unfrozen or added later) get no averaged gradient:"
        " wrap it after the last change.",
        Advice(
            "If nothing in the script is that rank's own, suspect its device: run the same job with that GPU or node"
            " left out.",
            only_if="one-apart",
        ),
        "To find the line: call `safelaunch.probes.check_consistent(model)` around the suspects, and run with"
        " `--check-every 1`.",
    ),
    "non-finite-gradient": _cause(
        "Look at that rank's batch of that step: print it, and `torch.isfinite(loss)` before `backward()`.",
        "For the operation: `torch.autograd.set_detect_anomaly(True)` for a few steps from the last good checkpoint.",
        "Under float16 use a GradScaler, or bfloat16; clip with `clip_grad_norm_(..., error_if_nonfinite=True)`, so"
        " that the step is not made.",
    ),
    "loss-diverged": _cause(
        "Look at that rank's data: its shard, its sampler and its augmentation seed.",
        "If the losses should be alike, compare the models: `safelaunch --check-every 100 ...` finds replicas that"
        " have departed.",
    ),
    "slow-not-stuck": _cause(
        "The job isn't hung. To see where the time goes, look at the merged stacks in `report.md`.",
        "To watch it: `safelaunch status --watch`",
    ),
}

FAILURES = tuple(name for name, cause in CAUSES.items() if cause.failure)
BY_ITSELF = ("rank-stopped", *FAILURES)  # true of a whole process, whatever its peers do


def advice_for(
    cause: str, signs: Collection[Sign] = (), presets: Collection[str] = (), torch: str = ""
) -> Iterator[Advice]:
    """The advice for ``cause`` that fits a case with these signs, of a run with these presets and this torch."""
    return (one for one in CAUSES[cause].advice if one.fits(signs, presets, torch))
