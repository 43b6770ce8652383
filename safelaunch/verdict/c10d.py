"""c10d's names of collectives, and what must match between the ranks of one call."""

from __future__ import annotations

from math import prod
from typing import Literal

from safelaunch.model import Collective
from safelaunch.verdict.comparable import Block

Signature = tuple[object, ...]
TensorSizes = tuple[tuple[int, ...], ...]
_UNKNOWN: Signature = (None,)  # signature of an operation without a name

# Operations in which every rank must pass the same number of elements of the same type: as input, or, if only the root
# has an input, as output. In others (all_to_all, ragged forms) sizes can differ by design.
_SAME_SIZE = frozenset(
    {"all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather", "_all_gather_base", "gather",
     "_allgather_base", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
     "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce_barrier", "_broadcast_oop", "_reduce_oop"}
)  # fmt: skip
_SAME_OUTPUT = frozenset({"scatter"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# Names of one operation's forms (list or single tensor), which backends carry out the same way.
_FORMS = (
    ("all_gather", ("allgather", "_all_gather_base", "_allgather_base", "all_gather_into_tensor", "all_gather_single")),
    ("reduce_scatter", ("_reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_single")),
    ("all_reduce", ("allreduce",)),
)
_ONE_NAME = {form: name for name, forms in _FORMS for form in forms}
DEFAULT_GROUPS = ("0", "", "default_pg")
NO_DESCRIPTION = ("undefined", *DEFAULT_GROUPS)


def op_name(entry: Collective) -> str:
    """``gloo:all_reduce`` → ``all_reduce``."""
    return entry.op.rsplit(":", 1)[-1]


def is_root(entry: Collective) -> bool:
    """Returns whether it is a gather's or scatter's root: only a root lists the parts."""
    sizes = {"gather": entry.output_sizes, "scatter": entry.input_sizes}.get(op_name(entry), ())
    return (elements(sizes) or 0) > 0


def number_of(entry: Collective) -> int:
    """Returns the entry's number; sends and receives are numbered separately from collectives."""
    return entry.p2p_seq if entry.is_p2p else entry.seq


def signature(entry: Collective) -> Signature:
    """Returns what must match on all ranks (:func:`fits`), with None for what is unknown.

    Only the number of elements counts: shapes (4, 1) and (4,) match.
    """
    op = op_name(entry)
    name = _ONE_NAME.get(op, op)
    if not op:
        return _UNKNOWN
    if op in _SAME_OUTPUT:
        return (name, elements(entry.output_sizes), _types(entry.output_sizes, entry.output_dtypes))
    if op in _SAME_SIZE:
        types = _types(entry.input_sizes, entry.input_dtypes)
        is_list = name in ("all_gather", "reduce_scatter") and types is not None
        return (name, elements(entry.input_sizes), tuple(dict.fromkeys(types)) if is_list and types else types)
    if isinstance(entry, Block) and _SAME_SIZE.issuperset(entry.ops):
        each = tuple(elements((size,)) for size in entry.input_sizes)
        return (op, None if None in each else each, _types(entry.input_sizes, entry.input_dtypes))
    return (op,)


def elements(sizes: TensorSizes) -> int | None:
    """Returns the number of elements; None if it isn't known."""
    return None if not sizes or any(n < 0 for size in sizes for n in size) else sum(prod(size) for size in sizes)


def _types(sizes: TensorSizes, dtypes: tuple[str, ...]) -> tuple[str, ...] | None:
    return dtypes if dtypes and all(dtypes) and (len(dtypes) == len(sizes) or elements(sizes) is None) else None


def fits(one: Signature, other: Signature) -> bool:
    """Returns whether no known part of two signatures differs, so that the calls are as the user meant them."""
    if _UNKNOWN in (one, other):
        return True
    return len(one) == len(other) and all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def match(one: Signature, other: Signature) -> Literal["yes", "no", "may"]:
    """Returns whether backends let two calls with one number complete.

    They send bytes: calls with as many bytes of different types might match.
    """
    if fits(one, other):
        return "yes" if one == other and None not in one else "may"
    if len(one) != len(other) or len(one) < 3 or one[0] != other[0]:
        return "no"
    sizes = [_bytes(each) for each in (one, other)]
    return "may" if None in sizes or sizes[0] == sizes[1] else "no"


_WIDTHS = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "Char": 1, "Byte": 1}


def _bytes(signature: Signature) -> int | None:
    count, types = signature[1], signature[2]
    widths = {_WIDTHS.get(str(name)) for name in types} if isinstance(types, tuple) else {None}
    width = widths.pop() if len(widths) == 1 else None
    return count * width if isinstance(count, int) and width is not None else None


def same_op(op: str, other: str) -> bool:
    """Compares names: ``_all_gather_base`` in a record is ``all_gather_into_tensor`` or ``…_object`` on a stack.

    An unknown name fits any other.
    """
    a, b = (name.strip("_").replace("_", "") for name in (op, other))
    return a in b or b in a


# torch's names of the types for which c10d has its own.
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


def describe(entry: Collective, number: str = "") -> str:
    """Returns, for example, ``all_reduce of float32[4]``."""
    tensors = _tensors(entry)
    return f"{op_name(entry)}{number}{f' of {tensors}' if tensors else ''}"


def _tensors(entry: Collective) -> str:
    if elements(entry.input_sizes) is None:
        return ""
    names = tuple(_DTYPES.get(name, name.lower()) for name in entry.input_dtypes)
    each = names if len(names) == len(entry.input_sizes) else names[:1] * len(entry.input_sizes)
    tensors = (_tensor(size, name) for size, name in zip(entry.input_sizes[:3], each or ("",) * 3, strict=False))
    more = f" and {len(entry.input_sizes) - 3} more" if len(entry.input_sizes) > 3 else ""
    return f"{', '.join(tensors)}{more}"


def call_words(entry: Collective, group: str = "") -> str:
    """Returns, for example, ``all_reduce #31 of group '0', float32[4]``.

    Args:
        group: The group in words, if not only by torch's name for it.
    """
    tensors = _tensors(entry)
    of_group = f"{op_name(entry)} #{number_of(entry)} of {group or f'group {entry.group!r}'}"
    return f"{of_group}, {tensors}" if tensors else of_group


def _tensor(size: tuple[int, ...], dtype: str) -> str:
    if not size:
        return f"{dtype} scalar".strip()
    return f"{dtype}[{','.join(map(str, size))}]" if dtype else f"({', '.join(map(str, size))})"
