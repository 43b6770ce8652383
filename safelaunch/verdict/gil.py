"""Threads that hold the GIL without running Python code."""

from __future__ import annotations

from safelaunch.model import Thread
from safelaunch.stacks import calls
from safelaunch.stacks import frames as fr
from safelaunch.stacks.kernel import kernel_wait, wait_words
from safelaunch.verdict.conditions import Condition
from safelaunch.verdict.doubts import Doubt
from safelaunch.verdict.thread_view import View


def gil_condition(view: View) -> Condition | None:
    """Returns the condition if the GIL is held: its test failed, or one thread always owned it at one place.

    A Python loop gives it up every few milliseconds, so the worker server responds. A thread that waits for peers with
    the GIL held isn't at fault.
    """
    rank = view.rank
    failed = rank.gil.ping is True and rank.gil.python is False
    owner = _steady_owner(view)
    if rank.gil.python is True or not (failed or owner):
        return None
    shown = (
        (view.kernel_claim("its worker server responds, but the handlers that need the GIL do not"),) if failed else ()
    )
    if owner is None:
        samples = [s for s in view.process.stacks if not s.native]
        if any(t.owns_gil for s in samples for t in s.threads):
            return None  # owned by a thread that moves: busy, not stuck
        text = "holds the GIL in native code; no stack could be read"
        doubts = (Doubt.STATE_INFERRED,)
        return Condition("gil-held", text, None, view.process.pid, doubts=doubts, claims=shown)
    stack = view.stack_of(owner)
    if calls.torch_wait(stack) is not None:
        return None
    wait = kernel_wait(view.process, owner.os_tid)
    if not failed and (wait.busy or wait.kind in ("running", "unknown")):
        return None
    user_frame = stack.user_frame
    which = "" if owner is view.thread else f" in thread {owner.name or owner.os_tid!r}"
    how = f" ({wait_words(wait)})" if wait_words(wait) else ""
    return Condition(
        "gil-held",
        f"holds the GIL in native code called from {fr.place(user_frame)}{which}{how}",
        user_frame,
        view.process.pid,
        doubts=() if failed else (Doubt.STATE_INFERRED,),
        claims=(*shown, view.stack_claim(f"the thread that owns the GIL is at {fr.place(user_frame)}")),
    )


def _steady_owner(view: View) -> Thread | None:
    samples = [s for s in view.process.stacks if not s.native]
    owners = [next((t for t in s.threads if t.owns_gil), None) for s in samples]
    if not owners or any(o is None for o in owners):
        return None
    places = {(o.os_tid, o.frames[:1]) for o in owners if o is not None}
    return owners[-1] if len(places) == 1 else None
