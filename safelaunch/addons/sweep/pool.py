"""Assigns to jobs the units that they run on: GPUs, or slots of CPU cores on a node without GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from safelaunch.addons.sweep.jobs import SweepJob
from safelaunch.leases.choose import GpuRequest, pool_of
from safelaunch.leases.gpus import LeaseRequest, Survey, table
from safelaunch.leases.holder import ourselves
from safelaunch.leases.inventory import Asking, inventory
from safelaunch.leases.lease import Lease
from safelaunch.leases.store import store_of
from safelaunch.model import format_ranks
from safelaunch.system.errors import ResourceError

PROGRAM = "safelaunch colaunch"


@dataclass(frozen=True, slots=True)
class Share:
    units: tuple[int, ...] = ()
    label: str = ""
    gpus: tuple[str, ...] = ()
    cores: int = 0  # 0 if cores aren't shared out
    env: Mapping[str, str] = field(default_factory=dict)  # variables that restrict the job to its share
    lease: Lease = field(default_factory=lambda: Lease({}))  # GPUs and ports for the job's safelaunch
    ports: tuple[int, ...] = ()


class SharePool(Protocol):
    """Assigns shares of the node to jobs. ``free`` raises StoreError."""

    @property
    def capacity(self) -> int:
        """Total number of units."""

    @property
    def kind(self) -> str:
        """Kind of unit: ``GPU`` or ``slot``."""

    def units(self, gpus: int) -> int:
        """Returns the number of units that a job needs if it requests ``gpus`` GPUs."""

    def free(self) -> int | None:
        """Returns the number of available units; None while that is unknown."""

    def take(self, job: SweepJob) -> Share | None:
        """Assigns a share to ``job`` and returns it; None if too few units are free."""

    def wait(self, job: SweepJob, ours: Collection[int]) -> str:
        """Puts ``job`` in the queue, ahead of later requests.

        Returns lines that list the processes that hold the units, except our own.
        """

    def leave(self) -> None:
        """Leaves the queue."""

    def release(self, share: Share) -> None:
        """Frees a share after its job has ended or failed to start."""


class CpuSlots:
    """Slots, each of which stands for an equal share of the CPU cores. The kernel chooses which cores a job uses."""

    kind = "slot"

    def __init__(self, count: int, cores: int) -> None:
        self.capacity = count
        self._cores = cores
        self._free = set(range(count))

    def units(self, gpus: int) -> int:
        """Returns one slot per GPU, and at least one, because a job without GPUs needs a core, too."""
        return max(1, gpus)

    def free(self) -> int:
        return len(self._free)

    def take(self, job: SweepJob) -> Share | None:
        wanted = self.units(job.gpus)
        if wanted > len(self._free):
            return None
        taken = tuple(sorted(self._free)[:wanted])
        self._free.difference_update(taken)
        return Share(taken, format_ranks(taken), cores=max(1, wanted * self._cores // self.capacity))

    def wait(self, job: SweepJob, ours: Collection[int]) -> str:
        return ""  # cores are not leased

    def leave(self) -> None:
        return

    def release(self, share: Share) -> None:
        share.lease.release()
        self._free.update(share.units)


class GpuPool:
    """The node's GPUs, limited by the environment. Each job sees only its own GPUs.

    A GPU is free if no process on this node, including our jobs, holds or uses it. All of our waiting jobs share one
    place in the node's queue. No method waits for the driver.
    """

    kind = "GPU"

    def __init__(self, environ: Mapping[str, str]) -> None:
        devices = inventory(environ)
        pool = pool_of(environ, devices.gpus)
        gpus = pool.gpus
        self.capacity, self.missing = len(gpus), devices.missing or pool.origin
        self._asking = Asking(environ)
        survey = Survey(devices, self._asking.answer, time.monotonic)
        self._claim = LeaseRequest(store_of(environ), GpuRequest(gpus, 0, ""), ourselves("", PROGRAM), survey)

    def _request(self, job: SweepJob) -> LeaseRequest:
        self._claim.wish = replace(self._claim.wish, count=job.gpus, origin=job.name)
        self._claim.about = ourselves(job.name, PROGRAM)
        return self._claim

    def units(self, gpus: int) -> int:
        return gpus

    def free(self) -> int | None:
        return self._claim.free()

    def take(self, job: SweepJob) -> Share | None:
        if not job.gpus:
            return Share(label="none", env={"CUDA_VISIBLE_DEVICES": ""})
        taken = self._request(job).advance()
        if taken is None:
            return None
        labels = [gpu.label for gpu in taken.gpus]
        label = format_ranks([int(label) for label in labels]) if all(map(str.isdecimal, labels)) else ",".join(labels)
        gpus = tuple(gpu.uuid for gpu in taken.gpus)
        return Share(label=label, gpus=gpus, env={"CUDA_VISIBLE_DEVICES": taken.visible}, lease=taken.lease)

    def wait(self, job: SweepJob, ours: Collection[int]) -> str:
        self._request(job).queue()
        return table(self._claim, {*ours, os.getpid()})

    def leave(self) -> None:
        self._claim.cancel()
        self._asking.drop()

    def release(self, share: Share) -> None:
        share.lease.release()
        self._claim.survey.outdated()  # the driver's last answer still has the job's processes


def default_slots(cores: int, units: Sequence[int], at_most: int | None) -> int:
    """Returns the number of slots: one per core, or fewer and larger slots if the jobs can't use that many."""
    largest_first = sorted(units, reverse=True)[:at_most]
    return max(1, min(cores, sum(largest_first)), *largest_first[:1])


def check_fits(needs: Mapping[str, int], pool: SharePool) -> None:
    for name, units in needs.items():
        if units > pool.capacity:
            raise ResourceError(
                f"the job {name} needs {units} {pool.kind}s, but this node has {pool.capacity}.",
                "request fewer" + (", or give more --slots" if pool.kind == "slot" else ""),
            )
