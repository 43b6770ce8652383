"""Reads facts about a job and its nodes from a bundle, for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from safelaunch.bundle.reading.bundles import BundleFolder
from safelaunch.capture.kernel_log import since
from safelaunch.model import (
    Gpus,
    Manifest,
    NodeFiles,
    Resources,
    node_file,
)
from safelaunch.model.evidence import software
from safelaunch.report.about import LaunchFacts, Link, NodeSummary, ReportHeader

MOST_FOR_REPORTS = 4 << 20
MOST_NODES = 1024
MOST_LINES = 40
_MATTERS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "MASTER_", "UCX_", "FI_", "OMP_NUM_THREADS")
_NO_COUNTS = ("state", "rate", "speed_mbit", "mtu")
NOBODY: Mapping[str, NodeFiles] = {}


def about(root: Path, launch: LaunchFacts | None = None, node_files: Mapping[str, NodeFiles] = NOBODY) -> ReportHeader:
    """Returns the header of a report on a bundle. Skips damaged files, so it never raises.

    ``launch`` and ``node_files`` (by host) are read from the bundle only if not given.
    """
    bundle = BundleFolder(root, MOST_FOR_REPORTS)
    launch = launch or bundle.json("launch.json", LaunchFacts) or LaunchFacts()
    written = bundle.json("manifest.json", Manifest) or Manifest()
    files = {host: node_files.get(host) or _files_of(bundle, host) for host in bundle.hosts()[:MOST_NODES]}
    nodes = tuple(_summary(host, facts, launch.started) for host, facts in files.items())
    return ReportHeader(root.name, written.written_unix_s, launch, nodes)


def about_all(roots: Sequence[Path]) -> ReportHeader:
    each = [about(root) for root in roots]
    if not each:
        return ReportHeader()
    nodes = {node.host: node for header in each for node in header.nodes}
    latest = max(header.at_unix_s for header in each)
    return ReportHeader(each[0].bundle, latest, each[0].launch, tuple(nodes[host] for host in sorted(nodes)))


def _files_of(bundle: BundleFolder, host: str) -> NodeFiles:
    contents: dict[str, Any] = {}
    for field in msgspec.structs.fields(NodeFiles):
        name = f"node/{host}/{node_file(field.name)}"
        value = bundle.text(name) if name.endswith(".txt") else bundle.json(name, field.type)
        contents |= {field.name: value} if value else {}
    return NodeFiles(**contents)


def _summary(host: str, files: NodeFiles, started: str) -> NodeSummary:
    gpus, resources = files.gpus or Gpus(), files.resources or Resources()
    return NodeSummary(
        host=host,
        gpus=gpus.gpus,
        no_gpus=gpus.missing,
        cpus=resources.cpus or 0,
        load=resources.load,
        memory_total_bytes=resources.memory_bytes.get("MemTotal", 0),
        memory_available_bytes=resources.memory_bytes.get("MemAvailable", 0),
        disks=tuple(_used(place, disk) for place, disk in resources.disks.items() if "total_bytes" in disk),
        network=tuple(_link(name, link) for name, link in resources.network.items()),
        environment=tuple((name, text) for name, text in files.env.items() if name.startswith(_MATTERS)),
        versions=tuple(software(files.versions).items()),
        kernel_log=tuple(since(started, files.kernel_log.splitlines())[-MOST_LINES:]),
    )


def _used(place: str, disk: Mapping[str, Any]) -> tuple[str, float]:
    total, free = disk.get("total_bytes"), disk.get("free_bytes")
    is_known = isinstance(total, (int, float)) and isinstance(free, (int, float)) and total > 0
    return place, 1 - free / total if is_known else 0.0  # type: ignore[operator]


def _link(name: str, link: Mapping[str, Any]) -> Link:
    speed = link.get("rate") or (f"{link['speed_mbit']} Mbit/s" if link.get("speed_mbit") else "")
    mtu = f"MTU {link['mtu']}" if link.get("mtu") else ""
    counted = [f"{count} {what.replace('_', ' ')}" for what, count in link.items() if what not in _NO_COUNTS and count]
    return Link(name, str(link.get("state", "")), ", ".join(filter(None, (str(speed), mtu))), ", ".join(counted))
