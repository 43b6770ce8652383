"""What the written script does: the groups it makes, and what each rank calls in them. The same hang with fewer ranks,
and with smaller tensors; where gloo would not hang, with larger ones.

All ranks are counted from 0 without a gap. ``Call.root`` and ``Call.peer`` are ranks of the call's group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from safelaunch.model import Collective, Frame

ElementCounts = tuple[tuple[int, ...], ...]

WORLD = "0"  # the default group
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
TRANSFERS = frozenset({"send", "recv"})
BARE = frozenset({"barrier", "monitored_barrier", "new_group"})  # without tensors
MOST_ELEMENTS = 1 << 24  # of a tensor that is made as it was recorded
_MOST_OF_A_KIND = 4


@dataclass(frozen=True)
class ScriptCall:
    """One call of torch.distributed. ``op``: the function's name; ``batch`` for ``batch_isend_irecv`` of ``parts``.

    - ``sizes``: of the tensors that the rank gives, or, where only the root gives some (scatter), gets
    - ``other_roots``: ranks of the world that name another root, and which
    - ``peer``: None in a ``recv`` from any rank; ``named`` False: another one may have been meant
    - ``waited_for`` False: the rank went on before the call was over
    - ``site``: the user's line
    """

    op: str
    group: str = WORLD
    sizes: ElementCounts = ()
    dtypes: tuple[str, ...] = ()
    root: int | None = None
    other_roots: tuple[tuple[int, int], ...] = ()
    peer: int | None = None
    named: bool = True
    tag: int = 0
    waited_for: bool = True
    site: Frame | None = None
    parts: tuple[ScriptCall, ...] = ()


# What a rank does behind its last call. ``waits``: it does not come back from it.
Ending = Literal["waits", "waits for work", "stands", "leaves", "raises", "exits", "is killed"]


@dataclass(frozen=True)
class ScriptEnd:
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

    calls: tuple[ScriptCall, ...]
    end: ScriptEnd
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


Tells = Callable[[Program], tuple[str, list[int]]]  # cause and culprits

# --- fewer ranks ------------------------------------------------------------------------------------------------------


def fewest_ranks(program: Program, culprits: Collection[int], tells: Tells) -> list[int]:
    """As few of the ranks as let ``tells`` say the same. All, where it does not name the ``culprits``."""
    everybody, cause = sorted(program.ranks), tells(program)[0]
    kinds: dict[object, list[int]] = {}
    for rank in set(everybody) - set(culprits):
        kinds.setdefault(_kind(program.ranks[rank]), []).append(rank)

    def shown(kept: Sequence[int]) -> bool:
        found, named = tells(of_ranks(program, kept)) if len(kept) > 1 else ("", [])
        return found == cause and {kept[place] for place in named} == set(culprits)

    for number in range(1, _MOST_OF_A_KIND + 1):
        kept = sorted({*culprits, *(rank for ranks in kinds.values() for rank in sorted(ranks)[:number])})
        if culprits and shown(everybody) and shown(kept):
            for rank in sorted(set(kept) - set(culprits), reverse=True):
                fewer = [one for one in kept if one != rank]
                kept = fewer if shown(fewer) else kept
            return kept
    return everybody


def _kind(one: RankProgram) -> object:
    """Ranks of one kind make the same last calls, each in groups of its own."""
    alike = [replace(call, group="", root=None, other_roots=(), peer=None, parts=()) for call in one.calls[-8:]]
    return one.end, one.before, tuple(alike)


def of_ranks(program: Program, kept: Collection[int]) -> Program:
    """The program of some of its ranks: with new numbers, in groups without the others."""
    number = {rank: place for place, rank in enumerate(sorted(kept))}
    fewer = _Fewer({name: program.members(name) for name in (WORLD, *program.groups)}, number)
    groups = {name: ranks for name in program.groups if len(ranks := fewer.ranks(name)) > 1}
    makers = {name: frozenset(number[r] for r in one if r in number) for name, one in program.makers.items()}
    return replace(
        program,
        ranks={number[rank]: fewer.program(program.ranks[rank]) for rank in sorted(number)},
        groups=groups,
        makers={name: one for name, one in makers.items() if name in groups},
    )


@dataclass(frozen=True)
class _Fewer:
    """``members``: of each group, as they were. ``number``: of each rank that stays, its new one."""

    members: Mapping[str, Sequence[int]]
    number: Mapping[int, int]

    def ranks(self, group: str) -> tuple[int, ...]:
        return tuple(self.number[rank] for rank in self.members[group] if rank in self.number)

    def program(self, one: RankProgram) -> RankProgram:
        calls = [self.call(call) for call in one.calls]
        entries = tuple(left for call, left in zip(calls, one.entries, strict=False) if call is not None)
        return replace(one, calls=tuple(filter(None, calls)), entries=entries)

    def call(self, call: ScriptCall) -> ScriptCall | None:
        """None where nobody is left to make it with."""
        parts = tuple(filter(None, map(self.call, call.parts)))
        peer = self.place(call.group, call.peer)
        if len(self.ranks(call.group)) < 2 or (peer is None and call.peer is not None) or len(parts) < bool(call.parts):
            return None
        root = None if call.root is None else self.place(call.group, call.root) or 0
        told = ((rank, self.place(call.group, its)) for rank, its in call.other_roots if rank in self.number)
        others = tuple((self.number[rank], its) for rank, its in told if its is not None)
        return replace(call, parts=parts, peer=peer, root=root, other_roots=others)

    def place(self, group: str, place: int | None) -> int | None:
        """What a place in the group is without the ranks that are left out."""
        if place is None or place >= len(self.members[group]):
            return None
        rank = self.members[group][place]
        return self.ranks(group).index(self.number[rank]) if rank in self.number else None


# --- smaller tensors --------------------------------------------------------------------------------------------------


def is_large(program: Program) -> bool:
    return any(number > MOST_ELEMENTS for number in _numbers(program))


def with_small_tensors(program: Program) -> Program:
    """Each tensor as small as can be. Numbers of elements that differ stay different."""
    step = program.world_size if any(call.op in _DIVIDED for call in _every(program)) else 1
    small = {number: (place + 1) * step for place, number in enumerate(sorted(_numbers(program)))}

    def sizes(given: ElementCounts) -> ElementCounts:
        return tuple((small[prod(size)],) if size else size for size in given)

    def smaller(call: ScriptCall) -> ScriptCall:
        return replace(call, sizes=sizes(call.sizes), parts=tuple(map(smaller, call.parts)))

    return _with_calls(program, smaller)


_DIVIDED = frozenset({"reduce_scatter_tensor", "all_to_all"})


# --- larger tensors ---------------------------------------------------------------------------------------------------

_LARGER = "The tensors whose sizes differ have {} times as many elements: of so small ones, gloo may not notice it."
ABORTS = (
    "The sizes of an all_reduce differ: there gloo aborts, where other backends hang. The records of aborted ranks are"
    " lost, so a verdict on this script may name more of the ranks, or fewer."
)


def with_sizes_that_gloo_checks(program: Program) -> Program:
    """gloo aborts the rank of an ``all_reduce`` that gets a longer segment than its own. Where segments are of one
    length, and some ranks only have fewer of them, ranks come back from the call. There are two segments a rank.
    """
    for group in {call.group for call in _every(program)}:
        last = [rank.calls[-1] for rank in program.ranks.values() if rank.calls and rank.end.kind == "waits"]
        sizes = {prod(call.sizes[0]) for call in last if _is_sum(call, group)}
        if len(sizes) < 2:
            continue
        segments = 2 * len(program.members(group))
        times = 1 if len({-(-size // segments) for size in sizes}) == len(sizes) else segments
        program = _with_larger(program, group, sizes, times)
        program = replace(program, notes=(*program.notes, ABORTS, *([_LARGER.format(times)] if times > 1 else [])))
    return program


def _is_sum(call: ScriptCall, group: str) -> bool:
    return (call.op, call.group, len(call.sizes)) == ("all_reduce", group, 1)


def _with_larger(program: Program, group: str, sizes: Collection[int], times: int) -> Program:
    def larger(call: ScriptCall) -> ScriptCall:
        same = _is_sum(call, group) and prod(call.sizes[0]) in sizes
        return replace(call, sizes=((prod(call.sizes[0]) * times,),)) if same and times > 1 else call

    return _with_calls(program, larger)


# --- all calls --------------------------------------------------------------------------------------------------------


def _numbers(program: Program) -> set[int]:
    parts = (part for call in _every(program) for part in (call, *call.parts))
    return {prod(size) for part in parts for size in part.sizes}


def _every(program: Program) -> Iterator[ScriptCall]:
    for rank in program.ranks.values():
        yield from rank.calls


def _with_calls(program: Program, change: Callable[[ScriptCall], ScriptCall]) -> Program:
    ranks = {r: replace(one, calls=tuple(map(change, one.calls))) for r, one in program.ranks.items()}
    return replace(program, ranks=ranks)
