"""From a main thread that waits for a lock or a child to the thread or child that keeps it waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from safelaunch.diagnose import calls
from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.conditions import Condition, View, thread_condition
from safelaunch.diagnose.kernel import kernel_wait
from safelaunch.model import Claim, Thread

_HELPERS = ("resource tracker", "forkserver")  # roles, as capture/proc.py tells them


def process_condition(view: View, children: Sequence[View] = ()) -> Condition:
    """What keeps the process where it is: its main thread's condition, followed through the locks of the process.

    A main thread that waits for a child process, or for what one sends, is followed into it where one child alone runs
    user code.
    """
    own = thread_condition(view, view.main)
    if own.lock is not None:
        return _follow(view, own, own.lock, children)
    inner, _ = fr.user_part(view.frames, view.code_roots)
    for_child = calls.waits_for_child(inner) or kernel_wait(view.process).kind == "child"
    if own.cause == "stuck-in-user-code" and for_child and (child := _child(children)):
        return _blame(own, child[1], "", child[0])
    if own.cause == "blocking-io" and calls.waits_for_message(inner):
        return _follow_message(own, children)
    return own


def _follow_message(own: Condition, children: Sequence[View]) -> Condition:
    """Who was to send it? A child that is blocked itself; one asleep is more likely a timer, and one that waits for a
    message has perhaps nothing to do. One that is dead will not send anything, and is told.
    """
    child = _child(children)
    if child is not None and child[1].cause != "stuck-in-user-code" and not _awaits_message(child[0]):
        return replace(_blame(own, child[1], "", child[0]), confidence="medium")
    dead = [view.process.pid for view in children if kernel_wait(view.process).kind == "dead"]
    if not dead:
        return own
    words = f"its child process {dead[0]} has" if len(dead) == 1 else f"{len(dead)} child processes of its have"
    claims = tuple(Claim(f"child process {pid}: state Z", f"{children[0].folder}/proc.json") for pid in dead[:4])
    return replace(own, reason=f"{own.reason}; {words} ended and not been reaped", claims=own.claims + claims)


def _awaits_message(view: View) -> bool:
    return calls.waits_for_message(fr.user_part(view.frames, view.code_roots)[0])


def _follow(view: View, own: Condition, lock: calls.LockWait, children: Sequence[View]) -> Condition:
    """Who could end the wait?

    A joined thread or a future (``work``) is somebody's work, so whichever single thread (or, with no thread, child)
    still runs user code is what the main thread waits for. A queue or an event (``signal``) is fed by some thread:
    it is followed to one that is blocked, not to one asleep, which is more likely a timer. A plain lock is held by
    somebody we cannot see: the wait itself is the finding, and the other threads are told as evidence. A thread that
    computes may be on its way to end either, so that is told, and less sure.
    """
    others = _others(view)
    waiting = [(t, c) for t, c in others if c.lock is not None]
    claims = tuple(view.stack_claim(f"thread {t.name or t.os_tid!r} {c.reason}") for t, c in others)
    if lock.on == "work":
        if len(others) == 1:
            return _blame(own, others[0][1], others[0][0].name or str(others[0][0].os_tid))
        if waiting and len(waiting) == len(others):
            return replace(waiting[0][1], reason=_deadlock_words(waiting), claims=own.claims + claims)
        if not others and (child := _child(children)):
            return _blame(own, child[1], "", child[0])
    elif lock.on == "signal":
        blocked = [(t, c) for t, c in others if c.cause in ("blocking-io", "uninterruptible-io")]
        if len(blocked) == 1:
            return replace(_blame(own, blocked[0][1], blocked[0][0].name), confidence="medium")
    busy = [f"thread {t.name or t.os_tid!r} {c.reason}" for t, c in others if c.cause == "busy-loop"]
    if busy and not waiting and lock.on != "work":
        reason = f"{own.reason} while {', '.join(busy[:4])}"
        return replace(own, reason=reason, confidence="medium", claims=own.claims + claims)
    reason = own.reason
    if waiting:
        reason += " while " + ", ".join(f"thread {t.name or t.os_tid!r} {c.reason}" for t, c in waiting[:4])
    sure = "high" if waiting else own.confidence
    return replace(own, reason=reason, confidence=sure, claims=own.claims + claims)


def _others(view: View) -> list[tuple[Thread, Condition]]:
    """The other threads that are inside user code; pools that wait for work and library threads are not."""
    found = []
    for thread in view.sample.threads if view.sample else ():
        if thread is view.main or fr.user_frame(fr.python_frames(thread), view.code_roots) is None:
            continue
        found.append((thread, thread_condition(view, thread)))
    return sorted(found, key=lambda pair: pair[0].os_tid or 0)


def _child(children: Sequence[View]) -> tuple[View, Condition] | None:
    """The one child process that is inside user code, when there is exactly one.

    Loader workers serve nobody else, and the helpers of multiprocessing run no code of the user's.
    """
    inside = [
        v
        for v in children
        if v.user_frame is not None and v.process.role not in _HELPERS and not calls.is_loader_worker(v.frames)
    ]
    return (inside[0], process_condition(inside[0])) if len(inside) == 1 else None


def _blame(own: Condition, other: Condition, thread: str, child: View | None = None) -> Condition:
    who = f"child process {child.process.pid}" if child else f"its thread {thread!r}"
    process = f"{child.process.role} (pid {child.process.pid})" if child else own.process
    claims: tuple[Claim, ...] = own.claims + other.claims
    return replace(other, reason=f"{own.reason}; {who} {other.reason}", process=process, claims=claims)


def _deadlock_words(waiting: Sequence[tuple[Thread, Condition]]) -> str:
    parts = [f"thread {t.name or t.os_tid!r} {c.reason}" for t, c in waiting[:4]]
    return "has threads that wait for each other's locks: " + ", ".join(parts)
