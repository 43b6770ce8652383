"""A store in which supervisors meet, in this process: a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DictStore:
    """A store for ``Session``. ``damages`` decides if the value read under a key is damaged.

    Its methods are short, and each is one dictionary operation, so threads can share it.
    """

    own_address, is_local = "127.0.0.1", False

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.damages: Any = lambda key: False

    def _read(self, key: str) -> bytes | None:
        data = self.kept.get(key)
        return data[: len(data) // 2] if data is not None and self.damages(key) else data

    def get(self, key: str, *, deadline_s: float) -> bytes | None:
        return self._read(key)

    def read(self, key: str, *, deadline_s: float) -> bytes:
        return self.kept[key]

    def set(self, key: str, value: bytes, *, deadline_s: float) -> None:
        self.kept[key] = value

    def delete(self, key: str, *, deadline_s: float) -> None:
        self.kept.pop(key, None)

    def add(self, key: str, amount: int, *, deadline_s: float) -> int:
        number = int(self.kept.get(key, b"0")) + amount
        self.kept[key] = str(number).encode()
        return number

    def exchange(self, key: str, value: bytes, other: str, *, deadline_s: float) -> bytes | None:
        self.kept[key] = value
        return self._read(other)

    def compare_set(self, key: str, expected: bytes, value: bytes, *, deadline_s: float) -> bytes:
        if self.kept.get(key, b"") == expected:
            self.kept[key] = value
        return self.kept[key]

    def has(self, keys: Sequence[str], *, deadline_s: float) -> bool:
        return all(key in self.kept for key in keys)

    def read_all(self, keys: Sequence[str], *, deadline_s: float) -> list[bytes]:
        return [self._read(key) or b"" for key in keys]

    def get_all(self, keys: Sequence[str], *, deadline_s: float) -> list[bytes] | None:
        return self.read_all(keys, deadline_s=deadline_s) if self.has(keys, deadline_s=deadline_s) else None

    def close(self) -> None: ...
