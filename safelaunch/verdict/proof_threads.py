"""Threads and processes of the ranks, and what two looks at them show: where each rests, and whose code it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from safelaunch.model import (
    Claim,
    Frame,
    ProcessEvidence,
    ProcessState,
    RankEvidence,
    StackSample,
    Thread,
    ThreadState,
)
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.source import ReadSource
from safelaunch.verdict.conditions import View
from safelaunch.verdict.graph import Node

OTHERS = -1
NO_GIVERS: frozenset[Node] = frozenset()
# Native threads of torch and of the libraries below it run no Python code of their own accord: what they call back is
# the end of a c10d call. Any other one can set an event or put something into a queue. The thread's name shows nothing:
# a new thread inherits the name of the one that starts it.
TORCH_LIBRARY = re.compile(r"(libtorch(_cpu|_cuda|_hip|_xpu|_python)?|libc10(_\w+)?)\.so[.\d]*")
_BELOW_TORCH = re.compile(
    rf"{TORCH_LIBRARY.pattern}|(libgomp|libi?omp5?|lib(scipy_)?openblas\w*|libmkl_\w+|libnccl|libcuda(rt)?|libcupti"
    r"|libuc[spt]|libibverbs|libmlx5)(-\w+)?\.so[.\d]*"
)
# Where torch's own threads rest: idle workers, gloo's event loop, the worker server. In any other call, such as the
# wait for a store's key, the thread runs what somebody has given it.
_TORCH_RESTS = ("futex", "futex_wait", "epoll_wait", "epoll_pwait", "epoll_pwait2", "accept", "accept4")
_PYTHON = re.compile(r"(lib)?python3[\d.]*[td]?(\.so[.\d]*)?")
_SYSTEM = ("/usr/", "/lib/", "/lib64/", "/opt/")  # where drivers and system libraries are
# Libraries whose threads show and send what the script has reported, and call back nothing of the script's. There is no
# general sign of that: code can be reached by its name, through a weak reference, or through a logger.
_REPORTERS = ("tqdm", "tensorboard", "tensorboardX", "wandb")
_REPORTER_FILE = re.compile(rf"/(?:site|dist)-packages/({'|'.join(_REPORTERS)})/")
_TORCH_FILE = re.compile(r"/(?:site|dist)-packages/torch/")
_PICKLING = frozenset({"_tensor_to_object", "_object_to_tensor"})  # functions of c10d that run code of the objects
# TensorPipe's threads. With these, or with a worker server beside the beacon's, threads of torch's library run what
# other processes ask for.
_OF_RPC = "TP_"


@dataclass(frozen=True)
class Actor:
    """A thread of a process of a rank; ``tid`` 0: of a process that runs no Python, its first; ``OTHERS``: all native
    threads of which nothing is known.
    """

    rank: int
    pid: int
    tid: int


@dataclass(frozen=True)
class ImportedTorch:
    """The installation that a rank has imported: what is torch's, and what is below it.

    ``places``: directories of torch; none if they are not known. ``roots``: those of installed packages.
    """

    places: tuple[str, ...]
    roots: tuple[str, ...]

    @classmethod
    def of(cls, rank: RankEvidence) -> ImportedTorch:
        places = rank.gil.torch or tuple(f"{root.rstrip('/')}/torch" for root in rank.code_roots)
        return cls(tuple(f"{place}/" for place in places), rank.code_roots)

    def owns(self, path: str) -> bool:
        path = fr.normal(path)
        return path.startswith(self.places) if self.places else _TORCH_FILE.search(path) is not None

    def owns_thread(self, thread: ThreadState) -> bool:
        """Whether a native thread runs code of torch and of the libraries below it alone.

        Python's own code can be among it: what torch calls back there has Python frames, or leaves only traces.
        """
        if not _BELOW_TORCH.fullmatch(thread.rests_in) or not thread.libraries:
            return False
        known_rest = not TORCH_LIBRARY.fullmatch(thread.rests_in) or thread.syscall_name in _TORCH_RESTS
        return known_rest and all(map(self._owns_library, thread.libraries))

    def _owns_library(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        if TORCH_LIBRARY.fullmatch(name):
            return self.owns(path)
        is_installed = self.owns(path) or path.startswith((*self.roots, *_SYSTEM))
        return _PYTHON.fullmatch(name) is not None or (is_installed and _BELOW_TORCH.fullmatch(name) is not None)


@dataclass(frozen=True)
class ProvedProcess:
    """``views``: of its threads that run Python, the main one first; of its first thread alone where none does. Those
    that run the beacon alone are left out: they release nothing and call nothing.
    """

    rank: int
    evidence: ProcessEvidence
    views: Mapping[Actor, View]
    runs_python: bool
    torch: ImportedTorch

    @classmethod
    def of(cls, evidence: ProcessEvidence, rank: RankEvidence, read_source: ReadSource) -> ProvedProcess:
        first = View(evidence, rank, read_source=read_source)
        threads = [thread for thread in _python_threads(evidence) if not _is_ours(thread)]
        views = {
            Actor(rank.rank, evidence.pid, one.os_tid or 0): replace(first, other=one) if number else first
            for number, one in enumerate(threads)
        }
        main = {Actor(rank.rank, evidence.pid, 0): first}
        return cls(rank.rank, evidence, views or main, bool(threads), ImportedTorch.of(rank))

    @property
    def main(self) -> Actor:
        return next(iter(self.views))

    @property
    def newest(self) -> ProcessState:
        return self.evidence.states[-1]

    def actor(self, view: View) -> Actor:
        return next(actor for actor, one in self.views.items() if one is view)

    def beside(self, view: View) -> frozenset[Node]:
        """Its other threads that run Python."""
        return frozenset(self.views) - {self.actor(view)}

    @cached_property
    def unknown(self) -> tuple[ThreadState, ...]:
        """Native threads that can run code of the user's of their own accord."""
        if not self.evidence.states:
            return ()
        if not self.runs_python:
            return self.newest.threads[1:]
        python = {thread.os_tid for thread in _python_threads(self.evidence)}
        native = [thread for thread in self.newest.threads if thread.tid not in python]
        listening = [
            one for one in native if one.syscall_name.startswith("accept") and TORCH_LIBRARY.fullmatch(one.rests_in)
        ]
        serves = any(thread.name.startswith(_OF_RPC) for thread in native) or len(listening) > 1
        return tuple(thread for thread in native if serves or not self._runs_torch_alone(thread))

    def _runs_torch_alone(self, thread: ThreadState) -> bool:
        """Whether one of the last two looks shows that, and the other shows the same or a thread that ran.

        The stack of a running thread can't be read, and gloo's event loop wakes up a hundred times a second.
        """
        seen = [one for state in self.evidence.states[-2:] for one in state.threads if one.tid == thread.tid]
        owned = [self.torch.owns_thread(one) for one in seen]
        return any(owned) and all(own or one.state == "R" for own, one in zip(owned, seen, strict=True))

    @property
    def serves_a_store(self) -> bool:
        return any(thread.name.startswith("pt_tcpstore") for thread in self.newest.threads)

    @property
    def others(self) -> frozenset[Node]:
        """Stands for the native threads of which nothing is known; empty if there are none."""
        return frozenset({Actor(self.rank, self.evidence.pid, OTHERS)}) if self.unknown else NO_GIVERS

    @cached_property
    def others_rest(self) -> bool:
        """Whether the unknown native threads all wait, without a time limit, for another thread to wake them."""
        if len(self.evidence.states) < 2:
            return False
        earlier = {thread.tid: thread for thread in self.evidence.states[-2].threads}
        return all(_rests(one, earlier.get(one.tid)) for one in self.unknown)


