"""Which tensors a job trains, under which names, and which ranks hold a replica of each.

It knows DDP, DTensors, both kinds of FSDP, and DeepSpeed without ZeRO; what it does not know is replicated nowhere. An
optimizer knows its parameters, but neither their names nor their modules: those are found among the objects of the
process.
"""

from __future__ import annotations

import sys

from ...beacon import wrappers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class Tensor:
    """One tensor of a series. ``group``: the ranks that hold a replica of it; empty if none is known to.

    ``leaf``: the tensor on which a backward pass leaves this rank's own gradient.
    """

    def __init__(self, name: str, tensor: Any, group: tuple[int, ...], leaf: Any = None) -> None:
        self.name, self.tensor, self.group = name, tensor, group
        self.leaf = tensor if leaf is None else leaf


def _roots(found: list[Any]) -> list[Any]:
    """First those of DDP, wherever they are: they tell what is replicated. Then modules that are part of no other."""
    inner = {id(child) for one in found for child in one._modules.values()}
    ddp = [one for one in found if is_ddp(one)]
    return [*ddp, *(one for one in found if id(one) not in inner and not is_ddp(one))]


def is_ddp(module: Any) -> bool:
    return wrappers.is_a(module, "DistributedDataParallel")


def ddp_group(ddp: Any) -> tuple[int, ...]:
    """The ranks that DDP keeps equal; empty if a hook of the user's own may keep them apart, as local SGD does."""
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        ours = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms.ddp_comm_hooks")
        if not ours or getattr(hook, "__name__", "") in ("post_localSGD_hook", "noop_hook"):
            return ()
    return _ranks_of(ddp.process_group)


def _engine_group(engine: Any, optimizer: Any) -> tuple[int, ...]:
    """The ranks that a DeepSpeed engine keeps equal by averaging the gradients; 1-bit optimizers exchange their own.

    Under ZeRO its parameters are not the optimizer's: that one trains this rank's share of a copy.
    """
    group = getattr(engine, "seq_data_parallel_group", None)
    averages = getattr(engine, "enable_backward_allreduce", False) and not hasattr(optimizer, "deepspeed")
    return _ranks_of(group) if averages and group is not None else ()


def _is_own(parameter: Any) -> bool:
    """Whether DeepSpeed keeps it on some of the ranks only: of an expert, or of a base weight in shards."""
    return not getattr(parameter, "allreduce", True) or hasattr(parameter, "ds_optim_param")


def _ranks_of(group: Any) -> tuple[int, ...]:
    dist = sys.modules["torch.distributed"]
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks if len(ranks) > 1 else ()


def _dtensor_group(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same shard: those along the mesh's replicated dimensions."""
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "device_mesh"):
        return ()
    if any(not (placement.is_replicate() or placement.is_shard()) for placement in placements):
        return ()
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return ()
    at = tuple(slice(None) if one.is_replicate() else place for one, place in zip(placements, here, strict=True))
    ranks = tuple(int(rank) for rank in mesh.mesh[at].reshape(-1).tolist())
    return ranks if len(ranks) > 1 else ()


# --- FSDP -------------------------------------------------------------------------------------------------------------


def _fsdp1_group(module: Any) -> tuple[int, ...]:
    """The ranks that hold the same shard: all under NO_SHARD, those of other nodes under HYBRID_SHARD."""
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    group = None
    if strategy == "NO_SHARD":
        group = getattr(module, "process_group", None)
    elif strategy.lstrip("_").startswith("HYBRID_SHARD"):
        group = getattr(module, "_inter_node_pg", None)
    return _ranks_of(group) if group is not None else ()


def _fsdp1_groups(found: list[Any]) -> dict[int, tuple[int, ...]]:
    """By parameter. An FSDP1 module inside another one has its own strategy, so the outer ones come first."""
    groups = {}
    wrapped = [one for one in found if wrappers.is_fsdp1(one)]
    for one in sorted(wrapped, key=lambda one: -sum(1 for _ in one.modules())):
        group = _fsdp1_group(one)
        groups.update({id(parameter): group for parameter in one.parameters()})
    return groups


