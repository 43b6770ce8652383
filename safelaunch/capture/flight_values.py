"""Checks and converts the untrusted values in a Flight Recorder dump.

A value is hashed, shown or compared only after a check of its type and size.
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


def frames_of(frames: object) -> tuple[Frame, ...]:
    return tuple(
        Frame(text_of(frame.get("filename")), integer(frame.get("line")), text_of(frame.get("name")))
        for frame in _items(frames)
        if isinstance(frame, dict)
    )


def sizes_of(sizes: object) -> tuple[tuple[int, ...], ...]:
    """Returns the sizes; ``UNKNOWN_SIZES``, which is never compared, if ``sizes`` isn't a list of lists of counts."""
    if sizes is None:
        return ()
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, (list, tuple)) for size in sizes):
        return UNKNOWN_SIZES
    counts = tuple(tuple(integer(n, -1) for n in _items(size)) for size in _items(sizes))
    return UNKNOWN_SIZES if any(n < 0 for size in counts for n in size) else counts


def types_of(values: object) -> tuple[str, ...]:
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
    """Returns a string, truncated and made valid UTF-8, or an integer as a string; ``""`` for other values."""
    if not isinstance(value, str):
        return str(value) if type(value) is int and -(1 << 63) <= value < 1 << 63 else ""
    text = value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT]
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# Functions that return the value itself if it is safe to handle, or a safe replacement.


def _scalar(value: object) -> object:
    return value if type(value) in SCALARS else None


def _list_of(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        return None
    plain = [_scalar(item) for item in _items(value)]
    return value if len(plain) == len(value) and SCALARS.issuperset(map(type, value)) else plain


def _list_of_frames(value: object) -> object:
    whole = value is None or (isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS)
    return value if whole else _items(value)


def _list_of_sizes(value: object) -> object:
    whole = isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS and all(map(_is_size, value))
    whole = whole and sum(map(len, _items(value))) < MAX_LEAVES // 4
    return value if whole or value is None else UNKNOWN_SIZES


def _is_size(size: object) -> bool:
    return isinstance(size, (list, tuple)) and len(size) <= MAX_ITEMS and {int}.issuperset(map(type, size))


# Functions that return True for a value that c10d writes.


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_state(value: object) -> bool:
    return value is None or value in STATES


def _is_flag(value: object) -> bool:
    return value in (None, 0, 1)


def is_number(value: object) -> bool:
    return value is None or (integer(value, -2) != -2 and type(value) is not bool)


def _is_id(value: object) -> bool:
    return value is None or text_of(value) != ""


def _is_texts(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and {str}.issuperset(map(type, value)))


def _is_sizes(value: object) -> bool:
    return sizes_of(value) is not UNKNOWN_SIZES


def _is_stack(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(map(_is_frame, value)))


def _is_frame(frame: object) -> bool:
    if not isinstance(frame, dict):
        return False
    return _is_text(frame.get("filename")) and _is_text(frame.get("name")) and is_number(frame.get("line"))


# Fields that make a kind of entry (all but its numbers), with replacement and test.
FIELDS: dict[str, tuple[Callable[[object], object], Callable[[object], bool]]] = {
    "state": (_scalar, _is_state),
    "retired": (_scalar, _is_flag),
    "profiling_name": (_scalar, _is_text),
    "process_group": (_list_of, _is_texts),
    "pg_id": (_scalar, _is_id),
    "is_p2p": (_scalar, _is_flag),
    "timeout_ms": (_scalar, is_number),
    "input_sizes": (_list_of_sizes, _is_sizes),
    "input_dtypes": (_list_of, _is_texts),
    "output_sizes": (_list_of_sizes, _is_sizes),
    "output_dtypes": (_list_of, _is_texts),
    "frames": (_list_of_frames, _is_stack),
}
KEYS = tuple(FIELDS)
