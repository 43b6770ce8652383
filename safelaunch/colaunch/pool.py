"""What jobs run on: GPUs, or slots of CPU cores on a node without GPUs. Each unit goes to one job at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from safelaunch.colaunch.jobs import Job
from safelaunch.errors import ResourceError
from safelaunch.leases.gpus import NodeGpus
from safelaunch.leases.lease import Lease
from safelaunch.model import format_ranks


@dataclass(frozen=True, slots=True)
class Share:
    """What one job holds. ``units``: the numbers of its slots; ``label`` names what it runs on to the user.

    ``env`` tells the job of it; ``cores`` is its CPU affinity, empty for all. ``lease``: GPUs and ports, to be handed
    over to the job's safelaunch. ``ports``: their numbers.
    """

    units: tuple[int, ...] = ()
    label: str = ""
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    lease: Lease = field(default_factory=lambda: Lease({}))
    ports: tuple[int, ...] = ()


class Pool(Protocol):
    """Hands out shares. What a share is made of, and who else draws on it, is the pool's own business."""

    @property
    def capacity(self) -> int:
        """Units in all."""

    @property
    def kind(self) -> str:
        """``GPU`` or ``slot``."""

    def units(self, gpus: int) -> int:
        """How many units a job takes that asks for ``gpus`` GPUs."""

    def free(self) -> int | None:
        """Units that can be had now; None while that is not known yet."""

    def take(self, job: Job) -> Share | None:
        """A share for ``job``, or None where that much is not to be had any more."""

    def wait(self, job: Job, ours: Collection[int]) -> str:
        """``job`` would start if others left room: it comes before those who ask later from now on.

        Returns who has what, in lines, except for the processes of ``ours``.
        """

    def leave(self) -> None:
        """Nothing is waited for."""

    def release(self, share: Share) -> None:
        """The job of this share is over, or was not started."""


class _Numbers:
    """The lowest free numbers of 0..count-1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = set(range(count))

    def take(self, wanted: int) -> tuple[int, ...] | None:
        if wanted > len(self.free):
            return None
        taken = tuple(sorted(self.free)[:wanted])
        self.free.difference_update(taken)
        return taken


class Slots:
    """CPU slots: the cores are shared out among them, neighbours together."""

    kind = "slot"

    def __init__(self, count: int, cores: Sequence[int]) -> None:
        self._numbers = _Numbers(count)
        self._shares = share_out(cores, count)

    @property
    def capacity(self) -> int:
        return self._numbers.count

    def units(self, gpus: int) -> int:
        """A slot stands for a GPU; a job without any needs a core all the same."""
        return max(1, gpus)

    def free(self) -> int:
        return len(self._numbers.free)

    def take(self, job: Job) -> Share | None:
        taken = self._numbers.take(self.units(job.gpus))
        if taken is None:
            return None
        cores = sorted({core for number in taken for core in self._shares[number]})
        return Share(taken, format_ranks(taken), cores=tuple(cores))

    def wait(self, job: Job, ours: Collection[int]) -> str:
        return ""  # the cores are everybody's

    def leave(self) -> None:
        return

    def release(self, share: Share) -> None:
        share.lease.release()
        self._numbers.free.update(share.units)


class Gpus:
    """The node's GPUs, as far as they are ours to use; each job sees its own alone.

    What is free is what nobody on this node holds or uses, whoever that is: our own jobs' leases say so, too.
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
        return Share(label=label, gpus=gpus, env={"CUDA_VISIBLE_DEVICES": taken.visible}, lease=taken.lease)

    def wait(self, job: Job, ours: Collection[int]) -> str:
        return self._node.queue(job.gpus, job.name, ours)

    def leave(self) -> None:
        self._node.leave()

    def release(self, share: Share) -> None:
        share.lease.release()
        self._node.freed()


# --- pure -------------------------------------------------------------------------------------------------------------


def share_out(cores: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """``count`` parts of ``cores``, as equal as can be, neighbours together; too few cores are shared."""
    if count > len(cores):
        return tuple((cores[number % len(cores)],) for number in range(count))
    return tuple(
        tuple(cores[number * len(cores) // count : (number + 1) * len(cores) // count]) for number in range(count)
    )


def default_slots(cores: int, units: Sequence[int], at_most: int | None) -> int:
    """As many slots as cores, but no more than jobs could hold at a time: their shares are larger then."""
    largest_first = sorted(units, reverse=True)[:at_most]
    return max(1, min(cores, sum(largest_first)), *largest_first[:1])


def check_fits(needs: Mapping[str, int], pool: Pool) -> None:
    """Raises ResourceError for a job that could never start."""
    for name, units in needs.items():
        if units > pool.capacity:
            raise ResourceError(
                f"the job {name} asks for {units} {pool.kind}s, and there are {pool.capacity} here.",
                "ask for fewer" + (", or give more --slots" if pool.kind == "slot" else ""),
            )


# --- the node ---------------------------------------------------------------------------------------------------------


def by_topology(cores: Sequence[int]) -> tuple[int, ...]:
    """Cores in the order package, physical core: hyperthreads of one core, and cores of one socket, are neighbours."""

    def place(core: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            package = int((topology / "physical_package_id").read_text())
            return package, int((topology / "core_id").read_text()), core
        except (OSError, ValueError):
            return 0, core, core

    return tuple(sorted(cores, key=place))
