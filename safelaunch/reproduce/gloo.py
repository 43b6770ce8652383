"""What gloo on a CPU has, by the names that backends record: operations and types. The rest has a stand-in."""

from __future__ import annotations

from collections.abc import Iterable

# Recorded name, without its backend → function of torch.distributed.
FUNCTIONS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "all_gather_coalesced": "all_gather",
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}

# The recorder's name of a type → torch's.
_TYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
    "Long": "int64",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_SPARE = ("uint8", "int8", "int32", "int64", "float64", "float16", "bfloat16")


def types_of(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """``(recorded name → torch's type, the names that have a stand-in)``. Names that differ stay different."""
    distinct = sorted(set(names))
    found = {name: _TYPES[name] for name in distinct if name in _TYPES}
    spare = [one for one in _SPARE if one not in found.values()]
    lacking = [name for name in distinct if name not in found and name]
    for place, name in enumerate(lacking):
        found[name] = spare[place % len(spare)] if spare else "float32"
    found[""] = "float32"
    return found, tuple(lacking)