def is_gone(process: ProcessEvidence) -> bool:
    """Not where only its first thread has ended."""
    state = process.states[-1] if process.states else None
    return state is not None and state.state in "ZX" and all(thread.state in "ZX" for thread in state.threads)


def _plain(process: ProcessEvidence) -> list[StackSample]:
    return [sample for sample in process.stacks if not sample.native]


def _is_ours(thread: Thread) -> bool:
    return bool(thread.frames) and all(fr.is_ours(frame.file) for frame in thread.frames)


def _python_threads(process: ProcessEvidence) -> tuple[Thread, ...]:
    """Of the newest sample, the main thread first."""
    samples = _plain(process)
    main = samples[-1].main_thread if samples else None
    return (main, *(thread for thread in samples[-1].threads if thread is not main)) if main is not None else ()


def is_steady(view: View, *, spins: bool) -> bool:
    """It was seen twice, in the same place, and has not run in between, as far as the kernel tells.

    ``spins``: it may wait for its device, which takes a CPU.
    """
    process, tid = view.process, view.os_tid
    if len(process.states) < 2 or not tid:
        return False
    if view.thread is not None:
        at: list[tuple[Frame, ...]] = []
        for sample in _plain(process)[-2:]:
            same = next((thread for thread in sample.threads if thread.os_tid == tid), None)
            if same is None or same.torn:
                return False
            at.append(fr.python_frames(same))
        if len(at) < 2 or at[0] != at[1]:
            return False
    kernel = [next((t for t in state.threads if t.tid == tid), None) for state in process.states[-2:]]
    if any(thread is None or thread.state not in "SRI" for thread in kernel):
        return False
    first, last = kernel
    assert first is not None and last is not None
    same_wait = (first.syscall, first.fd) == (last.syscall, last.fd) or not (first.syscall_name and last.syscall_name)
    ran = None not in (first.slices, last.slices) and first.slices != last.slices
    return spins or (same_wait and not ran)