def _leaves(found: list[Any]) -> dict[int, Any]:
    """By parameter of FSDP, the whole one that takes its place in a backward pass; private names, as torch 2.13 has."""
    leaves: dict[int, Any] = {}
    for module in found:
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            leaves.update(_fsdp2_leaves(state()))
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None:
            leaves.update({id(one): flat for one in getattr(flat, "_params", None) or ()})
    return leaves


def _fsdp2_leaves(state: Any) -> Iterator[tuple[int, Any]]:
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
        for one in getattr(group, "fsdp_params", ()):
            whole = getattr(one, "_unsharded_param", None)  # from the first all-gather on
            if whole is not None:
                yield id(one.sharded_param), whole


# --- an optimizer's tensors -------------------------------------------------------------------------------------------


def owned(optimizer: Any) -> list[tuple[Any, list[Tensor]]]:
    """What is checked with an optimizer: each DDP module with its parameters, and with None what else it trains.

    A DDP module's own parameters belong to it, frozen ones included: DDP makes them equal when it wraps the module.
    """
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    wanted = {id(one) for one in trained}
    everything = wrappers.modules()
    fsdp1, leaves = _fsdp1_groups(everything), _leaves(everything)
    found: set[int] = set()
    rest: list[Tensor] = []
    result: list[tuple[Any, list[Tensor]]] = []
    for root in _roots(everything):
        ddp, engine = is_ddp(root), wrappers.is_a(root, "DeepSpeedEngine")
        inner = root.module if ddp or engine else root
        its = [(name, one) for name, one in inner.named_parameters() if one is not None]
        if not any(id(one) in wanted for _, one in its):
            continue
        ignored = getattr(root, "parameters_to_ignore", ()) if ddp else [name for name, one in its if _is_own(one)]
        group = ddp_group(root) if ddp else _engine_group(root, optimizer) if engine else ()
        its_own: list[Tensor] = []
        if ddp:
            result.append((root, its_own))
        for name, one in its:
            if (ddp or id(one) in wanted) and id(one) not in found:
                replicas = group if name not in ignored else ()
                replicas = replicas or fsdp1.get(id(one)) or _dtensor_group(one)
                found.add(id(one))
                (its_own if ddp else rest).append(Tensor(wrappers.clean(name), one, replicas, leaves.get(id(one))))
    for number, one in enumerate(trained):
        if id(one) not in found:
            rest.append(Tensor(f"parameter {number}", one, _dtensor_group(one)))
    return [*result, (None, rest)]


# --- fingerprints -----------------------------------------------------------------------------------------------------

SQUARE = 1013904242  # even: x + SQUARE * x * x then takes no two words to the same one
PIECE = 1 << 20  # elements that are mixed at once: bounds the memory that a check takes
# On a CPU, they have to stay in its cache, and in memory that the process has had before: fresh pages from the kernel
# cost several times what the arithmetic does.
CPU_PIECE = 1 << 16
LARGE = 4096  # elements: tensors that have more on average are summed one by one


