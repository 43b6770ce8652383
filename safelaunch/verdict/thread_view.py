"""A view of one thread: its stack, what the kernel shows of it, and what its source says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from safelaunch.model import Claim, Frame, ProcessEvidence, RankEvidence, StackSample, Thread
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.kernel import KernelWait, kernel_wait
from safelaunch.stacks.locks import LockHeld, LockTaken, lock_at, locks_held
from safelaunch.stacks.polls import Poll, poll_at
from safelaunch.stacks.source import NO_SOURCE, ReadSource
from safelaunch.stacks.store_keys import StoreKey, store_key_at
from safelaunch.verdict.graph import Actor


@dataclass(frozen=True)
class View:
    """A view of one thread of a process of ``rank``.

    ``other`` is None for the main thread, whose kernel state is known even if no stack could be read.
    """

    process: ProcessEvidence
    rank: RankEvidence
    other: Thread | None = None
    read_source: ReadSource = NO_SOURCE

    @cached_property
    def sample(self) -> StackSample | None:
        """The newest sample with Python stacks, preferably without native frames."""
        plain = [s for s in self.process.stacks if not s.native]
        samples = plain or list(self.process.stacks)
        return samples[-1] if samples else None

    @property
    def thread(self) -> Thread | None:
        return self.other or (self.sample.main_thread if self.sample else None)

    @cached_property
    def stack(self) -> fr.Stack:
        return self.stack_of(self.thread)

    def stack_of(self, thread: Thread | None) -> fr.Stack:
        return fr.stack_of(self.rank, fr.python_frames(thread) if thread is not None else ())

    @property
    def frames(self) -> tuple[Frame, ...]:
        return self.stack.frames

    @property
    def threads(self) -> tuple[Thread, ...]:
        return self.sample.threads if self.sample else ()

    @property
    def user_frame(self) -> Frame | None:
        return self.stack.user_frame

    @property
    def place(self) -> str:
        return fr.place(self.user_frame)

    @property
    def folder(self) -> str:
        return f"ranks/{self.rank.rank}"

    @cached_property
    def wait(self) -> KernelWait:
        return kernel_wait(self.process, self.other.os_tid if self.other else None)

    @cached_property
    def awaited(self) -> calls.Awaited:
        result = calls.awaited(self.stack, self.wait.kind)
        polls = self.poll is not None and self.poll.of == "process" and not result.processes
        return replace(result, processes="child") if polls else result

    @cached_property
    def poll(self) -> Poll | None:
        """The target that its loop polls, asleep or spinning."""
        if self.stack.called or not (self.wait.again or self.wait.busy):
            return None
        result = poll_at(self.stack.user_frames, self.read_source, asleep=self.wait.again)
        return result if self.wait.again or (result is not None and result.of == "work") else None

    @cached_property
    def store_key(self) -> StoreKey | None:
        """The store key that it waits for, by the source: store calls have no Python frames."""
        if self.user_frame is None or self.stack.called or self.thread is None:
            return None
        return store_key_at(self.user_frame, self.read_source, dict(self.thread.names))

    @cached_property
    def takes(self) -> LockTaken | None:
        """The lock that its innermost line takes."""
        return lock_at(self.user_frame, self.read_source) if self.user_frame else None

    def holds(self, other: View) -> LockHeld | None:
        """Returns the lock that ``other`` is waiting to acquire, if this thread holds it."""
        if other.takes is None or other.user_frame is None:
            return None
        locks = locks_held(self.stack.user_frames, self.read_source)
        return next((lock for lock in locks if lock.is_that(other.takes, other.user_frame)), None)

    @property
    def device(self) -> str:
        """The call in which it waits for its GPU."""
        return calls.device_wait(self.stack, self.process.stacks, self.os_tid)

    def native(self, answers: calls.Answers = calls.WAITS) -> str:
        return calls.native(self.process.stacks, self.os_tid, answers)

    @property
    def os_tid(self) -> int | None:
        return self._main_tid if self.other is None else self.other.os_tid

    @property
    def _main_tid(self) -> int:
        return (self.sample.leads if self.sample is not None else 0) or self.process.pid

    @property
    def actor(self) -> Actor:
        """The thread as a node of the graph of waits."""
        is_main = self.other is None or (self.sample is not None and self.other is self.sample.main_thread)
        tid = self._main_tid if is_main or self.other is None else self.other.os_tid or self.other.name
        return Actor(self.rank.rank, self.process.pid, tid)

    @property
    def serves_futures(self) -> bool:
        return calls.RUNS_LOOP.on(self.frames) or calls.POOL.on(self.frames)

    @property
    def name(self) -> str:
        return repr(self.other.name or self.other.os_tid) if self.other else "main"

    @property
    def words(self) -> str:
        if self.other is None and self.sample is not None and self.sample.leads and self.thread is not None:
            return f"its thread {self.thread.name or self.thread.os_tid!r}"
        return "its main thread" if self.other is None else f"its thread {self.name}"

    @cached_property
    def others(self) -> tuple[View, ...]:
        """The other threads of the process."""
        return tuple(replace(self, other=thread) for thread in self.threads if thread is not self.thread)

    def beside(self) -> list[View]:
        """Returns the other threads of the process that run user code. Idle pool threads don't count."""
        return sorted((other for other in self.others if other.user_frame), key=lambda other: other.os_tid or 0)

    def stack_claim(self, text: str) -> Claim:
        return Claim(text, f"{self.folder}/stack.txt")

    def kernel_claim(self, text: str) -> Claim:
        return Claim(text, f"{self.folder}/proc.json")


def view_of(rank: RankEvidence, read_source: ReadSource = NO_SOURCE) -> View | None:
    """Returns the main thread of a rank; None without evidence of its process."""
    return View(rank.main, rank, read_source=read_source) if rank.main is not None else None


def child_views(rank: RankEvidence, read_source: ReadSource = NO_SOURCE) -> tuple[View, ...]:
    """Returns the main threads of a rank's child processes."""
    return tuple(View(child, rank, read_source=read_source) for child in rank.children)
