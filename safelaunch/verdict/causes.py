"""The catalogue of causes: what to do about each, and about the sub-cases of each.

Advice gives the usual fix first, then the command that gets the evidence that is still missing. Whoever finds a
sub-case (a rule, a rank's condition) attaches its advice; the rest fits by what is true of the whole case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from safelaunch.settings.presets import version_matches
from safelaunch.verdict.doubts import confidence_of

if TYPE_CHECKING:
    from safelaunch.stacks.failures import FailureKind
    from safelaunch.verdict.advice import Scene


@dataclass(frozen=True, eq=False)
class Advice:
    """What to do about a cause, or about a sub-case of it.

    ``when``: it fits a case of which this is true, or to whose finding it is attached; ``unless``: none of these does.
    ``preset``: under which the same run shows more. It is no advice where the run had that preset, nor for versions of
    torch other than ``torch``.
    """

    text: str
    when: Callable[[Scene], bool] = lambda case: True
    unless: tuple[Advice, ...] = ()
    preset: str = ""
    torch: str = ""

    @property
    def shown(self) -> str:
        """The text with the command that it is about."""
        return f"{self.text}: `safelaunch --preset {self.preset} ...`" if self.preset else self.text

    def fits(self, case: Scene) -> bool:
        if not (self in case.attached or self.when(case)) or any(one.fits(case) for one in self.unless):
            return False
        run = case.launched
        return self.preset not in run.presets and (not self.torch or version_matches(self.torch, run.torch))


# Advice that fits where it is attached to a finding, or to the condition of a rank at fault.
_sub_case = partial(Advice, when=lambda case: False)

CAUSES: dict[str, type[Cause]] = {}


class Cause:
    """One cause of the catalogue, by its name. The docstring says what it means, and ends with an example;
    ``safelaunch explain`` and the documentation show both.

    - ``evidence``: how safelaunch knows
    - ``unlike``: causes that look similar, each with the difference
    - ``advice``: of its sub-cases, and what fits all of them
    - ``own``: a rank may do it by itself and hold up its peers, without having failed
    - ``failure``: the rank has ended by it
    - ``of_node``: where all ranks of one node alone do it, the node is to blame (``perhaps``: or their script)
    - ``worker``: of several DataLoader workers that owe a batch, the one with the highest is named. Who cannot run
      comes before who is blocked, and that before who computes, which may only be slow.
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
        """Returns every piece of advice once, with the versions of torch that it is for."""
        given = (f"{one.shown} (torch {one.torch})" if one.torch else one.shown for one in cls.advice)
        return list(dict.fromkeys(given))


def _advice(*advice: Advice | str) -> tuple[Advice, ...]:
    return tuple(Advice(one) if isinstance(one, str) else one for one in advice)


def _failed_by(kind: FailureKind) -> Callable[[Scene], bool]:
    """An error of a rank at fault, or of any where none is named, means this."""
    return lambda case: kind in case.failures


