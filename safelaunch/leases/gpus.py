"""Leases GPUs for a job and, if requested, waits until they are free."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.leases.choose import GpuRequest, Inventory, LeasableGpu, users_of
from safelaunch.leases.holder import LeaseHolder, User, holder_words, lease_words, look, moment
from safelaunch.leases.lease import Lease
from safelaunch.leases.queue import Ticket
from safelaunch.leases.store import LeaseAttempt, LeaseStore
from safelaunch.system.errors import InterruptedWait, ResourceError

FRESH_S = 2.0  # greatest age of NVML's answer in a decision
LATER_S = 30.0  # until the next question to a driver that didn't answer


@dataclass(frozen=True, slots=True)
class Taken:
    lease: Lease
    gpus: tuple[LeasableGpu, ...]
    notes: tuple[str, ...] = ()

    @property
    def visible(self) -> str:
        return ",".join(gpu.uuid for gpu in self.gpus)


class Survey:
    """NVML's last report about the GPUs, queried again when it is outdated.

    Args:
        query: Queries NVML; returns None until the driver responds.
    """

    def __init__(self, found: Inventory, query: Callable[[], Inventory | None], clock: Callable[[], float]) -> None:
        self.found = found
        self._query = query
        self._clock = clock
        self._old_s = clock() + FRESH_S

    def refresh(self) -> bool:
        """Queries NVML again if its last answer is too old; returns False if it hasn't responded yet.

        If the new query fails, the old answer stays.
        """
        if self._clock() > self._old_s:
            inventory = self._query()
            if inventory is None:
                return False
            # A slow driver costs 10 s: ask it less often.
            self._old_s = self._clock() + (FRESH_S if inventory.gpus else LATER_S)
            if inventory.gpus:
                self.found = inventory
        return True

    def outdated(self) -> None:
        self._old_s = float("-inf")

    def users(self, gpus: Sequence[LeasableGpu]) -> dict[str, str]:
        """Returns, by UUID, how each GPU that isn't idle is used; ignores whether it is leased."""
        now = {gpu.uuid: gpu for gpu in self.found.gpus}
        used = {gpu.uuid: users_of(now.get(gpu.uuid, gpu)) for gpu in gpus}
        return {uuid: use for uuid, use in used.items() if use}

    def seen(self, uuid: str) -> list[User]:
        pids = [process.pid for gpu in self.found.gpus if gpu.uuid == uuid for process in gpu.processes]
        return [user for pid in pids if (user := look(pid)).command]


class LeaseRequest:
    """A request for GPUs, tried until it succeeds or is given up.

    Until ``queue`` is called, all processes in the queue come first. ``last`` is the result of the last attempt.

    Args:
        about: The process that makes the request.
    """

    def __init__(self, store: LeaseStore, wish: GpuRequest, about: LeaseHolder, survey: Survey) -> None:
        self.wish = wish
        self.about = about
        self.survey = survey
        self.last = LeaseAttempt(None)
        self._store = store
        self._ticket: Ticket | None = None

    def advance(self) -> Taken | None:
        """Leases the GPUs if they are free and it is this request's turn, else returns None.

        Queries NVML again (at most 10 s) if its last answer is too old.
        """
        wish = self.wish
        leases_let_us = self.last.ahead is None and len(wish.candidates) - len(self.last.held) >= wish.count
        if leases_let_us and not self.survey.refresh():
            return None
        self.last = self._store.attempt(self._keys, self._pick, self.about, self._ticket)
        if self.last.lease is None:
            return None
        self._ticket = None
        taken = set(self.last.lease.keys)
        gpus = tuple(gpu for gpu in wish.candidates if gpu.uuid in taken)
        uses = self.survey.users(gpus)
        notes = tuple(f"GPU {gpu.label} is {uses[gpu.uuid]}" for gpu in gpus if gpu.uuid in uses)
        return Taken(self.last.lease, gpus, notes)

    def queue(self) -> None:
        """Joins the queue. A later request for a different number of the same GPUs keeps its place."""
        if self._ticket is None:
            self._ticket = self._store.queue(self._keys, self.wish.count, self.about)

    def cancel(self) -> None:
        if self._ticket is not None:
            self._store.leave(self._ticket)
            self._ticket = None

    def free(self) -> int | None:
        """Returns how many GPUs are free now: 0 if another request comes first, None until the driver responds."""
        self.last = self._store.attempt(self._keys, lambda held: None, self.about, self._ticket)
        free = [gpu for gpu in self.wish.candidates if gpu.uuid not in self.last.held]
        if self.last.ahead is not None or not free:
            return 0
        if not self.survey.refresh():
            return None
        return len(free) - len(self.survey.users(free))

    def foresee(self) -> tuple[LeasableGpu, ...] | None:
        """Returns the GPUs that ``advance`` would lease now if the queue were empty; None if too few are free."""
        chosen = self._pick(self._store.look(self._keys))
        return tuple(gpu for gpu in self.wish.candidates if gpu.uuid in chosen) if chosen is not None else None

    @property
    def _keys(self) -> list[str]:
        return [gpu.uuid for gpu in self.wish.candidates]

    @property
    def _tolerates_unleased_use(self) -> bool:
        # The user named these GPUs: unleased use gives only a note.
        return self.wish.keep and self.wish.origin.startswith("CUDA_VISIBLE_DEVICES")

    def _pick(self, held: Mapping[str, LeaseHolder]) -> list[str] | None:
        wish = self.wish
        used = {} if self._tolerates_unleased_use else self.survey.users(wish.candidates)
        free = [gpu for gpu in wish.candidates if gpu.uuid not in held and gpu.uuid not in used]
        return [gpu.uuid for gpu in free[: wish.count]] if len(free) >= wish.count else None


