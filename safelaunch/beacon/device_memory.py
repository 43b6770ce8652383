"""Records how a GPU's memory is used at the moment when a rank runs out of it.

Figures and the largest live blocks are always recorded. Under ``--preset oom-debug``, torch's allocator also keeps the
stack of each allocation, and its snapshot is written for https://pytorch.org/memory_viz. The snapshot is taken where
the allocation fails, because unwinding the stack frees some of the memory.
"""

from __future__ import annotations

import gc
import os
import sys

from . import imports, layout, log, page, wrappers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

MOST_ENTRIES = 50_000  # in the history, including freed allocations
MOST_BLOCKS = 12
MOST_FRAMES = 32
MOST_NAMES = 8
MOST_SNAPSHOTS = 8  # a script that tries batch sizes runs out of memory repeatedly
SNAPSHOT_BYTES = 48 << 20

_base = ""
_owner = 0
_observed = 0  # recorded failed allocations
_stale = False  # another allocation has failed since, without a record


def install(base: str) -> None:
    """Makes torch keep the stacks of allocations as soon as CUDA is initialized.

    ``base`` is the path of the rank's page.
    """
    global _base, _owner
    _base, _owner = base, os.getpid()
    imports.after_import("torch.cuda", log.guarded(_when_initialized))


def detach() -> None:
    global _base
    _base = ""


def _when_initialized(cuda: Any) -> None:
    # An error in a queued call would reach the script.
    cuda._lazy_call(log.guarded(_keep_history))


def _keep_history() -> None:
    torch = sys.modules["torch"]
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MOST_ENTRIES)
    torch._C._cuda_attach_out_of_memory_observer(log.guarded(_allocation_failed))


def _allocation_failed(device: int, asked: int, total: int, free: int) -> None:
    # The allocator calls it before it raises.
    global _observed, _stale
    if not _base or os.getpid() != _owner:
        return
    _stale = _observed >= MOST_SNAPSHOTS
    if not _stale:
        _observed += 1
        _record(_base, {"device": device, "asked": asked, "total": total, "free": free, "at_allocation": True})


def raised(base: str, value: BaseException) -> None:
    """Records the memory exception that ends the rank, unless the failed allocation has already been recorded."""
    if _stale or not _observed:
        _record(base, {"device": _device_in(str(value))})


def _device_in(message: str) -> int:
    # ``... GPU 1 has a total capacity of ...``; without a number, the current device
    number = message.partition("GPU ")[2].partition(" ")[0]
    return int(number) if number.isdigit() else int(sys.modules["torch"].cuda.current_device())


def _record(base: str, allocation: dict[str, object]) -> None:
    torch = sys.modules["torch"]
    figures: dict[str, object] = dict(allocation)
    snapshot: dict[str, Any] = {}
    for step in (
        lambda: figures.update(_statistics(torch.cuda.memory_stats(allocation["device"]))),
        lambda: snapshot.update(torch.cuda.memory._snapshot() if _base else {"segments": torch.cuda.memory_snapshot()}),
        lambda: figures.update(_blocks(snapshot["segments"], allocation["device"])),
        lambda: figures.update(_parameters()),
        lambda: figures.update(_write_snapshot(base + layout.SNAPSHOT_SUFFIX, snapshot) if _base else {}),
    ):
        log.guarded(step)()
    page.note(base + layout.MEMORY_SUFFIX, figures)


def _statistics(stats: Mapping[str, int]) -> dict[str, object]:
    names = {
        "allocated": "allocated_bytes.all.current",
        "reserved": "reserved_bytes.all.current",
        "peak": "allocated_bytes.all.peak",
        "retries": "num_alloc_retries",
    }
    return {name: int(stats[key]) for name, key in names.items() if key in stats}


# --- the blocks of the allocator --------------------------------------------------------------------------------------


def _blocks(segments: Iterable[Mapping[str, Any]], device: object) -> dict[str, object]:
    """Returns the largest live blocks, grouped by the allocating stack, or by size if no stacks were kept."""
    groups: dict[object, list[Any]] = {}
    largest, largest_free = 0, 0
    for segment in segments:
        if segment.get("device", device) != device:
            continue
        for block in segment.get("blocks", ()):
            size = int(block["size"])
            if block.get("state") == "inactive":
                largest_free = max(largest_free, size)
                continue
            largest = max(largest, size)
            frames = tuple((f["filename"], f["line"], f["name"]) for f in block.get("frames", ())[:MOST_FRAMES])
            group = groups.setdefault(frames or size, [0, 0, frames])
            group[0] += size
            group[1] += 1
    top = sorted(groups.values(), key=lambda group: -group[0])[:MOST_BLOCKS]
    blocks = [{"size": size, "count": count, "frames": list(_frames(frames))} for size, count, frames in top]
    return {"largest": largest, "largest_free": largest_free, "blocks": blocks}


def _frames(frames: Iterable[tuple[str, int, str]]) -> Iterator[dict[str, object]]:
    for file, line, function in frames:
        yield {"file": log.absolute(file) if file.endswith(".py") else file, "line": line, "function": function}


def _write_snapshot(path: str, snapshot: dict[str, Any]) -> dict[str, object]:
    from pickle import dump

    shorter = {**snapshot, "device_traces": [[] for _ in snapshot.get("device_traces", ())]}
    for version in (snapshot, shorter):
        try:
            with open(path + layout.PARTIAL, "wb", opener=page.private) as out:
                dump(version, _Bounded(out))
        except _TooLargeError:
            continue
        os.rename(path + layout.PARTIAL, path)
        return {"snapshot": True}
    os.unlink(path + layout.PARTIAL)
    return {}


class _TooLargeError(Exception):
    pass


class _Bounded:
    def __init__(self, out: Any) -> None:
        self._out = out
        self._left = SNAPSHOT_BYTES

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise _TooLargeError
        return int(self._out.write(data))


# --- parameters -------------------------------------------------------------------------------------------------------


def _parameters() -> dict[str, object]:
    """Returns the size of the parameters that each rank holds unsharded; empty if no model is partly sharded."""
    modules = wrappers.modules()
    # While FSDP2 has gathered a module, the whole parameters replace the sharded ones.
    fsdp2 = [
        thing
        for thing in gc.get_objects()
        if type(thing).__name__ == "FSDPParam" and hasattr(thing, "_unsharded_param")
    ]
    shards = {id(parameter._unsharded_param): parameter.sharded_param for parameter in fsdp2}
    flat = {id(parameter) for module in modules if wrappers.is_fsdp1(module) for parameter in module.parameters()}
    inner = {id(child) for module in modules for child in module._modules.values()}
    sharded, whole = 0, dict[str, int]()
    for root in modules:
        if id(root) not in inner:
            named = {
                name: (parameter, _shard_bytes(shards.get(id(parameter), parameter), id(parameter) in flat))
                for name, parameter in root.named_parameters()
            }
            here = [size for _, size in named.values() if size is not None]
            if here:
                sharded += sum(here)
                whole |= {
                    name: wrappers.bytes_of(parameter) for name, (parameter, size) in named.items() if size is None
                }
    if not sharded:
        return {}
    top = sorted(whole.items(), key=lambda item: -item[1])[:MOST_NAMES]
    return {"sharded": sharded, "whole": sum(whole.values()), "whole_names": [name for name, _ in top]}


def _shard_bytes(parameter: Any, is_flat: bool) -> int | None:
    # None for a parameter that this rank holds whole. ``is_flat``: FSDP1 shards it.
    cut = any("Shard" in type(placement).__name__ for placement in getattr(parameter, "placements", ()))
    return wrappers.bytes_of(parameter) if cut or is_flat else None
