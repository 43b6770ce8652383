"""Shows the state of a distributed model from inside the script. Each probe returns a record, and prints a table once.

Rank 0 or the first rank of ``group`` prints. ``check_consistent``, ``memory`` and ``rank_print`` gather from all ranks
of the group, so all must call them. Without ``torch.distributed``, this process is rank 0 of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safelaunch.beacon import wrappers


@dataclass(frozen=True, slots=True)
class Consistency:
    checked: int  # tensors that several ranks hold
    differing: Mapping[str, tuple[tuple[int, ...], ...]]  # differing tensor -> groups of ranks that agree

    @property
    def consistent(self) -> bool:
        return not self.differing


_FLAT = "flat shard"


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of one parameter or buffer. If ``placements`` is empty, each rank holds all of it.

    If a sharded parameter has fewer rows than there are ranks, the first rank might hold all of it, and others nothing.
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    # For a DTensor, by mesh dimension; ``flat shard``: its part of FSDP1's flat parameter.
    placements: tuple[str, ...] = ()
    mesh: str = ""
    dtype: str = ""
    # Innermost FSDP module around the parameter, which gathers its parameters together; ``(root)``: the model itself.
    unit: str = ""
    precision: str = ""  # mixed-precision policy of that module: ``param=bfloat16 reduce=float32``

    @property
    def sharded(self) -> bool:
        return self.shape != self.local_shape or any(
            placement.startswith(("S(", "_S(", _FLAT)) for placement in self.placements
        )


@dataclass(frozen=True, slots=True)
class Sharding:
    """Names of sharded parameters and of parameters that each rank holds unsharded, and their bytes on this rank."""

    sharded: tuple[str, ...]
    whole: tuple[str, ...]
    bytes_sharded: int
    bytes_whole: int


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank's device memory in bytes; 0 if it has no GPU."""

    rank: int
    device: str
    allocated: int
    reserved: int
    peak: int


@dataclass(frozen=True, slots=True)
class Mesh:
    shape: tuple[int, ...]
    names: tuple[str, ...]
    coordinate: tuple[int, ...]  # of this rank
    groups: Mapping[str, tuple[tuple[int, ...], ...]]  # dimension -> the ranks of each of its groups


def check_consistent(subject: Any, group: Any = None) -> Consistency:
    """Compares a tensor, a mapping of tensors, or a module's parameters and buffers across a group, bit by bit.

    DTensors are compared between ranks that have the same shard. A tensor that only some ranks have counts as
    different. Raises TypeError for other subjects.
    """
    tensors = _tensors(subject)
    prints = {name: (_shard(tensor), _digest(tensor)) for name, tensor in tensors.items()}
    ranks, gathered = _gather(prints, group)
    names = list(dict.fromkeys(name for digests in gathered for name in digests))
    differing, checked = {}, []
    for name in names:
        shards: dict[object, dict[str, list[int]]] = {}
        for rank, digests in zip(ranks, gathered, strict=True):
            shard, digest = digests.get(name, ((), "missing"))
            shards.setdefault(shard, {}).setdefault(digest, []).append(rank)
        checked += [name] if len(shards) < max(len(ranks), 2) else []
        apart = next((sides for sides in shards.values() if len(sides) > 1), None)
        if apart is not None:
            differing[name] = tuple(map(tuple, sorted(apart.values(), key=len, reverse=True)))
    absent = {
        name: {rank for rank, digests in zip(ranks, gathered, strict=True) if name not in digests} for name in names
    }
    rows = [(name, " | ".join(_side(side, absent[name]) for side in sides)) for name, sides in differing.items()]
    title = f"{len(differing)} of {len(checked)} tensors differ between ranks"
    if not checked:
        title = "no tensor to compare: no two ranks hold the same one"
    _table(title, ("tensor", "ranks that agree"), rows, ranks)
    return Consistency(len(checked), differing)