class Prints:
    """Integer fingerprints of tensors: sums of their mixed bits, which neither order nor rounding changes."""

    def __init__(self, torch: Any, tensors: list[Any]) -> None:
        self._torch = torch
        self._batches: list[tuple[list[tuple[int, int, int]], Any, Any]] = []
        by_kind: dict[Any, list[tuple[int, int, int]]] = {}
        for number, tensor in enumerate(tensors):
            most = _piece(tensor.device)
            for begin in range(0, tensor.numel(), most):
                pieces = by_kind.setdefault((tensor.dtype, tensor.device), [])
                pieces.append((number, begin, min(begin + most, tensor.numel())))
        for (_, device), pieces in by_kind.items():
            self._add(pieces, device)

    def _add(self, pieces: list[tuple[int, int, int]], device: Any) -> None:
        batch: list[tuple[int, int, int]] = []
        # The largest first: small ones between them would each be a batch of their own.
        for piece in (*sorted(pieces, key=lambda one: one[1] - one[2]), None):
            if piece is None or sum(end - begin for _, begin, end in batch) + piece[2] - piece[1] > _piece(device):
                if batch:
                    self._batches.append((batch, *self._places(batch, device)))
                batch = []
            if piece is not None:
                batch.append(piece)

    def _places(self, batch: list[tuple[int, int, int]], device: Any) -> tuple[Any, Any]:
        ends, total = [], 0
        for _, begin, end in batch:
            total += end - begin
            ends.append(total - 1)
        owners = [number for number, _, _ in batch]
        return self._torch.tensor(ends, device=device), self._torch.tensor(owners, device=device)

    def of(self, tensors: list[Any], device: Any) -> Any:
        torch = self._torch
        words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        flat = {}
        sums, places = [], []
        for batch, ends, owners in self._batches:
            parts = []
            for number, begin, end in batch:
                if number not in flat:
                    one = tensors[number].contiguous().view(-1)
                    flat = {number: one.view(words[one.element_size()]) if one.element_size() in words else one}
                parts.append(flat[number].narrow(0, begin, end - begin))
            sums.append(self._sums(parts, ends).to(device, non_blocking=True))
            places.append(owners.to(device, non_blocking=True))
        return result.index_add_(0, torch.cat(places), torch.cat(sums)) if sums else result

    def _sums(self, parts: list[Any], ends: Any) -> Any:
        """The sum of each part's words, each word mixed: high bits into low ones, and these into high ones."""
        torch = self._torch
        bits = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(torch.int32)
        mixed = bits >> 15
        mixed ^= bits
        mixed.addcmul_(mixed, mixed, value=SQUARE)
        if len(parts) == 1:
            return mixed.sum(dtype=torch.int64).view(1)
        if len(parts) * LARGE < mixed.numel():
            return torch.stack([one.sum(dtype=torch.int64) for one in mixed.split([len(part) for part in parts])])
        return mixed.cumsum(0, dtype=torch.int64).index_select(0, ends).diff(prepend=ends.new_zeros(1))


def _piece(device: Any) -> int:
    return CPU_PIECE if device.type == "cpu" else PIECE


def magnitudes(torch: Any, tensors: list[Any], device: Any) -> Any:
    """A magnitude of each tensor: not finite exactly where one of its elements is not."""
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    known = [n for n, one in enumerate(tensors) if one is not None and one.numel() and one.dtype in floats]
    if known and all(tensors[number].device.type == "cpu" for number in known) and device.type == "cpu":
        norms = _on_cpu(torch, [tensors[number].detach() for number in known])
        if len(known) == len(tensors):
            return norms
        result = torch.zeros(len(tensors), dtype=torch.float64)
        result[known] = norms
        return result
    by_device: dict[Any, list[int]] = {}
    for number in known:
        by_device.setdefault((tensors[number].device, tensors[number].dtype), []).append(number)
    found = [torch.zeros((), dtype=torch.float64, device=device)] * len(tensors)
    for numbers in by_device.values():
        norms = torch.stack(torch._foreach_norm([tensors[n].detach() for n in numbers], float("inf")))
        # No index made of ``numbers``: its way to the device would wait for what runs there.
        for number, norm in zip(numbers, on(norms, device).unbind(), strict=True):
            found[number] = norm
    return torch.stack(found)


def _on_cpu(torch: Any, tensors: list[Any]) -> Any:
    """Norms, which a CPU has several times sooner; where one overflows or is not finite, the largest magnitudes."""
    found = torch._foreach_norm(tensors)
    alike = len({one.dtype for one in found}) == 1
    norms = torch.stack(found if alike else [one.double() for one in found]).double()
    if bool(norms.isfinite().all()):
        return norms
    ends = [torch.stack(tensor.aminmax()).double() for tensor in tensors]
    return torch.stack(ends).abs_().amax(1)


def on(numbers: Any, device: Any) -> Any:
    """As float64 on ``device``, a CPU only where all tensors are on it: no copy waits for what a device has to do."""
    return numbers.double().to(device, non_blocking=True)
