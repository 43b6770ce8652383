"""Threads and processes of the ranks in two looks: where each thread rests, and whose code it runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from safelaunch.verdict.graph import UNKNOWN_THREADS, Actor, Node
from safelaunch.verdict.thread_view import View

NO_GIVERS: frozenset[Node] = frozenset()
# Native threads of torch, and of the libraries below it, run no Python code except callbacks at the end of c10d calls.
# Any other native thread can set an event or fill a queue. Thread names prove nothing: a new thread inherits its
# creator's.
TORCH_LIBRARY = re.compile(r"(libtorch(_cpu|_cuda|_hip|_xpu|_python)?|libc10(_\w+)?)\.so[.\d]*")
_BELOW_TORCH = re.compile(
    rf"{TORCH_LIBRARY.pattern}|(libgomp|libi?omp5?|lib(scipy_)?openblas\w*|libmkl_\w+|libnccl|libcuda(rt)?|libcupti"
    r"|libuc[spt]|libibverbs|libmlx5)(-\w+)?\.so[.\d]*"
)
# System calls of torch's idle threads: workers, gloo's event loop, the worker server. In any other call (waiting for a
# store key, for example) the thread runs a job it was passed.
_TORCH_RESTS = ("futex", "futex_wait", "epoll_wait", "epoll_pwait", "epoll_pwait2", "accept", "accept4")
_PYTHON = re.compile(r"(lib)?python3[\d.]*[td]?(\.so[.\d]*)?")
_SYSTEM = ("/usr/", "/lib/", "/lib64/", "/opt/")  # directories of drivers and system libraries
# Libraries whose threads display or send what the script reported, and never call the script back. That can't be
# detected in general: code can be reached by name, through a weak reference, or through a logger.
_REPORTERS = ("tqdm", "tensorboard", "tensorboardX", "wandb")
_REPORTER_FILE = re.compile(rf"/(?:site|dist)-packages/({'|'.join(_REPORTERS)})/")
_TORCH_FILE = re.compile(r"/(?:site|dist)-packages/torch/")
_PICKLING = frozenset({"_tensor_to_object", "_object_to_tensor"})  # c10d functions that run code of pickled objects
# Prefix of TensorPipe's threads. With these, or with a second worker server, torch's threads run requests of other
# processes.
_RPC_PREFIX = "TP_"


@dataclass(frozen=True)
class ImportedTorch:
    """The torch installation that a rank imported."""

    places: tuple[str, ...]  # directories of torch; empty if unknown
    roots: tuple[str, ...]  # directories of installed packages

    @classmethod
    def of(cls, rank: RankEvidence) -> ImportedTorch:
        places = rank.gil.torch or tuple(f"{root.rstrip('/')}/torch" for root in rank.code_roots)
        return cls(tuple(f"{place}/" for place in places), rank.code_roots)

    def owns(self, path: str) -> bool:
        path = fr.normal(path)
        return path.startswith(self.places) if self.places else _TORCH_FILE.search(path) is not None

    def owns_thread(self, thread: ThreadState) -> bool:
        """Returns whether a native thread runs nothing but torch and the libraries below it.

        Python's library can be on its stack, because callbacks of torch run Python; leftover addresses count too.
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
class ProofProcess:
    """A process of a rank, with its Python threads except the beacon's, which end no waits."""

    main_view: View

    @property
    def rank(self) -> int:
        return self.main_view.rank.rank

    @property
    def evidence(self) -> ProcessEvidence:
        return self.main_view.process

    @property
    def main(self) -> Actor:
        return self.main_view.actor

    @cached_property
    def torch(self) -> ImportedTorch:
        return ImportedTorch.of(self.main_view.rank)

    @cached_property
    def runs_python(self) -> bool:
        return bool(_python_threads(self.evidence))

    @cached_property
    def views(self) -> Mapping[Actor, View]:
        """Views of the Python threads, the main thread first; without Python, of the first thread."""
        views = (self.main_view, *(self.main_view.others if self.runs_python else ()))
        return {view.actor: view for view in views if view is self.main_view or not _is_ours(view.thread)}

    @property
    def newest(self) -> ProcessState:
        return self.evidence.states[-1]

    def other_threads(self, view: View) -> frozenset[Node]:
        return frozenset(self.views) - {view.actor}

    @cached_property
    def unknown_threads(self) -> tuple[ThreadState, ...]:
        """Native threads that can run the user's code by themselves."""
        if not self.evidence.states:
            return ()
        if not self.runs_python:
            return self.newest.threads[1:]
        python = {thread.os_tid for thread in _python_threads(self.evidence)}
        native = [thread for thread in self.newest.threads if thread.tid not in python]
        listening = [
            thread
            for thread in native
            if thread.syscall_name.startswith("accept") and TORCH_LIBRARY.fullmatch(thread.rests_in)
        ]
        serves = any(thread.name.startswith(_RPC_PREFIX) for thread in native) or len(listening) > 1
        return tuple(thread for thread in native if serves or not self._runs_only_torch(thread))

    def _runs_only_torch(self, thread: ThreadState) -> bool:
        """Returns whether one of the last two looks shows only torch, and the other the same or a running thread.

        The stack of a running thread can't be read, and gloo's event loop wakes up a hundred times a second.
        """
        looks = [
            state_thread
            for state in self.evidence.states[-2:]
            for state_thread in state.threads
            if state_thread.tid == thread.tid
        ]
        owned = [self.torch.owns_thread(look) for look in looks]
        return any(owned) and all(own or look.state == "R" for own, look in zip(owned, looks, strict=True))

    @property
    def serves_a_store(self) -> bool:
        return any(thread.name.startswith("pt_tcpstore") for thread in self.newest.threads)

    @property
    def unknown_nodes(self) -> frozenset[Node]:
        """The node that stands for the unknown native threads."""
        return frozenset({Actor(self.rank, self.evidence.pid, UNKNOWN_THREADS)}) if self.unknown_threads else NO_GIVERS

    @cached_property
    def unknown_threads_rest(self) -> bool:
        """All unknown native threads wait for another thread to wake them."""
        if len(self.evidence.states) < 2:
            return False
        earlier = {thread.tid: thread for thread in self.evidence.states[-2].threads}
        return all(_rests(thread, earlier.get(thread.tid)) for thread in self.unknown_threads)


