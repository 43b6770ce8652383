"""Finds the tensors that a job trains, their names, and the ranks that have a replica of each.

Supports DDP, DTensors, FSDP1, FSDP2, and DeepSpeed without ZeRO; all other tensors count as not replicated. An
optimizer knows its parameters, but not their names or modules, so these are found by searching the objects in the
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
    """One tensor of a series.

    Args:
        group: Ranks that have a replica of the tensor; empty if unknown.
        leaf: Tensor in which a backward pass stores this rank's own gradient.
    """

    def __init__(self, name: str, tensor: Any, group: tuple[int, ...], leaf: Any = None) -> None:
        self.name, self.tensor, self.group = name, tensor, group
        self.leaf = tensor if leaf is None else leaf


def _roots(modules: list[Any]) -> list[Any]:
    # DDP modules come first, wherever they are: they define what is replicated.
    inner = {id(child) for module in modules for child in module._modules.values()}
    ddp = [module for module in modules if is_ddp(module)]
    return [*ddp, *(module for module in modules if id(module) not in inner and not is_ddp(module))]


def is_ddp(module: Any) -> bool:
    return wrappers.is_a(module, "DistributedDataParallel")


def ddp_group(ddp: Any) -> tuple[int, ...]:
    """Returns the ranks on which DDP keeps tensors equal; empty if a communication hook might not, as in local SGD."""
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        ours = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms.ddp_comm_hooks")
        if not ours or getattr(hook, "__name__", "") in ("post_localSGD_hook", "noop_hook"):
            return ()
    return _ranks_of(ddp.process_group)


def _engine_group(engine: Any, optimizer: Any) -> tuple[int, ...]:
    group = getattr(engine, "seq_data_parallel_group", None)
    averages = getattr(engine, "enable_backward_allreduce", False) and not hasattr(optimizer, "deepspeed")
    return _ranks_of(group) if averages and group is not None else ()


def _is_own(parameter: Any) -> bool:
    # Only some ranks have it: an expert's parameter, or a sharded base weight.
    return not getattr(parameter, "allreduce", True) or hasattr(parameter, "ds_optim_param")


def _ranks_of(group: Any) -> tuple[int, ...]:
    dist = sys.modules["torch.distributed"]
    ranks = tuple(dist.get_process_group_ranks(group))
    return ranks if len(ranks) > 1 else ()


def _dtensor_group(tensor: Any) -> tuple[int, ...]:
    """Returns the ranks with the same shard, found along the mesh's replicated dimensions."""
    placements = getattr(tensor, "placements", None)
    if placements is None or not hasattr(tensor, "device_mesh"):
        return ()
    if any(not (placement.is_replicate() or placement.is_shard()) for placement in placements):
        return ()
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return ()
    at = tuple(
        slice(None) if placement.is_replicate() else place for placement, place in zip(placements, here, strict=True)
    )
    ranks = tuple(int(rank) for rank in mesh.mesh[at].reshape(-1).tolist())
    return ranks if len(ranks) > 1 else ()


def _fsdp1_group(module: Any) -> tuple[int, ...]:
    """Returns the ranks with the same shard: all ranks under NO_SHARD, those on other nodes under HYBRID_SHARD."""
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    group = None
    if strategy == "NO_SHARD":
        group = getattr(module, "process_group", None)
    elif strategy.lstrip("_").startswith("HYBRID_SHARD"):
        group = getattr(module, "_inter_node_pg", None)
    return _ranks_of(group) if group is not None else ()


def _fsdp1_groups(modules: list[Any]) -> dict[int, tuple[int, ...]]:
    """Returns parameter id → group. Outer modules come first, because nested FSDP1 modules override their strategy."""
    groups = {}
    wrapped = [module for module in modules if wrappers.is_fsdp1(module)]
    for module in sorted(wrapped, key=lambda wrapper: -sum(1 for _ in wrapper.modules())):
        group = _fsdp1_group(module)
        groups.update({id(parameter): group for parameter in module.parameters()})
    return groups


def _leaves(modules: list[Any]) -> dict[int, Any]:
    """Maps each FSDP parameter to the unsharded one used in a backward pass. Uses private names of torch 2.13."""
    leaves: dict[int, Any] = {}
    for module in modules:
        state = getattr(module, "_get_fsdp_state", None)
        if state is not None:
            leaves.update(_fsdp2_leaves(state()))
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None:
            leaves.update({id(parameter): flat for parameter in getattr(flat, "_params", None) or ()})
    return leaves


def _fsdp2_leaves(state: Any) -> Iterator[tuple[int, Any]]:
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
        for parameter in getattr(group, "fsdp_params", ()):
            whole = getattr(parameter, "_unsharded_param", None)  # set by the first all-gather
            if whole is not None:
                yield id(parameter.sharded_param), whole


def owned(optimizer: Any) -> list[tuple[Any, list[Tensor]]]:
    """Returns the tensors to check with an optimizer: each DDP module with its parameters, and None with all others.

    A DDP module's parameters include frozen ones, because DDP makes them equal when it wraps the module.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    wanted = {id(parameter) for parameter in trained}
    everything = wrappers.modules()
    fsdp1, leaves = _fsdp1_groups(everything), _leaves(everything)
    added: set[int] = set()
    rest: list[Tensor] = []
    result: list[tuple[Any, list[Tensor]]] = []
    for root in _roots(everything):
        ddp, engine = is_ddp(root), wrappers.is_a(root, "DeepSpeedEngine")
        inner = root.module if ddp or engine else root
        its = [(name, parameter) for name, parameter in inner.named_parameters() if parameter is not None]
        if not any(id(parameter) in wanted for _, parameter in its):
            continue
        ignored = (
            getattr(root, "parameters_to_ignore", ())
            if ddp
            else [name for name, parameter in its if _is_own(parameter)]
        )
        group = ddp_group(root) if ddp else _engine_group(root, optimizer) if engine else ()
        its_own: list[Tensor] = []
        if ddp:
            result.append((root, its_own))
        for name, parameter in its:
            if (ddp or id(parameter) in wanted) and id(parameter) not in added:
                replicas = group if name not in ignored else ()
                replicas = replicas or fsdp1.get(id(parameter)) or _dtensor_group(parameter)
                added.add(id(parameter))
                (its_own if ddp else rest).append(
                    Tensor(wrappers.clean(name), parameter, replicas, leaves.get(id(parameter)))
                )
    for number, parameter in enumerate(trained):
        if id(parameter) not in added:
            rest.append(Tensor(f"parameter {number}", parameter, _dtensor_group(parameter)))
    return [*result, (None, rest)]
