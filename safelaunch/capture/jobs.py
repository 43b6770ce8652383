"""The jobs on this host whose ranks nobody announces, found by the environments of their processes.

Whoever starts ranks (torchrun, accelerate, deepspeed, srun, mpirun, Ray, a shell script) gives each the variables of a
rank, and what a rank starts inherits them.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from safelaunch.beacon.layout import OF_A_RANK, TASKS, numbers_in
from safelaunch.capture import sockets
from safelaunch.capture.memory import ProcessMemory
from safelaunch.capture.node import parse_environ
from safelaunch.capture.result import gather, within_or
from safelaunch.system import procstat
from safelaunch.system.console import cut
from safelaunch.system.errors import AccessDenied, UsageError
from safelaunch.system.files import link_of, text_of

READ_DEADLINE_S = 5.0
MAPS_DEADLINE_S = 1.0
_OF_A_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_OF_A_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")  # where a rank is told no address
RUN_DIR, SERVER = "SAFELAUNCH_RUN_DIR", "TORCH_WORKER_SERVER_SOCKET"
_LOOPBACK = re.compile(r"localhost|127\.|::1$")


@dataclass(frozen=True, slots=True)
class JobProcess:
    """``env``: the variables that it was started with, or has now, if only these make it a rank; None where they may
    not be read.

    ``network``: its network namespace, for which the address ``localhost`` holds.
    """

    pid: int
    ppid: int
    start_ticks: int = 0
    user: int = 0
    env: Mapping[str, str] | None = field(default_factory=dict)
    network: str = ""


@dataclass(frozen=True, slots=True)
class FoundRank:
    """``rank``, ``world_size``, ``local_rank``: as ``process`` was told. ``is_task``: by srun or mpirun alone."""

    process: JobProcess
    rank: int
    world_size: int
    local_rank: int
    is_task: bool = False


@dataclass(frozen=True, slots=True)
class FoundJob:
    """The part of a job that is on this host. ``agent``: what started its ranks; ``members``: the pids of the ranks
    and of all that inherited their variables.
    """

    world_size: int
    ranks: Mapping[int, FoundRank]
    agent: int
    members: Collection[int]

    @property
    def env(self) -> Mapping[str, str]:
        """The variables of its first rank."""
        return self.ranks[min(self.ranks)].process.env or {}


def jobs_in(table: Mapping[int, JobProcess], runs_torch: Callable[[int], object]) -> tuple[FoundJob, ...]:
    """Every job in a table of processes, by pid. Pure.

    The process of a rank is the topmost one with its number that ``runs_torch``: others are shells and launchers around
    it, or have inherited its variables.
    """
    named = {pid: rank for pid, process in table.items() if (rank := _rank_of(process)) is not None}
    # A launcher in a task of srun has the variables of the task, and ranks below it that have their own.
    launchers = {above for pid, rank in named.items() if not rank.is_task for above in _above(pid, table)}
    alike: dict[tuple[object, ...], dict[int, FoundRank]] = {}
    for pid, rank in sorted(named.items()):
        if not (rank.is_task and pid in launchers):
            alike.setdefault(_key(rank), {})[pid] = rank
    return tuple(job for members in alike.values() for job in _jobs_of(members, table, runs_torch))


def _jobs_of(
    members: Mapping[int, FoundRank], table: Mapping[int, JobProcess], runs_torch: Callable[[int], object]
) -> Iterator[FoundJob]:
    """Processes that tell the same of their job. Where two of them are one rank of it, they are of two jobs: one, say,
    whose launcher was killed, and the next.
    """
    by_agent: dict[int, dict[int, list[FoundRank]]] = {}
    for pid, rank in members.items():
        agent = next(above for above in (*_above(pid, table), 0) if above not in members)
        by_agent.setdefault(agent, {}).setdefault(rank.rank, []).append(rank)
    jobs: list[tuple[int, dict[int, list[FoundRank]]]] = []
    for agent, ranks in sorted(by_agent.items(), key=lambda item: (-len(item[1]), -item[0])):
        job = next((known for _, known in jobs if not known.keys() & ranks.keys()), None)
        if job is None:
            jobs.append((agent, dict(ranks)))
        else:
            job.update(ranks)
    for agent, ranks in jobs:
        pids = [one.process.pid for several in ranks.values() for one in several]
        chosen = {number: _main_of(several, table, runs_torch) for number, several in sorted(ranks.items())}
        yield FoundJob(next(iter(chosen.values())).world_size, chosen, agent, frozenset(pids))


def _main_of(
    several: Sequence[FoundRank], table: Mapping[int, JobProcess], runs_torch: Callable[[int], object]
) -> FoundRank:
    topmost = sorted(several, key=lambda one: (len(_above(one.process.pid, table)), one.process.start_ticks))
    return next((one for one in topmost if runs_torch(one.process.pid)), topmost[0])


def with_spawned(table: Mapping[int, JobProcess], is_spawned: Callable[[int], bool]) -> dict[int, JobProcess]:
    """The table, where what ``mp.spawn`` has started has ranks, too: siblings, in the order of their start. Pure."""
    found: dict[int, list[JobProcess]] = {}
    for one in sorted(table.values(), key=lambda one: (one.start_ticks, one.pid)):
        if one.env is not None and _rank_of(one) is None and is_spawned(one.pid):
            found.setdefault(one.ppid, []).append(one)
    return {**table} | {
        one.pid: replace(
            one, env={**(one.env or {}), **dict(zip(OF_A_RANK, map(str, (at, len(several), at)), strict=True))}
        )
        for several in found.values()
        for at, one in enumerate(several)
        if len(several) > 1
    }


def _rank_of(process: JobProcess) -> FoundRank | None:
    for names in (OF_A_RANK, *TASKS):
        if (numbers := numbers_in(process.env or {}, names)) is not None:
            return FoundRank(process, *numbers, is_task=names is not OF_A_RANK)
    return None


def _key(rank: FoundRank) -> tuple[object, ...]:
    """What all ranks of one job have in common, and no other job."""
    process = rank.process
    env = process.env or {}
    where = _OF_A_JOB if env.get("MASTER_PORT") else _OF_A_STEP
    network = process.network if _LOOPBACK.match(env.get("MASTER_ADDR", "")) else ""
    return process.user, rank.world_size, network, *(env.get(name, "") for name in where)


def _above(pid: int, table: Mapping[int, JobProcess]) -> list[int]:
    """The pids above a process, its parent first."""
    found: list[int] = []
    while (process := table.get(pid)) is not None and process.ppid and process.ppid not in found:
        pid = process.ppid
        found.append(pid)
    return found


_STARTERS = 3  # a shell script, say, that a scheduler's step runs


def job_of(
    pid: int,
    table: Mapping[int, JobProcess],
    jobs: Sequence[FoundJob],
    what: Callable[[int], str] = lambda pid: "",
) -> FoundJob:
    """The job that ``pid`` is of: a rank, a child of one, the launcher or what started that.

    Raises UsageError, or AccessDenied for a process whose variables may not be read.

    init, and processes of another user, have started no job, whatever runs below them. ``what``: what a process is.
    """
    process = table.get(pid)
    if process is None:
        raise UsageError(f"dump: there is no process {pid} on this host.", "Run it where the ranks run.")
    for one in (pid, *_above(pid, table)):
        if (job := next((job for job in jobs if one in job.members), None)) is not None:
            return job
    below = [job for job in jobs if any(pid in _above(member, table) for member in job.members)]
    started = [job for job in below if _has_started(process, job, table)]
    if len(started) == 1:
        return started[0]
    named = f"process {pid}{f' ({words})' if (words := what(pid)) else ''}"
    ranks = ", ".join(str(job.ranks[min(job.ranks)].process.pid) for job in started or below)
    if started:
        raise UsageError(f"dump: {named} has started several jobs.", f"Name a rank of one: {ranks}; or use --all.")
    if below:
        raise UsageError(
            f"dump: {named} is neither a rank nor the launcher of a job.", f"Name a rank of one below it: {ranks}."
        )
    if process.env is None:
        raise AccessDenied(
            f"dump: the environment of process {pid} may not be read: it belongs to {name_of_user(process.user)}."
        )
    tasks = ", ".join(names[0] for names in TASKS)
    raise UsageError(
        f"dump: {named} is of no job: neither it nor what is above and below it has RANK and WORLD_SIZE (or "
        f"{tasks}) among its environment variables.",
        "Name a rank, or the launcher.",
    )


def _has_started(process: JobProcess, job: FoundJob, table: Mapping[int, JobProcess]) -> bool:
    """Whether it is the job's launcher, or as near above it as what a user types."""
    first = job.ranks[min(job.ranks)].process
    near = [job.agent, *_above(job.agent, table)][: _STARTERS + 1]
    return process.pid in near and process.user == first.user and (process.pid != 1 or job.agent == 1)


