"""Recognizes the library calls in which a thread waits for peers, a DataLoader, a lock or a subprocess.

Only files and functions of torch and the standard library count, never names in the user's program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

from safelaunch.model import Frame, StackSample
from safelaunch.stacks.frames import Stack, is_native, normal, own_part, short


@dataclass(frozen=True)
class LibraryCall:
    """Functions in library files or folders; if ``functions`` is empty, all functions there."""

    files: tuple[str, ...]
    functions: frozenset[str] = frozenset()

    @cached_property
    def _whole(self) -> tuple[str, ...]:
        # Whole path components: ``megatorch/distributed`` isn't ``torch/distributed``.
        return tuple(file if file.startswith(("/", "<")) else f"/{file}" for file in self.files)

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        return tuple(file for file in self._whole if file.endswith("/"))

    def fits(self, path: str, function: str) -> bool:
        if self.functions and function not in self.functions:
            return False
        return path.endswith(self._whole) or (bool(self._folders) and any(folder in path for folder in self._folders))

    def on(self, frames: Iterable[Frame]) -> bool:
        return any(self.fits(normal(frame.file), short(frame.function)) for frame in frames)


_C10D_FILES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/utils.py",
    "/torch/nn/parallel/distributed.py",
    "/torch/distributed/rendezvous.py",
    "/torch/distributed/constants.py",
)
C10D = LibraryCall(_C10D_FILES)  # active whatever it calls inside: a DTensor's ``wait_tensor`` blocks in an operator
_C10D_NOISE = frozenset({"wrapper", "inner", "_time_logger", "_exception_logger"})
_INIT_FUNCTIONS = frozenset({"init_process_group", "_init_process_group", "rendezvous", "_create_c10d_store"})
_NEW_GROUP = frozenset({"new_group", "_new_group_with_tag", "_new_process_group_helper", "split_group"})
MAKES_GROUPS = _INIT_FUNCTIONS | _NEW_GROUP  # inside these, the innermost frame can be in any library
_P2P = frozenset({"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv"})
_TEARDOWN = frozenset({"destroy_process_group", "_shutdown_backend"})
_RUNNERS = frozenset({"_run_code", "_run_module_code", "_run_module_as_main", "_bootstrap", "run_path", "run_module"})


@dataclass(frozen=True)
class TorchWait:
    kind: str  # "init" | "collective" | "p2p" | "teardown"
    op: str = ""  # public function nearest to the user's line, or what only C frames show

    @property
    def words(self) -> str:
        return UNNAMED.get(self.op, self.op)


UNNAMED = {"": "a collective", "send/recv": "a send or receive", "store": "a store key"}


def torch_wait(stack: Stack) -> TorchWait | None:
    """Returns the c10d call in which a thread waits for other ranks; None if it isn't in one.

    The innermost Python frame must be in c10d, because only then is the thread inside a C++ collective, rendezvous or
    store call. If another frame is innermost, such as one of pickle, the collective is still preparing its data. Within
    ``init_process_group`` and ``new_group``, any innermost frame counts, because they call store and rendezvous code.
    """
    inner = stack.called
    names = [short(f.function) for f in inner if "/torch/" in normal(f.file)]
    if _INIT_FUNCTIONS.intersection(names) and any("/torch/distributed/" in normal(f.file) for f in inner):
        return TorchWait("init", "init_process_group")
    if _NEW_GROUP.intersection(names):
        return TorchWait("collective", "new_group")
    if not C10D.on(inner[:1]):
        return None
    calls = [
        short(f.function)
        for f in inner
        if normal(f.file).endswith(_C10D_FILES) and short(f.function) not in _C10D_NOISE
    ]
    if not calls:
        return None
    if _TEARDOWN.intersection(calls):
        return TorchWait("teardown", "destroy_process_group")
    op = next((name for name in reversed(calls) if not name.startswith("_")), calls[0])
    if _P2P.intersection(calls):
        return TorchWait("p2p", op)
    return TorchWait("collective", op.lstrip("_"))


def makes_store(stack: Stack) -> bool:
    """Returns whether a thread is creating the rendezvous store, as its server or as a client."""
    return bool(stack.called) and short(stack.called[0].function) == "_create_c10d_store"


def passes_objects(stack: Stack) -> bool:
    """Returns whether a thread broadcasts or gathers objects: one collective for their sizes, one for their data."""
    return any(normal(f.file).endswith(_C10D_FILES[0]) and "_object" in short(f.function) for f in stack.called)


_MESSAGES = ("multiprocessing/queues.py", "multiprocessing/connection.py")

RPC = LibraryCall(("/torch/distributed/rpc/",))  # waits for another rank's answer (``rpc_sync``, ``to_here``)
ANSWERS_RPC = LibraryCall(("torch/distributed/rpc/internal.py",), frozenset({"_run_function"}))
FUTURE = LibraryCall(("/torch/futures/",))  # result of a c10d or RPC call, or set by other code
FILE_LOCK = LibraryCall(("/filelock/",), frozenset({"acquire"}))  # polls the lock and sleeps between attempts
BUILD = LibraryCall(("torch/utils/file_baton.py",), frozenset({"wait"}))  # another process builds a C++ extension
REPLACED = LibraryCall(("multiprocessing/pool.py",), frozenset({"_maintain_pool"}))  # forked for an ended worker
CHILD = LibraryCall(("/subprocess.py", "multiprocessing/popen_fork.py", "multiprocessing/popen_spawn_posix.py"))
MESSAGE = LibraryCall(_MESSAGES, frozenset({"get", "recv", "recv_bytes", "recv_bytes_into", "poll", "wait"}))
TAKES_ITEM = LibraryCall(("/queue.py", "multiprocessing/queues.py"), frozenset({"get"}))
FEEDS_QUEUE = LibraryCall(("multiprocessing/queues.py",), frozenset({"_feed"}))  # thread that writes a queue's items
EVENT_LOOP = LibraryCall(("/asyncio/",))
RUNS_LOOP = LibraryCall(("/asyncio/base_events.py",), frozenset({"_run_once"}))  # in a callback or coroutine
# A thread that answers connections.
SERVES = LibraryCall(
    ("/socketserver.py", "/http/server.py", "/asyncio/selector_events.py", "multiprocessing/managers.py"),
    frozenset({"serve_forever", "serve_client", "accept_connection", "_handle_request_noblock"}),
)
POOL = LibraryCall(("/concurrent/futures/thread.py", "/multiprocessing/pool.py"))
# Waits for DataLoader workers. With ``num_workers=0``, the DataLoader runs the dataset itself and these don't match.
LOADER_WAIT = LibraryCall(
    ("torch/utils/data/dataloader.py",),
    frozenset({"_try_get_data", "_get_data", "_next_data", "_try_put_index", "_shutdown_workers"}),
)
_LOADER, _DATALOADER = LibraryCall(("torch/utils/data/",)), LibraryCall(("torch/utils/data/dataloader.py",))
LOADER_WORKER = LibraryCall(("torch/utils/data/_utils/worker.py",))
_TORCH, _DISTRIBUTED = LibraryCall(("/torch/",)), LibraryCall(("/torch/distributed/",))
_BACKWARD = LibraryCall(("torch/autograd/graph.py", "torch/autograd/__init__.py"))
_QUEUES = LibraryCall(("multiprocessing/queues.py",))
_SHUTDOWN = LibraryCall(("/threading.py", "<frozen threading>"), frozenset({"_shutdown"}))
Purpose = Literal[
    "", "state-dict", "sync-batchnorm", "fsdp-forward", "fsdp-backward", "ddp-forward", "ddp-constructor", "gradients"
]
_FSDP, _DDP = ("torch/distributed/fsdp/",), ("torch/nn/parallel/distributed.py",)
# The first row that matches a frame wins.
_PURPOSES: tuple[tuple[Purpose, LibraryCall], ...] = (
    (
        "state-dict",
        LibraryCall(("torch/distributed/checkpoint/state_dict.py", "torch/distributed/_state_dict_utils.py")),
    ),
    (
        "state-dict",
        LibraryCall(("torch/distributed/fsdp/_state_dict_utils.py", "torch/distributed/fsdp/_optim_utils.py")),
    ),
    ("state-dict", LibraryCall(("torch/distributed/tensor/_api.py",), frozenset({"full_tensor"}))),
    ("sync-batchnorm", LibraryCall(("torch/nn/modules/_functions.py",), frozenset({"forward"}))),
    ("fsdp-backward", LibraryCall(_FSDP, frozenset({"pre_backward", "post_backward", "_pre_backward"}))),
    ("fsdp-backward", LibraryCall(_FSDP, frozenset({"_post_backward_hook", "_pre_backward_hook"}))),
    ("fsdp-forward", LibraryCall(_FSDP, frozenset({"_pre_forward", "pre_forward", "_pre_forward_unshard"}))),
    ("ddp-constructor", LibraryCall(_DDP, frozenset({"__init__", "_ddp_init_helper"}))),
    ("ddp-forward", LibraryCall(_DDP, frozenset({"forward", "_pre_forward", "_post_forward"}))),
    ("gradients", LibraryCall(("torch/autograd/graph.py",), frozenset({"_engine_run_backward"}))),
    ("gradients", LibraryCall(("torch/autograd/__init__.py",), frozenset({"backward"}))),
)


def purpose(stack: Stack) -> Purpose:
    """Returns why torch itself makes this collective; empty if the user's code called it."""
    inner = [(normal(frame.file), short(frame.function)) for frame in stack.called]
    return next((reason for reason, mark in _PURPOSES for call in inner if mark.fits(*call)), "")


