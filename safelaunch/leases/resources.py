"""Leases a job's GPUs and ports before it starts. On nodes without an NVIDIA driver, does nothing about GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safelaunch.job.argv import CommandLine, is_one_node
from safelaunch.job.mistakes import has_no_number_of_processes
from safelaunch.job.plan import HELD_LEASES, LEASES
from safelaunch.leases.inventory import has_driver
from safelaunch.system.console import say
from safelaunch.system.errors import ResourceError, StoreError, UsageError

if TYPE_CHECKING:
    from safelaunch.job.torchrun import TorchInstallation
    from safelaunch.leases.choose import GpuRanking, GpuRequest, Inventory, LeasableGpu
    from safelaunch.leases.gpus import LeaseRequest
    from safelaunch.leases.holder import LeaseHolder
    from safelaunch.leases.lease import Lease
    from safelaunch.settings.options import Settings

MASTER_PORT = "--master-port"


@dataclass(frozen=True)
class JobResources:
    """GPUs and ports of a job, held until ``release``."""

    command: CommandLine
    visible_gpus: str | None = None  # None leaves CUDA_VISIBLE_DEVICES unchanged
    lease: Lease | None = None
    ports: Lease | None = None
    handed: Lease | None = None  # from the parent process
    rank_locks: tuple[str, ...] = ()  # files for the ranks' beacons to lock
    note: str = ""  # GPUs in words, for ``--dry-run``

    @property
    def _leases(self) -> tuple[Lease, ...]:
        return tuple(lease for lease in (self.lease, self.ports, self.handed) if lease is not None)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that must stay open until the job's last process ends."""
        return tuple(fd for lease in self._leases for fd in lease.descriptors)

    def touch(self) -> None:
        for lease in self._leases:
            lease.touch()

    @property
    def port(self) -> int | None:
        """Master port; None if torchrun chooses it."""
        return self.ports.ports[0] if self.ports is not None else None

    def lost_ports(self) -> tuple[int, ...]:
        """Returns the job's ports on which other programs listen. Call it when all of the job's processes are gone."""
        from safelaunch.leases.ports import listening

        if self.ports is None:
            return ()
        in_use = listening()
        return tuple(port for port in self.ports.ports if port in in_use)

    def release(self) -> None:
        for lease in self._leases:
            lease.release()


def gather(
    command: CommandLine, settings: Settings, environ: Mapping[str, str], torch: TorchInstallation | None
) -> JobResources:
    """Leases what the job needs, or with ``--dry-run`` only finds what is free. Raises ResourceError."""
    handed = _handed_over(command, settings, environ)
    if handed is not None and set(handed.keys) - handed.sockets.keys():
        resources = JobResources(command, handed=handed, rank_locks=handed.rank_files)
    else:
        resources = replace(_gpus(command, settings, environ), handed=handed)
    if torch is None:
        return resources
    try:
        return _with_port(resources, settings, environ, torch)
    except BaseException:
        resources.release()
        raise


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _gpus(command: CommandLine, settings: Settings, environ: Mapping[str, str]) -> JobResources:
    plain = JobResources(command)
    if settings.gpus == "none":
        return replace(plain, visible_gpus="")
    ranks = ranks_of(command, environ)
    if settings.gpus is None and not (settings.lease and _may_want_some(ranks, environ)):
        return plain
    if settings.gpus in (None, "all") and not has_driver(environ):
        return plain
    if _is_inside_a_run(environ):
        locks = tuple(filter(None, environ.get(LEASES, "").split(os.pathsep)))
        plain = replace(plain, rank_locks=locks, note="those of the enclosing run")
        return plain if settings.gpus is None else _unleased(plain, settings, environ)
    if not settings.lease:
        return _unleased(plain, settings, environ)
    return _leased(plain, settings, environ, ranks or None)


def _handed_over(command: CommandLine, settings: Settings, environ: Mapping[str, str]) -> Lease | None:
    """Returns the lease handed over by a parent, such as a sweep, that already set CUDA_VISIBLE_DEVICES; else None."""
    if not environ.get(HELD_LEASES):
        return None
    from safelaunch.leases.lease import inherited
    from safelaunch.leases.store import store_of

    lease = inherited(environ, store_of(environ).directory)
    if lease is not None:
        lease.tell(_about(command, settings))
    return lease


