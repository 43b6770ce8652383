"""``safelaunch dump`` of jobs that it can't read prints the command that can."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safelaunch import cli
from safelaunch.capture import jobs
from safelaunch.capture.jobs import JobProcess
from safelaunch.cli import doctor_node
from safelaunch.cli.doctor_rules import Rights
from safelaunch.supervise import attach as attaching
from safelaunch.system import commands
from safelaunch.system.errors import AccessDenied

NORMAL_USER = Rights(yama=1, capable=False, seccomp=0, place="host")
BY_YAMA = "dump: no stack could be read: permission denied by Yama (kernel.yama.ptrace_scope=1)."


def rank(pid: int, port: int) -> JobProcess:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(port)}
    return JobProcess(pid, 1, user=os.getuid(), env=env)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Node with these processes and rights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAFELAUNCH_BUNDLE_DIR", raising=False)
    monkeypatch.setattr(commands, "as_root", lambda words: ["sudo", "/venv/bin/safelaunch", *words])

    def made(*processes: JobProcess, rights: Rights = NORMAL_USER) -> None:
        monkeypatch.setattr(jobs, "processes", lambda: {process.pid: process for process in processes})
        monkeypatch.setattr(jobs, "packages_of", lambda pid: "/packages")
        monkeypatch.setattr(doctor_node, "rights", lambda environ: rights)

    return made


def refused(pids: tuple[int, ...], looked_at: list[int]) -> Callable[..., Any]:
    def attach(job: jobs.RunningJob, bundle_dir: Path) -> Any:
        (pid,) = job.members
        looked_at.append(pid)
        raise AccessDenied(BY_YAMA if pid in pids else f"dump: {pid} is refused for another reason.")

    return attach


@pytest.mark.parametrize(
    ("words", "variable", "again"),
    [
        (["--all"], "", "--all"),
        (["--pid=7"], "", "--pid 7"),
        (["--all", "--json", "--bundle-dir", "my bundles"], "/elsewhere", "--all --json --bundle-dir 'my bundles'"),
        (["--all"], "/elsewhere", "--all --bundle-dir /elsewhere"),  # sudo removes the variable
    ],
)
def test_dump_denied_by_yama_prints_command_as_root(
    words: list[str],
    variable: str,
    again: str,
    node: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    node(rank(7, 29500))
    monkeypatch.setattr(attaching, "attach", refused((7,), []))
    if variable:
        monkeypatch.setenv("SAFELAUNCH_BUNDLE_DIR", variable)
    assert cli.main(["dump", *words]) == 1
    *_, why, how, line = capfd.readouterr().err.splitlines()
    assert why == f"safelaunch: {BY_YAMA}"
    assert how == "safelaunch:   As root, it can read them:"
    assert line == f"safelaunch:     sudo /venv/bin/safelaunch dump {again}"


def test_dump_all_continues_after_denied_job(
    node: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    looked_at: list[int] = []
    node(rank(7, 29500), rank(8, 29501))
    monkeypatch.setattr(attaching, "attach", refused((7,), looked_at))
    assert cli.main(["dump", "--all"]) == 1
    stderr = capfd.readouterr().err
    assert sorted(looked_at) == [7, 8]
    assert BY_YAMA in stderr and "8 is refused for another reason." in stderr


def test_dump_without_job_prints_command_for_other_users(
    node: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    node(JobProcess(7, 1, user=0, env=None))
    assert cli.main(["dump", "--all"]) == 1
    stderr = capfd.readouterr().err
    assert "no job was found" in stderr and "Processes of other users were not searched." in stderr
    assert stderr.endswith("safelaunch:     sudo /venv/bin/safelaunch dump --all\n")
    for process, rights in (
        (JobProcess(7, 1, env={}), NORMAL_USER),
        (JobProcess(7, 1, user=0, env=None), replace(NORMAL_USER, capable=True, root=True)),
    ):
        node(process, rights=rights)
        assert cli.main(["dump", "--all"]) == 1
        assert capfd.readouterr().err.endswith("Ranks are known by RANK and WORLD_SIZE.\n")


def test_dump_of_other_users_process_prints_command_as_root(
    node: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    node(JobProcess(7, 1, user=0, env=None))
    assert cli.main(["dump", "--pid", "7"]) == 1
    stderr = capfd.readouterr().err
    assert "cannot read the environment of process 7: it belongs to root." in stderr
    assert stderr.endswith("safelaunch:     sudo /venv/bin/safelaunch dump --pid 7\n")


def test_dump_command_in_container_has_bundle_directory(
    node: Callable[..., None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node(JobProcess(7, 1, user=0, env=None), rights=replace(NORMAL_USER, place="docker"))
    assert cli.main(["dump", "--all"]) == 1
    line = shlex.split(capfd.readouterr().err.splitlines()[-1])
    assert line[1:5] == ["docker", "exec", "--privileged", "--user"]
    assert line[-4:] == ["dump", "--all", "--bundle-dir", str(tmp_path / "safelaunch-bundles")]
