"""Collects files about the node: GPUs, kernel log, versions, resources, environment, and the job's own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safelaunch.beacon import layout
from safelaunch.capture import node
from safelaunch.capture.gather import gather_into
from safelaunch.capture.node import NodeSubject
from safelaunch.capture.result import Result
from safelaunch.capture.sink import FileGroup, Gate, Sink
from safelaunch.model import (
    Artifact,
    node_file,
)
from safelaunch.supervise.job_context import JobContext


def collect_node(context: JobContext, sink: Gate, values: dict[str, Any], subject: NodeSubject) -> None:
    folder = f"node/{context.host}"

    def ask(gate: Gate, name: str, source: Callable[[NodeSubject], Result[Any] | None]) -> None:
        result = source(subject)
        if result is None:
            return
        value, step = context.cleaned(result.value), FileGroup(gate)
        artifact = result.artifact(f"{folder}/{node_file(name)}")
        step.add(artifact, value) if isinstance(value, str) else step.add_json(artifact, value)
        step.done(lambda: values.update({name: value} if value is not None else {}))

    calls: dict[str, Callable[[Gate], object]] = {
        f"{folder}/{node_file(name)}": lambda gate, name=name, source=source: ask(gate, name, source)  # type: ignore[misc]
        for name, source in node.sources().items()
    }
    calls[folder] = lambda gate: _run_files(context.run_dir, folder, gate)
    gather_into(sink, calls, deadline_s=node.DEADLINE_S + 2.0)


def _run_files(run_dir: Path, folder: str, sink: Sink) -> None:
    for path in sorted((run_dir / "flight_recorder").glob("*")):  # empty if a cleaner of /tmp removed the directory
        dump = "trace_rank" in path.name
        place = f"flight_recorder/{path.name}" if dump else f"{folder}/{path.name}"
        sink.add_file(Artifact(place, "written by the job", 0.0), path, dump=dump)
    log = run_dir / layout.LOG
    if log.exists():
        sink.add_file(Artifact(f"{folder}/beacon.log", "beacon", 0.0), log)
