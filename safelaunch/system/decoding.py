"""Decodes JSON and msgpack into records, in any thread. No other module calls msgspec's typed decoding.

msgspec 0.22 inspects a type when it is first used. If a second thread decodes this type, or one that contains it,
before the inspection is done, the process dies of SIGSEGV. So decoders are created one at a time, and kept.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from safelaunch.system.errors import CaptureError

_T = TypeVar("_T")
_LOCK = threading.Lock()
_DECODERS: dict[tuple[Any, Any], Any] = {}
# A forked child (``bundle.reading.guard``) must get neither a locked lock nor a half-inspected type.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def from_json(data: bytes | str, kind: type[_T]) -> _T:
    """Decodes ``data`` as a ``kind``. Raises msgspec.DecodeError, or RecursionError."""
    return _decoded(msgspec.json.Decoder, data, kind)


def from_msgpack(data: bytes, kind: type[_T]) -> _T:
    """Decodes ``data`` as a ``kind``. Raises msgspec.DecodeError, RecursionError, or OverflowError."""
    return _decoded(msgspec.msgpack.Decoder, data, kind)


def from_builtins(value: object, kind: type[_T]) -> _T:
    """Converts dictionaries, lists and scalars to a ``kind``. Raises msgspec.ValidationError."""
    _decoder(msgspec.json.Decoder, kind)
    return msgspec.convert(value, kind)


def _decoded(maker: Callable[[type[_T]], Any], data: bytes | str, kind: type[_T]) -> _T:
    try:
        return _decoder(maker, kind)(data)
    except UnicodeDecodeError as error:  # msgspec lets this one through
        raise msgspec.DecodeError(str(error)) from error


def _decoder(maker: Callable[[type[_T]], Any], kind: type[_T]) -> Callable[[bytes | str], _T]:
    decode: Callable[[bytes | str], _T] | None = _DECODERS.get((maker, kind))
    if decode is None:
        with _LOCK:
            decode = _DECODERS.setdefault((maker, kind), maker(kind).decode)
    return decode


# --- untrusted pickles ------------------------------------------------------------------------------------------------
# A hostile pickle can still kill the process that reads it, because the unpickler hashes dictionary keys. So untrusted
# files are read in a child process (``bundle/reading/guard.py``).

MAX_BYTES = 256 << 20


def load_pickle(data: bytes) -> Any:
    """Decodes a Flight Recorder pickle. Raises ``CaptureError`` if it is damaged or larger than ``MAX_BYTES``."""
    if len(data) > MAX_BYTES:
        raise CaptureError(f"a pickle of {len(data)} bytes is too large to read")
    try:
        # A buffer that supports peek lets the unpickler read ahead, which halves the time.
        return _Primitives(io.BufferedReader(io.BytesIO(data), 1 << 16)).load()
    except MemoryError:
        raise  # the caller that set the memory limit handles it
    except Exception as error:  # the unpickler raises nearly any type on damaged input
        raise CaptureError(f"Flight Recorder pickle is damaged: {type(error).__name__}: {error}") from error


class _Primitives(pickle.Unpickler):
    """An unpickler that refuses everything that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no dump does")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to a persistent object, which no dump does")