def in_torch(stack: Stack) -> bool:
    return _TORCH.on(stack.called[:1]) and not LOADER_WAIT.on(stack.called)


def in_distributed(stack: Stack) -> Frame | None:
    """Returns the innermost frame if it belongs to torch.distributed, such as a pipeline schedule, else None."""
    inside = _DISTRIBUTED.on(stack.called[:1]) and not RPC.on(stack.called)
    return stack.called[0] if inside else None


def in_backward(stack: Stack) -> bool:
    """Returns whether a thread is in C++ code called by ``backward()``, rather than in a Python hook."""
    return _BACKWARD.on(stack.called[:1])


def loader_on_stack(frames: Sequence[Frame]) -> bool:
    """Returns whether a DataLoader without workers is running the dataset's code in this process."""
    return _LOADER.on(own_part(frames))


def without_workers(frames: Sequence[Frame]) -> bool:
    """Returns whether a DataLoader runs the dataset in this process; a worker's truncated stack can look the same."""
    return _DATALOADER.on(own_part(frames))


def worker_idle(frames: Sequence[Frame]) -> bool:
    """Returns whether a DataLoader worker is idle, and therefore no process is waiting for it."""
    return LOADER_WORKER.on(frames) and _QUEUES.on(frames[:8])


def leaving(frames: Sequence[Frame], *, cut: bool = False) -> str:
    """Describes what the main thread does after its script has ended; empty if the script is still running.

    ``threading._shutdown`` waits for the remaining threads. Exit handlers are called by the interpreter itself, so
    their stacks, unlike those in a running script, have neither a ``<module>`` frame nor one of ``runpy``.

    Args:
        cut: True if outermost frames might be missing; then a missing ``<module>`` frame means nothing.
    """
    if _SHUTDOWN.on(frames):
        return "its script has ended and the interpreter waits for the remaining threads"
    outer = own_part(frames) if not cut else ()
    running = any(f.function == "<module>" or short(f.function) in _RUNNERS for f in outer)
    return "" if running or not outer else "its script has ended and exit handlers are running"


