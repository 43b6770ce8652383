"""Decodes JSON and msgpack into records, in any thread. No other module calls msgspec's typed decoding.

msgspec 0.22 collects what it needs of a type at its first use. If a second thread decodes that type, or one that
contains it, before the first is done, the process dies of SIGSEGV. So decoders are made one at a time, and kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_LOCK = threading.Lock()
_DECODERS: dict[tuple[Any, Any], Any] = {}
# A child of fork (``bundle.reading.guard``) must get neither a locked lock nor a type that is half done.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def from_json(data: bytes | str, kind: type[_T]) -> _T:
    """``data`` as a ``kind``. Raises msgspec.DecodeError, or RecursionError."""
    return _decoded(msgspec.json.Decoder, data, kind)


def from_msgpack(data: bytes, kind: type[_T]) -> _T:
    """``data`` as a ``kind``. Raises msgspec.DecodeError, RecursionError, or OverflowError."""
    return _decoded(msgspec.msgpack.Decoder, data, kind)


def from_builtins(value: object, kind: type[_T]) -> _T:
    """Dictionaries, lists and scalars as a ``kind``. Raises msgspec.ValidationError."""
    _decoder(msgspec.json.Decoder, kind)
    return msgspec.convert(value, kind)


def _decoded(maker: Callable[[type[_T]], Any], data: bytes | str, kind: type[_T]) -> _T:
    try:
        return _decoder(maker, kind)(data)
    except UnicodeDecodeError as error:  # msgspec lets that of a text through
        raise msgspec.DecodeError(str(error)) from error


def _decoder(maker: Callable[[type[_T]], Any], kind: type[_T]) -> Callable[[bytes | str], _T]:
    found = _DECODERS.get((maker, kind))
    if found is None:
        with _LOCK:
            found = _DECODERS.setdefault((maker, kind), maker(kind).decode)
    decode: Callable[[bytes | str], _T] = found
    return decode
