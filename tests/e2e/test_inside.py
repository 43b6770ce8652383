"""Hangs on a node that refuses py-spy: the ranks send their stacks themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from safelaunch.capture.inside import HOW
from tests.qa import zoo
from tests.support.broken_py_spy import without_rights
from tests.support.jobs import Job
from tests.support.paths import PROGRAMS

pytestmark = pytest.mark.torch

REFUSED = (sys.executable, os.fspath(PROGRAMS / "refused.py"), sys.executable, "-m", "safelaunch")
LINE = "py-spy can't read the stacks of the ranks: "


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs a virtual environment, to make another one like it")
def test_refused_tracing_is_announced_and_the_hang_is_proved_from_inside(tmp_path: Path) -> None:
    specimen, interpreter = zoo.BY_NAME["lock-order"], without_rights(tmp_path / "bare")
    with zoo.start(specimen, 1, tmp_path, interpreter=interpreter, env={"PATH": "/usr/bin:/bin"}) as job:
        result = job.wait()

    assert zoo.judge(specimen, 1, result) == []
    assert result.verdict["proof"], result.verdict
    assert result.stderr.count(LINE) == 1
    assert "safelaunch doctor" in result.stderr.partition(LINE)[2].partition("\n")[0]
    assert "no stack could be read" not in result.stderr
    samples = result.bundle.json("ranks/1/stack.json")
    assert {sample["how"] for sample in samples} == {HOW}
    states = result.bundle.json("ranks/1/proc.json")["main"]["states"]
    tids = {thread["tid"] for thread in states[-1]["threads"]}
    assert {thread["os_tid"] for thread in samples[0]["threads"]} <= tids
    artifacts = {one["path"]: one for one in result.bundle.json("manifest.json")["artifacts"]}
    assert "without C frames" in artifacts["ranks/1/stack.json"]["note"]
    assert "read from inside the rank" in result.bundle.text("report.md")


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="an undumpable process may read its own files only as root")
def test_undumpable_rank_sends_its_system_calls_and_time_limits(tmp_path: Path) -> None:
    specimen = zoo.BY_NAME["asleep"]
    words = [*zoo.options_of(specimen), "--nproc-per-node=2", PROGRAMS / "undumpable.py"]
    with Job([*words, *zoo.script_of(specimen, 0, tmp_path)], tmp_path, interpreter=REFUSED) as job:
        result = job.wait()

    assert (result.verdict["cause"], [one["rank"] for one in result.verdict["culprits"]]) == (specimen.cause, [0])
    assert result.stderr.count(f"{LINE}permission denied") == 1
    assert {sample["how"] for sample in result.bundle.json("ranks/0/stack.json")} == {HOW}
    states = result.bundle.json("ranks/0/proc.json")["main"]["states"]
    thread = next(one for one in states[-1]["threads"] if one["tid"] == states[-1]["pid"])
    assert thread["syscall_name"] == "clock_nanosleep"
    assert thread["ends_s"] > 1.0
