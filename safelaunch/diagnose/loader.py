"""A main thread that waits for its DataLoader: which worker keeps it waiting?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from safelaunch.diagnose import calls
from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.conditions import Condition, View
from safelaunch.diagnose.kernel import kernel_wait
from safelaunch.diagnose.threads import process_condition
from safelaunch.model import Confidence

_WORDS = {
    "rank-stopped": 0,
    "rank-exited": 1,
    "uninterruptible-io": 2,
    "lock-deadlock": 3,
    "blocking-io": 4,
    "stuck-in-user-code": 5,
    "busy-loop": 6,
}
_FORK_NOTE = "; a lock that another thread held when the worker was forked is never released in it"


def loader_condition(view: View, children: Sequence[View]) -> Condition:
    """``data-loading``, with the worker that is stuck as the process at fault.

    A worker that waits for the next index owes nobody anything. Of the others, one that cannot run (stopped, dead,
    D state) is named before one that is blocked, and that before one that computes, which may only be slow.
    """
    workers = [v for v in children if _is_worker(v)]
    held = [(v, process_condition(v)) for v in workers if not calls.worker_idle(v.frames) or _cannot_run(v)]
    claims = [view.stack_claim(f"its main thread waits for a DataLoader at {fr.place(view.user_frame)}")]
    held = [(v, c) for v, c in held if v.frames or _cannot_run(v)]
    if not held:
        seen = f"none of its {len(workers)} workers that were seen has work" if workers else "no worker of it was seen"
        text = f"waits for its DataLoader at {fr.place(view.user_frame)}; {seen}"
        return Condition("data-loading", text, view.user_frame, view.process.pid, "main", "medium", tuple(claims))
    held.sort(key=lambda pair: (_WORDS.get(pair[1].cause, 9), pair[0].process.pid))
    worker, condition = held[0]
    reason = f"waits for its DataLoader; worker {worker.process.pid} {condition.reason}"
    if condition.lock is not None:
        reason += _FORK_NOTE
    claims = [*condition.claims, *claims]
    claims += [v.stack_claim(f"DataLoader worker {v.process.pid} {c.reason}") for v, c in held[1:4]]
    idle = len(workers) - len(held)
    if idle:
        claims.append(view.stack_claim(f"{idle} other worker{'s' * (idle > 1)} wait for the next index"))
    sure: Confidence = "medium" if condition.cause == "busy-loop" else "high"
    return replace(
        condition,
        cause="data-loading",
        reason=reason,
        frame=condition.frame or view.user_frame,
        process=f"dataloader worker (pid {worker.process.pid})",
        pid=worker.process.pid,
        confidence=sure,
        claims=tuple(claims),
    )


def _is_worker(view: View) -> bool:
    return view.process.role == "dataloader worker" or calls.is_loader_worker(view.frames)


def _cannot_run(view: View) -> bool:
    return kernel_wait(view.process).kind in ("stopped", "dead", "disk")
