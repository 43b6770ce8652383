"""Taking GPUs: what is free is leased, what is not is waited for, and who has it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from safelaunch.errors import InterruptedWait, ResourceError
from safelaunch.leases.choose import Gpu, Inventory, Wish, nearest, users_of
from safelaunch.leases.holder import Holder
from safelaunch.leases.store import Attempt, Lease, Store
from safelaunch.leases.tickets import Ticket
from safelaunch.leases.users import look

MOST_UNLEASED_BYTES = 256 << 20
FRESH_S = 2.0  # how old NVML's answer may be that a decision rests on
OUR_TURN_S = 0.1  # between two attempts of the first in the queue
LATER_S = 0.3


@dataclass(frozen=True, slots=True)
class Taken:
    """GPUs that are ours. ``visible``: for CUDA_VISIBLE_DEVICES. ``notes``: what a user of them should know."""

    lease: Lease
    gpus: tuple[Gpu, ...]
    notes: tuple[str, ...] = ()

    @property
    def visible(self) -> str:
        return ",".join(gpu.uuid for gpu in self.gpus)


@dataclass(frozen=True, slots=True)
class Patience:
    """Whether to wait, for how long at most (None: for ever), and where to say so."""

    wait: bool = False
    timeout_s: float | None = None
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Terms:
    """What is wanted, by whom, and when a GPU without a lease counts as used.

    ``tolerant``: a use without a lease is only noted; the user has named these very GPUs in CUDA_VISIBLE_DEVICES.
    """

    wish: Wish
    about: Holder
    most_unleased_bytes: int = MOST_UNLEASED_BYTES

    @property
    def tolerant(self) -> bool:
        return self.wish.keep and self.wish.origin.startswith("CUDA_VISIBLE_DEVICES")

    @property
    def keys(self) -> list[str]:
        return [gpu.uuid for gpu in self.wish.candidates]


class Survey:
    """NVML's answer, asked for again when a decision needs a younger one. The first is there already."""

    def __init__(self, found: Inventory, query: Callable[[], Inventory], clock: Callable[[], float]) -> None:
        self.found = found
        self._query = query
        self._clock = clock
        self._at_s = clock()

    def refresh(self) -> None:
        """Asks if the last answer is older than ``FRESH_S``; one that fails leaves the last one standing."""
        if self._clock() - self._at_s > FRESH_S:
            found = self._query()
            self._at_s = self._clock()  # a slow driver is asked no more often for it
            if found.gpus:
                self.found = found

    def users(self, gpus: Sequence[Gpu], most_bytes: int) -> dict[str, str]:
        """UUID → how it is used, as NVML saw it; to be held against the leases."""
        now = {gpu.uuid: gpu for gpu in self.found.gpus}
        used = {gpu.uuid: users_of(now.get(gpu.uuid, gpu), most_bytes) for gpu in gpus}
        return {uuid: use for uuid, use in used.items() if use}

    def seen(self, uuid: str) -> list[str]:
        """The processes on one GPU, as far as they can be seen from here."""
        pids = [process.pid for gpu in self.found.gpus if gpu.uuid == uuid for process in gpu.processes]
        users = [look(pid) for pid in pids]
        return [
            f"pid {user.pid} ({user.user}) since {moment(user.since_unix_s)}: {user.command[:80]}"
            for user in users
            if user.command
        ]


def take(store: Store, terms: Terms, survey: Survey, patience: Patience) -> Taken:
    """The GPUs that ``terms`` ask for, leased. Raises ResourceError when they are not to be had (in time).

    All of them or none; who waits is served in the order of arrival, and who does not wait comes after all who do.
    """
    attempt = _attempt(store, terms, survey, None)
    if attempt.lease is None and patience.wait:
        attempt = _wait(store, terms, survey, patience, attempt)
    if attempt.lease is None:
        raise ResourceError(refusal(terms, survey, attempt), _remedy(patience))
    taken = set(attempt.lease.keys)
    gpus = tuple(gpu for gpu in terms.wish.candidates if gpu.uuid in taken)
    uses = survey.users(gpus, terms.most_unleased_bytes)
    notes = tuple(f"GPU {gpu.label} is {uses[gpu.uuid]}" for gpu in gpus if gpu.uuid in uses)
    return Taken(attempt.lease, gpus, notes)


def would_take(store: Store, terms: Terms, survey: Survey) -> tuple[Gpu, ...] | None:
    """What ``take`` would take now, without taking it."""
    chosen = _pick(terms, survey, store.look(terms.keys))
    return tuple(gpu for gpu in terms.wish.candidates if gpu.uuid in chosen) if chosen is not None else None


