"""Jobs that safelaunch did not start, found in process tables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from safelaunch.capture.jobs import JobProcess, RunningJob, is_spawned, job_of, jobs_in, with_spawned
from safelaunch.system.errors import AccessDenied, UsageError

TORCHRUN, SHELL = 100, 50
JOB = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


def rank_env(rank: int, world: int = 2, **more: str) -> dict[str, str]:
    return {**JOB, "RANK": str(rank), "LOCAL_RANK": str(rank % 8), "WORLD_SIZE": str(world), **more}


def table(*processes: JobProcess) -> dict[int, JobProcess]:
    return {process.pid: process for process in processes}


def process(pid: int, ppid: int, env: Mapping[str, str] | None = None, **more: Any) -> JobProcess:
    return JobProcess(pid, ppid, start_ticks=pid, env={} if env is None else env, **more)


def found(processes: Mapping[int, JobProcess], torch: set[int] | None = None) -> tuple[RunningJob, ...]:
    return jobs_in(processes, lambda pid: torch is None or pid in torch)


def pids(job: RunningJob) -> dict[int, int]:
    return {rank: rank_process.process.pid for rank, rank_process in job.ranks.items()}


TWO = table(
    process(SHELL, 1),
    process(TORCHRUN, SHELL),
    process(101, TORCHRUN, rank_env(0)),
    process(102, TORCHRUN, rank_env(1)),
    process(103, 101, rank_env(0)),  # a DataLoader worker
    process(104, 103),  # a program with its own environment, started by it
    process(200, SHELL),
)


@pytest.mark.parametrize("pid", [101, 102, 103, 104, TORCHRUN, SHELL])
def test_job_of_finds_ranks_from_any_job_process(pid: int) -> None:
    job = job_of(pid, TWO, found(TWO))
    assert pids(job) == {0: 101, 1: 102}
    assert (job.agent, job.world_size, set(job.members)) == (TORCHRUN, 2, {101, 102, 103})
    assert job.ranks[1].local_rank == 1


def test_job_of_unrelated_process_names_needed_variables() -> None:
    with pytest.raises(
        UsageError, match=r"process 200 isn't part of a distributed job.* RANK and WORLD_SIZE \(or SLURM_PROCID"
    ):
        job_of(200, TWO, found(TWO))
    with pytest.raises(UsageError, match="no process 999"):
        job_of(999, TWO, found(TWO))
    hidden = table(JobProcess(7, 1, user=0, env=None))
    with pytest.raises(AccessDenied, match="environment of process 7: it belongs to root"):
        job_of(7, hidden, found(hidden))


def test_rank_is_topmost_process_with_torch() -> None:
    wrapped = table(
        process(TORCHRUN, 1),
        process(101, TORCHRUN, rank_env(0)),  # bash wrap.sh
        process(111, 101, rank_env(0)),
        process(121, 111, rank_env(0)),
        process(102, TORCHRUN, rank_env(1)),
    )
    (job,) = found(wrapped, torch={111, 121})
    assert pids(job) == {0: 111, 1: 102}  # no process of rank 1 has loaded torch yet


def test_jobs_are_separated_by_port_size_user_and_network() -> None:
    several = table(
        process(101, 10, rank_env(0), network="net:[1]"),
        process(102, 10, rank_env(1), network="net:[1]"),
        process(201, 20, rank_env(0, MASTER_PORT="29501"), network="net:[1]"),
        process(301, 30, rank_env(0, world=4), network="net:[1]"),
        process(401, 40, rank_env(0), network="net:[2]"),  # localhost of another container
        JobProcess(501, 50, user=7, env=rank_env(0), network="net:[1]"),
    )
    jobs = found(several)
    assert sorted(sorted(pids(job).values()) for job in jobs) == [[101, 102], [201], [301], [401], [501]]
    pods = table(
        process(101, 10, rank_env(0, MASTER_ADDR="train-0"), network="net:[1]"),
        process(102, 20, rank_env(1, MASTER_ADDR="train-0"), network="net:[2]"),
    )
    assert [pids(job) for job in found(pods)] == [{0: 101, 1: 102}]


def test_launchers_of_same_job_are_joined_orphans_are_separate() -> None:
    nodes = table(
        process(10, 1),
        process(20, 1),
        process(11, 10, rank_env(0, world=4)),
        process(12, 10, rank_env(1, world=4)),
        process(21, 20, rank_env(2, world=4)),
    )
    assert [pids(job) for job in found(nodes)] == [{0: 11, 1: 12, 2: 21}]
    left = table(
        process(1, 0),
        process(11, 1, rank_env(0)),  # torchrun was killed
        process(12, 1, rank_env(1)),
        process(30, 1),
        process(31, 30, rank_env(0)),
        process(32, 30, rank_env(1)),
    )
    assert [pids(job) for job in found(left)] == [{0: 31, 1: 32}, {0: 11, 1: 12}]


def test_srun_tasks_are_ranks_unless_they_launch_ranks() -> None:
    def task(number: int) -> dict[str, str]:
        size = {"SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(number)}
        return {**size, "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}

    by_srun = table(process(11, 10, task(0)), process(12, 10, task(1)))
    assert [pids(job) for job in found(by_srun)] == [{0: 11, 1: 12}]
    launchers = table(
        process(11, 10, task(0)),
        process(21, 11, {**task(0), **rank_env(0)}),
        process(22, 11, {**task(0), **rank_env(1)}),
    )
    (job,) = found(launchers)
    assert (pids(job), job.agent) == ({0: 21, 1: 22}, 11)
    assert job_of(11, launchers, [job]) is job


def test_job_of_parent_of_several_jobs_is_refused() -> None:
    both = table(
        process(SHELL, 1), process(101, SHELL, rank_env(0)), process(201, SHELL, rank_env(0, MASTER_PORT="29501"))
    )
    with pytest.raises(UsageError, match="several jobs") as error:
        job_of(SHELL, both, found(both))
    assert "101, 201" in error.value.fix


def test_job_of_ignores_distant_or_other_users_job() -> None:
    processes = table(
        process(1, 0),
        JobProcess(60, 1, start_ticks=60, user=0, env={}),  # sshd
        process(70, 60, user=7),
        process(SHELL, 70, user=7),
        process(TORCHRUN, SHELL, user=7),
        process(101, TORCHRUN, rank_env(0), user=7),
        process(102, TORCHRUN, rank_env(1), user=7),
    )
    (job,) = found(processes)
    assert job_of(SHELL, processes, [job]) is job_of(TORCHRUN, processes, [job]) is job
    for pid in (1, 60):
        with pytest.raises(UsageError, match=rf"process {pid} \(init, of root\) is neither a rank nor a job") as no:
            job_of(pid, processes, [job], lambda pid: "init, of root")
        assert no.value.fix == "Name a rank of a job below it: 101."
    alone = table(process(1, 0), process(101, 1, rank_env(0)))
    with pytest.raises(UsageError, match="process 1 is neither"):
        job_of(1, alone, [replace(job, agent=50) for job in found(alone)])


def test_spawned_processes_are_ranks_in_start_order() -> None:
    several = table(
        process(300, SHELL),
        *(process(pid, 300) for pid in (303, 301, 302)),
        process(304, 301),  # a loader's worker
        process(400, SHELL),
        process(401, 400),  # alone
        process(402, 101, rank_env(0)),
    )
    processes = with_spawned(several, lambda pid: pid in (301, 302, 303, 401, 402))
    (job, other) = found(processes)
    assert (pids(job), job.world_size, job.agent) == ({0: 301, 1: 302, 2: 303}, 3, 300)
    assert pids(other) == {0: 402} and job_of(304, processes, [job]) is job_of(300, processes, [job]) is job
    assert processes[304] == several[304] and processes[401] == several[401]


def test_connected_process_not_spawned_by_python_is_no_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert not is_spawned(os.getpid())
        words = [sys.executable, "-c", CONNECTED, "spawn_main"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            assert is_spawned(child.pid)
            child.communicate(b"\n")
            child.wait()


CONNECTED = "import socket; s = socket.create_server(('127.0.0.1', 0)); print('ready', flush=True); input()"
