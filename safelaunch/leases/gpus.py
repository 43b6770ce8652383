"""Leases GPUs: for one job, which may wait for them, or for a scheduler with many jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from safelaunch.leases.choose import Pool, Wish, pool_of
from safelaunch.leases.claims import Claim, Survey, Taken, Terms, refusal, table, what
from safelaunch.leases.holder import ourselves
from safelaunch.leases.inventory import Asking, inventory
from safelaunch.leases.store import store_of
from safelaunch.system.errors import InterruptedWait, ResourceError

OUR_TURN_S = 0.1  # between two attempts of the first in the queue
LATER_S = 0.3


@dataclass(frozen=True, slots=True)
class Patience:
    """Whether to wait, for how many seconds (None: for ever), and how to print a message."""

    wait: bool = False
    timeout_s: float | None = None
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def take(claim: Claim, patience: Patience) -> Taken:
    """Leases the GPUs that ``claim`` requests, all or none. Raises ResourceError if they are not available (in time).

    Those who wait are served in order of arrival. Those who don't wait come after all who do.
    """
    taken = claim.advance()
    if taken is None and patience.wait:
        taken = _wait(claim, patience)
    if taken is None:
        again = "Wait longer with --wait=DURATION" if patience.wait else "Wait for them with --wait"
        remedy = f"{again}, start without GPUs (--gpus none), or share them as under torchrun (--no-lease)."
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
        raise InterruptedWait("stopped waiting for GPUs; nothing was started.") from None
    finally:
        claim.cancel()
    return None


class NodeGpus:
    """The GPUs of this node for a scheduler of many jobs, as the environment limits them.

    ``pool.gpus`` is empty if there are none; ``missing`` says why. No method waits: call ``free`` from time to time.
    Take GPUs for one job at a time, and hand them over to its safelaunch::

        if (node.free() or 0) >= 2 and (taken := node.take(2, "lr-3e-4")) is not None:
            variables, descriptors = taken.lease.hand_over()
            variables["CUDA_VISIBLE_DEVICES"] = taken.visible
            Popen(["safelaunch", ...], env={**os.environ, **variables}, pass_fds=descriptors)
            taken.lease.forget()                # not release: that would free them for the child as well

    A scheduler has one place in the node's queue, however many of its jobs wait.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        found = inventory(environ)
        self.missing = found.missing
        self.pool: Pool = pool_of(environ, found.gpus)
        self._asking = Asking(environ)
        survey = Survey(found, self._asking.answer, time.monotonic)
        self._claim = Claim(store_of(environ), self._terms(0, ""), survey)

    def _terms(self, count: int, name: str) -> Terms:
        wish = Wish(self.pool.gpus, count, name)
        return Terms(wish, ourselves(name, "safelaunch colaunch"))

    def free(self) -> int | None:
        """The number of GPUs that are free and not promised to others; None while the driver has not answered.

        Raises StoreError.
        """
        return self._claim.free()

    def take(self, count: int, name: str) -> Taken | None:
        """``count`` GPUs near each other for the job ``name``; None if they are not available."""
        self._claim.terms = self._terms(count, name)
        return self._claim.advance()

    def queue(self, count: int, name: str, ours: Collection[int]) -> str:
        """Joins the queue, or keeps its place, until GPUs are taken.

        Returns a table of the GPUs that processes outside ``ours`` hold; empty if there are none.
        """
        self._claim.terms = self._terms(count, name)
        self._claim.queue()
        return table(self._claim, {*ours, os.getpid()})

    def leave(self) -> None:
        """Leaves the queue: no job needs GPUs now."""
        self._claim.cancel()
        self._asking.drop()

    def freed(self) -> None:
        """A job has ended: the driver's last answer still has its processes, so the next decision asks again."""
        self._claim.survey.outdated()
