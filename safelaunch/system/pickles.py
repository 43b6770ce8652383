"""Reads untrusted pickles. Builds only dicts, lists, tuples, strings and numbers.

A pickle with a hostile *structure* can still kill the process that reads it, because the unpickler hashes dictionary
keys while reading. Untrusted files are therefore read in a child process (``bundle/reading/guard.py``).
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from safelaunch.system.errors import CaptureError

MAX_BYTES = 256 << 20


def load_pickle(data: bytes) -> Any:
    """Decodes a Flight Recorder pickle. Raises ``CaptureError`` if it is damaged or larger than ``MAX_BYTES``."""
    if len(data) > MAX_BYTES:
        raise CaptureError(f"a pickle of {len(data)} bytes, too large to be read")
    try:
        # With a buffer that supports peek, the unpickler reads ahead. That halves the time.
        return _Primitives(io.BufferedReader(io.BytesIO(data), 1 << 16)).load()
    except MemoryError:
        raise  # the caller that set the memory limit handles it
    except Exception as error:  # the unpickler raises nearly any type on damaged input
        raise CaptureError(f"Flight Recorder pickle is damaged: {type(error).__name__}: {error}") from error


class _Primitives(pickle.Unpickler):
    """Refuses everything that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no dump does")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to a persistent object, which no dump does")