def _attempt(store: Store, terms: Terms, survey: Survey, ticket: Ticket | None) -> Attempt:
    return store.attempt(terms.keys, lambda held: _pick(terms, survey, held), terms.about, ticket)


def _pick(terms: Terms, survey: Survey, held: Mapping[str, Holder]) -> list[str] | None:
    used = {} if terms.tolerant else survey.users(terms.wish.candidates, terms.most_unleased_bytes)
    free = [gpu for gpu in terms.wish.candidates if gpu.uuid not in held and gpu.uuid not in used]
    chosen = nearest(free, terms.wish.count, survey.found.distances)
    return [gpu.uuid for gpu in chosen] if chosen is not None else None


# --- waiting ----------------------------------------------------------------------------------------------------------


def _wait(store: Store, terms: Terms, survey: Survey, patience: Patience, first: Attempt) -> Attempt:
    deadline = patience.clock() + patience.timeout_s if patience.timeout_s is not None else None
    attempt = first
    with _place(store, terms) as ticket:
        patience.say(f"waiting for {_what(terms)}; Ctrl-C gives up\n{table(terms, survey, attempt)}")
        while attempt.lease is None:
            if deadline is not None and patience.clock() >= deadline:
                return attempt
            patience.sleep(OUR_TURN_S if attempt.ahead is None else LATER_S)
            if attempt.ahead is None and len(terms.wish.candidates) - len(attempt.held) >= terms.wish.count:
                survey.refresh()  # leases would let us: what the driver says decides
            attempt = _attempt(store, terms, survey, ticket)
    return attempt


@contextmanager
def _place(store: Store, terms: Terms) -> Iterator[Ticket]:
    """A place in the queue, given up on every way out; who is killed gives it up as well."""
    ticket = store.queue(terms.keys, terms.wish.count, terms.about)
    try:
        yield ticket
    except KeyboardInterrupt:
        raise InterruptedWait("not waiting for GPUs any longer; nothing was started.") from None
    finally:
        store.leave(ticket)


# --- telling ----------------------------------------------------------------------------------------------------------


def refusal(terms: Terms, survey: Survey, attempt: Attempt) -> str:
    """Why the GPUs are not to be had, and who has them."""
    return f"{_what(terms)}: not to be had now.\n{table(terms, survey, attempt)}"


def _what(terms: Terms) -> str:
    wish = terms.wish
    if wish.count == len(wish.candidates):
        which = ", ".join(gpu.label for gpu in wish.candidates)
        return f"GPU{'s' * (wish.count != 1)} {which} ({wish.origin})"
    return f"{wish.count} of {len(wish.candidates)} GPUs ({wish.origin})"


def _remedy(patience: Patience) -> str:
    again = "Wait longer" if patience.wait else "--wait waits for them"
    return f"{again}; --gpus none starts without GPUs, --no-lease shares them as torchrun would."


def table(terms: Terms, survey: Survey, attempt: Attempt) -> str:
    """One line a GPU: free, or who holds it, or who uses it without a lease."""
    used = survey.users(terms.wish.candidates, terms.most_unleased_bytes)
    lines = []
    for gpu in terms.wish.candidates:
        holder = attempt.held.get(gpu.uuid)
        state = told(holder) if holder is not None else used.get(gpu.uuid, "free")
        lines.append(f"  GPU {gpu.label:<4} {state}")
        if holder is None and gpu.uuid in used:
            lines += [f"           {line}" for line in survey.seen(gpu.uuid)]
    if attempt.ahead is not None:
        lines.append(f"  before this job any of them is {told(attempt.ahead)}")
    return "\n".join(lines)


def told(holder: Holder) -> str:
    """``leased by pid 4711 (alice) since 12:03:09: train.py``; times of another day with their date."""
    pid = f"pid {holder.pid} " if holder.pid else ""
    who = f"{pid}({holder.user}) since {moment(holder.since_unix_s)}"
    command = f": {holder.command[:80]}" if holder.command else ""
    if holder.by == "waiter":
        return f"waited for by {who}{command}"
    if holder.by == "ranks":
        return f"still held by ranks of a run whose supervisor is gone, {who}{command}"
    return f"leased by {who}{command}"


def moment(unix_s: float) -> str:
    """A time of today, or with its date."""
    if not unix_s:
        return "?"
    then, now = time.localtime(unix_s), time.localtime()
    same_day = (then.tm_year, then.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", then)