@dataclass(frozen=True)
class LockWait:
    """A wait for a lock, thread, future or queue in the same process."""

    what: str
    # Event that ends it. ``work``: a thread or future finishes; ``signal``: a thread sets a queue, event or condition;
    # ``lock``: the holder releases it.
    on: Literal["work", "signal", "lock"] = "lock"
    of: Literal["", "thread", "future", "pool", "items"] = ""  # what ends it, if that matters
    own: bool = False  # according to the source, the waiting thread itself holds it
    shared: bool = False  # a ``multiprocessing`` lock (its barrier is ``threading.Barrier`` with such a lock)

    @property
    def by_processes(self) -> bool:
        return self.on == "work" or self.shared

    @property
    def of_pool(self) -> bool:
        return self.of == "pool"

    @property
    def of_future(self) -> bool:
        """True if a pool thread or an event loop must end the wait, rather than a user's thread by ending."""
        return self.on == "work" and self.of != "thread"

    @property
    def of_items(self) -> bool:
        """True for a queue's ``join()``, which returns once ``task_done()`` was called for each item."""
        return self.of == "items"


_LOCK_CALLS: tuple[tuple[str, frozenset[str], LockWait], ...] = (
    ("/threading.py", frozenset({"join", "_wait_for_tstate_lock"}), LockWait("Thread.join", "work", "thread")),
    (
        "/concurrent/futures/_base.py",
        frozenset({"result", "exception", "wait"}),
        LockWait("Future.result", "work", "future"),
    ),
    ("/concurrent/futures/thread.py", frozenset({"shutdown"}), LockWait("Executor.shutdown", on="work")),
    (
        "/multiprocessing/pool.py",
        frozenset({"wait", "get", "map", "join"}),
        LockWait("a pool's result", "work", "pool"),
    ),
    ("/queue.py", frozenset({"join"}), LockWait("the items of a queue (Queue.join)", "signal", "items")),
    ("/queue.py", frozenset({"get", "put"}), LockWait("a queue", on="signal")),
    (
        "/multiprocessing/queues.py",
        frozenset({"join"}),
        LockWait("the items of a multiprocessing queue (JoinableQueue.join)", "signal", "items"),
    ),
    ("/logging/__init__.py", frozenset({"acquire", "handle", "_acquireLock"}), LockWait("a logging lock")),
    ("/threading.py", frozenset({"wait", "wait_for"}), LockWait("an event or condition", on="signal")),
    ("/threading.py", frozenset({"acquire", "__enter__"}), LockWait("a lock or semaphore")),
    (
        "/multiprocessing/synchronize.py",
        frozenset({"acquire", "wait", "__enter__"}),
        LockWait("a multiprocessing lock"),
    ),
)


