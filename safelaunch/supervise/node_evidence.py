"""Collects the node's part of a bundle: GPUs, kernel log, versions, resources, environment, and the job's own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safelaunch.beacon import layout
from safelaunch.bundle.staging import Staging
from safelaunch.capture import gpu, logs, nccl_log, node
from safelaunch.capture.memory import KillCounts, kill_counts
from safelaunch.capture.parallel import gather_into
from safelaunch.capture.result import Result
from safelaunch.capture.sink import Gate, Sink, Step
from safelaunch.model import Artifact, GpuUse, NcclLog

NODE_DEADLINE_S = 6.0


@dataclass
class NodeSaid:
    """What of a node's files the evidence needs; it grows while they are collected, file by file.

    ``kills``: the counts of its out-of-memory killer now.
    """

    kernel_log: str = ""
    kills: KillCounts = field(default_factory=KillCounts)
    gpus: tuple[GpuUse, ...] = ()


def collect_node(
    folder: str,
    run_dir: Path,
    sink: Sink,
    said: NodeSaid,
    *,
    pid: int | None = None,
    code_roots: Sequence[str] = (),
    env: Result[dict[str, str]] | None = None,
    kills_at_start: KillCounts | None = None,
) -> None:
    """Collects the node's files in parallel, and in ``said`` what the evidence needs of them.

    ``pid``: one of the ranks, whose packages are in ``code_roots``; ``env``: the environment it was started with.
    """
    counts = said.kills = kill_counts()

    def gpus(gate: Gate) -> None:
        result = gpu.gpus_json(deadline_s=NODE_DEADLINE_S)
        step, uses = Step(gate), gpu.uses(result.value or b"", Path(folder).name)
        step.add(result.artifact(f"{folder}/gpus.json"), result.value)
        step.done(lambda: setattr(said, "gpus", tuple(uses)))
        text = gpu.nvidia_smi_text(deadline_s=NODE_DEADLINE_S)
        gate.add(text.artifact(f"{folder}/nvidia_smi.txt"), text.value)

    def kernel(gate: Gate) -> None:
        result, step = logs.kernel_log(deadline_s=NODE_DEADLINE_S), Step(gate)
        step.add(result.artifact(f"{folder}/kernel_log.txt"), result.value)
        step.done(lambda: setattr(said, "kernel_log", result.value or ""))

    def rest(gate: Gate) -> None:
        versions = node.versions(code_roots, pid=pid)
        gate.add_json(versions.artifact(f"{folder}/versions.json"), versions.value)
        resources = node.resources(pid=pid)
        kills = {"at_start": asdict(kills_at_start) if kills_at_start else None, "now": asdict(counts)}
        found = None if resources.value is None else {**resources.value, "out_of_memory_kills": kills}
        gate.add_json(resources.artifact(f"{folder}/resources.json"), found)
        if env is not None:
            gate.add_json(env.artifact(f"{folder}/env.json"), env.value)
        _run_files(run_dir, folder, gate)

    calls = {f"{folder}/gpus.json": gpus, f"{folder}/kernel_log.txt": kernel, folder: rest}
    gather_into(sink, calls, deadline_s=NODE_DEADLINE_S + 2.0)


def nccl_logs(
    pids: Sequence[int], run_dir: Path, host: str, env: Result[dict[str, str]] | None, staging: Staging | None
) -> Mapping[int, NcclLog]:
    """What NCCL warned of: in the run directory, else where the user's ``NCCL_DEBUG_FILE`` (of ``env``) says.

    Then ``staging`` gets these files as well; those of the run directory are there already.
    """
    folder = f"node/{host}"
    logs = nccl_log.logs_of(sorted((run_dir / "flight_recorder").glob("*nccl*")), folder, pids)
    pattern = env.value.get("NCCL_DEBUG_FILE", "") if env is not None and env.value else ""
    if logs or not pattern:
        return logs
    paths = list(dict.fromkeys(nccl_log.path_of(pattern, host, pid) for pid in pids))
    for path in paths:
        if staging is not None and path.is_file():
            staging.add_file(Artifact(f"{folder}/{path.name}", "NCCL_DEBUG_FILE", 0.0), path)
    return nccl_log.logs_of(paths, folder, pids)


def _run_files(run_dir: Path, folder: str, sink: Sink) -> None:
    """Collects the dumps and logs that torch, NCCL and the beacons left in the run directory."""
    for path in sorted((run_dir / "flight_recorder").glob("*")):  # a cleaner of /tmp may have removed it
        dump = "trace_rank" in path.name
        place = f"flight_recorder/{path.name}" if dump else f"{folder}/{path.name}"
        sink.add_file(Artifact(place, "written by the job", 0.0), path, dump=dump)
    log = run_dir / layout.LOG
    if log.exists():
        sink.add_file(Artifact(f"{folder}/beacon.log", "beacon", 0.0), log)
