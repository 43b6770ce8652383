"""Finds jobs on this host that safelaunch didn't start, using the environments of their processes.

Every launcher (torchrun, accelerate, deepspeed, srun, mpirun, Ray, a shell script) gives each rank its variables, which
the rank's children inherit.
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
from safelaunch.capture.gather import gather
from safelaunch.capture.memory import ProcessMemory
from safelaunch.capture.node import parse_environ
from safelaunch.capture.result import within_or
from safelaunch.system import procstat
from safelaunch.system.console import cut
from safelaunch.system.errors import AccessDenied, UsageError
from safelaunch.system.files import link_of, text_of

READ_DEADLINE_S = 5.0
MAPS_DEADLINE_S = 1.0
_OF_A_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_OF_A_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")  # used if a rank has no address
RUN_DIR, SERVER = "SAFELAUNCH_RUN_DIR", "TORCH_WORKER_SERVER_SOCKET"
_LOOPBACK = re.compile(r"localhost|127\.|::1$")


@dataclass(frozen=True, slots=True)
class JobProcess:
    pid: int
    ppid: int
    start_ticks: int = 0
    user: int = 0
    # Initial variables, or present ones if only these make it a rank; None if not permitted.
    env: Mapping[str, str] | None = field(default_factory=dict)
    network: str = ""  # network namespace, within which the address localhost is valid


@dataclass(frozen=True, slots=True)
class RunningRank:
    process: JobProcess
    rank: int
    world_size: int
    local_rank: int
    is_task: bool = False  # only srun's or mpirun's variables make it a rank


@dataclass(frozen=True, slots=True)
class RunningJob:
    """The part of a job that runs on this host."""

    world_size: int
    ranks: Mapping[int, RunningRank]
    agent: int  # pid of the process that started its ranks
    members: Collection[int]  # pids of the ranks and of all processes with their variables

    @property
    def env(self) -> Mapping[str, str]:
        return self.ranks[min(self.ranks)].process.env or {}


def jobs_in(table: Mapping[int, JobProcess], runs_torch: Callable[[int], object]) -> tuple[RunningJob, ...]:
    """Returns the jobs in a table of processes by pid. Has no side effects.

    A rank's process is the topmost one that has the rank's number and for which ``runs_torch`` is true. Other processes
    with that number are shells and launchers above it, or children that inherited its variables.
    """
    named = {pid: rank for pid, process in table.items() if (rank := _rank_of(process)) is not None}
    # In an srun task, a launcher has the task's variables, and the ranks below it have their own.
    launchers = {above for pid, rank in named.items() if not rank.is_task for above in _above(pid, table)}
    alike: dict[tuple[object, ...], dict[int, RunningRank]] = {}
    for pid, rank in sorted(named.items()):
        if not (rank.is_task and pid in launchers):
            alike.setdefault(_key(rank), {})[pid] = rank
    return tuple(job for members in alike.values() for job in _jobs_of(members, table, runs_torch))


def _jobs_of(
    members: Mapping[int, RunningRank], table: Mapping[int, JobProcess], runs_torch: Callable[[int], object]
) -> Iterator[RunningJob]:
    """Splits processes with equal job variables into jobs. Two processes with the same rank belong to different jobs.

    This happens if, for example, one job's launcher was killed before the next job began.
    """
    by_agent: dict[int, dict[int, list[RunningRank]]] = {}
    for pid, rank in members.items():
        agent = next(above for above in (*_above(pid, table), 0) if above not in members)
        by_agent.setdefault(agent, {}).setdefault(rank.rank, []).append(rank)
    jobs: list[tuple[int, dict[int, list[RunningRank]]]] = []
    for agent, ranks in sorted(by_agent.items(), key=lambda item: (-len(item[1]), -item[0])):
        job = next((members_by_rank for _, members_by_rank in jobs if not members_by_rank.keys() & ranks.keys()), None)
        if job is None:
            jobs.append((agent, dict(ranks)))
        else:
            job.update(ranks)
    for agent, ranks in jobs:
        pids = [rank.process.pid for several in ranks.values() for rank in several]
        chosen = {number: _main_of(several, table, runs_torch) for number, several in sorted(ranks.items())}
        yield RunningJob(next(iter(chosen.values())).world_size, chosen, agent, frozenset(pids))


def _main_of(
    several: Sequence[RunningRank], table: Mapping[int, JobProcess], runs_torch: Callable[[int], object]
) -> RunningRank:
    topmost = sorted(several, key=lambda rank: (len(_above(rank.process.pid, table)), rank.process.start_ticks))
    return next((rank for rank in topmost if runs_torch(rank.process.pid)), topmost[0])


def with_spawned(table: Mapping[int, JobProcess], is_spawned: Callable[[int], bool]) -> dict[int, JobProcess]:
    """Adds rank variables to siblings that ``mp.spawn`` started, numbering them in start order. Has no side effects."""
    siblings: dict[int, list[JobProcess]] = {}
    for process in sorted(table.values(), key=lambda process: (process.start_ticks, process.pid)):
        if process.env is not None and _rank_of(process) is None and is_spawned(process.pid):
            siblings.setdefault(process.ppid, []).append(process)
    return {**table} | {
        process.pid: replace(
            process,
            env={**(process.env or {}), **dict(zip(OF_A_RANK, map(str, (at, len(several), at)), strict=True))},
        )
        for several in siblings.values()
        for at, process in enumerate(several)
        if len(several) > 1
    }


def _rank_of(process: JobProcess) -> RunningRank | None:
    for names in (OF_A_RANK, *TASKS):
        if (numbers := numbers_in(process.env or {}, names)) is not None:
            return RunningRank(process, *numbers, is_task=names is not OF_A_RANK)
    return None


def _key(rank: RunningRank) -> tuple[object, ...]:
    process = rank.process
    env = process.env or {}
    names = _OF_A_JOB if env.get("MASTER_PORT") else _OF_A_STEP
    network = process.network if _LOOPBACK.match(env.get("MASTER_ADDR", "")) else ""
    return process.user, rank.world_size, network, *(env.get(name, "") for name in names)


def _above(pid: int, table: Mapping[int, JobProcess]) -> list[int]:
    ancestors: list[int] = []
    while (process := table.get(pid)) is not None and process.ppid and process.ppid not in ancestors:
        pid = process.ppid
        ancestors.append(pid)
    return ancestors


_STARTERS = 3  # such as a shell script in a scheduler's step


def job_of(
    pid: int,
    table: Mapping[int, JobProcess],
    jobs: Sequence[RunningJob],
    describe: Callable[[int], str] = lambda pid: "",
    command: str = "dump",
) -> RunningJob:
    """Returns the job to which ``pid`` belongs: as a rank, a rank's child, or a launcher or its parent.

    Ignores relations through init or through another user's processes. Raises UsageError, or AccessDenied if the
    process's variables can't be read.
    """
    process = table.get(pid)
    if process is None:
        raise UsageError(f"{command}: there is no process {pid} on this host.", "Run it where the ranks run.")
    for member in (pid, *_above(pid, table)):
        if (job := next((job for job in jobs if member in job.members), None)) is not None:
            return job
    below = [job for job in jobs if any(pid in _above(member, table) for member in job.members)]
    started = [job for job in below if _has_started(process, job, table)]
    if len(started) == 1:
        return started[0]
    named = f"process {pid}{f' ({words})' if (words := describe(pid)) else ''}"
    ranks = ", ".join(str(job.ranks[min(job.ranks)].process.pid) for job in started or below)
    if started:
        raise UsageError(
            f"{command}: {named} started several jobs.", f"Name a rank of one of them: {ranks}; or use --all."
        )
    if below:
        raise UsageError(
            f"{command}: {named} is neither a rank nor a job's launcher.", f"Name a rank of a job below it: {ranks}."
        )
    if process.env is None:
        raise AccessDenied(
            f"{command}: cannot read the environment of process {pid}: it belongs to {name_of_user(process.user)}."
        )
    tasks = ", ".join(names[0] for names in TASKS)
    raise UsageError(
        f"{command}: {named} isn't part of a distributed job: neither it nor its parents or children set RANK and "
        f"WORLD_SIZE (or {tasks}).",
        "Name a rank, or the launcher.",
    )


def _has_started(process: JobProcess, job: RunningJob, table: Mapping[int, JobProcess]) -> bool:
    first = job.ranks[min(job.ranks)].process
    near = [job.agent, *_above(job.agent, table)][: _STARTERS + 1]
    return process.pid in near and process.user == first.user and (process.pid != 1 or job.agent == 1)


def described(pid: int) -> str:
    process = _read(pid)
    command = cut(" ".join(command_of(pid)), 60)
    return ", ".join(filter(None, (command, f"of {name_of_user(process.user)}" if process is not None else "")))


def name_of_user(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def processes() -> dict[int, JobProcess]:
    """Returns this host's processes, except those that can't be read because the kernel holds their memory lock."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    read = gather([partial(_read, pid) for pid in pids], deadline_s=READ_DEADLINE_S)
    return with_spawned({process.pid: process for process in read if process is not None}, is_spawned)


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
    except OSError:  # it has ended
        return None
    process = JobProcess(pid, stat.ppid, stat.start_ticks, user, env)
    if _rank_of(process) is None and packages_of(pid):  # Ray's workers, for example, set the variables later
        process = replace(process, env={**env, **ProcessMemory(pid).environment()})
    return replace(process, network=link_of(place / "ns/net"))


def is_spawned(pid: int) -> bool:
    """True for a child of ``multiprocessing`` with TCP connections, which a DataLoader's workers don't have."""
    spawned = any("spawn_main" in word for word in command_of(pid))
    return spawned and any(sockets.describe(pid, inode).startswith("tcp") for inode in sockets.inodes(pid))


def command_of(pid: int) -> tuple[str, ...]:
    """Returns the process's arguments; empty if the kernel holds its memory lock."""
    text = within_or("", MAPS_DEADLINE_S, "cmdline", lambda: text_of(f"/proc/{pid}/cmdline"))
    return tuple(text.split("\0")[:-1])


def packages_of(pid: int) -> str:
    """Returns the package directory from which a process loaded torch; empty if it hasn't loaded torch."""
    text = within_or("", MAPS_DEADLINE_S, "maps", lambda: text_of(f"/proc/{pid}/maps"))
    match = re.search(r"(/\S.*)/torch/lib/libtorch", text)
    return match[1] if match else ""
