"""Collects the node's part of a bundle: GPUs, kernel log, versions, resources, environment, and the job's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safelaunch.beacon import layout
from safelaunch.bundle.staging import Staging
from safelaunch.capture import nccl, node
from safelaunch.capture.redaction import without_secrets
from safelaunch.capture.result import Gate, Result, Sink, Step, gather_into
from safelaunch.model import Artifact, NcclLog, node_file
from safelaunch.system.redaction.redactor import Redactor


def collect_node(
    folder: str, run_dir: Path, sink: Sink, found: dict[str, Any], asked: node.Subject, redactor: Redactor
) -> None:
    """Collects the node's files, all at once; ``found`` gets their values by the fields of ``NodeFiles``."""

    def ask(gate: Gate, name: str, source: Callable[[node.Subject], Result[Any] | None]) -> None:
        result = source(asked)
        if result is None:
            return
        value, step = without_secrets(result.value, redactor), Step(gate)
        artifact = result.artifact(f"{folder}/{node_file(name)}")
        step.add(artifact, value) if isinstance(value, str) else step.add_json(artifact, value)
        step.done(lambda: found.update({name: value} if value is not None else {}))

    calls: dict[str, Callable[[Gate], object]] = {
        f"{folder}/{node_file(name)}": lambda gate, name=name, source=source: ask(gate, name, source)  # type: ignore[misc]
        for name, source in node.sources().items()
    }
    calls[folder] = lambda gate: _run_files(run_dir, folder, gate)
    gather_into(sink, calls, deadline_s=node.DEADLINE_S + 2.0)


def nccl_logs(
    pids: Sequence[int], run_dir: Path, host: str, env: Result[dict[str, str]] | None, staging: Staging | None
) -> Mapping[int, NcclLog]:
    """What NCCL warned of: in the run directory, else where the user's ``NCCL_DEBUG_FILE`` (of ``env``) says.

    Then ``staging`` gets these files as well; those of the run directory are there already.
    """
    folder = f"node/{host}"
    logs = nccl.logs_of(sorted((run_dir / "flight_recorder").glob("*nccl*")), folder, pids)
    pattern = env.value.get("NCCL_DEBUG_FILE", "") if env is not None and env.value else ""
    if logs or not pattern:
        return logs
    paths = list(dict.fromkeys(nccl.path_of(pattern, host, pid) for pid in pids))
    for path in paths:
        if staging is not None and path.is_file():
            staging.add_file(Artifact(f"{folder}/{path.name}", "NCCL_DEBUG_FILE", 0.0), path)
    return nccl.logs_of(paths, folder, pids)


def _run_files(run_dir: Path, folder: str, sink: Sink) -> None:
    """Collects the dumps and logs that torch, NCCL and the beacons left in the run directory."""
    for path in sorted((run_dir / "flight_recorder").glob("*")):  # a cleaner of /tmp may have removed it
        dump = "trace_rank" in path.name
        place = f"flight_recorder/{path.name}" if dump else f"{folder}/{path.name}"
        sink.add_file(Artifact(place, "written by the job", 0.0), path, dump=dump)
    log = run_dir / layout.LOG
    if log.exists():
        sink.add_file(Artifact(f"{folder}/beacon.log", "beacon", 0.0), log)
