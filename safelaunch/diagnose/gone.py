"""Ranks that have ended or raised: which of them is a cause, and which a consequence?"""

from __future__ import annotations

import re
import signal

from safelaunch.diagnose import frames as fr
from safelaunch.diagnose.conditions import Condition, View
from safelaunch.model import Claim, RankEvidence, RankException

FAILURES = ("rank-exception", "rank-killed", "rank-exited")
GONE_CAUSES = (*FAILURES, "uneven-batches")

# What a rank reports when a peer has gone or does not come: transport and store errors, group timeouts.
_CONSEQUENCE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|closed by (?:the )?(?:remote )?peer|reset by peer"
    r"|broken pipe|remote process (?:exited|has)|socket (?:was )?closed|network error|failed to connect"
    r"|no route to host|nccl (?:communicator was aborted|error.*remote)|ncclremoteerror|ncclsystemerror"
    r"|timed out waiting|timed out after|wait timeout|watchdog caught collective"
    r"|\btimeout\b.*(?:recv|send|rank|store|barrier)"
    r"|rank \d+ (?:successfully reached|failed to (?:pass|reach|reply))|ranks? .* failed to pass"
    r"|another rank|other ranks? (?:failed|exited)|store.*(?:unavailable|connection)|failed to recv",
    re.IGNORECASE | re.DOTALL,
)
_TIMEOUT = re.compile(r"timed? ?out|failed to pass monitoredbarrier|timeout", re.IGNORECASE)
_WATCHDOG = re.compile(r"watchdog caught collective operation timeout|watchdog thread terminated", re.IGNORECASE)
_DIST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError", "BrokenPipeError")


def is_consequence(exception: RankException) -> bool:
    """The message blames a peer: this rank reports somebody else's death or absence.

    Only an error that came out of torch's communication counts; a user's own ``requests`` call may well have its
    connection reset on its own account.
    """
    kind = exception.type.rsplit(".", 1)[-1]
    inner = [f for f in exception.frames[:6] if "/torch/" in fr.normal(f.file)]
    if kind in ("DistStoreError", "DistNetworkError"):
        return True
    if kind not in _DIST_TYPES and not inner and kind not in ("RuntimeError", "DistError"):
        return False
    if kind in ("ConnectionResetError", "BrokenPipeError") and not inner:
        return False
    return _CONSEQUENCE.search(exception.message) is not None


def is_timeout(exception: RankException) -> bool:
    """The communication gave up waiting: what remains of a hang whose time ran out."""
    return is_consequence(exception) and _TIMEOUT.search(exception.message) is not None


def one_line(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def signal_name(returncode: int) -> str:
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def ended_by_others(rank: RankEvidence) -> bool:
    """Ended by the launcher after another rank had failed, or aborted because a collective's time ran out: no cause."""
    if rank.exit is None:
        return False
    aborted = rank.exit.returncode == -signal.SIGABRT
    return not rank.exit.before_close or (aborted and _WATCHDOG.search(rank.log_tail) is not None)


def failed_at(rank: RankEvidence) -> float:
    """When this rank failed (CLOCK_REALTIME): its exception where it left one, else when the launcher noticed."""
    if rank.exception is not None:
        return rank.exception.time_unix_s
    return rank.exit.time_unix_s if rank.exit is not None else float("inf")


def gone_condition(rank: RankEvidence, view: View | None) -> Condition | None:
    """A rank that raised, was killed or exited, on its own account; None for a live one and for consequences."""
    if rank.exception is not None and is_consequence(rank.exception):
        return None
    if rank.exception is not None and rank.exception.type.rsplit(".", 1)[-1] != "SystemExit":
        exception = rank.exception
        frame = fr.user_frame(exception.frames, rank.code_roots)
        text = f"raised {exception.type}: {one_line(exception.message)}" + (f" at {fr.place(frame)}" if frame else "")
        claim = Claim(f"first exception: {exception.type}", f"ranks/{rank.rank}/exception.json")
        return Condition("rank-exception", text, frame, rank.pid, claims=(claim,))
    if rank.exit is None:
        dead = view is not None and bool(view.process.states) and view.process.states[-1].state in "ZX"
        text = "has ended and nobody has reaped it; its exit status is not known"
        claim = Claim("state Z", f"ranks/{rank.rank}/proc.json")
        return Condition("rank-exited", text, None, rank.pid, confidence="medium", claims=(claim,)) if dead else None
    if ended_by_others(rank):
        return None
    return _exit_condition(rank)


def _exit_condition(rank: RankEvidence) -> Condition:
    assert rank.exit is not None
    code = rank.exit.returncode
    claim = Claim(f"exit status {code}, before the launcher stopped the others", "launch.json")
    frame = fr.user_frame(rank.exception.frames, rank.code_roots) if rank.exception else None
    if code < 0:
        said = _abort_words(rank)
        text = f"was killed by {signal_name(code)}{said}"
        log = (Claim("the end of its output", f"ranks/{rank.rank}/log_tail.txt"),) if said else ()
        return Condition("rank-killed", text, frame, rank.pid, claims=(claim, *log))
    if code > 0:
        where = f" at {fr.place(frame)}" if frame else ""
        return Condition("rank-exited", f"exited with code {code}{where}", frame, rank.pid, claims=(claim,))
    text = "has left the training loop: it exited cleanly (code 0)"
    return Condition("uneven-batches", text, frame, rank.pid, claims=(claim,))


def _abort_words(rank: RankEvidence) -> str:
    """The last line of output that a C++ abort leaves (``what():``, ``EnforceNotMet``), shortened."""
    for line in reversed(rank.log_tail.splitlines()[-60:]):
        if re.search(r"what\(\):|EnforceNotMet|Fatal Python error|terminate called", line):
            return f"; its last words: {one_line(line)}"
    return ""
