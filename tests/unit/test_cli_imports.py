"""Foreign modules on PYTHONPATH with the names of safelaunch's dependencies, and an installation that lacks some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from safelaunch import cli


@pytest.mark.parametrize(("module", "words"), [("yaml", ["presets"]), ("msgspec", ["status", "--json"])])
def test_a_foreign_module_on_pythonpath_is_not_taken_for_a_dependency(
    module: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text("raise ImportError('foreign')\n")
    env = {**os.environ, "PYTHONPATH": os.fspath(tmp_path), "XDG_RUNTIME_DIR": os.fspath(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-m", "safelaunch", *words], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "foreign" not in shown.stderr and shown.stdout


def test_without_a_dependency_a_job_runs_as_under_plain_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: ran.append(argv))
    monkeypatch.delitem(sys.modules, "safelaunch.supervise.session", raising=False)
    monkeypatch.delitem(sys.modules, "safelaunch.cli.run", raising=False)
    monkeypatch.setitem(sys.modules, "safelaunch.cli.run", None)
    cli.main(["--stall-timeout=5", "--nproc-per-node=2", "--preset", "hang-debug", str(script), "--preset", "mine"])
    (argv,) = ran
    assert argv[1].endswith("torchrun") and argv[2:] == ["--nproc-per-node=2", str(script), "--preset", "mine"]
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "not watching this job" in said and "running plain torchrun" in said
