"""Advice: what to do about a cause, or about one of its sub-cases.

Each text gives the usual fix first, then the command that gets the missing evidence. A rule or a rank's condition
attaches the advice for its sub-case; other advice fits because of facts about the whole case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from safelaunch.settings.presets import version_matches

if TYPE_CHECKING:
    from safelaunch.stacks.failures import FailureKind
    from safelaunch.verdict.advice import Scene


@dataclass(frozen=True, eq=False)
class Advice:
    """One piece of advice, and the cases that it fits."""

    text: str
    when: Callable[[Scene], bool] = lambda case: True  # applies if this holds, or if a finding attached the advice
    unless: tuple[Advice, ...] = ()  # suppressed if any of these applies
    preset: str = ""  # preset that shows more in the next run; suppressed if this run had it
    torch: str = ""  # torch versions for which the preset works

    @property
    def shown(self) -> str:
        """Text with its command."""
        return f"{self.text}: `safelaunch --preset {self.preset} ...`" if self.preset else self.text

    def fits(self, case: Scene) -> bool:
        if not (self in case.attached or self.when(case)) or any(advice.fits(case) for advice in self.unless):
            return False
        run = case.launched
        return self.preset not in run.presets and (not self.torch or version_matches(self.torch, run.torch))


# Fits only if it is attached to the finding, or to the condition of a rank at fault.
_sub_case = partial(Advice, when=lambda case: False)


def _failed_by(kind: FailureKind) -> Callable[[Scene], bool]:
    return lambda case: kind in case.failures


_UNUSED = re.compile("expected to have finished reduction in the prior iteration", re.IGNORECASE)
_GPU_MEMORY = re.compile("(?:cuda|hip) out of memory", re.IGNORECASE)
_HOST_MEMORY = re.compile(
    r"\AMemoryError\b|DefaultCPUAllocator: (?:can't allocate|not enough) memory|cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
SHARED_MEMORY = re.compile("dataloader's workers are out of shared memory")
GPU_ASSERT = re.compile("device-side assert(?!ions)|illegal memory access|cudaErrorAssert", re.IGNORECASE)

DESYNC_PRESET = "desync-detail"
DESYNC_TORCH = "<2.13"  # later, TORCH_DISTRIBUTED_DEBUG=DETAIL crashes in DDP's constructor

LAUNCHER = _sub_case("Fix what the launcher reports, or the error above it in the output of a process that it started.")

# For saved stacks: other processes' stacks might be missing.
ALL_STACKS = Advice(
    "Take the stacks of all processes at once: `safelaunch dump --all` on each node (or `py-spy dump --pid PID` for "
    "every process), and give all of them to `safelaunch diagnose`.",
    when=lambda case: case.of_some_stacks,
)
# No rank is named: the culprit might be one of the unseen ranks.
ALL_NODES = Advice(
    "Put the bundles of all nodes into one folder: `safelaunch diagnose FOLDER` reaches one verdict over all ranks.",
    when=lambda case: not case.named and case.facts.evidence.printed is None,
    unless=(LAUNCHER, ALL_STACKS),
)

ALL_LOGS = Advice(
    "Pass the logs of all ranks at once (`safelaunch diagnose LOG ...`), or run the job under `safelaunch`, which "
    "examines every live rank.",
    when=lambda case: case.facts.evidence.printed is not None and not case.surely_named,
)
NO_STACKS = Advice(
    "No stack could be read: run `safelaunch doctor` on that node to see why.",
    when=lambda case: case.without_stack and case.facts.evidence.launched is not None,
)
OTHER_NODES = Advice(ALL_NODES.text, when=lambda case: bool(case.facts.unseen) and case.facts.evidence.printed is None)

BUILD_LOCK = _sub_case(
    "Delete that lock file if no process is building the extension: a job killed mid-build leaves it behind, and"
    " nothing removes it. Then build the extension on one rank first, or before the job."
)

OUT_OF_MEMORY = _sub_case(
    "The host is out of memory, which includes `/dev/shm`: use fewer DataLoader workers, less prefetching, and no copy"
    " of the dataset in each rank; or raise the memory limit for the job (`ulimit -a`, `node/<host>/resources.json`).",
    when=lambda case: case.raised_like(_HOST_MEMORY),
)

GROUP_TIMEOUT = Advice(
    "The process group's own timeout ended the job. If this line legitimately takes that long, raise the timeout: "
    "`init_process_group(timeout=...)`, or `safelaunch --pg-timeout '2h!' ...` for one run of the unchanged script.",
    when=lambda case: case.timed_out,
)

# Keys that the agents of one round set in the rendezvous' store. If that store is shared with the ranks, an agent that
# was in an earlier round doesn't set them again (torch's DynamicRendezvousHandler.next_rendezvous).
_OF_A_ROUND = re.compile(r"wait timeout .*/torch\.rendezvous\.\S*/(?:MASTER_(?:ADDR|PORT)|torchelastic/role_info/)")
LATE_JOIN = Advice(
    "Did a node join late or return? torchrun itself fails then, with or without safelaunch: set"
    " `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` on all nodes.",
    when=lambda case: any(is_late_join(note) for note in case.facts.evidence.notes),
)


def is_late_join(error: str) -> bool:
    """Returns whether torchrun failed as it does if a node joins a job whose rendezvous shares its store."""
    return _OF_A_ROUND.search(error) is not None


STORE_KEY = _sub_case(
    "Find the rank that sets this key, and make it do so on every code path. With a timeout, `wait()` raises."
)

STORE_NOT_REACHED = _sub_case(
    "Print `MASTER_ADDR` and `MASTER_PORT` (or the `init_method`) right before this line on every rank: the script may"
    " have changed what torchrun gave it (`node/<host>/env.json`), or be using a value from before a restart. Then"
    " check whether that address answers: `nc -vz HOST PORT` on the rank's node."
)

OWN_LOCK = _sub_case("Release the lock before taking it again, or make it an `RLock`: the thread waits for itself.")

HELD = _sub_case(
    "Don't block while holding a lock: move the call in which the holder waits out of the `with` block.",
    when=lambda case: case.holds_a_lock,
)

KERNEL_LOG = "the kernel log (`dmesg`; a bundle's `kernel_log.txt`)"
_GROW = "Let segments grow, to reduce fragmentation:"

FULL_PIPE = _sub_case(
    "Read what the other process writes before waiting for its exit: `communicate()`, `queue.get()` before `join()`."
)
WAITS_IN_TURN = _sub_case(
    "Signal the end of the input to the other process (a sentinel, closing the pipe), or `terminate()` it."
)
RACE = _sub_case(
    "Give each thread its own group (`new_group()`, in the same order on all ranks), or let one thread make all calls."
)
TAGS_DIFFER = _sub_case("Give the send and its receive the same `tag`.")
PEERS_DIFFER = _sub_case(
    "Check how this rank chooses its peers: the other ranks in the exchange expect a different choice."
)
ROOTS_DIFFER = _sub_case(
    "Pass the same `src` or `dst` on every rank (a global rank); if computed, broadcast it from one rank."
)
DDP_FORWARD = _sub_case(
    "A forward pass through `DistributedDataParallel` broadcasts the buffers, which is a collective: evaluate with "
    "`model.module` or on all ranks. If the rank is already in its next step, find what skipped the rest of the last.",
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
MISSING_TRANSFER = Advice(
    "The matching send or receive may be missing. On the peer, look for a branch that skips it.",
    when=lambda case: bool(case.transfers),
    unless=(TAGS_DIFFER, PEERS_DIFFER),
)
GUARDED = _sub_case(
    "Every rank must make this call: gate the side effect (a print, writing a file) with `if rank == 0`, not the"
    " collective.",
    unless=(*_MODELS, MISSING_TRANSFER, ROOTS_DIFFER),
)
LEFT_OUT = _sub_case(
    "Look around the skipped call for a `continue`, an early return, a caught exception or a branch that only some "
    "ranks take: a rank that skips the work must still call its collectives."
)
HANDLES = _sub_case(
    "Fix that exception first. Ranks that failed call the collective in the `except` or `finally`, the others call "
    "the ones in the loop: let the exception end the rank, or have all ranks agree on it first."
)
ASIDE = _sub_case(
    "Don't call collectives there: ranks get there at different times, or alone. Set a flag, and let all ranks agree "
    "on it between two steps (`all_reduce` with MAX)."
)
UNUSED_PARAMETERS = _sub_case(
    "If its forward pass didn't use some parameters, DDP skipped the reduction of their gradients: use all parameters "
    "on every rank, or pass `find_unused_parameters=True`.",
    when=lambda case: case.raised_like(_UNUSED),
)
SAME_DECISION = _sub_case(
    "Make the same decision on all ranks: `all_reduce` the condition, broadcast one rank's random number, or use the "
    "same seed."
)
GROUPS_MADE = _sub_case(
    "Call `new_group()` on every rank, in the same order, including for groups that a rank is not in."
)
SIZES_DIFFER = _sub_case(
    "Pass the same size and type on every rank: pad, or exchange the sizes first.",
    unless=_MODELS,
)
TRIED_AGAIN = _sub_case(
    "Don't retry code that contains collectives: one rank's retry repeats them. Let the exception propagate."
)
OTHER_ITEMS = _sub_case(
    "Iterate over the same items in the same order on every rank: don't skip any on one rank, and use `sorted()` for "
    "sets and dicts.",
    unless=(*_MODELS, TRIED_AGAIN),
)
UNUSUAL_GROUP = _sub_case("Check how this line selects its group on the rank that used a different one than before.")
WRONG_GROUP = _sub_case(
    "Use only groups that the rank belongs to: compare how it selects its group with the ranks passed to `new_group()`."
)
ALONE_IN_GROUPS = _sub_case(
    "One of these ranks might use the wrong group, or skip a call: each is alone in its group. Compare the `group=` of"
    " their calls, and look for a branch around them.",
    unless=(GUARDED, LEFT_OUT),
)
EXIT_CALLED = Advice(
    "Agree before one exits: decide on one rank, `broadcast` the decision, and exit on all ranks or on none.",
    when=lambda case: case.exits_early,
)
OPTIONS_REFUSED = _sub_case(
    "The script rejected its options: argparse and click exit with code 2. Its output says which option."
    " `torch.distributed.launch` adds `--local-rank`, torchrun doesn't: read `LOCAL_RANK` from the environment.",
)
BROKEN_OFF = _sub_case(
    "If that `if` is the reason, decide on one rank and broadcast the decision, or `all_reduce` the condition, so that "
    "all ranks stop together."
)
SAME_BATCHES = _sub_case(
    "A rank that skips a batch because of a computed value leaves the loop early: skip it on all ranks, or on none."
)
FORKED_LOCK = _sub_case(
    "A forked process inherits the locks that threads held at that moment, but no thread to release them: fork before "
    "threads start, or use the start method `spawn` (of a DataLoader: `multiprocessing_context='spawn'`). Take locks "
    "with `with`, so that every exit path releases them."
)
DEAD_CHILD = _sub_case(
    "Find out why that child process exited (its output, `kernel_log.txt`), and check `is_alive()` while you wait."
)
OWN_END = _sub_case(
    "Close the other end of the pipe here once the child has it, or the reader never sees the end of the pipe."
)
INHERITED_END = _sub_case(
    "Keep the write end open only in the writer (no `pass_fds`, close it after a fork), so that the reader gets EOF."
)
OWED = _sub_case(
    "Compare both ends: the peer must send this on every code path, also before a `continue`. Use `settimeout()`."
)
FOREIGN_LOCK = _sub_case(
    "Check the process that holds the lock (`ps -o pid,lstart,cmd -p PID`): wait for it, end it, or use another file."
)
OWN_FILE_LOCK = _sub_case(
    "Release the lock on every exit path (`with`, `finally`): a second `open()` of the file needs its own `flock`, "
    "which waits for the first."
)
CONNECTION = _sub_case(
    "`lsof -E -p PID` on that node shows which process holds the other end. To keep the job alive for that, run it "
    "with `safelaunch --on-stall dump ...`."
)
TASK_DONE = _sub_case(
    "Call `task_done()` for each item in a `finally`: otherwise an exception leaves `join()` waiting forever."
)
OWN_LOOP = _sub_case("`await` the coroutine on the thread of its loop; move blocking code to `asyncio.to_thread()`.")
LOCKED_INIT = _sub_case(
    "Release the lock before `init_process_group`, or take it afterwards: that call returns only when all ranks have "
    "joined, and a rank that waits for the lock can't join.",
)
LOCK_ORDER = _sub_case(
    "Acquire locks in the same order everywhere; never call a collective or join a thread while holding one.",
    unless=(FORKED_LOCK, LOCKED_INIT),
)
SIGNAL = _sub_case(
    "Look for the thread at the other end of this queue, or the one that should set this event, and find out why it "
    "ended."
)
TIMED = _sub_case(
    "This wait has a time limit: if it is intentional, mark it (`safelaunch.pause()`); otherwise shorten the limit."
)
POLLS = _sub_case("Limit the polling loop, or replace it with a broadcast from the rank that it waits for.")
ATTEMPTS = _sub_case("Bound the number of attempts, and raise the last exception when they are used up.")
LOCK_FILE = _sub_case(
    "If no process holds the lock, delete the file, and use a lock that the OS releases when its process dies "
    "(`FileLock`)."
)
POOL = _sub_case(
    "A `Pool` never returns the task of a worker that died (`kernel_log.txt`): use `ProcessPoolExecutor`, which raises."
)
OUTLIVES = _sub_case("Make the thread a daemon (`daemon=True`), or stop and join it before the script ends.")
EXIT_WAITS = _sub_case(
    "Fix that exception first. Then let a failed rank exit without waiting for its peers: in an exit handler, call "
    "collectives and `destroy_process_group()` only after a normal end, or never."
)
DETAIL_CRASH = _sub_case(
    "Unset `TORCH_DISTRIBUTED_DEBUG=DETAIL` (`INFO` works): torch 2.13+ crashes with it when a DDP model is created."
)
KILLED_FROM_OUTSIDE = _sub_case(
    f"SIGKILL leaves no trace of its sender: check {KERNEL_LOG}, and the log "
    "and memory limit of the scheduler or container (kills by systemd-oomd or earlyoom aren't counted). To save "
    "memory, use fewer DataLoader workers."
)
ABORTED_CALL = _sub_case(
    "The abort happened in a collective: compare what the ranks pass at that line, and how many batches each has."
)
CHECK_EVERY_CALL = _sub_case("To have every call checked before it starts", preset=DESYNC_PRESET, torch=DESYNC_TORCH)
AFTER_THE_END = _sub_case(
    "The training had ended: a `dist.barrier()` before `destroy_process_group()` avoids it (PyTorch issue 190489)."
)
FATAL_SIGNAL = _sub_case(
    "faulthandler's output (`fault.txt` in a bundle) has the stack of every thread; `safelaunch doctor` shows whether "
    "`/dev/shm` is full."
)
GRADIENT_MISSING = _sub_case(
    "Make every parameter contribute to the loss, or freeze what is not trained (`requires_grad_(False)` before "
    "wrapping): DDP waits for a gradient of each. `TORCH_DISTRIBUTED_DEBUG=INFO` adds their names to the message. "
    "Only if some steps skip parameters on purpose, pass `find_unused_parameters=True`, which costs time in each "
    "step.",
    when=lambda case: case.raised_like(_UNUSED),
)
LINK_ERRORS = _sub_case(
    "Check the link on that node: `ibstat` or `ethtool -S`, the cable and the switch port; `resources.json` has its "
    "counters. Exclude the node and run again."
)
GPU_OF_TWO_RANKS = _sub_case(
    "Several ranks use one GPU: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` first, and `map_location='cpu'`."
)
GPU_SHARED = _sub_case(
    "Another process uses memory on that GPU: `safelaunch gpus` shows whose it is; `--gpus N` leases unused GPUs."
)
EXPANDABLE_SEGMENTS = _sub_case(f"{_GROW} `PYTORCH_ALLOC_CONF=expandable_segments:True`.", torch=">=2.11")
EXPANDABLE_SEGMENTS_BEFORE_2_11 = _sub_case(
    f"{_GROW} `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.", torch="<2.11"
)
GPU_UNSHARDED = _sub_case(
    "Shard what isn't sharded yet: wrap those modules as well (`fully_shard` or `auto_wrap_policy`), the root module "
    "last. `safelaunch.probes.sharding(model)` lists them."
)
GPU_FULL = _sub_case(
    "The tensors fill the GPU: use a smaller batch with gradient accumulation, activation checkpointing, or parameters"
    " and optimizer state sharded over the ranks (FSDP, ZeRO).",
    unless=(GPU_UNSHARDED,),
)
ALL_APART = _sub_case(
    "Nothing averages the gradients: look for a `no_sync()` around every backward pass, or a use of `model.module`."
)
APART_AT_FIRST = _sub_case(
    "Check what sets the parameters first: a checkpoint that only some ranks load, a seed that differs."
)
APART_LATER = _sub_case(
    "Look for code between those steps that only some ranks run: `no_sync()`, an assignment under a condition on the "
    "rank."
)
ONE_APART = _sub_case(
    "If nothing in the script is specific to that rank, suspect its device: exclude that GPU or node and run again."
)

MEMORY_LINES = Advice(
    "To see which lines hold the memory", when=lambda case: case.raised_like(_GPU_MEMORY), preset="oom-debug"
)
# Processes of one rank that wait for each other.
PROCESS_CYCLES = (FULL_PIPE, WAITS_IN_TURN)

LOCK = frozenset({LOCK_ORDER})
ABORTED = frozenset({ABORTED_CALL, CHECK_EVERY_CALL})
DRAWN = frozenset({SAME_DECISION, SAME_BATCHES})
GPU_FRAGMENTED = frozenset({EXPANDABLE_SEGMENTS, EXPANDABLE_SEGMENTS_BEFORE_2_11})

# Errors of NCCL, of the network under it, and of device meshes.
BY_FAILURE: dict[FailureKind, str] = {
    "one-gpu": "Give each rank its own GPU first: `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`.",
    "nccl-memory": "Leave some GPU memory for NCCL: use a smaller batch, fewer process groups, or a smaller "
    "`NCCL_BUFFSIZE`.",
    "nccl-cuda": f"Look for an Xid in {KERNEL_LOG}, and compare the driver "
    "with torch's CUDA (`versions.json`). Try `NCCL_P2P_DISABLE=1` and `NCCL_NVLS_ENABLE=0` to rule out P2P and NVLS.",
    "nccl-shm": "Make room in `/dev/shm` (`df -h /dev/shm`; in a container `--shm-size=8g` or `--ipc=host`).",
    "nccl-limit": "Raise the limit of locked memory where the ranks start: `ulimit -l unlimited`.",
    "infiniband": "Check the link on both nodes: `ibstat`, its counters (`node/<host>/resources.json`), and for RoCE "
    "`NCCL_IB_GID_INDEX`. If the job runs with `NCCL_IB_DISABLE=1`, the link is the problem.",
    "interface": "Set `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` to an interface that all nodes have: "
    "`ip -br addr`.",
    "nccl-versions": "Give all nodes the same environment: `node/<host>/versions.json` has their torch and NCCL "
    "versions.",
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
COMMUNICATION = (
    *(Advice(text, when=_failed_by(kind)) for kind, text in BY_FAILURE.items()),
    Advice("To have NCCL say which call failed", when=_failed_by("nccl-system"), preset="nccl-debug"),
)
ITERABLE = _sub_case(
    "The loop reads an iterable dataset, which no sampler divides: split its items by rank "
    "(`itertools.islice(items, rank, None, world_size)`), and end the loop on all ranks after the smallest number of "
    "batches that any rank has (an `all_reduce` (MIN) before the loop)."
)
LAST_LINES = Advice(
    "Look at what that rank printed last: code 1 mostly means an exception whose traceback isn't in this log, and "
    "code 2 wrong options.",
    when=lambda case: case.facts.evidence.printed is not None and bool(case.named),
    unless=(OPTIONS_REFUSED,),
)
