"""A claim on GPUs: what is wanted, what the driver says of them, and trying to get them, again and again if need be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from safelaunch.leases.choose import Gpu, Inventory, Wish, nearest, users_of
from safelaunch.leases.holder import Holder
from safelaunch.leases.lease import Lease
from safelaunch.leases.store import Attempt, Store
from safelaunch.leases.tickets import Ticket
from safelaunch.leases.users import User, look

MOST_UNLEASED_BYTES = 256 << 20
FRESH_S = 2.0  # how old NVML's answer may be that a decision rests on
LATER_S = 30.0  # when it is asked again that has not answered


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
    """NVML's answer, asked for again when a decision needs a younger one. The first is there already.

    ``query`` returns None while the driver has not answered yet, if it does not wait for the answer itself.
    """

    def __init__(self, found: Inventory, query: Callable[[], Inventory | None], clock: Callable[[], float]) -> None:
        self.found = found
        self._query = query
        self._clock = clock
        self._old_s = clock() + FRESH_S

    def refresh(self) -> bool:
        """Asks if the last answer is too old; one that fails leaves the last one standing. False: not answered yet."""
        if self._clock() > self._old_s:
            found = self._query()
            if found is None:
                return False
            # A driver that answered late, or not at all, is left in peace for longer: waiting for it costs 10 s.
            self._old_s = self._clock() + (FRESH_S if found.gpus else LATER_S)
            if found.gpus:
                self.found = found
        return True

    def outdated(self) -> None:
        """Something has changed: what the driver said before does not count any more."""
        self._old_s = float("-inf")

    def users(self, gpus: Sequence[Gpu], most_bytes: int) -> dict[str, str]:
        """UUID → how it is used, as NVML saw it; to be held against the leases."""
        now = {gpu.uuid: gpu for gpu in self.found.gpus}
        used = {gpu.uuid: users_of(now.get(gpu.uuid, gpu), most_bytes) for gpu in gpus}
        return {uuid: use for uuid, use in used.items() if use}

    def seen(self, uuid: str) -> list[User]:
        """The processes on one GPU that can be seen from here."""
        pids = [process.pid for gpu in self.found.gpus if gpu.uuid == uuid for process in gpu.processes]
        return [user for pid in pids if (user := look(pid)).command]


class Claim:
    """A wish that is tried for until it is served or given up. ``last``: what came of the last attempt.

    ``queue`` puts it behind all that wait already; before, it comes after everybody who waits.
    """

    def __init__(self, store: Store, terms: Terms, survey: Survey) -> None:
        self.terms = terms
        self.survey = survey
        self.last = Attempt(None)
        self._store = store
        self._ticket: Ticket | None = None

    def advance(self) -> Taken | None:
        """Takes the GPUs if they are free and it is our turn. Asks NVML anew when that would decide: 10 s at most."""
        wish = self.terms.wish
        leases_let_us = self.last.ahead is None and len(wish.candidates) - len(self.last.held) >= wish.count
        if leases_let_us and not self.survey.refresh():
            return None
        self.last = self._store.attempt(self.terms.keys, self._pick, self.terms.about, self._ticket)
        if self.last.lease is None:
            return None
        self._ticket = None
        taken = set(self.last.lease.keys)
        gpus = tuple(gpu for gpu in wish.candidates if gpu.uuid in taken)
        uses = self.survey.users(gpus, self.terms.most_unleased_bytes)
        notes = tuple(f"GPU {gpu.label} is {uses[gpu.uuid]}" for gpu in gpus if gpu.uuid in uses)
        return Taken(self.last.lease, gpus, notes)

    def queue(self) -> None:
        """From now on first come, first served. Other ``terms`` for the same GPUs keep the place."""
        if self._ticket is None:
            self._ticket = self._store.queue(self.terms.keys, self.terms.wish.count, self.terms.about)

    def cancel(self) -> None:
        """Leaves the queue. Who is killed has left it as well."""
        if self._ticket is not None:
            self._store.leave(self._ticket)
            self._ticket = None

    def free(self) -> int | None:
        """How many are to be had now, none while somebody is before us; None while the driver is being asked."""
        self.last = self._store.attempt(self.terms.keys, lambda held: None, self.terms.about, self._ticket)
        free = [gpu for gpu in self.terms.wish.candidates if gpu.uuid not in self.last.held]
        if self.last.ahead is not None or not free:
            return 0
        if not self.survey.refresh():
            return None
        return len(free) - len(self.survey.users(free, self.terms.most_unleased_bytes))

    def foresee(self) -> tuple[Gpu, ...] | None:
        """What ``advance`` would take now if nobody waited, without taking it."""
        chosen = self._pick(self._store.look(self.terms.keys))
        return tuple(gpu for gpu in self.terms.wish.candidates if gpu.uuid in chosen) if chosen is not None else None

    def _pick(self, held: Mapping[str, Holder]) -> list[str] | None:
        wish = self.terms.wish
        used = {} if self.terms.tolerant else self.survey.users(wish.candidates, self.terms.most_unleased_bytes)
        free = [gpu for gpu in wish.candidates if gpu.uuid not in held and gpu.uuid not in used]
        chosen = nearest(free, wish.count, self.survey.found.distances)
        return [gpu.uuid for gpu in chosen] if chosen is not None else None