def lock_wait(inner: Sequence[Frame]) -> LockWait | None:
    """Returns which lock, thread, future or queue these library frames wait for; None if there is none.

    The frame nearest to the user's line decides: ``Future.result`` calls a Condition's ``wait``, but waits *for* the
    future.
    """
    for frame in reversed(inner):
        for ending, functions, wait in _LOCK_CALLS:
            if normal(frame.file).endswith(ending) and short(frame.function) in functions:
                return replace(wait, shared=any("/multiprocessing/" in normal(frame.file) for frame in inner))
    return None


@dataclass(frozen=True)
class Awaited:
    peers: TorchWait | None = None  # c10d call that waits for other ranks; they end it, whatever else is on the stack
    threads: bool = False  # the end of a thread, or torch's threads under ``backward()``
    # Child processes: DataLoader ``workers``; one ``child``'s end; the sender of a ``message``; ``any`` child of a
    # pool, executor or event loop.
    processes: Literal["", "workers", "child", "message", "any"] = ""


def awaited(stack: Stack, kind: str = "") -> Awaited:
    """Returns what a thread waits for, from its Python frames and the ``kind`` of its system call (:mod:`.kernel`)."""
    peers = torch_wait(stack)
    if peers is not None:
        return Awaited(peers)
    inner = stack.called
    lock, loop = lock_wait(inner), EVENT_LOOP.on(inner)
    of_threads = in_backward(stack) or (lock is not None and lock.on == "work")
    if LOADER_WAIT.on(inner):
        return Awaited(None, of_threads, "workers")
    if kind == "child" or CHILD.on(inner):
        return Awaited(None, of_threads, "child")
    if MESSAGE.on(inner):
        return Awaited(None, of_threads, "message")
    return Awaited(None, of_threads, "any" if loop or (lock is not None and lock.by_processes) else "")


