"""Containers that share /tmp and a user: runs in pid namespaces of their own leave each other's directories alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job

ELSEWHERE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
STAYS = "import os, pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.05)\n"


def cannot() -> str:
    if os.getuid() or shutil.which("unshare") is None:
        return "takes root and unshare"
    done = subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "pid namespaces cannot be made here"


pytestmark = pytest.mark.skipif(bool(cannot()), reason=cannot() or "-")


def directories(job: Job) -> list[Path]:
    return sorted((job.runtime / "safelaunch").glob("r[0-9]*"))


def script(tmp_path: Path, name: str, text: str) -> Path:
    place = tmp_path / name
    place.mkdir()
    (place / "train.py").write_text(text)
    return place


def started(job: Job, number: int) -> None:
    job.until(lambda: sum((found / "pages").is_dir() for found in directories(job)) == number, f"{number} runs")


def test_a_run_in_another_pid_namespace_sweeps_nothing_that_lives(tmp_path: Path) -> None:
    long, short = script(tmp_path, "long", STAYS), script(tmp_path, "short", "")
    python = (sys.executable, "-m", "safelaunch")
    with Job(["exec", "--", sys.executable, "train.py"], long) as first:
        started(first, 1)
        (mine,) = directories(first)
        with Job(
            ["exec", "--", sys.executable, "train.py"], short, runtime=first.runtime, interpreter=[*ELSEWHERE, *python]
        ) as second:
            assert second.wait().code == 0, second.stderr
        assert directories(first) == [mine] and (mine / "pages").is_dir()
        (long / "go").touch()
        assert first.wait().code == 0
        assert directories(first) == []


def test_runs_of_one_number_in_several_namespaces(tmp_path: Path) -> None:
    """In each namespace safelaunch is process 1: all want r1, and each is watched in a directory of its own."""
    places = [script(tmp_path, f"job{number}", STAYS) for number in range(3)]
    words = ["exec", "--", sys.executable, "train.py"]
    interpreter = [*ELSEWHERE, sys.executable, "-m", "safelaunch"]
    with Job(words, places[0], interpreter=interpreter) as first:
        jobs = [first, *(Job(words, place, runtime=first.runtime, interpreter=interpreter) for place in places[1:])]
        try:
            started(first, 3)
            assert [path.name for path in directories(first)] == ["r1", "r1-1", "r1-2"]
            status = subprocess.run(
                [sys.executable, "-m", "safelaunch", "status", "--json"],
                env={**os.environ, "XDG_RUNTIME_DIR": os.fspath(first.runtime)},
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            shown = {run["run"]: run["alive"] for run in json.loads(status.stdout)}
            assert {name: shown[name] for name in ("r1", "r1-1", "r1-2")} == dict.fromkeys(["r1", "r1-1", "r1-2"], True)
            for place in places:
                (place / "go").touch()
            assert [job.wait().code for job in jobs] == [0, 0, 0]
            assert directories(first) == []
        finally:
            for job in jobs:
                job.clean_up()
