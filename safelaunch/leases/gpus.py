"""Taking GPUs: one job that wants some and waits for them if it may, or a scheduler that has many jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from safelaunch.errors import InterruptedWait, ResourceError
from safelaunch.leases.choose import Pool, Wish, pool_of
from safelaunch.leases.claims import MOST_UNLEASED_BYTES, Claim, Survey, Taken, Terms
from safelaunch.leases.holder import ourselves
from safelaunch.leases.nvml import inventory
from safelaunch.leases.store import Store, store_of
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

    ``pool.gpus`` is empty where there are none, for the reason in ``missing``. A job's claim is advanced now and then
    until it has its GPUs; these are handed over to the safelaunch that runs the job (``Lease.hand_over``)::

        claim = node.claim(2, name="lr-3e-4", command="train.py --lr 3e-4")
        claim.queue()                           # or not: then whoever waits on this node comes first
        if (taken := claim.advance()) is not None:
            variables, descriptors = taken.lease.hand_over()
            variables["CUDA_VISIBLE_DEVICES"] = taken.visible
            Popen(["safelaunch", ...], env={**os.environ, **variables}, pass_fds=descriptors)
            taken.lease.forget()                # not release: that would free them for the child as well
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        found = inventory(environ)
        self.missing = found.missing
        self.pool: Pool = pool_of(environ, found.gpus)
        self._survey = Survey(found, lambda: inventory(environ), time.monotonic)
        self._store: Store = store_of(environ)

    def claim(self, count: int, *, name: str, command: str, most_unleased_bytes: int = MOST_UNLEASED_BYTES) -> Claim:
        """A claim on ``count`` GPUs of the pool. Raises ResourceError when there are not so many at all."""
        if not 1 <= count <= len(self.pool.gpus):
            raise ResourceError(
                f"{name}: wants {count} GPU(s), and there are {len(self.pool.gpus)} to use here.", "Ask for fewer."
            )
        wish = Wish(self.pool.gpus, count, name)
        return Claim(self._store, Terms(wish, ourselves(name, command), most_unleased_bytes), self._survey)

    def refresh(self) -> None:
        """Before a decision: asks NVML again if its last answer is older than 2 s."""
        self._survey.refresh()