_LOCK_SYMBOLS = ("PyThread_acquire_lock", "lock_PyThread_acquire", "PyMutex_Lock", "_PySemaphore", "rlock_acquire")
_PEER_SYMBOLS = ("c10d::", "gloo::", "nccl", "ProcessGroup")
_STORE_SYMBOLS = ("TCPStore", "FileStore", "PrefixStore")
_P2P_SYMBOLS = ("RecvWork", "SendWork")
Answers = tuple[tuple[str, tuple[str, ...]], ...]  # each with the symbols that show it; the first match wins
WAITS: Answers = (("p2p", _P2P_SYMBOLS), ("store", _STORE_SYMBOLS), ("peers", _PEER_SYMBOLS), ("lock", _LOCK_SYMBOLS))
TRANSFERS: Answers = (("send", ("SendWork",)), ("recv", ("RecvWork",)))
SLEEPS: Answers = (("sqlite", ("sqlite3",)), ("python", ("time_sleep", "pysleep")))  # sqlite polls for a lock
# Waits for other ranks that only C frames show: ``work.wait()`` or ``store.get()`` on the user's line.
PEER_WAITS = {
    "p2p": TorchWait("p2p", "send/recv"),
    "store": TorchWait("store", "store"),
    "peers": TorchWait("collective"),
}


def native(samples: Iterable[StackSample], os_tid: int | None, answers: Answers) -> str:
    """Returns which of ``answers`` the C frames inside a thread's innermost Python frame show; "" if they show none.

    Python frames can't distinguish ``with lock:`` from ``work.wait()``: both are C functions called directly by the
    user's line, and both block in ``futex``.
    """
    for frames in _native_frames(samples, os_tid):
        for answer, symbols in answers:
            if any(symbol in frame.function for frame in frames for symbol in symbols):
                return answer
    return ""


def _native_frames(samples: Iterable[StackSample], os_tid: int | None) -> Iterator[list[Frame]]:
    for sample in samples:
        for thread in sample.threads if sample.native else ():
            if thread.os_tid == os_tid:
                yield list(takewhile(is_native, thread.frames))


# --- the process's own GPU --------------------------------------------------------------------------------------------

_SYNCHRONIZE = LibraryCall(
    ("torch/cuda/__init__.py", "torch/cuda/streams.py", "torch/cuda/graphs.py", "torch/accelerator/__init__.py"),
    frozenset({"synchronize", "wait", "replay"}),
)
_DRIVER_CALLS = ("Synchronize", "cuMemcpy", "cudaMemcpy", "cuEventQuery", "cuStreamQuery")
_DRIVER_LIBRARIES = ("libcuda.so", "libcudart", "libamdhip", "libhsa-runtime")


def device_wait(stack: Stack, samples: Iterable[StackSample], os_tid: int | None) -> str:
    """Returns ``a synchronize`` of torch, or else the driver call, in which a thread waits; empty if in neither."""
    if _SYNCHRONIZE.on(stack.called[:2]):
        return "a synchronize"
    called = (_driver_call(frame) for frames in _native_frames(samples, os_tid) for frame in frames)
    return next(filter(None, called), "")


def _driver_call(frame: Frame) -> str:
    # Symbols of the driver or runtime, not libc's futexes and locks.
    if any(call in frame.function for call in _DRIVER_CALLS):
        return frame.function.partition("(")[0]
    return "the driver" if any(library in frame.file for library in _DRIVER_LIBRARIES) else ""