_UNUSED = re.compile("expected to have finished reduction in the prior iteration", re.IGNORECASE)
_GPU_MEMORY = re.compile("(?:cuda|hip) out of memory", re.IGNORECASE)
_HOST_MEMORY = re.compile(
    r"\AMemoryError\b|DefaultCPUAllocator: (?:can't allocate|not enough) memory|cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
_SHARED_MEMORY = re.compile("dataloader's workers are out of shared memory")
_GPU_ASSERT = re.compile("device-side assert(?!ions)|illegal memory access|cudaErrorAssert", re.IGNORECASE)

_DESYNC = "desync-detail"
_DESYNC_WORKS = "<2.13"  # later, TORCH_DISTRIBUTED_DEBUG=DETAIL crashes in DDP's constructor

LAUNCHER = _sub_case("Fix what the launcher reports, or the error above it in the output of a process that it started.")

# For saved stacks: those of other processes may be missing.
_ALL_STACKS = Advice(
    "Take the stacks of all processes at once: `safelaunch dump --all` on each node (or `py-spy dump --pid PID` for "
    "every process), and give all of them to `safelaunch diagnose`.",
    when=lambda case: case.of_some_stacks,
)
# Nobody is named: the ranks that were seen are innocent, or may be.
_ALL_NODES = Advice(
    "Put the bundles of all nodes into one folder: `safelaunch diagnose FOLDER` reaches one verdict over all ranks.",
    when=lambda case: not case.named and case.facts.evidence.printed is None,
    unless=(LAUNCHER, _ALL_STACKS),
)
# Of what a job has printed, the same and more.
_ALL_LOGS = Advice(
    "Give the logs of all ranks at once (`safelaunch diagnose LOG ...`), and run the job under `safelaunch`: it looks "
    "at every rank while it is alive.",
    when=lambda case: case.facts.evidence.printed is not None and not case.surely_named,
)
_NO_STACKS = Advice(
    "No stack could be read: `safelaunch doctor`, where the job runs, shows why.",
    when=lambda case: case.without_stack and case.facts.evidence.launched is not None,
)
_OTHER_NODES = Advice(
    _ALL_NODES.text, when=lambda case: bool(case.facts.unseen) and case.facts.evidence.printed is None
)

BUILD_LOCK = _sub_case(
    "Delete that lock file if no process is building the extension: a job that was killed in its build leaves it"
    " behind, and nothing ever removes it. Then build it on one rank, or before the job: the others find it ready."
)

OUT_OF_MEMORY = _sub_case(
    "Out of host memory, which includes `/dev/shm`: fewer DataLoader workers, less prefetching, no copy of the dataset"
    " in each rank; or a higher memory limit for the job (`ulimit -a`; `node/<host>/resources.json` shows it).",
    when=lambda case: case.raised_like(_HOST_MEMORY),
)

_GROUP_TIMEOUT = Advice(
    "The process group's own timeout ended the job. If this line legitimately takes that long, raise the timeout: "
    "`init_process_group(timeout=...)`, or `safelaunch --pg-timeout '2h!' ...` for one run of the unchanged script.",
    when=lambda case: case.timed_out,
)

# What the agents of one round leave for each other in the rendezvous' store. With that store shared with the ranks, an
# agent that has been in an earlier round does not leave it again (torch's DynamicRendezvousHandler.next_rendezvous).
_OF_A_ROUND = re.compile(r"wait timeout .*/torch\.rendezvous\.\S*/(?:MASTER_(?:ADDR|PORT)|torchelastic/role_info/)")
LATE_JOIN = Advice(
    "If a node joined late or returned: torchrun itself fails then, with or without safelaunch. Set"
    " `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` on all nodes.",
    when=lambda case: any(is_late_join(note) for note in case.facts.evidence.notes),
)


def is_late_join(error: str) -> bool:
    """Whether torchrun failed as it does where a node joins a job whose rendezvous shares its store."""
    return _OF_A_ROUND.search(error) is not None


STORE_KEY = _sub_case(
    "Find which rank should set this key, under which condition: every path must. With a timeout, `wait()` raises."
)

STORE_NOT_REACHED = _sub_case(
    "Print `MASTER_ADDR` and `MASTER_PORT` (or the `init_method`) right before this line on every rank: the script may"
    " have changed what torchrun gave it (`node/<host>/env.json`), or kept it from before a restart. Then see whether"
    " that address answers: `nc -vz HOST PORT` on the rank's node."
)

OWN_LOCK = _sub_case("Release the lock before taking it again, or make it an `RLock`: the thread waits for itself.")

HELD = _sub_case(
    "Don't block with a lock held: move the call in which its holder waits out of the `with` block.",
    when=lambda case: case.holds_a_lock,
)

_KERNEL_LOG = "the kernel log (`dmesg`; a bundle's `kernel_log.txt`)"
_GROW = "Let segments grow, to reduce fragmentation:"

FULL_PIPE = _sub_case(
    "Read what the other process writes before waiting for its exit: `communicate()`, `queue.get()` before `join()`."
)
WAITS_IN_TURN = _sub_case(
    "Signal the end of the input to the other process (a sentinel, closing the pipe), or `terminate()` it."
)
RACE = _sub_case(
    "Give each thread its own group (`new_group()`, in one order on all ranks), or let one thread make all calls."
)
TAGS_DIFFER = _sub_case("Give the send and its receive the same `tag`.")
PEERS_DIFFER = _sub_case(
    "Check how this rank chooses its peers: the other ranks in the exchange expect different ones."
)
ROOTS_DIFFER = _sub_case(
    "Pass the same `src` or `dst` on every rank (a global rank); if computed, broadcast it from one rank."
)
DDP_FORWARD = _sub_case(
    "A forward pass through `DistributedDataParallel` broadcasts the buffers, which is a collective: evaluate through "
    "`model.module` or on all ranks. If the rank is in its next step, look for what skipped the rest of the last one.",
    when=lambda case: case.alone_in("ddp-forward"),
)
FSDP_FORWARD = _sub_case(
    "Run the forward pass on all ranks, including for evaluation: a sharded model gathers its parameters from all "
    "of them.",
    when=lambda case: case.alone_in("fsdp-forward"),
)
SYNC_BATCHNORM = _sub_case(
    "Call `model.eval()` before a forward pass that not all ranks make: `SyncBatchNorm` in training mode is a"
    " collective.",
    when=lambda case: case.alone_in("sync-batchnorm"),
)
STATE_DICT = _sub_case(
    "Create the state dict, or call `full_tensor()`, on all ranks, and write the file on one: they gather from all "
    "(`get_model_state_dict()` with `full_state_dict=True, cpu_offload=True` keeps it on rank 0 only).",
    when=lambda case: case.alone_in("state-dict"),
)
_MODELS = (DDP_FORWARD, FSDP_FORWARD, SYNC_BATCHNORM, STATE_DICT)
_TRANSFER = Advice(
    "The matching send or receive may be missing. On the peer, look for a branch that skips it.",
    when=lambda case: bool(case.transfers),
    unless=(TAGS_DIFFER, PEERS_DIFFER),
)
GUARDED = _sub_case(
    "Every rank must make this call: gate the side effect (a print, writing a file) with `if rank == 0`, not the"
    " collective.",
    unless=(*_MODELS, _TRANSFER, ROOTS_DIFFER),
)
LEFT_OUT = _sub_case(
    "Look around the skipped call for a `continue`, an early return, a caught exception or a branch that only some "
    "ranks take: a rank that skips the work must still call its collectives."
)
HANDLES = _sub_case(
    "Fix that exception first. Ranks that failed call the collective in the `except` or `finally`, while the others "
    "call those of the loop: let the exception end the rank, or have all ranks agree on it first."
)
ASIDE = _sub_case(
    "Don't call collectives there: ranks get there at different times, or alone. Set a flag, and let all ranks agree "
    "on it between two steps (`all_reduce` with MAX)."
)
UNUSED_PARAMETERS = _sub_case(
    "If its forward pass did not use some parameters, DDP skipped the reduction of their gradients: use all of them "
    "on every rank, or pass `find_unused_parameters=True`.",
    when=lambda case: case.raised_like(_UNUSED),
)
_DRAWN = _sub_case(
    "Make the same decision on all ranks: `all_reduce` the condition, broadcast one rank's random number, or use one "
    "seed."
)
GROUPS_MADE = _sub_case(
    "Call `new_group()` on every rank, in the same order, including for groups that a rank is not in."
)
SIZES_DIFFER = _sub_case(
    "Pass the same size and type on every rank: pad, or exchange the sizes first.",
    unless=_MODELS,
)
TRIED_AGAIN = _sub_case(
    "Keep collectives out of what is retried: a rank that fails alone makes them once more. Let its exception end it."
)
OTHER_ITEMS = _sub_case(
    "Go through the same items in one order on all ranks: skip none on one of them, and use `sorted()` for a set, or a "
    "dict filled in another order.",
    unless=(*_MODELS, TRIED_AGAIN),
)
UNUSUAL_GROUP = _sub_case("Check how this line selects its group on the rank that used a different one than before.")
WRONG_GROUP = _sub_case(
    "Use only groups that the rank is in: compare how it picks its group with the ranks passed to `new_group()`."
)
ALONE_IN_GROUPS = _sub_case(
    "One of these ranks may use the wrong group, or skip a call: each is alone in its own. Compare the `group=` of"
    " their calls, and look for a branch around them.",
    unless=(GUARDED, LEFT_OUT),
)
EXIT_CALLED = _sub_case(
    "Agree before one exits: decide on one rank, `broadcast` the decision, and exit on all ranks or on none."
)
OPTIONS_REFUSED = _sub_case(
    "The script did not accept its options: argparse and click exit with code 2. Its output says which option."
    " `torch.distributed.launch` adds `--local-rank`, torchrun nothing: read `LOCAL_RANK` from the environment.",
)
BROKEN_OFF = _sub_case(
    "If that `if` is why: decide on one rank and broadcast it, or `all_reduce` the condition, so that all stop "
    "together."
)
_DRAWN_BATCHES = _sub_case(
    "A rank that skips a batch by what it computed ends its loop sooner: skip it on all ranks, or on none."
)
FORKED_LOCK = _sub_case(
    "A forked process inherits the locks that threads held at that moment, but no thread to release them: fork before "
    "threads start, or use the start method `spawn` (of a DataLoader: `multiprocessing_context='spawn'`). Take locks "
    "with `with`, so that every exit path releases them."
)
DEAD_CHILD = _sub_case(
    "Find out why that child process exited (its output, `kernel_log.txt`), and make the wait notice: `is_alive()`."
)
OWN_END = _sub_case(
    "Close the other end of the pipe here once the child has it, or the reader never sees the end of the pipe."
)
INHERITED_END = _sub_case(
    "Keep the write end only in the writer (no `pass_fds`, close it after a fork): a reader then sees its end."
)
OWED = _sub_case(
    "Compare the two ends: the peer must send this on every path, also before a `continue`. Use `settimeout()`."
)
FOREIGN_LOCK = _sub_case(
    "Look at the process that holds the lock (`ps -o pid,lstart,cmd -p PID`): wait for it, end it, or use another file."
)
OWN_FILE_LOCK = _sub_case(
    "Release the lock on every exit path (`with`, `finally`): `flock` of a second open file waits for that of the "
    "first."
)
CONNECTION = _sub_case(
    "`lsof -E -p PID` there shows which process holds the other end; `safelaunch --on-stall dump ...` keeps the job "
    "alive for that."
)
TASK_DONE = _sub_case(
    "Call `task_done()` for each item in a `finally`: an exception before it leaves `join()` waiting forever."
)
OWN_LOOP = _sub_case("`await` the coroutine on the thread of its loop; move blocking code to `asyncio.to_thread()`.")
LOCKED_INIT = _sub_case(
    "Release the lock before `init_process_group`, or take it afterwards: that call returns only when all ranks are "
    "there, and those that wait for the lock cannot come.",
)
_LOCK_ORDER = _sub_case(
    "Acquire locks in one order everywhere; never call a collective or join a thread with a lock held.",
    unless=(FORKED_LOCK, LOCKED_INIT),
)
SIGNAL = _sub_case(
    "Look for the thread at the other end of this queue, or that should set this event, and why it ended: it must do "
    "its part on every path."
)
TIMED = _sub_case(
    "This wait has a time limit: if it is intentional, mark it (`safelaunch.pause()`), else make the limit shorter."
)
POLLS = _sub_case("Limit the polling loop, or have the rank that creates what it polls for broadcast that.")
ATTEMPTS = _sub_case("Bound the number of attempts, and raise the last exception when they are used up.")
LOCK_FILE = _sub_case(
    "If no process holds the lock, delete its file, and use one that ends with its process (`FileLock`)."
)
POOL = _sub_case(
    "A `Pool` never returns the task of a worker that died (`kernel_log.txt`): use `ProcessPoolExecutor`, which raises."
)
OUTLIVES = _sub_case("Make the thread a daemon (`daemon=True`), or stop and join it before the script ends.")
EXIT_WAITS = _sub_case(
    "Fix that exception first. Then let a rank that fails exit without waiting for its peers: in an exit handler, call "
    "no collective and no `destroy_process_group()`, or only after a normal end."
)
DETAIL_CRASH = _sub_case(
    "Unset `TORCH_DISTRIBUTED_DEBUG=DETAIL` (`INFO` works): torch 2.13+ crashes with it when a DDP model is created."
)
KILLED_FROM_OUTSIDE = _sub_case(
    f"SIGKILL leaves no trace of its sender: check {_KERNEL_LOG}, and the log "
    "and memory limit of the scheduler or container (kills by systemd-oomd or earlyoom aren't counted). Fewer "
    "DataLoader workers need less memory."
)
_ABORTED = _sub_case(
    "An abort in a collective: compare what the ranks pass at that line, and how many batches each has."
)
_CHECK_EVERY_CALL = _sub_case("To have every call checked before it starts", preset=_DESYNC, torch=_DESYNC_WORKS)
AFTER_THE_END = _sub_case(
    "The training had ended: a `dist.barrier()` before `destroy_process_group()` avoids it (PyTorch issue 190489)."
)
FATAL_SIGNAL = _sub_case(
    "What faulthandler printed (`fault.txt` in a bundle) has the stack of every thread; `safelaunch doctor` shows "
    "whether `/dev/shm` is full."
)
_GRADIENT_MISSING = _sub_case(
    "Make every parameter contribute to the loss, or freeze what is not trained (`requires_grad_(False)` before "
    "wrapping): DDP waits for a gradient of each. `TORCH_DISTRIBUTED_DEBUG=INFO` adds their names to the message. "
    "Only if some steps skip parameters on purpose, pass `find_unused_parameters=True`, which costs time in each "
    "step.",
    when=lambda case: case.raised_like(_UNUSED),
)
GPU_OF_TWO_RANKS = _sub_case(
    "Several ranks use one GPU: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` first, and `map_location='cpu'`."
)
GPU_SHARED = _sub_case(
    "Another process uses memory on that GPU: `safelaunch gpus` shows whose it is; `--gpus N` leases unused GPUs."
)
_GPU_FRAGMENTED = _sub_case(f"{_GROW} `PYTORCH_ALLOC_CONF=expandable_segments:True`.", torch=">=2.11")
_GPU_FRAGMENTED_BEFORE = _sub_case(f"{_GROW} `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.", torch="<2.11")
GPU_UNSHARDED = _sub_case(
    "Shard what every rank holds whole: wrap those modules as well (`fully_shard` or `auto_wrap_policy`), the root "
    "module last. `safelaunch.probes.sharding(model)` lists them."
)
GPU_FULL = _sub_case(
    "The tensors fill the GPU: a smaller batch with gradient accumulation, activation checkpointing, or"
    " parameters and optimizer state that are sharded over the ranks (FSDP, ZeRO).",
    unless=(GPU_UNSHARDED,),
)
ALL_APART = _sub_case(
    "Nothing averages the gradients: look for a `no_sync()` around every backward pass, or a use of `model.module`."
)
APART_AT_FIRST = _sub_case(
    "Look at what sets the parameters first: a checkpoint that only some ranks load, a seed that differs."
)
APART_LATER = _sub_case(
    "Look for what only some ranks do in between: `no_sync()`, an assignment under a condition on the rank."
)
ONE_APART = _sub_case(
    "If nothing in the script is specific to that rank, suspect its device: exclude that GPU or node and run again."
)

_GPU_MEMORY_LINES = Advice(
    "To see which lines hold the memory", when=lambda case: case.raised_like(_GPU_MEMORY), preset="oom-debug"
)
# Processes of one rank that wait for each other, whatever its main thread waits in.
_CIRCLES = (FULL_PIPE, WAITS_IN_TURN)

LOCK = frozenset({_LOCK_ORDER})
ABORTED = frozenset({_ABORTED, _CHECK_EVERY_CALL})
DRAWN = frozenset({_DRAWN, _DRAWN_BATCHES})
GPU_FRAGMENTED = frozenset({_GPU_FRAGMENTED, _GPU_FRAGMENTED_BEFORE})

# Errors of NCCL, of the network under it, and of device meshes.
_BY_FAILURE: dict[FailureKind, str] = {
    "one-gpu": "Give each rank its own GPU first: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`.",
    "nccl-memory": "Leave some GPU memory for NCCL: a smaller batch, fewer process groups, or a smaller "
    "`NCCL_BUFFSIZE`.",
    "nccl-cuda": f"Look for an Xid in {_KERNEL_LOG}, and compare the driver "
    "with torch's CUDA (`versions.json`). Try `NCCL_P2P_DISABLE=1` and `NCCL_NVLS_ENABLE=0` to rule out P2P and NVLS.",
    "nccl-shm": "Make room in `/dev/shm` (`df -h /dev/shm`; in a container `--shm-size=8g` or `--ipc=host`).",
    "nccl-limit": "Raise the limit of locked memory where the ranks start: `ulimit -l unlimited`.",
    "infiniband": "Check the link on both nodes: `ibstat`, its counters (`node/<host>/resources.json`), for RoCE "
    "`NCCL_IB_GID_INDEX`. If the job runs with `NCCL_IB_DISABLE=1`, the link is the problem.",
    "interface": "Set `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` to an interface that all nodes have: "
    "`ip -br addr`.",
    "nccl-versions": "Give all nodes one environment: `node/<host>/versions.json` has the versions of torch and NCCL.",
    "nccl-sizes": "Compare the sizes that the ranks pass, and `NCCL_ALGO`, `NCCL_PROTO` and NCCL's version, on all "
    "ranks.",
    "socket": "First check whether the peer exited on its own, then whether its node answers on that interface "
    "(firewall, `NCCL_SOCKET_IFNAME`, `ping`).",
    "mesh": "Make the product of the mesh's dimensions the world size (`dp * tp * pp == WORLD_SIZE`).",
    "port": "Find the process that uses the port (`ss -ltnp`), often a rank of an earlier job. `--standalone`, or port "
    "0 in `--rdzv-endpoint`, takes a free one.",
    "host-name": "Make every node resolve the name (`getent hosts NAME`), or give its address in `--rdzv-endpoint`.",
    "open-files": "Raise the limit of open files where the ranks start (`ulimit -n 65536`). DataLoader workers use "
    "many: `torch.multiprocessing.set_sharing_strategy('file_system')`.",
    "peer-late": "If a rank can legitimately take that long (a checkpoint, an evaluation, a first compilation), give "
    "the groups more time: `--pg-timeout 2h`.",
}
_COMMUNICATION = (
    *(Advice(text, when=_failed_by(kind)) for kind, text in _BY_FAILURE.items()),
    Advice("To have NCCL say which call failed", when=_failed_by("nccl-system"), preset="nccl-debug"),
)


class CollectiveMismatch(Cause, name="collective-mismatch"):
    """In one process group, at the same sequence number, ranks called different operations, or the same operation with
    different shapes or types. The minority is at fault. A rank that made an extra call, or left one out, long ago
    is named with the line where the histories diverge. A majority counts only if its members call from one place
    and continue with the same calls. If the ranks diverge in three or more ways, none is named, and the verdict shows
    where they diverge.

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
        UNUSUAL_GROUP,
        RACE,
        _TRANSFER,
        TAGS_DIFFER,
        PEERS_DIFFER,
        ROOTS_DIFFER,
        DDP_FORWARD,
        FSDP_FORWARD,
        SYNC_BATCHNORM,
        STATE_DICT,
        HELD,
        HANDLES,
        ASIDE,
        GUARDED,
        LEFT_OUT,
        UNUSED_PARAMETERS,
        _DRAWN,
        GROUPS_MADE,
        SIZES_DIFFER,
        TRIED_AGAIN,
        OTHER_ITEMS,
        Advice(
            "Make all ranks call the same collectives in the same order: compare how each rank reaches the call "
            "that it waits in.",
            when=lambda case: not case.finding.advice,
        ),
        Advice(
            "To have c10d compare op, shape and type of every collective before it starts",
            when=lambda case: confidence_of(case.finding.doubts) != "high",
            preset=_DESYNC,
            torch=_DESYNC_WORKS,
        ),
    )


class MissingFromCollective(Cause, name="missing-from-collective"):
    """A rank never entered a collective that its peers wait in, and no stack shows why. This is typical of [verdicts
    from dumps](dumps.md) alone.

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
        WRONG_GROUP,
        UNUSUAL_GROUP,
        Advice(
            "Look for a branch, an early `continue` or a caught exception before this collective, on the missing rank.",
            unless=(WRONG_GROUP, UNUSUAL_GROUP),
        ),
        Advice(
            "To see where that rank is, run the job under `safelaunch`: it collects the stacks of all ranks along "
            "with the Flight Recorder.",
            when=lambda case: case.without_stack and case.facts.evidence.launched is None,
            unless=(_ALL_LOGS,),
        ),
        _NO_STACKS,
        _ALL_NODES,
        _ALL_LOGS,
    )
    own = True
    of_node = "perhaps"