def described(pid: int) -> str:
    """A process by its command line and user, for an error."""
    process = _read(pid)
    command = cut(" ".join(command_of(pid)), 60)
    return ", ".join(filter(None, (command, f"of {name_of_user(process.user)}" if process is not None else "")))


def name_of_user(user: int) -> str:
    """The name of a user by number; ``user 1000`` where it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


# --- effects ----------------------------------------------------------------------------------------------------------


def processes() -> dict[int, JobProcess]:
    """All processes of this host; without those that do not answer in time, whose memory is locked in the kernel."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    read = gather([partial(_read, pid) for pid in pids], deadline_s=READ_DEADLINE_S)
    return with_spawned({one.pid: one for one in read if one is not None}, is_spawned)


def _read(pid: int) -> JobProcess | None:
    stat = procstat.read(pid)
    if stat is None:
        return None
    place = Path(f"/proc/{pid}")
    try:
        user = place.stat().st_uid
        env = parse_environ((place / "environ").read_bytes())
    except PermissionError:
        return JobProcess(pid, stat.ppid, stat.start_ticks, user, None)
    except OSError:  # it has ended meanwhile
        return None
    found = JobProcess(pid, stat.ppid, stat.start_ticks, user, env)
    if _rank_of(found) is None and packages_of(pid):  # Ray's workers, say, are told later
        found = replace(found, env={**env, **ProcessMemory(pid).environment()})
    return replace(found, network=link_of(place / "ns/net"))


def is_spawned(pid: int) -> bool:
    """By Python's ``multiprocessing``, and connected to others by TCP, as a loader's workers are not."""
    spawned = any("spawn_main" in word for word in command_of(pid))
    return spawned and any(sockets.describe(pid, inode).startswith("tcp") for inode in sockets.inodes(pid))


def command_of(pid: int) -> tuple[str, ...]:
    """Empty where its memory is locked in the kernel."""
    text = within_or("", MAPS_DEADLINE_S, "cmdline", lambda: text_of(f"/proc/{pid}/cmdline"))
    return tuple(text.split("\0")[:-1])


def packages_of(pid: int) -> str:
    """The directory of the packages from which a process has loaded torch; empty where it has not."""
    text = within_or("", MAPS_DEADLINE_S, "maps", lambda: text_of(f"/proc/{pid}/maps"))
    found = re.search(r"(/\S.*)/torch/lib/libtorch", text)
    return found[1] if found else ""
