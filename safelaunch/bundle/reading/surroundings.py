"""Reads what a bundle says of the job and its nodes, for reports. Its files may be a stranger's, or half written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from safelaunch.bundle.reading.guard import Unreadable, read_limited
from safelaunch.capture.node import since
from safelaunch.model import Gpus, Manifest, NodeFiles, Resources, node_file
from safelaunch.report.about import About, Launch, Link, NodeSummary
from safelaunch.system.decoding import from_json
from safelaunch.system.files import exists, is_dir

_T = TypeVar("_T")
MOST_BYTES = 4 << 20
MOST_NODES = 1024
MOST_LINES = 40
_MATTERS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "MASTER_", "UCX_", "FI_", "OMP_NUM_THREADS")
_NO_COUNTS = ("state", "rate", "speed_mbit", "mtu")
NOBODY: Mapping[str, NodeFiles] = {}
_NO_VERSIONS = ("system", "kernel", "machine", "python_executable", "torch_git")


def about(root: Path, launch: Launch | None = None, own: Mapping[str, NodeFiles] = NOBODY) -> About:
    """What the bundle in ``root`` says. Never raises for its contents: what is damaged is left out.

    ``launch``, and ``own`` by host: what is known without reading it.
    """
    launch = launch or _json(root / "launch.json", Launch) or Launch()
    nodes = {path.name: own.get(path.name) or _files_in(path) for path in _nodes(root)}
    written = _json(root / "manifest.json", Manifest) or Manifest()
    return About(
        root.name, written.written_unix_s, launch, tuple(_summary(*one, launch.started) for one in nodes.items())
    )


def about_all(roots: Sequence[Path]) -> About:
    """What several bundles of one job say, those of its nodes: its start from the first, and all nodes."""
    each = [about(root) for root in roots]
    if not each:
        return About()
    nodes = {node.host: node for one in each for node in one.nodes}
    latest = max(one.at_unix_s for one in each)
    return About(each[0].bundle, latest, each[0].launch, tuple(nodes[host] for host in sorted(nodes)))


def _nodes(root: Path) -> list[Path]:
    try:
        paths = sorted((root / "node").iterdir())[:MOST_NODES]
    except OSError:
        return []
    return [path for path in paths if not path.is_symlink() and is_dir(path)]


def _files_in(folder: Path) -> NodeFiles:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(NodeFiles):
        path = folder / node_file(field.name)
        value = _text(path) if path.suffix == ".txt" else _json(path, field.type)
        found |= {field.name: value} if value else {}
    return NodeFiles(**found)


def _summary(host: str, files: NodeFiles, begun: str) -> NodeSummary:
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
        versions=tuple((name, text) for name, text in files.versions.items() if name not in _NO_VERSIONS),
        kernel_log=tuple(since(begun, files.kernel_log.splitlines())[-MOST_LINES:]),
    )


def _used(place: str, disk: Mapping[str, Any]) -> tuple[str, float]:
    total, free = disk.get("total_bytes"), disk.get("free_bytes")
    known = isinstance(total, (int, float)) and isinstance(free, (int, float)) and total > 0
    return place, 1 - free / total if known else 0.0  # type: ignore[operator]


def _link(name: str, link: Mapping[str, Any]) -> Link:
    speed = link.get("rate") or (f"{link['speed_mbit']} Mbit/s" if link.get("speed_mbit") else "")
    mtu = f"MTU {link['mtu']}" if link.get("mtu") else ""
    counted = [f"{count} {what.replace('_', ' ')}" for what, count in link.items() if what not in _NO_COUNTS and count]
    return Link(name, str(link.get("state", "")), ", ".join(filter(None, (str(speed), mtu))), ", ".join(counted))


def _json(path: Path, kind: type[_T]) -> _T | None:
    try:
        return from_json(_bytes(path), kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _bytes(path: Path) -> bytes:
    try:
        return read_limited(path, MOST_BYTES) if exists(path) else b""
    except Unreadable:
        return b""