ITERABLE = _sub_case(
    "The loop reads an iterable dataset, for which there is no sampler: split its items by rank "
    "(`itertools.islice(items, rank, None, world_size)`), and end the loop on all ranks after the smallest number of "
    "batches that any rank has (an `all_reduce` (MIN) before the loop)."
)


class UnevenBatches(Cause, name="uneven-batches"):
    """A rank left the training loop, or exited cleanly, while others are still in it: it had fewer batches, or stopped
    early.

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
        EXIT_CALLED,
        _DRAWN_BATCHES,
        BROKEN_OFF,
        UNUSED_PARAMETERS,
        LEFT_OUT,
        ITERABLE,
        Advice(
            "Give every rank the same number of batches: `DistributedSampler` with `drop_last=True`, or agree on a "
            "number of steps with an `all_reduce` (MIN) before the loop.",
            unless=(EXIT_CALLED, ITERABLE),
        ),
        Advice(
            "Or wrap the loop in `with model.join():`, where ranks that have run out of batches answer DDP's"
            " collectives; other collectives in the loop still wait for them.",
            when=lambda case: any(purpose in ("gradients", "ddp-forward") for purpose in case.purposes.values()),
        ),
        Advice("Make early-stopping decisions on one rank and broadcast them.", unless=(EXIT_CALLED, BROKEN_OFF)),
    )
    own = True


class GroupOrder(Cause, name="group-order"):
    """A cycle of waits across process groups: ranks entered their groups in different orders. All members of the cycle
    are named.

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
        HELD,
        HANDLES,
        ASIDE,
        GUARDED,
        LEFT_OUT,
        ALONE_IN_GROUPS,
        "Use the groups in the same order on all ranks, or overlap them with `async_op=True` and wait afterwards.",
        Advice(
            "A rank that skips its call in one group, or makes it in the wrong group, also waits in the other like"
            " this: look at the `group=` of that call, and for a branch around it.",
            unless=(GUARDED, LEFT_OUT, ALONE_IN_GROUPS),
        ),
        "Create groups with `new_group()` on every rank, in the same order, including ranks that are not members.",
    )


