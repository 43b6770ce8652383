"""Does native code hold the GIL and not return?"""

from __future__ import annotations

from safelaunch.diagnose import calls
from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.conditions import Condition, View
from safelaunch.diagnose.kernel import kernel_wait, wait_words
from safelaunch.model import Claim, RankEvidence, Thread


def gil_condition(rank: RankEvidence, view: View) -> Condition | None:
    """The GIL test failed, or the same thread owned the GIL at the same place in every sample without running.

    A Python loop that spins owns the GIL in every sample too, but gives it up every few milliseconds: the Python
    handler of the worker server then answers. A thread that waits for peers with the GIL held is not at fault: it
    gets on as soon as they come.
    """
    failed = rank.gil.ping is True and rank.gil.python is False
    owner = _steady_owner(view)
    if rank.gil.python is True or not (failed or owner):
        return None
    if owner is None:
        samples = [s for s in view.process.stacks if not s.native]
        if any(t.owns_gil for s in samples for t in s.threads):
            return None  # owned, but moving: busy, not held
        text = "holds the GIL in native code; no stack could be read"
        return Condition("gil-held", text, None, view.process.pid, confidence="medium", claims=_claims(view, True))
    frames = fr.python_frames(owner)
    if calls.torch_wait(frames, rank.code_roots) is not None:
        return None
    wait = kernel_wait(view.process, owner.os_tid)
    if not failed and (wait.busy or wait.kind in ("running", "unknown")):
        return None
    mine = fr.user_frame(frames, rank.code_roots)
    which = "" if owner is view.main else f" in thread {owner.name or owner.os_tid!r}"
    how = f" ({wait_words(wait)})" if wait_words(wait) else ""
    return Condition(
        "gil-held",
        f"holds the GIL in native code called from {fr.place(mine)}{which}{how}",
        mine,
        view.process.pid,
        confidence="high" if failed else "medium",
        claims=(*_claims(view, failed), view.stack_claim(f"the thread that owns the GIL is at {fr.place(mine)}")),
    )


def _claims(view: View, failed: bool) -> tuple[Claim, ...]:
    if not failed:
        return ()
    text = "its worker server answers, and what needs the GIL does not"
    return (Claim(text, f"{view.folder}/proc.json"),)


def _steady_owner(view: View) -> Thread | None:
    """The thread that owned the GIL in every sample, at the same place in all."""
    samples = [s for s in view.process.stacks if not s.native]
    owners = [next((t for t in s.threads if t.owns_gil), None) for s in samples]
    if not owners or any(o is None for o in owners):
        return None
    places = {(o.os_tid, o.frames[:1]) for o in owners if o is not None}
    return owners[-1] if len(places) == 1 else None
