"""The units that jobs run on: GPUs, or slots of CPU cores on a node without GPUs. Each serves one job at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from safelaunch.leases.gpus import NodeGpus
from safelaunch.leases.lease import Lease
from safelaunch.model import format_ranks
from safelaunch.sweep.jobs import Job
from safelaunch.system.errors import ResourceError


@dataclass(frozen=True, slots=True)
class Share:
    """One job's share. ``units``: the numbers of its slots; ``label``: its units in words.

    ``env``: the job's variables for it; ``cores``: how many cores there are for it, 0 if that is not shared out.
    ``lease``: GPUs and ports to hand over to the job's safelaunch. ``ports``: their numbers.
    """

    units: tuple[int, ...] = ()
    label: str = ""
    gpus: tuple[str, ...] = ()
    cores: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    lease: Lease = field(default_factory=lambda: Lease({}))
    ports: tuple[int, ...] = ()


class Pool(Protocol):
    """Hands out shares, and hides what they consist of and who else competes for them."""

    @property
    def capacity(self) -> int:
        """Units in all."""

    @property
    def kind(self) -> str:
        """``GPU`` or ``slot``."""

    def units(self, gpus: int) -> int:
        """The number of units for a job that requests ``gpus`` GPUs."""

    def free(self) -> int | None:
        """The number of units available now; None while that is unknown."""

    def take(self, job: Job) -> Share | None:
        """A share for ``job``, or None if too few units are left."""

    def wait(self, job: Job, ours: Collection[int]) -> str:
        """Queues ``job``, which would start if others left room, ahead of later requests.

        Returns lines that say who holds what, except for the processes in ``ours``.
        """

    def leave(self) -> None:
        """Leaves the queue."""

    def release(self, share: Share) -> None:
        """Frees a share: its job has ended or did not start."""


class Slots:
    """CPU slots, each for an equal share of the cores: the kernel's scheduler chooses which."""

    kind = "slot"

    def __init__(self, count: int, cores: int) -> None:
        self.capacity = count
        self._cores = cores
        self._free = set(range(count))

    def units(self, gpus: int) -> int:
        """One slot per GPU; a job without GPUs still needs a core."""
        return max(1, gpus)

    def free(self) -> int:
        return len(self._free)

    def take(self, job: Job) -> Share | None:
        wanted = self.units(job.gpus)
        if wanted > len(self._free):
            return None
        taken = tuple(sorted(self._free)[:wanted])
        self._free.difference_update(taken)
        return Share(taken, format_ranks(taken), cores=max(1, wanted * self._cores // self.capacity))

    def wait(self, job: Job, ours: Collection[int]) -> str:
        return ""  # cores are not leased

    def leave(self) -> None:
        return

    def release(self, share: Share) -> None:
        share.lease.release()
        self._free.update(share.units)


class Gpus:
    """The node's GPUs that we may use; each job sees only its own.

    A GPU is free if nobody on this node holds or uses it. The leases of our own jobs count too.
    """

    kind = "GPU"

    def __init__(self, node: NodeGpus) -> None:
        self._node = node

    @property
    def capacity(self) -> int:
        return len(self._node.pool.gpus)

    def units(self, gpus: int) -> int:
        return gpus

    def free(self) -> int | None:
        return self._node.free()

    def take(self, job: Job) -> Share | None:
        if not job.gpus:
            return Share(label="none", env={"CUDA_VISIBLE_DEVICES": ""})
        taken = self._node.take(job.gpus, job.name)
        if taken is None:
            return None
        labels = [gpu.label for gpu in taken.gpus]
        label = format_ranks([int(label) for label in labels]) if all(map(str.isdecimal, labels)) else ",".join(labels)
        gpus = tuple(gpu.uuid for gpu in taken.gpus)
        env = {"CUDA_VISIBLE_DEVICES": taken.visible}
        return Share(label=label, gpus=gpus, env=env, lease=taken.lease)

    def wait(self, job: Job, ours: Collection[int]) -> str:
        return self._node.queue(job.gpus, job.name, ours)

    def leave(self) -> None:
        self._node.leave()

    def release(self, share: Share) -> None:
        share.lease.release()
        self._node.freed()


# --- pure -------------------------------------------------------------------------------------------------------------


def default_slots(cores: int, units: Sequence[int], at_most: int | None) -> int:
    """One slot per core, but no more than the jobs can use at once, so that their shares are larger."""
    largest_first = sorted(units, reverse=True)[:at_most]
    return max(1, min(cores, sum(largest_first)), *largest_first[:1])


def check_fits(needs: Mapping[str, int], pool: Pool) -> None:
    """Raises ResourceError for a job that could never start."""
    for name, units in needs.items():
        if units > pool.capacity:
            raise ResourceError(
                f"the job {name} needs {units} {pool.kind}s, but this node has {pool.capacity}.",
                "request fewer" + (", or give more --slots" if pool.kind == "slot" else ""),
            )