class P2PCycle(Cause, name="p2p-cycle"):
    """Sends and receives wait for each other in a cycle. All members are named.

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
    """Ranks are missing at process-group initialization or at the rendezvous: they never arrived, or can't connect
    to the store. Such a rank has a different address than its peers, or no route to it. It is named if its peers
    are past that point, or are the majority. If all ranks wait at the store, another process may have its port. If
    torchrun gives up its rendezvous because nodes are missing, no rank exists, and the bundle's `rendezvous.json`
    lists the nodes.

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
        STORE_NOT_REACHED,
        Advice(
            "Call `init_process_group` on every rank before slow or rank-dependent work (downloads, unpacking, "
            "license checks); follow that work with a barrier.",
            unless=(STORE_NOT_REACHED,),
        ),
        Advice(
            "Check `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` of the ranks in `node/<host>/env.json`; "
            "`safelaunch --dry-run ...` shows what they get.",
        ),
    )


class DataLoading(Cause, name="data-loading"):
    """The rank waits for its data pipeline. The verdict names the DataLoader worker and the worker's line, even if the
    worker waits for a lock that it inherited through fork.

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
        OWN_LOCK,
        FORKED_LOCK,
        Advice(
            "Load the sample the worker is stuck on without a DataLoader; give reads and downloads a timeout, and the "
            "DataLoader `timeout=60` so that it raises instead of waiting.",
            unless=(FORKED_LOCK,),
        ),
        "To rule the workers out, run with `num_workers=0`.",
    )
    own = True
    of_node = "perhaps"


class BlockingIo(Cause, name="blocking-io"):
    """A read, write, connect or open in your code doesn't return. If the kernel shows them, the verdict names the
    file, pipe or socket, and the process at the other end of a pipe or local connection:

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
        *_CIRCLES,
        HELD,
        DEAD_CHILD,
        OWN_END,
        INHERITED_END,
        OWED,
        FOREIGN_LOCK,
        OWN_FILE_LOCK,
        STORE_KEY,
        "Add a timeout, and do rank-dependent I/O outside the training loop.",
        CONNECTION,
    )
    own = True
    of_node = "perhaps"
    worker = 3