def is_gone(process: ProcessEvidence) -> bool:
    state = process.states[-1] if process.states else None
    return state is not None and state.state in "ZX" and all(thread.state in "ZX" for thread in state.threads)


def _plain(process: ProcessEvidence) -> list[StackSample]:
    return [sample for sample in process.stacks if not sample.native]


def _is_ours(thread: Thread | None) -> bool:
    return thread is not None and bool(thread.frames) and all(fr.is_ours(frame.file) for frame in thread.frames)


def _python_threads(process: ProcessEvidence) -> tuple[Thread, ...]:
    samples = _plain(process)
    main = samples[-1].main_thread if samples else None
    return (main, *(thread for thread in samples[-1].threads if thread is not main)) if main is not None else ()


def is_steady(view: View, *, spins: bool) -> bool:
    """Returns whether two looks show the thread in the same place and, by the kernel, it didn't run in between.

    Args:
        spins: it might be waiting for its device, which uses CPU time.
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
    places = {t.rests_in for state in states for t in state.threads if t.tid == view.os_tid}
    return places.pop() if len(places) == 1 else ""


def _rests(thread: ThreadState, before: ThreadState | None) -> bool:
    private = thread.syscall_name.startswith("futex") and not thread.fd_target and thread.ends_s is None
    if not private or before is None or before.syscall_name != thread.syscall_name:
        return False
    return thread.slices is not None and thread.slices == before.slices


def is_in_torch(view: View, torch: ImportedTorch) -> bool:
    """Returns whether the frames show a call of torch, and the thread rests in torch's native code.

    Another library can have a file of the same name, and an object that c10d unpickles runs its own code.
    """
    inner = view.stack.called
    makes_group = any(torch.owns(frame.file) and fr.short(frame.function) in calls.MAKES_GROUPS for frame in inner)
    if not inner or not (torch.owns(inner[0].file) or makes_group):
        return False
    rests_in = rests_in_of(view)
    if rests_in:
        return _BELOW_TORCH.fullmatch(rests_in) is not None
    return fr.short(inner[0].function) not in _PICKLING


def is_torch_thread(view: View, torch: ImportedTorch) -> bool:
    """Returns whether torch started the thread for itself. Threads that ``torch.distributed`` starts can make calls."""
    begun = next((frame.file for frame in reversed(view.frames) if fr.basename(frame.file) != "threading.py"), "")
    return torch.owns(begun) and "/torch/distributed/" not in fr.normal(begun) and not view.user_frame


def is_reporter_thread(view: View, roots: Sequence[str]) -> bool:
    """Returns whether the thread runs nothing but the standard library and one package in ``_REPORTERS``."""
    files = [fr.normal(frame.file) for frame in view.frames]
    packages = {match[1] for file in files if (match := _REPORTER_FILE.search(file))}
    others_files = [file for file in files if not _REPORTER_FILE.search(file)]
    are_standard = all("-packages/" not in file and fr.is_library(file, roots) for file in others_files)
    return len(packages) == 1 and are_standard


def is_in_lock(view: View) -> bool:
    return rests_in_of(view) in ("lock", "gil") or calls.lock_wait(view.stack.called) is not None


def is_public(path: str) -> bool:
    """Returns whether other jobs' processes can open the file of a shared lock."""
    return path.startswith(("/SYSV", "/memfd:", "?")) or (path.startswith("/") and not path.endswith(" (deleted)"))


def is_on_user_line(view: View) -> bool:
    return view.user_frame is not None and not view.stack.called


def stack_claim_of(view: View) -> Claim:
    return view.stack_claim(f"{view.words} waits at {view.place}")