def placements(model: Any) -> tuple[Placement, ...]:
    """Returns the placements of ``model``'s parameters, then of its buffers."""
    parameters = [place for place, _ in _parameters(model)]
    buffers = [_placement(name, buffer) for name, buffer in model.named_buffers()]
    head = ("name", "shape", "here", "dtype", "placements", "mesh", "FSDP unit", "mixed precision")
    rows = []
    for p in (*parameters, *buffers):
        where = (str(p.shape), str(p.local_shape), p.dtype, " ".join(p.placements) or "whole", p.mesh)
        rows.append((p.name, *where, p.unit, p.precision))
    filled = [n for n in range(len(head)) if any(row[n] for row in rows)]
    title = f"{len(parameters)} parameters, {len(buffers)} buffers"
    _table(title, [head[n] for n in filled], [[row[n] for n in filled] for row in rows])
    return (*parameters, *buffers)


def sharding(model: Any) -> Sharding:
    """Returns which parameters of ``model`` are sharded, and which each rank holds unsharded."""
    placed = _parameters(model)
    parts = [pair for pair in placed if pair[0].sharded]
    whole = [pair for pair in placed if not pair[0].sharded]
    size_parts, size_whole = (sum(wrappers.bytes_of(tensor) for _, tensor in side) for side in (parts, whole))
    rows = [(place.name, str(place.shape), _size(wrappers.bytes_of(tensor))) for place, tensor in whole]
    title = f"sharded: {len(parts)} parameters, {_size(size_parts)} here; held whole: {len(whole)}, {_size(size_whole)}"
    _table(title, ("held whole", "shape", "size"), rows)
    return Sharding(tuple(p.name for p, _ in parts), tuple(p.name for p, _ in whole), size_parts, size_whole)


def memory(group: Any = None) -> tuple[Memory, ...]:
    """Returns the device memory of each rank of ``group``."""
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        numbers = (
            f"cuda:{device}",
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            torch.cuda.max_memory_allocated(),
        )
    else:
        numbers = ("cpu", 0, 0, 0)
    ranks, gathered = _gather(numbers, group)
    memories = tuple(Memory(rank, *numbers) for rank, numbers in zip(ranks, gathered, strict=True))
    rows = [(str(m.rank), m.device, _size(m.allocated), _size(m.reserved), _size(m.peak)) for m in memories]
    title = "memory by rank" if torch.cuda.is_available() else "memory by rank: no GPU, so there is nothing to count"
    _table(title, ("rank", "device", "allocated", "reserved", "peak"), rows, ranks)
    return memories


def mesh(device_mesh: Any) -> Mesh:
    """Returns the dimensions of a device mesh, and the ranks of its groups."""
    ranks = device_mesh.mesh
    names = tuple(device_mesh.mesh_dim_names or map(str, range(ranks.ndim)))
    groups = {
        name: tuple(tuple(row) for row in ranks.movedim(number, -1).reshape(-1, ranks.shape[number]).tolist())
        for number, name in enumerate(names)
    }
    rows = [
        (name, str(size), " ".join(str(list(ranks)) for ranks in groups[name]))
        for name, size in zip(names, ranks.shape, strict=True)
    ]
    _table("mesh of " + " x ".join(map(str, ranks.shape)), ("dimension", "size", "groups"), rows)
    return Mesh(tuple(ranks.shape), names, tuple(device_mesh.get_coordinate() or ()), groups)


def rank_print(*values: object, group: Any = None) -> tuple[str, ...]:
    """Gathers ``values`` from the ranks of ``group``, and prints one line for each rank, in rank order."""
    ranks, lines = _gather(" ".join(map(str, values)), group)
    _table("", ("rank", "output"), [(str(rank), line) for rank, line in zip(ranks, lines, strict=True)], ranks)
    return tuple(lines)


# --- one rank's part --------------------------------------------------------------------------------------------------


def _tensors(subject: Any) -> dict[str, Any]:
    if hasattr(subject, "named_parameters"):
        return {**dict(subject.named_parameters()), **dict(subject.named_buffers())}
    tensors = dict(subject) if isinstance(subject, Mapping) else {"tensor": subject}
    wrong = next((type(tensor).__name__ for tensor in tensors.values() if not hasattr(tensor, "detach")), "")
    if wrong:
        raise TypeError(f"check_consistent takes a tensor, a mapping of tensors or a module; this holds a {wrong}")
    return tensors


def _side(ranks: Sequence[int], absent: set[int]) -> str:
    return ", ".join(map(str, ranks)) + (" (absent)" if absent.issuperset(ranks) else "")


