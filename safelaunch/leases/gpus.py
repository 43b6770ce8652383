"""Taking GPUs: one job that wants some and waits for them if it may, or a scheduler that has many jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from safelaunch.errors import InterruptedWait, ResourceError
from safelaunch.leases.choose import Pool, Wish, pool_of
from safelaunch.leases.claims import MOST_UNLEASED_BYTES, Claim, Survey, Taken, Terms
from safelaunch.leases.holder import ourselves
from safelaunch.leases.nvml import Asking, inventory
from safelaunch.leases.store import store_of
from safelaunch.leases.telling import refusal, table, what

OUR_TURN_S = 0.1  # between two attempts of the first in the queue
LATER_S = 0.3


@dataclass(frozen=True, slots=True)
class Patience:
    """Whether to wait, for how long at most (None: for ever), and where to say so."""

    wait: bool = False
    timeout_s: float | None = None
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def take(claim: Claim, patience: Patience) -> Taken:
    """The GPUs that ``claim`` asks for, leased. Raises ResourceError when they are not to be had (in time).

    All of them or none; who waits is served in the order of arrival, and who does not wait comes after all who do.
    """
    taken = claim.advance()
    if taken is None and patience.wait:
        taken = _wait(claim, patience)
    if taken is None:
        again = "Wait longer" if patience.wait else "--wait waits for them"
        remedy = f"{again}; --gpus none starts without GPUs, --no-lease shares them as torchrun would."
        raise ResourceError(refusal(claim), remedy)
    return taken


def _wait(claim: Claim, patience: Patience) -> Taken | None:
    deadline = patience.clock() + patience.timeout_s if patience.timeout_s is not None else None
    try:
        claim.queue()
        patience.say(f"waiting for {what(claim)}; Ctrl-C gives up\n{table(claim)}")
        while deadline is None or patience.clock() < deadline:
            patience.sleep(OUR_TURN_S if claim.last.ahead is None else LATER_S)
            taken = claim.advance()
            if taken is not None:
                return taken
    except KeyboardInterrupt:
        raise InterruptedWait("not waiting for GPUs any longer; nothing was started.") from None
    finally:
        claim.cancel()
    return None


class NodeGpus:
    """The GPUs of this node for a scheduler of many jobs, as the environment limits them.

    ``pool.gpus`` is empty where there are none, for the reason in ``missing``. Nothing here waits for anything: what
    is to be had is asked for now and then. GPUs are taken for one job at a time, and handed over to its safelaunch::

        if (node.free() or 0) >= 2 and (taken := node.take(2, "lr-3e-4")) is not None:
            variables, descriptors = taken.lease.hand_over()
            variables["CUDA_VISIBLE_DEVICES"] = taken.visible
            Popen(["safelaunch", ...], env={**os.environ, **variables}, pass_fds=descriptors)
            taken.lease.forget()                # not release: that would free them for the child as well

    Among all who want GPUs of this node a scheduler is one: it has one place in the queue, whatever it has waiting.
    """

    def __init__(self, environ: Mapping[str, str], most_unleased_bytes: int = MOST_UNLEASED_BYTES) -> None:
        found = inventory(environ)
        self._most_unleased_bytes = most_unleased_bytes
        self.missing = found.missing
        self.pool: Pool = pool_of(environ, found.gpus)
        self._asking = Asking(environ)
        survey = Survey(found, self._asking.answer, time.monotonic)
        self._claim = Claim(store_of(environ), self._terms(0, ""), survey)

    def _terms(self, count: int, name: str) -> Terms:
        wish = Wish(self.pool.gpus, count, name)
        return Terms(wish, ourselves(name, "safelaunch colaunch"), self._most_unleased_bytes)

    def free(self) -> int | None:
        """GPUs that nobody holds, uses or has come first for; None while the driver is being asked.

        Raises StoreError.
        """
        return self._claim.free()

    def take(self, count: int, name: str) -> Taken | None:
        """``count`` GPUs near each other for the job ``name``; None where they are not to be had now."""
        self._claim.terms = self._terms(count, name)
        return self._claim.advance()

    def queue(self, count: int, name: str, ours: Collection[int]) -> str:
        """Keeps, or gets, a place among those who wait; until something is taken.

        Returns which GPUs others have, those who are not in ``ours``; empty where nobody has.
        """
        self._claim.terms = self._terms(count, name)
        self._claim.queue()
        return table(self._claim, {*ours, os.getpid()})

    def leave(self) -> None:
        """Nothing is wanted now: gives that place up."""
        self._claim.cancel()
        self._asking.drop()

    def freed(self) -> None:
        """A job has ended: the driver saw its processes before, and is asked again."""
        self._claim.survey.outdated()
