"""What the written script does: the groups it makes, and what each rank calls in them.

All ranks are counted from 0 without a gap. ``Call.root`` and ``Call.peer`` are ranks of the call's group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from safelaunch.model import Collective, Frame

Sizes = tuple[tuple[int, ...], ...]

WORLD = "0"  # the default group
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
TRANSFERS = frozenset({"send", "recv"})
BARE = frozenset({"barrier", "monitored_barrier", "new_group"})  # without tensors


@dataclass(frozen=True)
class Call:
    """One call of torch.distributed. ``op``: the function's name; ``batch`` for ``batch_isend_irecv`` of ``parts``.

    - ``sizes``: of the tensors that the rank gives, or, where only the root gives some (scatter), gets
    - ``other_roots``: ranks of the world that name another root, and which
    - ``peer``: None in a ``recv`` from any rank; ``named`` False: another one may have been meant
    - ``waited_for`` False: the rank went on before the call was over
    - ``site``: the user's line
    """

    op: str
    group: str = WORLD
    sizes: Sizes = ()
    dtypes: tuple[str, ...] = ()
    root: int | None = None
    other_roots: tuple[tuple[int, int], ...] = ()
    peer: int | None = None
    named: bool = True
    tag: int = 0
    waited_for: bool = True
    site: Frame | None = None
    parts: tuple[Call, ...] = ()


# What a rank does behind its last call. ``waits``: it does not come back from it.
Ending = Literal["waits", "waits for work", "stands", "leaves", "raises", "exits", "is killed"]


@dataclass(frozen=True)
class End:
    """``cause``: the catalogue's name of what it stands in. ``words``: the same for people. ``work``: which of its
    calls that nobody has waited for is waited for at last, counted from the end (0: the last one).
    """

    kind: Ending
    cause: str = ""
    words: str = ""
    site: Frame | None = None
    code: int = 0
    work: int = 0


@dataclass(frozen=True)
class RankProgram:
    """``entries``: what each call has left in the record, as far as it has. ``before``: it stands before it joins
    the job.
    """

    calls: tuple[Call, ...]
    end: End
    before: bool = False
    entries: tuple[tuple[Collective, ...], ...] = ()


@dataclass(frozen=True)
class Program:
    """``groups``: name → ranks, without the default one, in the order in which they are made. ``makers``: of those that
    not every rank has made, who has. ``notes``: what is not as it was recorded, a sentence each.
    """

    ranks: Mapping[int, RankProgram]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    makers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def members(self, group: str) -> tuple[int, ...]:
        return self.groups.get(group) or tuple(range(self.world_size))


# --- What gloo on a CPU has, by the names that backends record, and when it lets a rank go on -------------------------


# Function of torch.distributed → the names under which it is recorded, without the backend.
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

# The recorder's name of a type → torch's.
TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32", "Long": "int64",
    "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


def returns(op: str, root: int, entered: Collection[int], place: int, size: int) -> bool:
    """Whether a rank comes back from a rooted call that only ``entered`` are in. All ranks are places in the group.

    A send of gloo, of any size, waits for its receive. A broadcast goes down a binomial tree.
    """
    if op in ("gather", "scatter") and place != root:
        return root in entered
    if op != "broadcast":
        return len(entered) == size
    inside = {(one - root) % size for one in entered}
    mine = (place - root) % size
    children = (mine | 1 << bit for bit in range(mine.bit_length(), size.bit_length()))
    if any(child < size and child not in inside for child in children):
        return False
    while mine:
        mine ^= 1 << mine.bit_length() - 1  # the rank that it receives from
        if mine not in inside:
            return False
    return True