def ident_of(view: View) -> int:
    return view.thread.ident if view.thread is not None else 0


def rests_in_of(view: View) -> str:
    states = view.process.states[-2:]
    found = {t.rests_in for state in states for t in state.threads if t.tid == view.os_tid}
    return found.pop() if len(found) == 1 else ""


def _rests(thread: ThreadState, before: ThreadState | None) -> bool:
    """Whether it waits for another thread of its process to wake it, and has not run since an earlier look."""
    private = thread.syscall_name.startswith("futex") and not thread.fd_target and thread.ends_s is None
    if not private or before is None or before.syscall_name != thread.syscall_name:
        return False
    return thread.slices is not None and thread.slices == before.slices


def is_in_torch(view: View, torch: ImportedTorch) -> bool:
    """Whether the call that its frames show is torch's, and the thread rests in torch's native code.

    Another library can have a file of the same name; and an object that c10d unpickles runs code of its own.
    """
    inner = view.stack.called
    makes_group = any(torch.owns(one.file) and fr.short(one.function) in calls.MAKES_GROUPS for one in inner)
    if not inner or not (torch.owns(inner[0].file) or makes_group):
        return False
    rests_in = rests_in_of(view)
    if rests_in:
        return _BELOW_TORCH.fullmatch(rests_in) is not None
    return fr.short(inner[0].function) not in _PICKLING


def is_torch_thread(view: View, torch: ImportedTorch) -> bool:
    """Whether torch has begun the thread for itself. What ``torch.distributed`` begins can make calls."""
    begun = next((frame.file for frame in reversed(view.frames) if fr.basename(frame.file) != "threading.py"), "")
    return torch.owns(begun) and "/torch/distributed/" not in fr.normal(begun) and not view.user_frame


def is_reporter_thread(view: View, roots: Sequence[str]) -> bool:
    """Whether all code of a thread is the standard library's and that of one package in ``_REPORTERS``."""
    files = [fr.normal(frame.file) for frame in view.frames]
    packages = {found[1] for file in files if (found := _REPORTER_FILE.search(file))}
    others = [file for file in files if not _REPORTER_FILE.search(file)]
    are_standard = all("-packages/" not in file and fr.is_library(file, roots) for file in others)
    return len(packages) == 1 and are_standard


def is_in_lock(view: View) -> bool:
    return rests_in_of(view) in ("lock", "gil") or calls.lock_wait(view.stack.called) is not None


def is_public(path: str) -> bool:
    """Whether the file behind a shared lock has a name that processes of other jobs may open it by."""
    return path.startswith(("/SYSV", "/memfd:", "?")) or (path.startswith("/") and not path.endswith(" (deleted)"))


def is_on_user_line(view: View) -> bool:
    return view.user_frame is not None and not view.stack.called


def stack_claim_of(view: View) -> Claim:
    return view.stack_claim(f"{view.words} waits at {view.place}")
