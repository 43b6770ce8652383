"""The state of one thread, by the kernel's view and its stack: asleep, blocked, spinning, waiting for a lock.

Pure functions that return a :class:`Condition`. They don't consider other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import structs

from safelaunch.model import Claim, Frame, OtherEnd
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.kernel import POLL_S, polled_lock, wait_words
from safelaunch.stacks.polls import Poll
from safelaunch.stacks.store_keys import StoreKey
from safelaunch.verdict import suggestions
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.suggestions import Advice
from safelaunch.verdict.thread_view import View

# What a thread does, if a wait for it depends on that. A thread at rest sleeps, polls, or waits for a process or input.
ThreadActivity = Literal["at rest", "stopped", "disk", "dead", "computes", "lock", "io", "loader"]


@dataclass(frozen=True)
class Condition:
    """The state of a rank, independent of other ranks."""

    cause: str  # name in the catalogue of causes
    reason: str  # clause that explains it: ``is asleep in train.py:41 (load)``
    frame: Frame | None = None
    pid: int = 0
    process: str = "main"
    state: ThreadActivity = "at rest"
    doubts: tuple[Doubt, ...] = ()
    claims: tuple[Claim, ...] = ()
    lock: calls.LockWait | None = None  # lock in the process that the thread waits for
    locks: str = ""  # file that it waits to lock
    locked_by: int | None = None  # PID of the process that has locked that file
    holder: str = ""  # that process, as ``reason`` and ``claims`` name it
    locked_on: str = ""  # host of that process, if it is another one
    ends: tuple[OtherEnd, ...] = ()  # other processes with the other end of the pipe or connection
    awaits_message_from: int | None = None  # rank among ``ends``, if any
    poll: Poll | None = None  # what it polls for
    key: StoreKey | None = None  # c10d store key that it waits for
    advice: frozenset[Advice] = frozenset()
    exits_early: bool = False  # called exit in the middle of its script, with code 0
    # Nothing that another process does can end it, and no time limit is near. If False, it might wait for a rank that
    # wasn't seen.
    for_good: bool = False

    def with_holder(self, words: str) -> Condition:
        """Renames the process that has locked the file."""
        old, new = f"locked by {self.holder}", f"locked by {words}"
        claims = tuple(structs.replace(claim, claim=claim.claim.replace(old, new)) for claim in self.claims)
        return replace(self, reason=self.reason.replace(old, new), holder=words, claims=claims)

    def with_clause(self, words: str, *claims: Claim, advice: Iterable[Advice] = ()) -> Condition:
        reason, advised = f"{self.reason}; {words}", self.advice.union(advice)
        return replace(self, reason=reason, claims=(*self.claims, *claims), advice=advised)


def record_claim(rank: int, text: str) -> Claim:
    return Claim(text, f"ranks/{rank}/flight_recorder.json")


# A shorter sleep or wait might be part of a loop that polls.
FOR_GOOD_S = 1800.0


def thread_condition(view: View) -> Condition:
    """Returns what the thread does, trying the surest sign first.

    ``ProcessView`` judges a thread that waits for DataLoader workers.
    """
    condition = (
        _held_by_kernel(view)
        or _busy(view)
        or _waits_for_outside(view)
        or _lock(view)
        or _polls(view)
        or _io_or_sleep(view)
        or _unexplained(view)
    )
    claims = list(condition.claims)
    if view.user_frame is not None:
        claims.append(view.stack_claim(f"its innermost user frame is {view.place}"))
    if wait_words(view.wait):
        claims.append(view.kernel_claim(f"the kernel says: {wait_words(view.wait)}"))
    return replace(condition, frame=view.user_frame, pid=view.process.pid, claims=tuple(claims))


def _held_by_kernel(view: View) -> Condition | None:
    wait, where = view.wait, fr.at(view.user_frame)
    if wait.kind == "stopped":
        frozen = wait.call == "frozen cgroup"
        how = "does not run: its cgroup is frozen" if frozen else "is stopped by a signal (state T)"
        return Condition("rank-stopped", f"{how}{where}", state="stopped", for_good=True)
    if wait.kind == "disk":
        channel = f" in {wait.call}" if wait.call else ""
        claim = view.kernel_claim(f"state D in every sample, wait channel {wait.call or 'unknown'}")
        text = f"is in uninterruptible sleep{channel}{where}"
        return Condition("uninterruptible-io", text, state="disk", claims=(claim,), for_good=True)
    if wait.kind == "dead":
        return Condition("rank-exited", "is a zombie", state="dead", for_good=True)
    return None


def _busy(view: View) -> Condition | None:
    """Returns the condition of a thread that uses CPU time, which inside a library might be ordinary work."""
    wait, inner = view.wait, view.stack.called
    if not wait.busy or (wait.cpu_share is None and view.thread is not None and not view.thread.active):
        return None
    share = f" ({wait.cpu_share:.0%} of a core)" if wait.cpu_share is not None else ""
    if not inner:
        return Condition("busy-loop", f"spins in {view.place}{share}", state="computes")
    called = f"{fr.short(inner[0].function)} in {fr.basename(inner[0].file)}"
    text = f"computes in {called}, called from {view.place}{share}: the samples cannot distinguish slow from endless"
    doubts = (Doubt.MAY_BE_SLOW if view.user_frame else Doubt.STATE_UNKNOWN,)
    return Condition("busy-loop", text, state="computes", doubts=doubts)


def _waits_for_outside(view: View) -> Condition | None:
    wait, inner, where = view.wait, view.stack.called, view.place
    if wait.kind == "child" or calls.CHILD.on(inner):
        return Condition("stuck-in-user-code", f"waits for a subprocess at {where}")
    if wait.kind == "io" and wait.thread.fd == 0 and wait.call == "read":
        return Condition("stuck-in-user-code", f"waits for standard input at {where}")
    if calls.EVENT_LOOP.on(inner):
        text = f"runs an idle asyncio event loop at {where}: what its coroutines await does not arrive"
        return Condition("stuck-in-user-code", text, doubts=(Doubt.STATE_INFERRED,))
    return None


def _lock(view: View) -> Condition | None:
    """Returns the wait for a lock: a futex wait in the user's line or in the standard library.

    A condition variable of a C extension looks the same without a native sample.
    """
    wait, inner = view.wait, view.stack.called
    lock_wait = calls.lock_wait(inner)
    if wait.kind not in ("lock", "unknown") or (wait.kind == "unknown" and lock_wait is None):
        return None
    native = view.native()
    if lock_wait is None and (native not in ("", "lock") or calls.in_torch(view.stack)):
        return None
    lock = lock_wait or calls.LockWait("a lock")
    doubts = () if lock_wait or native == "lock" else (Doubt.STATE_INFERRED,)
    taken = view.takes if lock.on == "lock" else None
    named = f" (`{taken.name}`)" if taken is not None else ""
    text = f"waits for {lock.what}{named} at {view.place}"
    text += f" (at most {wait.left_s:.0f} s left)" if (wait.left_s or 0.0) > POLL_S else ""
    if taken is not None and taken.held_at and view.user_frame is not None:
        text += f", which it already took at {fr.basename(view.user_frame.file)}:{taken.held_at}"
        lock = replace(lock, own=True)
    if lock.of_pool:  # its workers should end it; no lock is held
        return Condition("stuck-in-user-code", text, lock=lock, advice=frozenset({suggestions.POOL}))
    advice = frozenset({suggestions.SIGNAL}) if lock.on == "signal" and not lock.shared else frozenset[Advice]()
    if lock.on == "lock":
        advice = frozenset({suggestions.OWN_LOCK}) if lock.own else suggestions.LOCK
    if lock.of == "future" and calls.RUNS_LOOP.on(view.stack.frames):
        text += ", on the thread of an event loop, which is blocked too"
        advice = frozenset({suggestions.OWN_LOOP})
    advice = frozenset({suggestions.TIMED}) if wait.left_s is not None else advice
    at_own_line = all(frame.file.endswith("/threading.py") for frame in inner)  # a library can hold a lock for a while
    for_good = not doubts and lock.on == "lock" and at_own_line and wait.left_s is None
    return Condition("lock-deadlock", text, state="lock", doubts=doubts, lock=lock, advice=advice, for_good=for_good)


def _polls(view: View) -> Condition | None:
    """Returns the condition of a thread that sleeps and retries a file lock in C, as sqlite does.

    A sleeping loop with an unrelated locked file open differs only by its C frames.
    """
    lock = polled_lock(view.process, view.wait) if view.other is None else None
    native = view.native(calls.SLEEPS) if lock is not None else ""
    tries = view.poll is not None and view.poll.tries_a_lock
    if lock is None or (native == "python" and not view.stack.called and not tries):
        return None
    holder = f"pid {lock.pid}{lock.program}"
    text = f"keeps retrying at {view.place} to lock {lock.path}, locked by {holder}"
    claim = view.kernel_claim(f"it retries {lock.path}, locked by {holder}")
    sure = tries or native == "sqlite" or calls.FILE_LOCK.on(view.stack.called)
    return Condition(
        "blocking-io",
        text,
        state="io",
        doubts=() if sure else (Doubt.STATE_INFERRED,),
        claims=(claim,),
        locks=lock.path,
        locked_by=lock.pid,
        holder=holder,
    )


def _io_or_sleep(view: View) -> Condition | None:
    wait, where = view.wait, view.place
    if wait.again or calls.BUILD.on(view.stack.called):
        return _polls_at(view)
    if wait.kind == "sleep":
        for_good = wait.left_s is not None and wait.left_s >= FOR_GOOD_S
        return Condition("stuck-in-user-code", f"is asleep in {where}", for_good=for_good)
    if wait.kind == "select":  # time.sleep() of Python 3.10 and older is a select() without descriptors
        text = f"sleeps or waits in select() at {where}"
        return Condition("stuck-in-user-code", text, doubts=(Doubt.STATE_INFERRED,))
    if wait.kind in ("io", "poll"):
        call = f" ({wait_words(wait)})" if wait_words(wait) else ""
        key = view.store_key if wait.thread.fd_target.startswith("tcp") or view.native() == "store" else None
        if key is not None:
            text = f"waits at {where} for store key {key.words}"
            return Condition("blocking-io", text, state="io", key=key, advice=frozenset({suggestions.STORE_KEY}))
        other_ends = tuple(end for end in wait.ends or () if end.pid != view.process.pid)
        text = f"is blocked in I/O at {where}{call}"
        advice = frozenset() if wait.wanted_lock or wait.thread.locked_by else frozenset({suggestions.CONNECTION})
        if wait.thread.locked_by == view.process.pid:
            text = f"waits at {where} for a lock that it already holds through another file descriptor{call}"
            advice = frozenset({suggestions.OWN_FILE_LOCK})
        return Condition(
            "blocking-io",
            text,
            state="io",
            locks=wait.wanted_lock,
            locked_by=wait.thread.locked_by,
            holder=wait.lock_holder,
            ends=other_ends,
            advice=advice,
        )
    return None


def _polls_at(view: View) -> Condition:
    poll, where = view.poll, view.place
    if calls.BUILD.on(view.stack.called):
        file = view.thread.lock_file if view.thread is not None else ""
        text = f"waits at {where} for another process to build a C++ extension: the lock file {file or 'of that build'}"
        text += " is still there"
        return Condition(
            "stuck-in-user-code",
            text,
            doubts=(Doubt.MAY_END,),
            advice=frozenset({suggestions.BUILD_LOCK}),
        )
    if poll is None:
        does = "keeps retrying a file lock" if calls.FILE_LOCK.on(view.stack.called) else "wakes up and sleeps again"
        return Condition("stuck-in-user-code", f"{does} at {where}", doubts=(Doubt.MAY_END,))
    claim = view.stack_claim(f"its loop reads {poll.words}")
    if poll.of == "attempt":
        text = f"retries {poll.words} in a loop, sleeping at {where} between attempts"
        return Condition(
            "stuck-in-user-code",
            text,
            claims=(claim,),
            poll=poll,
            advice=frozenset({suggestions.ATTEMPTS}),
        )
    text = f"polls at {where}: {poll.words}"
    doubts = () if poll.of == "process" else (Doubt.MAY_END,)
    advice = frozenset({suggestions.LOCK_FILE if poll.removal else suggestions.POLLS})
    return Condition("stuck-in-user-code", text, doubts=doubts, claims=(claim,), poll=poll, advice=advice)


def _unexplained(view: View) -> Condition:
    inner = view.stack.called
    if view.user_frame is None and not inner:
        text = "has no stack that shows what it does"
        return Condition("missing-from-collective", text, doubts=(Doubt.STATE_UNKNOWN,))
    called = f" inside {fr.short(inner[0].function)} ({fr.basename(inner[0].file)})" if inner else ""
    if calls.RPC.on(view.stack.called):
        text = f"waits at {view.place} for another rank to answer a remote call"
        return Condition("stuck-in-user-code", text, doubts=(Doubt.MAY_END,))
    text = f"is stuck at {view.place}{called}"
    return Condition("stuck-in-user-code", text, doubts=(Doubt.STATE_INFERRED,))
