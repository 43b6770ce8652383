"""Runs and ranks, as their supervisors describe them to ``status``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from safelaunch.job.process import ProcessId
from safelaunch.supervise.control.discover import Run
from safelaunch.supervise.control.protocol import RankStatus, RunStatus


def rank(number: int, **known: object) -> RankStatus:
    plain = RankStatus(number, 100 + number, "running", step=60, steps_per_s=2.0, age_s=0.3, signals="beacon")
    return msgspec.structs.replace(plain, **known)


def run_status(*ranks: RankStatus, **known: object) -> RunStatus:
    plain = RunStatus(
        run="r10",
        name="train",
        supervisor_pid=10,
        cwd="/work",
        command=["train.py", "--lr", "3"],
        started_unix_s=1000.0,
        attempt=0,
        world_size=max(len(ranks), 1),
        watch="watching",
        threshold_s=600.0,
        threshold_why="auto",
        ranks=list(ranks),
    )
    return msgspec.structs.replace(plain, **known)


def run(pid: int, said: RunStatus | None = None, **known: object) -> Run:
    return replace(Run(Path(f"/tmp/s/r{pid}"), ProcessId(pid, 5), said), **known)  # type: ignore[arg-type]


RUNS = (
    run(10, run_status(name="train")),
    run(11, run_status(name="eval")),
    run(12, run_status(name="train")),
    run(13, run_status(name="11")),
)
