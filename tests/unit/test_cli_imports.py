"""Foreign modules on PYTHONPATH with the names of safelaunch's dependencies, and an installation that lacks some.

``.ci/run`` tries the wheel without torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch import cli
from safelaunch.job import torchrun


@pytest.mark.parametrize(("module", "words"), [("yaml", ["presets"]), ("msgspec", ["status", "--json"])])
def test_foreign_module_on_pythonpath_does_not_shadow_dependency(module: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('foreign')\n")
    env = {**os.environ, "PYTHONPATH": os.fspath(tmp_path), "XDG_RUNTIME_DIR": os.fspath(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-m", "safelaunch", *words], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "foreign" not in shown.stderr and shown.stdout


def test_job_without_dependency_runs_under_plain_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: ran.append(argv))
    monkeypatch.delitem(sys.modules, "safelaunch.supervise.run", raising=False)
    monkeypatch.delitem(sys.modules, "safelaunch.cli.run", raising=False)
    monkeypatch.setitem(sys.modules, "safelaunch.cli.run", None)
    cli.main(["--stall-timeout=5", "--nproc-per-node=2", "--preset", "hang-debug", str(script), "--preset", "mine"])
    (argv,) = ran
    assert argv[1].endswith("torchrun") and argv[2:] == ["--nproc-per-node=2", str(script), "--preset", "mine"]
    stderr = capfd.readouterr().err
    assert stderr.count("\n") == 1 and "not watching this job" in stderr and "running plain torchrun" in stderr


@pytest.mark.parametrize("words", [["presets"], ["status"], ["gpus"], ["dump", "--pid=1"], ["diagnose", "job.log"]])
def test_subcommand_does_not_import_torch(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text('[rank1]: Traceback (most recent call last):\n[rank1]:   File "a.py", line 1\n')
    (tmp_path / "torch.py").write_text("raise SystemError('torch was imported')\n")
    env = {**os.environ, "PYTHONPATH": os.fspath(tmp_path), "XDG_RUNTIME_DIR": os.fspath(tmp_path)}
    command = [sys.executable, "-m", "safelaunch", *words]
    shown = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode in (0, 1, 2) and "torch was imported" not in shown.stderr, shown.stderr
    assert "Traceback" not in shown.stderr


def test_job_without_torch_is_refused_with_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setattr(torchrun, "_torch_on", lambda path: None)
    assert cli.main(["--nproc-per-node=2", "train.py"]) == 2
    *_, last = capfd.readouterr().err.splitlines()
    assert last == f"safelaunch:     {sys.executable} -m pip install torch"