def _shard(tensor: Any) -> tuple[tuple[int, int], ...]:
    # The index in each mesh dimension that isn't replicated.
    placements, mesh = getattr(tensor, "placements", ()), getattr(tensor, "device_mesh", None)
    here = mesh.get_coordinate() if mesh is not None else None
    pairs = zip(placements, here or (), strict=False)
    return tuple((dim, place) for dim, (placement, place) in enumerate(pairs) if not placement.is_replicate())


def _parameters(model: Any) -> list[tuple[Placement, Any]]:
    units = _units(model)
    return [
        (_placement(name, parameter, *units[name.rpartition(".")[0]]), parameter)
        for name, parameter in model.named_parameters()
    ]


def _units(model: Any) -> dict[str, tuple[str, str, bool]]:
    units: dict[str, tuple[str, str, bool]] = {}
    states: dict[int, tuple[str, str, bool]] = {}  # ``fully_shard`` can make one unit of several modules
    for name, module in model.named_modules(remove_duplicate=False):
        units[name] = units[name.rpartition(".")[0]] if name else ("", "", False)
        fsdp2 = getattr(module, "_get_fsdp_state", None)
        if fsdp2 is not None or wrappers.is_fsdp1(module):
            state = fsdp2() if fsdp2 is not None else module
            policy = getattr(state, "_mp_policy", None) or getattr(module, "mixed_precision", None)
            is_flat = fsdp2 is None and getattr(module.sharding_strategy, "name", "") != "NO_SHARD"
            unit = wrappers.clean(name) or "(root)", _precision(policy), is_flat
            units[name] = states.setdefault(id(state), unit)
    return units


def _precision(policy: Any) -> str:
    kinds = {kind: getattr(policy, f"{kind}_dtype", None) for kind in ("param", "reduce", "buffer", "output")}
    return " ".join(f"{kind}={_dtype(dtype)}" for kind, dtype in kinds.items() if dtype is not None)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _placement(name: str, tensor: Any, unit: str = "", precision: str = "", is_flat: bool = False) -> Placement:
    laid = (_FLAT,) if is_flat else tuple(str(placement) for placement in getattr(tensor, "placements", ()))
    where = getattr(tensor, "device_mesh", None)
    dims = "" if where is None else " x ".join(map(str, where.mesh_dim_names or where.mesh.shape))
    shape, here = tuple(tensor.shape), tuple(wrappers.local(tensor).shape)
    return Placement(name, shape, here, laid, dims, _dtype(tensor.dtype), unit, precision)


def _digest(tensor: Any) -> str:
    import ctypes
    import hashlib

    here = wrappers.local(tensor.detach()).cpu().contiguous()
    data = ctypes.string_at(here.data_ptr(), here.numel() * here.element_size()) if here.numel() else b""
    return hashlib.blake2b(f"{here.dtype} {tuple(here.shape)}".encode() + data, digest_size=16).hexdigest()


def _gather(value: Any, group: Any) -> tuple[Sequence[int], list[Any]]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return (0,), [value]
    gathered = _exchange(value, group)
    return (dist.get_process_group_ranks(group) if group is not None else range(len(gathered))), gathered


def _exchange(value: Any, group: Any) -> list[Any]:
    """Exchanges a Python literal between all ranks. Unlike ``dist.all_gather_object``, works without NumPy."""
    import ctypes
    from ast import literal_eval

    import torch
    import torch.distributed as dist

    data, device = repr(value).encode(), _device(group)
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.frombuffer(bytearray(data.ljust(max(lengths))), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    here = [part.cpu() for part in parts]
    return [literal_eval(ctypes.string_at(part.data_ptr(), n).decode()) for part, n in zip(here, lengths, strict=True)]


def _device(group: Any) -> Any:
    # The CPU if the group's backend can use it, else the current GPU.
    import torch
    import torch.distributed as dist

    kinds = [str(device.type) for device in (group or dist.group.WORLD)._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _size(number: int) -> str:
    units = ("B", "KB", "MB", "GB")
    at = next((n for n in range(len(units)) if number < 1024 ** (n + 1)), len(units) - 1)
    return f"{number / 1024**at:.3g} {units[at]}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], ranks: Sequence[int] = (0,)) -> None:
    if _rank() != ranks[0]:
        return
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = [title] if title else []
    if rows:
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
    print("\n".join(lines), flush=True)
