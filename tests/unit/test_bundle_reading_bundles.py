"""Facts about a job and its nodes from the files of a bundle, which might be damaged or made by another user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safelaunch.bundle.reading.report_header import about
from safelaunch.report.about import LaunchFacts, Link


def bundle(root: Path) -> Path:
    (root / "node/a").mkdir(parents=True)
    (root / "launch.json").write_text(
        json.dumps({"run_name": "train", "command": ["torchrun", "x.py"], "torch": "2.13"})
    )
    (root / "manifest.json").write_text(json.dumps({"written_unix_s": 1.5e9}))
    gpu = {"index": 0, "name": "H100", "memory_used_bytes": 5, "memory_total_bytes": 10, "utilisation_percent": None}
    (root / "node/a/gpus.json").write_text(json.dumps({"driver": "1", "gpus": [gpu, {"index": 1, "error": "lost"}]}))
    disks = {"/tmp": {"total_bytes": 100, "free_bytes": 25}, "/dead": {"missing": "no answer"}}
    resources = {"cpus": 8, "load": [1.0, 2.0, 3.0], "memory_bytes": {"MemTotal": 9, "MemAvailable": 4}, "disks": disks}
    resources["network"] = {
        "eth0": {"state": "up", "speed_mbit": 25000, "mtu": 9000},
        "eth1": {"state": "up", "mtu": 1500},
        "mlx5_0/1": {"state": "DOWN", "rate": "10 Gb/sec", "link_downed": 3},
    }
    (root / "node/a/env.json").write_text(json.dumps({"NCCL_DEBUG": "INFO", "PATH": "/bin", "MASTER_ADDR": "a"}))
    (root / "node/a/resources.json").write_text(json.dumps(resources))
    (root / "node/a/versions.json").write_text(json.dumps({"torch": "2.13", "kernel": "6.1"}))
    (root / "node/a/kernel_log.txt").write_text("".join(f"line {n}\n" for n in range(100)))
    return root


def test_about_has_launch_and_node_facts(tmp_path: Path) -> None:
    header = about(bundle(tmp_path / "train-hang"))
    assert (header.bundle, header.at_unix_s) == ("train-hang", 1.5e9)
    assert (header.launch.run_name, header.launch.command) == ("train", ("torchrun", "x.py"))
    (node,) = header.nodes
    assert [gpu.name or gpu.error for gpu in node.gpus] == ["H100", "lost"]
    assert node.disks == (("/tmp", 0.75),) and node.versions == (("torch", "2.13"),)
    assert node.network == (
        Link("eth0", "up", "25000 Mbit/s, MTU 9000"),
        Link("eth1", "up", "MTU 1500"),
        Link("mlx5_0/1", "DOWN", "10 Gb/sec", "3 link downed"),
    )
    assert node.environment == (("NCCL_DEBUG", "INFO"), ("MASTER_ADDR", "a"))
    assert node.kernel_log[-1] == "line 99" and len(node.kernel_log) == 40


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["2026-11-22 09:59:59 nvrm: old", "2026-11-22 10:00:01 nvrm: new"], [1]),
        (["2026-11-22T10:30:00+01:00 host kernel: old", "2026-11-22T11:00:00+0100 host kernel: new"], [1]),
        (["(nothing relevant)"], []),
        (["without a time", "2026-99-99 10:00:01 no time"], [0, 1]),
    ],
)
def test_about_kernel_log_starts_with_run(tmp_path: Path, lines: list[str], shown: list[int]) -> None:
    """Earlier kernel messages and the note about an empty log are left out."""
    root = bundle(tmp_path / "one")
    (root / "launch.json").write_text(json.dumps({"started": "2026-11-22T10:00:00Z"}))
    (root / "node/a/kernel_log.txt").write_text("\n".join(lines) + "\n")
    assert list(about(root).nodes[0].kernel_log) == [lines[at] for at in shown]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"gpus": 3, "command": [1], "cpus": "x"}', b"\xff\xfe", b"[" * 99_999]
)
def test_about_leaves_out_damaged_files(tmp_path: Path, content: bytes) -> None:
    root = bundle(tmp_path / "one")
    for path in root.rglob("*.json"):
        path.write_bytes(content)
    header = about(root)
    assert header.launch == LaunchFacts() and [node.host for node in header.nodes] == ["a"]
    assert header.nodes[0].gpus == ()


def test_about_follows_no_links(tmp_path: Path) -> None:
    root = bundle(tmp_path / "one")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (root / "node/a/kernel_log.txt").unlink()
    (root / "node/a/kernel_log.txt").symlink_to(secret)
    (root / "node/b").symlink_to(tmp_path)
    header = about(root)
    assert [node.host for node in header.nodes] == ["a"] and header.nodes[0].kernel_log == ()
