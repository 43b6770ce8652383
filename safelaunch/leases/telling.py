"""Who has the GPUs that somebody wants, in words."""

from __future__ import annotations

import time
from collections.abc import Collection

from safelaunch.leases.claims import Claim
from safelaunch.leases.holder import Holder


def refusal(claim: Claim) -> str:
    """Why the GPUs are not to be had, and who has them."""
    return f"{what(claim)}: not to be had now.\n{table(claim)}"


def what(claim: Claim) -> str:
    """What is wanted, and where that is said."""
    wish = claim.terms.wish
    if wish.count == len(wish.candidates):
        which = ", ".join(gpu.label for gpu in wish.candidates)
        return f"GPU{'s' * (wish.count != 1)} {which} ({wish.origin})"
    return f"{wish.count} of {len(wish.candidates)} GPUs ({wish.origin})"


def table(claim: Claim, ours: Collection[int] | None = None) -> str:
    """One line a GPU: free, or who holds it, or who uses it without a lease.

    With ``ours``, the pids of our own jobs, only what others have; empty where that is nothing.
    """
    terms, attempt = claim.terms, claim.last
    used = claim.survey.users(terms.wish.candidates, terms.most_unleased_bytes)
    lines = []
    for gpu in terms.wish.candidates:
        holder = attempt.held.get(gpu.uuid)
        if ours is not None and (holder.pid in ours if holder is not None else gpu.uuid not in used):
            continue
        state = told(holder) if holder is not None else used.get(gpu.uuid, "free")
        lines.append(f"  GPU {gpu.label:<4} {state}")
        if holder is None and gpu.uuid in used:
            seen = claim.survey.seen(gpu.uuid)
            lines += [
                f"           pid {user.pid} ({user.user}) since {moment(user.since_unix_s)}: {user.command[:80]}"
                for user in seen
            ]
    if attempt.ahead is not None:
        lines.append(f"  before this job any of them is {told(attempt.ahead)}")
    return "\n".join(lines)


def told(holder: Holder) -> str:
    """``leased by pid 4711 (alice) since 12:03:09: train.py``."""
    pid = f"pid {holder.pid} " if holder.pid else ""
    who = f"{pid}({holder.user}) since {moment(holder.since_unix_s)}"
    command = f": {holder.command[:80]}" if holder.command else ""
    if holder.by == "waiter":
        return f"waited for by {who}{command}"
    if holder.by == "ranks":
        return f"still held by ranks of a run whose supervisor is gone, {who}{command}"
    return f"leased by {who}{command}"


def moment(unix_s: float) -> str:
    """A time of today; of another day with its date."""
    if not unix_s:
        return "?"
    then, now = time.localtime(unix_s), time.localtime()
    same_day = (then.tm_year, then.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", then)
