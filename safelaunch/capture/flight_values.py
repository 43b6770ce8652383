"""The values of a Flight Recorder dump, one by one: which are safe to handle, which c10d would write, what they say.

Nothing here trusts a value: it is neither hashed, shown nor compared before its type and size are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safelaunch.model import UNKNOWN_SIZES, Frame

MAX_ITEMS = 4096  # tensors of one collective, frames of one stack
MAX_LEAVES = 1 << 16  # texts and numbers of one entry
_MAX_TEXT = 4096
SCALARS = frozenset({str, int, bool, type(None)})
LISTS = frozenset({list, tuple})
STATES = ("scheduled", "started", "completed")

# What makes a kind of entry: all that is no number of its own.
KEYS = (
    "state", "retired", "profiling_name", "process_group", "pg_id", "is_p2p", "timeout_ms",
    "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "frames",
)  # fmt: skip


# --- what a value says ------------------------------------------------------------------------------------------------


def frames_of(frames: object) -> tuple[Frame, ...]:
    return tuple(
        Frame(text_of(frame.get("filename")), integer(frame.get("line")), text_of(frame.get("name")))
        for frame in _items(frames)
        if isinstance(frame, dict)
    )


def sizes_of(sizes: object) -> tuple[tuple[int, ...], ...]:
    """Sizes. Anything but a list of lists of counts is unknown, not empty: it must not be compared."""
    if sizes is None:
        return ()
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, (list, tuple)) for size in sizes):
        return UNKNOWN_SIZES
    read = tuple(tuple(integer(n, -1) for n in _items(size)) for size in _items(sizes))
    return UNKNOWN_SIZES if any(n < 0 for size in read for n in size) else read


def types_of(values: object) -> tuple[str, ...]:
    """Data types; ``""`` for an unknown one."""
    return tuple(text_of(value) if isinstance(value, str) else "" for value in _items(values))


def _items(value: object) -> list[Any]:
    return list(value[:MAX_ITEMS]) if isinstance(value, (list, tuple)) else []


def integer(value: object, default: int = 0) -> int:
    if type(value) is int:
        return value if -(1 << 63) <= value < 1 << 63 else default
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isascii():
        return int(value) if value.removeprefix("-").isdigit() else default
    return default


def text_of(value: object) -> str:
    """A text of bounded length that is valid UTF-8; ``""`` for anything else."""
    if not isinstance(value, str):
        return str(value) if type(value) is int and -(1 << 63) <= value < 1 << 63 else ""
    text = value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# --- values that c10d does not write ----------------------------------------------------------------------------------


def _scalar(value: object) -> tuple[object, bool]:
    """The value and True, or None and False, like the other checks."""
    plain = type(value) in SCALARS
    return (value if plain else None), plain


def _list_of(value: object) -> tuple[object, bool]:
    if value is None:
        return None, True
    if type(value) not in LISTS:
        return None, False
    items = _items(value)
    mended = [item if type(item) in SCALARS else None for item in items]
    return mended, len(items) == len(value) and all(type(item) in SCALARS for item in items)  # type: ignore[arg-type]


def _list_of_frames(value: object) -> tuple[object, bool]:
    if value is None:
        return None, True
    items = _items(value)
    return items, type(value) in LISTS and len(items) == len(value)  # type: ignore[arg-type]


def _list_of_sizes(value: object) -> tuple[object, bool]:
    if value is None:
        return None, True
    whole = isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS and all(map(_is_size, value))
    whole = whole and sum(map(len, _items(value))) < MAX_LEAVES // 4
    return (value if whole else UNKNOWN_SIZES), whole


def _is_size(size: object) -> bool:
    return isinstance(size, (list, tuple)) and len(size) <= MAX_ITEMS and {int}.issuperset(map(type, size))


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_state(value: object) -> bool:
    return value is None or (isinstance(value, str) and value in STATES)


def _is_flag(value: object) -> bool:
    return value is None or value is True or value is False or (type(value) is int and value in (0, 1))


def is_number(value: object) -> bool:
    return value is None or (integer(value, -2) != -2 and type(value) is not bool)


def _is_id(value: object) -> bool:
    return value is None or text_of(value) != ""


def _is_group(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and {str}.issuperset(map(type, value)))


def _is_sizes(value: object) -> bool:
    return sizes_of(value) is not UNKNOWN_SIZES


def _is_types(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and {str}.issuperset(map(type, value)))


def _is_stack(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(map(_is_frame, value)))


def _is_frame(frame: object) -> bool:
    if not isinstance(frame, dict):
        return False
    return _is_text(frame.get("filename")) and _is_text(frame.get("name")) and is_number(frame.get("line"))


# In the order of KEYS: what makes a value safe to handle, and whether it says what it should.
MEND: tuple[Callable[[Any], tuple[object, bool]], ...] = (
    _scalar, _scalar, _scalar, _list_of, _scalar, _scalar, _scalar,
    _list_of_sizes, _list_of, _list_of_sizes, _list_of, _list_of_frames,
)  # fmt: skip
FITS: tuple[Callable[[Any], bool], ...] = (
    _is_state, _is_flag, _is_text, _is_group, _is_id, _is_flag, is_number,
    _is_sizes, _is_types, _is_sizes, _is_types, _is_stack,
)  # fmt: skip
