"""What one thread does by its own doing: asleep, blocked, spinning, waiting for a lock.

Pure functions from the kernel's view and the stack of a thread to a :class:`Condition`. Whether other ranks wait for
it is not asked here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from safelaunch.diagnose import calls
from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.kernel import KernelWait, kernel_wait, wait_words
from safelaunch.model import Claim, Confidence, Frame, ProcessEvidence, StackSample, Thread


@dataclass(frozen=True)
class Condition:
    """A cause of the catalogue, with the clause that explains it (``is asleep in train.py:41 (load)``).

    ``lock``: the thread waits for a lock of its own process, which may have a further cause in another thread.
    ``locked_by``: it waits for a file lock that this process holds.
    """

    cause: str
    reason: str
    frame: Frame | None
    pid: int = 0
    process: str = "main"
    confidence: Confidence = "high"
    claims: tuple[Claim, ...] = ()
    lock: calls.LockWait | None = None
    locked_by: int | None = None


@dataclass(frozen=True)
class View:
    """One process with what is needed to read it: whose files are libraries, and where its evidence lies."""

    process: ProcessEvidence
    code_roots: tuple[str, ...]
    folder: str  # "ranks/3"

    @property
    def sample(self) -> StackSample | None:
        """The newest sample with Python stacks, one of the interpreter alone where there is one."""
        plain = [s for s in self.process.stacks if not s.native]
        samples = plain or list(self.process.stacks)
        return samples[-1] if samples else None

    @property
    def main(self) -> Thread | None:
        return self.sample.main_thread if self.sample else None

    @property
    def frames(self) -> tuple[Frame, ...]:
        return fr.python_frames(self.main) if self.main else ()

    @property
    def user_frame(self) -> Frame | None:
        return fr.user_frame(self.frames, self.code_roots)

    def stack_claim(self, text: str) -> Claim:
        return Claim(text, f"{self.folder}/stack.txt")

    def kernel_claim(self, text: str) -> Claim:
        return Claim(text, f"{self.folder}/proc.json")


def thread_condition(view: View, thread: Thread | None) -> Condition:
    """What ``thread`` (None: the process has no readable stack) does, from the surest sign to the weakest."""
    tid = thread.os_tid if thread else None
    frames = fr.python_frames(thread) if thread else ()
    inner, mine = fr.user_part(frames, view.code_roots)
    wait = kernel_wait(view.process, None if tid == view.process.pid else tid)
    condition = (
        _held_by_kernel(view, wait, mine)
        or _busy(view, wait, inner, mine)
        or _waits_for_outside(wait, inner, mine)
        or _lock(view, wait, tid, inner, mine)
        or _io_or_sleep(wait, mine)
        or _unexplained(inner, mine)
    )
    claims = list(condition.claims)
    if mine is not None:
        claims.append(view.stack_claim(f"its innermost user frame is {fr.place(mine)}"))
    if wait_words(wait):
        claims.append(view.kernel_claim(f"the kernel says: {wait_words(wait)}"))
    return replace(condition, pid=view.process.pid, claims=tuple(claims))


def _held_by_kernel(view: View, wait: KernelWait, mine: Frame | None) -> Condition | None:
    """Stopped, in D state or dead: nothing its code does can matter while that lasts."""
    where = f" at {fr.place(mine)}" if mine else ""
    if wait.kind == "stopped":
        how = "its cgroup is frozen" if wait.call == "frozen cgroup" else "it was stopped by a signal (state T)"
        return Condition("rank-stopped", f"does not run: {how}{where}", mine)
    if wait.kind == "disk":
        channel = f" in {wait.call}" if wait.call else ""
        claim = view.kernel_claim(f"state D in every sample, wait channel {wait.call or 'unknown'}")
        return Condition("uninterruptible-io", f"is in uninterruptible sleep{channel}{where}", mine, claims=(claim,))
    if wait.kind == "dead":
        return Condition("rank-exited", "has ended and is a zombie", mine)
    return None


def _busy(view: View, wait: KernelWait, inner: tuple[Frame, ...], mine: Frame | None) -> Condition | None:
    """CPU time between the samples. Inside torch or another library the same sign may be honest work."""
    if not wait.busy or (wait.cpu_share is None and not _active(view)):
        return None
    share = f" ({wait.cpu_share:.0%} of a core)" if wait.cpu_share is not None else ""
    if not inner:
        return Condition("busy-loop", f"spins in {fr.place(mine)}{share}", mine)
    called = f"{fr.short(inner[0].function)} in {fr.basename(inner[0].file)}"
    text = f"computes in {called}, called from {fr.place(mine)}{share}: slow or endless, the samples cannot tell"
    return Condition("busy-loop", text, mine, confidence="medium" if mine else "low")


def _active(view: View) -> bool:
    return view.main is None or view.main.active


def _waits_for_outside(wait: KernelWait, inner: tuple[Frame, ...], mine: Frame | None) -> Condition | None:
    """A person, a subprocess or an event loop: neither a lock nor a file is at fault."""
    where = fr.place(mine)
    if wait.kind == "child" or calls.waits_for_child(inner):
        return Condition("stuck-in-user-code", f"waits for a subprocess at {where}", mine)
    if wait.kind == "io" and wait.fd == 0 and wait.call == "read":
        return Condition("stuck-in-user-code", f"waits for standard input at {where}", mine)
    if calls.in_event_loop(inner):
        text = f"runs an idle asyncio event loop at {where}: what its coroutines await does not come"
        return Condition("stuck-in-user-code", text, mine, confidence="medium")
    return None


def _lock(
    view: View, wait: KernelWait, tid: int | None, inner: tuple[Frame, ...], mine: Frame | None
) -> Condition | None:
    """Futex, and the innermost Python frame is the user's own line or a stdlib lock's.

    A C extension's own condition variable looks the same; a native sample settles it where there is one.
    """
    known = calls.lock_wait(inner)
    if wait.kind not in ("lock", "unknown") or (wait.kind == "unknown" and known is None):
        return None
    native = calls.native_wait(view.process.stacks, tid)
    if known is None and (native not in ("", "lock") or (inner and calls.in_torch(inner, view.code_roots))):
        return None
    lock = known or calls.LockWait("a lock")
    sure: Confidence = "high" if known or native == "lock" else "medium"
    return Condition("lock-deadlock", f"waits for {lock.what} at {fr.place(mine)}", mine, confidence=sure, lock=lock)


def _io_or_sleep(wait: KernelWait, mine: Frame | None) -> Condition | None:
    where = fr.place(mine)
    if wait.kind == "sleep":
        return Condition("stuck-in-user-code", f"is asleep in {where}", mine)
    if wait.kind == "select":  # time.sleep() of Python 3.10 and older is a select() without descriptors
        return Condition("stuck-in-user-code", f"sleeps or waits in select() at {where}", mine, confidence="medium")
    if wait.kind in ("io", "poll"):
        call = f" ({wait_words(wait)})" if wait_words(wait) else ""
        return Condition("blocking-io", f"is blocked in I/O at {where}{call}", mine, locked_by=wait.locked_by)
    return None


def _unexplained(inner: tuple[Frame, ...], mine: Frame | None) -> Condition:
    if mine is None and not inner:
        return Condition("missing-from-collective", "has no stack that says what it does", None, confidence="low")
    called = f" inside {fr.short(inner[0].function)} ({fr.basename(inner[0].file)})" if inner else ""
    return Condition("stuck-in-user-code", f"does not move at {fr.place(mine)}{called}", mine, confidence="medium")
