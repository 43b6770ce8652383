"""Lists what gloo supports on a CPU, and models which rooted calls return even though ranks are missing."""

from __future__ import annotations

from collections.abc import Collection

BARE = frozenset({"barrier", "monitored_barrier", "new_group"})  # without tensors


# torch.distributed function → its names in records, without the backend.
_RECORDED = {
    "all_reduce": "all_reduce allreduce allreduce_coalesced all_reduce_coalesced",
    "barrier": "barrier all_reduce_barrier",
    "monitored_barrier": "monitored_barrier",
    "broadcast": "broadcast _broadcast_oop broadcast_object_list",
    "reduce": "reduce _reduce_oop",
    "all_gather": "all_gather allgather all_gather_coalesced all_gather_object",
    "all_gather_into_tensor": "_all_gather_base all_gather_into_tensor all_gather_into_tensor_coalesced "
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter _reduce_scatter_base reduce_scatter_tensor "
    "reduce_scatter_tensor_coalesced",
    "all_to_all": "all_to_all alltoall all_to_allv alltoall_base all_to_all_single",
    "gather": "gather gather_object",
    "scatter": "scatter scatter_object_list",
    "send": "send isend send_object_list",
    "recv": "recv irecv recv_object_list",
    "new_group": "new_group",
}
FUNCTIONS = {name: function for function, names in _RECORDED.items() for name in names.split()}


# Type in records → torch type.
TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32", "Long": "int64",
    "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


def can_return(op: str, root: int, entered: Collection[int], place: int, size: int) -> bool:
    """Returns whether a rank can return from a rooted call that only the ranks ``entered`` have made.

    In gloo, a send of any size waits for its receive, and a broadcast uses a binomial tree. Ranks are positions in the
    group.
    """
    if op in ("gather", "scatter") and place != root:
        return root in entered
    if op != "broadcast":
        return len(entered) == size
    inside = {(rank - root) % size for rank in entered}
    offset = (place - root) % size
    children = (offset | 1 << bit for bit in range(offset.bit_length(), size.bit_length()))
    if any(child < size and child not in inside for child in children):
        return False
    while offset:
        offset ^= 1 << offset.bit_length() - 1  # the rank that it receives from
        if offset not in inside:
            return False
    return True