def ranks_of(command: CommandLine, environ: Mapping[str, str]) -> GpuRanking:
    """Returns how many ranks torchrun will start on this node.

    Returns ``all`` for one per visible GPU, None if torchrun isn't used, and 0 if the number is unknown. Source:
    ``determine_local_world_size`` of ``torch/distributed/run.py``.
    """
    if command.program is not None or not command.script or command.has_flag("-h", "--help"):
        return None if command.program is not None else 0
    text = command.value_of("--nproc-per-node", shortest="--np")
    text = text if text is not None else environ.get("PET_NPROC_PER_NODE", "1")
    if text in ("gpu", "auto"):
        return "all"
    return int(text) if text.isascii() and text.isdigit() else 0


def _may_want_some(ranks: GpuRanking, environ: Mapping[str, str]) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return ranks != 0 and (bool(visible.strip()) if visible is not None else ranks is not None)


def _is_inside_a_run(environ: Mapping[str, str]) -> bool:
    """Returns whether one of our ancestors is a supervisor, which then already leased our GPUs.

    The environment variable alone isn't enough, because it can be stale.
    """
    supervisor = environ.get("SAFELAUNCH_SUPERVISOR_PID", "")
    if not (supervisor.isascii() and supervisor.isdigit() and len(supervisor) <= 10):
        return False
    from safelaunch.system import procstat

    pid = os.getppid()
    while pid > 1:
        if pid == int(supervisor):
            return True
        stat = procstat.read(pid)
        pid = stat.ppid if stat is not None else 0
    return False


def _unleased(plain: JobResources, settings: Settings, environ: Mapping[str, str]) -> JobResources:
    candidates, wish = _wish(settings, environ, None)
    if wish is None:
        return plain
    gpus = wish.candidates[: wish.count]
    return replace(plain, visible_gpus=_visible(gpus, wish), note=f"{_words(gpus, candidates)}, not leased")


def _leased(plain: JobResources, settings: Settings, environ: Mapping[str, str], ranks: GpuRanking) -> JobResources:
    from time import monotonic

    from safelaunch.leases.gpus import LeaseRequest, Patience, Survey, take
    from safelaunch.leases.inventory import inventory
    from safelaunch.leases.store import store_of

    candidates, wish = _wish(settings, environ, ranks)
    if wish is None:
        if candidates.trouble and settings.gpus is None:
            say(f"this job's GPUs are not leased, so other jobs may use them: {candidates.missing}")
        return plain
    for note in _about_one_process(plain.command, settings, wish, environ):
        say(note)
    survey = Survey(candidates, lambda: inventory(environ), monotonic)
    claim = LeaseRequest(store_of(environ), wish, _about(plain.command, settings), survey)
    try:
        if settings.dry_run:
            return _foreseen(plain, claim)
        taken = take(claim, Patience(settings.wait, settings.wait_timeout_s, say))
    except StoreError as error:
        if settings.gpus is not None or settings.wait:
            raise
        say(f"this job's GPUs are not leased, so other jobs may use them: {error}")
        return plain
    for note in taken.notes:
        say(note)
    if not wish.keep:
        say(f"GPUs of this job: {', '.join(gpu.label for gpu in taken.gpus)} ({wish.origin})")
    return replace(
        plain,
        visible_gpus=_visible(taken.gpus, wish),
        lease=taken.lease,
        rank_locks=taken.lease.rank_files,
        note=_words(taken.gpus, candidates),
    )


def _about_one_process(
    command: CommandLine, settings: Settings, wish: GpuRequest, environ: Mapping[str, str]
) -> list[str]:
    """Returns a note if only one process is started for several GPUs."""
    count = wish.count if settings.gpus is not None else len(wish.candidates)
    if count < 2 or not has_no_number_of_processes(command, environ):
        return []
    return [f"1 process for {count} GPUs: --nproc-per-node={count} starts one for each"]


def _foreseen(plain: JobResources, claim: LeaseRequest) -> JobResources:
    """Adds the GPUs that the job would lease if it started now."""
    wish = claim.wish
    chosen = claim.foresee()
    if chosen is None:
        return replace(plain, note=f"not free now: this job needs {wish.count} of {len(wish.candidates)}")
    note = f"{_words(chosen, claim.survey.found)}, free now; leased when the job starts"
    return replace(plain, visible_gpus=_visible(chosen, wish), note=note)


