"""Reads what a bundle says of the job and its nodes, for reports. Its files may be a stranger's, or half written."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from safelaunch.bundle.reading.found import Unreadable, read_limited
from safelaunch.capture.logs import NOTHING
from safelaunch.report.about import About, Gpu, Launch, Link, NodeFiles
from safelaunch.system import untrusted_paths
from safelaunch.system.decoding import from_json

_T = TypeVar("_T")
MOST_BYTES = 4 << 20
MOST_NODES = 1024
MOST_LINES = 40
_MATTERS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "MASTER_", "UCX_", "FI_", "OMP_NUM_THREADS")
_NO_COUNTS = ("state", "rate", "speed_mbit")
_NO_VERSIONS = ("system", "kernel", "machine", "python_executable", "torch_git")


class _Gpus(msgspec.Struct):
    gpus: tuple[Gpu, ...] = ()
    missing: str = ""
    driver: str | None = None


class _Resources(msgspec.Struct):
    cpus: int | None = None
    load: tuple[float, ...] = ()
    memory_bytes: dict[str, int] = {}
    disks: dict[str, dict[str, Any]] = {}
    network: dict[str, dict[str, Any]] = {}


class _Written(msgspec.Struct):
    written_unix_s: float = 0.0


def about(root: Path) -> About:
    """What the bundle in ``root`` says. Never raises for its contents: what is damaged is left out."""
    written = _json(root / "manifest.json", _Written) or _Written()
    launch = _json(root / "launch.json", Launch) or Launch()
    begun_s = _moment(launch.started)
    return About(root.name, written.written_unix_s, launch, tuple(_node(path, begun_s) for path in _nodes(root)))


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
    return [path for path in paths if not path.is_symlink() and untrusted_paths.is_dir(path)]


def _node(folder: Path, begun_s: float) -> NodeFiles:
    gpus = _json(folder / "gpus.json", _Gpus) or _Gpus()
    resources = _json(folder / "resources.json", _Resources) or _Resources()
    versions = _json(folder / "versions.json", dict[str, str]) or {}
    environment = _json(folder / "env.json", dict[str, str]) or {}
    return NodeFiles(
        host=folder.name,
        gpus=gpus.gpus,
        no_gpus=gpus.missing,
        cpus=resources.cpus or 0,
        load=resources.load,
        memory_total_bytes=resources.memory_bytes.get("MemTotal", 0),
        memory_available_bytes=resources.memory_bytes.get("MemAvailable", 0),
        disks=tuple(_used(place, disk) for place, disk in resources.disks.items() if "total_bytes" in disk),
        network=tuple(_link(name, link) for name, link in resources.network.items()),
        environment=tuple((name, text) for name, text in environment.items() if name.startswith(_MATTERS)),
        versions=tuple((name, text) for name, text in versions.items() if name not in _NO_VERSIONS),
        kernel_log=tuple(_since(begun_s, _text(folder / "kernel_log.txt").splitlines())[-MOST_LINES:]),
    )


def _since(begun_s: float, lines: Sequence[str]) -> list[str]:
    """The messages of the run alone: the log goes back to the boot of the node. A line without a time stays."""
    times = [_moment(line) for line in lines]
    return [line for line, at_s in zip(lines, times, strict=True) if line != NOTHING and not 0 < at_s < begun_s]


_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(Z|[+-]\d\d:?\d\d)?", re.ASCII)


def _moment(text: str) -> float:
    """The time at the beginning of a text, in Unix seconds, of UTC where it names no zone; 0 without one."""
    found = _MOMENT.match(text)
    if found is None:
        return 0.0
    zone = (found[3] or "Z").replace("Z", "+0000").replace(":", "")
    try:
        return dt.datetime.strptime(f"{found[1]} {found[2]} {zone}", "%Y-%m-%d %H:%M:%S %z").timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _used(place: str, disk: Mapping[str, Any]) -> tuple[str, float]:
    total, free = disk.get("total_bytes"), disk.get("free_bytes")
    known = isinstance(total, (int, float)) and isinstance(free, (int, float)) and total > 0
    return place, 1 - free / total if known else 0.0  # type: ignore[operator]


def _link(name: str, link: Mapping[str, Any]) -> Link:
    speed = link.get("rate") or (f"{link['speed_mbit']} Mbit/s" if link.get("speed_mbit") else "")
    counted = [f"{count} {what.replace('_', ' ')}" for what, count in link.items() if what not in _NO_COUNTS and count]
    return Link(name, str(link.get("state", "")), str(speed), ", ".join(counted))


def _json(path: Path, kind: type[_T]) -> _T | None:
    try:
        return from_json(_bytes(path), kind)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", "replace")


def _bytes(path: Path) -> bytes:
    try:
        return read_limited(path, MOST_BYTES) if untrusted_paths.exists(path) else b""
    except Unreadable:
        return b""