# --- messages: which processes hold the requested GPUs ----------------------------------------------------------------


def refusal(claim: LeaseRequest) -> str:
    return f"{what(claim)}: not available now.\n{table(claim)}"


def what(claim: LeaseRequest) -> str:
    wish = claim.wish
    if wish.count == len(wish.candidates):
        which = ", ".join(gpu.label for gpu in wish.candidates)
        return f"GPU{'s' * (wish.count != 1)} {which} ({wish.origin})"
    return f"{wish.count} of {len(wish.candidates)} GPUs ({wish.origin})"


def table(claim: LeaseRequest, ours: Collection[int] | None = None) -> str:
    """Returns a line per GPU: free, its holder, or processes that use it without a lease.

    Args:
        ours: Pids of our jobs. If given, leaves out their GPUs and free ones.
    """
    attempt = claim.last
    used = claim.survey.users(claim.wish.candidates)
    lines = []
    for gpu in claim.wish.candidates:
        holder = attempt.held.get(gpu.uuid)
        if ours is not None and (_is_one_of(holder, ours) if holder is not None else gpu.uuid not in used):
            continue
        state = lease_words(holder) if holder is not None else used.get(gpu.uuid, "free")
        lines.append(f"  GPU {gpu.label:<4} {state}")
        if holder is None and gpu.uuid in used:
            users = claim.survey.seen(gpu.uuid)
            lines += [
                f"           pid {user.pid} ({user.user}) since {moment(user.since_unix_s)}: {user.command[:80]}"
                for user in users
            ]
    if attempt.ahead is not None:
        lines.append(f"  ahead of this job in the queue: {holder_words(attempt.ahead)}")
    return "\n".join(lines)


def _is_one_of(holder: LeaseHolder, ours: Collection[int]) -> bool:
    # Any user can write our pid into a file, but not own it as we do.
    return holder.pid in ours and holder.uid == os.getuid()


OUR_TURN_S = 0.1  # between the first waiter's attempts
ASK_AGAIN_S = 0.3


@dataclass(frozen=True, slots=True)
class Patience:
    wait: bool = False
    timeout_s: float | None = None  # None: unlimited
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def take(claim: LeaseRequest, patience: Patience) -> Taken:
    """Leases the GPUs that ``claim`` requests, all or none. Raises ResourceError if they aren't available in time.

    Waiting requests are served in order of arrival, before requests that don't wait.
    """
    taken = claim.advance()
    if taken is None and patience.wait:
        taken = _wait(claim, patience)
    if taken is None:
        again = "Wait longer with --wait=DURATION" if patience.wait else "Wait for them with --wait"
        remedy = f"{again}, start without GPUs (--gpus none), or share them as under torchrun (--no-lease)."
        raise ResourceError(refusal(claim), remedy)
    return taken


def _wait(claim: LeaseRequest, patience: Patience) -> Taken | None:
    deadline = patience.clock() + patience.timeout_s if patience.timeout_s is not None else None
    try:
        claim.queue()
        patience.say(f"waiting for {what(claim)}; Ctrl-C gives up\n{table(claim)}")
        while deadline is None or patience.clock() < deadline:
            patience.sleep(OUR_TURN_S if claim.last.ahead is None else ASK_AGAIN_S)
            taken = claim.advance()
            if taken is not None:
                return taken
    except KeyboardInterrupt:
        raise InterruptedWait("stopped waiting for GPUs; nothing was started.") from None
    finally:
        claim.cancel()
    return None