def _wish(settings: Settings, environ: Mapping[str, str], ranks: GpuRanking) -> tuple[Inventory, GpuRequest | None]:
    from safelaunch.leases.choose import pool_of, wish_of
    from safelaunch.leases.inventory import inventory

    listed = inventory(environ)
    if not listed.gpus and settings.gpus in (None, "all"):
        return listed, None
    return listed, wish_of(settings.gpus, ranks, pool_of(environ, listed.gpus), listed)


def _visible(gpus: tuple[LeasableGpu, ...], wish: GpuRequest) -> str | None:
    return None if wish.keep else ",".join(gpu.uuid for gpu in gpus)


def _words(gpus: tuple[LeasableGpu, ...], found: Inventory) -> str:
    return f"{', '.join(gpu.label for gpu in gpus)} of {len(found.gpus)} GPUs of this node"


def _about(command: CommandLine, settings: Settings) -> LeaseHolder:
    # Every user can read the lease file, so it has no secrets.
    import shlex

    from safelaunch.leases.holder import ourselves
    from safelaunch.system.redaction.redact import redact_argv

    words = command.script or command.arguments
    return ourselves(settings.run_name or "", shlex.join(redact_argv(list(words))))


# --- ports ------------------------------------------------------------------------------------------------------------


def _with_port(
    found: JobResources, settings: Settings, environ: Mapping[str, str], torch: TorchInstallation
) -> JobResources:
    """Replaces ``--master-port auto``. Also adds a port if torchrun would use 29500 for every job."""
    command = found.command
    asked = command.value_of(MASTER_PORT, shortest="--master-p")
    if asked == "auto":
        if not is_one_node(command, environ):
            raise UsageError(
                "--master-port auto does not work with several nodes: every node would choose a different port.",
                "Give every node the same number, such as --master-port 29500.",
            )
        if settings.dry_run:
            return found
        ports = _take_any_port(found, settings, environ)
        return replace(found, command=_with_number(command, "auto", ports), ports=ports)
    if settings.dry_run or asked is not None or not _takes_the_common_port(command, environ, torch):
        return found
    try:
        ports = _take_port(found, settings, environ)
    except ResourceError as error:
        say(f"no port could be leased, so this torchrun uses 29500, which other jobs may use too: {error}")
        return found
    own = replace(command, torchrun=(f"{MASTER_PORT}={ports.ports[0]}", *command.torchrun))
    return replace(found, command=own, ports=ports)


def with_another_port(given: JobResources, settings: Settings, environ: Mapping[str, str]) -> JobResources:
    """Replaces the job's master port by another free port. Raises ResourceError."""
    ports = _take_any_port(given, settings, environ)
    command = _with_number(given.command, str(given.port), ports)
    if given.ports is not None:
        given.ports.release()
    return replace(given, command=command, ports=ports)


def _with_number(command: CommandLine, old: str, ports: Lease) -> CommandLine:
    return command.with_value(MASTER_PORT, old, str(ports.ports[0]), shortest="--master-p")


def _take_port(found: JobResources, settings: Settings, environ: Mapping[str, str]) -> Lease:
    from safelaunch.leases import ports
    from safelaunch.leases.store import store_of

    return ports.take(store_of(environ), 1, _about(found.command, settings))


def _take_any_port(found: JobResources, settings: Settings, environ: Mapping[str, str]) -> Lease:
    """Leases a port, or only reserves a free one if the lease directory is unusable. Raises ResourceError."""
    from safelaunch.leases import ports

    try:
        return _take_port(found, settings, environ)
    except StoreError as error:
        free = ports.take_unleased(1)
        say(f"master port {free.ports[0]} is free but not leased, so another job may take it too: {error.message}")
        return free


def _takes_the_common_port(command: CommandLine, environ: Mapping[str, str], torch: TorchInstallation) -> bool:
    """Returns whether torchrun would use port 29500 by default, as versions before torch 2.13 do."""
    from safelaunch.job.torchrun import binds_any_port

    if not command.script or not is_one_node(command, environ) or binds_any_port(torch.package):
        return False
    prefixes = ("--standalone", "--rdzv", "--st", "--rd", "--master", "--ma", "--node-rank", "--node_rank")
    if any(word.startswith(prefixes) for word in command.torchrun) or command.has_flag("-h", "--help"):
        return False
    return not any(name.startswith(("PET_RDZV", "PET_STANDALONE", "PET_MASTER", "PET_NODE_RANK")) for name in environ)