class UninterruptibleIo(Cause, name="uninterruptible-io"):
    """The process is in the kernel's D state: it waits for storage, a network file system or a driver. The verdict
    names the wait channel.

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
        f"The kernel waits for storage, a network file system or a driver: look at {_KERNEL_LOG} "
        "and the mount that the line reads from; killing the process will not help until it answers.",
        "Put the data or the checkpoint on a local disk and run again.",
    )
    own = True
    of_node = "surely"
    worker = 5


class LockDeadlock(Cause, name="lock-deadlock"):
    """Threads, or a forked child, wait for locks that nothing will release. A file lock held by another rank counts
    too, including one that sqlite or `filelock` polls: a barrier called while holding such a lock blocks both sides.
    So does `Queue.join()` if `task_done()` was not called for an item. If the source shows which thread holds the
    lock, the verdict follows the wait to that thread, with both lines. A `Thread.join()` or `Future.result()` is
    judged by what that thread does.

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
        ("blocking-io", "the wait can still end: the other side is alive and may respond"),
        ("gil-held", "no Python code of the rank runs at all"),
    )
    advice = _advice(
        *_CIRCLES,
        HELD,
        TASK_DONE,
        OWN_LOOP,
        OWN_LOCK,
        FORKED_LOCK,
        SIGNAL,
        TIMED,
        LOCKED_INIT,
        _LOCK_ORDER,
        Advice(
            "Add a timeout to `lock.acquire()`, `queue.get()`, `event.wait()` and `future.result()`, so that it raises "
            "where it waits.",
            unless=(TIMED,),
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
        _GROUP_TIMEOUT,
        "Bound the loop at this line, and check its exit condition on this rank.",
        "If it is legitimate work (an evaluation, a checkpoint), announce it: `safelaunch.phase('eval')`.",
    )
    own = True
    of_node = "perhaps"
    worker = 1


class StuckInUserCode(Cause, name="stuck-in-user-code"):
    """Your code blocks in a different way: a sleep, a subprocess, `input()`.

    - *A subprocess that waits for its parent*: it writes into a full pipe that the parent would read only after it
      exits, or waits for input that the parent no longer sends. The verdict names the parent's line.
    - *A loop that polls*: the verdict quotes its condition. If a condition keeps one rank out of the loop, that
      rank may be the one to end it: if it has moved on, it is named, with `medium` confidence. A loop around
      `work.is_completed()` waits for its peers, and is never named for it.
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
        _GROUP_TIMEOUT,
        *_CIRCLES,
        HELD,
        POLLS,
        ATTEMPTS,
        LOCK_FILE,
        BUILD_LOCK,
        POOL,
        OUTLIVES,
        "Add a timeout, or move the call to where no other rank depends on it.",
        "If the wait is intentional, mark it: `safelaunch.pause()` or `safelaunch.phase(...)`, or a longer "
        "`--stall-timeout`.",
    )
    own = True
    worker = 2


class SwallowedException(Cause, name="swallowed-exception"):
    """A rank raised an exception, caught it, and skipped the collectives that its peers called there. It then meets
    its peers one call early, until it finishes and they don't. Reported on Python 3.12+; on older versions only if
    the rank printed something in the `except` that its peers didn't. A batch skipped without an exception (`if not
    torch.isfinite(loss): print(...); continue`) is a `collective-mismatch` with that line.

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
        "finished. No peer is missing from the calls that it has started."
    )
    unlike = (
        ("gpu-lost", "the driver has reported an error"),
        ("no-rank-stands-out", "every rank waits in the same call"),
    )
    advice = _advice(
        Advice("To find the kernel", preset="cuda-sync"),
        f"Look for Xid errors in {_KERNEL_LOG}.",
    )
    own = True
    of_node = "surely"


class GpuLost(Cause, name="gpu-lost"):
    """The driver has reported an error (an Xid) of the rank's GPU, or of its work there, while the rank waits for it or
    for peers. The verdict quotes the driver's line.

    ```text
    Rank 2 waits at train.py:33 (train), and the driver has reported Xid 79 of its GPU, while ranks 0-1,3 wait in
    all_reduce of train.py:30 (train) at train.py:33 (train).
    ```
    """

    evidence = (
        "The kernel log has an Xid of the rank's GPU or of its process, and the rank waits for that GPU or for peers."
    )
    unlike = (
        ("gpu-kernel", "the driver has reported no error"),
        ("rank-exception", "a CUDA error ended the rank"),
    )
    advice = _advice(
        "Xid 13, 31 and 43 are mostly a kernel's own errors: `compute-sanitizer` finds it. Others (48, 74, 79, 94, 95, "
        "119, ...) are the hardware's or the driver's: drain the node, reset the GPU, and run `dcgmi diag -r 3`.",
    )
    own = True
    of_node = "surely"


_OF_A_LOG = Advice(
    "Look at what that rank printed last: code 1 is mostly that of an exception whose traceback is not in this log, "
    "and code 2 that of wrong options.",
    when=lambda case: case.facts.evidence.printed is not None and bool(case.named),
    unless=(OPTIONS_REFUSED,),
)


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
        LAUNCHER,
        OPTIONS_REFUSED,
        EXIT_CALLED,
        Advice(
            "Find the `sys.exit()` or `os._exit()` that ended it; to stop early, let all ranks agree first.",
            when=lambda case: bool(case.named),
            unless=(LAUNCHER, OPTIONS_REFUSED, EXIT_CALLED, _OF_A_LOG),
        ),
        _OF_A_LOG,
        _ALL_NODES,
        _ALL_LOGS,
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
        DETAIL_CRASH,
        *_COMMUNICATION,
        OUT_OF_MEMORY,
        KILLED_FROM_OUTSIDE,
        _ABORTED,
        _CHECK_EVERY_CALL,
        AFTER_THE_END,
        FATAL_SIGNAL,
    )
    failure = True


class RankExceptionCause(Cause, name="rank-exception"):
    """A rank raised an uncaught exception, and this was the first failure: the errors of the other ranks follow from
    it, whatever torchrun's summary says. If all ranks raised the same at one line, all are named.

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
        _GRADIENT_MISSING,
        *_COMMUNICATION,
        OUT_OF_MEMORY,
        KILLED_FROM_OUTSIDE,
        Advice(_BY_FAILURE["nccl-shm"], when=lambda case: case.raised_like(_SHARED_MEMORY)),
        GPU_OF_TWO_RANKS,
        GPU_SHARED,
        _GPU_FRAGMENTED,
        _GPU_FRAGMENTED_BEFORE,
        GPU_FULL,
        GPU_UNSHARDED,
        _GPU_MEMORY_LINES,
        Advice(
            "Select the GPU by `LOCAL_RANK`, not by `RANK`, and start no more ranks on a node than it has GPUs.",
            when=lambda case: case.raised_like(re.compile("invalid device ordinal")),
        ),
        Advice(
            "CUDA reports an error later than it happens. To have it raised at its own line",
            when=lambda case: case.raised_like(_GPU_ASSERT),
            preset="cuda-sync",
        ),
        Advice(
            "Every rank raised it, so it is not specific to one rank: look at the line, or debug it in a single "
            "process (`--nproc-per-node=1`).",
            when=lambda case: case.all_alike,
            unless=(_GRADIENT_MISSING, _GPU_MEMORY_LINES),
        ),
        LAUNCHER,
        Advice(
            "Fix the exception at this line; errors of other ranks follow from it.",
            when=lambda case: not case.all_alike,
            unless=(STORE_NOT_REACHED, LAUNCHER, OUT_OF_MEMORY, KILLED_FROM_OUTSIDE, EXIT_WAITS),
        ),
        EXIT_WAITS,
        OUTLIVES,
        STORE_NOT_REACHED,
    )
    failure = True


class NodeLost(Cause, name="node-lost"):
    """A [node](nodes.md) is gone: its safelaunch fell silent without reporting a failure or a stop, and the other
    nodes' ranks lost their connections to it. Typical reasons are power, a kernel panic, or something that killed
    every process of the job there.

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
        "Look at the node itself: power, kernel panic (its BMC or serial console), or a scheduler or out-of-memory "
        "killer that took every process of the job there.",
        "Leave the node out until it is checked: `scontrol update NodeName=NODE State=DRAIN`, `kubectl cordon`.",
    )


class NodeUnreachable(Cause, name="node-unreachable"):
    """A node is silent, but no connection to it has closed: it is down, or cut off from the others. Given the bundles
    of both sides, `safelaunch diagnose` can tell that both are alive. A node whose own interface has no link
    names itself.

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
        "If the node answers, look there for the job's processes: they may still run, and hold its GPUs.",
        _OTHER_NODES,
    )


class NodeBehind(Cause, name="node-behind"):
    """All ranks of one node are behind, and no others: a slow or broken node, or a branch of the script for that node.
    `nodes` names it; `culprits` is empty. Ranks that the script itself puts to sleep keep their own cause and
    lines.

    ```text
    Node b is behind as a whole: ranks 2-3, and no others. Each of ranks 2-3 is in uninterruptible sleep in
    rpc_wait_bit_killable at train.py:7 (train), while ranks 0-1 wait in all_reduce at train.py:50 (train).
    ```
    """

    evidence = "The ranks that hold up their peers are all ranks of that node, and no other rank does."
    unlike = (("node-unreachable", "the node is silent"),)
    advice = _advice(
        "Compare this node with the others: `node/<host>/` has its GPUs, kernel log, disks, memory and load; then "
        "leave it out and run again.",
        "If the script branches by node or rank (`GROUP_RANK`, host name), look at that branch first.",
    )


class LauncherStopped(Cause, name="launcher-stopped"):
    """A node answers, but its torchrun or safelaunch doesn't: it was stopped, or exited and left its ranks behind. A
    stopped torchrun blocks ranks wherever they use its store, as in `init_process_group`. If the process that hosts
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
        "If it has ended, end the ranks that it left behind before you restart the job.",
    )


class VersionsDiffer(Cause, name="versions-differ"):
    """All ranks wait, no rank stands out, and the nodes run different versions of torch, safelaunch or the script.
    With a different cause, the difference is listed as evidence.

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
    """Every rank is in the same place. Suspect the network, a GPU, or something outside the job that all ranks wait
    for.

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
        LATE_JOIN,
        _ALL_STACKS,
        *_COMMUNICATION,
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
            preset=_DESYNC,
            torch=_DESYNC_WORKS,
        ),
        Advice(
            "Look at what ended the other ranks: these only lost their connections.",
            when=lambda case: case.lost and not case.facts.evidence.stopped,
        ),
        Advice(
            "Connect the supervisors of all nodes, so that they look at the same moment: under torchrun they are "
            "already connected; under `safelaunch exec`, pass `--cluster-store HOST:PORT`.",
            when=lambda case: bool(case.facts.evidence.stopped),
        ),
        BUILD_LOCK,
        STORE_KEY,
        Advice(
            "No rank waits for another: what they wait for is outside the job. Look at each rank's line, and add a "
            "timeout to that call.",
            when=lambda case: case.all_in_own_code and not case.without_stack,
            unless=(BUILD_LOCK, STORE_KEY),
        ),
        _NO_STACKS,
        _OTHER_NODES,
    )


class ReplicasDiverged(Cause, name="replicas-diverged"):
    """Parameters or BatchNorm statistics that should be equal on several ranks aren't, bit by bit, as
    [`--check-every`](results.md) found. The job continues. The verdict names a rank if it differs from a majority,
    otherwise both sides.

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
        ALL_APART,
        APART_AT_FIRST,
        APART_LATER,
        "Parameters that DDP did not know when it wrapped the model (unfrozen or added later) get no averaged gradient:"
        " wrap it after the last change. With equal gradients, look at learning rates and the optimizer's state.",
        ONE_APART,
        "To find the line: call `safelaunch.probes.check_consistent(model)` around the suspects, and run with"
        " `--check-every 1`.",
    )


class NonFiniteGradient(Cause, name="non-finite-gradient"):
    """An optimizer step used infinite or NaN gradients, as [`--check-every`](results.md) found. The rank whose own
    gradient wasn't finite first is named. If only the averaged gradient was seen, none is.

    ```text
    Gradients are not finite on rank 1 since step 7, the first is that of 4.bias (6 of 6): one rank diverged.
    ```
    """

    evidence = "`--check-every` looks at the gradients of every checked step, before they are averaged if it can."
    unlike = (("loss-diverged", "the loss that the script reports is not finite, or too high"),)
    advice = _advice(
        "Look at that rank's batch of that step: print it, and `torch.isfinite(loss)` before `backward()`.",
        "For the operation: `torch.autograd.set_detect_anomaly(True)` for a few steps from the last good checkpoint.",
        "Under float16 use a GradScaler, or bfloat16; clip with `clip_grad_norm_(..., error_if_nonfinite=True)`, so"
        " that the step is not made.",
    )


class LossDiverged(Cause, name="loss-diverged"):
    """The script reports its loss (`safelaunch.step(loss=loss)`), and one rank's loss isn't finite, or is far above
    the others'.

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
    """The job is making progress: steps or collectives advanced between two looks, or the last ones are only a few
    usual steps old. Only `safelaunch dump` gives this verdict. If the job has been quiet for longer while a rank
    computes, the verdict is about that rank, starts with `No step for 41 s (usual 0.1 s):`, and is never `high`,
    because a dump can't distinguish slow from endless.

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


FAILURES = tuple(name for name, cause in CAUSES.items() if cause.failure)
BY_ITSELF = ("rank-stopped", *FAILURES)  # true of a whole process, whatever its peers do
