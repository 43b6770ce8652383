"""Record of a GPU that runs out of memory, with a stand-in for torch's allocator."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from safelaunch.beacon import device_memory, layout, log
from safelaunch.model import DeviceMemory
from safelaunch.system.decoding import load_pickle

FRAMES = [{"filename": f"/job/model{depth}.py", "line": depth, "name": "forward"} for depth in range(100)]


def block(size: int, state: str = "active_allocated", at: int = 0) -> dict[str, Any]:
    return {"size": size, "state": state, "frames": FRAMES[at:]}


SEGMENTS = [
    {"device": 0, "blocks": [block(30), block(50, at=1), block(30), block(7, "inactive"), block(9, "inactive")]},
    {"device": 1, "blocks": [block(1000)]},
]


class OutOfMemoryError(RuntimeError):
    """Stand-in for torch's exception, which the beacon recognizes by its name."""


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    monkeypatch.setattr(log, "run_dir", str(tmp_path))
    memory = SimpleNamespace(_snapshot=lambda: {"segments": SEGMENTS, "device_traces": [["x" * 5000], []]})
    cuda = SimpleNamespace(
        memory=memory,
        memory_snapshot=lambda: SEGMENTS,
        memory_stats=lambda device: {"allocated_bytes.all.current": 110, "reserved_bytes.all.current": 126},
        current_device=lambda: 0,
    )
    torch_module = SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch_module)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.nn", SimpleNamespace(Module=type("Module", (), {})))  # type: ignore[arg-type]
    for name, value in (("_base", ""), ("_observed", 0), ("_stale", False)):
        monkeypatch.setattr(device_memory, name, value)
    return torch_module


def noted(base: Path) -> DeviceMemory:
    return msgspec.json.decode(base.with_name(base.name + layout.MEMORY_SUFFIX).read_bytes(), type=DeviceMemory)


def test_device_memory_blocks_are_grouped_by_allocation_stack(torch: SimpleNamespace, tmp_path: Path) -> None:
    device_memory.raised(str(tmp_path / "page"), OutOfMemoryError("CUDA out of memory. Tried ... GPU 0 has a total"))
    record = noted(tmp_path / "page")
    assert [(block.size, block.count, block.frames[0].line) for block in record.blocks] == [(60, 2, 0), (50, 1, 1)]
    assert (record.device, record.largest, record.largest_free) == (0, 50, 9)
    assert (record.allocated, record.reserved, record.at_allocation, record.snapshot) == (110, 126, False, False)
    assert all(len(block.frames) == device_memory.MOST_FRAMES for block in record.blocks)


def test_device_memory_blocks_without_history_are_grouped_by_size(torch: SimpleNamespace, tmp_path: Path) -> None:
    torch.cuda.memory_snapshot = lambda: [{"blocks": [{"size": 4, "state": "active_allocated"}] * 3}]
    device_memory.raised(str(tmp_path / "page"), OutOfMemoryError("no device named"))
    assert [(block.size, block.count, block.frames) for block in noted(tmp_path / "page").blocks] == [(12, 3, ())]


def test_device_memory_failed_query_loses_only_its_own_value(torch: SimpleNamespace, tmp_path: Path) -> None:
    del torch.cuda.memory_stats
    device_memory.raised(str(tmp_path / "page"), OutOfMemoryError("GPU 1 is full"))
    assert (noted(tmp_path / "page").allocated, noted(tmp_path / "page").largest) == (None, 1000)


def test_device_memory_keeps_snapshot_of_failed_allocation(torch: SimpleNamespace, tmp_path: Path) -> None:
    """The later exception would find less, because some of the memory is free again.

    Of many failures, the newest are kept.
    """
    page = tmp_path / "page"
    device_memory._base, device_memory._owner = str(page), device_memory.os.getpid()
    device_memory._allocation_failed(0, 40, 200, 5)
    torch.cuda.memory_snapshot = list
    device_memory.raised(str(page), OutOfMemoryError("GPU 0"))
    record = noted(page)
    assert (record.asked, record.at_allocation, record.snapshot, len(record.blocks)) == (40, True, True, 2)
    for asked in range(1, 20):
        device_memory._allocation_failed(0, asked, 200, 5)
    assert noted(page).asked == device_memory.MOST_SNAPSHOTS - 1
    device_memory.raised(str(page), OutOfMemoryError("GPU 0"))
    assert not noted(page).at_allocation


@pytest.mark.parametrize(("limit", "traces"), [(1 << 20, ["x" * 5000]), (4000, []), (10, None)])
def test_too_large_snapshot_loses_its_history_first(
    limit: int, traces: list[str] | None, torch: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "SNAPSHOT_BYTES", limit)
    frames = {"segments": [], "device_traces": [["x" * 5000], []]}
    torch.cuda.memory._snapshot = lambda: frames
    page = tmp_path / "page"
    device_memory._base, device_memory._owner = str(page), device_memory.os.getpid()
    device_memory._allocation_failed(0, 40, 200, 5)
    snapshot = page.with_name("page" + layout.SNAPSHOT_SUFFIX)
    assert noted(page).snapshot == snapshot.exists() == (traces is not None)
    if traces is not None:
        assert load_pickle(snapshot.read_bytes())["device_traces"] == [traces, []]
    assert not list(tmp_path.glob("*.partial"))
